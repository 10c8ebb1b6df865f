"""A pool has the best of all that was tried, whether all of it was simulated or not."""

from __future__ import annotations

import random

import pytest

from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import simulate
from recollect.planning.solving.pool import Pool, Solution, best_of
from tests.planning._graphs import GRAPHS, graph_of


def _schedules(graph: Graph, name: str) -> list[Schedule]:
    draw = random.Random(name)
    parts = [draw.random() for _ in range(150)]
    return [Schedule(frozenset(n for n in graph.choices if draw.random() < p)) for p in parts]


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_what_is_not_simulated_would_not_be_on_the_frontier(name: str) -> None:
    graph = graph_of(name)
    pool = Pool(graph)
    schedules = _schedules(graph, name)
    tried = [pool.try_out(schedule) for schedule in schedules]
    assert None in tried
    assert pool.count == len(set(schedules))
    expected = best_of([Solution(each, simulate(graph, each)) for each in schedules])
    assert [each.outcome for each in pool.frontier()] == [each.outcome for each in expected]


def test_a_schedule_that_was_not_simulated_can_be_evaluated() -> None:
    graph = graph_of("decoder")
    pool = Pool(graph)
    schedules = _schedules(graph, "decoder")
    worse = next(each for each in schedules if pool.try_out(each) is None)
    assert pool.evaluate(worse) == simulate(graph, worse)
    assert pool.try_out(worse) == simulate(graph, worse)


def test_the_quickest_within_a_budget() -> None:
    graph = graph_of("unet")
    pool = Pool(graph)
    for each in _schedules(graph, "unet"):
        pool.try_out(each)
    found = pool.frontier()
    assert pool.under(found[0].outcome.peak - 1) is None
    assert pool.under(found[3].outcome.peak) == found[3]
    assert pool.under(found[4].outcome.peak - 1) == found[3]
