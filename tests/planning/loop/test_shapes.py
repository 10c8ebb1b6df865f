"""Batches of many shapes: a few steps are traced, and the others predicted from them."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.graph.graph import Event, Graph, Storage
from recollect.modules import OPTIONS
from recollect.planning.loop import runner
from recollect.planning.loop.shapes import Shapes
from tests._support import assert_identical, gradients, measure
from tests.planning._models import Decoder, squares, static_bytes, tokens
from tests.planning.test_lazy import Loop, Net, batch, net

pytestmark = pytest.mark.usefixtures("no_bound")

#: The state of the model.
STATE = (None, 0)


def step_at(*size: int) -> Graph:
    """A step that makes one number for each element, as much again but for one, and a weight."""
    count = 4 * torch.Size(size).numel()
    fixed = [Storage(nbytes, 0, 0) for nbytes in (count, count - 4 * size[0], 1000)]
    return Graph([], [], [], [], [Event(1.0, 0, 2 * count + 1000 - 4 * size[0])], 0, fixed=fixed)


def signature(*size: int) -> tuple[Any, ...]:
    return ("x", (size, "torch.float32"), (size, "torch.int64"))


def traced(*sizes: tuple[int, ...]) -> Shapes:
    shapes = Shapes()
    for size in sizes:
        shapes.add(signature(*size), STATE, step_at(*size), {"": 4 * torch.Size(size).numel()})
    return shapes


def test_a_step_is_predicted_from_three_to_the_byte() -> None:
    shapes = traced((4, 32), (8, 48), (4, 56))
    for size in ((8, 100), (16, 8), (5, 33)):
        found = shapes.predict(signature(*size), STATE)
        assert found is not None
        assert found.graph == step_at(*size)
        assert not found.is_covered or size == (5, 33)


def test_dimensions_that_stay_as_they_are_do_not_matter() -> None:
    found = traced((4, 32, 7), (4, 48, 7), (4, 52, 7)).predict(signature(4, 40, 7), STATE)
    assert found is not None
    assert found.graph == step_at(4, 40, 7)
    assert found.is_covered


@pytest.mark.parametrize(
    ("sizes", "other"),
    [
        ([(4, 32)], (4, 64)),  # one alone
        ([(4, 32), (8, 48)], (8, 96)),  # no formula with two terms is confirmed
        ([(4, 32), (4, 48), (4, 52)], (8, 48)),  # the first was never another
        ([(4, 32), (8, 64), (2, 16)], (8, 32)),  # both grew by the same
    ],
)
def test_what_cannot_be_told_is_not_predicted(
    sizes: list[tuple[int, ...]], other: tuple[int, ...]
) -> None:
    assert traced(*sizes).predict(signature(*other), STATE) is None


def test_steps_of_other_kinds_tell_nothing() -> None:
    shapes = traced((4, 32), (8, 48), (4, 56))
    other = signature(8, 100)
    assert shapes.predict(other, (None, 9)) is None
    assert shapes.predict((*other, "y"), STATE) is None
    shapes.add(signature(8, 96), STATE, replace(step_at(8, 96), varies=True), {})
    assert shapes.predict(other, STATE) is None


@pytest.mark.parametrize("is_same", [True, False])
def test_the_step_of_the_planner_counts_if_the_loop_runs_it_too(is_same: bool) -> None:
    shapes, planned = Shapes(), step_at(4, 50)
    if not is_same:
        planned = replace(planned, events=[*planned.events, Event(1.0, 0, 0)])
    shapes.add(signature(4, 50), STATE, planned, {}, is_planned=True)
    for size in ((4, 32), (4, 40)):
        shapes.add(signature(*size), STATE, step_at(*size), {})
    assert (shapes.predict(signature(4, 48), STATE) is not None) is is_same


def test_what_was_wrong_is_forgotten() -> None:
    shapes = traced((4, 32), (8, 48), (4, 56))
    shapes.ran(signature(8, 100), STATE, is_right=True)
    found = shapes.predict(signature(8, 90), STATE)
    assert found is not None
    assert found.is_covered
    shapes.ran(signature(8, 200), STATE, is_right=False)
    assert shapes.predict(signature(8, 90), STATE) is None


# --- in training ----------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps that are traced."""
    found: list[Any] = []

    class Traced(runner.LiveStep):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            found.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(runner, "LiveStep", Traced)
    return found


def variant_of(model: nn.Module, *args: Tensor) -> Any:
    kinds = vars(model)[OPTIONS]._kinds
    return kinds.find((kinds.kind_of(model, runner.signature_of_batch(args, {})),))


def test_lengths_that_grow_and_shrink(traces: list[Any]) -> None:
    lengths = [64, 80, 96, 112, 128, 40, 144, 56, 104, 90]
    loop = Loop(net(), plain_peak(net(), batch(112)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.run(lambda model, n: squares(model(batch(lengths[n]))), len(lengths))
    assert len(traces) == 2
    assert loop.plan is not None
    assert max(loop.peaks) <= loop.plan.budget
    assert variant_of(loop.model, batch(90)).schedule is None  # it fits without a plan
    assert variant_of(loop.model, batch(144)).schedule is not None


def plain_peak(model: nn.Module, *args: Tensor) -> int:
    """With the state of AdamW, and gradients that the step makes."""
    found = measure(lambda: squares(model(*args)), Tensor.backward, warm_up=False)
    model.zero_grad()
    state = 2 * sum(each.nbytes for each in model.parameters())
    return found.peak + static_bytes(model) + state


def test_samples_and_lengths(traces: list[Any]) -> None:
    draw = random.Random(0)
    sizes = [(draw.choice((2, 4)), draw.randrange(8, 40)) for _ in range(12)]
    batches = [tokens(*size) for size in sizes]
    torch.manual_seed(0)
    model = Decoder(2)
    loop = Loop(model, int(0.7 * plain_peak(model, tokens(4, 40))), torch.optim.SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.run(lambda model, n: squares(model(batches[n])), len(sizes))
    assert len(traces) <= 3
    assert loop.plan is not None
    assert max(loop.peaks) <= loop.plan.budget


def test_the_first_forward_of_a_predicted_shape_is_within_the_budget() -> None:
    """It is recorded, and must not hold for so long what only the planned step needs."""
    lengths = [128, 144, 160, 64, 80, 96, 192, 224, 256, 288]
    model = net()
    loop = Loop(model, plain_peak(net(), batch(150)))

    def step(model: nn.Module, number: int) -> Tensor:
        model.blocks[:3].requires_grad_(number < 3)
        return squares(model(batch(lengths[number])))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.run(step, len(lengths))
    assert loop.plan is not None
    assert max(loop.peaks) <= loop.plan.budget


def test_generator_states_count_until_a_predicted_forward_is_recorded() -> None:
    lengths = [64, 80, 96, 112, 112, 112]
    loop = Loop(net(dropout=0.1), plain_peak(net(), batch(104)))
    loop.run(lambda model, n: squares(model(batch(lengths[n]))), len(lengths))
    predicted = [*vars(loop.model)[OPTIONS]._kinds._choices.values()][-1]
    assert predicted._unrecorded is None
    assert predicted._states == 0


class Longer(Net):
    """Does more from some length on."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 130:
            x = x + torch.tanh(x.repeat(1, 40)).view(len(x), 40, 32).sum(1)
        return super().forward(x)


def test_a_forward_that_is_not_as_predicted_is_told_and_traced(traces: list[Any]) -> None:
    lengths = [64, 80, 96, 120, 144, 144, 144]
    torch.manual_seed(0)
    model = Longer()
    loop = Loop(model, plain_peak(model, batch(120)))
    with pytest.warns(recollect.PlanWarning, match="the batch is larger"):
        loop.run(lambda model, n: squares(model(batch(lengths[n]))), len(lengths))
    assert len(traces) == 3  # the second of its length too
    assert loop.plan is not None
    assert max(loop.peaks[:4]) <= loop.plan.budget


def test_smaller_batches_of_a_plan_for_the_largest(traces: list[Any]) -> None:
    """A plan for a range: no step within it takes more, and none is warned of."""
    draw = random.Random(1)
    torch.manual_seed(0)
    model, plain = Decoder(2), Decoder(2)
    plain.load_state_dict(model.state_dict())
    recollect.fit(model, tokens(4, 32), 0.6, loss=squares)
    budget = vars(model)[OPTIONS].plan.budget
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(12):
            batch = tokens(draw.randrange(1, 5), draw.randrange(2, 33))
            for each in (plain, model):
                each.zero_grad()
                if number < 6:  # a profiler is in the way of traces
                    squares(each(batch)).backward()
                    continue
                found = measure(lambda: squares(each(batch)), Tensor.backward, warm_up=False)  # noqa: B023
            if number >= 6:
                assert found.peak + static_bytes(model) <= budget
            assert_identical(gradients(model), gradients(plain))
    model.zero_grad()
    assert 1 <= len(traces) <= 3
    assert variant_of(model, tokens(1, 20)).schedule is None
