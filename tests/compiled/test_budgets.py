"""Compiled steps within budgets: peaks as measured, results bit for bit those without a plan."""

from functools import partial

import pytest
import torch

import recollect
from tests._support import assert_identical
from tests.compiled._steps import Compiled, as_it_is

#: Between the least peak and that without a plan.
FRACTIONS = (0.05, 0.25, 0.5, 0.75, 0.95)
CASES = ("decoder_dropout", "encoder_decoder", "conv", "moe")


@pytest.mark.parametrize(
    ("case", "fractions"),
    [
        ("decoder_dropout", FRACTIONS[1:4:2]),
        ("conv", FRACTIONS[2:3]),
        *(pytest.param(case, FRACTIONS, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_budgets_are_kept_and_nothing_else_changes(case: str, fractions: tuple[float, ...]):
    compiled = Compiled(case, as_it_is)
    expected = compiled.outcome()
    frontier = recollect.frontier(compiled.model, compiled.batch, loss=compiled.loss)
    least, most = frontier.least, frontier.plain_peak
    assert least < most
    for fraction in fractions:
        budget = int(least + fraction * (most - least))
        plan = frontier.plan_for(budget)
        assert plan.predicted_peak <= plan.budget == budget
        with plan.applied(compiled.model):
            assert_identical(compiled.outcome(), expected)
            assert compiled.peak() <= budget
    assert_identical(compiled.outcome(), expected)


def test_checkpointed_regions_in_compiled_code_leave_the_choice_to_the_plan():
    def with_regions(model: torch.nn.Module) -> torch.nn.Module:
        for layer in model.layers:
            layer.forward = partial(recollect.checkpoint, layer.forward)
        return as_it_is(model)

    compiled = Compiled("decoder_dropout", with_regions)
    expected = compiled.outcome()
    frontier = recollect.frontier(compiled.model, compiled.batch, loss=compiled.loss)
    plan = frontier.plan_for((frontier.least + frontier.plain_peak) // 2)
    with plan.applied(compiled.model):
        assert_identical(compiled.outcome(), expected)
        assert compiled.peak() <= plan.budget < plan.plain_peak


def test_the_simulation_is_exact_where_ops_run_as_they_are():
    compiled = Compiled("decoder", as_it_is)
    frontier = recollect.frontier(compiled.model, compiled.batch, loss=compiled.loss)
    plan = frontier.plan_for(0.75)
    assert plan.excess == pytest.approx(0, abs=0.03)
    assert plan.measured_peak == compiled_peak(plan, compiled)


def compiled_peak(plan: recollect.Plan, compiled: Compiled) -> int:
    with plan.applied(compiled.model):
        return compiled.peak()


def test_an_infeasible_budget_says_what_works():
    compiled = Compiled("decoder", as_it_is)
    frontier = recollect.frontier(compiled.model, compiled.batch, loss=compiled.loss)
    with pytest.raises(recollect.InfeasibleBudget, match="the least that works is") as caught:
        frontier.plan_for(frontier.least - 1)
    assert caught.value.least == frontier.least
    assert frontier.plan_for(frontier.least).measured_peak <= frontier.least


def test_a_budget_for_the_step_as_it_is_leaves_the_split_to_torch():
    compiled = Compiled("decoder", as_it_is)
    plan = recollect.plan(compiled.model, compiled.batch, 1.0, loss=compiled.loss)
    assert plan.compiled is not None
    assert [graph.kept for graph in plan.compiled.graphs] == [None]
    assert compiled_peak(plan, compiled) == plan.plain_peak


def test_the_optimizer_counts():
    compiled = Compiled("decoder", as_it_is)
    optimizer = torch.optim.AdamW(compiled.bare.parameters())
    with_it = recollect.frontier(
        compiled.model, compiled.batch, loss=compiled.loss, optimizer=optimizer
    )
    state = 2 * sum(parameter.nbytes for parameter in compiled.bare.parameters())
    assert with_it.graph.base >= state
    assert not optimizer.state  # everything is put back
