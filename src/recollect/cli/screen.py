"""What a user reads: results on stdout; progress and errors on stderr."""

from __future__ import annotations

import os
import shutil
import sys

__all__ = ["Status", "UsageError", "say"]

_CLEAR = "\r\x1b[K"


class UsageError(Exception):
    """An argument of a command cannot be used as it is. Names it, and shows how it could."""


def say(text: str) -> None:
    """Write a result."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on, as in `recollect explain ... | head`. Python would try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


class Status:
    """Progress, in one line that is overwritten; nothing if stderr is not a terminal.

    A context, which clears the line at its end.
    """

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *exc: object) -> None:
        self._write("")

    def __call__(self, what: str, done: float) -> None:
        """Show that ``done`` of ``what`` is done, from 0 to 1."""
        self._write(f"{what} {done:.0%}" if done else f"{what} ...")

    def _write(self, line: str) -> None:
        if sys.stderr.isatty():
            # A longer line would go on in the next one, which nothing clears.
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"{_CLEAR}{line[:width]}")
            sys.stderr.flush()
