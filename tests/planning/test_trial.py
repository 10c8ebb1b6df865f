"""What steps under a plan took, what the engine costs, and every block checkpointed instead.

No test here depends on how fast the machine is: clocks are made up.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import simulate
from recollect.modules import OPTIONS
from recollect.planning import record, trial, ways
from recollect.planning.blocks import _Block
from recollect.planning.planner import Planner
from recollect.planning.sampling import Timing
from recollect.planning.step import TrainingStep
from recollect.report.units import bytes_text
from tests._support import assert_identical, gradients, measure
from tests.planning._clock import MS, Clock, noisy
from tests.planning._models import Decoder, Made, made, squares, static_bytes

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
    _step_takes(monkeypatch, plain=1.0, planned=1.0)
    made_by = Planner(_model(), X, squares)
    made_by.solver.frontier()
    _step_takes(monkeypatch, plain=1.5, planned=1.5)
    plan = made_by.plan_for(int(0.7 * made_by.plain_peak))
    assert plan.spread == pytest.approx(0.5)


def _step_takes(
    monkeypatch: pytest.MonkeyPatch, *, plain: float, planned: float, blocks: float = math.inf
) -> list[str]:
    """Have steps take as long as it says. Returns what was timed."""
    timed: list[str] = []

    def seconds(step: TrainingStep) -> float:
        step.run()
        if any(isinstance(vars(m).get(OPTIONS), _Block) for m in step.model.modules()):
            timed.append("blocks")
            return blocks
        timed.append("planned" if OPTIONS in vars(step.model) else "plain")
        return planned if timed[-1] == "planned" else plain

    monkeypatch.setattr(TrainingStep, "seconds", seconds)
    return timed


def _share(of_budget: float) -> list[str]:
    return [f"{of_budget:.1%}", "of", "the", "budget"]


def test_what_steps_took_is_measured_in_turn_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed = _step_takes(monkeypatch, plain=1.0, planned=1.25)
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
    made_by = Planner(case.model, case.batch, case.loss)
    made_by.plan_for(int(0.8 * made_by.plain_peak))
    del seen[:3]  # of the plain step, one after the other
    assert len(seen) == 6  # and what the engine costs is little, in a step of a second
    assert all(each == seen[0] for each in seen)


def test_a_step_that_fits_as_it_is_took_what_plain_took(monkeypatch: pytest.MonkeyPatch) -> None:
    _step_takes(monkeypatch, plain=1.0, planned=9.0)
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
    timed = _step_takes(monkeypatch, plain=1.0, planned=1.25)

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
    _step_takes(monkeypatch, plain=1 * MS, planned=2 * MS)
    _engine_takes(monkeypatch, 1 * MS, 1.5 * MS, 2.5 * MS)
    made_by = Planner(_model(), X, squares)
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
    _step_takes(monkeypatch, plain=1 * MS, planned=2 * MS)
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
    _step_takes(monkeypatch, plain=1 * MS, planned=2 * MS)
    _engine_takes(monkeypatch, 1 * MS, 1 * MS, 4 * MS, spread=2.0)
    made_by = Planner(_model(), X, squares)
    cost, profile = made_by.graph.rerun_cost, made_by.trials.profile
    assert cost == profile.timed(profile.seconds).rerun_cost


def test_what_costs_little_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    _step_takes(monkeypatch, plain=100.0, planned=100.0)
    monkeypatch.setattr(ways, "times_under", None)
    assert Planner(_model(), X, squares).graph.engine_cost == 0


def test_without_room_for_that_the_usual_costs_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ways, "times_under", no_room)
    made_by = Planner(_model(), X, squares)
    assert made_by.graph.engine_cost == 0
    assert 0 < made_by.graph.rerun_cost <= 6e-6


# --- every block, if that is quicker --------------------------------------------------------------


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have plans compared with every block checkpointed."""
    monkeypatch.setattr(trial, "_NOTICEABLE", 0.1)


@pytest.fixture
def model() -> Decoder:
    return _model()


@pytest.fixture(scope="module")
def blocks() -> recollect.Plan:
    model = _model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_NOTICEABLE", 0.1)
        _step_takes(patch, plain=1.0, planned=3.0, blocks=1.3)
        plan = recollect.plan(model, X, 0.8, loss=squares)
    assert all(OPTIONS not in vars(module) for module in model.modules())
    return plan


def _gradients(model: nn.Module, batch: Any = X) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(0)
    squares(model(batch)).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def _forwards(model: Decoder, batch: Tensor = X) -> int:
    """How often the second block runs in a step."""
    runs = []
    with model.layers[1].norm1.register_forward_hook(lambda *_: runs.append(1)):
        _gradients(model, batch)
    return len(runs)


def test_a_slow_engine_makes_a_plan_of_blocks(blocks: recollect.Plan) -> None:
    assert blocks.schedule.blocks == ("layers.0", "layers.1", "layers.2")
    assert blocks.measured_time == blocks.predicted_time == 1.3
    assert blocks.measured_plain_time == 1.0
    assert blocks.measured_peak is not None
    assert blocks.measured_peak <= blocks.predicted_peak <= blocks.budget
    assert blocks.bound_time <= blocks.predicted_time
    assert "Every block is checkpointed as a whole" in str(blocks)
    assert {row.fate for row in blocks.explain()} == {"kept", "recomputed"}


def test_it_checkpoints_each_block_and_stays_within_the_budget(
    blocks: recollect.Plan, model: Decoder
) -> None:
    expected = _gradients(model)
    done = Made(model, X, squares)
    assert _forwards(model) == 1
    with blocks.applied(model):
        assert _forwards(model) == 2
        for _ in range(3):
            model.zero_grad()
            peak = measure(done.forward, lambda out: squares(out).backward(), warm_up=False).peak
            assert peak + static_bytes(model) <= blocks.budget
            assert_identical(gradients(model), expected)
    assert _forwards(model) == 1
    assert all(OPTIONS not in vars(module) for module in model.modules())


def test_it_is_saved_loaded_pickled_and_copied(
    blocks: recollect.Plan, model: Decoder, tmp_path: Path
) -> None:
    expected = _gradients(model)
    blocks.save(tmp_path / "plan.json")
    loaded = recollect.Plan.load(tmp_path / "plan.json")
    for other in (loaded, pickle.loads(pickle.dumps(blocks)), copy.deepcopy(blocks)):
        assert other == blocks
        assert str(other) == str(blocks)
        with other.applied(model):
            assert _forwards(model) == 2
            assert_identical(_gradients(model), expected)


def test_copies_of_a_model_under_it_are_under_it_too(
    blocks: recollect.Plan, model: Decoder
) -> None:
    expected = _gradients(model)
    blocks.apply(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _forwards(other) == 2
        assert_identical(_gradients(other), expected)
        blocks.remove(other)
        assert type(other.layers[1]) is type(_model().layers[1])
        assert _forwards(other) == 1
    part = copy.deepcopy(model.layers[0])  # out of the model it is nobody's block
    part(torch.randn(2, 3, 32)).sum().backward()


def test_unwrap_takes_all_of_it_away(blocks: recollect.Plan, model: Decoder) -> None:
    recollect.unwrap(blocks.apply(model))
    assert all(OPTIONS not in vars(module) for module in model.modules())
    assert _forwards(model) == 1
    assert blocks.apply(model) is model


def test_a_block_that_is_checkpointed_already_is_refused(
    blocks: recollect.Plan, model: Decoder
) -> None:
    recollect.checkpointed(model.layers[2])
    with pytest.raises(ValueError, match=r"its layers\.2 is checkpointed already"):
        blocks.apply(model)
    assert OPTIONS not in vars(model)
    assert OPTIONS not in vars(model.layers[0])
    recollect.unwrap(model.layers[2])
    recollect.checkpointed(model)
    with pytest.raises(ValueError, match="checkpointed already"):
        blocks.apply(model)
    assert OPTIONS not in vars(model.layers[0])


def test_smaller_batches_are_right_and_larger_ones_too(
    blocks: recollect.Plan, model: Decoder
) -> None:
    batches = [X[:1], X[:, :8], torch.cat([X, X[:1]])]
    expected = [_gradients(model, batch) for batch in batches]
    blocks.apply(model)
    for batch, each in zip(batches, expected, strict=True):
        done = Made(model, batch, squares)
        assert_identical([_gradients(model, batch), _gradients(model, batch)], [each] * 2)
        peak = measure(done.forward, lambda out: squares(out).backward(), warm_up=False).peak
        assert peak + static_bytes(model) <= blocks.budget
    model.zero_grad()


def test_a_batch_that_needs_other_choices_has_them_and_no_blocks(
    blocks: recollect.Plan, model: Decoder
) -> None:
    batch = torch.cat([X] * 2)
    expected = _gradients(model, batch)
    replace(blocks, budget=1).apply(model)
    with pytest.warns(recollect.PlanWarning, match="more than its budget of 1"):
        found = _gradients(model, batch)  # by the choices of the least peak
    assert_identical([found, _gradients(model, batch)], [expected] * 2)
    assert _forwards(model, batch) == 1
    assert _forwards(model) == 2


def test_backward_may_follow_when_it_has_been_removed(
    blocks: recollect.Plan, model: Decoder
) -> None:
    expected = _gradients(model)
    with blocks.applied(model):
        loss = squares(model(X))
    loss.backward()
    assert_identical(gradients(model), expected)


def test_without_gradients_its_blocks_just_run(blocks: recollect.Plan, model: Decoder) -> None:
    blocks.apply(model)
    with torch.no_grad():
        assert not model(X).requires_grad


def test_blocks_that_are_not_clearly_quicker_are_only_shown(
    monkeypatch: pytest.MonkeyPatch, compared: None, model: Decoder
) -> None:
    timed = _step_takes(monkeypatch, plain=1.0, planned=1.3, blocks=1.29)
    plan = recollect.plan(model, X, 0.8, loss=squares)
    assert "blocks" in timed
    assert plan.schedule.blocks == ()
    assert [p.seconds for p in plan.picture.points if "measured" in p.name] == [1.29]


def test_blocks_are_not_tried_if_the_plan_is_quick(
    monkeypatch: pytest.MonkeyPatch, compared: None, model: Decoder
) -> None:
    timed = _step_takes(monkeypatch, plain=1.0, planned=1.05, blocks=0.5)
    plan = recollect.plan(model, X, 0.8, loss=squares)
    assert "blocks" not in timed
    assert plan.schedule.blocks == ()


def test_blocks_that_do_not_fit_are_not_used(
    monkeypatch: pytest.MonkeyPatch, compared: None, model: Decoder
) -> None:
    _step_takes(monkeypatch, plain=1.0, planned=3.0, blocks=0.5)
    frontier = recollect.frontier(model, X, loss=squares)
    found = frontier._planner.trials.blocks
    assert found is not None
    plan = frontier.plan_for(found.peak - 1)
    assert plan.schedule.blocks == ()
    assert frontier.plan_for(found.peak).schedule.blocks


def test_another_budget_is_planned_for_while_a_plan_of_blocks_is_applied(
    blocks: recollect.Plan, model: Decoder
) -> None:
    frontier = recollect.frontier(model, X, loss=squares)
    blocks.apply(model)
    other = frontier.plan_for(0.7)
    assert _forwards(model) == 2  # as before
    blocks.remove(model)
    with other.applied(model):
        assert _forwards(model) == 1


def test_a_model_without_blocks_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, compared: None
) -> None:
    case = made("unrolled")
    _step_takes(monkeypatch, plain=1.0, planned=3.0, blocks=0.5)
    plan = recollect.plan(case.model, case.batch, 0.9, loss=case.loss)
    assert plan.schedule.blocks == ()


class Stages(nn.Module):
    """Blocks in lists in a list, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
                for _ in range(2)
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for block in stage:
                x = x + block(x)
        return x


def test_blocks_are_found_in_lists_of_lists_and_draw_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, compared: None
) -> None:
    torch.manual_seed(0)
    model, batch = Stages(), torch.randn(64, 32)
    _step_takes(monkeypatch, plain=1.0, planned=3.0, blocks=0.5)
    plan = recollect.plan(model, batch, 0.9, loss=squares)
    assert plan.schedule.blocks == ("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1")
    expected = _gradients(model, batch)
    with plan.applied(model):
        assert_identical(_gradients(model, batch), expected)


def test_what_the_engine_for_blocks_refuses_is_no_error_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, compared: None
) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(_Iterating() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(iter([x, x]))
            return x

    torch.manual_seed(0)
    model, batch = Parts(), torch.randn(64, 32)
    _step_takes(monkeypatch, plain=1.0, planned=3.0, blocks=0.5)
    plan = recollect.plan(model, batch, 0.9, loss=squares)
    assert plan.schedule.blocks == ()
    assert all(OPTIONS not in vars(module) for module in model.modules())


class _Iterating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, xs: Iterator[Tensor]) -> Tensor:
        return sum(self.down(torch.tanh(self.up(x))) for x in xs)
