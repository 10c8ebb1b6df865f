"""The workspace of an op: what it allocates beside its results, while it runs (P3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch

from recollect._torch.devices import profiler_is_on
from recollect._torch.profiler import changes_in_op
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key

T = TypeVar("T")
_Tensor = torch.Tensor


class Priced(Protocol):
    """An op with a price."""

    name: str
    moved: int
    workspace: int


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


def likely_workspace(price: Priced, others: Iterable[Priced]) -> int:
    """Estimate the workspace of an op from the same op on other arguments."""
    known = [each for each in others if each.name == price.name and each.moved]
    if not known or not price.moved:
        return 0
    nearest = min(known, key=lambda each: abs(math.log(each.moved / price.moved)))
    return math.ceil(nearest.workspace * max(1.0, price.moved / nearest.moved))


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
