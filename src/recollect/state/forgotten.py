"""Stands for a tensor that is not held for the rerun. To use its values there is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from recollect._torch.pytree import tree_leaves
from recollect.errors import CheckpointError

_Tensor = torch.Tensor
#: Of tensors, as attributes of modules hold them: a hidden state of several parts.
SEQUENCES = frozenset({tuple, list})
#: What may be asked of it: its form.
_FORM = frozenset(
    {
        *(_Tensor.size, _Tensor.stride, _Tensor.dim, _Tensor.numel, _Tensor.__len__),
        *(_Tensor.element_size, _Tensor.is_floating_point, _Tensor.is_complex),
        *(getattr(_Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "layout")),
    }
)
_DEVICE = _Tensor.device.__get__


class Forgotten(torch.Tensor):
    """A tensor without values.

    Args:
        forgotten_name: The attribute that it was in.
        forgotten_device: Where it was.
    """

    forgotten_name: str
    forgotten_device: torch.device

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the tensor that was in {self.forgotten_name!r}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what the form says; anything else is an error."""
        if func == _DEVICE:
            return args[0].forgotten_device
        if func in _FORM:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        leaves = tree_leaves((args, kwargs))
        found = next(each for each in leaves if isinstance(each, Forgotten))
        name = found.forgotten_name
        raise CheckpointError(
            f"a module of the region has another tensor in its attribute {name!r} than in forward, "
            f"and the region, which runs again for backward, reads that of forward, "
            f"{tuple(found.shape)} of {found.dtype}. recollect holds a tensor that the region "
            "replaces only if it is at most 64 KiB and has no graph. Pass it to the region as an "
            "argument, and return the new one; or, if no gradient goes through it, make it a "
            f"buffer: module.register_buffer({name!r}, ...)"
        )


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
        self.stand_in = space, name, _stand_in(value, name)
        #: The ``id`` of each tensor.
        self.numbers = _numbers_of(value)

    def is_there(self) -> bool:
        """Whether the attribute holds it now."""
        return self._knows(self._space.get(self._name))

    def entry(self) -> tuple[dict[str, Any], str, Any]:
        """The attribute with what it holds now."""
        return self._space, self._name, self._space[self._name]


def has_tensors(value: Any) -> bool:
    """Whether it is a tensor, or a sequence with tensors."""
    return type(value) is _Tensor or (type(value) in SEQUENCES and any(map(has_tensors, value)))


def _stand_in(value: Any, name: str) -> Any:
    if type(value) in SEQUENCES:
        return type(value)(_stand_in(item, name) for item in value)
    if type(value) is not _Tensor:
        return value
    form = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    found = form.as_subclass(Forgotten)
    found.forgotten_name, found.forgotten_device = name, value.device
    return found


def _numbers_of(value: Any) -> list[int]:
    if type(value) in SEQUENCES:
        return [number for item in value for number in _numbers_of(item)]
    return [id(value)] if type(value) is _Tensor else []


def _recognizer(value: Any) -> Callable[[Any], bool]:
    """Tells whether it is given ``value`` again."""
    if type(value) in SEQUENCES:
        kind, items = type(value), [*map(_recognizer, value)]
        return lambda now: (
            type(now) is kind
            and len(now) == len(items)
            and all(knows(item) for knows, item in zip(items, now, strict=True))
        )
    if type(value) is _Tensor:
        weak = ref(value)
        return lambda now: now is weak()
    return lambda now: now is value
