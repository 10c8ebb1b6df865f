"""The memory that some code allocates: by the events of a profiler, or by CUDA's allocator (P2)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

from recollect._torch.devices import profiler_is_on, stderr_hushed
from recollect._torch.profiler import MemoryChange, memory_changes


def may_communicate() -> bool:
    """Whether this process may exchange tensors with others at any time.

    A profiler must not end while it does: the thread that communicates still writes to it.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def allocated_by(run: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """The most bytes that ``run`` allocates at once, and the bytes that are left after it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        left = torch.cuda.memory_allocated(device) - before
        return torch.cuda.max_memory_allocated(device) - before, left
    found, blocks = profiled(run), Blocks()
    for change in [] if found is None else memory_changes(found):
        blocks.apply(change)
    return blocks.peak, blocks.total


class Blocks:
    """The blocks of memory that are allocated, beside those from before.

    A profiler does not see what is freed in threads that it does not follow: those of gloo free the
    buffers of collectives. A block that overlaps a new one must have been freed.
    """

    def __init__(self) -> None:
        self.total = self.peak = 0
        self._sizes: dict[int, int] = {}
        #: The addresses of the blocks, in order.
        self._addresses: list[int] = []

    def apply(self, change: MemoryChange) -> None:
        """Allocate or free a block."""
        start, size = change.address, change.nbytes
        if size > 0:
            self._free_between(start, start + size)
            insort(self._addresses, start)
            self._sizes[start] = size
        elif start in self._sizes:
            self._sizes.pop(start)
            self._addresses.pop(bisect_left(self._addresses, start))
        self.total += size
        self.peak = max(self.peak, self.total)

    def _free_between(self, start: int, end: int) -> None:
        first, last = (bisect_left(self._addresses, each) for each in (start, end))
        if first and self._end_of(self._addresses[first - 1]) > start:
            first -= 1
        for address in self._addresses[first:last]:
            self.total -= self._sizes.pop(address)
        del self._addresses[first:last]

    def _end_of(self, address: int) -> int:
        return address + self._sizes[address]


def profiled(run: Callable[[], Any]) -> Any | None:
    """Run with a profiler of memory. Returns what it found; None if another one is at work."""
    profiler = started_profiler()
    if profiler is None:
        run()
        return None
    try:
        run()
    finally:
        found = ended_profiler(profiler)
    return found


def ended_profiler(profiler: profile) -> Any:
    """End a profiler, and return what it found."""
    with stderr_hushed():
        profiler.__exit__(None, None, None)
    assert profiler.kineto_results is not None
    return profiler.kineto_results


def started_profiler() -> profile | None:
    """A profiler of memory; None if another one is at work, which this would end.

    Not `torch.profiler`, which spends most of its time on events that are not read here.
    """
    if profiler_is_on():
        return None
    profiler = profile(profile_memory=True)
    try:
        with stderr_hushed():
            profiler.__enter__()
    except RuntimeError:
        return None
    return profiler
