"""Kept tensors in host memory: copied out beside the computation, and back before they are used.

This module decides what becomes of a tensor. The bytes are in `handles`, the copies under way in
`traffic`, the host memory in `pool`, and all that needs a device in `links`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recollect._torch.modes import raw_memory, unobserved
from recollect._torch.tensors import storage_key
from recollect.errors import KeptTensorError
from recollect.store.handles import (
    Copied,
    Held,
    Parts,
    Stored,
    is_memory,
    stays,
)
from recollect.store.links import CudaLinks, Link
from recollect.store.pool import Pool, memory_of_machine
from recollect.store.spans import (
    Span,
    copy_of,
    layout_of,
    span_of,
    span_to_store,
)
from recollect.store.transfers import Traffic

__all__ = ["HostStore", "host_store"]

_MIB = 1024 * 1024


class HostStore:
    """Keeps tensors of CUDA devices in host memory.

    Copies run on streams of their own, beside the computation, and the CPU does not wait for them.
    Views of one storage are copied once. One store can serve any number of regions, devices and
    threads; `host_store` returns one for the whole process.

    What would not free memory, or cannot be copied as memory, stays where it is: tensors that are
    not on a CUDA device, parameters and other leaves that require a gradient, views of those, empty
    and small tensors, sparse and nested ones, and tensor subclasses. (Of a subclass that is made of
    other tensors, such as a ``DTensor``, those are copied.) So does everything while a CUDA graph
    is captured.

    A tensor that is written to in place after it was put must be announced with `before_write`.
    Otherwise `get` raises ``KeptTensorError`` if the copy may have seen the change.

    Args:
        pinned_limit: Bytes of pinned host memory that may be used, in use and waiting for reuse.
            Beyond it ordinary memory is used, which is slower, and a warning says so once. By
            default half of the memory of the machine.
        in_flight: Bytes of device memory that tensors on their way out may take. More hides slower
            copies, less saves memory. One tensor each way is always under way, however large. By
            default a 64th of the device's memory, at most 2 GiB.
        ahead: Bytes of device memory that tensors fetched ahead may take. By default as many.
        smallest: A tensor whose storage has fewer bytes stays on the device.
    """

    def __init__(
        self,
        *,
        pinned_limit: int | None = None,
        in_flight: int | None = None,
        ahead: int | None = None,
        smallest: int = 4096,
        _links: Callable[[Tensor], Link | None] | None = None,
        _looks: bool = True,
    ) -> None:
        self._options = _checked(
            pinned_limit=pinned_limit, in_flight=in_flight, ahead=ahead, smallest=smallest
        )
        self._in_flight = in_flight
        self._ahead = ahead
        self._smallest = smallest
        self._looks = _looks
        self._link_of = CudaLinks() if _links is None else _links
        self._pool = Pool(memory_of_machine() // 2 if pinned_limit is None else pinned_limit)
        self._lock = threading.Lock()
        self._traffic: dict[Link, Traffic] = {}
        #: What is stored, by the storage that it is of.
        self._stored: dict[int, list[Stored]] = {}
        #: Storages of parameters that were met, by which their detached aliases are known.
        self._weights: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        #: Handles to drop, as soon as nobody is at work in here.
        self._dropped: deque[Copied] = deque()

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self._options.items())
        return f"HostStore({options})"

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStore:
        """The store itself: copies of a module share it, as they share a device."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, a store is its options."""
        return _make_store, (self._options,)

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that kept tensors take."""
        return self._pool.held_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory, those that wait for reuse among them."""
        return self._pool.pinned_bytes

    def trim(self) -> None:
        """Give back pinned memory that no kept tensor uses."""
        with self._at_work():
            self._pool.trim()
            for link in self._traffic:
                link.trim()

    def put(self, tensor: Tensor) -> Any:
        """Start to copy ``tensor`` to the host. Returns the handle for the other methods."""
        if type(tensor) not in (Tensor, nn.Parameter):
            return self._put_subclass(tensor)
        with self._at_work():
            if is_memory(tensor):
                return self._put_memory(tensor)
        return _hold(tensor)

    def get(self, handle: Any) -> Tensor:
        """The tensor of ``handle``: itself if it was not copied, else a new one with its values.

        It has no history. Tensors that shared a storage share one again, as long as the first to be
        asked for is still there.
        """
        if isinstance(handle, Parts):
            return self._get_parts(handle)
        with self._at_work():
            if isinstance(handle, Held):
                return _still_there(handle)
            stored = _not_dropped(handle)
            if not stored.look():
                raise KeptTensorError(_SPOILT)
            traffic = self._traffic[stored.link]
            traffic.settle()
            return traffic.retrieve(handle, stored)

    def drop(self, handle: Any) -> None:
        """Forget ``handle`` and, if it is the last of its storage, the copy."""
        if isinstance(handle, Parts):
            for each in handle.handles.values():
                self.drop(each)
        elif isinstance(handle, Held):
            _still_there(handle, check=False)
            handle.tensor = None
        else:
            _not_dropped(handle)
            # A finalizer may call this in the middle of another call, of this very thread.
            self._dropped.append(handle)
            self._drop_dropped()

    def prefetch(self, handles: Sequence[Any]) -> None:
        """Start to copy back what is needed next, in this order, as much as ``ahead`` allows.

        The rest follows as those are taken.
        """
        flat = [*_copied_in(handles)]
        with self._at_work():
            for traffic in self._traffic.values():
                traffic.drain()
                traffic.settle()
                traffic.expect([each for each in flat if _link(each) is traffic.link])

    def before_write(self, handle: Any) -> None:
        """Make it safe for the current stream to write to the tensor that was put."""
        if isinstance(handle, Parts):
            for each in handle.handles.values():
                self.before_write(each)
            return
        if isinstance(handle, Held):
            _keep_values(handle)
            return
        self.release(handle)

    def count_version(self, handle: Any) -> None:
        """The tensor that was put is as it was, though its version may be another by now."""
        if isinstance(handle, Parts):
            for each in handle.handles.values():
                self.count_version(each)
        elif isinstance(handle, Held):
            handle.hold(_still_there(handle, check=False))
        else:
            with self._at_work():
                _not_dropped(handle).count_version()

    def release(self, handle: Any) -> None:
        """Free the memory of the tensor that was put: the current stream waits for its copy."""
        for each in _copied_in([handle]):
            with self._at_work():
                stored = _not_dropped(each)
                if stored.source is not None:
                    traffic = self._traffic[stored.link]
                    traffic.wait_for(stored)
                    traffic.let_go(stored)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Alone in the store, seen by no mode and recorded by no graph."""
        try:
            with self._lock, raw_memory():
                yield
        finally:
            self._drop_dropped()

    def _put_subclass(self, tensor: Tensor) -> Any:
        with unobserved():
            inner, context = ({}, None) if stays(tensor) else _taken_apart(tensor)
            size, stride = tensor.size(), tensor.stride()
        # Beside tensors there may be what describes them, such as the mesh of a DTensor.
        tensors = {name: each for name, each in inner.items() if isinstance(each, Tensor)}
        others = {name: each for name, each in inner.items() if name not in tensors}
        handles = {name: self.put(each) for name, each in tensors.items()}
        if not any(True for _ in _copied_in(handles.values())):
            return _hold(tensor)
        return Parts(type(tensor), handles, others, context, size, stride)

    def _get_parts(self, handle: Parts) -> Tensor:
        inner = {name: self.get(each) for name, each in handle.handles.items()}
        with unobserved():
            made: Tensor = handle.kind.__tensor_unflatten__(
                inner | handle.others, handle.context, handle.size, handle.stride
            )
            # Some remember that they required a gradient. Like others, this has no history.
            return made.requires_grad_(False) if made.requires_grad else made

    def _put_memory(self, tensor: Tensor) -> Any:
        link = self._link_of(tensor)
        if link is None or tensor.numel() == 0 or not link.usable() or self._is_weight(tensor):
            return _hold(tensor)
        layout = layout_of(tensor)
        span, whole = span_of(layout), tensor.untyped_storage().nbytes()
        # A storage may have been resized under its tensor: then there is nothing to copy.
        if whole < self._smallest or span.end > whole:
            return _hold(tensor)
        stored = self._already_stored(tensor, span) or self._store(tensor, link, span, whole)
        stored.uses += 1
        return Copied(stored, layout, span)

    def _is_weight(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key is None:
            return False
        if stays(tensor):
            self._weights[key] = storage
        return self._weights.get(key) is storage

    def _already_stored(self, tensor: Tensor, span: Span) -> Stored | None:
        key = storage_key(tensor)
        found = self._stored.get(key, ()) if key is not None else ()
        return next((each for each in found if each.serves(tensor, span)), None)

    def _store(self, tensor: Tensor, link: Link, span: Span, whole: int) -> Stored:
        key = storage_key(tensor)
        assert key is not None
        traffic = self._traffic.get(link)
        if traffic is None:
            limit = self._in_flight
            if limit is None:
                limit = min(link.capacity() // 64, 2048 * _MIB)
            ahead = limit if self._ahead is None else self._ahead
            traffic = self._traffic[link] = Traffic(link, limit, ahead, looks=self._looks)
        span = span_to_store(span, whole)
        buffer = self._pool.take(span.size, link.pin)
        stored = Stored(link, key, tensor.detach(), span, buffer)
        try:
            traffic.send(stored)
        except BaseException:
            self._pool.give(buffer, None)
            raise
        self._stored.setdefault(key, []).append(stored)
        traffic.settle()
        return stored

    def _drop_dropped(self) -> None:
        # Whoever holds the lock comes here afterwards.
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                with raw_memory():
                    self._drop_one(self._dropped.popleft())
            finally:
                self._lock.release()

    def _drop_one(self, handle: Copied) -> None:
        stored, handle.stored = handle.stored, None
        if stored is None:
            return
        traffic = self._traffic[stored.link]
        traffic.forget(handle)
        stored.uses -= 1
        if stored.uses == 0:
            self._forget(stored, traffic)
        traffic.settle()

    def _forget(self, stored: Stored, traffic: Traffic) -> None:
        same_key = self._stored[stored.key]
        same_key.remove(stored)
        if not same_key:
            del self._stored[stored.key]
        traffic.forget_ahead(stored)
        if stored.source is not None and stored.link.usable():
            traffic.wait_for(stored)
            traffic.let_go(stored)
        self._pool.give(
            stored.buffer, stored.done if stored.last_read is None else stored.last_read
        )


def _make_store(options: dict[str, Any]) -> HostStore:
    return HostStore(**options)


def _checked(**options: int | None) -> dict[str, int | None]:
    for name, value in options.items():
        if value is not None and (not isinstance(value, int) or value < 0):
            raise ValueError(f"{name} must be a number of bytes, 0 or more, but is {value!r}")
    return options


def _taken_apart(tensor: Any) -> tuple[dict[str, Any], Any]:
    """What ``tensor`` is made of, by name, and what is needed to join it; nothing if of nothing."""
    # The result of a collective may be under way. And a jagged tensor is known by the object that
    # holds its offsets: with a copy of those it would fit no other.
    if hasattr(tensor, "trigger_wait") or tensor.is_nested:
        return {}, None
    if not hasattr(tensor, "__tensor_flatten__"):
        return {}, None
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def _hold(tensor: Tensor) -> Held:
    """Hold ``tensor`` without its history, whose nodes may hold the handle."""
    with unobserved():
        return Held(tensor if tensor.grad_fn is None else tensor.detach())


def _keep_values(handle: Held) -> None:
    """Replace the tensor of ``handle``, which is about to change, by a copy."""
    tensor = _still_there(handle)
    with raw_memory():
        if is_memory(tensor):
            handle.hold(copy_of(tensor))
            return
    with unobserved():
        handle.hold(tensor.detach().clone())


def _still_there(handle: Held, *, check: bool = True) -> Tensor:
    if handle.tensor is None:
        raise RuntimeError(_DROPPED)
    if check and handle.is_spoilt():
        raise KeptTensorError(_SPOILT)
    return handle.tensor


def _not_dropped(handle: Copied) -> Stored:
    if handle.stored is None:
        raise RuntimeError(_DROPPED)
    return handle.stored


def _copied_in(handles: Any) -> Iterator[Copied]:
    for handle in handles:
        if isinstance(handle, Copied):
            yield handle
        elif isinstance(handle, Parts):
            yield from _copied_in(handle.handles.values())


def _link(handle: Copied) -> Link | None:
    return None if handle.stored is None else handle.stored.link


_DROPPED = "this handle of a HostStore was dropped: it can be neither read nor dropped again"

_SPOILT = """\
A kept tensor was modified in place after it was given to a HostStore, before its copy to host \
memory was certain to be complete. Its values are lost.
Do one of these:
  - use an operation that is not in place (x = x.relu(), not x.relu_());
  - clone the tensor before it is modified;
  - call store.before_write(handle) first, if you use the store yourself."""


_default: HostStore | None = None
_default_lock = threading.Lock()


def host_store() -> HostStore:
    """The `HostStore` of this process, with default options. Made on first use."""
    global _default  # noqa: PLW0603 - one for the process is what it is for
    with _default_lock:
        if _default is None:
            _default = HostStore()
        return _default
