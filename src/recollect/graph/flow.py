"""Maximum flow and minimum cut.

The amount of any valid flow is a lower bound on the cost of every cut. So a bound that is read off
a flow holds however the arithmetic was rounded; only its tightness depends on when to stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Residual capacity below this fraction of the largest capacity counts as none.
_NOTHING = 1e-13
#: The cost of a node that a minimum cut takes only if there is no other way.
FOREVER = 1 << 80
_UNLIMITED = 1 << 120


class Network:
    """A flow network. Its edges can be given other capacities, to be filled again.

    Node 0 is the source and node 1 the sink. Integer capacities stay integers.
    """

    def __init__(self) -> None:
        self.edges: list[list[int]] = [[], []]
        self.to: list[int] = []
        #: By edge: the capacity that is left.
        self.residual: list[float] = []
        self._nothing = 0.0

    def node(self) -> int:
        """Add a node."""
        self.edges.append([])
        return len(self.edges) - 1

    def edge(self, a: int, b: int, capacity: float = 0.0) -> int:
        """Add an edge and return its number. The next number is its reverse edge."""
        number = len(self.to)
        self.edges[a].append(number)
        self.edges[b].append(number + 1)
        self.to += (b, a)
        self.residual += (capacity, 0.0)
        return number

    def fill(self, most: float = 0.0) -> float:
        """Send the maximum flow and return its amount (Dinic's algorithm).

        ``most``: the largest finite capacity, by which to tell rounding errors from residual
        capacity; 0 if all capacities are integers.
        """
        self._nothing = most * _NOTHING
        total = 0.0
        while (levels := self.levels())[1] >= 0:
            total += self._send(levels)
        return total

    def is_behind(self) -> list[bool]:
        """By node: whether more flow could go from it to the sink."""
        residual, to, nothing = self.residual, self.to, self._nothing
        found = [False] * len(self.edges)
        found[1] = True
        queue = [1]
        for node in queue:
            for edge in self.edges[node]:
                before = to[edge]
                if not found[before] and residual[edge ^ 1] > nothing:
                    found[before] = True
                    queue.append(before)
        return found

    def levels(self) -> list[int]:
        """By node: its distance from the source in the residual network; -1 if unreachable."""
        residual, to, edges, nothing = self.residual, self.to, self.edges, self._nothing
        levels = [-1] * len(edges)
        levels[0] = 0
        layer, depth = [0], 0
        while layer and levels[1] < 0:
            depth += 1
            after = []
            for node in layer:
                for edge in edges[node]:
                    if residual[edge] > nothing and levels[to[edge]] < 0:
                        levels[to[edge]] = depth
                        after.append(to[edge])
            layer = after
        return levels

    def _send(self, levels: list[int]) -> float:
        """Send a blocking flow down the levels."""
        residual, to, edges, nothing = self.residual, self.to, self.edges, self._nothing
        untried = [len(each) for each in edges]
        path: list[int] = []
        node, total = 0, 0.0
        while True:
            if node == 1:
                least = min([residual[edge] for edge in path])
                total += least
                full = len(path)
                for position, edge in enumerate(path):
                    residual[edge] -= least
                    residual[edge ^ 1] += least
                    if residual[edge] <= nothing and position < full:
                        full = position
                node = to[path[full] ^ 1]
                del path[full:]
            here, left, below = edges[node], untried[node], levels[node] + 1
            while left:
                edge = here[left - 1]
                if residual[edge] > nothing and levels[to[edge]] == below:
                    break
                left -= 1
            untried[node] = left
            if left:
                path.append(edge)
                node = to[edge]
            elif path:
                node = to[path.pop() ^ 1]
                untried[node] -= 1
            else:
                return total


def minimum_cut(
    costs: Mapping[int, int],
    edges: Iterable[tuple[int, int]],
    sources: Iterable[int],
    sinks: Iterable[int],
) -> frozenset[int]:
    """The cheapest set of nodes without which no sink can be reached from a source.

    Sources and sinks are nodes too, and may be taken. Of several cheapest sets it is the one
    nearest to the sinks.
    """
    network = Network()
    # A node becomes an edge, from where it is entered to where it is left.
    entered = {node: network.node() for node in costs}
    left = {node: network.node() for node in costs}
    for node, cost in costs.items():
        network.edge(entered[node], left[node], cost)
    for before, after in edges:
        network.edge(left[before], entered[after], _UNLIMITED)
    for node in set(sources):
        network.edge(0, entered[node], _UNLIMITED)
    for node in set(sinks):
        network.edge(left[node], 1, _UNLIMITED)
    network.fill()
    is_behind = network.is_behind()
    return frozenset(n for n in costs if is_behind[left[n]] and not is_behind[entered[n]])
