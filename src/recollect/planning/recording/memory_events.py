"""The memory that some code allocates: by the events of a profiler, or by CUDA's allocator (P2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

from recollect._torch.devices import profiler_is_on, stderr_hushed

_MEMORY_EVENT = "[memory]"


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
    profiled = profiled_events(run)
    if profiled is None:
        return 0, 0
    events = [
        event
        for event in profiled
        if event.name() == _MEMORY_EVENT and event.device_type() == DeviceType.CPU
    ]
    peak = total = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak, total


def profiled_events(run: Callable[[], Any]) -> list[Any] | None:
    """Run with a profiler of memory, and return its events; None if another one is at work."""
    profiler = started_profiler()
    if profiler is None:
        run()
        return None
    try:
        run()
    finally:
        events = ended_profiler(profiler)
    return events


def ended_profiler(profiler: profile) -> list[Any]:
    """End a profiler, and return its events."""
    with stderr_hushed():
        profiler.__exit__(None, None, None)
    assert profiler.kineto_results is not None
    return list(profiler.kineto_results.events())


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
