"""Choosing schedules: the margin for shapes that depend on data is learned from the steps seen."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import recollect
from recollect.modules import OPTIONS
from recollect.planning.loop.choice import Choice
from tests.planning._models import squares
from tests.planning.test_lazy import Loop, Net, batch

pytestmark = pytest.mark.usefixtures("no_bound")


class Masked(Net):
    """Computes where a mask is set."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[mask])


#: How many tokens go through in each step.
COUNTS = [200, 198, 201, 199, 202, 200, 197, 203, 200, 204, 201, 199, 203, 198]
MASKS = [torch.arange(256) < count for count in COUNTS]


def step(model: torch.nn.Module, number: int) -> Tensor:
    return squares(model(batch(256), MASKS[number]))


def masked() -> Masked:
    torch.manual_seed(0)
    return Masked()


def test_steps_whose_shapes_depend_on_data_keep_the_budget() -> None:
    loop = Loop(masked(), 0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.run(step, len(COUNTS), measured=1)
    assert loop.plan is not None
    assert max(loop.peaks) <= loop.plan.budget
    (choice,) = vars(loop.model)[OPTIONS]._kinds._choices.values()
    assert 1.02 < choice._margin < 1.05  # of what was seen, and half the spread more


def test_the_margin_is_what_was_seen() -> None:
    frontier = recollect.frontier(masked(), (batch(256), MASKS[0]), loss=squares)
    plan = frontier.plan_for(0.7)
    assert plan.graph is not None
    assert plan.graph.varies
    choice = Choice(plan, plan.graph)
    at_first = choice.expected(choice.best())
    assert at_first is not None
    assert at_first <= 0.97 * plan.budget
    assert [choice.saw(1.0) for _ in range(8)] == [False] * 7 + [True]
    assert choice.fits(choice.alike(plan.schedule))
    assert choice.saw(1.2)  # a step that makes more
    later = choice.expected(choice.best())
    assert later is not None
    assert plan.base + (later - plan.base) * 1.3 <= plan.budget
    assert not choice.saw(1.1)
