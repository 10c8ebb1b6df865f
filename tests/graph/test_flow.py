"""Maximum flow and minimum cut."""

from __future__ import annotations

import itertools
import random

import pytest

from recollect.graph.flow import FOREVER, Network, minimum_cut


def test_a_network_is_filled() -> None:
    network = Network()
    a, b = network.node(), network.node()
    for start, end, room in ((0, a, 3.0), (0, b, 1.0), (a, b, 2.0), (a, 1, 1.0), (b, 1, 2.0)):
        network.edge(start, end, room)
    assert network.fill(3.0) == 3.0
    assert network.levels()[1] < 0


def test_a_cut_takes_the_narrowest_place() -> None:
    costs = {1: 5, 2: 2, 3: 2, 4: 5}
    assert minimum_cut(costs, [(1, 2), (1, 3), (2, 4), (3, 4)], [1], [4]) == {2, 3}
    assert minimum_cut(costs | {1: 3}, [(1, 2), (1, 3), (2, 4), (3, 4)], [1], [4]) == {1}


def test_of_equal_cuts_it_is_the_one_nearest_to_the_sinks() -> None:
    assert minimum_cut({1: 2, 2: 2, 3: 2}, [(1, 2), (2, 3)], [1], [3]) == {3}


def test_a_source_that_is_a_sink_is_taken() -> None:
    assert minimum_cut({1: 4}, [], [1], [1]) == {1}


def test_a_node_that_costs_too_much_is_taken_if_there_is_no_other_way() -> None:
    assert minimum_cut({1: FOREVER, 2: 7}, [(1, 2)], [1], [2]) == {2}
    assert minimum_cut({1: FOREVER}, [], [1], [1]) == {1}


def test_nothing_is_taken_where_no_sink_can_be_reached() -> None:
    assert minimum_cut({1: 1, 2: 1}, [(2, 1)], [1], [2]) == frozenset()


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_cheaper(seed: int) -> None:
    draw = random.Random(seed)
    nodes = range(7)
    costs = {node: draw.randint(1, 9) for node in nodes}
    edges = [(a, b) for a, b in itertools.combinations(nodes, 2) if draw.random() < 0.4]
    sources, sinks = [0, 1], [5, 6]

    def separates(taken: frozenset[int]) -> bool:
        reached = {node for node in sources if node not in taken}
        for a, b in edges:  # in the order of their beginnings
            if a in reached and b not in taken:
                reached.add(b)
        return not reached & set(sinks)

    found = minimum_cut(costs, edges, sources, sinks)
    assert separates(found)
    sets = (frozenset(s) for n in range(len(nodes) + 1) for s in itertools.combinations(nodes, n))
    assert sum(costs[n] for n in found) == min(
        sum(costs[n] for n in each) for each in sets if separates(each)
    )
