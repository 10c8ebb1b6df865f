"""Variables of enclosing functions, and globals, that a region reads.

They have the value of the call in a rerun, if others assign to them after forward, or the region
itself (``nonlocal``, ``global``); afterwards they are as before the rerun. An integer that the
region counts up by one counts the rerun, too, if it is to do as torch does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from recollect.state.assigned import Assigned, Slot
from recollect.state.forgotten import Where
from recollect.state.restorers import UNSET, VARIABLES, Entry, put_until


class Variables:
    """Some variables, as they were at the call."""

    __slots__ = ("_assigned", "_others")

    def __init__(self, variables: Sequence[Entry]) -> None:
        #: Those that the region has not assigned to, and those that it has.
        self._others = variables
        self._assigned = Assigned()

    def note_assigned(self, *, counts_reruns: bool) -> list[int]:
        """After the call: note what it has assigned. Returns what is not to be held, by ``id``."""
        if not self._differing():
            return []
        self._others, assigned = _split(self._others)
        return self._assigned.add(assigned, _where, counts_reruns=counts_reruns)

    def is_present(self) -> bool:
        """Whether all have their values, and keep them in a rerun; almost always."""
        return not (self._assigned or self._differing())

    def restore(self, stack: ExitStack) -> None:
        """Restore them until ``stack`` closes."""
        for thing, restorer, held in self._differing():
            put_until(stack, thing, restorer, held)
        self._assigned.restore(stack)

    def _differing(self) -> list[Entry]:
        return [entry for entry in self._others if not entry[1].same(entry[0], entry[2])]


def _split(variables: Iterable[Entry]) -> tuple[list[Entry], list[tuple[Slot, Any]]]:
    """Those that are as they were; and those that have other values now, each by itself."""
    left: list[Entry] = []
    assigned: list[tuple[Slot, Any]] = []
    for thing, restorer, held in variables:
        if restorer.same(thing, held):
            left.append((thing, restorer, held))
        elif restorer is VARIABLES:
            space = thing[0]
            same = {name: value for name, value in held.items() if space.get(name, UNSET) is value}
            left.append(((space, (*same,)), VARIABLES, same))
            assigned += [(Slot(space, name), held[name]) for name in held if name not in same]
        else:
            assigned.append((Slot(thing), held[0]))
    return left, assigned


def _where(slot: Slot) -> Where:
    return Where("a variable of an enclosing function" if slot.name is None else f"{slot.name!r}")
