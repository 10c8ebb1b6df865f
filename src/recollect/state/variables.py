"""Variables of enclosing functions, and globals, that a region reads.

They have the value of the call in a rerun, if others assign to them after forward, or the region
itself (``nonlocal``, ``global``); afterwards they are as before the rerun. An integer that the
region counts up by one counts the rerun, too, if it is to do as torch does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from recollect.state.forgotten import (
    Where,
    can_be_held,
    counts,
    has_tensors,
    is_large,
    numbers_of,
    stand_in,
)
from recollect.state.restorers import CELL, UNSET, VARIABLES, Entry, put_until

#: A variable of its own, and its value at the call.
_Single = tuple[Entry, Any]


class Variables:
    """Some variables, as they were at the call."""

    __slots__ = ("_assigned", "_counters", "_others")

    def __init__(self, variables: Sequence[Entry]) -> None:
        #: Those that the region has not assigned to.
        self._others = variables
        #: Those that it has, and its rerun will again; and those that it counts up.
        self._assigned: list[Entry] = []
        self._counters: list[_Single] = []

    def settle(self, *, counts_reruns: bool) -> list[int]:
        """After the call: note what it has assigned. Returns what is not to be held, by ``id``."""
        if not self._differing():
            return []
        self._others, assigned = _split(self._others)
        unheld: list[int] = []
        for entry, then in assigned:
            if counts_reruns and counts(then, _now(entry)):
                self._counters.append((entry, then))
            elif can_be_held(then) and not is_large(then):
                self._assigned.append(entry)
            elif has_tensors(then):
                unheld += numbers_of(then)
                self._assigned.append(_with(entry, stand_in(then, _where(entry))))
        return unheld

    def is_present(self) -> bool:
        """Whether all have their values, and keep them in a rerun; almost always."""
        return not (self._assigned or self._counters or self._differing())

    def restore(self, stack: ExitStack) -> None:
        """Restore them until ``stack`` closes."""
        for thing, restorer, held in (*self._differing(), *self._assigned):
            put_until(stack, thing, restorer, held)
        for entry, then in self._counters:
            now = _now(entry)
            if type(now) is int:
                stack.callback(_count_on, entry, now - then)
                _put(entry, then)

    def _differing(self) -> list[Entry]:
        return [entry for entry in self._others if not entry[1].same(entry[0], entry[2])]


def _split(variables: Iterable[Entry]) -> tuple[list[Entry], list[_Single]]:
    """Those that are as they were; and those that have other values now, each by itself."""
    left: list[Entry] = []
    assigned: list[_Single] = []
    for thing, restorer, held in variables:
        if restorer.same(thing, held):
            left.append((thing, restorer, held))
        elif restorer is VARIABLES:
            space = thing[0]
            same = {name: value for name, value in held.items() if space.get(name, UNSET) is value}
            left.append(((space, (*same,)), VARIABLES, same))
            others = [(name, value) for name, value in held.items() if name not in same]
            assigned += [(((space, (n,)), VARIABLES, {n: value}), value) for n, value in others]
        else:
            assigned.append(((thing, restorer, held), held[0]))
    return left, assigned


def _where(entry: Entry) -> Where:
    thing, restorer, _ = entry
    return Where("a variable of an enclosing function" if restorer is CELL else f"{thing[1][0]!r}")


def _with(entry: Entry, value: Any) -> Entry:
    """The same variable, with another value."""
    thing, restorer, _ = entry
    return thing, restorer, [value] if restorer is CELL else {thing[1][0]: value}


def _put(entry: Entry, value: Any) -> None:
    thing, restorer, held = _with(entry, value)
    restorer.put(thing, held)


def _now(entry: Entry) -> Any:
    """The value now; None if there is none."""
    thing, restorer, _ = entry
    taken = restorer.take(thing)
    return next(iter(taken.values() if isinstance(taken, dict) else taken), None)


def _count_on(entry: Entry, since: int) -> None:
    """Add what was counted since the call to a counter that had its value in the rerun."""
    now = _now(entry)
    if type(now) is int:
        _put(entry, now + since)
