"""`DTensor` and its local tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from recollect._torch.dtensors import (
    has_dtensors,
    is_redistributing,
    is_wrapper,
    local_tensor,
    ranks_of_parts,
    spec_of,
    wrapped,
)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_a_dtensor_is_taken_apart_and_put_together(mesh: Any) -> None:
    whole: Any = DTensor.from_local(torch.arange(2.0), mesh, [Shard(0)])
    local = local_tensor(whole)
    assert type(local) is torch.Tensor
    assert local.tolist() == [0.0, 1.0]
    again: Any = wrapped(local, spec_of(whole))
    assert type(again) is DTensor
    assert again.shape == (8,)
    assert again.placements == whole.placements
    assert local_tensor(again) is local


def test_the_result_of_a_collective_is_unwrapped(mesh: Any) -> None:
    inner = torch.ones(2)
    waiting = AsyncCollectiveTensor(inner)
    assert local_tensor(waiting) is inner
    assert spec_of(waiting) is None
    assert is_wrapper(AsyncCollectiveTensor)


def test_a_plain_tensor_is_its_own_local_tensor() -> None:
    tensor = nn.Parameter(torch.ones(2))
    assert local_tensor(tensor) is tensor
    assert spec_of(tensor) is None
    assert not has_dtensors([torch.Tensor, nn.Parameter])


def test_the_ranks_that_have_parts(mesh: Any) -> None:
    model = nn.Linear(4, 4)
    assert ranks_of_parts(model) == set()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    assert ranks_of_parts(model) == {0, 1, 2, 3}


def test_redistribution_is_recognized(mesh: Any) -> None:
    seen: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if has_dtensors(types):
                return NotImplemented
            if "all_gather" in str(func):
                seen.append(is_redistributing(sys._getframe()))
            return func(*args, **(kwargs or {}))

    whole: Any = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    with Watch():
        whole.redistribute(placements=[Replicate()])
        torch.ops._c10d_functional.all_gather_into_tensor(
            torch.ones(2), 4, mesh.get_group().group_name
        )
    assert seen == [True, False]
