"""The arguments of a region, held until its rerun and guarded against change.

A tensor is held as it is, with the version it had at the call. Inside another checkpointed region
(or under any other saved-tensor hooks) it is saved through those hooks instead, as an op would
save it: the outer region then forgets and recomputes it, and a hook that moves saved tensors to
the host moves this one too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from recollect.errors import InputChanged
from recollect.torch_private import save_tensor, saved_tensor_hooks_active

__all__ = ["Inputs"]

_Tensor = torch.Tensor


class _Saved:
    """Marks a place among the arguments whose tensor was saved through hooks."""

    __slots__ = ("handle",)

    def __init__(self, tensor: _Tensor) -> None:
        self.handle = save_tensor(tensor)


class Inputs:
    """Arguments of one call."""

    __slots__ = ("_args", "_guards", "_kwargs", "_saved", "_spoilt")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._spoilt: str | None = None
        self._saved = saved_tensor_hooks_active()
        if self._saved:
            args = tuple(_Saved(a) if isinstance(a, _Tensor) else a for a in args)
            kwargs = {k: _Saved(v) if isinstance(v, _Tensor) else v for k, v in kwargs.items()}
        self._args = args
        self._kwargs = kwargs
        self._guards: list[tuple[_Tensor, int]] = []
        _guard(args, self._guards)
        if kwargs:
            _guard(kwargs.values(), self._guards)

    def settle(self) -> None:
        """Take note of what the region itself changed in place.

        A positional argument that it changed cannot be had again: an error, when backward asks. All
        are let go then, since the history of that one runs through the region, which would hold it.
        A tensor in a keyword or a container is taken for state that the region keeps there (a
        cache, a counter), and guarded from here on.
        """
        for position, (tensor, version) in enumerate(self._guards):
            if tensor._version == version:
                continue
            if tensor.requires_grad or any(tensor is arg for arg in self._args):
                self._spoilt = self._describe_change(tensor, version, "inside the region")
                self._args, self._kwargs, self._guards = (), {}, []
                return
            self._guards[position] = (tensor, tensor._version)

    def recall(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, or ``InputChanged``."""
        if self._spoilt is not None:
            raise InputChanged(self._spoilt)
        for tensor, version in self._guards:
            if tensor._version != version:
                raise InputChanged(self._describe_change(tensor, version, "after the region ran"))
        if not self._saved:
            return self._args, self._kwargs
        args = tuple(a.handle.unpack() if type(a) is _Saved else a for a in self._args)
        kwargs = {k: v.handle.unpack() if type(v) is _Saved else v for k, v in self._kwargs.items()}
        return args, kwargs

    def has(self, tensor: _Tensor) -> bool:
        """Whether ``tensor`` is one of the arguments."""
        return any(tensor is guarded for guarded, _ in self._guards)

    def _describe_change(self, tensor: _Tensor, version: int, when: str) -> str:
        name = _path_to(tensor, self._args, "args") or _path_to(tensor, self._kwargs, "kwargs")
        return (
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {name} of a checkpointed region, [{tensor.type()} "
            f"{list(tensor.shape)}], was changed {when} and is at version {tensor._version}; "
            f"expected version {version} instead. The region would be recomputed from the changed "
            "value. Pass a copy (.clone()) to the region, or replace the in-place operation "
            "(x = x + 1 rather than x += 1)."
        )


def _guard(values: Iterable[Any], guards: list[tuple[_Tensor, int]]) -> None:
    for value in values:
        if isinstance(value, _Tensor):
            if not value.is_inference():  # those have no version, and cannot be changed in place
                guards.append((value, value._version))
        elif isinstance(value, (tuple, list)):
            _guard(value, guards)
        elif isinstance(value, dict):
            _guard(value.values(), guards)


def _path_to(tensor: _Tensor, value: Any, name: str) -> str | None:
    if value is tensor:
        return name
    if isinstance(value, (tuple, list)):
        items: Iterable[tuple[Any, Any]] = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    else:
        return None
    paths = (_path_to(tensor, item, f"{name}[{key!r}]") for key, item in items)
    return next((path for path in paths if path), None)
