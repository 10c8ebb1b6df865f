"""The cheapest set of nodes without which no sink can be reached from a source."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

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
    flow = _Flow()
    # A node is an edge from where it is entered, 2n, to where it is left, 2n + 1.
    for node, cost in costs.items():
        flow.edge(2 * node, 2 * node + 1, cost)
    for before, after in edges:
        flow.edge(2 * before + 1, 2 * after, _NO_LIMIT)
    for node in set(sources):
        flow.edge(_SOURCE, 2 * node, _NO_LIMIT)
    for node in set(sinks):
        flow.edge(2 * node + 1, _SINK, _NO_LIMIT)
    flow.fill()
    near = flow.leading_to_the_sink()
    return frozenset(node for node in costs if 2 * node + 1 in near and 2 * node not in near)


_SOURCE = -1
_SINK = -2


class _Flow:
    """Dinic's algorithm."""

    def __init__(self) -> None:
        #: By node, the numbers of its edges; edge n ^ 1 is edge n the other way round.
        self._edges: dict[int, list[int]] = {_SOURCE: [], _SINK: []}
        self._to: list[int] = []
        self._room: list[int] = []

    def edge(self, a: int, b: int, room: int) -> None:
        self._edges.setdefault(a, []).append(len(self._to))
        self._to.append(b)
        self._room.append(room)
        self._edges.setdefault(b, []).append(len(self._to))
        self._to.append(a)
        self._room.append(0)

    def fill(self) -> None:
        """Send as much as fits."""
        while (levels := self._levels()) is not None:
            untried = {node: len(edges) for node, edges in self._edges.items()}
            while self._send(levels, untried):
                pass

    def _levels(self) -> dict[int, int] | None:
        """How far each node is from the source; None if the sink cannot be reached."""
        levels = {_SOURCE: 0}
        queue = deque([_SOURCE])
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                after = self._to[edge]
                if self._room[edge] > 0 and after not in levels:
                    levels[after] = levels[node] + 1
                    queue.append(after)
        return levels if _SINK in levels else None

    def _send(self, levels: dict[int, int], untried: dict[int, int]) -> bool:
        """Find one way down the levels and fill it."""
        path: list[int] = []
        node = _SOURCE
        while node != _SINK:
            edges = self._edges[node]
            while untried[node]:
                edge = edges[untried[node] - 1]
                after = self._to[edge]
                if self._room[edge] > 0 and levels.get(after) == levels[node] + 1:
                    break
                untried[node] -= 1
            if untried[node]:
                path.append(edge)
                node = after
            elif path:
                node = self._to[path.pop() ^ 1]
                untried[node] -= 1
            else:
                return False
        least = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= least
            self._room[edge ^ 1] += least
        return True

    def leading_to_the_sink(self) -> set[int]:
        """The nodes from which more could be sent on to the sink."""
        found = {_SINK}
        queue = deque([_SINK])
        while queue:
            for edge in self._edges[queue.popleft()]:
                before = self._to[edge]
                if self._room[edge ^ 1] > 0 and before not in found:
                    found.add(before)
                    queue.append(before)
        return found
