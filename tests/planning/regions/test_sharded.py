"""Plans by the units of a sharded model, in a group of one process; `tests.distributed` has two."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import recollect
from recollect import PlanWarning
from recollect.modules import OPTIONS
from recollect.planning.regions.sharded import units_of
from tests.distributed._sharded import BF16, Decoder, Sharding, loss_of, tokens, trained


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("error", category=PlanWarning)
        yield
    dist.destroy_process_group()


# --- which modules are units ----------------------------------------------------------------------


def test_the_largest_modules_without_a_unit_inside_are_units() -> None:
    assert units_of(Decoder()) == ()
    assert units_of(Sharding().model()) == ("blocks.0", "blocks.1", "blocks.2")
    assert units_of(Sharding(root=False).model()) == ("blocks.0", "blocks.1", "blocks.2")
    assert units_of(Sharding(blocks=False).model()) == ()
    nested = units_of(Sharding(calls=(0, 1), nested=True).model())
    # Layers of torch's save nothing but what crosses their border.
    assert nested == ("blocks.0.mlp", "blocks.1.mlp")


def test_parts_of_a_unit_with_units_inside_are_units_too() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert units_of(model) == ("0", "1")


# --- the same gradients, within the budget --------------------------------------------------------

SHARDINGS = {
    "blocks": Sharding(),
    "shared blocks": Sharding(calls=(0, 1, 0, 1, 0)),
    "mixed precision": Sharding({"mp_policy": BF16}),
    "the root alone": Sharding(blocks=False),
}


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_gradients_are_the_same_within_the_budget(sharding: Sharding) -> None:
    expected = trained(sharding.model(), 3)
    model = sharding.model()
    frontier = recollect.frontier(model, tokens(0), loss=loss_of)
    plan = frontier.plan_for((2 * frontier.least + frontier.plain_peak) // 3)
    plan.apply(model)
    found = trained(model, 3)
    found.check(expected)
    assert max(found.peaks) <= plan.budget < frontier.plain_peak
    # To the byte, but for buffers of collectives, which may be freed late.
    assert max(found.peaks) >= plan.predicted_peak - (frontier.plain_peak - max(expected.peaks))
    plan.remove(model)
    assert all(OPTIONS not in vars(each) for each in model.modules())


def test_calls_of_a_shared_block_have_decisions_of_their_own() -> None:
    model = Sharding(calls=(0, 0, 0)).model()
    graph = recollect.frontier(model, tokens(0), loss=loss_of).graph
    keys = [op.key for op in graph.ops]
    assert len(set(keys)) == len(keys)
    assert {op.path.partition(".mlp")[0] for op in graph.ops if "mlp" in op.path} == {
        "blocks.0",
        "blocks.0@1",
        "blocks.0@2",
    }


def test_gathered_parameters_are_counted_while_they_are_there() -> None:
    model = Sharding().model()
    graph = recollect.frontier(model, tokens(0), loss=loss_of).graph
    whole = {n: sum(p.numel() * 4 for p in b.parameters()) for n, b in enumerate(model.blocks)}
    outer = sum(p.numel() * 4 for p in model.parameters()) - sum(whole.values())
    inside = [e for e in graph.events if e.op >= 0]
    assert all(event.before >= outer + whole[0] for event in inside)


def test_steps_of_other_shapes_and_accumulated_gradients() -> None:
    sharding, sizes = Sharding(), (4, 4, 6, 6, 2, 4)

    def batch(step: int) -> torch.Tensor:
        return tokens(step, sizes[step % len(sizes)])

    for accumulate in (1, 2):
        expected = trained(sharding.model(), 6, batch, accumulate)
        model = sharding.model()
        plan = recollect.plan(model, tokens(0), 0.8, loss=loss_of)
        plan.apply(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)  # some are larger than planned
            trained(model, 6, batch, accumulate).check(expected)


def test_a_plan_from_the_loop() -> None:
    sharding = SHARDINGS["mixed precision"]
    expected = trained(sharding.model(), 4)
    model = sharding.model()
    recollect.fit(model, budget=0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # the first step may take more
        found = trained(model, 4)
    found.check(expected)
    plan = vars(model)[OPTIONS].plan
    assert plan.schedule.units == ("blocks.0", "blocks.1", "blocks.2")
    assert max(found.peaks[1:]) <= plan.budget
    recollect.unwrap(model)
    assert all(OPTIONS not in vars(each) for each in model.modules())


@pytest.mark.parametrize("name", ["blocks", "the root alone"])
def test_a_step_of_several_forwards(name: str) -> None:
    sharding = SHARDINGS[name]
    expected = trained(sharding.model(), 5, of_sizes, forwards=2)
    model = sharding.model()
    recollect.fit(model, budget=0.75)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # the first step may take more
        trained(model, 2, of_sizes, forwards=2)
    plan = vars(model)[OPTIONS].plan
    assert [each.schedule.units for each in plan.forwards] == [units_of(model)] * 2
    assert plan.forwards[0].schedule != plan.forwards[1].schedule
    assert len(plan.graph.regions) == 2
    found = trained(plan.apply(sharding.model()), 5, of_sizes, forwards=2)
    found.check(expected)
    assert max(found.peaks) <= plan.budget
    assert max(found.peaks) < min(expected.peaks)


def of_sizes(number: int) -> torch.Tensor:
    """Two sizes in turn."""
    return tokens(number, (4, 3)[number % 2])


def test_a_forward_more_than_planned_is_warned_of_and_then_planned() -> None:
    sharding = SHARDINGS["blocks"]
    expected = trained(sharding.model(), 5, forwards=2)
    model = sharding.model()
    recollect.fit(model, tokens(0), 0.75, loss=loss_of)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        found = trained(model, 5, forwards=2)
    found.check(expected)
    messages = [str(each.message) for each in caught if each.category is PlanWarning]
    assert "begins while an earlier one still waits" in messages[0]
    assert "it calls the model 2 times before backward" in messages[1]
    assert max(found.peaks[2:]) < min(expected.peaks)


def test_gradients_that_wait_to_be_reduced_are_not_changed_by_planning() -> None:
    found = []
    for plans in (False, True):
        model: Any = Sharding().model()
        model.set_requires_gradient_sync(False)
        torch.manual_seed(0)
        loss_of(model(tokens(0))).backward()
        if plans:
            recollect.plan(model, tokens(0), 0.9, loss=loss_of)
        model.set_requires_gradient_sync(True)
        torch.manual_seed(1)
        loss_of(model(tokens(1))).backward()
        found.append([each.grad.to_local() for each in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_plan_is_saved_loaded_and_applied(tmp_path: Path) -> None:
    model = Sharding().model()
    plan = recollect.plan(model, tokens(0), 0.8, loss=loss_of)
    plan.save(tmp_path / "plan")
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("plan")] == ["plan"]
    loaded = recollect.Plan.load(tmp_path / "plan")
    assert loaded.schedule == plan.schedule == pickle.loads(pickle.dumps(plan)).schedule
    expected = trained(Sharding().model(), 2)
    trained(loaded.apply(model), 2).check(expected)
