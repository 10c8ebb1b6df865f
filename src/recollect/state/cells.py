"""The variables of enclosing functions that a closure reads, as they were at the call.

    for layer in layers:
        x = checkpoint(lambda x: layer(x), x)

By the time of backward the loop has moved on, and the variable ``layer`` with it: each of the
closures would be rerun with the last layer. So a rerun finds in each cell what was there at the
call. A cell that the region itself assigns to (``nonlocal``) is left alone: like an attribute, what
it counts is the user's.
"""

from __future__ import annotations

from types import CellType
from typing import Any

__all__ = ["Filled", "fill_cells", "moved_cells", "settled_cells"]

#: A cell, and what was or shall be in it.
Filled = tuple[CellType, Any]


class _Empty:
    """In the place of what is in an empty cell."""


_EMPTY = _Empty()


def _read(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def settled_cells(cells: list[Filled]) -> list[Filled]:
    """Those of ``cells``, read before a region, that it left alone."""
    return [(cell, content) for cell, content in cells if _read(cell) is content]


def moved_cells(cells: list[Filled]) -> list[Filled]:
    """Those of ``cells`` that have something else in them now."""
    return [(cell, content) for cell, content in cells if _read(cell) is not content]


def fill_cells(cells: list[Filled]) -> list[Filled]:
    """Put into each cell what belongs there; the result undoes it."""
    before = [(cell, _read(cell)) for cell, _ in cells]
    for cell, content in cells:
        if content is _EMPTY:
            del cell.cell_contents
        else:
            cell.cell_contents = content
    return before
