"""What profilers of memory saw: a whole run with the addresses of its blocks, or a single op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _EventType, _ExperimentalConfig

#: Memory alone, without the arguments, stacks, operations and modules of ops.
_MEMORY = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())


class MemoryChange(NamedTuple):
    """A block that was allocated or freed."""

    time: int  #: in nanoseconds
    address: int
    nbytes: int  #: negative if it was freed


def memory_changes(results: Any) -> list[MemoryChange]:
    """The blocks of host memory that were allocated or freed, in order.

    ``results``: what a profiler found (``kineto_results``).
    """
    # Where times are equal, the order of the tree counts.
    return sorted(_changes(results.experimental_event_tree()), key=lambda change: change.time)


def _changes(tree: list[Any]) -> Iterator[MemoryChange]:
    host, ahead = torch.device("cpu"), tree[::-1]
    while ahead:
        event = ahead.pop()
        ahead += event.children[::-1]
        if event.tag == _EventType.Allocation and event.extra_fields.device == host:
            fields = event.extra_fields
            yield MemoryChange(event.start_time_ns, fields.ptr, fields.alloc_size)


def changes_in_op(run: Callable[[], Any], *, on_cuda: bool) -> list[int]:
    """Run an op. Returns the bytes that it allocated, negative if it freed them, in order.

    By torch's older profiler: it starts in microseconds, knows only this thread, and works beside
    another thread's profiler and beside threads that communicate. Not in a thread with a profiler.
    """
    _enable_profiler_legacy(_MEMORY)
    try:
        run()
    finally:
        threads = _disable_profiler_legacy()
    events = [event for of_thread in threads for event in of_thread]
    sizes = [event.cuda_memory_usage() if on_cuda else event.cpu_memory_usage() for event in events]
    return [size for size in sizes if size]
