"""Plain attributes of a region's modules: rates, flags, names, masks.

``dropout.p = 0.2``, ``adapter.active = "b"`` or ``layer.mask = mask`` between forward and backward
would change what a rerun computes. So an attribute has the value of the call during the rerun.
So has one that the region itself assigns, such as a hidden state, a table and the length for which
it was made, or a flag that says that there is one; afterwards each is as it was before the rerun.
An integer that the region counts up by one counts the rerun, too, if it is to do as torch does.

Constants, functions and tensors without a gradient are restored, and tuples and lists of them, such
as a hidden state. Of large tensors that the region replaces, and of any with a graph, only the form
is kept: a rerun that reads more is refused (`forgotten`). Other objects are not restored, nor are
the contents of lists and dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from recollect.state.assigned import Assigned, Slot
from recollect.state.forgotten import (
    Unheld,
    Where,
    can_be_held,
    has_tensors,
    in_attribute,
    is_constant,
)
from recollect.state.iterators import StandIn, is_used_up, refusal_to_draw, successor
from recollect.state.restorers import ATOMS, UNSET

_Tensor = torch.Tensor

#: The attributes that every module has, in the order in which it gets them; and ours.
FIRST = [*nn.Module().__dict__]
INDEX_KEY = "_recollect_index"
STANDARD_ATTRIBUTES = frozenset(FIRST) | {INDEX_KEY}

#: ``forward`` is restored with the mode of the module.
_RESTORED_ELSEWHERE = STANDARD_ATTRIBUTES | {"forward"}

#: Attributes, the name of one, and its value.
_Entry = tuple[dict[str, Any], str, Any]


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

    __slots__ = ("_assigned", "_entries", "_names", "_places", "_unheld", "_values")

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        #: The names in each of them; another thread may learn others.
        self._names = [watched.now for _, watched in places]
        #: Those to restore, if some of them are not.
        self._entries: list[_Entry] | None = None
        #: Those that the region has assigned.
        self._assigned = Assigned()
        #: Those with a graph. What the region leaves alone is held from then on.
        self._unheld: list[tuple[Slot, Unheld]] = []
        #: Flat: a copy of each dictionary would take longer.
        values = self._read()
        if values is None:
            self._names = [watched.learn(space) for space, watched in places]
            values = self._read()
        if values is None or not _are_constants(values):
            entries = [(s, n, s.get(n, UNSET)) for s, names in self._spaces() for n in names]
            self._entries, values = [each for each in entries if can_be_held(each[2])], []
            others = [each for each in entries if not can_be_held(each[2])]
            self._unheld = [(Slot(s, n), Unheld(n, v)) for s, n, v in others if has_tensors(v)]
            for s, n, v in others:
                if is_used_up(v):
                    self._assigned.add_stand_in(Slot(s, n), successor(v) or _refusing(n, v))
        self._values = values

    def unheld(self) -> list[int]:
        """The ``id`` of each tensor that is not held during the call."""
        return [number for _, each in self._unheld for number in each.numbers]

    def note_assigned(self, *, counts_reruns: bool) -> list[int]:
        """After the call: note what it has assigned. Returns what is not to be held, by ``id``."""
        if self.is_present():
            return []
        entries, unheld = self._all(), self._unheld
        self._entries, self._unheld, self._values = [], [], []
        assigned = []
        for space, name, value in entries:
            if space.get(name, UNSET) is value:
                self._entries.append((space, name, value))
            else:
                assigned.append((Slot(space, name), value))
        assigned += [(slot, UNSET) for slot in self._added()]
        numbers = self._assigned.add(assigned, _where, counts_reruns=counts_reruns)
        for slot, each in unheld:
            now = slot.read()
            if each.knows(now):
                self._entries.append((slot.owner, str(slot.name), now))
            else:
                self._assigned.add_stand_in(slot, each.stand_in)
                numbers += each.numbers
        return numbers

    def is_present(self) -> bool:
        """Whether all have the values that they had, and keep them in a rerun; almost always."""
        if self._assigned or self._unheld:
            return False
        if self._entries is not None:
            return all(map(_is_as_then, self._entries))
        now = self._read()
        then = self._values
        return now is not None and len(now) == len(then) and all(map(is_, now, then))

    def restore(self, stack: ExitStack) -> None:
        """Restore them until ``stack`` closes."""
        for entry in self._all():
            if not _is_as_then(entry):
                space, name, value = entry
                Slot(space, name).write_until(stack, value)
        self._assigned.restore(stack)

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

    def _all(self) -> list[_Entry]:
        if self._entries is not None:
            return self._entries
        found, values = [], iter(self._values)
        for space, names in self._spaces():
            if names:
                found += [(space, name, next(values)) for name in names]
                next(values)  # that of the first, once more
        return found


def _are_constants(values: list[Any]) -> bool:
    return ATOMS.issuperset(map(type, values)) or all(map(is_constant, {*map(type, values)}))


def _is_as_then(entry: _Entry) -> bool:
    space, name, value = entry
    return space.get(name, UNSET) is value


def _where(slot: Slot) -> Where:
    return in_attribute(str(slot.name))
