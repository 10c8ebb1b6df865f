"""Where a tensor comes from, in terms that hold in forward and in a recomputation.

The tensors of two runs are different objects. What they have in common is how they came about, and
that is a label: a number computed from the op and from the labels of what went in. What the region
did not make is labelled as it is met: its arguments by their position, others (weights, masks) by
what they are, since those are the same objects in both runs.

A kept result is handed out if what goes in has the same labels: two products that change places are
noticed.

What is detached has the label of what it is detached from. So has what shares its memory and its
layout though no op has made it, as ``.data`` does.

In the recomputation a tensor may be of unknown origin: made by code that we do not see, or made
anew. What comes from it has no label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any
from weakref import ref

import torch
from torch import nn

from recollect._torch.autograd import cast_weight

__all__ = ["Made", "Origins", "differ", "note_results"]

#: By id of a tensor that was made: the tensor itself, weakly, since ids are used again; its label;
#: and what holds its memory, if something does.
Made = dict[int, tuple[Any, int | None, Any]]

_Tensor = torch.Tensor
_CONTAINERS = (list, tuple)

#: The first label. (Not -1 and -2, which have the same hash.)
_FIRST = -3

#: Autocast may have converted a weight before the region or inside it, in either run.
_CAST = "cast"

#: The label of a weight that forward has not seen. It is none of those that it has.
_STRANGER = 0


def note_results(made: Made, out: Any, label: int | None, holder: Any) -> list[Any]:
    """Label the tensors among the results of an op, and return weak references to them."""
    references: list[Any] = []
    for number, result in enumerate(out if isinstance(out, _CONTAINERS) else (out,)):
        if isinstance(result, _Tensor):
            references.append(ref(result))
            own = None if label is None else label + number
            made[id(result)] = (references[-1], own, holder)
    return references


class Origins:
    """The labels of what a region did not make."""

    __slots__ = ("_arguments", "_given", "_learns", "_next", "known")

    def __init__(self) -> None:
        #: By id, as in `Made`.
        self.known: Made = {}
        #: The labels of the arguments, by position.
        self._arguments: list[int | None] = []
        #: Those that are tensors, as in `Made`.
        self._given: list[tuple[Any, int | None, Any]] = []
        self._next = _FIRST
        #: Whether what is met for the first time gets a label.
        self._learns = True

    def add_arguments(self, values: Iterable[Any]) -> None:
        """Know the tensors among ``values`` by their position."""
        for value in values:
            self._arguments.append(self.learn(value) if isinstance(value, _Tensor) else None)
            if isinstance(value, _Tensor):
                self._given.append(self.known[id(value)])

    def learn(self, tensor: _Tensor) -> int | None:
        """The label of ``tensor``, which the region did not make."""
        known = self.known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        label = self._next
        self.known[id(tensor)] = ref(tensor), label, None
        self._next = label - 1
        return label

    def label_alias(self, alias: _Tensor, value: Any, made: Made, holder: Any = None) -> None:
        """Give ``alias``, which is ``value`` under another name, its label, if that has one."""
        known = made.get(id(value)) or self.known.get(id(value))
        if known is not None and known[0]() is value:
            made[id(alias)] = ref(alias), known[1], holder

    def for_rerun(self, values: Iterable[Any]) -> Origins:
        """The same, but for the arguments, which a recomputation may have as other objects."""
        origins = Origins()
        origins._learns = False
        origins.known = self.known.copy()
        for value, label in zip(values, self._arguments, strict=False):
            if label is not None and isinstance(value, _Tensor):
                origins.known[id(value)] = ref(value), label, None
                origins._given.append(origins.known[id(value)])
        return origins

    def label(self, value: Any, made: Made) -> Any:
        """What stands in a label for an input: a number for a tensor, other values as they are.

        None: it is a tensor of unknown origin.
        """
        known = made.get(id(value)) or self.known.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        if isinstance(value, _Tensor):
            weight = cast_weight(value)
            if weight is not None:
                return hash((_CAST, self.label(weight, made), value.dtype))
            label = self._label_of_memory(value, made)
            if label is not None:
                made[id(value)] = ref(value), label, None
                return label
            return self.learn(value) if self._learns else _stranger(value)
        if isinstance(value, _CONTAINERS):
            labels = tuple([self.label(each, made) for each in value])
            return None if None in labels else labels
        return _constant(value)

    def _label_of_memory(self, value: _Tensor, made: Made) -> int | None:
        """The label of what ``value`` is an alias of: one of the latest results, or an argument."""
        looks = _looks_of(value)
        if looks is None or isinstance(value, nn.Parameter):
            return None
        latest = islice(reversed(made.values()), _LATEST)
        for reference, label, _ in chain(latest, self._given):
            tensor = reference()
            if tensor is not None and label is not None and _looks_of(tensor) == looks:
                return label
        return None

    def inputs(
        self,
        key: Any,
        args: tuple[Any, ...],
        kwargs: Any,
        made: Made,
        stranger: Callable[[Any, int | None], Any],
        reads_at: int | None = None,
    ) -> tuple[Any, ...]:
        """An op and what goes in, in labels; None for what is of unknown origin.

        ``stranger`` labels what is neither known nor a plain constant. ``reads_at``: tell what
        holds the memory of the inputs that the op reads them then.
        """
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
                    found.append(value if kind in _PLAIN else stranger(value, reads_at))
                    continue
                found.append(known[1])
                if reads_at is not None and known[2] is not None:
                    known[2].note_use(reads_at)
        return tuple(found)


#: How many results are searched for one that shares memory with a tensor that no op has made.
_LATEST = 64


def _looks_of(tensor: _Tensor) -> tuple[Any, ...] | None:
    """Where the values of ``tensor`` are and how they are read; None if it has no plain memory."""
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


#: What stands for itself.
_PLAIN = frozenset({str, torch.dtype, torch.device, torch.layout, torch.memory_format})

#: In the place of None, which is for tensors of unknown origin.
_NO_VALUE = "no value"

#: In the place of -1, which has the hash of -2.
_MINUS_ONE = "-1"


def _int_label(value: int) -> Any:
    """What stands in a label for an int."""
    return _MINUS_ONE if value == -1 else value


def _stranger(tensor: _Tensor) -> int | None:
    # A weight is the same object in both runs. Others may have been made anew: an alias, a piece
    # of a flat parameter.
    is_weight = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    return _STRANGER if is_weight else None


def _constant(value: Any) -> Any:
    if value is None:
        return _NO_VALUE
    if type(value) is int:
        return _int_label(value)
    if isinstance(value, (bool, float, complex)):
        return str(value)  # True is not 1, 0.0 is not -0.0, and nan is nan
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
