"""Budgets from the least that works to what the plain step takes, for models of every kind.

Two of them for some models of each kind. In `make test-all` it is three or ten, of all models.
Bytes are those of the allocator's events, counted here and not by what planned.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect.graph.simulate import simulate
from recollect.planning import planner
from recollect.planning.solving import solve
from tests._support import assert_identical, measure, sampled
from tests.planning._models import CASES, Made, made, static_bytes
from tests.planning.solving._exact import solve_exact

#: Those of ten budgets, and of the bound; for the others three do.
_FULL = ("decoder", "encoder_decoder", "conv", "moe", "lstm")
#: The models that are always studied; and of those, the ones whose bound takes no seconds.
_USUAL = ("decoder", "conv", "moe", "lstm", "packed", "with_loss", "custom", "cast")
_BOUNDED = ("conv", "lstm")
#: From the least (0) to what the plain step takes (1).
_TWO = (0.0, 0.5)
_THREE = (0.0, 0.5, 1.0)
_TEN = tuple(n / 9 for n in range(10))


@dataclass
class Run:
    """Three steps under a plan."""

    peaks: list[int]
    #: Of each step: gradients, and buffers after it.
    found: list[Any]


class Study:
    """A model at several budgets."""

    def __init__(self, name: str, parts: tuple[float, ...], is_bounded: bool) -> None:
        self.name, self.parts, self.is_bounded = name, parts, is_bounded
        self.made = made(name)
        self.before = copy.deepcopy(self.made.model.state_dict())
        self.frontier = recollect.frontier(self.made.model, self.made.batch, loss=self.made.loss)

    @cached_property
    def budgets(self) -> list[int]:
        least, plain = self.frontier.least, self.frontier.plain_peak
        return [least + int((plain - least) * part) for part in self.parts]

    @cached_property
    def answers(self) -> dict[int, recollect.Plan | recollect.InfeasibleBudget]:
        """By budget: the plan for it."""
        return {budget: self._plan_for(budget) for budget in self.budgets}

    def _plan_for(self, budget: int) -> recollect.Plan | recollect.InfeasibleBudget:
        try:
            return self.frontier.plan_for(budget)
        except recollect.InfeasibleBudget as error:
            return error

    @property
    def plans(self) -> list[recollect.Plan]:
        """Those that there are, which a test of its own says are all."""
        found = [plan for plan in self.answers.values() if isinstance(plan, recollect.Plan)]
        assert len(found) > 1
        return found

    @property
    def gaps(self) -> list[float]:
        return [round(plan.gap, 4) for plan in self.plans]

    @cached_property
    def plain(self) -> Run:
        return three_steps(self.made, self.before)

    @cached_property
    def runs(self) -> list[Run]:
        """On a new copy of the model each: the first of three steps is recorded."""
        found = []
        for plan in self.plans:
            model = plan.apply(copy.deepcopy(self.made.model))
            found.append(three_steps(replace(self.made, model=model), self.before))
        return found


def three_steps(made: Made, before: dict[str, Tensor]) -> Run:
    """From the same weights, buffers and seed."""
    model = made.model
    model.load_state_dict(before)
    peaks, found = [], []
    for number in range(3):
        model.zero_grad()
        torch.manual_seed(number)
        peaks.append(step_peak(made) + static_bytes(model))
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((gradients, {n: b.clone() for n, b in model.named_buffers()}))
    model.zero_grad()
    return Run(peaks, found)


def step_peak(made: Made) -> int:
    """The most bytes that a step allocates, over what was there before it."""
    return measure(made.forward, lambda out: made.loss_of(out).backward(), warm_up=False).peak


_STUDIES = {
    **{name: (name, _TWO, name in _BOUNDED) for name in _USUAL},
    **{f"{name}-more": (name, _TEN if name in _FULL else _THREE, name in _FULL) for name in CASES},
}


@pytest.fixture(scope="module", params=sampled(_STUDIES, usual=_USUAL))
def study(request: pytest.FixtureRequest) -> Iterator[Study]:
    name, parts, is_bounded = _STUDIES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        if not is_bounded:
            patch.setattr(planner, "lower_bound", lambda graph, *_, **__: graph.plain_seconds)
            patch.setattr(solve, "_WORK", 30_000)
        yield Study(name, parts, is_bounded)


def test_there_is_a_plan_for_every_budget_from_the_least_on(study: Study) -> None:
    refused = [b for b, plan in study.answers.items() if not isinstance(plan, recollect.Plan)]
    assert refused == [], f"the least is {study.frontier.least}"


def test_the_measured_peak_is_within_the_budget_in_every_step(study: Study) -> None:
    pairs = zip(study.plans, study.runs, strict=True)
    assert [(p.budget, r.peaks) for p, r in pairs if max(r.peaks) > p.budget] == []


def test_gradients_and_buffers_are_those_of_the_plain_step(study: Study) -> None:
    for run in study.runs:
        assert_identical(run.found, study.plain.found)


def test_the_predicted_peak_is_the_measured_one_but_for_three_hundredths(study: Study) -> None:
    for plan, run in zip(study.plans, study.runs, strict=True):
        assert plan.predicted_peak == pytest.approx(max(run.peaks), rel=0.03, abs=0)
        assert plan.predicted_peak <= plan.budget


def test_the_plain_peak_is_the_measured_one(study: Study) -> None:
    assert study.frontier.plain_peak == max(study.plain.peaks[1:])
    assert {plan.plain_peak for plan in study.plans} == {study.frontier.plain_peak}


def test_the_time_is_near_what_no_plan_can_be_below(study: Study) -> None:
    if not study.is_bounded:
        pytest.skip("the bound of this one is not computed")
    # At the lowest budget the bound is rougher, though the plan may be the best that there is.
    assert study.gaps[0] <= 0.1, study.gaps
    # With few large results to choose from the bound is rough, too: it keeps fractions of them.
    far = [plan for plan in study.plans[1:] if plan.gap > 0.05]
    assert [plan.budget for plan in far if not is_best(study, plan)] == [], study.gaps


def is_best(study: Study, plan: recollect.Plan) -> bool:
    """Whether no plan for the same budget takes less time."""
    pytest.importorskip("scipy")
    graph = study.frontier.graph
    schedule = solve_exact(graph, plan.budget)
    assert schedule is not None
    best = simulate(graph, schedule).seconds
    return plan.predicted_time == pytest.approx(best, rel=1e-9)


def test_more_memory_never_takes_more_time(study: Study) -> None:
    times = [plan.predicted_time for plan in study.plans]
    assert times == sorted(times, reverse=True)
    assert times[-1] >= study.plans[-1].bound_time
    bounds = [plan.bound_time for plan in study.plans]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(bounds))


def test_at_the_plain_peak_nothing_is_made_again(study: Study) -> None:
    plan = study.frontier.plan_for(study.frontier.plain_peak)
    assert plan.predicted_time == pytest.approx(plan.plain_time, rel=1e-6)


def test_one_byte_less_than_the_least_does_not_work(study: Study) -> None:
    least = study.frontier.least
    with pytest.raises(recollect.InfeasibleBudget) as caught:
        study.frontier.plan_for(least - 1)
    assert caught.value.least == least
    assert caught.value.budget == least - 1
    assert f"budget={least}" in str(caught.value)
    assert least < study.frontier.plain_peak


def test_a_loaded_plan_obeys_its_budget_on_another_copy_of_the_model(
    study: Study, tmp_path: Any
) -> None:
    # Which nothing is known of: the first step of the three is recorded.
    plan = study.plans[len(study.plans) // 2]
    plan.save(tmp_path / "plan.json")
    other = made(study.name)
    recollect.Plan.load(tmp_path / "plan.json").apply(other.model)
    run = three_steps(other, study.before)
    assert max(run.peaks) <= plan.budget
    assert_identical(run.found, study.plain.found)


def _train(
    done: Made, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[list[float], list[int]]:
    """Losses, and the peaks of all steps but the first, before which there was no state."""
    losses, peaks = [], []

    def step() -> None:
        out = done.forward()
        loss = done.loss_of(out)
        losses.append(loss.item())
        loss.backward()
        del out, loss  # as in the step that is planned
        optimizer.step()
        optimizer.zero_grad()

    for number in range(steps):
        torch.manual_seed(number)
        peak = measure(step, lambda _: None, warm_up=False).peak
        peaks.append(peak + static_bytes(done.model, optimizer))
    return losses, peaks[1:]


@pytest.mark.parametrize(
    "name", sampled([*_FULL, "decoder_dropout", "adapted"], usual=("conv", "decoder_dropout"))
)
def test_training_goes_as_without_a_plan_and_stays_within_the_budget(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "lower_bound", lambda graph, *_, **__: graph.plain_seconds)
    monkeypatch.setattr(solve, "_WORK", 30_000)
    plain, planned = made(name), made(name)
    first, second = (
        torch.optim.AdamW(each.model.parameters(), lr=1e-3) for each in (plain, planned)
    )
    losses, peaks = _train(plain, first, 6)
    assert len(set(losses)) == 6
    frontier = recollect.frontier(planned.model, planned.batch, loss=planned.loss, optimizer=second)
    assert frontier.plain_peak == max(peaks)
    budget = (frontier.least + frontier.plain_peak) // 2
    frontier.plan_for(budget).apply(planned.model)
    found, planned_peaks = _train(planned, second, 6)
    assert found == losses
    assert_identical(dict(planned.model.state_dict()), dict(plain.model.state_dict()))
    assert max(planned_peaks) <= budget < max(peaks)
