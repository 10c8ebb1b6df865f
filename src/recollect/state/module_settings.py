"""Plain attributes of a region's modules: rates, flags, names, masks.

``dropout.p = 0.2``, ``adapter.active = "b"`` or ``layer.mask = mask`` between forward and backward
would change what a rerun computes. So an attribute has the value of the call during the rerun.
So has a tensor that the region itself assigns: an average, a hidden state, a cache that it makes.
Other attributes that it assigns, such as a counter, are the user's own: they are left alone, and
the rerun assigns them again.

Constants, functions and tensors without a gradient are restored. Other objects are not, since they
may hold a graph, nor are the contents of lists and dicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from recollect.state.restorers import UNSET, VARIABLES, put_until
from recollect.state.tensors import LARGE, nbytes

_Tensor = torch.Tensor

#: Types of the attributes that are restored, besides tensors.
_CONSTANTS = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
    | {FunctionType, BuiltinFunctionType}
)

_WATCHED = _CONSTANTS | {_Tensor}

#: The attributes that every module has, in the order in which it gets them; and ours.
FIRST = [*nn.Module().__dict__]
INDEX_KEY = "_recollect_index"
STANDARD_ATTRIBUTES = frozenset(FIRST) | {INDEX_KEY}

#: ``forward`` is restored with the mode of the module.
_RESTORED_ELSEWHERE = STANDARD_ATTRIBUTES | {"forward"}

#: Attributes, the name of one, and its value.
_Entry = tuple[dict[str, Any], str, Any]


class Watched:
    """The names of the attributes of one module that are watched."""

    __slots__ = ("get", "names", "size")

    def __init__(self, space: dict[str, Any]) -> None:
        self.learn(space)

    def learn(self, space: dict[str, Any]) -> None:
        """Look at the attributes that there are now."""
        #: How many attributes there are of any kind: if others come, they are looked at again.
        self.size = len(space)
        others = [name for name in [*space] if name not in _RESTORED_ELSEWHERE]
        self.names = [name for name in others if type(space.get(name)) in _WATCHED]
        # Of several names, `itemgetter` returns a tuple.
        self.get = itemgetter(*self.names, self.names[0]) if self.names else _nothing


def _nothing(_: Any) -> tuple[()]:
    return ()


#: The attributes of a module, and the names of those that are watched.
Place = tuple[dict[str, Any], Watched]


class ModuleSettings:
    """The plain attributes of some modules at the call."""

    __slots__ = ("_entries", "_names", "_places", "_values")

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        for space, watched in places:
            if len(space) != watched.size:
                watched.learn(space)
        #: Those to restore, if some of them are not.
        self._entries: list[_Entry] | None = None
        self._names = [watched.names for _, watched in places]
        #: Flat: a copy of each dictionary would take longer.
        values = _values_in(places)
        if values is None or not _CONSTANTS.issuperset(map(type, values)):
            entries = [(s, n, s.get(n, UNSET)) for s, watched in places for n in watched.names]
            self._entries, values = [each for each in entries if _can_be_restored(each)], []
        self._values = values

    def settle(self) -> None:
        """After the call: leave alone what it has assigned."""
        if not self.is_present():
            self._entries = [each for each in self._all() if _is_as_then(each) or _is_state(each)]
            self._values = []

    def is_present(self) -> bool:
        """Whether all have the values that they had; almost always."""
        if self._entries is not None:
            return all(map(_is_as_then, self._entries))
        now = _values_in(self._places)
        then = self._values
        return now is not None and len(now) == len(then) and all(map(is_, now, then))

    def restore(self, stack: ExitStack) -> None:
        """Restore them until ``stack`` closes."""
        for space, name, value in self._all():
            if space.get(name, UNSET) is not value:
                put_until(stack, (space, (name,)), VARIABLES, {name: value})

    def _all(self) -> list[_Entry]:
        if self._entries is not None:
            return self._entries
        found, values = [], iter(self._values)
        for (space, _), names in zip(self._places, self._names, strict=True):
            if names:
                found += [(space, name, next(values)) for name in names]
                next(values)  # that of the first, once more
        return found


def _can_be_restored(entry: _Entry) -> bool:
    value = entry[2]
    return type(value) in _CONSTANTS or (type(value) is _Tensor and not value.requires_grad)


def _is_as_then(entry: _Entry) -> bool:
    space, name, value = entry
    return space.get(name, UNSET) is value


def _is_state(entry: _Entry) -> bool:
    """Whether the region has assigned a tensor, to go on from in its next call."""
    space, name, then = entry
    if then is None:
        return isinstance(space.get(name), _Tensor)
    return type(then) is _Tensor and nbytes(then) <= LARGE


def _values_in(places: Sequence[Place]) -> list[Any] | None:
    """The values of all watched attributes; None if there are others now."""
    found: list[Any] = []
    try:
        for space, watched in places:
            found += watched.get(space)
            if len(space) != watched.size:
                return None
    except KeyError:
        return None
    return found
