"""Schedules for calls that share their code."""

import pytest
import torch
from torch import Tensor

from recollect.compiled.merge import Merged, merge
from recollect.compiled.part import NodeCosts, make_part
from recollect.compiled.tied import TiedSolver
from recollect.planning.solving.solve import Solver
from tests.compiled._steps import calls_of

CALLS = 4


def block(x: Tensor, w: Tensor) -> Tensor:
    return x + torch.sin(torch.cos(x @ w) @ w)


def blocks(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(CALLS):
        x = block(x, w)
        torch._dynamo.graph_break()
    return x


@pytest.fixture(scope="module")
def merged() -> Merged:
    torch.compiler.reset()
    one = torch.randn(64, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    (call,) = calls_of(block, *one)
    graph = call.graph
    assert graph is not None
    part = make_part(graph.key, graph.joint, NodeCosts(torch.device("cpu")), fused=False)
    return merge([part] * CALLS, [call] * CALLS, None, [graph.saved] * CALLS, 0)


def decisions(merged: Merged, schedule) -> list[frozenset[int]]:
    return [merged.decided(call, schedule) for call in range(CALLS)]


def test_calls_from_one_module_decide_the_same(merged: Merged):
    solver = TiedSolver(Solver(merged.graph), merged, [0] * CALLS)
    frontier = solver.frontier()
    assert len(frontier) > 1
    for solution in frontier:
        assert len(set(decisions(merged, solution.schedule))) == 1


def test_equal_modules_may_have_a_few_variants(merged: Merged):
    tied = TiedSolver(Solver(merged.graph), merged, [0] * CALLS)
    loose = TiedSolver(Solver(merged.graph), merged, [*range(CALLS)])
    found = loose.frontier()
    assert all(len(set(decisions(merged, each.schedule))) <= 3 for each in found)
    assert max(len(set(decisions(merged, each.schedule))) for each in found) > 1
    assert len(found) > len(tied.frontier())


def test_a_budget_gets_the_fastest_that_fits(merged: Merged):
    solver = TiedSolver(Solver(merged.graph), merged, [*range(CALLS)])
    least, most = solver.least_solution(), solver.frontier()[-1]
    assert solver.solve(least.outcome.peak - 1) is None
    for budget in (least.outcome.peak, (least.outcome.peak + most.outcome.peak) // 2):
        solution = solver.solve(budget)
        assert solution is not None
        assert solution.outcome.peak <= budget
    assert least.outcome.seconds >= most.outcome.seconds
