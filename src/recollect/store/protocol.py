"""The base class of stores, and the check of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recollect.store.spans import copy_of


class Store:
    """Holds kept tensors from forward to backward. Derive from it and write `put` and `get`.

    The other methods have defaults. Any object with ``put``, ``get`` and ``drop`` works as a store
    too.
    """

    __slots__ = ()

    def put(self, tensor: Tensor) -> Any:
        """Take ``tensor`` and return a handle, of any kind, for the other methods."""
        raise NotImplementedError

    def get(self, handle: Any) -> Tensor:
        """Return the tensor that was put: the same values, shape, strides, dtype and device.

        Called any number of times, from any thread.
        """
        raise NotImplementedError

    def drop(self, handle: Any) -> None:
        """The handle is no longer needed. Called once for each handle, from any thread."""

    def prefetch(self, handles: Sequence[Any]) -> None:
        """These handles are needed next, in this order."""

    def release(self, handle: Any) -> None:
        """Free the device memory of the tensor; the current stream may wait for its copy."""

    def before_write(self, handle: Any) -> Any:
        """Called before the current stream writes to the tensor in place.

        Returns a new handle, or None if the old one stays valid. By default it replaces the entry
        by a copy, because the store may hold the tensor itself.
        """
        copied = self.put(copy_of(self.get(handle)))
        self.drop(handle)
        return copied

    def count_version(self, handle: Any) -> None:
        """The version of the tensor has changed, but not its values."""


_EXAMPLE = """
    class MyStore(recollect.store.Store):
        def put(self, tensor): ...   # take a tensor, return a handle
        def get(self, handle): ...   # the tensor again: same values, shape, strides, dtype, device
        def drop(self, handle): ...  # the handle is no longer needed
"""


def check_store(value: Any, name: str) -> None:
    """Raise if ``value``, passed as the argument ``name``, is not a store."""
    if isinstance(value, type):
        raise TypeError(
            f"{name} is the class {value.__name__}: pass an object, {value.__name__}(), that has "
            f"the methods of a store:\n{_EXAMPLE}"
        )
    missing = [each for each in ("put", "get", "drop") if not callable(getattr(value, each, None))]
    if missing:
        raise TypeError(
            f"{name} must be a store, but {value!r} of type {type(value).__name__} has no "
            f"{', no '.join(missing)}. A store is an object with three methods:\n{_EXAMPLE}"
        )


class CompletedStore(Store):
    """A user's store that does not derive from `Store`, with defaults for what it does not have."""

    def __init__(self, store: Any) -> None:
        for name in ("put", "get", "drop", "prefetch", "release", "before_write", "count_version"):
            if hasattr(store, name):
                vars(self)[name] = getattr(store, name)
