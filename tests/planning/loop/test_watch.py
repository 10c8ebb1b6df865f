"""Whether the training loop holds the output of the model through backward: a plan assumes it."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect.graph.simulate import simulate_plain
from recollect.planning.loop.watch import watch_output
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request
from recollect.planning.recording.record import predict_step, profile_step
from recollect.planning.recording.step import TrainingStep
from recollect.report.units import bytes_text
from tests._support import assert_identical, gradients, measure
from tests.planning._models import static_bytes

pytestmark = pytest.mark.usefixtures("no_bound")

#: As much as everything else, and none of it is asked for in backward.
VOCABULARY = 1024


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What is logged in the test."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append
    logger = logging.getLogger("recollect")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)


@dataclass
class Output:
    logits: Tensor
    other: int = 3


class Model(nn.Module):
    """Returns logits that take as much memory as all that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(10))
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Output:
        for layer in self.layers:
            x = x + torch.tanh(layer(x) * torch.sigmoid(x)) * torch.cos(x)
        return Output(self.head(x))


X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
LOGITS = 256 * VOCABULARY * 4


def loss_of(out: Output) -> Tensor:
    """Saves nothing of the logits for backward."""
    return out.logits.sum()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def holding(model: nn.Module, x: Tensor = X) -> None:
    out = model(x)
    loss_of(out).backward()


def freeing(model: nn.Module, x: Tensor = X) -> None:
    # As the Trainer of transformers does: `compute_loss` returns the loss alone.
    loss_of(model(x)).backward()


LOOPS = {True: holding, False: freeing}


def peak(model: nn.Module, loop: Callable[[nn.Module], None]) -> int:
    def step() -> None:
        loop(model)
        model.zero_grad()

    return measure(step, lambda _: None).peak + static_bytes(model)


@pytest.mark.parametrize("holds", [True, False])
def test_the_plain_peak_is_that_of_the_loop_to_the_byte(model: Model, holds: bool) -> None:
    made_by = Planner.of(Request(model, X, loss_of, holds_output=holds))
    assert made_by.plain_peak == peak(model, LOOPS[holds])
    assert simulate_plain(made_by.graph).peak == made_by.plain_peak


def test_by_how_much_they_differ(model: Model) -> None:
    held, freed = (
        recollect.frontier(model, X, loss=loss_of, holds_output=h) for h in (True, False)
    )
    assert held.plain_peak - freed.plain_peak == LOGITS
    assert held.least > freed.least


@pytest.mark.parametrize("holds", [True, False])
def test_the_budget_is_kept_in_the_loop_that_was_planned_for(model: Model, holds: bool) -> None:
    loop = LOOPS[holds]
    loop(model)
    expected = [g.clone() for g in gradients(model)]
    model.zero_grad()
    frontier = recollect.frontier(model, X, loss=loss_of, holds_output=holds)
    for budget in (frontier.least, (frontier.least + frontier.plain_peak) // 2):
        plan = frontier.plan_for(budget)
        assert plan.holds_output is holds
        assert plan.output_bytes == (LOGITS if holds else 0)
        with plan.applied(model), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert peak(model, loop) <= budget
            loop(model)
        assert_identical(gradients(model), expected)
        model.zero_grad()


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("holds", [True, False])
def test_a_predicted_step_is_the_real_one(model: Model, holds: bool, optimizer: bool) -> None:
    adam = torch.optim.AdamW(model.parameters()) if optimizer else None
    step = TrainingStep(model, (X,), {}, loss_of, adam, holds_output=holds)
    with step.undone():
        predicted = predict_step(step)
    with step.undone():
        real = profile_step(step)
    assert predicted.plain_peak == real.plain_peak


def test_it_is_said_and_saved(model: Model, tmp_path: Path) -> None:
    plan = recollect.plan(model, X, 0.9, loss=loss_of, holds_output=False)
    assert "The plan assumes that the loop frees the model's output before backward." in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = recollect.Plan.load(tmp_path / "plan.json")
    assert loaded.holds_output is False
    assert loaded.output_bytes == plan.output_bytes


def test_what_is_no_answer_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="holds_output should be True or False, but is 'no'"):
        recollect.plan(model, X, 0.9, loss=loss_of, holds_output="no")


# --- loops that do otherwise ----------------------------------------------------------------------


def test_a_loop_that_holds_more_than_planned_is_warned_of_once(model: Model) -> None:
    plan = recollect.plan(model, X, 0.9, loss=loss_of, holds_output=False)
    plan.apply(model)
    with pytest.warns(recollect.PlanWarning, match="holds_output=True") as caught:
        holding(model)
    model.zero_grad()
    holding(model)  # warnings are errors here
    (warning,) = caught
    text = str(warning.message)
    assert f"{LOGITS:,} bytes more of it than planned" in text
    assert f"its budget of {plan.budget:,} bytes" in text
    assert warning.filename == __file__


def test_a_loop_that_holds_less_is_told_what_goes_unused(
    model: Model, logged: list[logging.LogRecord]
) -> None:
    recollect.plan(model, X, 0.9, loss=loss_of).apply(model)
    for _ in range(4):
        freeing(model)
    (record,) = logged
    assert record.levelno == logging.INFO
    assert f"{bytes_text(LOGITS)} of the budget go unused" in record.getMessage()
    assert "holds_output=False" in record.getMessage()


@pytest.mark.parametrize("holds", [True, False])
def test_a_loop_as_planned_is_not_told_anything(
    model: Model, holds: bool, logged: list[logging.LogRecord]
) -> None:
    recollect.plan(model, X, 0.9, loss=loss_of, holds_output=holds).apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            LOOPS[holds](model)
    assert not logged


def test_copies_are_looked_at_by_themselves(model: Model) -> None:
    recollect.plan(model, X, 0.9, loss=loss_of, holds_output=False).apply(model)
    other = copy.deepcopy(model)
    for each in (model, other):
        with pytest.warns(recollect.PlanWarning, match="holds_output=True"):
            holding(each)


def test_a_smaller_batch_is_not_compared(model: Model) -> None:
    recollect.plan(model, X, 0.9, loss=loss_of, holds_output=False).apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holding(model, X[:7])


# --- watching -------------------------------------------------------------------------------------


def _seen(make: Callable[[Any], Any], loop: Callable[[Any], Any]) -> list[tuple[int, int]]:
    weight = torch.ones(4, requires_grad=True)
    found: list[tuple[int, int]] = []

    def forward() -> Any:
        out = make(weight)
        watch_output(out, lambda alive, total: found.append((alive, total)))
        return out

    loop(forward)
    return found


def test_what_the_loss_had_saved_of_the_output_does_not_count() -> None:
    def loop(forward: Callable[[], Tensor]) -> None:
        forward().square().exp().sum().backward()

    assert _seen(lambda w: w * 2, loop) == [(0, 16)]


def test_what_is_held_does() -> None:
    def loop(forward: Callable[[], Any]) -> None:
        out = forward()
        out["y"].square().sum().backward()

    def half(forward: Callable[[], Any]) -> None:
        out = forward()
        y = out["y"]
        del out
        y.square().sum().backward()

    def make(w: Tensor) -> dict[str, Any]:
        return {"y": w * 2, "rest": [torch.ones(8), "text", None]}

    assert _seen(make, loop) == [(48, 48)]
    assert _seen(make, half) == [(16, 48)]


def test_views_of_one_memory_count_once() -> None:
    def make(w: Tensor) -> tuple[Tensor, Tensor]:
        y = w * 2
        return y, y.view(2, 2)

    def loop(forward: Callable[[], Any]) -> None:
        out = forward()
        (out[0].sum() + out[1].sum()).backward()

    assert _seen(make, loop) == [(16, 16)]


def test_a_graph_that_is_retained_holds_what_it_has_saved() -> None:
    def loop(forward: Callable[[], Tensor]) -> None:
        loss = forward().square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert _seen(lambda w: w * 2, loop) == [(16, 16)]  # and it is told once


@pytest.mark.parametrize(
    "make",
    [
        lambda w: None,
        lambda w: "text",
        lambda w: torch.ones(3),
        lambda w: w,
        lambda w: Output,
        lambda w: torch.ones(2, 2).to_sparse(),
    ],
    ids=["none", "text", "constant", "leaf", "class", "sparse"],
)
def test_what_backward_does_not_reach_is_nothing(make: Callable[[Any], Any]) -> None:
    assert _seen(make, lambda forward: forward()) == []


def test_watching_holds_nothing() -> None:
    weight = torch.ones(4, requires_grad=True)
    out = weight * 2
    watch_output(out, lambda *_: None)
    alive = weakref.ref(out)
    del out
    gc.collect()
    assert alive() is None


def test_a_model_with_a_loss_of_its_own_is_seen_as_planned(
    logged: list[logging.LogRecord],
) -> None:
    class WithLoss(Model):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = super().forward(x).logits
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    model, labels = WithLoss(), torch.randint(0, VOCABULARY, (256,))
    batch = {"x": X, "labels": labels}
    held, freed = (recollect.frontier(model, batch, holds_output=h) for h in (True, False))
    assert held.plain_peak - freed.plain_peak == LOGITS

    def loop(planned: nn.Module) -> None:
        planned(**batch)["loss"].backward()

    plan = freed.plan_for((freed.least + freed.plain_peak) // 2)
    with plan.applied(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak(model, loop) <= plan.budget
    assert not logged
