"""What a user reads: results on stdout; progress and errors on stderr."""

from __future__ import annotations

import os
import re
import shutil
import sys
import traceback

__all__ = ["Status", "UsageError", "complain", "names_an_argument", "say"]

_CLEAR = "\r\x1b[K"


def say(text: str) -> None:
    """Write a result."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on, as in `recollect explain ... | head`. Python would try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def complain(command: str, text: str) -> None:
    """Write what went wrong, as argparse does."""
    sys.stderr.write(f"recollect {command}: error: {text}\n")


class Status:
    """What is being done, in one line that is written over; nothing where stderr is no terminal.

    A context: nothing of it is left behind.
    """

    def __init__(self) -> None:
        self._is_seen = sys.stderr.isatty()

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *exc: object) -> None:
        self._write("")

    def __call__(self, what: str, done: float) -> None:
        """Show that ``done`` of ``what`` is done, from 0 to 1."""
        self._write(f"{what} {done:.0%}" if done else f"{what} ...")

    def _write(self, line: str) -> None:
        if self._is_seen:
            # A longer line would go on in the next one, which nothing clears.
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"{_CLEAR}{line[:width]}")
            sys.stderr.flush()


#: How errors begin that recollect raises for what a user has passed.
_ARGUMENT = re.compile(r"(model|batch|loss|optimizer|budget|offload|path)\b")


class UsageError(Exception):
    """An argument of a command cannot be used as it is. Names it, and shows how it could."""


def names_an_argument(error: ValueError) -> bool:
    """Whether recollect raised ``error`` for what it was given, and not a function it called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = str(frame.f_globals.get("__name__")).startswith("recollect.")
    return is_ours and _ARGUMENT.match(str(error)) is not None
