"""Plans that checkpoint whole modules, where the engine that decides op by op costs too much.

No test here depends on how fast the machine is: what steps take is made up.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.modules import OPTIONS
from recollect.planning import ways
from tests._support import assert_identical, gradients, measure
from tests.planning._clock import step_takes
from tests.planning._models import Decoder, Made, made, squares, static_bytes

pytestmark = pytest.mark.usefixtures("no_bound")

X = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))
#: Before it is replaced for all other tests.
_module_costs = ways._module_costs


@pytest.fixture(autouse=True, scope="module")
def _priced() -> Iterator[None]:
    """Have modules priced, here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "_module_costs", _module_costs)
        patch.setattr(ways, "_PER_OP", 1.0)  # the engine may cost much in a step of a second
        yield


def _model(layers: int = 3) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers)


@pytest.fixture
def model() -> Decoder:
    return _model()


@pytest.fixture(scope="module")
def plan() -> recollect.Plan:
    model = _model()
    with pytest.MonkeyPatch.context() as patch:
        step_takes(patch, plain=1.0, planned=3.0, modules=1.3)
        plan = recollect.plan(model, X, 0.7, loss=squares)
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
    """How often the first block runs in a step."""
    runs = []
    with model.layers[0].norm1.register_forward_hook(lambda *_: runs.append(1)):
        _gradients(model, batch)
    return len(runs)


def test_an_engine_that_costs_much_makes_a_plan_of_modules(plan: recollect.Plan) -> None:
    assert plan.schedule.modules[0] == ("layers.0", "rerun")
    assert plan.measured_time == 1.3
    assert plan.measured_plain_time == 1.0
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.predicted_peak <= plan.budget
    assert plan.bound_time <= plan.predicted_time
    assert "modules are checkpointed as a whole, and everything else runs plain" in str(plan)
    assert {row.fate for row in plan.explain()} == {"kept", "recomputed"}


def test_no_more_modules_are_checkpointed_than_the_budget_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step_takes(monkeypatch, plain=1.0, planned=3.0, modules=1.3)
    frontier = recollect.frontier(_model(6), X, loss=squares)
    least = frontier._planner.trials.modules
    assert least is not None
    low = least.frontier()[0].outcome.peak
    plans = [frontier.plan_for(low + (frontier.plain_peak - low) * part // 4) for part in (3, 2, 1)]
    counts = [len(each.schedule.modules) for each in plans]
    assert 0 < counts[0] < counts[1] < counts[2]
    times = [each.outcome.seconds for each in least.frontier()]
    assert times == sorted(times, reverse=True)


def test_it_checkpoints_them_and_stays_within_the_budget(
    plan: recollect.Plan, model: Decoder
) -> None:
    expected = _gradients(model)
    done = Made(model, X, squares)
    assert _forwards(model) == 1
    with plan.applied(model):
        assert _forwards(model) == 2
        for _ in range(3):
            model.zero_grad()
            peak = measure(done.forward, lambda out: squares(out).backward(), warm_up=False).peak
            assert peak + static_bytes(model) <= plan.budget
            assert_identical(gradients(model), expected)
    assert _forwards(model) == 1
    assert all(OPTIONS not in vars(module) for module in model.modules())


@pytest.mark.parametrize("engine", ["rerun", "replay"])
def test_either_engine_may_run_a_module(plan: recollect.Plan, model: Decoder, engine: str) -> None:
    expected = _gradients(model)
    modules = tuple((path, engine) for path, _ in plan.schedule.modules)
    with replace(plan, schedule=replace(plan.schedule, modules=modules)).applied(model):
        for _ in range(3):
            assert_identical(_gradients(model), expected)
        assert _forwards(model) == (2 if engine == "rerun" else 1)


def test_it_is_saved_loaded_pickled_and_copied(
    plan: recollect.Plan, model: Decoder, tmp_path: Path
) -> None:
    expected = _gradients(model)
    plan.save(tmp_path / "plan.json")
    loaded = recollect.Plan.load(tmp_path / "plan.json")
    for other in (loaded, pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert other == plan
        assert str(other) == str(plan)
        with other.applied(model):
            assert _forwards(model) == 2
            assert_identical(_gradients(model), expected)


def test_copies_of_a_model_under_it_are_under_it_too(plan: recollect.Plan, model: Decoder) -> None:
    expected = _gradients(model)
    plan.apply(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _forwards(other) == 2
        assert_identical(_gradients(other), expected)
        plan.remove(other)
        assert type(other.layers[1]) is type(_model().layers[1])
        assert _forwards(other) == 1
    part = copy.deepcopy(model.layers[0])  # out of the model it is no region
    part(torch.randn(2, 3, 32)).sum().backward()


def test_unwrap_takes_all_of_it_away(plan: recollect.Plan, model: Decoder) -> None:
    recollect.unwrap(plan.apply(model))
    assert all(OPTIONS not in vars(module) for module in model.modules())
    assert _forwards(model) == 1
    assert plan.apply(model) is model


def test_a_module_that_is_checkpointed_already_is_refused(
    plan: recollect.Plan, model: Decoder
) -> None:
    recollect.checkpointed(model.layers[1])
    with pytest.raises(ValueError, match=r"its layers\.1 is checkpointed already"):
        plan.apply(model)
    assert OPTIONS not in vars(model)
    assert OPTIONS not in vars(model.layers[0])
    recollect.unwrap(model.layers[1])
    recollect.checkpointed(model)
    with pytest.raises(ValueError, match="checkpointed already"):
        plan.apply(model)
    assert OPTIONS not in vars(model.layers[0])


def test_smaller_batches_are_right_and_larger_ones_too(
    plan: recollect.Plan, model: Decoder
) -> None:
    batches = [X[:1], X[:, :8], torch.cat([X, X[:1]])]
    expected = [_gradients(model, batch) for batch in batches]
    plan.apply(model)
    for batch, each in zip(batches, expected, strict=True):
        done = Made(model, batch, squares)
        assert_identical([_gradients(model, batch), _gradients(model, batch)], [each] * 2)
        peak = measure(done.forward, lambda out: squares(out).backward(), warm_up=False).peak
        assert peak + static_bytes(model) <= plan.budget
    model.zero_grad()


def test_a_batch_that_needs_other_choices_has_them(plan: recollect.Plan, model: Decoder) -> None:
    batch = torch.cat([X] * 2)
    expected = _gradients(model, batch)
    replace(plan, budget=1).apply(model)
    with pytest.warns(recollect.PlanWarning, match="and the budget is 1 B"):
        found = _gradients(model, batch)  # by the choices of the least peak
    assert_identical([found, _gradients(model, batch)], [expected] * 2)
    assert _forwards(model) == 2


def test_backward_may_follow_when_it_has_been_removed(plan: recollect.Plan, model: Decoder) -> None:
    expected = _gradients(model)
    with plan.applied(model):
        loss = squares(model(X))
    loss.backward()
    assert_identical(gradients(model), expected)


def test_two_forwards_before_a_backward_are_told(plan: recollect.Plan, model: Decoder) -> None:
    squares(model(X) - model(X.flip(0))).backward()
    expected = gradients(model)
    model.zero_grad()
    plan.apply(model)
    for _ in range(2):  # nobody waits
        _gradients(model)
        model(X)
    with pytest.warns(recollect.PlanWarning, match="still waits for its backward"):
        out = squares(model(X) - model(X.flip(0)))
    out.backward()
    assert_identical(gradients(model), expected)


def test_without_gradients_modules_just_run(plan: recollect.Plan, model: Decoder) -> None:
    plan.apply(model)
    with torch.no_grad():
        assert not model(X).requires_grad


def test_the_quicker_of_both_is_taken_and_the_other_is_shown(
    monkeypatch: pytest.MonkeyPatch, model: Decoder
) -> None:
    timed = step_takes(monkeypatch, plain=1.0, planned=1.3, modules=1.35)
    plan = recollect.plan(model, X, 0.8, loss=squares)
    assert "modules" in timed
    assert plan.schedule.modules == ()
    shown = [point.seconds for point in plan.report.points if "measured" in point.name]
    assert shown == [1.35]


def test_modules_are_not_priced_where_the_engine_costs_little(
    monkeypatch: pytest.MonkeyPatch, model: Decoder
) -> None:
    timed = step_takes(monkeypatch, plain=1.0, planned=1.02, modules=0.5)
    plan = recollect.plan(model, X, 0.8, loss=squares)
    assert "modules" not in timed
    assert plan.schedule.modules == ()


def test_a_budget_below_what_modules_can_do_is_kept_op_by_op(
    monkeypatch: pytest.MonkeyPatch, model: Decoder
) -> None:
    step_takes(monkeypatch, plain=1.0, planned=3.0, modules=1.1)
    frontier = recollect.frontier(model, X, loss=squares)
    solver = frontier._planner.trials.modules
    assert solver is not None
    low = solver.frontier()[0].outcome.peak
    assert frontier.least < low
    plan = frontier.plan_for((frontier.least + low) // 2)
    assert plan.schedule.modules == ()
    assert frontier.plan_for((low + frontier.plain_peak) // 2).schedule.modules


def test_another_budget_is_planned_for_while_such_a_plan_is_applied(
    plan: recollect.Plan, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "_module_costs", lambda *_: {})
    frontier = recollect.frontier(model, X, loss=squares)
    plan.apply(model)
    other = frontier.plan_for(0.7)
    assert _forwards(model) == 2  # as before
    plan.remove(model)
    with other.applied(model):
        assert _forwards(model) == 1


def test_a_model_without_modules_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = made("unrolled")
    step_takes(monkeypatch, plain=1.0, planned=3.0, modules=0.5)
    plan = recollect.plan(case.model, case.batch, 0.9, loss=case.loss)
    assert plan.schedule.modules == ()


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


def test_modules_are_found_in_lists_of_lists_and_draw_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, batch = Stages(), torch.randn(64, 32)
    step_takes(monkeypatch, plain=1.0, planned=3.0, modules=1.1)
    plan = recollect.plan(model, batch, 0.7, loss=squares)
    assert {path for path, _ in plan.schedule.modules} <= {
        f"stages.{stage}.{block}" for stage in range(2) for block in range(2)
    }
    assert plan.schedule.modules
    expected = _gradients(model, batch)
    with plan.applied(model):
        assert_identical(_gradients(model, batch), expected)


def test_what_an_engine_refuses_is_no_error_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
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
    step_takes(monkeypatch, plain=1.0, planned=3.0, modules=0.5)
    plan = recollect.plan(model, batch, 0.9, loss=squares)
    assert all(engine == "replay" for _, engine in plan.schedule.modules)
    assert all(OPTIONS not in vars(module) for module in model.modules())
    expected = _gradients(model, batch)
    with plan.applied(model):
        for _ in range(3):
            assert_identical(_gradients(model, batch), expected)


class _Iterating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, xs: Iterator[Tensor]) -> Tensor:
        return sum(self.down(torch.tanh(self.up(x))) for x in xs)


class _Counting(nn.Module):
    """Computes with how often it was called: in an array too large to be restored."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.calls: Any = np.zeros(1 << 14)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return x + self.down(torch.tanh(self.up(x * (1 + float(self.calls[0]) / 7))))


class _Popping(_Counting):
    """Has as many items as it is called in a step."""

    def forward(self, x: Tensor) -> Tensor:
        items = [2.0]
        self.items = items if not getattr(self, "items", None) else self.items
        return super().forward(x) * self.items.pop()


def _planned_engines(monkeypatch: pytest.MonkeyPatch, kind: type[_Counting]) -> set[str]:
    """The engines of a plan that would like to rerun modules of a kind. Steps by it are plain."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(kind() for _ in range(4))), torch.randn(256, 32)
    step_takes(monkeypatch, plain=1.0, planned=3.0, modules=1.1)
    plan = recollect.plan(model, batch, 0.8, loss=squares)
    twin = copy.deepcopy(model)
    plan.apply(model)
    for _ in range(3):
        assert_identical(_gradients(model, batch), _gradients(twin, batch))
        assert getattr(model[0], "number", 0) == getattr(twin[0], "number", 0)
        assert model[0].calls[0] == twin[0].calls[0]
    return {engine for _, engine in plan.schedule.modules}


@pytest.mark.parametrize("kind", [_Counting, _Popping])
def test_a_module_that_computes_something_else_when_run_twice_is_not_rerun(
    monkeypatch: pytest.MonkeyPatch, kind: type[_Counting]
) -> None:
    assert "rerun" not in _planned_engines(monkeypatch, kind)


class _Listing(_Counting):
    """The count is in a list, which a rerun restores."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]


class _Numbering(_Counting):
    """The count is an attribute, likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return x + self.down(torch.tanh(self.up(x * (1 + self.number / 7))))


@pytest.mark.parametrize("kind", [_Listing, _Numbering])
def test_a_module_that_counts_its_calls_is_rerun_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, kind: type[_Counting]
) -> None:
    assert "rerun" in _planned_engines(monkeypatch, kind)


class _Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        act = nn.GELU()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), act, nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_what_a_shared_module_makes_is_that_of_the_block_that_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    step_takes(monkeypatch, plain=1.0, planned=3.0, modules=1.1)
    frontier = recollect.frontier(_Sharing(), torch.randn(64, 32), loss=squares)
    paths = [op.path for op in frontier._planner.graph.ops if op.name == "aten::gelu"]
    assert paths == [f"layers.{number}.1" for number in range(4)]


def test_a_larger_batch_runs_op_by_op_and_is_recorded(plan: recollect.Plan, model: Decoder) -> None:
    batch = torch.cat([X, X[:1]])
    with plan.applied(model):
        assert _forwards(model) == 2
        assert _forwards(model, batch) == 1


def test_a_transform_runs_the_model_plain_with_a_warning(
    plan: recollect.Plan, model: Decoder
) -> None:
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        return squares(torch.func.functional_call(model, values, (X,)))

    expected = torch.func.grad(loss)(parameters)
    plan.apply(model)
    with pytest.warns(recollect.PlanWarning, match=r"not in effect.*a transform of torch\.func"):
        found = torch.func.grad(loss)(parameters)
    assert_identical(found, expected)
