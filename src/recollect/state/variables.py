"""Variables of enclosing functions, globals, and plain attributes of modules (`module_settings`).

In a rerun they have the value of the call, if others assign to them after forward, or the region
itself (``nonlocal``, ``global``); afterwards they are as before the rerun. An integer that the
region counts up by one counts the rerun, too, if it is to do as torch does. What is not held has a
stand-in (`forgotten`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

from recollect.state.forgotten import (
    Where,
    has_tensors,
    is_held,
    numbers_of,
    show_outside,
    stand_in,
)
from recollect.state.iterators import successor
from recollect.state.restorers import CELL, UNSET, VARIABLES, Entry, put_until


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

    def count_on(self, since: int) -> None:
        """Add what was counted since the call, to a counter that had its value in the rerun."""
        now = self.read()
        if type(now) is int:
            self.write(now + since)


def _where(slot: Slot) -> Where:
    return Where("a variable of an enclosing function" if slot.name is None else f"{slot.name!r}")


#: What a rerun does with an integer that the region counts up by one: it finds forward's value and
#: counts itself, as in torch; or leaves all as it was before; or finds what is there by then, for
#: torch's composable checkpoint, where modules may tell a rerun by it.
Counters = Literal["counted", "restored", "live"]


class Variables:
    """Some variables, as they were at the call."""

    __slots__ = ("_assigned", "_counters", "_others", "_where")

    def __init__(self, variables: Sequence[Entry], where: Callable[[Slot], Where] = _where) -> None:
        """``where``: what an error calls one of them."""
        #: Those that the region has not assigned.
        self._others = variables
        #: Those that it has, and its rerun will again; and those that it counts up.
        self._assigned: list[tuple[Slot, Any]] = []
        self._counters: list[tuple[Slot, int]] = []
        self._where = where

    def settle(self, *, counters: Counters, added: Iterable[Slot] = ()) -> list[int]:
        """After the call: note what it has assigned, and ``added``.

        Returns the ``id`` of each tensor that is not to be held.
        """
        unheld: list[int] = []
        for slot, then in (*self._split(), *((slot, UNSET) for slot in added)):
            if counters != "restored" and type(then) is int and _is_next(then, slot.read()):
                if counters == "counted":
                    self._counters.append((slot, then))
            elif then is UNSET or is_held(then):
                self.assign(slot, then)
            elif has_tensors(then):
                unheld += numbers_of(then)
                self.assign(slot, stand_in(then, self._where(slot)))
        return unheld

    def assign(self, slot: Slot, value: Any) -> None:
        """Note what a rerun finds where the region assigns."""
        self._assigned.append((slot, value))

    def hold(self, space: dict[str, Any], held: dict[str, Any]) -> None:
        """Note values of names in ``space`` that the region leaves alone."""
        self._others = [*self._others, ((space, (*held,)), VARIABLES, held)]

    def is_present(self) -> bool:
        """Whether all have their values, and keep them in a rerun; almost always."""
        return not (self._assigned or self._counters or self._differing())

    def restore(self, stack: ExitStack) -> None:
        """Restore them until ``stack`` closes."""
        for thing, restorer, held in self._differing():
            put_until(stack, thing, restorer, held)
        for slot, value in self._assigned:
            now = slot.read()
            stack.callback(slot.write, now)
            show_outside(value, now)
            slot.write(successor(value) or value)  # of an iterator, each rerun has one
        for slot, then in self._counters:
            now = slot.read()
            if type(now) is int:
                stack.callback(slot.count_on, now - then)
                slot.write(then)

    def _differing(self) -> list[Entry]:
        return [entry for entry in self._others if not entry[1].same(entry[0], entry[2])]

    def _split(self) -> list[tuple[Slot, Any]]:
        """Those that have other values now, each by itself. The others stay."""
        left: list[Entry] = []
        assigned: list[tuple[Slot, Any]] = []
        for thing, restorer, held in self._others:
            if restorer.same(thing, held):
                left.append((thing, restorer, held))
            elif restorer is VARIABLES:
                space = thing[0]
                same = {name: v for name, v in held.items() if space.get(name, UNSET) is v}
                left.append(((space, (*same,)), VARIABLES, same))
                assigned += [(Slot(space, name), held[name]) for name in held if name not in same]
            else:
                assigned.append((Slot(thing), held[0]))
        self._others = left
        return assigned


def _is_next(then: int, now: Any) -> bool:
    return type(now) is int and now == then + 1
