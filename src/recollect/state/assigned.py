"""Variables and attributes that a region assigns: its rerun has the values of the call again.

An integer that the region counts up by one counts the rerun, too, if it is to do as torch does.
What is not held has a stand-in (`forgotten`). Afterwards everything is as before the rerun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

from recollect.state.forgotten import (
    Where,
    can_be_held,
    has_tensors,
    is_large,
    numbers_of,
    show_outside,
    stand_in,
)
from recollect.state.iterators import successor
from recollect.state.restorers import CELL, UNSET, VARIABLES


class Slot(NamedTuple):
    """A name in a namespace or among attributes; or the cell of a closure, which has no name."""

    owner: Any
    name: str | None = None

    def read(self) -> Any:
        """The value; `UNSET` if there is none."""
        if self.name is None:
            return next(iter(CELL.take(self.owner)), UNSET)
        return self.owner.get(self.name, UNSET)

    def write(self, value: Any) -> None:
        if self.name is None:
            CELL.put(self.owner, [] if value is UNSET else [value])
        else:
            VARIABLES.put((self.owner, (self.name,)), {self.name: value})

    def write_until(self, stack: ExitStack, value: Any) -> None:
        """Assign ``value`` until ``stack`` closes."""
        now = self.read()
        stack.callback(self.write, now)
        show_outside(value, now)
        self.write(value)

    def count_on(self, since: int) -> None:
        """Add what was counted since the call, to a counter that had its value in the rerun."""
        now = self.read()
        if type(now) is int:
            self.write(now + since)


class Assigned:
    """What one region has assigned."""

    __slots__ = ("_counters", "_values")

    def __init__(self) -> None:
        #: Each with its value at the call, or a stand-in.
        self._values: list[tuple[Slot, Any]] = []
        self._counters: list[tuple[Slot, int]] = []

    def __bool__(self) -> bool:
        return bool(self._values or self._counters)

    def add(
        self,
        pairs: Iterable[tuple[Slot, Any]],
        where: Callable[[Slot], Where],
        *,
        counts_reruns: bool,
    ) -> list[int]:
        """Note slots with their values at the call.

        Returns the ``id`` of each tensor that is not held. ``where``: what to call a slot.
        """
        unheld: list[int] = []
        for slot, then in pairs:
            if counts_reruns and type(then) is int and _is_next(then, slot.read()):
                self._counters.append((slot, then))
            elif then is UNSET or (can_be_held(then) and not is_large(then)):
                self._values.append((slot, then))
            elif has_tensors(then):
                unheld += numbers_of(then)
                self._values.append((slot, stand_in(then, where(slot))))
        return unheld

    def add_stand_in(self, slot: Slot, found: Any) -> None:
        """Note a slot whose value at the call is not held."""
        self._values.append((slot, found))

    def restore(self, stack: ExitStack) -> None:
        """Restore the values of the call until ``stack`` closes."""
        for slot, value in self._values:
            slot.write_until(stack, successor(value) or value)  # of an iterator, each rerun has one
        for slot, then in self._counters:
            now = slot.read()
            if type(now) is int:
                stack.callback(slot.count_on, now - then)
                slot.write(then)


def _is_next(then: int, now: Any) -> bool:
    return type(now) is int and now == then + 1
