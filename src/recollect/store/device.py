"""The store that does nothing: a kept tensor stays where it is.

The plainest store there is, to compare with and to derive from.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["DeviceStore"]


class DeviceStore:
    """Keeps tensors on their device. The handle is the tensor itself."""

    __slots__ = ()

    def put(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, which is its own handle."""
        return tensor

    def get(self, handle: Tensor) -> Tensor:
        """The tensor that was put, itself and not a copy."""
        return handle

    def drop(self, handle: Tensor) -> None:
        """Nothing to do: the tensor lives as long as somebody refers to it."""
