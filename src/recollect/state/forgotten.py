"""What of an attribute or a variable is held for a rerun, if the region replaces it.

Constants, and tensors without a graph that are not large, are held, and tuples and lists of them.
For others there is a stand-in: to use its values is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple
from weakref import ref

import torch

from recollect._torch.modes import unobserved
from recollect._torch.pytree import tree_leaves
from recollect.errors import CheckpointError
from recollect.state.restorers import ATOMS
from recollect.state.tensors import LARGE, nbytes

_Tensor = torch.Tensor
#: Of tensors, as a hidden state of several parts; and how deep these are, and how long, at most.
_SEQUENCES = frozenset({tuple, list})
_DEPTH, _ITEMS = 3, 64
#: What may be asked of it: its form.
_FORM = frozenset(
    {
        *(_Tensor.size, _Tensor.stride, _Tensor.dim, _Tensor.numel, _Tensor.__len__),
        *(_Tensor.element_size, _Tensor.is_floating_point, _Tensor.is_complex),
        *(getattr(_Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "layout")),
    }
)
_DEVICE = _Tensor.device.__get__
_REQUIRES_GRAD = operator.attrgetter("requires_grad.__get__")(_Tensor)
#: Another tensor of its form, as for a state that is reset.
_MAKERS = frozenset(
    {
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
        *(_Tensor.new_zeros, _Tensor.new_ones, _Tensor.new_empty, _Tensor.new_full),
    }
)


class Forgotten(torch.Tensor):
    """A tensor without values.

    Args:
        forgotten_from: What it was in.
        forgotten_device: The device that it was on.
        forgotten_grad: Whether it required a gradient.
        form: A tensor of its form, on the meta device.
    """

    forgotten_from: Where
    forgotten_device: torch.device
    forgotten_grad: bool
    form: torch.Tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the tensor that was in {self.forgotten_from.text}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what the form says; anything else is an error."""
        if func == _DEVICE:
            return args[0].forgotten_device
        if func == _REQUIRES_GRAD:
            return args[0].forgotten_grad
        if func in _MAKERS and args and isinstance(args[0], Forgotten):
            on_device = {"device": args[0].forgotten_device}
            return func(args[0].form, *args[1:], **(on_device | (kwargs or {})))
        if func in _FORM:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        leaves = tree_leaves((args, kwargs))
        found = next(each for each in leaves if isinstance(each, Forgotten))
        where = found.forgotten_from
        raise CheckpointError(
            f"the region has replaced the tensor in {where.text} since forward, or others have. It "
            f"runs again for backward, and reads the one of forward, {tuple(found.shape)} of "
            f"{found.dtype}. recollect holds a tensor that a region replaces only if it is at most "
            "64 KiB and has no graph. Pass it to the region as an argument, and return the new one"
            + where.advice
        )


class Where(NamedTuple):
    """What a tensor was in, and what else to do than to pass it."""

    text: str
    advice: str = ""


def in_attribute(name: str) -> Where:
    """In an attribute of a module."""
    buffer = f"module.register_buffer({name!r}, ...)"
    advice = f"; or, if no gradient goes through it, make it a buffer: {buffer}"
    return Where(f"the attribute {name!r} of a module", advice)


class Unheld:
    """What an attribute of a module holds at a call: a tensor, or a sequence with tensors.

    No tensor is held, only what knows it again.

    Args:
        space: The attributes of the module.
        name: Of the attribute.
        value: What it holds.
    """

    def __init__(self, space: dict[str, Any], name: str, value: Any) -> None:
        self._space, self._name, self._knows = space, name, _recognizer(value)
        #: Takes its place in a rerun, as an attribute of the module.
        self.stand_in = space, name, stand_in(value, in_attribute(name))
        #: The ``id`` of each tensor.
        self.numbers = numbers_of(value)

    def is_there(self) -> bool:
        """Whether the attribute holds it now."""
        return self._knows(self._space.get(self._name))

    def entry(self) -> tuple[dict[str, Any], str, Any]:
        """The attribute with what it holds now."""
        return self._space, self._name, self._space[self._name]


# --- what values hold -----------------------------------------------------------------------------


def is_constant(kind: type) -> bool:
    """Whether values of a type hold nothing that can change."""
    return kind in ATOMS or issubclass(kind, Enum)


def counts(then: Any, now: Any) -> bool:
    """Whether a region that has replaced ``then`` by ``now`` counts with it."""
    return type(then) is int and type(now) is int and now == then + 1


def has_tensors(value: Any) -> bool:
    """Whether it is a tensor, or a sequence with tensors. Nested ones have no form to stand in."""
    tensors = [leaf for leaf in _leaves(value) if type(leaf) is _Tensor]
    return bool(tensors) and not any(tensor.is_nested for tensor in tensors)


def can_be_held(value: Any) -> bool:
    """Whether no graph is held with it."""
    return all(
        not leaf.requires_grad if type(leaf) is _Tensor else is_constant(type(leaf))
        for leaf in _leaves(value)
    )


def is_large(value: Any) -> bool:
    """Whether its tensors are larger than what is held."""
    return sum(nbytes(leaf) for leaf in _leaves(value) if type(leaf) is _Tensor) > LARGE


def numbers_of(value: Any) -> list[int]:
    """The ``id`` of a tensor, or of those in a sequence."""
    return [id(leaf) for leaf in _leaves(value) if type(leaf) is _Tensor]


def stand_in(value: Any, where: Where, depth: int = _DEPTH) -> Any:
    """What takes the place of a tensor, or of those in a sequence."""
    if _has_parts(value, depth):
        return type(value)(stand_in(item, where, depth - 1) for item in value)
    if type(value) is not _Tensor:
        return value
    with unobserved():  # a recording around the region would be one of tensors on the meta device
        form = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        found = form.as_subclass(Forgotten)
    found.forgotten_from, found.forgotten_device = where, value.device
    found.forgotten_grad, found.form = value.requires_grad, form
    return found


def _has_parts(value: Any, depth: int) -> bool:
    return depth > 0 and type(value) in _SEQUENCES and len(value) <= _ITEMS


def _leaves(value: Any, depth: int = _DEPTH) -> list[Any]:
    """The parts of a sequence, and of those in it; of anything else, itself."""
    if _has_parts(value, depth):
        return [leaf for item in value for leaf in _leaves(item, depth - 1)]
    return [value]


def _recognizer(value: Any) -> Callable[[Any], bool]:
    """Tells whether it is given ``value`` again. Holds no tensor."""
    leaves = _leaves(value)
    kind, numbers = type(value), [*map(id, leaves)]
    weak = [ref(leaf) for leaf in leaves if type(leaf) is _Tensor]

    def is_it(now: Any) -> bool:
        is_alive = all(each() is not None for each in weak)  # else another one may have the ``id``
        return is_alive and type(now) is kind and [*map(id, _leaves(now))] == numbers

    return is_it
