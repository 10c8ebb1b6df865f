"""Labels that tell where a tensor comes from, the same in forward and in a recomputation.

The tensors of two runs are different objects, but computed in the same way: a label is a hash of
the op and of the labels of its inputs. Arguments are labelled by position, other outside tensors
(weights, masks) by identity, since those are the same objects in both runs. A kept result is handed
out if the inputs have the same labels: two products that change places are noticed.

A detached tensor has the label of its source. So has one that shares memory and layout with another
although no op has made it, as ``.data`` does. In the recomputation a tensor may be of unknown
origin: made by code that runs no ops, or a new object in each run. It has no label, and neither has
what is computed from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any
from weakref import ref

import torch
from torch import nn

from recollect._torch.autograd import cast_weight

#: A tensor, weakly, and its label.
_Labelled = tuple[Any, int | None]

_Tensor = torch.Tensor
_Parameter = nn.Parameter
_CONTAINERS = (list, tuple)

#: The first label. (Not -1 and -2, which have the same hash.)
_FIRST = -3

#: Autocast may have converted a weight before the region or inside it, in either run.
_CAST = "cast"

#: The label of a weight that forward has not seen.
_STRANGER = 0


class Labels:
    """The labels of tensors in one run of a region."""

    def __init__(self) -> None:
        #: The results of ops, and tensors from outside of the region. By id, which may be that of a
        #: tensor that is gone.
        self.made: dict[int, _Labelled] = {}
        self.outside: dict[int, _Labelled] = {}
        #: The arguments; None for those that are no tensors.
        self._given: list[_Labelled | None] = []
        self._next = _FIRST
        #: Whether a tensor that is met for the first time gets a label.
        self._learns = True

    def add_arguments(self, values: Iterable[Any]) -> None:
        """Know the tensors among ``values`` by their position."""
        for value in values:
            is_tensor = isinstance(value, _Tensor)
            if is_tensor:
                self._learn(value)
            self._given.append(self.outside[id(value)] if is_tensor else None)

    def note_results(self, out: Any, label: int | None) -> None:
        for number, result in enumerate(out if isinstance(out, _CONTAINERS) else (out,)):
            if isinstance(result, _Tensor):
                self.made[id(result)] = ref(result), None if label is None else label + number

    def for_rerun(self, values: Iterable[Any]) -> Labels:
        """Labels for a recomputation, whose arguments ``values`` may be other objects."""
        labels = Labels()
        labels._learns = False
        labels.outside = self.outside.copy()
        for value, given in zip(values, self._given, strict=False):
            if given is not None and isinstance(value, _Tensor):
                labels.outside[id(value)] = ref(value), given[1]
                labels._given.append(labels.outside[id(value)])
        return labels

    def label_alias(self, alias: _Tensor, value: Any) -> None:
        known = self.made.get(id(value)) or self.outside.get(id(value))
        if known is not None and known[0]() is value:
            self.made[id(alias)] = ref(alias), known[1]

    def inputs(self, key: Any, args: Iterable[Any], kwargs: Any) -> tuple[Any, ...]:
        """An op and its inputs, in labels; None for those of unknown origin."""
        made, outside = self.made, self.outside
        found: list[Any] = [key]
        for value in (*args, *kwargs, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                known = made.get(id(value)) or outside.get(id(value))
                if known is not None and known[0]() is value:
                    found.append(known[1])
                else:
                    found.append(self._label_of_new(value))
            elif kind is list and value and type(value[0]) is int:
                found.append(str(value) if -1 in value else tuple(value))
            elif kind is int:
                found.append(value if value != -1 else _MINUS_ONE)
            elif kind is float or kind is bool:
                # Formatting is slow; but 0.0 is not -0.0, nan is nan, and for -1 see below.
                found.append((kind, value) if value > 0 else str(value))
            elif value is None:
                found.append(_NO_VALUE)
            elif kind in _PLAIN:
                found.append(value)
            elif isinstance(value, _CONTAINERS):
                labels = self.inputs(kind, value, None)
                found.append(None if None in labels else labels)
            else:
                is_tensor = isinstance(value, _Tensor)
                found.append(self._label(value) if is_tensor else _constant(value))
        return tuple(found)

    def _label(self, tensor: _Tensor) -> int | None:
        known = self.made.get(id(tensor)) or self.outside.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        return self._label_of_new(tensor)

    def _label_of_new(self, tensor: _Tensor) -> int | None:
        """The label of a tensor that is met for the first time; None if its origin is unknown."""
        if self._learns and type(tensor) is nn.Parameter:
            return self._learn(tensor)
        weight = cast_weight(tensor)
        if weight is not None:
            return hash((_CAST, self._label(weight), tensor.dtype))
        label = self._label_of_memory(tensor)
        if label is not None:
            self.made[id(tensor)] = ref(tensor), label
            return label
        if self._learns:
            return self._learn(tensor)
        # A weight is the same object in both runs. Others may be new objects in each: an alias, a
        # piece of a flat parameter.
        is_weight = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
        return _STRANGER if is_weight else None

    def _learn(self, tensor: _Tensor) -> int | None:
        known = self.outside.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = self.outside[id(tensor)] = ref(tensor), self._next
            self._next -= 1
        return known[1]

    def _label_of_memory(self, value: _Tensor) -> int | None:
        """The label of what ``value`` is an alias of: one of the latest results, or an argument."""
        layout = _layout_of(value)
        if layout is None or isinstance(value, nn.Parameter):
            return None
        latest = islice(reversed(self.made.values()), _LATEST)
        for reference, label in chain(latest, filter(None, self._given)):
            tensor = reference()
            if tensor is not None and label is not None and _layout_of(tensor) == layout:
                return label
        return None


#: How many results are searched for one that shares memory with a tensor that no op has made.
_LATEST = 64


def _layout_of(tensor: _Tensor) -> tuple[Any, ...] | None:
    """Address and layout of ``tensor``; None if it has no plain memory."""
    if type(tensor) is not _Tensor or tensor.layout is not torch.strided:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        return None
    if not address:
        return None
    flags = tensor.is_conj(), tensor.is_neg()
    return address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, flags


#: Types of inputs that are their own labels.
_PLAIN = frozenset({str, torch.dtype, torch.device, torch.layout, torch.memory_format})

#: In place of None, which says that the origin is unknown.
_NO_VALUE = "no value"

#: In place of -1, which has the hash of -2.
_MINUS_ONE = "-1"


def _constant(value: Any) -> Any:
    """The label of an input of a rarer type: the value itself, if it can be hashed."""
    if isinstance(value, (float, complex)):
        return str(value)
    if isinstance(value, torch.ScriptObject):
        # A process group, the handle of a profiler's range: they refuse to be compared, and may be
        # new objects in each run.
        return None
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def differ(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether two sets of inputs are certainly not the same; those of unknown origin may be."""
    if before == after:
        return False
    if len(before) != len(after):
        return True
    for a, b in zip(before, after, strict=True):
        nested = isinstance(a, tuple) and isinstance(b, tuple)
        if a is not None and b is not None and (differ(a, b) if nested else a != b):
            return True
    return False
