"""Plans for models that ``fully_shard`` has sharded: one for all ranks, made by all ranks.

The oracle is the same run of both ranks without a plan.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import recollect
from recollect import InfeasibleBudget, PlanWarning
from recollect.modules import OPTIONS
from recollect.planning import planner
from recollect.planning.ranks import team
from recollect.planning.ranks.team import MissingRank, OtherRankFailed
from recollect.planning.solving import solve
from tests.distributed._ranks import run_ranks
from tests.distributed._sharded import (
    SHARDINGS,
    Decoder,
    Sharding,
    Trained,
    highest,
    loss_of,
    tokens,
    trained,
)


def begin() -> None:
    """Have this process search for plans for a short time only."""
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("error", category=PlanWarning)
    patch = pytest.MonkeyPatch()
    patch.setattr(planner, "lower_bound", lambda graph, *_, **__: graph.plain_seconds)
    patch.setattr(solve, "_WORK", 3_000)


def plan_of(model: Any) -> recollect.Plan:
    plan: recollect.Plan = vars(model)[OPTIONS].plan
    return plan


def same_on_all_ranks(value: Any) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(each == value for each in found)


def of_sizes(*sizes: int) -> Callable[[int], Tensor]:
    return lambda step: tokens(step, sizes[step % len(sizes)])


def check_within(found: Trained, plan: recollect.Plan, *steps: int) -> None:
    assert plan.budget < highest(min(found.peaks)) * 4  # it is about these steps
    assert [found.peaks[step] for step in steps if found.peaks[step] > plan.budget] == []


# --- the usual way --------------------------------------------------------------------------------


def check_usual() -> None:
    begin()
    sharding = SHARDINGS["reshard"]
    batch = of_sizes(4, 4, 6, 6, 2, 4)
    expected = trained(sharding.model(), 6, batch)

    model = sharding.model()
    recollect.fit(model, tokens(0), 0.75, loss=loss_of)
    plan = plan_of(model)
    assert plan.plain_peak > highest(min(expected.peaks[:2]))
    assert plan.predicted_peak <= plan.budget < highest(min(expected.peaks[:2]))
    assert same_on_all_ranks((plan.schedule, plan.budget, plan.predicted_peak))
    with warnings.catch_warnings(record=True):  # a larger batch may be above the budget
        warnings.simplefilter("always", PlanWarning)
        found = trained(model, 6, batch)
    found.check(expected)
    check_within(found, plan, 0, 1, 4, 5)

    lazy = sharding.model()
    recollect.fit(lazy, budget=plan.budget)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always", PlanWarning)
        found = trained(lazy, 6, batch)
    found.check(expected)
    made = plan_of(lazy)
    assert same_on_all_ranks((made.schedule, made.budget, made.predicted_peak))
    check_within(found, made, 1, 4, 5)


def test_plans_with_a_batch_and_from_the_loop(tmp_path: Path) -> None:
    run_ranks(check_usual, tmp_path)


# --- steps of several forwards --------------------------------------------------------------------


def check_several_forwards() -> None:
    begin()
    expected = trained(SHARDINGS["reshard"].model(), 4, forwards=2)
    model = SHARDINGS["reshard"].model()
    recollect.fit(model, budget=0.75)
    with warnings.catch_warnings(record=True):  # the first step may take more
        warnings.simplefilter("always", PlanWarning)
        found = trained(model, 4, forwards=2)
    found.check(expected)
    plan = plan_of(model)
    assert len(plan.forwards) == 2
    schedules = [each.schedule for each in plan.forwards]
    assert same_on_all_ranks((schedules, plan.budget, plan.predicted_peak))
    check_within(found, plan, 1, 2, 3)

    # One rank calls the model more often than the other: no plan is made together.
    apart = Decoder()
    recollect.fit(apart, budget=0.75)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        for _ in range(3):
            outs = [apart(tokens(0)) for _ in range(1 + dist.get_rank())]
            sum(loss_of(out) for out in outs).backward()  # type: ignore[union-attr]
            apart.zero_grad()
            torch.optim.SGD(apart.parameters(), 0.0).step()
    messages = [str(each.message) for each in caught if each.category is PlanWarning]
    assert any("1 on rank 0, 2 on rank 1" in each for each in messages), messages
    assert len(plan_of(apart).forwards) == 1 + dist.get_rank()


@pytest.mark.slow
def test_several_forwards_in_a_step(tmp_path: Path) -> None:
    run_ranks(check_several_forwards, tmp_path)


# --- nobody waits forever -------------------------------------------------------------------------


def check_failures() -> None:
    begin()
    rank = dist.get_rank()
    model = SHARDINGS["reshard"].model()

    with pytest.raises(InfeasibleBudget, match="the least that works is") as raised:
        recollect.plan(model, tokens(0), 0.1, loss=loss_of)
    assert same_on_all_ranks(raised.value.least)

    # One rank fails before the first step.
    batch = tokens(0) if rank == 0 else {"none": tokens(0)}
    expected = (
        (OtherRankFailed, "rank 1 has failed: TypeError: batch")
        if rank == 0
        else (
            TypeError,
            "cannot be called with it",
        )
    )
    with pytest.raises(expected[0], match=expected[1]):
        recollect.plan(model, batch, 0.8, loss=loss_of)
    with pytest.raises(Exception, match="budget: all ranks make one plan, and need one budget"):
        recollect.plan(model, tokens(0), 0.8 + rank / 10, loss=loss_of)

    # One rank does not come, or comes too late.
    patch = pytest.MonkeyPatch()
    patch.setattr(team, "_PATIENCE", 1.0)
    for late in (0, 1):
        begun = time.monotonic()
        if rank == late:
            time.sleep(3)
        with pytest.raises(MissingRank, match=rf"collective call.* rank {late} has not called it"):
            recollect.plan(model, tokens(0), 0.8, loss=loss_of)
        assert time.monotonic() - begun < 20
        dist.barrier()
    patch.undo()

    # Ranks are slow at different times.
    def slow_loss(out: Tensor) -> Tensor:
        time.sleep(0.01 * rank)
        return loss_of(out)

    time.sleep(0.5 * rank)
    recollect.fit(model, tokens(0), 0.8, loss=slow_loss)
    assert same_on_all_ranks(plan_of(model).schedule)
    trained(model, 2).check(trained(SHARDINGS["reshard"].model(), 2))


@pytest.mark.slow
def test_a_rank_that_fails_or_is_missing(tmp_path: Path) -> None:
    run_ranks(check_failures, tmp_path)


# --- every way to shard ---------------------------------------------------------------------------


def check_sharding(name: str, budget: float, accumulate: int) -> None:
    begin()
    sharding: Sharding = SHARDINGS[name]
    expected = trained(sharding.model(), 4, accumulate=accumulate)
    model = sharding.model()
    plan = recollect.plan(model, tokens(0), budget, loss=loss_of)
    assert same_on_all_ranks(plan.schedule)
    assert plan.graph is not None
    assert any(set(plan.graph.choices) - {n for n, op in enumerate(plan.graph.ops) if op.forced})
    plan.apply(model)
    with warnings.catch_warnings(record=True):  # gradients that accumulate take more
        warnings.simplefilter("always" if accumulate > 1 else "error", PlanWarning)
        found = trained(model, 4, accumulate=accumulate)
    found.check(expected)
    if accumulate == 1:
        check_within(found, plan, *range(4))
    plan.remove(model)
    assert OPTIONS not in {name for module in model.modules() for name in vars(module)}


def check_shardings(names: list[str], accumulate: int) -> None:
    for name in names:
        check_sharding(name, 0.92 if name == "nested" else 0.8, accumulate)


NAMES = [*SHARDINGS]
#: Seconds for several plans, on a machine that is busy.
_LONG = 400.0


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[n::4] for n in range(4)], ids=", ".join)
def test_every_way_to_shard(names: list[str], tmp_path: Path) -> None:
    run_ranks(check_shardings, tmp_path, names, 1, deadline=_LONG)


@pytest.mark.slow
def test_gradients_that_accumulate_without_communication(tmp_path: Path) -> None:
    names = ["reshard", "keep gathered", "mixed precision"]
    run_ranks(check_shardings, tmp_path, names, 3, deadline=_LONG)


def check_kept_gathered() -> None:
    begin()
    expected = trained(SHARDINGS["reshard"].model(), 2)
    model = SHARDINGS["reshard"].model()
    before = [*model.parameters()]
    model.set_reshard_after_backward(False)  # as in the steps whose gradients accumulate
    plan = recollect.plan(model, tokens(0), 0.9, loss=loss_of)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    model.set_reshard_after_backward(True)
    trained(plan.apply(model), 2).check(expected)


@pytest.mark.slow
def test_parameters_that_stay_gathered_after_backward(tmp_path: Path) -> None:
    run_ranks(check_kept_gathered, tmp_path)
