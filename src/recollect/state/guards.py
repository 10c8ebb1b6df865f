"""Guards on the tensors that a region reads beside its arguments: parameters, buffers, closures.

A rerun reads them again. If one was changed in place meanwhile it would compute with the new value,
where plain autograd raises. So versions are compared before a rerun, and one that differs is an
error if the rerun uses the tensor: the model that a closure holds may have other parameters, which
may change.

A parameter whose ``data`` was exchanged, emptied or filled has the version it had: sharding engines
do this all the time, and ensure that the values are the same.
"""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.modes import DispatchMode
from recollect.checks.changed_input import used_tensor_changed
from recollect.errors import InputChanged

__all__ = ["Guards", "UseOfChanged"]

#: What is wrong with a tensor.
Changes = dict[int, tuple[torch.Tensor, str]]


class Guards:
    """The versions of the tensors that one region can read, and should leave alone."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        try:
            versions = [tensor._version for tensor in tensors]
        except RuntimeError:  # inference tensors have no version, and do not change
            tensors = [tensor for tensor in tensors if not tensor.is_inference()]
            versions = [tensor._version for tensor in tensors]
        self._tensors = tensors
        self._versions = versions

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Guard ``tensors`` too, from here on."""
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._tensors += tensors
        self._versions += [tensor._version for tensor in tensors]

    def changes(self) -> Changes | None:
        """The tensors that were changed in place since; None, almost always."""
        if [tensor._version for tensor in self._tensors] == self._versions:
            return None
        return {
            id(tensor): (tensor, f"is at version {tensor._version}; expected version {version}")
            for tensor, version in zip(self._tensors, self._versions, strict=True)
            if tensor._version != version
        }


class UseOfChanged(DispatchMode):
    """Runs around a rerun and raises if that uses a tensor that has changed."""

    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self._changes = changes
        #: Kept, since the function may swallow what is raised inside of it.
        self.error: InputChanged | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if id(tensor) in self._changes:
                    changed, difference = self._changes[id(tensor)]
                    self.error = used_tensor_changed(changed, func, difference)
                    raise self.error
        return func(*args, **(kwargs or {}))
