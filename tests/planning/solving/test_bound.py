"""No schedule is quicker than the bound, and the bound is not far below the quickest."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest

from recollect.graph.graph import Graph, Link, Schedule
from recollect.graph.simulate import Outcome, simulate, simulate_plain
from recollect.planning.solving.bound import best_mixture, lower_bound
from recollect.planning.solving.solve import Solver
from tests._support import sampled
from tests.planning._graphs import GRAPHS, Maker, decoder, graph_of, random_dag, solver_of

#: A bound is compared with sums of the same numbers in another order.
ROUNDING = 1 + 1e-12


def _outcomes(graph: Graph) -> Iterator[Outcome]:
    """Of all schedules that keep things."""
    for chosen in product((False, True), repeat=len(graph.choices)):
        kept = frozenset(n for n, is_kept in zip(graph.choices, chosen, strict=True) if is_kept)
        yield simulate(graph, Schedule(kept))


def _outcomes_with_link(graph: Graph, draw: random.Random) -> Iterator[Outcome]:
    """Of all schedules that keep and send things, with some limit."""
    largest = max(value.nbytes for value in graph.values)
    for chosen in product(range(3), repeat=len(graph.choices)):
        pairs = list(zip(graph.choices, chosen, strict=True))
        kept = frozenset(n for n, what in pairs if what == 1)
        offloaded = frozenset(n for n, what in pairs if what == 2 and graph.ops[n].can_offload)
        limit = draw.choice((0, largest, 10 * largest))
        yield simulate(graph, Schedule(kept, offloaded, limit))


def _quickest(outcomes: Iterator[Outcome]) -> list[Outcome]:
    """Those that no other is as quick as with no more memory."""
    found: list[Outcome] = []
    for each in sorted(outcomes, key=lambda each: (each.peak, each.seconds)):
        if not found or each.seconds < found[-1].seconds:
            found.append(each)
    return found


@pytest.mark.parametrize("seed", sampled(range(60), usual=range(0, 60, 3)))
def test_no_schedule_is_quicker(seed: int) -> None:
    graph = random_dag(seed, 6 + seed % 6)
    for each in _quickest(_outcomes(graph)):
        assert lower_bound(graph, each.peak) <= each.seconds * ROUNDING


@pytest.mark.parametrize("seed", sampled(range(100, 130), usual=range(100, 130, 3)))
def test_no_schedule_is_quicker_if_states_are_held(seed: int) -> None:
    draw = random.Random(seed)
    graph = random_dag(seed, 6 + seed % 5)
    ops = [replace(op, state=draw.choice((0, 0, 1 << 12, 20_000))) for op in graph.ops]
    graph = replace(graph, ops=ops)
    for each in _quickest(_outcomes(graph)):
        assert lower_bound(graph, each.peak) <= each.seconds * ROUNDING


@pytest.mark.parametrize("seed", sampled(range(24), usual=range(0, 24, 3)))
def test_no_schedule_is_quicker_that_sends_to_the_host(seed: int) -> None:
    draw = random.Random(seed)
    rate = 10 ** draw.uniform(7, 10)
    graph = random_dag(seed, 6 + seed % 3)
    ops = [replace(op, can_offload=op.can_keep and draw.random() < 0.8) for op in graph.ops]
    graph = replace(graph, ops=ops, link=Link(rate, rate * draw.uniform(0.5, 2)))
    for each in _quickest(_outcomes_with_link(graph, draw)):
        bound = lower_bound(graph, each.peak, offload=True)
        assert bound <= each.seconds * ROUNDING
        assert bound <= lower_bound(graph, each.peak) * ROUNDING


@pytest.mark.parametrize("budgets", sampled([4, 20], usual=[4]))
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_less_memory_is_never_quicker(name: str, budgets: int) -> None:
    graph = graph_of(name)
    peak = simulate_plain(graph).peak
    bounds = [lower_bound(graph, round(peak * part / budgets)) for part in range(1, budgets + 1)]
    assert bounds[-1] == graph.plain_seconds
    for tighter, looser in pairwise(bounds):
        assert tighter >= looser * (1 - 1e-3)


@pytest.mark.parametrize("parts", sampled([(0.2, 0.6), (0.05, 0.1, 0.4, 0.8)], usual=[(0.2, 0.6)]))
@pytest.mark.parametrize(
    "name",
    sampled(
        ["decoder", "encoder_decoder", "conv_net", "recurrent"], usual=["decoder", "recurrent"]
    ),
)
def test_it_is_close_to_what_the_solver_finds(name: str, parts: tuple[float, ...]) -> None:
    graph = graph_of(name)
    found = solver_of(name).frontier()
    low, high = found[0].outcome.peak, simulate_plain(graph).peak
    for part in parts:
        budget = round(low + part * (high - low))
        best = min(each.outcome.seconds for each in found if each.outcome.peak <= budget)
        assert best <= 1.05 * lower_bound(graph, budget)


@pytest.mark.parametrize(
    "name",
    sampled(["decoder", "encoder_decoder", "conv_net", "recurrent"], usual=["recurrent"]),
)
def test_it_is_close_to_what_the_solver_finds_with_a_link(name: str) -> None:
    graph = graph_of(name)
    made = sum(graph.values[value].nbytes for op in graph.choices for value in graph.results[op])
    rate = made / graph.plain_seconds  # about a third of it can leave while forward lasts
    ops = [replace(op, can_offload=op.can_keep) for op in graph.ops]
    graph = replace(graph, ops=ops, link=Link(rate, rate))
    found = Solver(graph, offload=True).frontier()
    low, high = found[0].outcome.peak, simulate_plain(graph).peak
    for part in (0.2, 0.4, 0.6, 0.8):
        budget = round(low + part * (high - low))
        best = min(each.outcome.seconds for each in found if each.outcome.peak <= budget)
        assert best <= 1.05 * lower_bound(graph, budget, offload=True)


def test_a_budget_below_what_is_always_there_cannot_be_met() -> None:
    assert lower_bound(decoder(1), 1000) == math.inf


def test_a_link_that_is_fast_enough_makes_reruns_needless() -> None:
    graph = decoder(4, link=Link(1e15, 1e15))
    graph = replace(graph, ops=[replace(op, can_offload=True) for op in graph.ops])
    peak = simulate_plain(graph).peak
    low, without = (lower_bound(graph, peak * 3 // 4, offload=each) for each in (True, False))
    assert low == pytest.approx(graph.plain_seconds)
    assert without > 1.01 * graph.plain_seconds


@pytest.mark.parametrize("readers", sampled([20, 60], usual=[20]))
def test_a_value_that_many_read_until_different_moments(readers: int) -> None:
    make = Maker()
    first = make.op("embedding", [], 1 << 20)
    made = [make.op("gelu", [first], 1 << 20, saves_result=True) for _ in range(readers)]
    total = made[0]
    for each in made[1:]:
        total = make.op("add", [total, each], 1 << 20)
    graph = make.graph()
    for each in Solver(graph).frontier()[::8]:
        bound = lower_bound(graph, each.outcome.peak)
        assert bound <= each.outcome.seconds * ROUNDING <= 1.05 * bound


def test_a_step_that_takes_no_time() -> None:
    graph = decoder(1, link=Link(1e9, 1e9))
    graph = replace(
        graph,
        ops=[replace(op, seconds=0.0) for op in graph.ops],
        events=[replace(event, seconds=0.0) for event in graph.events],
        rerun_cost=0.0,
    )
    assert lower_bound(graph, simulate_plain(graph).peak * 9 // 10, offload=True) == 0.0


def test_a_slow_link_is_no_help() -> None:
    graph = decoder(4, link=Link(1e3, 1e3))
    graph = replace(graph, ops=[replace(op, can_offload=True) for op in graph.ops])
    budget = simulate_plain(graph).peak * 3 // 4
    slow, without = (lower_bound(graph, budget, offload=each) for each in (True, False))
    assert slow == pytest.approx(without, rel=1e-3)


def test_a_mixture_is_the_cheapest_within_the_limits() -> None:
    # Half of the second and half of the first keep to the limit; the third costs more than those.
    cost, weights, worth = best_mixture([4.0, 0.0, 3.0], [[0.0, 2.0, 1.0]])
    assert cost == pytest.approx(2.0)
    assert weights == pytest.approx([0.5, 0.5, 0.0])
    assert worth == pytest.approx([2.0])
