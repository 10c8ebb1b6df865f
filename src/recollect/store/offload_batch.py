"""The offloaded tensors of one region, and the order in which backward fetches them.

Backward runs through the regions in reverse order, and recomputes each in the order of forward. So
when a region is recomputed, its tensors are fetched in the order of forward, and then those of the
region before it, which arrive while this one computes. Under a plan the region is the whole model,
and the tensor offloaded last is fetched first.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.modes import unobserved
from recollect._torch.tensors import memory_key, version_of
from recollect.errors import KeptTensorError
from recollect.observer import observing
from recollect.store.host import host_store
from recollect.store.protocol import CompletedStore, Store
from recollect.store.spans import laid_out, shift_of


class OffloadedTensor:
    """A tensor in a store, which drops it when this object is freed."""

    def __init__(self, store: Store, tensor: torch.Tensor, name: str) -> None:
        self._memory = memory_key(tensor)
        self._storage = None if self._memory is None else ref(tensor.untyped_storage())
        is_strided = tensor.layout is torch.strided and not tensor.is_nested
        is_plain = type(tensor) is torch.Tensor and is_strided
        #: Shape, dtype and device, strides and alignment; None if the tensor is not plain.
        self._like = (tensor.shape, tensor.dtype, tensor.device) if is_plain else None
        self._laid = (tensor.stride(), shift_of(tensor)) if is_plain else None
        self._store = store
        #: The name of the store in errors.
        self._name = name
        self._tensor = ref(tensor)
        self._version = version_of(tensor)
        with unobserved():  # the ops of a store belong to no region
            self.handle = store.put(tensor)

    @property
    def memory(self) -> int | None:
        """The `memory_key` of the tensor that was put; None once that is freed."""
        return None if self._storage is None or self._storage() is None else self._memory

    @property
    def is_exposed(self) -> bool:
        """Whether others may write unseen to the tensor that was put: the store may hold it."""
        storage = None if self._storage is None else self._storage()
        return storage is not None and not storage.resizable()

    def get(self) -> torch.Tensor:
        with unobserved():
            tensor = self._store.get(self.handle)
        self._check_fits(tensor)
        if tensor is self._tensor():  # a store may hold it
            if self._is_modified():
                raise KeptTensorError(
                    "Tensor cached during selective activation checkpoint has been mutated: a "
                    f"tensor of shape {list(tensor.shape)} that {self._name} holds was changed in "
                    "place afterwards. Copy it in put(), or replace the in-place operation."
                )
            return tensor
        # A copy may have other strides and another alignment, on which the last bit of results may
        # depend.
        if self._laid is None or self._laid == (tensor.stride(), shift_of(tensor)):
            return tensor
        with unobserved():
            return laid_out(tensor, *self._laid)

    def _check_fits(self, value: Any) -> None:
        """Raise unless ``value`` has the shape, dtype and device of the tensor that was put."""
        found = None
        if isinstance(value, torch.Tensor):
            found = value.shape, value.dtype, value.device
            if self._like in (None, found):
                return
        returned = repr(value) if found is None else _described(*found)
        put = "a tensor" if self._like is None else _described(*self._like)
        raise KeptTensorError(
            f"get() of {self._name} returned {returned} for {put}: it has to return the same tensor"
        )

    def _is_modified(self) -> bool:
        """Whether the tensor that was put is still there, and was written to."""
        tensor = self._tensor()
        return tensor is not None and version_of(tensor) != self._version

    def before_write(self) -> None:
        """Call this before writing to the memory of the tensor that was put."""
        if self._is_modified():
            return  # too late: `get` says so
        with unobserved():
            handle = self._store.before_write(self.handle)
        if handle is not None and handle is not self.handle:  # of a copy
            self.handle = handle
            self._storage = None

    def count_version(self) -> None:
        tensor = self._tensor()
        if tensor is not None:
            self._version = version_of(tensor)
        self._store.count_version(self.handle)

    def __del__(self) -> None:
        if hasattr(self, "handle"):  # the store may have refused the tensor
            self._store.drop(self.handle)


def _described(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"a tensor of shape {list(shape)}, {dtype}, on {device}"


class _Latest(threading.local):
    batch: ReferenceType[OffloadBatch] | None = None


_latest = _Latest()


class OffloadBatch:
    """The offloaded tensors of one region.

    ``store``: the user's store, which gets everything that is kept. ``host``: the store to use
    without one, by default the `host_store`. ``last_first``: backward needs the last tensor first.
    """

    def __init__(
        self, store: Any = None, *, host: Store | None = None, last_first: bool = False
    ) -> None:
        #: Whether the user has chosen a store.
        self.chosen = store is not None
        self._name = type(store).__name__
        if store is None:  # not "or": a store may have a length, of 0 at first
            store = host
        is_complete = store is None or isinstance(store, Store)
        self._store: Store | None = store if is_complete else CompletedStore(store)
        self._last_first = last_first
        self._tensors: list[ReferenceType[OffloadedTensor]] = []
        #: How many of them are released on the device.
        self._released = 0
        #: The last batch before this one that is not empty.
        self._previous = _latest.batch

    def put(self, tensor: torch.Tensor) -> OffloadedTensor:
        if self._store is None:
            self._store = host_store()
        if not self._tensors:
            _latest.batch = ref(self)
        offloaded = OffloadedTensor(self._store, tensor, self._name)
        self._tensors.append(ref(offloaded))
        if observing.observer is not None:
            observing.observer.offloaded(self, tensor, offloaded)
        return offloaded

    def release(self, count: int | None = None) -> None:
        """Free the next ``count`` tensors on the device, or all, the oldest first."""
        end = len(self._tensors) if count is None else self._released + count
        for offloaded in self._tensors[self._released : end]:
            alive = offloaded()
            if self._store is not None and alive is not None:
                self._store.release(alive.handle)
        self._released = min(end, len(self._tensors))  # a call may offload less than planned

    def announce(self) -> None:
        """Prefetch for a region that is about to be recomputed, and for the one before it."""
        self.prefetch()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.prefetch()

    def prefetch(self) -> None:
        if self._store is None or not self._tensors:
            return
        alive = [each for offloaded in self._tensors if (each := offloaded()) is not None]
        if self._last_first:
            alive.reverse()
        self._store.prefetch([each.handle for each in alive])
