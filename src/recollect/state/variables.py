"""The variables that a function reads from around it, as they were at the call.

    for layer in layers:
        x = checkpoint(lambda x: layer(x), x)

By the time of backward the loop has moved on, and the variable ``layer`` with it: each of the
functions would be rerun with the last layer. So a rerun finds in each variable, of an enclosing
function or of the module, what was there at the call. One that the region itself assigns to
(``nonlocal``, ``global``) is left alone: like an attribute, what it counts is the user's.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import CellType
from typing import Any

__all__ = ["Variables"]


class _Missing:
    """In the place of a value that is not there."""


_MISSING = _Missing()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _fill(cell: CellType, content: Any) -> None:
    if content is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _assign(namespace: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        del namespace[name]
    else:
        namespace[name] = value


class Variables:
    """Variables of enclosing functions, and global ones, with their values at one moment."""

    __slots__ = ("_cells", "_globals")

    def __init__(
        self,
        cells: list[tuple[CellType, Any]],
        global_variables: list[tuple[dict[str, Any], str, Any]],
    ) -> None:
        self._cells = cells
        self._globals = global_variables

    def settle(self) -> None:
        """Leave out those that the region, which is over, has assigned to."""
        self._cells = [(cell, value) for cell, value in self._cells if _content(cell) is value]
        self._globals = [
            (space, name, value)
            for space, name, value in self._globals
            if space.get(name, _MISSING) is value
        ]

    def restore(self, stack: ExitStack) -> None:
        """Give those that have another value now their former one, until ``stack`` closes."""
        for cell, value in self._cells:
            present = _content(cell)
            if present is not value:
                stack.callback(_fill, cell, present)
                cell.cell_contents = value
        for space, name, value in self._globals:
            present = space.get(name, _MISSING)
            if present is not value:
                stack.callback(_assign, space, name, present)
                space[name] = value
