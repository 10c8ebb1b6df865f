"""What cannot be planned is refused: with what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.errors import CheckpointError
from recollect.modules import OPTIONS
from recollect.planning import planner
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request
from tests.planning._models import Custom, Made, made, never, squares


@pytest.fixture(autouse=True, scope="module")
def _no_bound() -> Iterator[None]:
    """Have no time spent on what no plan can be below: others test that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "lower_bound", lambda graph, *_, **__: graph.plain_seconds)
        yield


def _model() -> Custom:
    torch.manual_seed(0)
    return Custom(3)


X = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))


def test_a_budget_in_the_place_of_the_batch() -> None:
    with pytest.raises(TypeError, match=r"batch: there is no tensor in this str.*budget='22GiB'"):
        recollect.fit(_model(), "22GiB")


def test_a_model_without_a_forward() -> None:
    class Lightning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(48, 48)

    with pytest.raises(TypeError, match=r"model: this Lightning has no forward.*lightning\.Fit"):
        recollect.plan(Lightning(), X, 0.5)


def test_a_batch_without_a_tensor() -> None:
    with pytest.raises(TypeError, match="batch: there is no tensor in this list"):
        recollect.plan(_model(), [1, 2, 3], 0.5)


def test_a_list_in_the_place_of_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"batch: .* with the list .* pass a tuple: recollect.plan"):
        recollect.plan(_model(), [X, X], 0.5)


def test_a_batch_on_another_device() -> None:
    with pytest.raises(RuntimeError, match=r"batch: it is on meta, but the model on cpu\. Move it"):
        recollect.plan(_model(), X.to("meta"), 0.5)


class _NewTransformers(nn.Linear):
    """As in versions of transformers that rename gradient checkpointing."""

    is_activation_checkpointing = True

    @property
    def is_gradient_checkpointing(self) -> bool:
        raise AssertionError("deprecated")


def test_checkpointing_under_its_newer_name() -> None:
    with pytest.raises(ValueError, match="gradient checkpointing is on"):
        recollect.fit(_NewTransformers(3, 3), budget=0.5)


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, [1], True, False, 1 + 2j, torch.tensor(3), b"1GiB"])
def test_a_budget_of_another_type(budget: Any) -> None:
    with pytest.raises(TypeError, match="budget should be a number of bytes, a text such as") as e:
        recollect.plan(_model(), X, budget, loss=never)
    assert type(budget).__name__ in str(e.value)


def test_batch_and_budget_in_each_others_place() -> None:
    with pytest.raises(TypeError, match=r"of type Tensor\. Give it by its name: budget='12"):
        recollect.plan(_model(), "12GiB", X, loss=never)


@pytest.mark.parametrize("budget", [0, -1, 0.0, -0.5, float("nan"), float("-inf")])
def test_a_budget_that_is_not_more_than_nothing(budget: float) -> None:
    with pytest.raises(ValueError, match="budget should be more than 0, but is"):
        recollect.plan(_model(), X, budget, loss=never)


@pytest.mark.parametrize("budget", [1.5, 2.25, 1e6 + 0.5, float("inf")])
def test_a_budget_that_is_neither_bytes_nor_a_fraction(budget: float) -> None:
    with pytest.raises(ValueError, match="neither a number of bytes nor a fraction"):
        recollect.plan(_model(), X, budget, loss=never)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("12", "Did you mean .12GiB"),
        ("12 parsecs", "there is no unit 'parsecs'"),
        ("12G", "'G' may mean GB or GiB"),
        ("12Gb", "with a small b means bits"),
        ("GiB", "is not a number and a unit of bytes"),
        ("", "is not a number and a unit of bytes"),
        ("-1GiB", "is not a number and a unit of bytes"),
        ("1e3GiB", "there is no unit|is not a number and a unit"),
        ("automatic", "is not a number and a unit of bytes"),
        ("12GiB 3", "is not a number and a unit of bytes"),
    ],
)
def test_a_budget_in_words_that_mean_none(budget: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recollect.plan(_model(), X, budget, loss=never)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (np.int64(1 << 30), 1 << 30),
        (np.uint16(2000), None),
        (np.float32(1.0), 1.0),
        (np.float64(1 << 30), 1 << 30),
        (Fraction(1, 1), 1.0),
    ],
)
def test_numbers_of_other_types(budget: Any, expected: float | None) -> None:
    frontier = _frontier()
    if expected is None:
        with pytest.raises(recollect.InfeasibleBudget):
            frontier.plan_for(budget)
        return
    wanted = frontier.plain_peak if expected == 1.0 else expected
    assert frontier.plan_for(budget).budget == wanted


@pytest.mark.parametrize("budget", [None, "12G", 1.5, -3])
def test_a_frontier_refuses_the_same_budgets(budget: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"budget|12G"):
        _frontier().plan_for(budget)


def test_a_budget_of_nothing_in_words() -> None:
    with pytest.raises((ValueError, recollect.InfeasibleBudget)):
        recollect.plan(_model(), X, "0GiB", loss=squares)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["yes", "always", None, 2])
def test_an_unknown_offload(offload: Any) -> None:
    with pytest.raises(ValueError, match="offload should be True, False or 'auto', but is"):
        recollect.plan(_model(), X, 0.5, loss=never, offload=offload)


def test_offload_where_there_is_no_device_to_offload_from() -> None:
    with pytest.raises(ValueError, match=r"offload=True needs a CUDA device .* is on cpu"):
        recollect.plan(_model(), X, 0.5, loss=never, offload=True)


def test_an_unknown_option() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        recollect.fit(_model(), X, 0.5, loss=never, speed=3)


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "model", squares, Custom])
def test_what_is_no_model(model: Any) -> None:
    message = r"model should be an nn\.Module, but got .*\. Pass the module to train, as the first"
    with pytest.raises(TypeError, match=message):
        recollect.plan(model, X, 0.5)
    with pytest.raises(TypeError, match=message):
        recollect.fit(model, budget=0.5)
    with pytest.raises(TypeError, match=message):
        recollect.largest_batch(model, lambda n: X[:n], "1GiB")


def test_a_model_without_parameters_that_are_trained() -> None:
    model = _model().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of this Custom requires a gradient"):
        recollect.plan(model, X, 0.5, loss=never)
    with pytest.raises(ValueError, match="no parameter of this Tanh requires a gradient"):
        recollect.plan(nn.Tanh(), X, 0.5, loss=never)


def test_a_part_that_is_checkpointed() -> None:
    model = _model()
    recollect.checkpointed(model.layers[1])
    with pytest.raises(ValueError, match=r"its layers\.1 is checkpointed or has a plan already"):
        recollect.plan(model, X, 0.5, loss=never)
    recollect.unwrap(model.layers[1])
    recollect.plan(model, X, 1.0, loss=squares)


def test_a_model_that_is_checkpointed_or_planned() -> None:
    model = _model()
    recollect.checkpointed(model)
    with pytest.raises(ValueError, match="it is checkpointed or has a plan already"):
        recollect.plan(model, X, 0.5, loss=never)
    recollect.unwrap(model)
    plan = recollect.fit(model, X, 1.0, loss=squares)
    with pytest.raises(ValueError, match="it is checkpointed or has a plan already"):
        recollect.frontier(plan, X, loss=never)


def test_a_frontier_is_there_after_a_plan_was_applied() -> None:
    model = _model()
    frontier = recollect.frontier(model, X, loss=squares)
    plan = frontier.plan_for(1.0)
    plan.apply(model)
    runner = vars(model)[OPTIONS]
    assert frontier.least < frontier.plan_for(0.95).budget < plan.budget
    assert vars(model)[OPTIONS] is runner
    plan.remove(model)


def test_a_frontier_of_a_model_that_is_checkpointed_since() -> None:
    model = _model()
    frontier = recollect.frontier(model, X, loss=squares)
    recollect.checkpointed(model)
    with pytest.raises(ValueError, match=r"has been checkpointed since .* recollect.unwrap"):
        frontier.plan_for(0.9)


def test_a_frontier_of_a_model_that_was_changed() -> None:
    model = _model()
    frontier = recollect.frontier(model, X, loss=squares)
    model.layers[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"not as it was .* its layers\.0\.weight and 1 more"):
        frontier.plan_for(0.9)
    assert type(model) is Custom


def test_gradient_checkpointing_that_is_on() -> None:
    class Pretrained(Custom):
        is_gradient_checkpointing = True

    with pytest.raises(
        ValueError, match=r"Switch it off: model.gradient_checkpointing_disable\(\)"
    ):
        recollect.plan(Pretrained(), X, 0.5, loss=never)


def test_an_exception_of_the_model_comes_through_as_it_is() -> None:
    class Fails(Custom):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        recollect.plan(Fails(), X, 0.5)


def test_a_batch_that_the_model_does_not_take() -> None:
    with pytest.raises(TypeError, match=r"positional arguments.*What only the loss takes is not"):
        recollect.plan(_model(), (X, X), 0.5)
    with pytest.raises(TypeError, match=r"unexpected keyword.*a dict its keyword arguments"):
        recollect.plan(_model(), {"y": X}, 0.5)


def test_a_batch_of_which_a_hook_makes_what_the_model_takes() -> None:
    model = _model()
    model.register_forward_pre_hook(lambda _, args: args[:1])
    recollect.plan(model, (X, X), 1.0, loss=squares)


def test_an_error_inside_of_the_model_is_no_matter_of_the_batch() -> None:
    class Fails(Custom):
        def forward(self, x: Tensor) -> Tensor:
            raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        recollect.plan(Fails(), X, 0.5)


@pytest.mark.parametrize("batch", [iter([X]), (x for x in [X]), {"x": iter([X])}, (iter([X]),)])
def test_a_batch_that_can_be_read_once(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"an iterator \(.*pass what it gives, .*next\(iterator\)"):
        recollect.plan(_model(), batch, 0.5, loss=never)


def test_a_loader_of_batches() -> None:
    with pytest.raises(TypeError, match=r"is a DataLoader: .*batch=next\(iter\(loader\)\)"):
        recollect.plan(_model(), torch.utils.data.DataLoader(X), 0.5, loss=never)


# --- no plan fits ---------------------------------------------------------------------------------


@cache
def _frontier() -> recollect.Frontier:
    return recollect.frontier(_model(), X, loss=squares)


def test_a_budget_that_no_plan_fits_says_what_would() -> None:
    with pytest.raises(recollect.InfeasibleBudget) as caught:
        _frontier().plan_for("2KiB")
    error = caught.value
    assert isinstance(error, CheckpointError)
    assert isinstance(error, RuntimeError)
    assert (error.budget, error.least) == (2048, _frontier().least)
    text = str(error)
    assert "no plan brings the step of this Custom down to 2.00 KiB (2,048 bytes)" in text
    assert f"budget={error.least}" in text
    assert "parameters" in text
    assert "gradients, loss and workspace" in text


@pytest.mark.parametrize("name", ["custom", "conv", "lstm"])
def test_the_least_that_it_says_works_when_asked_for_by_a_new_call(name: str) -> None:
    case: Made = made(name)
    with pytest.raises(recollect.InfeasibleBudget) as caught:
        recollect.plan(case.model, case.batch, 1024, loss=case.loss)
    least = caught.value.least
    plan = recollect.plan(case.model, case.batch, least, loss=case.loss)
    assert plan.predicted_peak <= plan.budget == least
    with pytest.raises(recollect.InfeasibleBudget):
        recollect.plan(case.model, case.batch, least // 2, loss=case.loss)


def test_a_fraction_that_no_plan_fits() -> None:
    with pytest.raises(recollect.InfeasibleBudget) as caught:
        _frontier().plan_for(0.01)
    assert caught.value.budget == int(0.01 * _frontier().plain_peak)


def test_nothing_is_left_applied_by_a_budget_that_no_plan_fits() -> None:
    model = _model()
    with pytest.raises(recollect.InfeasibleBudget):
        recollect.fit(model, X, 1024, loss=squares)
    assert type(model) is Custom
    assert all(p.grad is None for p in model.parameters())


def test_progress_says_what_is_being_done() -> None:
    told: list[tuple[str, float]] = []

    def progress(what: str, done: float) -> None:
        told.append((what, done))

    made_by = Planner.of(Request(_model(), X, squares), progress=progress)
    made_by.plan_for(made_by.least_budget())
    assert {what for what, _ in told} == {
        "recording a step",
        "timing the engine",
        "solving",
        "trying the plan",
        "timing the plan",
    }
    assert all(0 <= done <= 1 for _, done in told)


def test_a_model_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = _model()
    name = next(name for name, _ in model.named_parameters())
    said = rf"model: {name} was made under torch.inference_mode.* outside"
    with pytest.raises(ValueError, match=said):
        recollect.plan(model, X, 0.8)
    with pytest.raises(ValueError, match=said):
        recollect.fit(model, budget=0.8)
    with pytest.raises(RuntimeError, match=r"^model: .*under torch.inference_mode"):
        recollect.explain(model, X)


def test_a_batch_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        batch = X.clone()
    with pytest.raises(RuntimeError, match=r"^batch: .* under torch.inference_mode.*\.clone\(\)"):
        recollect.plan(_model(), batch, 0.8)
    with pytest.raises(RuntimeError, match=r"^an argument: .*under torch.inference_mode"):
        recollect.explain(_model(), batch)


def test_inference_mode_is_left_while_the_step_runs() -> None:
    model = _model()
    with torch.inference_mode():
        plan = recollect.plan(model, X, 0.9)
        assert torch.is_inference_mode_enabled()
        found = recollect.largest_batch(
            model, lambda n: torch.randn(n, 48), plan.plain_peak, most=8, multiple_of=4
        )
    assert found.size == 8


def _infeasible(model: nn.Module, budget: int = 1024) -> recollect.InfeasibleBudget:
    with pytest.raises(recollect.InfeasibleBudget) as caught:
        recollect.plan(model, X, budget, loss=squares)
    return caught.value


def test_gradients_that_are_there_are_a_part_of_their_own() -> None:
    model = _model()
    clean = _infeasible(model)
    assert "gradients that are there already" not in str(clean)
    squares(model(X)).backward()
    error = _infeasible(model)
    nbytes = sum(each.nbytes for each in model.parameters())
    assert error.least == clean.least + nbytes
    assert f"{nbytes / 1024:.2f} KiB gradients that are there already" in str(error)
    assert "model.zero_grad(set_to_none=True) and plan again" in str(error)
    plan = recollect.plan(model, X, error.least, loss=squares)
    assert dict(plan.report.parts)["gradients that are there already"] == nbytes
    assert sum(dict(plan.report.parts).values()) == plan.predicted_peak


def test_checkpointing_of_parts_is_named_where_no_plan_fits() -> None:
    class Part(Custom):
        def forward(self, x: Tensor) -> Tensor:
            # No assertion in here: pytest's own objects would be found behind it.
            out: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
            return out

    assert "inside of saved-tensor hooks such as those of torch.utils" in str(_infeasible(Part(3)))
    assert "saved-tensor hooks" not in str(_infeasible(_model()))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda out: out.sum().item(), r"leave out \.item\(\)"),
        (lambda out: None, "Return the loss"),
        (lambda out: out.detach().sum(), "Does forward or the loss function run .* detach"),
    ],
)
def test_how_a_loss_function_is_mended(returned: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        recollect.plan(_model(), X, 0.5, loss=returned)


def test_a_shape_in_the_place_of_the_batch() -> None:
    with pytest.raises(TypeError, match="batch: there is no tensor in this tuple"):
        recollect.plan(_model(), (32, 48), 0.5)


def test_a_part_in_a_list_that_is_checkpointed_is_named_as_python_does() -> None:
    model = nn.Sequential(_model(), nn.Tanh())
    recollect.checkpointed(model[0])
    with pytest.raises(ValueError, match=r'recollect\.unwrap\(model\.get_submodule\("0"\)\)'):
        recollect.plan(model, X, 0.5, loss=never)


def test_a_list_of_modules_has_no_forward() -> None:
    for call in (recollect.plan, recollect.fit):
        with pytest.raises(TypeError, match="model: a ModuleList has no forward"):
            call(nn.ModuleList([_model()]), X, 0.5)


def test_removing_a_plan_in_another_way() -> None:
    model = _model()
    plan = recollect.plan(model, X, 1.0, loss=squares)
    with pytest.raises(ValueError, match=r"recollect\.unwrap\(model\)"):
        plan.remove(model)
    with pytest.raises(TypeError, match=r"should be the model, but got .*plan\.remove\(model\)"):
        recollect.unwrap(plan)


def test_gradients_that_are_there_count_on_the_meta_device_too() -> None:
    model, batch = _model().to("meta"), X.to("meta")
    clean = recollect.plan(model, batch, 1.0, loss=squares)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plan = recollect.plan(model, batch, 1.0, loss=squares)
    nbytes = sum(each.nbytes for each in model.parameters())
    assert plan.plain_peak == clean.plain_peak + nbytes
    assert dict(plan.report.parts)["gradients that are there already"] == nbytes
