"""Writes to held tensors are noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from recollect._torch.dtensors import local_tensor
from recollect.errors import InputChanged
from recollect.replay.held_values import HeldTensor
from recollect.replay.recorded_graph import layout_of


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("write", [lambda w: w.mul_(2), lambda w: w.to_local().mul_(2)])
def test_a_write_to_a_dtensor_or_its_local_tensor(mesh: Any, write: Any) -> None:
    whole = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    local = local_tensor(whole)
    layout = layout_of(local, 0)
    held = HeldTensor(local, layout, local._version)
    held.count_by(whole)
    assert held.is_unchanged()
    assert held.get(layout, is_guarded=True) is local
    write(whole)
    assert not held.is_unchanged()
    with pytest.raises(InputChanged):
        held.get(layout, is_guarded=True)
    held.count_version()
    assert held.get(layout, is_guarded=True) is local
