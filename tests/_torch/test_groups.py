"""Groups of processes and stages of pipelines, as `_torch.groups` sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from recollect._torch.groups import (
    MESSAGES,
    collectives_begun,
    has_peers,
    is_in_stage,
    stages_beside,
)
from recollect._torch.ops import op_name


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def test_a_process_without_a_group_has_no_peers() -> None:
    assert not has_peers()


def test_collectives_are_counted(alone: None) -> None:
    before = collectives_begun()
    distributed.all_reduce(torch.ones(2))
    distributed.barrier()
    assert collectives_begun() == before + 2


def test_models_of_stages_are_known(alone: None) -> None:
    model, other = nn.Sequential(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2)
    assert not is_in_stage(model)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    assert is_in_stage(model)
    assert is_in_stage(model[0])
    assert not is_in_stage(other)
    del stage


def test_stages_of_one_schedule_are_beside_each_other(alone: None) -> None:
    first, second, other = (nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
    stages = [PipelineStage(m, n, 2, torch.device("cpu")) for n, m in enumerate((first, second))]
    earlier = PipelineStage(other, 0, 1, torch.device("cpu"))
    assert stages_beside(first) == []
    schedule = ScheduleInterleaved1F1B([*stages], 2)
    assert stages_beside(first) == [second]
    assert stages_beside(second[0]) == [first]
    assert stages_beside(other) == []
    del schedule, earlier


def test_messages_are_ops_of_torch() -> None:
    packets = (torch.ops.c10d.send, torch.ops.c10d.recv_, torch.ops.c10d.recv_any_source_)
    assert {op_name(packet.default) for packet in packets} == MESSAGES
