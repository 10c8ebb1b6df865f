"""A plan: what it says, how it is applied and taken away again, and how it is kept in a file."""

from __future__ import annotations

import copy
import dataclasses
import gc
import html
import inspect
import json
import pickle
import re
import threading
import warnings
import weakref
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.graph.simulate import simulate
from recollect.modules import OPTIONS
from recollect.planning import trial
from recollect.planning.solving import solve
from recollect.replay.named_schedule import trimmed
from recollect.report.units import bytes_text
from tests._support import assert_identical, collector_off, gradients, measure
from tests.planning._models import (
    Custom,
    Decoder,
    Made,
    call,
    made,
    plan_that_keeps,
    squares,
    static_bytes,
)

pytestmark = pytest.mark.usefixtures("no_bound")


def _model(layers: int = 3) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers)


X = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))


def test_nothing_is_timed_or_searched_for_if_the_step_fits_plain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, reference = _model(), _model()
    frontier = recollect.frontier(_model(), X, loss=squares)
    least, plain = frontier.least, frontier.plain_peak
    with monkeypatch.context() as patch:
        patch.setattr(trial, "with_overhead", None)
        patch.setattr(solve.Solver, "frontier", None)
        plan = recollect.plan(model, X, 2 * plain, loss=squares)
    assert plan.plain_peak == plan.predicted_peak == plan.measured_peak == plain
    assert plan.predicted_time == plan.plain_time == pytest.approx(plan.bound_time)
    assert "the step fits as it is" in str(plan)
    plan.to_html(tmp_path / "plan.html")
    plan.save(tmp_path / "plan.json")
    assert recollect.Plan.load(tmp_path / "plan.json") == plan
    assert simulate(plan.graph, plan.alternatives[0].schedule_in(plan.graph)).peak <= 1.05 * least
    # A larger batch does not fit plain. The frontier of another plan is searched for as before.
    plan.apply(model)
    larger = X.repeat(4, 1)
    for _ in range(3):
        found = measure(lambda: squares(model(larger)), Tensor.backward, warm_up=False)
        assert found.peak + static_bytes(model) <= plan.budget
        squares(reference(larger)).backward()
        assert_identical(gradients(model), gradients(reference))
        model.zero_grad()
        reference.zero_grad()
    before = len(frontier.points)
    assert frontier.plan_for(2 * plain).report.points
    assert len(frontier.points) == before > 4


def test_what_takes_more_than_simulated_makes_no_larger_budget_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frontier = recollect.frontier(_model(), X, loss=squares)
    made_by = frontier._planner
    found = made_by.solver.frontier()
    middle = found[len(found) // 2]
    odd = trimmed(made_by.graph, middle.schedule)

    def tried(schedule: Any) -> int:
        peak = simulate(made_by.graph, schedule).peak
        return round(1.05 * peak) if schedule == odd else peak

    monkeypatch.setattr(made_by.trials, "_try", tried)
    less, more = (frontier.plan_for(middle.outcome.peak - lack) for lack in (1, 0))
    assert more.predicted_time <= less.predicted_time
    assert more.predicted_peak <= more.budget


@pytest.fixture(scope="module")
def frontier() -> recollect.Frontier:
    return recollect.frontier(_model(), X, loss=squares)


@pytest.fixture(scope="module")
def plan(frontier: recollect.Frontier) -> recollect.Plan:
    return frontier.plan_for(0.7)


@pytest.fixture
def model() -> Decoder:
    return _model()


def _gradients(model: nn.Module, batch: Any = X, seed: int = 0) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(seed)
    squares(call(model, batch)).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def _recomputes(plan: recollect.Plan) -> bool:
    return any(row.fate == "recomputed" for row in plan.explain())


# --- what it says ---------------------------------------------------------------------------------


def test_its_figures(plan: recollect.Plan, frontier: recollect.Frontier) -> None:
    assert plan.budget == int(0.7 * plan.plain_peak)
    assert 0 < plan.predicted_peak <= plan.budget < plan.plain_peak == frontier.plain_peak
    assert 0 < plan.plain_time <= plan.bound_time * (1 + 1e-9)
    assert plan.bound_time <= plan.predicted_time
    assert plan.gap == pytest.approx(plan.predicted_time / plan.bound_time - 1)
    assert 0 <= plan.gap < 1


def test_it_cannot_be_changed(plan: recollect.Plan) -> None:
    for field in dataclasses.fields(plan):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, field.name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.anything = 3


def test_what_it_keeps_cannot_be_changed_either(plan: recollect.Plan) -> None:
    with pytest.raises((TypeError, AttributeError)):
        copy.deepcopy(plan).schedule.kept["layers.0|aten::mm|0"] = (0,)


def test_it_can_be_put_into_a_set(plan: recollect.Plan) -> None:
    assert len({plan, copy.deepcopy(plan)}) == 1


def test_its_table(plan: recollect.Plan) -> None:
    text = str(plan)
    assert text.startswith("Plan for Decoder on cpu")
    assert max(map(len, text.splitlines())) <= 100
    for word in ("budget", "layers", "recomputed", "kept", "The peak was measured"):
        assert word in text


def test_its_rows_name_modules_of_the_model(plan: recollect.Plan, model: Decoder) -> None:
    rows = plan.explain()
    names = {name for name, _ in model.named_modules()}
    assert {row.path for row in rows} <= names
    assert {row.fate for row in rows} == {"kept", "recomputed"}
    assert all(row.op.startswith("aten.") for row in rows)
    assert all(row.bytes > 0 and row.seconds >= 0 for row in rows)
    kept = sum(row.bytes for row in rows if row.fate == "kept")
    assert 0 < kept < plan.plain_peak


def test_its_page(plan: recollect.Plan, frontier: recollect.Frontier, tmp_path: Path) -> None:
    for number, each in enumerate((plan, frontier)):
        path = tmp_path / f"{number}.html"
        each.to_html(str(path) if number else path)
        text = path.read_text(encoding="utf-8")
        assert text.lstrip().lower().startswith("<!doctype html>")
        assert "Decoder" in text
        assert "https://" not in text  # in one file, for any browser


def test_a_notebook_shows_the_page_in_a_frame(
    plan: recollect.Plan, frontier: recollect.Frontier
) -> None:
    for each in (plan, frontier, recollect.explain(torch.sin, torch.ones(4, requires_grad=True))):
        shown = each._repr_html_()
        frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts" .*', shown)
        assert frame is not None
        assert html.unescape(frame[1]).startswith("<!doctype html>")


def test_its_curves_say_what_runs_and_when_backward_begins(plan: recollect.Plan) -> None:
    for curve, marks in (
        (plan.report.before, plan.report.before_marks),
        (plan.report.after, plan.report.after_marks),
    ):
        times = [mark.seconds for mark in marks]
        assert times == sorted(times)
        assert curve[0][0] <= times[0] <= times[-1] <= curve[-1][0]
        is_backward = [mark.is_backward for mark in marks]
        assert is_backward == sorted(is_backward)
        assert {False, True} == set(is_backward)
        forward = [mark.path for mark in marks if not mark.is_backward]
        backward = [mark.path for mark in marks if mark.is_backward]
        for found in (forward, backward):  # every layer, and backward in the other order
            assert {path.split(".")[1] for path in found if path.startswith("layers.")} >= {
                "0",
                "2",
            }
        first, last = (
            next(n for n, path in enumerate(backward) if path.startswith(layer))
            for layer in ("layers.2", "layers.0")
        )
        assert first < last


def test_two_plans_are_compared(
    plan: recollect.Plan, frontier: recollect.Frontier, tmp_path: Path
) -> None:
    other = frontier.plan_for(frontier.least)
    compared = plan.compare(other)
    assert compared.changes
    assert all(change.first != change.second for change in compared.changes)
    text = str(compared)
    assert bytes_text(plan.budget) in text
    assert bytes_text(other.measured_peak) in text
    assert "recomputed" in text
    assert len(repr(compared)) < 120
    compared.to_html(tmp_path / "compared.html")
    assert "Two plans side by side" in (tmp_path / "compared.html").read_text(encoding="utf-8")
    same = plan.compare(plan)
    assert not same.changes
    assert "the same" in str(same)
    with pytest.raises(TypeError, match=r"other should be a Plan, but got 'plan.json'.*Plan.load"):
        plan.compare("plan.json")


def test_the_frontier_has_plans_plain_and_baselines(frontier: recollect.Frontier) -> None:
    kinds = [point.kind for point in frontier.points]
    assert kinds.count("plain") == 1
    assert kinds.count("baseline") == 2
    plans = [point for point in frontier.points if point.kind == "plan"]
    assert len(plans) > 5
    assert [p.peak for p in plans] == sorted(p.peak for p in plans)
    assert [p.seconds for p in plans] == sorted((p.seconds for p in plans), reverse=True)


@pytest.mark.slow
def test_its_alternatives_are_from_the_quickest_to_the_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(solve, "_WORK", 1_000_000)  # as usual
    frontier = recollect.frontier(_model(), X, loss=squares)
    plan, graph = frontier.plan_for(0.7), frontier.graph
    larger = recollect.frontier(_model(), torch.cat([X, X]), loss=squares).graph
    assert 4 < len(plan.alternatives) <= 16
    peaks = [simulate(larger, each.schedule_in(larger)).peak for each in plan.alternatives]
    assert peaks[0] == max(peaks)
    assert peaks[-1] == min(peaks)
    # The quickest and the least for the batch that was planned are among them.
    found = {simulate(graph, each.schedule_in(graph)).peak for each in plan.alternatives}
    plans = [point.peak for point in frontier.points if point.kind == "plan"]
    assert {max(plans), min(plans)} <= found
    # And hardly anything is less for one that is twice as large.
    assert peaks[-1] <= 1.03 * recollect.frontier(_model(), torch.cat([X, X]), loss=squares).least
    assert plan.least is plan.alternatives[-1]


def test_their_reprs_are_one_short_line(plan: recollect.Plan, frontier: recollect.Frontier) -> None:
    assert re.fullmatch(r"<Plan for Decoder: .* of .*, [\d.<]+% slower than plain>", repr(plan))
    assert re.fullmatch(r"<Frontier of Decoder: plain [\d.]+ \w+>", repr(frontier))


def test_fit_takes_what_plan_takes() -> None:
    planned, fitted = (
        inspect.signature(each).parameters for each in (recollect.plan, recollect.fit)
    )
    assert [*planned, "progress"] == [*fitted]
    assert fitted["batch"].default is None
    assert fitted["budget"].default == "auto"
    options = [name for name, each in planned.items() if each.kind is each.KEYWORD_ONLY]
    assert [planned[name] for name in options] == [fitted[name] for name in options]


# --- files ----------------------------------------------------------------------------------------


def test_it_is_the_same_after_it_was_saved(plan: recollect.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = recollect.Plan.load(str(path))
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert loaded.explain() == plan.explain()
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_loaded_plan_does_the_same(plan: recollect.Plan, model: Decoder, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    expected = _gradients(model)
    loaded = recollect.Plan.load(tmp_path / "plan.json").apply(model)
    done = Made(loaded, X, squares)
    for _ in range(3):
        model.zero_grad()
        peak = measure(done.forward, lambda out: squares(out).backward(), warm_up=False).peak
        assert peak + static_bytes(model) <= plan.budget
        assert_identical(gradients(model), expected)


def test_it_can_be_pickled_and_copied(plan: recollect.Plan, model: Decoder) -> None:
    expected = _gradients(model)
    for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), copy.copy(plan)):
        assert other == plan
        with other.applied(model):
            assert_identical(_gradients(model), expected)


@pytest.mark.parametrize(
    "content",
    ["", "garbage", "[]", "{}", "null", '{"format": 1}', '{"format": 2}', '"text"', "3"],
)
def test_a_file_that_is_no_plan(content: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(
        ValueError, match="is not a plan that this version of recollect can read"
    ) as e:
        recollect.Plan.load(path)
    assert str(path) in str(e.value)


def test_a_file_that_is_not_even_text(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\x80\x02\xff\xfe")
    with pytest.raises(ValueError, match="is not a plan that this version of recollect can read"):
        recollect.Plan.load(path)


def test_its_file_begins_with_where_it_comes_from(plan: recollect.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert [*content][:2] == ["format", "origin"]
    origin = content["origin"]
    assert origin["recollect"] == recollect.__version__
    assert origin["torch"] == torch.__version__
    assert origin["device"] == "cpu"
    age = datetime.now(timezone.utc) - datetime.fromisoformat(origin["date"])
    assert timedelta(minutes=-1) < age < timedelta(hours=1)
    assert recollect.Plan.load(tmp_path / "plan.json").origin == plan.origin


def test_a_plan_of_another_version(plan: recollect.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "format": content["format"] + 1}), encoding="utf-8")
    with pytest.raises(ValueError, match="another version of recollect wrote it"):
        recollect.Plan.load(path)
    content.pop("budget")
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="budget"):
        recollect.Plan.load(path)


def test_saving_into_a_folder_that_is_not_there(plan: recollect.Plan, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "plan.json"
    with pytest.raises(FileNotFoundError) as caught:
        plan.save(path)
    assert caught.value.filename == str(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        recollect.Plan.load(tmp_path / "none.json")


# --- applying it ----------------------------------------------------------------------------------


def _looks(model: nn.Module) -> Any:
    return (
        type(model).__name__,
        type(model).__qualname__,
        type(model).__module__,
        repr(model),
        [name for name, _ in model.named_modules()],
        {name: id(p) for name, p in model.named_parameters()},
        {name: id(b) for name, b in model.named_buffers()},
        list(model.state_dict()),
        list(map(id, model._forward_hooks.values())),
        model.training,
    )


def test_the_model_looks_as_it_did(plan: recollect.Plan, model: Decoder) -> None:
    model.register_forward_hook(lambda *_: None)
    before, its_class, attributes = _looks(model), type(model), set(vars(model))
    assert plan.apply(model) is model
    assert _looks(model) == before
    assert isinstance(model, Decoder)
    assert plan.remove(model) is model
    assert _looks(model) == before
    assert type(model) is its_class
    assert set(vars(model)) - attributes <= {"_recollect_index"}
    assert isinstance(model.forward.__func__, type(Decoder.forward))
    assert model.forward.__func__ is Decoder.forward


def test_it_runs_by_the_plan_while_it_is_applied_and_not_after(
    plan: recollect.Plan, model: Decoder
) -> None:
    done = Made(model, X, squares)

    def backward(out: Tensor) -> None:
        squares(out).backward()
        model.zero_grad()

    def peak() -> int:
        return measure(done.forward, backward).peak

    plain = peak()
    with plan.applied(model) as same:
        assert same is model
        assert peak() + static_bytes(model) <= plan.budget
    assert peak() == plain
    assert plain + static_bytes(model) > plan.budget


def test_it_is_taken_away_when_there_is_an_exception(plan: recollect.Plan, model: Decoder) -> None:
    with pytest.raises(KeyError), plan.applied(model):
        raise KeyError
    assert OPTIONS not in vars(model)
    assert type(model) is Decoder


def test_the_forward_of_an_instance_is_kept(plan: recollect.Plan, model: Decoder) -> None:
    calls = []

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return Decoder.forward(model, x)

    model.forward = forward
    expected = _gradients(model)
    with plan.applied(model):
        assert_identical(_gradients(model), expected)
    assert model.forward is forward
    assert len(calls) == 2


def test_it_is_not_applied_twice(plan: recollect.Plan, model: Decoder) -> None:
    plan.apply(model)
    with pytest.raises(
        ValueError, match=r"a plan is applied to this Decoder already; call plan.remove"
    ):
        plan.apply(model)
    plan.remove(model)
    with pytest.raises(ValueError, match="no plan is applied to this Decoder"):
        plan.remove(model)
    plan.apply(model)


def test_a_checkpointed_model_is_refused(plan: recollect.Plan, model: Decoder) -> None:
    recollect.checkpointed(model)
    with pytest.raises(ValueError, match="checkpointed already"):
        plan.apply(model)
    with pytest.raises(ValueError, match="no plan is applied"):
        plan.remove(model)
    assert recollect.unwrap(model) is model


def test_unwrap_takes_a_plan_away_too(plan: recollect.Plan, model: Decoder) -> None:
    recollect.unwrap(plan.apply(model))
    assert type(model) is Decoder


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: _model(2), r"it has no layers\.2\.norm1\.weight"),
        (lambda: _model(4), r"it has layers\.3\.norm1\.weight"),
        (lambda: Decoder(3, 64), r"its embed\.weight is \[96, 64\] float32, and was \[96, 32\]"),
        (lambda: _model().double(), r"its embed\.weight is \[96, 32\] float64, and was"),
        (Custom, r"The Custom given differs: it has no embed\.weight"),
    ],
)
def test_another_model_is_refused_with_what_differs(
    plan: recollect.Plan, other: Any, message: str
) -> None:
    given = other()
    with pytest.raises(ValueError, match=message) as caught:
        plan.apply(given)
    assert "this plan is for another model, Decoder" in str(caught.value)
    assert OPTIONS not in vars(given)


def test_a_model_of_which_other_parts_are_trained_is_refused(
    plan: recollect.Plan, model: Decoder
) -> None:
    model.head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"its head\.weight requires_grad is False, and was True"):
        plan.apply(model)


def test_what_is_no_model_is_refused(plan: recollect.Plan) -> None:
    with pytest.raises(TypeError, match=r"model should be an nn\.Module, but got function"):
        plan.apply(squares)


def test_a_copy_and_a_pickle_of_a_planned_model_are_planned(
    plan: recollect.Plan, model: Decoder
) -> None:
    expected = _gradients(model)
    plan.apply(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other).__name__ == "Decoder"
        assert other.head.weight is not model.head.weight
        assert_identical(_gradients(other), expected)
        plan.remove(other)
        assert type(other) is Decoder
    assert_identical(_gradients(model), expected)


def test_state_is_loaded_and_saved_under_a_plan(plan: recollect.Plan, model: Decoder) -> None:
    state = {name: tensor.clone() * 2 for name, tensor in model.state_dict().items()}
    plan.apply(model)
    model.load_state_dict(state)
    assert_identical(dict(model.state_dict()), state)


def test_hooks_run_once_a_step(plan: recollect.Plan, model: Decoder) -> None:
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.layers[1].register_forward_hook(lambda *_: calls.append("inner"))
    model.layers[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    plan.apply(model)
    for _ in range(3):
        calls.clear()
        _gradients(model)
        assert calls == ["before", "inner", "forward", "backward"]


# --- using a planned model ------------------------------------------------------------------------


def test_without_gradients_it_runs_plain(plan: recollect.Plan, model: Decoder) -> None:
    with torch.no_grad():
        expected = model(X)
    plan.apply(model)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = model(X)
        assert not out.requires_grad
        assert torch.equal(out, expected)


def test_in_eval_it_is_right_too() -> None:
    case = made("conv")
    plan = plan_that_keeps(0.3, case.model, case.batch)
    case.model.eval()
    expected = _gradients(case.model, case.batch)
    with plan.applied(case.model):
        for _ in range(2):
            assert_identical(_gradients(case.model, case.batch), expected)
    assert not case.model.training


@pytest.mark.slow
def test_a_compiled_planned_model_is_right(plan: recollect.Plan, model: Decoder) -> None:
    expected = _gradients(model)
    plan.apply(model)
    compiled = torch.compile(model, backend="eager", fullgraph=False)
    with pytest.warns(recollect.PlanWarning, match="torch.compile leaves its forward as it is"):
        assert_identical(_gradients(compiled), expected)
    for _ in range(2):
        assert_identical(_gradients(compiled), expected)
    torch.compiler.reset()


# There is no room for gradients that are there.
@pytest.mark.filterwarnings("ignore:.* of gradients are there when:recollect.PlanWarning")
def test_a_step_in_two_parts(plan: recollect.Plan, model: Decoder) -> None:
    def accumulate(model: nn.Module) -> list[Tensor | None]:
        model.zero_grad()
        for part in (X[:1], X[1:], X):
            squares(model(part)).backward()
        return gradients(model)

    expected = accumulate(model)
    plan.apply(model)
    for _ in range(3):
        assert_identical(accumulate(model), expected)


def test_smaller_batches_take_less_and_are_right(plan: recollect.Plan, model: Decoder) -> None:
    plan.apply(model)
    for batch in (X[:1], X[:, :8], X[:1, :1]):
        planned = [_gradients(model, batch) for _ in range(3)]
        done = Made(model, batch, squares)
        peak = measure(done.forward, lambda out: squares(out).backward(), warm_up=False).peak
        assert peak + static_bytes(model) <= plan.budget
        plan.remove(model)
        expected = _gradients(model, batch)
        plan.apply(model)
        assert_identical(planned, [expected] * 3)


def test_a_larger_batch_that_fits_is_planned_anew(plan: recollect.Plan, model: Decoder) -> None:
    batch = torch.cat([X, X[:1]])
    done = Made(model, batch, squares)
    model.zero_grad()
    plain = measure(done.forward, lambda out: squares(out).backward()).peak + static_bytes(model)
    expected = _gradients(model, batch)
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model.zero_grad()
            peak = measure(done.forward, lambda out: squares(out).backward(), warm_up=False).peak
            assert peak + static_bytes(model) <= plan.budget < plain
            assert_identical(gradients(model), expected)


def test_a_batch_that_cannot_fit_is_warned_of_once_and_right(
    plan: recollect.Plan, model: Decoder
) -> None:
    batch = torch.cat([X] * 8)
    expected = _gradients(model, batch)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan.apply(model)
    with pytest.warns(recollect.PlanWarning, match="the batch is larger.*and the budget is"):
        found = _gradients(model, batch)
    assert_identical([found, _gradients(model, batch)], [expected] * 2)  # warnings are errors here
    assert_identical(dict(model.state_dict()), state)


def test_planning_for_a_larger_batch_in_training_changes_nothing_of_the_model() -> None:
    # In the middle of a step: gradients are there, and batches were counted.
    results = []
    for is_planned in (False, True):
        case = made("conv")
        if is_planned:
            plan_that_keeps(0.3, case.model, case.batch).apply(case.model)
        case.step(seed=1)
        larger = torch.cat([case.batch[0], case.batch[0]])
        squares(case.model(larger)).backward()
        state = dict(case.model.state_dict()), torch.get_rng_state()
        results.append((gradients(case.model), state))
    assert_identical(results[1], results[0])


def test_a_larger_batch_of_what_depends_on_data_keeps_the_budget_and_is_right() -> None:
    case = made("moe")
    larger = torch.cat([case.batch[0]] * 2)
    expected = _gradients(case.model, larger)
    plan = recollect.plan(case.model, case.batch, 0.8, loss=squares)
    plan.apply(case.model)
    for _ in range(3):
        assert_identical(_gradients(case.model, larger), expected)


def test_a_larger_batch_that_fits_where_it_could_not_be_predicted() -> None:
    case = made("moe")
    larger = torch.cat([case.batch[0]] * 2)
    expected = _gradients(case.model, larger)
    plan_that_keeps(0.3, case.model, case.batch).apply(case.model)  # with a budget for anything
    for _ in range(2):
        assert_identical(_gradients(case.model, larger), expected)


def test_a_loaded_plan_is_right_for_larger_batches(
    plan: recollect.Plan, model: Decoder, tmp_path: Path
) -> None:
    batch = torch.cat([X, X[:1]])
    expected = _gradients(model, batch)
    plan.save(tmp_path / "plan.json")
    recollect.Plan.load(tmp_path / "plan.json").apply(model)
    for _ in range(3):
        assert_identical(_gradients(model, batch), expected)


def test_a_model_that_takes_names() -> None:
    case = made("with_loss")
    plan = plan_that_keeps(0.3, case.model, case.batch, None)
    case.step()
    expected = gradients(case.model)
    for batch in (case.batch, dict(reversed(case.batch.items()))):
        with plan.applied(case.model):
            for _ in range(2):
                case.model.zero_grad()
                call(case.model, batch).loss.backward()
                assert_identical(gradients(case.model), expected)


def test_two_models_with_a_plan_each() -> None:
    cases = [made("custom"), made("decoder_dropout")]
    expected = []
    for case in cases:
        case.step(seed=1)
        expected.append(gradients(case.model))
        case.model.zero_grad()
        plan_that_keeps(0.3, case.model, case.batch).apply(case.model)
    for _ in range(3):
        for case, gradient in zip(cases, expected, strict=True):
            case.model.zero_grad()
            case.step(seed=1)
            assert_identical(gradients(case.model), gradient)


def test_one_plan_for_two_models(plan: recollect.Plan) -> None:
    first, second = _model(), _model()
    with torch.no_grad():
        second.head.weight.mul_(2)
    expected = [_gradients(first), _gradients(second)]
    plan.apply(first)
    plan.apply(second)
    for _ in range(3):
        assert_identical([_gradients(first), _gradients(second)], expected)


def test_a_model_inside_of_a_planned_one_that_has_a_plan_too(
    plan: recollect.Plan, model: Decoder
) -> None:
    whole = nn.Sequential(model, nn.Linear(96, 8))
    outer = plan_that_keeps(0.2, whole, X)
    expected = _gradients(whole)
    plan.apply(model)
    outer.apply(whole)
    for _ in range(3):
        assert_identical(_gradients(whole), expected)


def test_a_part_of_a_larger_model(plan: recollect.Plan, model: Decoder) -> None:
    whole = nn.Sequential(model, nn.Linear(96, 48), nn.Tanh(), nn.Linear(48, 8))
    expected = _gradients(whole)
    plan.apply(model)
    for _ in range(3):
        assert_identical(_gradients(whole), expected)


def test_it_is_used_from_another_thread_than_it_was_made_in(
    plan: recollect.Plan, model: Decoder
) -> None:
    expected = _gradients(model)
    plan.apply(model)
    found: list[Any] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(_gradients(model)))
        thread.start()
        thread.join()
    assert_identical(found, [expected] * 2)


def test_fit_plans_and_applies(model: Decoder) -> None:
    plain = _gradients(model)
    assert recollect.fit(model, X, 1.0, loss=squares) is model
    assert OPTIONS in vars(model)
    assert_identical(_gradients(model), plain)
    recollect.unwrap(model)


def test_auto_is_what_the_machine_has(model: Decoder) -> None:
    plan = recollect.plan(model, X, "auto", loss=squares)
    assert plan.budget > plan.plain_peak
    assert not _recomputes(plan)
    assert plan.predicted_time == pytest.approx(plan.plain_time)


def test_what_becomes_of_a_planned_model_can_be_explained(
    plan: recollect.Plan, model: Decoder
) -> None:
    plan.apply(model)
    assert "mm" in str(recollect.explain(model, X))


def test_a_budget_in_bytes_in_words_and_as_a_fraction_give_the_same_plan(
    frontier: recollect.Frontier,
) -> None:
    budget = int(0.8 * frontier.plain_peak)
    plans = [frontier.plan_for(b) for b in (budget, float(budget), f"{budget}B", 0.8)]
    assert all(plan == plans[0] for plan in plans)


# --- leaks ----------------------------------------------------------------------------------------


def test_nothing_is_held_once_the_plan_is_removed() -> None:
    torch.manual_seed(0)
    model, batch = Custom(), torch.randn(16, 48)
    plan = recollect.plan(model, batch, 1.0, loss=squares)
    with plan.applied(model):
        squares(model(batch)).backward()
    alive = [weakref.ref(each) for each in (model, batch, model.layers[0].weight)]
    del model, batch
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    assert plan.budget  # which is there still


def test_a_planned_model_can_be_collected() -> None:
    torch.manual_seed(0)
    model, batch = Custom(), torch.randn(16, 48)
    plan_that_keeps(0.3, model, batch).apply(model)
    squares(model(batch)).backward()
    alive = [weakref.ref(each) for each in (model, batch)]
    del model, batch
    gc.collect()
    assert [ref() for ref in alive] == [None] * 2


def test_a_model_that_its_loss_refers_to_can_be_collected() -> None:
    def made() -> weakref.ref[nn.Module]:
        model = Custom(2)

        def loss(out: Tensor) -> Tensor:
            return squares(out) + model.layers[0].weight.square().sum()

        plan_that_keeps(0.3, model, torch.randn(16, 48), loss)
        return weakref.ref(model)

    alive = made()
    gc.collect()
    assert alive() is None


def test_a_step_leaves_no_memory_allocated() -> None:
    case = made("decoder_dropout")
    plan_that_keeps(0.3, case.model, case.batch).apply(case.model)
    for _ in range(3):
        case.step(seed=1)
        case.model.zero_grad()

    def backward(out: Tensor) -> None:
        squares(out).backward()
        case.model.zero_grad()

    assert measure(case.forward, backward).left == 0


def test_a_forward_whose_backward_never_comes_holds_nothing() -> None:
    case = made("decoder_dropout")
    plan_that_keeps(0.3, case.model, case.batch).apply(case.model)
    with collector_off():
        for _ in range(3):
            case.forward()
        assert measure(case.forward, lambda _: None).left == 0


def test_batches_of_many_shapes_do_not_pile_up(model: Decoder) -> None:
    plan_that_keeps(0.3, model, X).apply(model)
    for length in range(1, 30):
        squares(model(X[:1, :length])).backward()
    model.zero_grad()
    batch = X[:1, :5]

    def backward(out: Tensor) -> None:
        squares(out).backward()
        model.zero_grad()

    assert measure(lambda: model(batch), backward).left == 0


@pytest.mark.parametrize("squares_beyond", [False, True])
def test_a_batch_with_a_graph(squares_beyond: bool) -> None:
    """As where a part of a model is planned, with what the part before it returns."""
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    x = torch.randn(64, 32, requires_grad=True)
    before = x.exp() if squares_beyond else x + 1
    values = before.detach().clone()
    plan = recollect.plan(model, before, 0.9)
    assert x.grad is None
    assert torch.equal(before, values)
    expected = torch.autograd.grad(squares(model(before)), x, retain_graph=True)
    plan.apply(model)
    found = torch.autograd.grad(squares(model(before)), x)
    assert torch.equal(found[0], expected[0])
