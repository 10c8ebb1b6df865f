"""Several compiled graphs in one step: blocks compiled one by one, and graph breaks."""

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.compiled.planner import CompiledTrials
from recollect.graph.graph import Schedule
from tests._support import assert_identical
from tests.compiled._steps import Compiled, as_it_is, in_blocks
from tests.planning._models import Decoder


def broken(model: nn.Module) -> nn.Module:
    """Compiled, with a graph break after each block."""
    assert isinstance(model, Decoder)
    for layer in model.layers:
        layer.register_forward_hook(_break)
    return as_it_is(model)


def _break(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
    torch._dynamo.graph_break()


@pytest.mark.parametrize("how", [in_blocks, broken])
def test_a_step_of_several_graphs_is_planned_as_one(how):
    compiled = Compiled("decoder", how)
    expected = compiled.outcome()
    frontier = recollect.frontier(compiled.model, compiled.batch, loss=compiled.loss)
    trials = frontier._planner.trials
    assert isinstance(trials, CompiledTrials)
    assert len(trials.observed.calls) >= 3
    assert frontier.least < 0.75 * frontier.plain_peak
    for fraction in (0.3, 0.7):
        budget = int(frontier.least + fraction * (frontier.plain_peak - frontier.least))
        plan = frontier.plan_for(budget)
        with plan.applied(compiled.model):
            assert_identical(compiled.outcome(), expected)
            assert compiled.peak() <= budget


def test_equal_blocks_share_few_variants_of_their_code():
    compiled = Compiled("decoder", in_blocks)
    plan = recollect.plan(compiled.model, compiled.batch, 0.6, loss=compiled.loss)
    assert plan.compiled is not None
    assert [path for path, _ in plan.compiled.sites] == ["layers.0", "layers.1", "layers.2"]
    assert len({graph.key for graph in plan.compiled.graphs}) == 1
    assert len({variant for _, variant in plan.compiled.sites}) <= 3


def test_equal_blocks_that_decide_the_same_share_their_code():
    compiled = Compiled("decoder", in_blocks)
    trials = recollect.frontier(compiled.model, compiled.batch, loss=compiled.loss)._planner.trials
    assert isinstance(trials, CompiledTrials)
    for kept in (frozenset[int](), frozenset(trials.graph.choices)):
        # All but the last are read by another graph, which holds that anyway.
        assert {variant for _, variant in trials.decisions(Schedule(kept)).sites} == {0}


def test_a_model_with_a_small_compiled_part_is_planned_around_it():
    def small(model: nn.Module) -> nn.Module:
        model.norm.compile(backend="aot_eager")
        return model

    compiled = Compiled("decoder", small)
    plan = recollect.plan(compiled.model, compiled.batch, 0.8, loss=compiled.loss)
    assert plan.compiled is None
