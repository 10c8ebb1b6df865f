"""Models that are fitted first, and compiled then: the plan is in effect, or a warning says no."""

import pytest
import torch
from torch import nn

import recollect
from tests.compiled._steps import Compiled


def wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("how", [wrapped, in_place])
def test_a_model_that_is_compiled_after_it_was_fitted_runs_by_its_plan(how):
    step = Compiled("decoder", lambda model: model)
    plan = recollect.plan(step.model, step.batch, 0.75, loss=step.loss)
    plan.apply(step.model)
    step.model = how(step.model)
    with pytest.warns(recollect.PlanWarning, match="torch.compile leaves its forward as it is"):
        step.step()
    assert step.peak() <= plan.budget < plan.plain_peak


def test_blocks_that_are_compiled_after_the_model_was_fitted_are_told():
    step = Compiled("decoder", lambda model: model)
    recollect.fit(step.model, step.batch, 0.75, loss=step.loss)
    for block in step.model.layers:
        block.compile(backend="aot_eager")
    with pytest.warns(recollect.PlanWarning) as caught:
        step.step()
    told = "its layers.0 and 2 more were compiled after the plan was made"
    assert any(told in str(each.message) for each in caught)
