"""The bands of a stacked step add up to its curve."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from recollect.graph.graph import Link
from recollect.graph.simulate import simulate, simulate_plain
from recollect.graph.stack import _BandedPlayback, stacked
from tests.graph.test_simulate import _drawn
from tests.planning._graphs import GRAPHS, graph_of, random_dag


def _with_link(graph, draw):
    rate = 10 ** draw.uniform(7, 12)
    ops = [replace(op, can_offload=op.can_keep, state=draw.choice((0, 0, 16))) for op in graph.ops]
    return replace(graph, ops=ops, engine_cost=1e-5, link=Link(rate, rate))


def _check(graph, draw):
    graph = _with_link(graph, draw)
    bands = [draw.randrange(4) for _ in graph.ops]
    for schedule in _drawn(graph, draw):
        run = _BandedPlayback(graph, schedule, bands)
        run.forward()
        run.backward()
        points = [(seconds, fixed, levels[:]) for seconds, fixed, levels in run.points()]
        curve = simulate(graph, schedule, curve=True).curve
        assert [seconds for seconds, _, _ in points] == [seconds for seconds, _ in curve]
        totals = [graph.base + fixed + sum(levels) for _, fixed, levels in points]
        assert totals[1:] == [nbytes for _, nbytes in curve[1:]]
        assert all(nbytes >= 0 for _, _, levels in points for nbytes in levels)


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_bands_add_up_to_the_curve(name):
    _check(graph_of(name), random.Random(name))


@pytest.mark.parametrize("seed", range(20))
def test_bands_add_up_for_random_graphs(seed):
    _check(random_dag(seed, 5 + seed % 40), random.Random(seed))


def test_the_peak_is_among_the_columns():
    graph = graph_of("decoder")
    bands = [0] * len(graph.ops)
    points = stacked(graph, None, bands, 50).points
    assert len(points) <= 50
    highest = max(graph.base + fixed + sum(levels) for _, fixed, levels in points)
    assert highest == simulate_plain(graph).peak


def test_copies_are_those_of_the_schedule_one_after_the_other():
    draw = random.Random(0)
    graph = _with_link(graph_of("decoder"), draw)
    schedule = next(each for each in _drawn(graph, draw) if each.offloaded)
    step = stacked(graph, schedule, [0] * len(graph.ops), 100)
    assert step.out
    assert step.back
    for copies in (step.out, step.back):
        assert all(one.end <= next_one.start + 1e-12 for one, next_one in pairwise(copies))
    sent = sum(copy.nbytes for copy in step.out)
    made = sum(v.nbytes for v in graph.values if v.op in schedule.offloaded)
    assert 0 < sent <= made
