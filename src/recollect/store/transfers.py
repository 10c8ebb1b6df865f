"""The copies of one device that are under way, and how much memory they may hold.

Two bounds keep the peak of the device where the user wants it. Tensors on their way out stay in
memory until they are copied: when they are too many, the stream that computes waits for the oldest.
Tensors fetched ahead take memory before they are used: when they are too many, the rest is fetched
as those are taken.

The CPU never waits. It runs far ahead of the device, so memory is handed on by order of streams:
the stream that owns it waits for the copy, then the last reference is dropped, and whatever gets
that memory next comes later on the same stream.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from recollect.store.handles import Arrival, Copied, Given, Stored
from recollect.store.links import Link, Piece
from recollect.store.spans import Span, bytes_of, span_to_store, tensor_on

__all__ = ["Traffic"]


class Traffic:
    """What is on its way from and to the device of ``link``: about ``limit``, ``ahead`` bytes.

    ``looks``: whether to look which copies are done, and let go of their sources. Without, what
    memory is free at which op does not depend on how fast the device happens to be.
    """

    def __init__(
        self, link: Link, limit: int, ahead: int | None = None, *, looks: bool = True
    ) -> None:
        self.link = link
        self.limit = limit
        self._looks = looks
        self.ahead = limit if ahead is None else ahead
        #: What is being copied out and still holds its source, the oldest first.
        self.leaving: dict[Stored, None] = {}
        self.leaving_bytes = 0
        self.ahead_bytes = 0
        #: What is to be fetched ahead when there is room, in this order.
        self._wanted: dict[Copied, None] = {}

    def send(self, stored: Stored) -> None:
        """Start to copy the bytes of ``stored`` to the host."""
        assert stored.source is not None
        storage = stored.source.untyped_storage()
        stored.done = self.link.copy_out(
            [(there, here) for here, there in _pairs(stored, bytes_of(storage, stored.span), 0)],
            stored.buffer.after(),
        )
        self.leaving[stored] = None
        self.leaving_bytes += stored.kept_bytes

    def settle(self) -> None:
        """Let go of sources whose copies are done, and of the oldest if there are too many."""
        if not self.link.usable():
            return
        for stored in [*self.leaving]:
            newest = len(self.leaving) == 1
            if not (self._looks and self.link.is_done(stored.done)):
                if newest or self.leaving_bytes <= self.limit:
                    return
                self.wait_for(stored)
            self.let_go(stored)

    def drain(self) -> None:
        """Let go of all sources but the newest: backward has begun, and needs the memory.

        They were put a while ago, as the device counts time, and their copies are about done.
        """
        if self.link.usable():
            for stored in [*self.leaving][:-1]:
                self.wait_for(stored)
                self.let_go(stored)

    def wait_for(self, stored: Stored) -> None:
        """Make the streams that may write to the source wait until it is copied."""
        self.link.wait(stored.stream, stored.done)
        current = self.link.stream()
        if current != stored.stream:
            self.link.wait(current, stored.done)

    def let_go(self, stored: Stored) -> None:
        """Drop the source of ``stored``, to be called when its copy is done or waited for."""
        if stored.source is None:
            return
        stored.look()
        stored.source = None
        del self.leaving[stored]
        self.leaving_bytes -= stored.kept_bytes

    def retrieve(self, handle: Copied, stored: Stored) -> Tensor:
        """The tensor of ``handle`` on the device, for the caller's stream."""
        stream = self.link.stream()
        self._wanted.pop(handle, None)
        given = stored.given
        if given is not None and given.serves(handle.layout, handle.span, stream):
            return given.view(handle.layout)
        arrival = self._take_ahead(stored, handle.span) or self._fetch(handle, stored)
        self.link.wait(stream, arrival.done)
        if stored.source is not None and stream == stored.stream:
            self.let_go(stored)  # it was copied out before it was copied in
        tensor = tensor_on(arrival.memory, arrival.span.start, handle.layout)
        stored.given = Given(tensor, arrival)
        self._fetch_wanted()
        return tensor

    def expect(self, handles: Iterable[Copied]) -> None:
        """Fetch ``handles`` ahead, as many as the bound allows, and the others when it does."""
        self._wanted.update(dict.fromkeys(handles))
        self._fetch_wanted()

    def forget(self, handle: Copied) -> None:
        """Do not fetch ``handle`` ahead any more."""
        self._wanted.pop(handle, None)

    def forget_ahead(self, stored: Stored) -> None:
        """Let go of what was fetched ahead and is not used."""
        if stored.ahead is None:
            return
        self.link.wait(stored.ahead.stream, stored.ahead.done)
        self.ahead_bytes -= stored.ahead.span.size
        stored.ahead = None

    def _fetch_wanted(self) -> None:
        for handle in [*self._wanted]:
            stored = handle.stored
            if stored is not None and self._is_worth_fetching(handle, stored):
                size = _span_to_fetch(handle, stored).size
                if self.ahead_bytes and self.ahead_bytes + size > self.ahead:
                    return
                stored.ahead = self._fetch(handle, stored)
                self.ahead_bytes += size
            del self._wanted[handle]

    def _is_worth_fetching(self, handle: Copied, stored: Stored) -> bool:
        if stored.ahead is not None or not stored.look():
            return False
        given = stored.given
        return given is None or not given.serves(handle.layout, handle.span, self.link.stream())

    def _take_ahead(self, stored: Stored, span: Span) -> Arrival | None:
        arrival = stored.ahead
        if arrival is None or not arrival.span.covers(span):
            return None
        self.ahead_bytes -= arrival.span.size
        stored.ahead = None
        if arrival.stream == self.link.stream():
            return arrival
        # The memory is that of another stream, which would reuse it under the hands of this one.
        self.link.wait(arrival.stream, arrival.done)
        return None

    def _fetch(self, handle: Copied, stored: Stored) -> Arrival:
        span = _span_to_fetch(handle, stored)
        memory = self.link.empty(span.size)
        pieces = [*_pairs(stored, memory, span.start - stored.span.start)]
        stored.last_read = self.link.copy_in(pieces, [stored.done])
        return Arrival(memory, span, stored.last_read, self.link.stream())


def _span_to_fetch(handle: Copied, stored: Stored) -> Span:
    """All that is stored, for the other views of it, unless ``handle`` is less than half of it."""
    if span_to_store(handle.span, stored.span.size) is handle.span:
        return handle.span
    return stored.span


def _pairs(stored: Stored, memory: Tensor, start: int) -> Iterable[Piece]:
    """The parts of the buffer from ``start`` on, each with its place in ``memory``."""
    for offset, part in stored.buffer.parts(start, start + memory.numel()):
        yield part, memory[offset : offset + part.numel()]
