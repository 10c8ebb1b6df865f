"""What of an attribute or a variable is held for a rerun, if the region replaces it.

Constants, and tensors without a graph that are not large, are held, and tuples and lists of them.
For others there is a stand-in: to use its values is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple
from weakref import ref

import torch

from recollect._torch.autograd import current_graph_task
from recollect._torch.modes import unobserved
from recollect._torch.pytree import tree_leaves, tree_map_only
from recollect.errors import CheckpointError
from recollect.settings import recomputing
from recollect.state.restorers import ATOMS
from recollect.state.tensors import LARGE, nbytes

_Tensor = torch.Tensor
#: Of tensors, as a hidden state of several parts; and how deep these are, and how long, at most.
_SEQUENCES = frozenset({tuple, list})
_DEPTH, _ITEMS = 3, 64


def _getters(*names: str) -> Iterator[Any]:
    """The functions behind attributes of a tensor."""
    return (operator.attrgetter(f"{name}.__get__")(_Tensor) for name in names)


#: The number of the argument of which a function asks only for shape, strides or dtype.
_FORM = {
    **dict.fromkeys(
        (
            *(_Tensor.size, _Tensor.stride, _Tensor.dim, _Tensor.ndimension, _Tensor.__len__),
            *(_Tensor.numel, _Tensor.nelement, _Tensor.element_size, _Tensor.is_contiguous),
            *(_Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_signed),
            *(torch.numel, torch.is_floating_point, torch.is_complex),
            *_getters("shape", "ndim", "dtype", "layout", "itemsize", "nbytes"),
        ),
        0,
    ),
    **dict.fromkeys((_Tensor.view_as, _Tensor.reshape_as, _Tensor.expand_as), 1),
}
#: The same for the device, with or without the dtype.
_DEVICE = {
    **dict.fromkeys((*_getters("device", "is_cuda", "is_cpu", "is_meta"), _Tensor.get_device), 0),
    **dict.fromkeys((_Tensor.to, _Tensor.type_as), 1),
}
(_REQUIRES_GRAD,) = _getters("requires_grad")
#: Another tensor of its form, as for a state that is reset, or a mask.
_MAKERS = frozenset(
    {
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
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
        outside: Gives what is in its place outside of the rerun.
    """

    forgotten_from: Where
    forgotten_device: torch.device
    forgotten_grad: bool
    form: torch.Tensor
    outside: Callable[[], Any]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the tensor that was in {self.forgotten_from.text}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what the form says; anything else is an error."""
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func == _REQUIRES_GRAD:
            return first.forgotten_grad
        if func in _MAKERS and isinstance(first, Forgotten):
            return func(first.form, *args[1:], **{"device": first.forgotten_device, **kwargs})
        for positions, stand_for in (_FORM, _form_of), (_DEVICE, _empty_like):
            number = positions.get(func, len(args))
            if number < len(args) and isinstance(args[number], Forgotten):
                return func(*args[:number], stand_for(args[number]), *args[number + 1 :], **kwargs)
        if not recomputing.depth and current_graph_task() == _OUTSIDE_OF_BACKWARD:
            # Another thread than that of the rerun.
            others = tree_map_only(Forgotten, _value_outside, (args, kwargs))
            if not any(isinstance(each, Forgotten) for each in tree_leaves(others)):
                return func(*others[0], **others[1])
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


class ForgottenObject:
    """Stands in for an object or a container that holds a graph: to use it is an error."""

    __slots__ = ("_kind", "_where")

    def __init__(self, kind: str, where: Where) -> None:
        """``kind``: the name of its class."""
        self._kind = kind
        self._where = where

    def _refuse(self, *_: Any) -> Any:
        raise CheckpointError(
            f"the region has replaced an object ({self._kind}) in {self._where.text} since "
            "forward. It runs again for backward, and reads that of forward, which holds tensors "
            "with a graph and is not held. Pass it to the region as an argument, and return the "
            "new one"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __call__ = _refuse


_OUTSIDE_OF_BACKWARD = -1


def _form_of(found: Forgotten) -> torch.Tensor:
    return found.form


def _empty_like(found: Forgotten) -> torch.Tensor:
    """A tensor without elements, of the same device and dtype."""
    with unobserved():
        return torch.empty(0, dtype=found.form.dtype, device=found.forgotten_device)


def _value_outside(found: Forgotten) -> Any:
    value = found.outside()
    return found if value is None else value


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

    No tensor is held, only what knows it again, and a stand-in.
    """

    def __init__(self, name: str, value: Any) -> None:
        """``name``: that of the attribute."""
        self.knows = _recognizer(value)
        self.stand_in = stand_in(value, in_attribute(name))
        #: The ``id`` of each tensor.
        self.numbers = numbers_of(value)


# --- what values hold -----------------------------------------------------------------------------


def is_constant(kind: type) -> bool:
    """Whether values of a type hold nothing that can change."""
    return kind in ATOMS or issubclass(kind, Enum)


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


def _is_large(value: Any) -> bool:
    """Whether its tensors are larger than what is held."""
    return sum(nbytes(leaf) for leaf in _leaves(value) if type(leaf) is _Tensor) > LARGE


def is_held(value: Any) -> bool:
    """Whether it is held if the region replaces it."""
    return can_be_held(value) and not _is_large(value)


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
    found.outside = _nothing
    return found


def show_outside(value: Any, now: Any) -> None:
    """Have other threads compute with ``now`` where they find the stand-ins in ``value``."""
    for found, outside in zip(_leaves(value), _leaves(now), strict=False):
        if isinstance(found, Forgotten):
            found.outside = ref(outside) if isinstance(outside, _Tensor) else _nothing


def _nothing() -> None:
    pass


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
