"""The memory that some code allocates: by the events of a profiler, or by CUDA's allocator (P2)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import profile

from recollect._torch.devices import (
    MemoryChange,
    changes_in_op,
    memory_changes,
    profiler_is_on,
    stderr_hushed,
)
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key

T = TypeVar("T")
_Tensor = torch.Tensor


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


# --- of one op ------------------------------------------------------------------------------------


def workspace_of(run: Callable[[], Any], device: torch.device) -> int:
    """Run an op. Returns the most bytes that it had allocated beside those that are left after it.

    What libraries allocate at their first use stays, and is left too. Not in a thread with a
    profiler.
    """
    changes = changes_in_op(run, on_cuda=device.type == "cuda")
    totals = [*accumulate(changes, initial=0)]
    return max(totals) - max(totals[-1], 0)


def apart_from_profilers(run: Callable[[], T]) -> T:
    """What ``run`` returns, which needs no gradients: in another thread, if this has a profiler."""
    if not profiler_is_on():
        return run()

    def without_gradients() -> T:
        torch.get_num_threads()  # which has libraries use as many here: workspaces depend on that
        with torch.no_grad():
            return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(without_gradients).result()


def allocated_beside_results(run: Callable[[], Any], values: Any, device: torch.device) -> int:
    """Run an op on ``values`` in a thread with a profiler, on CUDA: all that it allocates.

    At least its workspace. The allocator's peak would tell more, but is the user's to reset.
    """
    before = _total_allocated(device)
    result = run()
    results = sum(each.numel() * each.dtype.itemsize for each in _new_tensors(result, values))
    return max(0, _total_allocated(device) - before - results)


def _total_allocated(device: torch.device) -> int:
    """The bytes of all allocations on a CUDA device so far."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    total: int = stats["allocated_bytes"]["all"]["allocated"]
    return total


def _new_tensors(result: Any, values: Any) -> list[_Tensor]:
    """The tensors of a result, each storage once, that are not on a storage of ``values``."""
    known = {storage_key(leaf) for leaf in tree_leaves(values) if isinstance(leaf, _Tensor)}
    made = {storage_key(each): each for each in tree_leaves(result) if isinstance(each, _Tensor)}
    return [tensor for key, tensor in made.items() if key not in known]
