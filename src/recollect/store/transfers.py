"""The copies between one device and the host, and the device memory that they may hold.

Two bounds keep the peak of the device where the user wants it. A tensor that is copied out stays in
memory until its copy is complete: beyond ``in_flight`` bytes the computing stream waits for the
oldest. A tensor that is prefetched takes memory before it is used: beyond ``ahead`` bytes the rest
is fetched as those are used.

The CPU never waits. It runs far ahead of the device, so memory changes hands in stream order: the
stream that owns it waits for the copy, then the last reference is dropped, and the next user of
that memory comes later on the same stream.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from recollect.store.handles import Fetched, HostCopy, OnHost, Returned
from recollect.store.links import CudaLink, Piece
from recollect.store.spans import Span, bytes_of, span_to_store, tensor_on

__all__ = ["Transfers"]


class Transfers:
    """Copies over ``link``, with about ``in_flight`` and ``ahead`` bytes of device memory.

    ``polls``: query which copies are complete, and release their sources. Without it the memory
    that is free at an op does not depend on how fast the device happens to be.
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
        #: What to prefetch when there is room, in this order.
        self._wanted: dict[OnHost, None] = {}

    def send(self, copy: HostCopy) -> None:
        """Start to copy the bytes of ``copy`` to the host."""
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
            is_newest = len(self.outgoing) == 1
            if not (self._polls and self.link.is_done(copy.done)):
                if is_newest or self.outgoing_bytes <= self.in_flight:
                    return
                self.wait_for(copy)
            self.release(copy)

    def drain(self) -> None:
        """Release all sources but the newest: backward has begun, and needs the memory.

        They were put a while ago, as the device counts time, and their copies are about complete.
        """
        if self.link.usable():
            for copy in [*self.outgoing][:-1]:
                self.wait_for(copy)
                self.release(copy)

    def wait_for(self, copy: HostCopy) -> None:
        """Make the streams that may write to the source wait for the end of the copy."""
        self.link.wait(copy.stream, copy.done)
        current = self.link.stream()
        if current != copy.stream:
            self.link.wait(current, copy.done)

    def release(self, copy: HostCopy) -> None:
        """Release the source of ``copy``, once the copy is complete or waited for."""
        if copy.source is None:
            return
        copy.is_intact()  # noted now: afterwards there is no version to compare
        copy.source = None
        del self.outgoing[copy]
        self.outgoing_bytes -= copy.source_bytes

    def get(self, handle: OnHost, copy: HostCopy) -> Tensor:
        """The tensor of ``handle`` on the device, for the caller's stream."""
        stream = self.link.stream()
        self.forget(handle)
        if copy.returned is not None and copy.returned.serves(handle.layout, handle.span, stream):
            return copy.returned.view(handle.layout)
        fetched = self._take_prefetched(copy, handle.span) or self._fetch(handle, copy)
        self.link.wait(stream, fetched.done)
        if stream == copy.stream:
            self.release(copy)  # it was copied out before it was copied in
        tensor = tensor_on(fetched.memory, fetched.span.start, handle.layout)
        copy.returned = Returned(tensor, fetched)
        self._prefetch_wanted()
        return tensor

    def prefetch(self, handles: Iterable[OnHost]) -> None:
        """Fetch ``handles`` ahead, as many as the bound allows, and the others when it does."""
        self._wanted.update(dict.fromkeys(handles))
        self._prefetch_wanted()

    def forget(self, handle: OnHost) -> None:
        """Do not prefetch ``handle`` any more."""
        self._wanted.pop(handle, None)

    def discard_prefetched(self, copy: HostCopy) -> None:
        """Release what was prefetched and not used."""
        fetched = copy.prefetched
        if fetched is not None:
            self.link.wait(fetched.stream, fetched.done)
            self.prefetched_bytes -= fetched.span.size
            copy.prefetched = None

    def _prefetch_wanted(self) -> None:
        for handle in [*self._wanted]:
            copy = handle.copy
            if copy is not None and self._is_worth_fetching(handle, copy):
                size = _span_to_fetch(handle, copy).size
                if self.prefetched_bytes and self.prefetched_bytes + size > self.ahead:
                    return
                copy.prefetched = self._fetch(handle, copy)
                self.prefetched_bytes += size
            del self._wanted[handle]

    def _is_worth_fetching(self, handle: OnHost, copy: HostCopy) -> bool:
        if copy.prefetched is not None or not copy.is_intact():
            return False
        there, stream = copy.returned, self.link.stream()
        return there is None or not there.serves(handle.layout, handle.span, stream)

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
