"""What one region has put into a store, and when it will be wanted again.

Backward goes through the regions in the opposite order of forward, and through the tensors of each
in the order of forward. So as a region is recomputed, its own tensors are asked for, and then those
of the region before it: they are on their way while this one computes.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.modes import raw_memory, unobserved
from recollect._torch.tensors import memory_key, storage_key
from recollect.errors import KeptTensorError
from recollect.store.handles import version_of
from recollect.store.host import host_store
from recollect.store.protocol import Store
from recollect.store.spans import copy_of, laid_out, shift_of

__all__ = ["Deposit", "Looks", "Parcel", "looks_of"]

#: Shape, strides, dtype and device.
Looks = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def looks_of(tensor: torch.Tensor) -> Looks | None:
    """What ``tensor`` looks like; None if it is no plain tensor."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _fits(tensor: torch.Tensor, looks: Looks) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) == (looks[0], looks[2], looks[3])


def _described(value: Any) -> str:
    looks = looks_of(value) if isinstance(value, torch.Tensor) else value
    if not isinstance(looks, tuple):
        return f"{value!r}"
    shape, _, dtype, device = looks
    return f"a tensor of shape {list(shape)}, {dtype}, on {device}"


class Parcel:
    """A tensor in a store. Dropped there when nobody holds this any more."""

    __slots__ = (
        "__weakref__",
        "_address",
        "_handle",
        "_layout",
        "_memory",
        "_shift",
        "_storage",
        "_store",
        "_tensor",
        "_version",
        "looks",
    )

    def __init__(self, store: Store, tensor: torch.Tensor) -> None:
        self._memory = storage_key(tensor)
        self._address = memory_key(tensor)
        self._storage = None if self._memory is None else ref(tensor.untyped_storage())
        self.looks = looks_of(tensor)
        self._shift = 0 if self.looks is None else shift_of(tensor)
        self._store = store
        self._tensor = ref(tensor)
        self._version = version_of(tensor)
        self._layout: Any = None
        if not hasattr(store, "before_write") and tensor.layout is torch.strided:
            self._layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        with unobserved():  # what a store does is no op of any region
            self._handle = store.put(tensor)

    @property
    def memory(self) -> int | None:
        """Which memory the tensor that was put is; None if it is gone, and others may have it."""
        return None if self._storage is None or self._storage() is None else self._memory

    @property
    def address(self) -> int | None:
        """The same by its address, under which others may have handed it out."""
        return None if self.memory is None else self._address

    @property
    def handle(self) -> Any:
        """What the store knows it by."""
        return self._handle

    def get(self) -> torch.Tensor:
        """The tensor."""
        with unobserved():
            tensor = self._store.get(self._handle)
        if not isinstance(tensor, torch.Tensor) or (
            self.looks is not None and not _fits(tensor, self.looks)
        ):
            raise KeptTensorError(
                f"get() of {type(self._store).__name__} returned {_described(tensor)} for "
                f"{_described(self.looks)}: it has to give back the same tensor"
            )
        # A store may simply hold what it is given.
        if tensor is self._tensor() and self._is_spoilt():
            raise KeptTensorError(
                "Tensor cached during selective activation checkpoint has been mutated: a tensor "
                f"of shape {list(tensor.shape)} that {type(self._store).__name__} holds was "
                "changed in place afterwards. Let put() copy it, or replace the in-place operation."
            )
        return self._laid_out(tensor)

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a store gave back, laid out as it was: a copy may have other strides.

        What is computed from it may depend on that, to the last bit.
        """
        if self.looks is None or tensor is self._tensor():
            return tensor
        if tensor.stride() == self.looks[1] and shift_of(tensor) == self._shift:
            return tensor
        with unobserved():
            return laid_out(tensor, self.looks[1], self._shift)

    def _is_spoilt(self) -> bool:
        """Whether the tensor that was put is still there, and was written to."""
        tensor = self._tensor()
        return tensor is not None and version_of(tensor) != self._version

    def before_write(self, tensor: torch.Tensor) -> None:
        """To be called before ``tensor``, on the memory of what was put, is changed in place."""
        prepare = getattr(self._store, "before_write", None)
        if prepare is not None:
            prepare(self._handle)
        elif self._layout is not None and not self._is_spoilt():
            # The store may hold what it was given: have it hold a copy instead.
            size, stride, offset, dtype = self._layout
            with raw_memory():
                whole = torch.empty(0, dtype=dtype, device=tensor.device)
                copy = copy_of(whole.set_(tensor.untyped_storage(), offset, size, stride))
            handle, self._handle = self._handle, self._store.put(copy)
            self._store.drop(handle)
            self._storage = None

    def count_version(self) -> None:
        """Take the tensor for unchanged, though its version is another: only that was counted."""
        tensor = self._tensor()
        if tensor is not None:
            self._version = version_of(tensor)
        count = getattr(self._store, "count_version", None)
        if count is not None:
            count(self._handle)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):  # the store may have refused the tensor
            self._store.drop(self._handle)


class _Latest(threading.local):
    deposit: ReferenceType[Deposit] | None = None


_latest = _Latest()


class Deposit:
    """The parcels of one region. ``store``: for whatever is kept; None: see `put`.

    ``host``: where to put what is to go to the host. ``last_first``: the region is a whole model,
    and what it puts last is wanted first.
    """

    __slots__ = (
        "__weakref__",
        "_arrived",
        "_last_first",
        "_parcels",
        "_previous",
        "_store",
        "chosen",
    )

    def __init__(
        self, store: Store | None = None, *, host: Store | None = None, last_first: bool = False
    ) -> None:
        #: Whether the user has chosen a store, which then gets everything that is kept.
        self.chosen = store is not None
        self._store = host if store is None else store
        self._last_first = last_first
        #: How many parcels need not be here any more.
        self._arrived = 0
        self._parcels: list[ReferenceType[Parcel]] = []
        #: The last region before this that has put something into a store.
        self._previous = _latest.deposit

    def put(self, tensor: torch.Tensor) -> Parcel:
        """Send ``tensor`` away: to the memory of the host, unless there is another store."""
        if self._store is None:
            self._store = host_store()
        if not self._parcels:
            _latest.deposit = ref(self)
        parcel = Parcel(self._store, tensor)
        self._parcels.append(ref(parcel))
        return parcel

    def arrive(self, count: int | None = None) -> None:
        """Let go here of the oldest that were put, so many or all: wait for them to arrive."""
        release = getattr(self._store, "release", None)
        end = len(self._parcels) if count is None else self._arrived + count
        for parcel in self._parcels[self._arrived : end]:
            alive = parcel()
            if release is not None and alive is not None:
                release(alive.handle)
        self._arrived = min(end, len(self._parcels))  # a call may send less than was planned

    def announce(self) -> None:
        """Say that the region is about to be recomputed."""
        self.prefetch()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.prefetch()

    def prefetch(self) -> None:
        """Have what is still here brought, if the store can do so ahead of time."""
        prefetch = getattr(self._store, "prefetch", None)
        if prefetch is None or not self._parcels:
            return
        parcels = [parcel() for parcel in self._parcels]
        if self._last_first:
            parcels.reverse()
        prefetch([parcel.handle for parcel in parcels if parcel is not None])
