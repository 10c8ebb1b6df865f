"""Streams, workspaces, and what profilers of memory saw."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _EventType, _ExperimentalConfig

#: The device of tensors made without a ``device``.
default_device_type: Callable[[], str] = torch._C._get_default_device


def profiler_is_on() -> bool:
    """Whether torch's profiler is on in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


@contextmanager
def stderr_hushed() -> Iterator[None]:
    """Discard what C++ code writes to stderr.

    torch 2.13 logs the start and the stop of every profile there, at a level that is read only when
    torch is imported.
    """
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


#: The current device, and the stream of a device on which this thread launches kernels: the two
#: parts of a `StreamKey`. None without CUDA.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)

current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)


def free_cuda_workspaces() -> None:
    """Free the workspaces that cuBLAS holds: one for every stream it has ever run on."""
    if _clear_workspaces is not None and torch.cuda.is_initialized():
        _clear_workspaces()


_sleep = getattr(torch._C, "_cuda_sleep", None)
#: About a hundred microseconds.
_CYCLES = 180_000


def keep_device_busy() -> None:
    """Have the current CUDA stream do nothing for longer than it takes to launch a kernel."""
    if _sleep is not None:
        _sleep(_CYCLES)


#: The current device, and the stream on which this thread launches kernels.
StreamKey = tuple[int, int]


def current_stream_key() -> StreamKey | None:
    """Where kernels are launched now; None without CUDA."""
    if current_raw_stream is None or current_device is None or not torch.cuda.is_initialized():
        return None
    device = current_device()
    return device, current_raw_stream(device)


def is_current_stream(key: StreamKey) -> bool:
    """Whether ``key`` is where kernels are launched now; faster than a comparison of keys."""
    return bool(current_device() == key[0] and current_raw_stream(key[0]) == key[1])


def is_capturing() -> bool:
    """Whether kernels are being captured into a CUDA graph."""
    return current_stream_key() is not None and torch.cuda.is_current_stream_capturing()


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
