"""Models that are fitted first, and compiled then: the plan is in effect, or a warning says no."""

import pytest
import torch
from torch import nn

import recollect
from tests.compiled._steps import Compiled, in_blocks


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


def test_a_fit_without_a_batch_says_that_compiled_models_need_one():
    blocks = Compiled("decoder", in_blocks)
    for model in (wrapped(blocks.bare), blocks.model, in_place(blocks.bare)):
        with pytest.raises(ValueError, match=r"Pass the batch too.*recollect\.fit\(model, batch"):
            recollect.fit(model, budget=0.7)


def test_blocks_that_are_compiled_after_a_fit_without_a_batch_are_told():
    step = Compiled("decoder", lambda model: model)
    recollect.fit(step.model, budget=0.7)
    in_blocks(step.model)
    with pytest.warns(recollect.PlanWarning, match=r"parts of the model are compiled \(layers.0\)"):
        step.step()
