"""Planned models in training by several processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import recollect
from recollect._torch.fsdp import shards_of
from recollect.planning.recording.step import TrainingStep
from tests._support import assert_identical
from tests.distributed._ranks import run_ranks
from tests.planning._models import made, static_bytes
from tests.planning.test_budgets import step_peak

_STEPS = 4


def _compare(name: str) -> None:
    planned = made(name)
    static = static_bytes(planned.model)
    plain = replace(planned, model=DistributedDataParallel(copy.deepcopy(planned.model)))
    frontier = recollect.frontier(planned.model, planned.batch, loss=planned.loss)
    plan = frontier.plan_for((frontier.least + frontier.plain_peak) // 2)
    planned = replace(planned, model=DistributedDataParallel(plan.apply(planned.model)))
    for seed in range(_STEPS):
        for each in (plain, planned):
            each.model.zero_grad(set_to_none=True)
            torch.manual_seed(seed + dist.get_rank())
        peak = step_peak(planned)
        torch.manual_seed(seed + dist.get_rank())
        plain.step()
        # What the wrapper takes is not counted: its buckets in the first two steps, and later a
        # little to keep buffers the same.
        if seed > 1:
            assert peak + static < (plan.budget + plan.plain_peak) // 2
        ours, theirs = (
            [[p.grad for p in each.model.parameters()], [*each.model.buffers()]]
            for each in (planned, plain)
        )
        assert_identical(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder_dropout", "conv"])
def test_data_parallel_training(name: str, tmp_path: Path) -> None:
    run_ranks(_compare, tmp_path, name)


# --- refusals, with the way out -------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("batch", [None, torch.randn(4, 8)], ids=["loop", "batch"])
def test_a_model_that_is_compiled_and_sharded_is_refused(alone: None, batch: Any) -> None:
    with pytest.raises(ValueError, match="it is compiled, and its parameters are distributed"):
        recollect.fit(_compiled_and_sharded(nn.Sequential(nn.Linear(8, 8))), batch, 0.9)


def test_a_model_that_was_compiled_and_sharded_since_it_was_fitted(alone: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    recollect.fit(model, budget=0.9)
    with pytest.warns(recollect.PlanWarning, match="is compiled, and its parameters") as caught:
        _compiled_and_sharded(model)(torch.randn(4, 8)).sum().backward()
    assert "Pass the batch" not in str(caught[0].message)  # that is refused


def _compiled_and_sharded(model: nn.Sequential) -> nn.Module:
    for block in model:
        block.compile(backend="aot_eager")
    return fully_shard(model)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _shard_all(name: str, module: nn.Module, mesh: Any) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        sharded = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
        module.register_parameter(key, sharded)


def _plan(model: nn.Module) -> Any:
    return recollect.plan(model, torch.ones(2, 4), 0.9)


def test_a_wrapped_model_is_refused(alone: None) -> None:
    wrapped = DistributedDataParallel(_layers())
    with pytest.raises(ValueError, match=r"recollect\.plan\(model\.module, batch, budget\)"):
        _plan(wrapped)
    with pytest.raises(ValueError, match=r"recollect\.plan\(model\.0\.module, batch, budget\)"):
        _plan(nn.Sequential(wrapped))


def test_a_wrapper_that_counts_every_backward_is_refused(alone: None) -> None:
    wrapped = DistributedDataParallel(_layers(), static_graph=True)
    for model in (wrapped, wrapped.module, wrapped.module[0]):
        with pytest.raises(ValueError, match="static_graph=True, which would count the backwards"):
            _plan(model)


def test_a_plan_is_not_applied_to_the_wrapper(alone: None) -> None:
    model = _layers()
    frontier = recollect.frontier(model, torch.ones(2, 4))
    plan = frontier.plan_for(frontier.plain_peak)
    with pytest.raises(ValueError, match=r"plan\.apply\(model\.module\)"):
        plan.apply(DistributedDataParallel(model))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_model_wrapped_by_the_older_fsdp_is_refused(alone: None) -> None:
    flat = FullyShardedDataParallel(_layers(), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"it is wrapped in FullyShardedDataParallel.* before"):
        _plan(flat)


def test_parameters_that_backward_does_not_gather_are_refused(alone: None) -> None:
    model: Any = _layers()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    model[0].set_unshard_in_backward(False)
    with pytest.raises(
        ValueError, match=r"set_unshard_in_backward\(False\) was called on a FSDPLin"
    ):
        _plan(model)
    with pytest.raises(ValueError, match=r"Call set_unshard_in_backward\(True\), or leave it out"):
        recollect.fit(model, budget=0.9)
    model[0].set_unshard_in_backward(True)
    assert recollect.fit(model, budget=0.9) is model


def test_parameters_that_backward_no_longer_gathers(alone: None) -> None:
    # Plain autograd needs none of the first unit. To recompute what it saves would read them.
    def sharded() -> Any:
        torch.manual_seed(0)
        words = nn.Sequential(nn.Embedding(8, 16), nn.GELU(), nn.GELU())
        model = nn.Sequential(words, nn.Sequential(nn.Linear(16, 16), nn.GELU()))
        for unit in (*model, model):
            fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
        return model

    tokens, found = torch.arange(8).repeat(64), []
    for is_planned in (False, True):
        model = sharded()
        if is_planned:
            recollect.fit(model, tokens, 0.92)
        model[0].set_unshard_in_backward(False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", recollect.PlanWarning)
            for _ in range(3):
                model(tokens).square().sum().backward()
        messages = [str(each.message) for each in caught]
        assert len(messages) == is_planned, messages
        found.append([each.grad.to_local() for each in model.parameters()])
    assert "not in effect" in messages[0]
    assert "set_unshard_in_backward(False) was called on a FSDPSequential" in messages[0]
    assert_identical(*found)


class Packed(Tensor):
    """Gathered in a way of its own."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_an_all_gather_of_a_subclass_is_refused(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = _layers()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    (shard, *_) = shards_of(model)._parameters()  # type: ignore[union-attr]
    packed = shard._sharded_local_tensor.detach().as_subclass(Packed)
    monkeypatch.setattr(type(shard), "_sharded_local_tensor", packed)
    with pytest.raises(ValueError, match=r"its weight is a Packed.* checkpoint blocks in place"):
        _plan(model)


def test_results_of_a_sharded_model_are_not_offloaded(alone: None) -> None:
    model: Any = _layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="DTensor parameters, do not offload"):
        recollect.plan(model, torch.ones(2, 4), 0.9, offload=True)


def test_results_of_a_parallelized_model_are_not_offloaded(alone: None) -> None:
    model = distribute_module(_layers(), init_device_mesh("cpu", (1,)), _shard_all)
    with pytest.raises(ValueError, match="DTensor parameters, do not offload"):
        recollect.plan(model, torch.ones(2, 4), 0.9, offload=True)


class Summing(nn.Linear):
    """Adds up results of all processes."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.mean(0)
        dist.all_reduce(total)
        return super().forward(x * total)


def test_a_model_that_would_communicate_is_planned_in_a_group_of_one(alone: None) -> None:
    frontier = recollect.frontier(Summing(4, 4), torch.ones(2, 4))
    assert frontier.plan_for(frontier.plain_peak)


def _refuse() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Summing(4, 4))
    with pytest.raises(ValueError, match=r"communicates with other processes \(c10d::allreduce_\)"):
        _plan(model)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_a_model_that_communicates_is_refused(tmp_path: Path) -> None:
    run_ranks(_refuse, tmp_path)


# --- bytes of what is sharded ---------------------------------------------------------------------


@pytest.fixture
def eight() -> Iterator[None]:
    """One of eight processes, of which there is no other."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def test_parameters_count_with_the_part_that_is_here(eight: None) -> None:
    mesh = init_device_mesh("cpu", (8,))
    model = distribute_module(nn.Linear(64, 64), mesh, _shard_all)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    whole = (64 * 64 + 64) * 4
    step = TrainingStep(model, (torch.ones(1, 64),), {}, optimizer=optimizer)
    assert step.base_bytes() == whole // 8
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    step = TrainingStep(model, (torch.ones(1, 64),), {}, optimizer=optimizer)
    assert step.base_bytes() == 3 * whole // 8


@pytest.mark.parametrize("world", [8, 64])
def test_a_plan_for_one_of_many_ranks_without_the_others(world: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        _plan_alone(world)
    finally:
        dist.destroy_process_group()


def _plan_alone(world: int) -> None:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    model: Any = nn.Sequential(*blocks)
    whole = sum(each.nbytes for each in model.parameters())
    mesh = init_device_mesh("cpu", (world,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(128, 64)
    frontier = recollect.frontier(model, x)
    shards = shards_of(model)
    assert shards is not None
    assert frontier.graph.base == whole // world + shards.in_flight_bytes()
    assert frontier.graph.units == ("0", "1", "2")
    # The parameters of two units are there at once, and never those of all.
    gathered = max(event.during for event in frontier.graph.events)
    assert whole // 3 < gathered
    plan = frontier.plan_for((frontier.least + frontier.plain_peak) // 2)
    assert frontier.least < plan.predicted_peak <= plan.budget < frontier.plain_peak
    plan.apply(model)(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.skipif(torch.__version__ < "2.12", reason="DTensor of torch 2.11 cannot do this")
@pytest.mark.parametrize("world", [8, 64])
def test_a_plan_for_a_parallel_model_without_the_other_ranks(world: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        _plan_parallel(world)
    finally:
        dist.destroy_process_group()


def _plan_parallel(world: int) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    whole = sum(each.nbytes for each in model.parameters() if each.ndim == 2)
    biases = sum(512 // world * 4 + 64 * 4 for _ in blocks)  # the second is on all ranks
    mesh = init_device_mesh("cpu", (world,))
    for block in blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(256, 64)
    model(x).sum().backward()
    expected = [each.grad for each in model.parameters()]
    for each in model.parameters():
        each.grad = None
    frontier = recollect.frontier(model, x)
    step = TrainingStep(model, (x,), {})
    assert step.base_bytes() == whole // world + biases
    graph = frontier.graph
    assert graph.base > step.base_bytes()  # collectives may free their buffers late
    assert any("all_reduce" in op.name for op in graph.ops)
    assert not any("all_reduce" in graph.ops[n].name for n in graph.choices)
    plan = frontier.plan_for((frontier.least + frontier.plain_peak) // 2)
    assert frontier.least < plan.predicted_peak <= plan.budget < frontier.plain_peak
    for _ in range(2):
        plan.apply(model)(x).sum().backward()
        assert_identical([each.grad for each in model.parameters()], expected)
        for each in model.parameters():
            each.grad = None
        plan.remove(model)
