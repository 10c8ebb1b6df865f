"""Two processes that communicate, each with its own recollect, and a deadline.

A test calls `run_ranks` with a function of this folder, which runs in every process. What fails in
one of them fails the test, and so does a hang: all processes are ended at the deadline.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

WORLD = 2
#: Seconds. Most of them are for imports on a busy machine.
_DEADLINE = 120.0
_SILENCE = 30.0

Work = Callable[..., None]


def run_ranks(
    work: Work,
    folder: Path,
    *args: Any,
    deadline: float = _DEADLINE,
    world: int = WORLD,
    backend: str = "gloo",
) -> None:
    """Run ``work(*args)`` in ``world`` processes of one group."""
    group = (str(folder / "store"), world, backend)
    context = mp.start_processes(_run_rank, (group, work, args), nprocs=world, join=False)
    end = time.monotonic() + deadline
    try:
        while not context.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                pytest.fail(f"{work.__name__} hangs")
    finally:
        for process in context.processes:
            process.kill()


def _run_rank(rank: int, group: tuple[str, int, str], work: Work, args: tuple[Any, ...]) -> None:
    store, world, backend = group
    torch.set_num_threads(1)
    # torch has renamed functions of its own, and tells.
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_SILENCE),
    )
    try:
        work(*args)
    finally:
        dist.destroy_process_group()
    # Threads of gloo outlive the group. One that drops a tensor while Python shuts down aborts the
    # process, with recollect and without. So this ends without shutting down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def collectives_so_far() -> int:
    """How many collectives and messages the group of all processes has begun."""
    assert dist.group.WORLD is not None
    return int(dist.group.WORLD._get_sequence_number_for_group())


Step = Callable[[int], tuple[Tensor, list[Tensor]]]


def outcomes(step: Step, count: int = 3) -> tuple[list[Any], list[int]]:
    """Losses and gradients of steps, and how many collectives each has run."""
    found, collectives = [], []
    for number in range(count):
        torch.manual_seed(10 * number + dist.get_rank())
        before = collectives_so_far()
        loss, leaves = step(number)
        loss.backward()
        collectives.append(collectives_so_far() - before)
        grads = [None if each.grad is None else local(each.grad).clone() for each in leaves]
        found.append([loss.detach().clone(), *grads])
        for each in leaves:
            each.grad = None
    return found, collectives


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def steps_of(model: nn.Module, batch: Callable[[int], Tensor]) -> Step:
    """Steps of ``model``."""

    def step(number: int) -> tuple[Tensor, list[Tensor]]:
        return model(batch(number)).square().mean(), [*model.parameters()]

    return step
