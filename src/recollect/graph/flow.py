"""How much flows through a network at most, which is what its cheapest cut costs.

Of any flow that fits the amount is below the cost of any cut. So a bound that is read off a flow
holds however the arithmetic was rounded, and when to stop is a matter of how close it has to be.
"""

from __future__ import annotations

__all__ = ["Network"]

#: Room that is less than this part of the largest is none.
_NOTHING = 1e-13


class Network:
    """A network whose edges may be given other capacities, to be filled again.

    Node 0 is the source and node 1 the sink. Capacities that are whole numbers stay whole.
    """

    def __init__(self) -> None:
        self.edges: list[list[int]] = [[], []]
        self.to: list[int] = []
        self.room: list[float] = []
        self._nothing = 0.0

    def node(self) -> int:
        """A new node."""
        self.edges.append([])
        return len(self.edges) - 1

    def edge(self, a: int, b: int, room: float = 0.0) -> int:
        """A new edge; its number. The next one is the way back."""
        number = len(self.to)
        self.edges[a].append(number)
        self.edges[b].append(number + 1)
        self.to += (b, a)
        self.room += (room, 0.0)
        return number

    def fill(self, most: float = 0.0) -> float:
        """Send as much as fits; the amount (Dinic's algorithm).

        ``most``: the largest capacity that has a limit, by which to tell what is too little to
        count; 0 if they are all whole numbers.
        """
        self._nothing = most * _NOTHING
        total = 0.0
        while (levels := self.levels())[1] >= 0:
            total += self._send(levels)
        return total

    def is_behind(self) -> list[bool]:
        """Of each node: whether more could be sent on from it to the sink."""
        room, to, nothing = self.room, self.to, self._nothing
        found = [False] * len(self.edges)
        found[1] = True
        queue = [1]
        for node in queue:
            for edge in self.edges[node]:
                before = to[edge]
                if not found[before] and room[edge ^ 1] > nothing:
                    found[before] = True
                    queue.append(before)
        return found

    def levels(self) -> list[int]:
        """How far each node is from the source; -1 if there is no room on the way."""
        room, to, edges, nothing = self.room, self.to, self.edges, self._nothing
        levels = [-1] * len(edges)
        levels[0] = 0
        layer, depth = [0], 0
        while layer and levels[1] < 0:
            depth += 1
            after = []
            for node in layer:
                for edge in edges[node]:
                    if room[edge] > nothing and levels[to[edge]] < 0:
                        levels[to[edge]] = depth
                        after.append(to[edge])
            layer = after
        return levels

    def _send(self, levels: list[int]) -> float:
        """Fill all the ways down the levels."""
        room, to, edges, nothing = self.room, self.to, self.edges, self._nothing
        untried = [len(each) for each in edges]
        path: list[int] = []
        node, total = 0, 0.0
        while True:
            if node == 1:
                least = min([room[edge] for edge in path])
                total += least
                full = len(path)
                for position, edge in enumerate(path):
                    room[edge] -= least
                    room[edge ^ 1] += least
                    if room[edge] <= nothing and position < full:
                        full = position
                node = to[path[full] ^ 1]
                del path[full:]
            here, left, below = edges[node], untried[node], levels[node] + 1
            while left:
                edge = here[left - 1]
                if room[edge] > nothing and levels[to[edge]] == below:
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
