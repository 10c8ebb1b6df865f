"""Labels that tell where a tensor comes from, the same in forward and in a recomputation.

The tensors of two runs are different objects. They have in common how they were computed: a label
is a hash of the op and of the labels of its inputs. Tensors from outside of the region are labelled
as they are met: arguments by position, others (weights, masks) by identity, since those are the
same objects in both runs.

A kept result is handed out if the inputs have the same labels: two products that change places are
noticed.

A detached tensor has the label of its source. So has a tensor that shares memory and layout with
another although no op has made it, as ``.data`` does.

In the recomputation a tensor may be of unknown origin: made by code that runs no ops, or a new
object in each run. It has no label, and neither has what is computed from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any
from weakref import ref

import torch
from torch import nn

from recollect._torch.autograd import cast_weight

__all__ = ["Made", "Labels", "differ", "note_results"]

#: By id of a tensor: the tensor itself, weakly, since ids are used again; and its label.
Made = dict[int, tuple[Any, int | None]]

_Tensor = torch.Tensor
_CONTAINERS = (list, tuple)

#: The first label. (Not -1 and -2, which have the same hash.)
_FIRST = -3

#: Autocast may have converted a weight before the region or inside it, in either run.
_CAST = "cast"

#: The label of a weight that forward has not seen. It is none of those that it has.
_STRANGER = 0


def note_results(made: Made, out: Any, label: int | None) -> None:
    """Label the tensors among the results of an op."""
    for number, result in enumerate(out if isinstance(out, _CONTAINERS) else (out,)):
        if isinstance(result, _Tensor):
            made[id(result)] = ref(result), None if label is None else label + number


class Labels:
    """The labels of tensors from outside of a region."""

    __slots__ = ("_arguments", "_given", "_learns", "_next", "known")

    def __init__(self) -> None:
        #: By id, as in `Made`.
        self.known: Made = {}
        #: The labels of the arguments, by position.
        self._arguments: list[int | None] = []
        #: Those that are tensors, as in `Made`.
        self._given: list[tuple[Any, int | None]] = []
        self._next = _FIRST
        #: Whether a tensor that is met for the first time gets a label.
        self._learns = True

    def add_arguments(self, values: Iterable[Any]) -> None:
        """Know the tensors among ``values`` by their position."""
        for value in values:
            self._arguments.append(self.learn(value) if isinstance(value, _Tensor) else None)
            if isinstance(value, _Tensor):
                self._given.append(self.known[id(value)])

    def learn(self, tensor: _Tensor) -> int | None:
        """The label of ``tensor``, which comes from outside."""
        known = self.known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        label = self._next
        self.known[id(tensor)] = ref(tensor), label
        self._next = label - 1
        return label

    def label_alias(self, alias: _Tensor, value: Any, made: Made) -> None:
        """Give ``alias`` the label of ``value``, if that has one."""
        known = made.get(id(value)) or self.known.get(id(value))
        if known is not None and known[0]() is value:
            made[id(alias)] = ref(alias), known[1]

    def for_rerun(self, values: Iterable[Any]) -> Labels:
        """The same, but for the arguments, which a recomputation may have as other objects."""
        labels = Labels()
        labels._learns = False
        labels.known = self.known.copy()
        for value, label in zip(values, self._arguments, strict=False):
            if label is not None and isinstance(value, _Tensor):
                labels.known[id(value)] = ref(value), label
                labels._given.append(labels.known[id(value)])
        return labels

    def label(self, value: Any, made: Made) -> Any:
        """The label of an input: a number for a tensor; other values are their own labels.

        None: its origin is unknown.
        """
        known = made.get(id(value)) or self.known.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        if isinstance(value, _Tensor):
            return self._label_of_new(value, made)
        if isinstance(value, _CONTAINERS):
            labels = tuple([self.label(each, made) for each in value])
            return None if None in labels else labels
        return _constant(value)

    def _label_of_new(self, tensor: _Tensor, made: Made) -> int | None:
        """The label of a tensor that is met for the first time."""
        if self._learns and type(tensor) is nn.Parameter:
            return self.learn(tensor)
        weight = cast_weight(tensor)
        if weight is not None:
            return hash((_CAST, self.label(weight, made), tensor.dtype))
        label = self._label_of_memory(tensor, made)
        if label is not None:
            made[id(tensor)] = ref(tensor), label
            return label
        return self.learn(tensor) if self._learns else _stranger(tensor)

    def _label_of_memory(self, value: _Tensor, made: Made) -> int | None:
        """The label of what ``value`` is an alias of: one of the latest results, or an argument."""
        layout = _layout_of(value)
        if layout is None or isinstance(value, nn.Parameter):
            return None
        latest = islice(reversed(made.values()), _LATEST)
        for reference, label in chain(latest, self._given):
            tensor = reference()
            if tensor is not None and label is not None and _layout_of(tensor) == layout:
                return label
        return None

    def inputs(self, key: Any, args: tuple[Any, ...], kwargs: Any, made: Made) -> tuple[Any, ...]:
        """An op and its inputs, in labels; None for those of unknown origin."""
        outside = self.known
        found: list[Any] = [key]
        for value in (*args, *kwargs, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is int:
                found.append(value if value != -1 else _MINUS_ONE)
            elif kind is list and value and type(value[0]) is int:
                found.append(str(value) if -1 in value else tuple(value))
            elif kind is float or kind is bool:
                # To write it takes its time; but 0.0 is not -0.0, nan is nan, and for -1 see below.
                found.append((kind, value) if value > 0 else str(value))
            elif value is None:
                found.append(_NO_VALUE)
            else:
                known = made.get(id(value)) or outside.get(id(value))
                if known is None or known[0]() is not value:
                    found.append(value if kind in _PLAIN else self.label(value, made))
                else:
                    found.append(known[1])
        return tuple(found)


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


#: Types of values that are their own labels.
_PLAIN = frozenset({str, torch.dtype, torch.device, torch.layout, torch.memory_format})

#: In place of None, which says that the origin is unknown.
_NO_VALUE = "no value"

#: In place of -1, which has the hash of -2.
_MINUS_ONE = "-1"


def _stranger(tensor: _Tensor) -> int | None:
    # A weight is the same object in both runs. Others may be new objects in each: an alias, a piece
    # of a flat parameter.
    is_weight = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    return _STRANGER if is_weight else None


def _constant(value: Any) -> Any:
    if value is None:
        return _NO_VALUE
    if type(value) is int:
        return _MINUS_ONE if value == -1 else value
    if isinstance(value, (bool, float, complex)):
        return str(value)  # True is not 1, 0.0 is not -0.0, and nan is nan
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
    """Whether two sets of inputs are certainly not the same."""
    if before == after:
        return False
    if len(before) != len(after):
        return True
    return any(_differ(a, b) for a, b in zip(before, after, strict=True))


def _differ(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return False
    if isinstance(a, tuple) and isinstance(b, tuple):
        return differ(a, b)
    return bool(a != b)
