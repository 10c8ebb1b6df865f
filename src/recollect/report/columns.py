"""Laying out a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["columns"]


def columns(header: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """``lines`` under ``header``, flush right but for the columns ``left``."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]

    def laid_out(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    rule = ["-" * width for width in widths]
    return "\n".join(map(laid_out, (header, rule, *lines)))
