"""How the benchmarks measure bytes, gradients and times.

Bytes on a CPU come from the allocator's own events, which `torch.profiler` hands out one by one.
They are exact and the same at every run, so two implementations can be compared to the byte. Times
are neither: a machine slows down for whole seconds. So every way of doing the work is timed once in
every round, in an order that changes; each round is set right for how fast the machine was in it;
and what is reported comes with its spread.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from recollect._torch.devices import stderr_hushed

T = TypeVar("T")

_FORWARD = "recollect.measure: forward"
_MEMORY_EVENT = "[memory]"

# Deterministic products demand it. Set only for them: torch parses it anew at every product.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class Memory:
    """Bytes that one training step allocated, over what was there before it."""

    held: int  # still allocated when forward has returned
    peak: int  # the most that was allocated at any moment, gradients included


@dataclass(frozen=True)
class Spread:
    """The middle of some samples, and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarise `samples`; two or more are needed."""
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(low, median, high)


def held_and_peak(forward: Callable[[], T], backward: Callable[[T], object]) -> Memory:
    """Count the CPU bytes that `backward(forward())` allocates.

    What was allocated before the call is not counted, and neither is its release. Run the step once
    beforehand, so that nothing which is made only once (a library's scratch space) is counted, and
    clear the gradients, so that they are allocated inside.
    """
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    gc.collect()
    with collector_off():
        with stderr_hushed():
            profiler.start()
        with record_function(_FORWARD):
            result = forward()
        backward(result)
        del result
        with stderr_hushed():
            profiler.stop()
    return _held_and_peak(profiler)


def _held_and_peak(profiler: profile) -> Memory:
    """Add up the allocator's events, in the order in which they happened."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == _MEMORY_EVENT]
    (forward_end,) = (event.end_ns() for event in events if event.name() == _FORWARD)
    allocated = held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        allocated += change.nbytes()
        peak = max(peak, allocated)
        if change.start_ns() <= forward_end:
            held = allocated
    return Memory(held, peak)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Free memory by reference counts alone: no collection falls into what is measured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def clear_gradients(module: nn.Module, *inputs: Tensor) -> None:
    """Free the gradients of `module` and of `inputs`."""
    module.zero_grad(set_to_none=True)
    for tensor in inputs:
        tensor.grad = None


def gradients(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Copy the gradients of every parameter of `module` and of `inputs`; all must have one."""
    copies = []
    for tensor in (*module.parameters(), *inputs):
        assert tensor.grad is not None, "a gradient is missing"
        copies.append(tensor.grad.clone())
    return copies


def bitwise_equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Say whether the tensors are the same, bit for bit."""
    return all(a.dtype == b.dtype and _bits_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    # As bytes: torch.equal takes 0.0 for -0.0 and NaN for different from itself.
    return a.shape == b.shape and torch.equal(_as_bytes(a), _as_bytes(b))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def largest_difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """Return the largest difference of any tensor, relative to that tensor's largest element."""

    def difference(a: Tensor, b: Tensor) -> float:
        scale = b.abs().max().float().clamp_min(torch.finfo(torch.float32).tiny)
        return float((a.float() - b.float()).abs().max() / scale)

    return max(difference(a, b) for a, b in zip(ours, theirs, strict=True))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use kernels that add up in a fixed order: attention's usual backward varies by 1%."""
    torch.use_deterministic_algorithms(True)
    os.environ[_WORKSPACE] = ":4096:8"
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        del os.environ[_WORKSPACE]


def interleaved(
    samplers: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warmup: int = 3,
    progress: Callable[[int], object] = lambda _done: None,
) -> dict[str, list[T]]:
    """Call every sampler once in every round, and return its samples in the order of the rounds.

    The order within a round is shuffled (the same way at every run), so that no sampler always
    finds the caches as one and the same neighbour left them. Garbage is collected between rounds.
    """
    samples: dict[str, list[T]] = {name: [] for name in samplers}
    order, shuffle = list(samplers), random.Random(0).shuffle
    gc.collect()
    gc.freeze()  # what exists already need not be looked at again after every round
    try:
        with collector_off():
            for number in range(-warmup, rounds):
                shuffle(order)
                for name in order:
                    sample = samplers[name]()
                    if number >= 0:
                        samples[name].append(sample)
                gc.collect()
                if number >= 0:
                    progress(number + 1)
    finally:
        gc.unfreeze()
    return samples


def steadied(samples: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Rescale every round of `interleaved` times so that all last as long as the median one.

    A shared machine slows down for longer than a round lasts, and then slows all samplers alike:
    what is left are the differences between them. Their ratios get two to three times steadier.
    """
    totals = [sum(times) for times in zip(*samples.values(), strict=True)]
    typical = statistics.median(totals)
    return {
        name: [time * typical / total for time, total in zip(times, totals, strict=True)]
        for name, times in samples.items()
    }


def microseconds(action: Callable[[], object]) -> float:
    """Time one call. What it returns is released inside the timing, as it is in a training loop."""
    start = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - start) / 1e3
