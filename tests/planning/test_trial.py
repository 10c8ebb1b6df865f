"""What steps under a plan took, and what the engine costs.

No test here depends on how fast the machine is: clocks are made up.
"""

from __future__ import annotations

import gc
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

import recollect
from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import simulate
from recollect.planning import ways
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request
from recollect.planning.recording import record
from recollect.planning.recording.sampling import Timing
from recollect.planning.recording.step import TrainingStep
from recollect.report.units import bytes_text
from tests.planning._clock import MS, Clock, noisy, step_takes
from tests.planning._models import Decoder, made, squares

pytestmark = pytest.mark.usefixtures("no_bound")

X = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))


def _model(layers: int = 3) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers)


# --- what a plan says -----------------------------------------------------------------------------


def test_a_plan_says_that_timings_vary(clock: Clock, tmp_path: Path) -> None:
    clock.steps = noisy()
    plan = recollect.plan(_model(), X, 0.7, loss=squares)
    assert plan.spread >= 0.1
    said = f"Timings vary by {plan.spread:.0%}"
    assert said in str(plan)
    plan.to_html(tmp_path / "plan.html")
    assert said in (tmp_path / "plan.html").read_text(encoding="utf-8")
    plan.save(tmp_path / "plan.json")
    assert recollect.Plan.load(tmp_path / "plan.json").spread == plan.spread


def test_a_plan_does_not_say_so_where_they_do_not(clock: Clock) -> None:
    plan = recollect.plan(_model(), X, 0.7, loss=squares)
    assert plan.spread < 0.01
    assert "vary" not in str(plan)


def test_a_plain_step_that_takes_another_time_than_before_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step_takes(monkeypatch, plain=1.0, planned=1.0)
    made_by = Planner.of(Request(_model(), X, squares))
    made_by.solver.frontier()
    step_takes(monkeypatch, plain=1.5, planned=1.5)
    plan = made_by.plan_for(int(0.7 * made_by.plain_peak))
    assert plan.spread == pytest.approx(0.5)


def _share(of_budget: float) -> list[str]:
    return [f"{of_budget:.1%}", "of", "the", "budget"]


def test_what_steps_took_is_measured_in_turn_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed = step_takes(monkeypatch, plain=1.0, planned=1.25)
    plan = recollect.plan(_model(), X, 0.7, loss=squares)
    assert plan.measured_time == 1.25
    assert plan.measured_plain_time == 1.0
    assert plan.measured_peak == plan.predicted_peak  # on the CPU, where they were the same
    assert timed[-6:] == ["plain", "planned"] * 3
    text = str(plan)
    assert re.search(r"^  measured time +\+25.0%  1.25 s, plain 1.00 s$", text, re.MULTILINE)
    assert "  predicted time " in text
    peak, of_budget = bytes_text(plan.measured_peak), plan.measured_peak / plan.budget
    assert text.splitlines()[4].split() == ["measured", "peak", *peak.split(), *_share(of_budget)]
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert content["measured_time"] == 1.25
    assert content["predicted_time"] == plan.predicted_time
    assert content["measured_peak"] == plan.measured_peak
    assert recollect.Plan.load(tmp_path / "plan.json") == plan
    plan.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "measured time" in page
    assert "was measured to take 25.0% longer" in page


def test_steps_that_are_timed_in_turn_draw_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What forward does may be up to them: layers that are left out.
    case = made("decoder_dropout")
    seen: list[Any] = []

    def seconds(step: TrainingStep) -> float:
        seen.append((torch.get_rng_state().sum().item(), random.getstate()))
        step.run()
        random.random()
        return 1.0

    monkeypatch.setattr(TrainingStep, "seconds", seconds)
    made_by = Planner.of(Request(case.model, case.batch, case.loss))
    made_by.plan_for(int(0.8 * made_by.plain_peak))
    del seen[:3]  # of the plain step, one after the other
    assert len(seen) == 6  # and what the engine costs is little, in a step of a second
    assert all(each == seen[0] for each in seen)


def test_a_step_that_fits_as_it_is_took_what_plain_took(monkeypatch: pytest.MonkeyPatch) -> None:
    step_takes(monkeypatch, plain=1.0, planned=9.0)
    plan = recollect.plan(_model(), X, 1.0, loss=squares)
    assert plan.measured_time == plan.measured_plain_time == plan.predicted_time == 1.0
    assert plan.measured_peak == plan.plain_peak


def test_of_a_model_without_memory_nothing_is_measured() -> None:
    with torch.device("meta"):
        model = _model()
    plan = recollect.plan(model, X.to("meta"), 0.8, loss=squares)
    assert plan.measured_time is None
    assert plan.measured_plain_time is None
    assert plan.measured_peak is None
    assert "measured" not in str(plan)


def test_where_plain_does_not_fit_the_plan_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = step_takes(monkeypatch, plain=1.0, planned=1.25)

    def no_room(step: TrainingStep, link: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(record, "profile_step", no_room)
    plan = recollect.plan(_model(), X, 0.7, loss=squares)
    assert set(timed) == {"planned"}
    assert plan.measured_time == 1.25
    assert plan.measured_plain_time is None
    assert "1.25 s  there was no plain step to compare with" in str(plan)


def test_the_same_budget_gives_the_same_plan_with_what_was_measured() -> None:
    frontier = recollect.frontier(_model(), X, loss=squares)
    assert frontier.plan_for(0.7) == frontier.plan_for(0.7)


def test_a_model_that_is_fitted_lazily_since_has_no_plan_to_remove() -> None:
    model = _model()
    frontier = recollect.frontier(model, X, loss=squares)
    recollect.fit(model, budget=0.9)
    assert frontier.plan_for(0.7).predicted_peak <= 0.7 * frontier.plain_peak
    for _ in range(2):
        squares(model(X)).backward()
        model.zero_grad()
    recollect.unwrap(model)


# --- what the engine costs ------------------------------------------------------------------------


def _engine_takes(monkeypatch: pytest.MonkeyPatch, *seconds: float, spread: float = 0.0) -> None:
    """Have the three ways in which the engine is timed take so long."""

    def times(*_: Any, **__: Any) -> list[Timing]:
        return [Timing(each, spread, 0.0) for each in seconds]

    monkeypatch.setattr(ways, "times_under", times)


def _reruns(graph: Graph, schedule: Schedule) -> tuple[float, int]:
    free, one = (simulate(replace(graph, rerun_cost=cost), schedule).rerun for cost in (0.0, 1.0))
    return free, round(one - free)


def test_the_engine_is_priced_by_what_steps_took(monkeypatch: pytest.MonkeyPatch) -> None:
    step_takes(monkeypatch, plain=1 * MS, planned=2 * MS)
    _engine_takes(monkeypatch, 1 * MS, 1.5 * MS, 2.5 * MS)
    made_by = Planner.of(Request(_model(), X, squares))
    graph = made_by.graph
    assert graph.engine_cost == pytest.approx(0.5 * MS)
    again = ways._that_runs_again(graph)
    free, count = _reruns(graph, again)
    assert count > 3
    assert graph.rerun_cost == pytest.approx((1 * MS - free) / count)
    # So that what is predicted is what was measured.
    assert simulate(graph, again).seconds == pytest.approx(2.5 * MS)
    everything = Schedule(frozenset(graph.choices))
    assert simulate(graph, everything).seconds == pytest.approx(1.5 * MS)
    assert graph.plain_seconds == pytest.approx(1 * MS)


def test_a_plan_has_the_engine_in_its_time_and_so_has_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step_takes(monkeypatch, plain=1 * MS, planned=2 * MS)
    _engine_takes(monkeypatch, 1 * MS, 1.5 * MS, 1.5 * MS)
    frontier = recollect.frontier(_model(), X, loss=squares)
    plan = frontier.plan_for(0.7)
    assert plan.predicted_time >= 1.5 * MS
    assert plan.bound_time * (1 + 1e-9) >= 1.5 * MS
    assert plan.plain_time == 1 * MS
    assert frontier.plan_for(1.0).predicted_time == 1 * MS  # by which nothing is done


def test_noise_is_not_taken_for_a_cost_of_running_ops_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step_takes(monkeypatch, plain=1 * MS, planned=2 * MS)
    _engine_takes(monkeypatch, 1 * MS, 1 * MS, 4 * MS, spread=2.0)
    made_by = Planner.of(Request(_model(), X, squares))
    cost, profile = made_by.graph.rerun_cost, made_by.trials.profile
    assert cost == profile.timed(profile.seconds).rerun_cost


def test_what_costs_little_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    step_takes(monkeypatch, plain=100.0, planned=100.0)
    monkeypatch.setattr(ways, "times_under", None)
    assert Planner.of(Request(_model(), X, squares)).graph.engine_cost == 0


def test_without_room_for_that_the_usual_costs_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ways, "times_under", no_room)
    made_by = Planner.of(Request(_model(), X, squares))
    assert made_by.graph.engine_cost == 0
    assert 0 < made_by.graph.rerun_cost <= 6e-6


def test_a_planner_is_gone_with_its_batch_as_soon_as_nobody_holds_it() -> None:
    # Where sizes are tried one after the other, there may be room for one batch only.
    made_by = Planner.of(Request(_model(), X, squares))
    made_by.plan_for(int(0.8 * made_by.plain_peak))
    step = ref(made_by.step)
    gc.disable()
    try:
        del made_by
        assert step() is None
    finally:
        gc.enable()
