"""Kept tensors in host memory: copied out during computation, and back before their use.

Handles and running copies are in `transfers`, host memory in `pool`, device code in `links`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recollect._torch.autograd import is_weight, view_base
from recollect._torch.modes import raw_memory, unobserved
from recollect._torch.tensors import is_plain_tensor, storage_key
from recollect.store.links import CudaLink, cuda_links
from recollect.store.pool import PinnedPool, memory_of_machine
from recollect.store.protocol import Store
from recollect.store.spans import Span, layout_of, span_of, span_to_store
from recollect.store.transfers import (
    Composite,
    HostCopy,
    OnDevice,
    OnHost,
    Transfers,
    leaves_of,
)

_GIB = 1024**3


class HostStore(Store):
    """Keeps tensors of CUDA devices in host memory.

    Copies run on their own streams, and the CPU does not wait for them. Views of one storage are
    copied once. One store can serve any number of regions, devices and threads; `host_store`
    returns one for the whole process.

    Some tensors stay on their device, because copying them would free no memory or cannot be done:
    tensors that are not on a CUDA device, parameters and other leaves that require grad, views of
    those, empty and small tensors, sparse and nested ones, and tensor subclasses. (If a subclass
    wraps other tensors, as ``DTensor`` does, those are copied.) While a CUDA graph is captured, all
    tensors stay.

    Call `before_write` before writing to a tensor in place after `put`. Otherwise `get` raises
    ``KeptTensorError`` if the copy may contain the change.

    Args:
        pinned_limit: Bytes of pinned host memory, in use and kept for reuse. Beyond it the store
            uses ordinary memory, which is slower, and warns once. By default half of the machine's
            memory.
        in_flight: Bytes of device memory that tensors may take while they are copied out. More
            hides slower copies, less saves memory. One tensor each way is always allowed, however
            large. By default a 64th of the device's memory, at most 2 GiB.
        ahead: Bytes of device memory that prefetched tensors may take. By default ``in_flight``.
        smallest: A tensor whose storage has fewer bytes stays on the device.
    """

    def __init__(
        self,
        *,
        pinned_limit: int | None = None,
        in_flight: int | None = None,
        ahead: int | None = None,
        smallest: int = 4096,
        _links: Callable[[Tensor], CudaLink | None] | None = None,
        _polls: bool = True,
    ) -> None:
        self._options: dict[str, Any] = {
            "pinned_limit": pinned_limit,
            "in_flight": in_flight,
            "ahead": ahead,
            "smallest": smallest,
        }
        for name, value in self._options.items():
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} must be a number of bytes, 0 or more, but is {value!r}")
        self._polls = _polls
        self._link_of = cuda_links() if _links is None else _links
        self._pool = PinnedPool(memory_of_machine() // 2 if pinned_limit is None else pinned_limit)
        self._lock = threading.Lock()
        self._transfers: dict[CudaLink, Transfers] = {}
        #: Copies by the `storage_key` of their origin.
        self._copies: dict[int, list[HostCopy]] = {}
        #: Storages of parameters that were put: detached aliases of them stay on the device too.
        self._weights: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        #: Handles to drop, as soon as the lock is free.
        self._dropped: deque[OnHost] = deque()

    def __repr__(self) -> str:
        return f"HostStore({', '.join(f'{k}={v}' for k, v in self._options.items())})"

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStore:
        """The store itself: copies of a module share it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the options."""
        return partial(HostStore, **self._options), ()

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that kept tensors take."""
        return self._pool.held_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory, in use or kept for reuse."""
        return self._pool.pinned_bytes

    def trim(self) -> None:
        """Free pinned memory that no kept tensor uses."""
        with self._locked():
            self._pool.trim()
            for link in self._transfers:
                link.trim()

    def put(self, tensor: Tensor) -> Any:
        """Start to copy ``tensor`` to the host. Returns the handle for the other methods."""
        if type(tensor) not in (Tensor, nn.Parameter):
            return self._put_subclass(tensor)
        with self._locked():
            handle = self._put_plain(tensor) if is_plain_tensor(tensor) else None
        return OnDevice(tensor) if handle is None else handle

    def get(self, handle: Any) -> Tensor:
        """The tensor of ``handle``: itself if it was not copied, else a new one with its values.

        It is detached. Tensors that shared a storage share one again, as long as the first one
        returned is alive.
        """
        if isinstance(handle, Composite):
            inner = {name: self.get(each) for name, each in handle.handles.items()}
            with unobserved():
                joined = handle.join(inner)
                # Some subclasses remember that they required grad.
                return joined.requires_grad_(False) if joined.requires_grad else joined
        with self._locked():
            if isinstance(handle, OnDevice):
                return handle.get()
            return self._transfers[handle.host_copy().link].get(handle)

    def drop(self, handle: Any) -> None:
        """Drop ``handle`` and, if it is the last one of its storage, the copy."""
        for leaf in leaves_of(handle):
            if isinstance(leaf, OnDevice):
                leaf.drop()
            else:
                leaf.host_copy()
                # A finalizer may call this during another call in the same thread.
                self._dropped.append(leaf)
        self._drop_pending()

    def prefetch(self, handles: Sequence[Any]) -> None:
        """Start to copy back the tensors needed next, in this order, within ``ahead`` bytes.

        The others follow as these are used.
        """
        wanted: dict[CudaLink, list[OnHost]] = {}
        with self._locked():
            for leaf in (leaf for handle in handles for leaf in leaves_of(handle)):
                if isinstance(leaf, OnHost) and leaf.copy is not None:
                    wanted.setdefault(leaf.copy.link, []).append(leaf)
            for link, transfers in self._transfers.items():
                transfers.drain()
                transfers.release_sources()
                transfers.prefetch(wanted.get(link, ()))

    def before_write(self, handle: Any) -> Any:
        """Make it safe for the current stream to write to the tensor that was put."""
        for leaf in leaves_of(handle):
            if isinstance(leaf, OnDevice):
                leaf.hold_copy()
        self.release(handle)
        return handle

    def count_version(self, handle: Any) -> None:
        with self._locked():
            for leaf in leaves_of(handle):
                (leaf if isinstance(leaf, OnDevice) else leaf.host_copy()).count_version()

    def release(self, handle: Any) -> None:
        with self._locked():
            for leaf in leaves_of(handle):
                if isinstance(leaf, OnHost):
                    copy = leaf.host_copy()
                    self._transfers[copy.link].release(copy)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; no mode sees the ops inside, and autograd does not record them."""
        try:
            with self._lock, raw_memory():
                yield
        finally:
            self._drop_pending()

    def _put_subclass(self, tensor: Tensor) -> Any:
        with unobserved():
            inner, join = _flattened(tensor)
        handles = {name: self.put(each) for name, each in inner.items()}
        composite = Composite(handles, join)
        is_copied = any(isinstance(leaf, OnHost) for leaf in leaves_of(composite))
        return composite if is_copied else OnDevice(tensor)

    def _put_plain(self, tensor: Tensor) -> OnHost | None:
        """The handle of a copy; None if ``tensor`` stays on the device."""
        link = self._link_of(tensor)
        key = storage_key(tensor)
        if link is None or key is None or tensor.numel() == 0 or not link.usable():
            return None
        layout = layout_of(tensor)
        span, whole = span_of(layout), tensor.untyped_storage().nbytes()
        storage = tensor.untyped_storage()
        if _is_resident(tensor):
            self._weights[key] = storage
        is_weight = self._weights.get(key) is storage
        # The storage may have been resized: then there is nothing to copy.
        if is_weight or whole < self._options["smallest"] or span.end > whole:
            return None
        stored = self._copies.get(key, ())
        copy = next((each for each in stored if each.serves(tensor, span)), None)
        if copy is None:
            copy = self._start_copy(tensor, link, key, span_to_store(span, whole))
        copy.uses += 1
        return OnHost(copy, layout, span)

    def _start_copy(self, tensor: Tensor, link: CudaLink, key: int, span: Span) -> HostCopy:
        transfers = self._transfers_over(link)
        buffer = self._pool.take(span.size, link.pin)
        copy = HostCopy(link, key, tensor, span, buffer)
        try:
            transfers.send(copy)
        except BaseException:
            self._pool.give(buffer, None)
            raise
        self._copies.setdefault(key, []).append(copy)
        transfers.release_sources()
        return copy

    def _transfers_over(self, link: CudaLink) -> Transfers:
        if link not in self._transfers:
            in_flight, ahead = self._options["in_flight"], self._options["ahead"]
            if in_flight is None:
                in_flight = min(link.capacity() // 64, 2 * _GIB)
            ahead = in_flight if ahead is None else ahead
            self._transfers[link] = Transfers(link, in_flight, ahead, polls=self._polls)
        return self._transfers[link]

    def _drop_pending(self) -> None:
        # The thread that holds the lock calls this when it releases it.
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                with raw_memory():
                    self._drop_one(self._dropped.popleft())
            finally:
                self._lock.release()

    def _drop_one(self, handle: OnHost) -> None:
        copy, handle.copy = handle.copy, None
        if copy is None:
            return
        transfers = self._transfers[copy.link]
        transfers.wanted.pop(handle, None)
        copy.uses -= 1
        if copy.uses == 0:
            same_storage = self._copies[copy.key]
            same_storage.remove(copy)
            if not same_storage:
                del self._copies[copy.key]
            transfers.discard_prefetched(copy)
            if copy.link.usable():
                transfers.release(copy)
            self._pool.give(copy.buffer, copy.done if copy.last_read is None else copy.last_read)
        transfers.release_sources()


def _is_resident(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter, another leaf, or a view of one: a copy frees nothing."""
    base = view_base(tensor)
    origin = tensor if base is None else base
    return is_weight(origin) or isinstance(origin, nn.Parameter)


def _flattened(tensor: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors that ``tensor`` wraps, by name, and a function that joins others like them.

    Nothing for tensors that stay: parameters; the result of a collective, which may be running;
    jagged tensors, which match others only with the same offsets object.
    """
    stays = _is_resident(tensor) or hasattr(tensor, "trigger_wait") or tensor.is_nested
    if stays or not hasattr(tensor, "__tensor_flatten__"):
        return {}, None
    names, context = tensor.__tensor_flatten__()
    attributes = {name: getattr(tensor, name) for name in names}
    inner = {name: each for name, each in attributes.items() if isinstance(each, Tensor)}
    # Other attributes describe the tensors, such as the mesh of a DTensor.
    others = {name: each for name, each in attributes.items() if name not in inner}
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()
    return inner, lambda parts: kind.__tensor_unflatten__(parts | others, context, size, stride)


_default = HostStore()


def host_store() -> HostStore:
    """The `HostStore` of this process, with default options."""
    return _default
