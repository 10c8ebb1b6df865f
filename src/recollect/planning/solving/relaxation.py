"""A step with a price for memory in place of a budget: the cheapest choice is a minimum cut.

Each op whose result backward needs is kept or recomputed. Recomputing takes its seconds, and
whatever it reads. In the network, an edge from the source to an op is the price of keeping its
results, an edge from the op to the sink its seconds, and an edge from an op to one that it reads
from cannot be cut.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from recollect.graph.flow import Network
from recollect.planning.solving.liveness import Lives, Span

__all__ = ["Cut", "Relaxation"]

#: How many ends of a value's life are told apart, one for each group of its readers.
_MOST_LEVELS = 16


@dataclass(frozen=True, slots=True)
class Cut:
    """The cheapest choice at some prices.

    Args:
        cost: In seconds, including what is paid for the link and for memory above the least.
        seconds: Of recomputation.
        sent: Bytes that go to the host.
        memory: By moment, a lower bound on the bytes that are allocated.
        again: The ops that are recomputed.
    """

    cost: float
    seconds: float
    sent: int
    memory: list[int]
    again: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Prices:
    """Of a byte at all the moments before one, and of a byte that goes to the host."""

    before: list[float]
    send: float


@dataclass(slots=True)
class _Item:
    """A value that can be there in backward without being recomputed, for a price.

    Args:
        nbytes: Its size.
        spans: When it is held, if kept.
        can_send: Whether it can go to the host instead.
        less: What is paid for already: the same value, held for a shorter time.
        edge: The edge of the network that is cut if the price is paid.
    """

    nbytes: int
    spans: list[Span]
    can_send: bool
    less: _Item | None = None
    edge: int = -1

    def price(self, prices: _Prices) -> float:
        """What has to be paid in addition to ``less``."""
        paid = 0.0 if self.less is None else self.less.whole(prices)
        return max(0.0, self.whole(prices) - paid)

    def whole(self, prices: _Prices) -> float:
        """The price of keeping or sending it, whichever is lower."""
        kept = self._kept(prices.before)
        return min(kept, self.nbytes * prices.send) if self.can_send else kept

    def _kept(self, before: list[float]) -> float:
        return self.nbytes * sum([before[high + 1] - before[low] for low, high in self.spans])

    def take(self, prices: _Prices, change: list[int]) -> int:
        """Add to ``change`` when it is held; the bytes that go to the host instead."""
        sent = self.take_whole(prices, change, 1)
        return sent if self.less is None else sent - self.less.take_whole(prices, change, -1)

    def take_whole(self, prices: _Prices, change: list[int], sign: int) -> int:
        """The same, regardless of ``less``."""
        if self.can_send and self.nbytes * prices.send < self._kept(prices.before):
            return self.nbytes
        for low, high in self.spans:
            change[low] += sign * self.nbytes
            change[high + 1] -= sign * self.nbytes
        return 0


class Relaxation:
    """The choices of a schedule, with the rules of `simulate` as far as a cut expresses them.

    Args:
        lives: When which bytes are allocated.
        offload: Whether values can go to the host.
    """

    def __init__(self, lives: Lives, *, offload: bool = False) -> None:
        self._lives = lives
        self._graph = lives.graph
        self._offload = offload
        #: Edges with prices, with seconds, and without limit.
        self._network = Network()
        self._items: list[_Item] = []
        self._seconds: list[tuple[int, float]] = []
        self._fixed: list[int] = []
        ops = self._graph.ops
        numbers = [n for n in sorted(self._graph.needed) if not ops[n].forced]
        self._nodes = {number: self._network.node() for number in numbers}
        #: By value: the nodes that read it, with the moment until which it is held for each.
        self._readers: dict[int, list[tuple[int, int]]] = {}
        for number in numbers:
            self._add(number)
        for number in numbers:
            for value in self._graph.results[number]:
                self._add_readers(number, value)

    def _add(self, number: int) -> None:
        graph, lives, node = self._graph, self._lives, self._nodes[number]
        op = graph.ops[number]
        edge = self._network.edge(node, 1)
        self._seconds.append((edge, op.seconds + graph.rerun_cost))
        for read in op.reads:
            maker = graph.values[read].op
            # What backward asks for anyway, and for long enough, costs its reader nothing.
            is_there = lives.is_asked[maker] and lives.end[read] >= lives.horizon[number]
            if maker in self._nodes and not is_there:
                self._readers.setdefault(read, []).append((lives.horizon[number], node))
        if not lives.is_asked[number]:
            return
        if not self._is_choice(number):
            self._fixed.append(self._network.edge(0, node))
            return
        for value in graph.results[number]:
            if lives.end[value] >= 0:
                item = self._item(value, lives.end[value])
                item.edge = self._network.edge(0, node)
                self._items.append(item)

    def _can_send(self, number: int) -> bool:
        return self._offload and self._graph.ops[number].can_send

    def _is_choice(self, number: int) -> bool:
        return self._graph.ops[number].can_keep or self._can_send(number)

    def _item(self, value: int, end: int, less: _Item | None = None) -> _Item:
        each = self._graph.values[value]
        spans = self._lives.held(value, end)
        return _Item(each.nbytes, spans, self._can_send(each.op), less)

    def _add_readers(self, number: int, value: int) -> None:
        """Edges from the readers of a value to the op that makes it.

        The longer the value is held for a reader, the higher the price, and nothing is paid twice:
        readers enter at one level for each end, and each level leads to the next below.
        """
        network, node = self._network, self._nodes[number]
        readers = _rounded(self._readers.get(value, ()))
        if not self._is_choice(number):
            self._fixed += [network.edge(reader, node) for _, reader in readers]
            return
        end = self._lives.end[value]
        less = self._item(value, end) if end >= 0 else None
        below = -1
        for end in sorted({end for end, _ in readers}):
            level = network.node()
            if below >= 0:
                self._fixed.append(network.edge(level, below))
            self._fixed += [network.edge(reader, level) for at, reader in readers if at == end]
            less = self._item(value, end, less)
            less.edge = network.edge(level, node)
            self._items.append(less)
            below = level

    @property
    def most(self) -> float:
        """The seconds that recomputation takes at most."""
        return sum(each for _, each in self._seconds)

    def solve(self, events: Sequence[float], send: float = math.inf) -> Cut:
        """The cheapest choice at a price for a byte at each moment, and for a byte that is sent."""
        prices = _Prices([0.0, *accumulate(events)], send)
        network = self._network
        cost = self._fill(prices)
        beyond, to = network.levels(), network.to
        is_cut = [beyond[to[edge + 1]] >= 0 > beyond[to[edge]] for edge in range(0, len(to), 2)]
        seconds = sum([each for edge, each in self._seconds if is_cut[edge // 2]])
        change = [0] * (len(events) + 1)
        sent = sum([i.take(prices, change) for i in self._items if is_cut[i.edge // 2]])
        again = frozenset(number for number, node in self._nodes.items() if beyond[node] >= 0)
        held = accumulate(change)
        memory = [least + more for least, more in zip(self._lives.least, held, strict=False)]
        return Cut(cost, seconds, sent, memory, again)

    def _fill(self, prices: _Prices) -> float:
        room = self._network.room
        room[:] = [0.0] * len(room)
        for edge, each in self._seconds:
            room[edge] = each
        for item in self._items:
            room[item.edge] = item.price(prices)
        most = max(room, default=0.0)
        for edge in self._fixed:
            room[edge] = math.inf
        return self._network.fill(most)


def _rounded(readers: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Moments and nodes, with some moments earlier so that there are not too many."""
    ends = sorted({end for end, _ in readers})
    if len(ends) <= _MOST_LEVELS:
        return readers
    step = len(ends) / _MOST_LEVELS
    ends = [ends[int(n * step)] for n in range(_MOST_LEVELS)]
    return [(ends[bisect_right(ends, end) - 1], node) for end, node in readers]
