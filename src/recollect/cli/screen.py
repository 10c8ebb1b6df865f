"""What a terminal shows: results on stdout, and on stderr what is being done meanwhile."""

from __future__ import annotations

import os
import shutil
import sys

__all__ = ["Status", "complain", "say"]

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
