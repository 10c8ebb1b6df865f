"""Plain text tables, for the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out `rows` under `header`: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(cells, widths) for cells in (header, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
    return "  ".join(padded).rstrip()


class Progress:
    """A line that is written over on a terminal; elsewhere, one for each quarter of the way."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._over = sys.stderr.isatty()

    def __call__(self, done: int, note: str = "") -> None:
        """Show that `done` of the total are done."""
        line = f"{self._label} {done}/{self._total} {note}".rstrip()
        finished = done == self._total
        if self._over:
            print(f"\r\x1b[K{line}", end="\n" if finished else "", file=sys.stderr, flush=True)
        elif done * 4 // self._total > (done - 1) * 4 // self._total:
            print(line, file=sys.stderr, flush=True)
