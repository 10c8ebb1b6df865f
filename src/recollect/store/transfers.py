"""Handles of a host store, the bytes behind them, and the copies between one device and the host.

A handle is a tensor that stays on its device (`OnDevice`), a tensor whose bytes are on the host
(`OnHost`), or a tensor subclass with a handle for each inner tensor (`Composite`). Views of one
storage share a `HostCopy`. No handle refers to the autograd graph of its tensor, whose nodes may
hold the handle.

Two bounds limit the peak on the device. A tensor that is copied out stays in memory until its copy
is complete: beyond ``in_flight`` bytes the computing stream waits for the oldest copy. A prefetched
tensor takes memory before it is used: beyond ``ahead`` bytes the others are fetched as these are
used.

The CPU never waits. It runs far ahead of the device, so memory is reused in stream order: the
stream that owns it waits for the copy, then the last reference is dropped, and the next user of
that memory comes later on the same stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recollect._torch.modes import unobserved
from recollect._torch.tensors import version_of
from recollect.errors import KeptTensorError
from recollect.store.links import CudaLink, Piece
from recollect.store.pool import HostBuffer
from recollect.store.spans import Layout, Span, bytes_of, copy_of, span_to_store, tensor_on

_DROPPED = "this handle of a HostStore was dropped: it can be neither read nor dropped again"

_MODIFIED = """\
A kept tensor was modified in place after it was given to a HostStore, before its copy to host \
memory was certain to be complete. Its values are lost.
Do one of these:
  - use an out-of-place operation (x = x.relu(), not x.relu_());
  - clone the tensor before it is modified;
  - call store.before_write(handle) first, if you use the store yourself."""


class OnDevice:
    """A tensor that was not copied, with the version it had."""

    def __init__(self, tensor: Tensor) -> None:
        with unobserved():  # detached: nodes of its graph may hold the handle
            self._hold(tensor if tensor.grad_fn is None else tensor.detach())

    def _hold(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version_of(tensor)

    def _not_dropped(self) -> Tensor:
        if self.tensor is None:
            raise RuntimeError(_DROPPED)
        return self.tensor

    def get(self) -> Tensor:
        """The tensor, unless it was written to."""
        tensor = self._not_dropped()
        if version_of(tensor) != self.version:
            raise KeptTensorError(_MODIFIED)
        return tensor

    def drop(self) -> None:
        self._not_dropped()
        self.tensor = None

    def hold_copy(self) -> None:
        self._hold(copy_of(self.get()))

    def count_version(self) -> None:
        self._hold(self._not_dropped())


@dataclass(slots=True, eq=False)
class Composite:
    """A tensor subclass that wraps other tensors: their handles by name, and how to join them."""

    handles: dict[str, Any]
    join: Callable[[dict[str, Tensor]], Tensor]


@dataclass(slots=True, eq=False)
class OnHost:
    """A tensor whose bytes are on the host, or being copied there."""

    #: None once dropped.
    copy: HostCopy | None
    layout: Layout
    span: Span

    def host_copy(self) -> HostCopy:
        """The bytes; an error if the handle was dropped."""
        if self.copy is None:
            raise RuntimeError(_DROPPED)
        return self.copy


def leaves_of(handle: Any) -> Iterator[OnDevice | OnHost]:
    """The handles of single tensors in ``handle``."""
    if isinstance(handle, Composite):
        for each in handle.handles.values():
            yield from leaves_of(each)
    else:
        yield handle


@dataclass(slots=True, eq=False)
class Fetched:
    """Bytes copied to the device: memory of ``stream``, complete after the event ``done``."""

    memory: Tensor
    span: Span
    done: Any
    stream: Any


class Returned:
    """A tensor that `get` returned: other views share its memory while it lives unchanged."""

    def __init__(self, tensor: Tensor, fetched: Fetched) -> None:
        self.tensor = weakref.ref(tensor)
        self.storage = weakref.ref(tensor.untyped_storage())
        self.version = tensor._version
        self.span = fetched.span
        self.stream = fetched.stream

    def serves(self, layout: Layout, span: Span, stream: Any) -> bool:
        """Whether ``span`` can be read from it on ``stream``, unchanged."""
        tensor = self.tensor()
        return (
            tensor is not None
            and tensor._version == self.version
            and tensor.dtype == layout.dtype
            and self.stream == stream
            and self.span.covers(span)
            # The user may have given the tensor other memory (``.data =``), or freed it.
            and tensor.untyped_storage() is self.storage()
            and tensor.untyped_storage().nbytes() == self.span.size
        )

    def view(self, layout: Layout) -> Tensor:
        tensor = self.tensor()
        assert tensor is not None
        offset = layout.offset - self.span.start // layout.dtype.itemsize
        # Detached: no view for autograd, and still sharing the version counter.
        return tensor.as_strided(layout.size, layout.stride, offset).detach()


class HostCopy:
    """The bytes ``span`` of the storage of ``tensor``, on the host or being copied there."""

    def __init__(
        self, link: CudaLink, key: int, tensor: Tensor, span: Span, buffer: HostBuffer
    ) -> None:
        storage = tensor.untyped_storage()
        self.link = link
        #: The `storage_key` of the storage, and the storage while it lives.
        self.key = key
        self.origin = weakref.ref(storage)
        #: An alias of the tensor, until the copy is complete, and the device memory that it holds.
        self.source: Tensor | None = tensor.detach()
        self.source_bytes: int = storage.nbytes()
        self.version = version_of(self.source)
        self.span = span
        self.buffer = buffer
        #: The stream that the tensor was put on.
        self.stream = link.stream()
        #: The events at the end of the copy, and of the last copy back.
        self.done: Any = None
        self.last_read: Any = None
        #: How many handles there are.
        self.uses = 0
        #: Whether the source was written to while it was copied.
        self.is_modified = False
        self.prefetched: Fetched | None = None
        self.returned: Returned | None = None

    def count_version(self) -> None:
        if self.source is not None and not self.is_modified:
            self.version = version_of(self.source)

    def is_intact(self) -> bool:
        """Whether the bytes are those that were put."""
        if self.source is not None and version_of(self.source) != self.version:
            self.is_modified = True
        return not self.is_modified

    def serves(self, tensor: Tensor, span: Span) -> bool:
        """Whether these bytes include ``span`` of the storage of ``tensor`` as it is now."""
        return (
            self.origin() is tensor.untyped_storage()
            and self.version is not None
            and self.version == version_of(tensor)
            and self.span.covers(span)
            and self.is_intact()
        )


# --- copies ---------------------------------------------------------------------------------------


class Transfers:
    """Copies over ``link``, with about ``in_flight`` and ``ahead`` bytes of device memory.

    ``polls``: release sources as soon as their copies are complete. Without it, free memory does
    not depend on the speed of the device.
    """

    def __init__(self, link: CudaLink, in_flight: int, ahead: int, *, polls: bool = True) -> None:
        self.link = link
        self.in_flight = in_flight
        self.ahead = ahead
        self._polls = polls
        #: Copies that still hold their source, the oldest first.
        self.outgoing: dict[HostCopy, None] = {}
        self.outgoing_bytes = 0
        self.prefetched_bytes = 0
        #: The handles to prefetch when there is room, in this order.
        self.wanted: dict[OnHost, None] = {}

    def send(self, copy: HostCopy) -> None:
        assert copy.source is not None
        source = bytes_of(copy.source.untyped_storage(), copy.span)
        pieces = [(there, here) for here, there in _pairs(copy, source, 0)]
        copy.done = self.link.copy_out(pieces, copy.buffer.after())
        self.outgoing[copy] = None
        self.outgoing_bytes += copy.source_bytes

    def release_sources(self) -> None:
        """Release the sources of complete copies, and of the oldest if there are too many."""
        if not self.link.usable():
            return
        for copy in [*self.outgoing]:
            is_done = self._polls and self.link.is_done(copy.done)
            if not is_done and (len(self.outgoing) == 1 or self.outgoing_bytes <= self.in_flight):
                return
            self.release(copy, is_done=is_done)

    def drain(self) -> None:
        """Release all sources but the newest: backward needs the memory."""
        if self.link.usable():
            for copy in [*self.outgoing][:-1]:
                self.release(copy)

    def release(self, copy: HostCopy, *, is_done: bool = False) -> None:
        """Release the source of ``copy``. Until that ``is_done``, streams that may write wait."""
        if copy.source is None:
            return
        if not is_done:
            self.link.wait(copy.stream, copy.done)
            current = self.link.stream()
            if current != copy.stream:
                self.link.wait(current, copy.done)
        copy.is_intact()  # checked now: afterwards there is no version to compare
        copy.source = None
        del self.outgoing[copy]
        self.outgoing_bytes -= copy.source_bytes

    def get(self, handle: OnHost) -> Tensor:
        """The tensor of ``handle`` on the device, for the caller's stream."""
        copy, stream = handle.host_copy(), self.link.stream()
        if not copy.is_intact():
            raise KeptTensorError(_MODIFIED)
        self.release_sources()
        self.wanted.pop(handle, None)
        if copy.returned is not None and copy.returned.serves(handle.layout, handle.span, stream):
            return copy.returned.view(handle.layout)
        fetched = self._take_prefetched(copy, handle.span) or self._fetch(handle, copy)
        self.link.wait(stream, fetched.done)
        if stream == copy.stream:
            self.release(copy, is_done=True)  # it was copied out before it was copied in
        tensor = tensor_on(fetched.memory, fetched.span.start, handle.layout)
        copy.returned = Returned(tensor, fetched)
        self._prefetch_wanted()
        return tensor

    def prefetch(self, handles: Iterable[OnHost]) -> None:
        """Prefetch ``handles``, as many as ``ahead`` allows, and the others later."""
        self.wanted.update(dict.fromkeys(handles))
        self._prefetch_wanted()

    def discard_prefetched(self, copy: HostCopy) -> None:
        """Free prefetched bytes that were not used."""
        fetched = copy.prefetched
        if fetched is not None:
            self.link.wait(fetched.stream, fetched.done)
            self.prefetched_bytes -= fetched.span.size
            copy.prefetched = None

    def _prefetch_wanted(self) -> None:
        stream = self.link.stream()
        for handle in [*self.wanted]:
            copy = handle.copy
            # Intact, and not on the device already.
            if copy is not None and copy.prefetched is None and copy.is_intact():
                returned = copy.returned
                if returned is None or not returned.serves(handle.layout, handle.span, stream):
                    size = _span_to_fetch(handle, copy).size
                    if self.prefetched_bytes and self.prefetched_bytes + size > self.ahead:
                        return
                    copy.prefetched = self._fetch(handle, copy)
                    self.prefetched_bytes += size
            del self.wanted[handle]

    def _take_prefetched(self, copy: HostCopy, span: Span) -> Fetched | None:
        fetched = copy.prefetched
        if fetched is None or not fetched.span.covers(span):
            return None
        if fetched.stream != self.link.stream():
            # The memory belongs to another stream, which could reuse it while this one reads it.
            self.discard_prefetched(copy)
            return None
        self.prefetched_bytes -= fetched.span.size
        copy.prefetched = None
        return fetched

    def _fetch(self, handle: OnHost, copy: HostCopy) -> Fetched:
        span = _span_to_fetch(handle, copy)
        memory = self.link.empty(span.size)
        pieces = [*_pairs(copy, memory, span.start - copy.span.start)]
        copy.last_read = self.link.copy_in(pieces, [copy.done])
        return Fetched(memory, span, copy.last_read, self.link.stream())


def _span_to_fetch(handle: OnHost, copy: HostCopy) -> Span:
    """All bytes of ``copy``, for its other views, unless ``handle`` is less than half of them."""
    is_small = span_to_store(handle.span, copy.span.size) is handle.span
    return handle.span if is_small else copy.span


def _pairs(copy: HostCopy, memory: Tensor, start: int) -> Iterable[Piece]:
    """The parts of the buffer from ``start`` on, each with its place in ``memory``."""
    for offset, part in copy.buffer.parts(start, start + memory.numel()):
        yield part, memory[offset : offset + part.numel()]
