"""The cheapest set of nodes without which no sink can be reached from a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from recollect.graph.flow import Network

__all__ = ["FOREVER", "minimum_cut"]

#: The cost of a node that cannot be taken, unless there is no other way.
FOREVER = 1 << 80
_NO_LIMIT = 1 << 120


def minimum_cut(
    costs: Mapping[int, int],
    edges: Iterable[tuple[int, int]],
    sources: Iterable[int],
    sinks: Iterable[int],
) -> frozenset[int]:
    """The nodes to take; of several cheapest sets the one nearest to the sinks.

    Sources and sinks are nodes too, and may be taken.
    """
    network = Network()
    # A node is an edge, from where it is entered to where it is left.
    entered = {node: network.node() for node in costs}
    left = {node: network.node() for node in costs}
    for node, cost in costs.items():
        network.edge(entered[node], left[node], cost)
    for before, after in edges:
        network.edge(left[before], entered[after], _NO_LIMIT)
    for node in set(sources):
        network.edge(0, entered[node], _NO_LIMIT)
    for node in set(sinks):
        network.edge(left[node], 1, _NO_LIMIT)
    network.fill()
    is_behind = network.is_behind()
    return frozenset(n for n in costs if is_behind[left[n]] and not is_behind[entered[n]])
