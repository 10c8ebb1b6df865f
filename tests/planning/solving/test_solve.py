"""The fast solver: within the budget, never slower for more memory, and near the best there is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest

from recollect.graph.graph import Graph, Link, Schedule
from recollect.graph.simulate import simulate, simulate_plain
from recollect.planning.solving.bound import lower_bound
from recollect.planning.solving.chain import Chain
from recollect.planning.solving.linearization import Linearization
from recollect.planning.solving.modules import kept_between_blocks
from recollect.planning.solving.solve import Solver
from tests._support import sampled
from tests.planning import _graphs as graphs
from tests.planning._graphs import graph_of, solver_of


def budgets_of(name: str, count: int = 23) -> list[int]:
    low = solver_of(name).least_solution().outcome.peak
    high = simulate_plain(graph_of(name)).peak
    return [low + (high - low) * n // (count - 1) for n in range(count)]


#: But for those that take longest in each run.
every_graph = pytest.mark.parametrize(
    "name", sampled(graphs.GRAPHS, usual=["decoder", "unet", "recurrent", "random"])
)


@every_graph
def test_stays_within_the_budget(name):
    for budget in budgets_of(name):
        solution = solver_of(name).solve(budget)
        assert solution.outcome.peak <= budget
        assert simulate(graph_of(name), solution.schedule) == solution.outcome


@every_graph
def test_more_memory_never_takes_longer(name):
    seconds = [solver_of(name).solve(budget).outcome.seconds for budget in budgets_of(name)]
    assert seconds == sorted(seconds, reverse=True)


@every_graph
def test_least_is_the_lowest(name):
    solver = solver_of(name)
    lowest = solver.least_solution().outcome.peak
    assert solver.solve(lowest - 1) is None
    assert solver.solve(lowest).outcome.peak == lowest
    assert all(solution.outcome.peak >= lowest for solution in solver.frontier())
    assert lowest < 0.75 * simulate_plain(graph_of(name)).peak


@pytest.mark.parametrize("name", ["decoder", "encoder_decoder"])
def test_no_plan_is_worse_than_checkpointing_every_block(name):
    # A Llama of 16 layers that attends under a mask had plans for 4% more than that at least.
    graph, solver = graph_of(name), solver_of(name)
    by_hand = Schedule(kept_between_blocks(graph) & set(graph.choices))
    outcome = simulate(graph, by_hand)
    assert solver._solutions()._known[by_hand] == outcome  # tried, and so the pool has no worse one
    assert solver.solve(outcome.peak).outcome.seconds <= outcome.seconds


@every_graph
def test_enough_memory_costs_nothing(name):
    graph = graph_of(name)
    outcome = solver_of(name).solve(simulate_plain(graph).peak).outcome
    assert outcome.seconds == pytest.approx(graph.plain_seconds, rel=1e-12)
    assert outcome.rerun == 0


@every_graph
def test_the_frontier_goes_down(name):
    for left, right in pairwise(solver_of(name).frontier()):
        assert left.outcome.peak < right.outcome.peak
        assert left.outcome.seconds > right.outcome.seconds


@every_graph
def test_keeps_nothing_that_it_may_not(name):
    graph = graph_of(name)
    everything = frozenset(range(len(graph.ops)))
    for solution in solver_of(name).frontier():
        kept = solution.schedule.kept
        assert kept == everything or kept <= set(graph.choices)


@pytest.mark.parametrize("seed", range(12))
def test_with_few_choices_it_is_the_best(seed):
    graph = graphs.random_dag(seed, 8)
    solver = Solver(graph)
    outcomes = [
        simulate(graph, Schedule(frozenset(kept)))
        for count in range(len(graph.choices) + 1)
        for kept in combinations(graph.choices, count)
    ]
    for budget in {outcome.peak for outcome in outcomes}:
        best = min(each.seconds for each in outcomes if each.peak <= budget)
        assert solver.solve(budget).outcome.seconds <= best


@pytest.mark.parametrize("name", ["random", "unet"])
def test_two_solvers_agree(name):
    again = Solver(graphs.GRAPHS[name]())
    assert again.frontier() == solver_of(name).frontier()


def best_within(graph: Graph) -> list[tuple[int, float]]:
    """The true frontier, by trying everything."""
    outcomes = [simulate_plain(graph)]
    for count in range(len(graph.choices) + 1):
        outcomes += [
            simulate(graph, Schedule(frozenset(kept)))
            for kept in combinations(graph.choices, count)
        ]
    found: list[tuple[int, float]] = []
    for peak, seconds in sorted((outcome.peak, outcome.seconds) for outcome in outcomes):
        if not found or seconds < found[-1][1]:
            found.append((peak, seconds))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_near_the_best_of_all(seed):
    graph = graphs.random_dag(seed, 11)
    solver = Solver(graph)
    truth = best_within(graph)
    assert solver.least_solution().outcome.peak <= 1.01 * truth[0][0]
    for peak, seconds in truth:
        solution = solver.solve(peak)
        if solution is not None:
            assert solution.outcome.seconds <= 1.02 * seconds


def test_layers_that_are_alike_are_solved_once():
    def options(layers):
        return len(Chain(Linearization(graphs.decoder(layers)))._segments._options)

    assert options(6) == options(9)


def test_nothing_to_choose():
    make = graphs.Maker()
    make.op("input", [], 1024)
    graph = make.graph()
    solver = Solver(graph)
    assert solver.least_solution().outcome == simulate_plain(graph)
    assert len(solver.frontier()) == 1


def test_tells_how_far_it_is():
    told: list[float] = []
    Solver(graph_of("random"), progress=told.append).least_solution()
    assert told == sorted(told)
    assert told[-1] == 1.0


@cache
def offloading_solver() -> Solver:
    return Solver(graphs.decoder(2, link=TestOffload.link), offload=True)


class TestOffload:
    link = Link(5e10, 5e10)

    def test_lowers_the_peak(self):
        graph = graphs.decoder(2, link=self.link)
        here, there = Solver(graph), offloading_solver()
        assert there.least_solution().outcome.peak < here.least_solution().outcome.peak
        for solution in here.frontier()[::10]:
            better = there.solve(solution.outcome.peak)
            assert better.outcome.seconds <= solution.outcome.seconds

    def test_stays_within_the_budget(self):
        graph = graphs.decoder(2, link=self.link)
        for solution in offloading_solver().frontier():
            assert simulate(graph, solution.schedule) == solution.outcome
            assert all(graph.ops[op].can_offload for op in solution.schedule.offloaded)

    def test_keeps_nothing_that_it_may_not(self):
        graph = graphs.decoder(2, link=self.link)
        ops = [
            op if number % 5 else replace(op, can_keep=False, can_offload=False)
            for number, op in enumerate(graph.ops)
        ]
        graph = replace(graph, ops=ops)
        sending = [s for s in Solver(graph, offload=True).frontier() if s.schedule.offloaded]
        assert sending
        assert all(each.schedule.kept <= set(graph.choices) for each in sending)

    def test_only_where_there_is_a_way(self):
        solver = Solver(graph_of("random"), offload=True)
        assert not any(solution.schedule.offloaded for solution in solver.frontier())

    def test_a_budget_is_used(self) -> None:
        graph = graphs.decoder(8, link=self.link)
        graph = replace(graph, ops=[replace(op, can_offload=op.can_keep) for op in graph.ops])
        solver, plain = Solver(graph, offload=True), simulate_plain(graph)
        low = solver.least_solution().outcome.peak
        for part in (0.2, 0.4, 0.6):
            budget = round(low + part * (plain.peak - low))
            found = solver.solve(budget)
            assert found is not None
            peak, seconds = found.outcome.peak, found.outcome.seconds
            assert peak <= budget
            assert peak > 0.95 * budget or seconds < 1.001 * plain.seconds
            assert seconds < 1.03 * lower_bound(graph, budget, offload=True)

    def test_with_slack_a_slower_link_costs_no_time(self) -> None:
        graph = graphs.decoder(8, link=self.link)
        graph = replace(graph, ops=[replace(op, can_offload=op.can_keep) for op in graph.ops])
        solver, plain = Solver(graph, offload=True), simulate_plain(graph)
        low = solver.least_solution().outcome.peak
        budget = low + (plain.peak - low) // 5
        best, found, here = (
            solve(budget) for solve in (solver.solve, solver.solve_with_slack, solver.solve_here)
        )
        assert best.schedule.offloaded
        assert found.outcome.peak <= budget
        assert found.outcome == simulate(graph, found.schedule)
        # It relies on a part of the link, and is as good there as elsewhere.
        share = found.schedule.link_share
        assert share < 1
        slow = replace(graph, link=self.link.slowed(share))
        there = simulate(slow, replace(found.schedule, link_share=1.0))
        assert there == found.outcome
        assert found.outcome.waits < 0.02 * plain.seconds
        # There the other one waits.
        late = simulate(slow, best.schedule)
        assert found.outcome.seconds < min(late.seconds, here.outcome.seconds)

    def test_there_is_none_with_slack_where_offload_does_not_help(self) -> None:
        solver = offloading_solver()
        assert solver.solve_with_slack(1 << 60) is None
        assert solver.solve_with_slack(1) is None
        assert Solver(graph_of("random"), offload=True).solve_with_slack(1 << 60) is None
