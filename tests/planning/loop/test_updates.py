"""Steps of optimizers are noticed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import recollect
from recollect.planning.loop.updates import (
    FirstCall,
    StateWatch,
    Updates,
    _state_of,
    _watching,
)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_state_that_grows_within_a_step_is_counted() -> None:
    """As the history of LBFGS, which calls its closure several times."""
    parameter = nn.Parameter(torch.ones(100))
    optimizer = torch.optim.LBFGS([parameter], max_iter=6)
    watch, seen = StateWatch(), []

    def closure() -> torch.Tensor:
        seen.append(watch.nbytes([parameter]))
        optimizer.zero_grad()
        loss = parameter.cos().cumsum(0).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    first = len(seen)
    optimizer.step(closure)
    later = seen[first:]
    assert later == sorted(later)
    assert later[-1] >= later[0] + 2 * 2 * parameter.nbytes


def test_what_a_step_holds_beside_its_state_is_counted() -> None:
    parameter, other = nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(50))
    optimizer = torch.optim.LBFGS([parameter, other], max_iter=4, history_size=2)
    watch, seen, held = StateWatch(), [], []

    def closure() -> torch.Tensor:
        seen.append(watch.nbytes([parameter]))
        held.append(allocated())
        optimizer.zero_grad()
        loss = parameter.cos().cumsum(0).square().sum() + other.sin().sum()
        loss.backward()
        return loss

    def allocated() -> int:
        flat = [e for e in gc.get_objects() if type(e) is torch.Tensor and e.shape == (150,)]
        return len({each.data_ptr() for each in flat}) * 150 * 4

    for _ in range(4):
        optimizer.step(closure)
    first = len(seen) - 4
    assert held[-1] > sum(each.nbytes for each in _state_of(optimizer) if each.dim())
    # Of a step's first closure more is counted than is held: one schedule serves them all.
    assert [n // 600 for n in seen[first + 1 :]] == [n // 600 for n in held[first + 1 :]]
    assert seen[first] > held[first]


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


@pytest.mark.parametrize("with_batch", [False, True])
def test_a_model_whose_parts_are_called_in_place_of_it(with_batch: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.ones(4, 8)
    if with_batch:
        recollect.plan(model, x, "1GiB").apply(model)
    else:
        recollect.fit(model, budget="70%")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            model[2](model[1](model[0](x))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        model(x)  # an evaluation
    optimizer.step()  # without gradients
    train(7)
    with pytest.warns(
        recollect.PlanWarning,
        match=r"this Sequential .* never called.*one by one: model\.0, model\.2$",
    ) as caught:
        train(1)
    assert caught[0].filename == __file__
    train(9)  # a second warning would be an error


def test_nobody_waits_for_a_model_that_was_called_or_unwrapped() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(4, 8)
    recollect.fit(model, budget="70%")
    assert any(isinstance(each, FirstCall) for each in _watching)
    model(x).sum().backward()
    assert not any(isinstance(each, FirstCall) for each in _watching)
    recollect.unwrap(model)
    recollect.fit(model, budget="70%")
    recollect.unwrap(model)
    assert not any(isinstance(each, FirstCall) for each in _watching)


def test_the_first_step_of_an_optimizer_that_calls_forward_in_it() -> None:
    """As Lightning does. Its state was not there before."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    StateWatch()
    updates = Updates(model.parameters())

    def closure() -> torch.Tensor:
        updates.begin()
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert updates.are_there
    assert updates.made_bytes() == updates.state_bytes() > 2 * model.weight.nbytes
