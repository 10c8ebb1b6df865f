"""The exact solver finds what trying out everything finds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import simulate, simulate_plain
from recollect.planning.solving.bound import lower_bound
from tests._support import sampled
from tests.planning._graphs import decoder, random_dag
from tests.planning.solving._exact import solve_exact


def _by_trying(graph: Graph) -> list[tuple[int, float]]:
    """The peak and the seconds of every schedule."""
    found = []
    for chosen in product((False, True), repeat=len(graph.choices)):
        kept = frozenset(n for n, is_kept in zip(graph.choices, chosen, strict=True) if is_kept)
        outcome = simulate(graph, Schedule(kept))
        found.append((outcome.peak, outcome.seconds))
    return sorted(found)


@pytest.mark.parametrize("seed", sampled(range(30), usual=range(0, 30, 2)))
def test_it_finds_the_best(seed: int) -> None:
    _assert_best(random_dag(seed, 6 + seed % 7))


@pytest.mark.parametrize("seed", sampled(range(12), usual=range(0, 12, 2)))
def test_it_finds_the_best_where_some_is_saved_and_never_asked_for(seed: int) -> None:
    graph = random_dag(seed, 5 + seed % 4)
    unasked = range(seed % 2, len(graph.saved), 2)
    events = [
        replace(event, unpacks=tuple(n for n in event.unpacks if n not in unasked))
        for event in graph.events
    ]
    _assert_best(replace(graph, events=events))


def test_it_finds_that_there_is_nothing_to_find() -> None:
    graph = random_dag(0, 8)
    graph = replace(graph, ops=[replace(op, can_keep=False) for op in graph.ops])
    peak = simulate(graph, Schedule(frozenset())).peak
    assert solve_exact(graph, peak) == Schedule(frozenset())
    assert solve_exact(graph, peak - 1) is None
    assert solve_exact(graph, 0) is None


def _assert_best(graph: Graph) -> None:
    pytest.importorskip("scipy")
    found = _by_trying(graph)
    for part in (0.0, 0.15, 0.4, 0.7, 1.0):
        budget = found[int(part * (len(found) - 1))][0]
        schedule = solve_exact(graph, budget)
        assert schedule is not None
        outcome = simulate(graph, schedule)
        best = min(seconds for peak, seconds in found if peak <= budget)
        assert outcome.peak <= budget
        assert outcome.seconds == pytest.approx(best, rel=1e-9, abs=0)
    assert solve_exact(graph, found[0][0] - 1) is None


@pytest.mark.parametrize("part", [0.75, 0.85, 0.95])
def test_a_small_decoder_is_solved(part: float) -> None:
    pytest.importorskip("scipy")
    graph = decoder(1)
    budget = round(part * simulate_plain(graph).peak)
    schedule = solve_exact(graph, budget)
    assert schedule is not None
    outcome = simulate(graph, schedule)
    assert outcome.peak <= budget
    assert lower_bound(graph, budget) <= outcome.seconds <= 1.05 * lower_bound(graph, budget)


def test_there_is_an_end_to_trying() -> None:
    pytest.importorskip("scipy")
    graph = decoder(8)
    with pytest.raises(TimeoutError):
        solve_exact(graph, round(0.7 * simulate_plain(graph).peak), seconds=0.05)
