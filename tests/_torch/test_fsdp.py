"""FSDP2's own state, as `_torch.fsdp` reads it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from recollect._torch.fsdp import HookRanges, is_shared, is_unit, put_gradients, shards_of
from recollect._torch.groups import default_store, group_timeout, has_peers
from recollect._torch.ops import op_name


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=77),
    )
    yield
    distributed.destroy_process_group()


def _model(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 4)))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[1], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def test_units_are_found() -> None:
    model = _model()
    assert [is_unit(each) for each in model.modules()] == [True, False, True, False, False]
    shards = shards_of(model)
    assert shards is not None
    assert shards_of(model) is shards
    assert shards.ranks == [0]
    assert shards.device == torch.device("cpu")
    assert {id(each) for each in shards.parameters()} == {id(p) for p in model.parameters()}
    assert shards_of(nn.Linear(2, 2)) is None


def test_a_model_with_units_or_on_dtensors_is_shared() -> None:
    parallel = nn.Sequential(nn.Linear(2, 2))
    assert not is_shared(parallel)
    assert is_shared(_model())
    parallelize_module(parallel, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    assert is_shared(parallel)


def test_a_model_is_not_kept_alive() -> None:
    model = _model()
    model(torch.ones(2, 4)).sum().backward()
    assert shards_of(model) is not None
    alive = ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_model_that_becomes_a_unit_is_looked_at_again() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    before = shards_of(model)
    assert before is not None
    assert len(before.parameters()) == 2
    after = shards_of(fully_shard(model, mesh=mesh))
    assert after is not None
    assert len(after.parameters()) == 4


def test_what_is_gathered_is_counted_while_it_is_there() -> None:
    model = _model()
    shards = shards_of(model)
    assert shards is not None
    outer, inner = 4 * (4 * 8 + 8), 4 * (8 * 4 + 4)
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(shards.gathered_bytes()))
    model[1][0].register_forward_hook(lambda *_: seen.append(shards.gathered_bytes()))
    assert shards.gathered_bytes() == 0
    loss = model(torch.ones(2, 4)).sum()
    assert seen == [outer, outer + inner]
    assert shards.gathered_bytes() == outer
    assert len(shards.gathered_storages()) == 4
    loss.backward()
    assert shards.gathered_bytes() == 0
    assert shards.in_flight_bytes() >= 2 * outer


def test_gathered_parameters_are_known_by_their_parts() -> None:
    model = _model(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    shards = shards_of(model)
    assert shards is not None
    before = dict(model.named_parameters())
    found: list[Tensor] = []

    def look(*_: Any) -> None:
        gathered = model[0].weight
        assert gathered.dtype is torch.bfloat16
        found.append(shards.sharded()[id(gathered)])

    model[0].register_forward_pre_hook(look)
    model(torch.ones(2, 4)).sum().backward()
    assert found[0] is before["0.weight"]


def test_gradients_that_wait_to_be_reduced_are_taken_and_put_back() -> None:
    model = _model()
    shards = shards_of(model)
    assert shards is not None
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    waiting = [each.clone() for each in shards.gradients()]
    assert len(waiting) == 4
    taken = shards.take_gradients()
    assert shards.gradients() == []
    put_gradients(taken)
    assert all(map(torch.equal, shards.gradients(), waiting))
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 4)).sum().backward()
    assert shards.gradients() == []
    assert model[0].bias.grad.to_local().tolist() == [2 * each for each in waiting[1].tolist()]


class _OneOfTwo(nn.Bilinear):
    """Uses its weight or its bias."""

    def forward(self, x: Tensor, which: int) -> Any:
        return (x * self.weight[0, 0]).sum() if which else (x[:, :2] * self.bias).sum()


def test_gradients_that_other_ranks_have_not_added_are_put_back_where_they_were() -> None:
    def model() -> Any:
        torch.manual_seed(0)
        made = _OneOfTwo(4, 4, 2)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        return fully_shard(made, mesh=mesh)

    def steps(model: Any, *, between: bool) -> list[Any]:
        x = torch.linspace(0, 1, 4).expand(2, 4)
        model.set_requires_all_reduce(False)
        model(x, 1).backward()
        if between:
            shards = shards_of(model)
            assert shards is not None
            taken = shards.take_gradients()
            model(x, 0).backward()
            shards.take_gradients()
            put_gradients(taken)
        model.set_requires_all_reduce(True)
        model(x, 1).backward()
        return [None if p.grad is None else p.grad.to_local().tolist() for p in model.parameters()]

    assert steps(model(), between=True) == steps(model(), between=False)


def test_what_plans_do_not_support_is_said() -> None:
    model = _model()
    shards = shards_of(model)
    assert shards is not None
    assert shards.obstacle() is None
    model[1].set_unshard_in_backward(False)
    assert "set_unshard_in_backward(False) was called on a FSDPSequential" in str(shards.obstacle())


def test_it_is_set_up_once_as_by_the_first_forward() -> None:
    model = _model()
    shards = shards_of(model)
    assert shards is not None
    shards.initialize()
    shards.initialize()
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_group() -> None:
    assert group_timeout() == 77.0
    assert not has_peers()
    default_store().set("here", b"1")
    assert default_store().check(["here"])


class Seen(TorchDispatchMode):
    """The ops that run: the region's, and those of hooks that gather parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks = HookRanges()
        self.own: list[str] = []
        self.of_hooks: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op_name(func)
        (self.of_hooks if self._hooks.owns(name, args) else self.own).append(name)
        return func(*args, **(kwargs or {}))


def test_ops_of_hooks_are_told_from_those_of_the_model() -> None:
    model = nn.Linear(4, 4)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (1,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    x = torch.ones(2, 4, requires_grad=True)
    with Seen() as seen, record_function("a range of the model"):
        model(x)
    ranges = "profiler::_record_function_enter_new", "profiler::_record_function_exit"
    ops = [name for name in seen.own if name not in ranges]
    assert ops == ["aten::_to_copy", "aten::t", "aten::addmm"]
    assert "aten::copy_" in seen.of_hooks
    # The ranges of the model, and of the cast of its input.
    assert [seen.own.count(each) for each in ranges] == [2, 2]


def test_a_hook_that_raises_ends_its_ranges() -> None:
    with Seen() as seen:
        outer, inner = record_function("FSDP::pre_forward"), record_function("FSDP::all_gather")
        with pytest.raises(KeyError), outer, inner:
            raise KeyError
        torch.ones(2)
    assert seen.own == ["aten::ones"]
