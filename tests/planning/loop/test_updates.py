"""Steps of optimizers are noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from recollect.planning.loop.updates import StateWatch


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("foreach", [True, False])
def test_an_update_of_a_dtensor_is_counted_as_a_write(mesh: Any, foreach: bool) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
    idle = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    optimizer = torch.optim.AdamW([parameter, idle], foreach=foreach)
    watch = StateWatch()
    saved = parameter.exp()
    before = parameter._version, idle._version
    loss = (saved * parameter).sum()
    optimizer.step()
    assert parameter._version > before[0]
    assert idle._version == before[1]
    assert watch.nbytes([parameter]) > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
