"""Where a tensor comes from, in terms that hold in forward and in a recomputation.

The tensors of two runs are different objects. What they have in common is how they came about, and
that is a label: a number computed from the op and from the labels of what went in. What the region
did not make is labelled as it is met: its arguments by their position, others (weights, masks) by
what they are, since those are the same objects in both runs. So a kept result is found by what it
is the result of, and not by counting calls: an op that is run only once, to fill a cache, shifts
nothing, and two products that change places do not get each other's result.

In the recomputation a tensor may be of unknown origin: made by code that we do not see, or made
anew. What comes from it has no label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isnan
from typing import Any
from weakref import ref

import torch
from torch import nn

__all__ = ["PLAIN", "Made", "Origins", "constant_or", "differ", "note_results"]

#: By id of a tensor that was made: the tensor itself, weakly, since ids are used again; its label;
#: and what holds its memory, if something does.
Made = dict[int, tuple[Any, int | None, Any]]

_Tensor = torch.Tensor
_CONTAINERS = (list, tuple)

#: The first label. (Not -1 and -2, which have the same hash.)
_FIRST = -3

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

    __slots__ = ("_arguments", "_known", "_learns", "_next")

    def __init__(self) -> None:
        #: By id: the tensor, weakly, and its label.
        self._known: dict[int, tuple[Any, ...]] = {}
        #: The labels of the arguments, by position.
        self._arguments: list[int | None] = []
        self._next = _FIRST
        #: Whether what is met for the first time gets a label.
        self._learns = True

    def add_arguments(self, values: Iterable[Any]) -> None:
        """Know the tensors among ``values`` by their position."""
        for value in values:
            self._arguments.append(self._learn(value) if isinstance(value, _Tensor) else None)

    def _learn(self, tensor: _Tensor) -> int:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return int(known[1])
        label = self._next
        self._known[id(tensor)] = ref(tensor), label
        self._next = label - 1
        return label

    def add_made(self, made: Made) -> None:
        """Know what forward has made and is still alive: a cache, perhaps."""
        alive = {
            key: (tensor, label) for key, (tensor, label, _) in made.items() if tensor() is not None
        }
        self._known = {**alive, **self._known}

    def for_rerun(self, values: Iterable[Any]) -> Origins:
        """The same, but for the arguments, which a recomputation may have as other objects."""
        origins = Origins()
        origins._learns = False
        origins._known = self._known.copy()
        for value, label in zip(values, self._arguments, strict=False):
            if label is not None and isinstance(value, _Tensor):
                origins._known[id(value)] = ref(value), label
        return origins

    def known(self, value: Any) -> int | None:
        """The label of a tensor that has been met before, or is an argument."""
        known = self._known.get(id(value))
        return known[1] if known is not None and known[0]() is value else None

    def label(self, value: Any, made: Made) -> Any:
        """What stands in a label for an input: a number for a tensor, other values as they are.

        None: it is a tensor of unknown origin.
        """
        known: Any = made.get(id(value)) or self._known.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        if isinstance(value, _Tensor):
            return self._learn(value) if self._learns else _stranger(value)
        if isinstance(value, _CONTAINERS):
            return tuple([constant_or(self.label, each, made) for each in value])
        return _constant(value)


#: What stands for itself, and is not looked up.
PLAIN = frozenset({int, bool, float, str, torch.dtype, torch.device, torch.Size})


def constant_or(label: Callable[..., Any], value: Any, *others: Any) -> Any:
    """``value`` if it is a plain constant, or what ``label`` makes of it."""
    return value if type(value) in PLAIN else label(value, *others)


def _stranger(tensor: _Tensor) -> int | None:
    # A weight is the same object in both runs. Others may have been made anew: an alias, a piece
    # of a flat parameter.
    is_weight = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    return _STRANGER if is_weight else None


_NO_VALUE = "no value"


def _constant(value: Any) -> Any:
    if value is None:
        return _NO_VALUE  # not to be taken for a tensor of unknown origin
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
    if isinstance(a, float) and isinstance(b, float) and isnan(a) and isnan(b):
        return False
    return bool(a != b)
