"""Output: results on stdout; progress and errors on stderr."""

from __future__ import annotations

import os
import re
import shutil
import sys

_CLEAR = "\r\x1b[K"
#: Colours of a terminal: those of the page, as far as there are any.
_COLOURS = {"kept": 34, "input": 36, "recomputed": 33, "offloaded": 35, "NO": 31, "WRONG": 31}
_WORDS = re.compile(rf"-{{3,}}|\b(?:{'|'.join(_COLOURS)})\b")


class UsageError(Exception):
    """An argument of a command cannot be used as it is. Names it, and shows how it could."""


def say(text: str, *, plain: bool = False) -> None:
    """Write a result, in colour if a person reads it on a terminal."""
    try:
        sys.stdout.write(f"{text if plain else _coloured(text)}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on, as in `recollect explain ... | head`. Python would try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _coloured(text: str) -> str:
    """``text`` with its fates in colours, and rules dimmed. ``NO_COLOR`` switches that off."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    title, newline, rest = text.partition("\n")
    rest = _WORDS.sub(lambda word: f"\x1b[{_COLOURS.get(word[0], 2)}m{word[0]}\x1b[0m", rest)
    return f"\x1b[1m{title}\x1b[0m{newline}{rest}" if newline else text


class Status:
    """Progress, in one line that is overwritten; nothing if stderr is not a terminal.

    A context, which clears the line at its end.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._is_shown = sys.stderr.isatty() and not quiet

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *exc: object) -> None:
        self._write("")

    def __call__(self, what: str, done: float) -> None:
        """Show that ``done`` of ``what`` is done, from 0 to 1."""
        self._write(f"{what} {done:.0%}" if done else f"{what} ...")

    def _write(self, line: str) -> None:
        if self._is_shown:
            # A longer line would go on in the next one, which nothing clears.
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"{_CLEAR}{line[:width]}")
            sys.stderr.flush()
