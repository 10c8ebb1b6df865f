"""Graphs that were not planned: solved where they are split, or told."""

import warnings

import pytest
import torch
from torch import nn

import recollect
from tests._support import assert_identical
from tests.compiled._steps import Compiled, in_blocks
from tests.planning._models import tokens


def static(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", dynamic=False)


def peak_with(compiled: Compiled, batch: torch.Tensor) -> int:
    compiled.batch = batch
    return compiled.peak()


def test_another_shape_is_solved_for_the_same_budget():
    compiled = Compiled("decoder", static)
    larger = tokens(batch=6)
    before = peak_with(compiled, larger)
    expected = compiled.outcome()
    compiled.batch = tokens(batch=4)
    plan = recollect.plan(compiled.model, compiled.batch, 0.8, loss=compiled.loss)
    assert plan.budget < before
    with plan.applied(compiled.model), warnings.catch_warnings():
        warnings.simplefilter("error", recollect.PlanWarning)
        assert peak_with(compiled, larger) <= plan.budget
        assert_identical(compiled.outcome(), expected)


def test_another_shape_that_does_not_fit_is_told():
    compiled = Compiled("decoder", static)
    plan = recollect.plan(compiled.model, compiled.batch, 0.6, loss=compiled.loss)
    compiled.batch = tokens(batch=16)
    expected = compiled.outcome()
    with plan.applied(compiled.model):
        with pytest.warns(recollect.PlanWarning, match="a graph that was not planned"):
            compiled.step()
        assert_identical(compiled.outcome(), expected)


def test_one_of_several_graphs_is_told():
    compiled = Compiled("decoder", in_blocks)
    plan = recollect.plan(compiled.model, compiled.batch, 0.7, loss=compiled.loss)
    compiled.batch = tokens(batch=3)
    with (
        plan.applied(compiled.model),
        pytest.warns(recollect.PlanWarning, match="depends on the other graphs"),
    ):
        compiled.step()


def test_code_for_dynamic_shapes_tells_of_larger_ones():
    compiled = Compiled("decoder", lambda m: torch.compile(m, backend="aot_eager", dynamic=True))
    plan = recollect.plan(compiled.model, compiled.batch, 0.7, loss=compiled.loss)
    with plan.applied(compiled.model):
        assert compiled.peak() <= plan.budget
        compiled.batch = tokens(batch=8)
        with pytest.warns(recollect.PlanWarning, match="larger ones than it was split"):
            compiled.step()


def test_a_plan_from_a_file_knows_the_sizes_that_it_was_made_for(tmp_path):
    def dynamic(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="aot_eager", dynamic=True)

    compiled = Compiled("decoder", dynamic)
    plan = recollect.plan(compiled.model, compiled.batch, 0.8, loss=compiled.loss)
    plan.save(tmp_path / "plan.json")
    compiled = Compiled("decoder", dynamic)
    recollect.Plan.load(tmp_path / "plan.json").apply(compiled.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", recollect.PlanWarning)
        assert peak_with(compiled, tokens(batch=2)) <= plan.budget
        assert peak_with(compiled, tokens(batch=4)) <= plan.budget


def test_eval_mode_is_another_graph():
    compiled = Compiled("decoder_dropout", static)
    plan = recollect.plan(compiled.model, compiled.batch, 0.7, loss=compiled.loss)
    compiled.model.eval()
    expected = compiled.outcome()
    with plan.applied(compiled.model):
        assert compiled.peak() <= plan.budget
        assert_identical(compiled.outcome(), expected)
        with torch.no_grad():
            compiled.forward()
