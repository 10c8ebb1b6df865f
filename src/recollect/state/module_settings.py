"""Plain attributes of a region's modules: rates, flags, names, masks.

``dropout.p = 0.2``, ``adapter.active = "b"`` or ``layer.mask = mask`` between forward and backward
would change what a rerun computes. So an attribute has the value of the call during the rerun.
So has one that the region itself assigns, such as a hidden state, a table and the length for which
it was made, or a flag that says that there is one; afterwards each is as it was before the rerun.
An integer that the region counts up by one counts the rerun, too, except under a plan.

Constants, functions and tensors without a gradient are restored, and tuples and lists with
tensors, such as a hidden state. Of large tensors that the region replaces, and of any with a graph,
only the form is kept: a rerun that reads more is refused (`variables`). An attribute that the
region adds is not there in its rerun. Other lists, dicts and objects, and what is in them:
`module_contents`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from recollect.state.iterators import StandIn, is_used_up, refusal_to_draw, successor
from recollect.state.restorers import ATOMS, UNSET, VARIABLES, Entry
from recollect.state.variables import (
    Counters,
    Slot,
    Unheld,
    Variables,
    Where,
    can_be_held,
    has_tensors,
    in_attribute,
    is_constant,
)

_Tensor = torch.Tensor

#: The attributes that every module has, in the order in which it gets them; and ours.
FIRST = [*nn.Module().__dict__]
INDEX_KEY = "_recollect_index"
STANDARD_ATTRIBUTES = frozenset(FIRST) | {INDEX_KEY}

#: ``forward`` is restored with the mode of the module.
_RESTORED_ELSEWHERE = STANDARD_ATTRIBUTES | {"forward"}

#: The names of the attributes of any kind, and how many; the names of those that are watched; and
#: the function that returns their values, and the first of them again. A plain tuple is unpacked
#: faster.
Names = tuple[int, list[str], Callable[[Any], Sequence[Any]], frozenset[str]]


class Watched:
    """The attributes of one module that are watched now. If others come, it learns them."""

    __slots__ = ("now",)

    def __init__(self, space: dict[str, Any]) -> None:
        self.now: Names = self.learn(space)

    def learn(self, space: dict[str, Any]) -> Names:
        """Look at the attributes that there are now."""
        size = len(space)
        others = [name for name in [*space] if name not in _RESTORED_ELSEWHERE]
        kinds = [type(space.get(name)) for name in others]
        pairs = zip(others, kinds, strict=True)
        names = [name for name, kind in pairs if is_constant(kind) or _is_watched(space.get(name))]
        # Of several names, `itemgetter` returns a tuple.
        get = itemgetter(*names, names[0]) if names else _nothing
        self.now = size, names, get, STANDARD_ATTRIBUTES.union(others)
        return self.now


def _is_watched(value: Any) -> bool:
    return has_tensors(value) or is_used_up(value)


def _refusing(name: str, iterator: Any) -> StandIn:
    return StandIn(iterator, refusal_to_draw(f"the attribute {name!r} of a module", iterator))


def _nothing(_: Any) -> tuple[()]:
    return ()


#: The attributes of a module, and the names of those that are watched.
Place = tuple[dict[str, Any], Watched]


class ModuleSettings:
    """The plain attributes of some modules at the call."""

    __slots__ = ("_names", "_places", "_unheld", "_values", "_variables")

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        #: The names in each of them; another thread may learn others.
        self._names = [watched.now for _, watched in places]
        #: They, if they are not all constants, or after the region has assigned some.
        self._variables: Variables | None = None
        #: Those with a graph. What the region leaves alone is held from then on.
        self._unheld: list[tuple[Slot, Unheld]] = []
        #: Flat: a copy of each dictionary would take longer.
        self._values = self._read()
        if self._values is None:
            self._names = [watched.learn(space) for space, watched in places]
            self._values = self._read()
        if self._values is None or not _are_constants(self._values):
            self._take()

    def unheld(self) -> list[int]:
        """The ``id`` of each tensor that is not held during the call."""
        return [number for _, each in self._unheld for number in each.numbers]

    def settle(self, *, counters: Counters) -> list[int]:
        """After the call: note what it has assigned. Returns what is not to be held, by ``id``."""
        if self.is_present():
            return []
        variables, unheld = self._as_variables(), self._unheld
        numbers = variables.settle(counters=counters, added=self._added())
        self._unheld = []
        for slot, each in unheld:
            now = slot.read()
            if each.knows(now):
                variables.hold(slot.owner, {str(slot.name): now})
            else:
                variables.assign(slot, each.stand_in)
                numbers += each.numbers
        return numbers

    def is_present(self) -> bool:
        """Whether all have the values that they had, and keep them in a rerun; almost always."""
        if self._variables is not None:
            return not self._unheld and self._variables.is_present()
        now, then = self._read(), self._values or []
        return now is not None and len(now) == len(then) and all(map(is_, now, then))

    def restore(self, stack: ExitStack) -> None:
        """Restore them until ``stack`` closes."""
        self._as_variables().restore(stack)

    def _take(self) -> None:
        variables, self._values = Variables([], _in_attribute), []
        self._variables = variables
        for space, names in self._spaces():
            held = {}
            for name in names:
                value = space.get(name, UNSET)
                if can_be_held(value):
                    held[name] = value
                elif has_tensors(value):
                    self._unheld.append((Slot(space, name), Unheld(name, value)))
                elif is_used_up(value):
                    found = successor(value) or _refusing(name, value)
                    variables.assign(Slot(space, name), found)
            variables.hold(space, held)

    def _as_variables(self) -> Variables:
        if self._variables is None:
            entries: list[Entry] = []
            values = iter(self._values or ())
            for space, names in self._spaces():
                if names:
                    held = {name: next(values) for name in names}
                    next(values)  # that of the first, once more
                    entries.append(((space, names), VARIABLES, held))
            self._variables, self._values = Variables(entries, _in_attribute), []
        return self._variables

    def _read(self) -> list[Any] | None:
        """The values of all watched attributes; None if there are others now."""
        found: list[Any] = []
        try:
            for (space, _), (size, _, get, _) in zip(self._places, self._names, strict=True):
                if len(space) != size:
                    return None
                found += get(space)
        except KeyError:
            return None
        return found

    def _spaces(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """The attributes of each module, and the names of those that are watched."""
        for (space, _), (_, names, _, _) in zip(self._places, self._names, strict=True):
            yield space, names

    def _added(self) -> list[Slot]:
        """The attributes that were not there at the call."""
        return [
            Slot(space, name)
            for (space, _), (size, _, _, known) in zip(self._places, self._names, strict=True)
            if len(space) != size
            for name in space.keys() - known - _RESTORED_ELSEWHERE
        ]


def _are_constants(values: list[Any]) -> bool:
    return ATOMS.issuperset(map(type, values)) or all(map(is_constant, {*map(type, values)}))


def _in_attribute(slot: Slot) -> Where:
    return in_attribute(str(slot.name))
