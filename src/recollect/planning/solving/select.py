"""Keep or make again, at a price for memory: the cheapest choice, exactly.

An op whose result is wanted is kept, which costs its bytes times the price, or runs again, which
costs its seconds and wants what it reads. With a given price that is a minimum cut. The choices
that are best at some price are the corners of the convex hull of all choices; `corners` finds them
all, by asking at the price at which two known ones draw level.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Piece", "corners", "reruns"]

#: Capacities are whole numbers, so that what is full is full.
_UNIT = 1e13
_NO_LIMIT = 1 << 100


@dataclass(frozen=True, slots=True)
class Piece:
    """Ops among which to choose, by their number here.

    Args:
        seconds: What each takes to run again.
        nbytes: What each costs to keep; None if it cannot be.
        is_free: Whether each is there in any case.
        reads: The ops whose results each reads.
        outside: The things outside that each reads.
        prices: The bytes of the things outside.
        asked: The ops whose results are wanted.
    """

    seconds: Sequence[float]
    nbytes: Sequence[int | None]
    is_free: Sequence[bool]
    reads: Sequence[Sequence[int]]
    outside: Sequence[Sequence[int]]
    prices: Sequence[int]
    asked: frozenset[int]


def reruns(piece: Piece, kept: frozenset[int]) -> set[int]:
    """The ops that run again if ``kept`` are kept."""
    found: set[int] = set()
    wanted = list(piece.asked)
    while wanted:
        op = wanted.pop()
        if op not in found and op not in kept and not piece.is_free[op]:
            found.add(op)
            wanted += piece.reads[op]
    return found


def corners(piece: Piece, most: int) -> list[frozenset[int]]:
    """The choices that are best at some price, about ``most`` of them at most."""
    total = sum(piece.seconds) + 1e-12
    sizes = [nbytes for nbytes in piece.nbytes if nbytes]
    if not sizes:
        return [_at_price(piece, 0.0)]
    low, high = 1e-3 * min(piece.seconds) / sum(sizes), 1e3 * total / min(sizes)
    cheap, quick = _at_price(piece, high), _at_price(piece, low)
    found = {cheap: _costs(piece, cheap), quick: _costs(piece, quick)}
    gaps = deque([(cheap, quick)])
    while gaps and len(found) < most:
        left, right = gaps.popleft()
        price = _level(found[left], found[right])
        if price is None:
            continue
        between = _at_price(piece, price)
        if between not in found:
            found[between] = _costs(piece, between)
            gaps += [(left, between), (between, right)]
    return list(found)


def _level(small: tuple[int, float], quick: tuple[int, float]) -> float | None:
    """The price at which two choices cost the same."""
    nbytes, seconds = quick[0] - small[0], small[1] - quick[1]
    return seconds / nbytes if nbytes > 0 and seconds > 0 else None


def _costs(piece: Piece, kept: frozenset[int]) -> tuple[int, float]:
    again = reruns(piece, kept)
    things = {thing for op in again for thing in piece.outside[op]}
    nbytes = sum(piece.nbytes[op] or 0 for op in kept) + sum(piece.prices[t] for t in things)
    return nbytes, sum(piece.seconds[op] for op in again)


def _at_price(piece: Piece, price: float) -> frozenset[int]:
    """What to keep, where a byte costs so many seconds."""
    count = len(piece.seconds)
    source, sink = 2 * count, 2 * count + 1
    flow = _Flow(2 * count + 2 + len(piece.prices))
    # An op is wanted on the source's side of 2n, and runs again on that of 2n + 1.
    for op in range(count):
        if piece.is_free[op]:
            continue
        nbytes = piece.nbytes[op]
        flow.edge(2 * op, 2 * op + 1, _NO_LIMIT if nbytes is None else _whole(price * nbytes))
        flow.edge(2 * op + 1, sink, _whole(piece.seconds[op]))
        for read in piece.reads[op]:
            if not piece.is_free[read]:
                flow.edge(2 * op + 1, 2 * read, _NO_LIMIT)
        for thing in piece.outside[op]:
            flow.edge(2 * op + 1, sink + 1 + thing, _NO_LIMIT)
    for thing, nbytes in enumerate(piece.prices):
        flow.edge(sink + 1 + thing, sink, _whole(price * nbytes))
    for op in piece.asked:
        if not piece.is_free[op]:
            flow.edge(source, 2 * op, _NO_LIMIT)
    near = flow.fill(source, sink)
    return frozenset(op for op in range(count) if near[2 * op] >= 0 and near[2 * op + 1] < 0)


def _whole(seconds: float) -> int:
    return int(seconds * _UNIT) + 1


class _Flow:
    """Dinic's algorithm. Edge n ^ 1 is edge n the other way round."""

    def __init__(self, count: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(count)]
        self._to: list[int] = []
        self._room: list[int] = []

    def edge(self, a: int, b: int, room: int) -> None:
        self._edges[a].append(len(self._to))
        self._edges[b].append(len(self._to) + 1)
        self._to += (b, a)
        self._room += (room, 0)

    def fill(self, source: int, sink: int) -> list[int]:
        """Send as much as fits; how far each node then is from the source, -1 if out of reach."""
        while True:
            levels = self._levels(source)
            if levels[sink] < 0:
                return levels
            untried = [len(edges) for edges in self._edges]
            while self._send(source, sink, levels, untried):
                pass

    def _levels(self, source: int) -> list[int]:
        edges, to, room = self._edges, self._to, self._room
        levels = [-1] * len(edges)
        levels[source] = 0
        queue = [source]
        for node in queue:
            level = levels[node] + 1
            for edge in edges[node]:
                after = to[edge]
                if levels[after] < 0 and room[edge] > 0:
                    levels[after] = level
                    queue.append(after)
        return levels

    def _send(self, source: int, sink: int, levels: list[int], untried: list[int]) -> bool:
        """Find one way down the levels and fill it."""
        path = self._path(source, sink, levels, untried)
        if not path:
            return False
        room = self._room
        least = min(room[edge] for edge in path)
        for edge in path:
            room[edge] -= least
            room[edge ^ 1] += least
        return True

    def _path(self, source: int, sink: int, levels: list[int], untried: list[int]) -> list[int]:
        to, room = self._to, self._room
        path: list[int] = []
        node = source
        while node != sink:
            edges, level = self._edges[node], levels[node] + 1
            left = untried[node]
            while left and not (room[edges[left - 1]] > 0 and levels[to[edges[left - 1]]] == level):
                left -= 1
            untried[node] = left
            if left:
                path.append(edges[left - 1])
                node = to[path[-1]]
            elif path:
                node = to[path.pop() ^ 1]
                untried[node] -= 1
            else:
                return []
        return path
