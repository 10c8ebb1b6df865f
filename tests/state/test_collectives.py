"""Collectives of SyncBatchNorm are not repeated in a rerun."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect.state.collectives import CollectivePlayer, CollectiveRecorder
from tests._support import Run, identical, leaf, plain, reentrant, rerun

ENGINES = pytest.mark.parametrize("run", [rerun, reentrant], ids=["rerun", "reentrant"])


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


class Gather(nn.SyncBatchNorm):
    """Communicates as ``SyncBatchNorm`` does, and runs on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        means = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
        dist.all_gather(means, mean)
        dist.all_reduce(mean)
        return (x - sum(means)).sin() * mean


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@ENGINES
def test_no_second_collective(run: Run, alone: None) -> None:
    layer, x = Gather(3), leaf(4, 3)
    plain(layer, x).sum().backward()
    expected, x.grad = x.grad, None
    out = run(nn.Sequential(nn.Identity(), layer), x)
    with CountCollectives() as counter:
        out.sum().backward()
    assert counter.count == 0
    assert identical(x.grad, expected)


def test_a_recomputation_that_communicates_more_is_loud(alone: None) -> None:
    layer, x, more = Gather(3), leaf(4, 3), []

    def region(x: Tensor) -> Tensor:
        for _ in more:
            dist.all_reduce(torch.ones(1))
        return layer(x)

    out = rerun(region, x)
    more.append(1)
    with pytest.raises(recollect.CheckpointError, match="communicates with other processes"):
        out.sum().backward()


def test_what_was_gathered_is_not_shared_with_the_user(alone: None) -> None:
    with CollectiveRecorder() as recorder:
        first = torch.ones(2)
        dist.all_reduce(first)
    first.zero_()
    second = torch.full((2,), 5.0)
    with CollectivePlayer(recorder):
        dist.all_reduce(second)
    assert second.tolist() == [1, 1]


def _train(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    data = torch.randn(6, 4, device="cuda")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Tanh()).cuda()
    found = []
    for run in (plain, rerun, reentrant):
        net, x = copy.deepcopy(model), data.clone().requires_grad_()
        out = run(net, x)
        with CountCollectives() as counter:
            out.square().sum().backward()
        values = [x.grad, *net.buffers(), *(p.grad for p in net.parameters())]
        found.append((counter.count, [value.cpu() for value in values]))
    if rank == 0:
        results.put([(count, [v.tolist() for v in values]) for count, values in found])
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sync_batch_norm_of_two_processes(tmp_path: Path) -> None:
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_train, (str(tmp_path / "store"), results), nprocs=2)
    plainly, *checkpointed = results.get()
    for found in checkpointed:
        assert found == plainly
