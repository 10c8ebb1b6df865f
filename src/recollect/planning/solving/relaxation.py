"""The cheapest schedule if memory has a price per byte and event: a minimum cut.

The lower bound needs it: at given prices, no schedule costs less than this cut. Each op whose
result backward needs is kept or recomputed. Recomputing takes its seconds and needs its inputs. In
the network, an edge from the source to an op is the price of keeping its results, an edge from the
op to the sink its seconds, and an edge from an op to one that it reads from cannot be cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from recollect.graph.flow import Network
from recollect.graph.graph import Graph

#: From one event to another, both included.
_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """The cheapest choice at some prices."""

    cost: float  #: in seconds, including the price of the link and of memory above the least
    seconds: float  #: of recomputation
    offloaded: int  #: bytes that are offloaded
    memory: list[int]  #: by event, a lower bound on the allocated bytes


@dataclass(frozen=True, slots=True)
class _BytePrices:
    """Of a byte, summed over all events before each, and of a byte that is offloaded."""

    before: list[float]
    offload: float


@dataclass(slots=True)
class _Item:
    """A live range of a value, which has a price."""

    nbytes: int  #: the size of the value
    spans: list[_Span]  #: when keeping it takes memory
    can_offload: bool  #: whether it can be offloaded instead
    less: _Item | None = None  #: a shorter live range of the value, which is paid for already
    edge: int = -1  #: the edge of the network that is cut if the price is paid

    def price(self, prices: _BytePrices) -> float:
        """The price in addition to that of ``less``."""
        paid = 0.0 if self.less is None else self.less.whole(prices)
        return max(0.0, self.whole(prices) - paid)

    def whole(self, prices: _BytePrices) -> float:
        """The price of keeping or offloading it, whichever is lower."""
        kept = self._kept(prices.before)
        return min(kept, self.nbytes * prices.offload) if self.can_offload else kept

    def _kept(self, before: list[float]) -> float:
        return self.nbytes * sum([before[high + 1] - before[low] for low, high in self.spans])

    def take(self, prices: _BytePrices, change: list[int]) -> int:
        """Add its bytes to ``change``; return the bytes that are offloaded instead."""
        offloaded = self.take_whole(prices, change, 1)
        return (
            offloaded if self.less is None else offloaded - self.less.take_whole(prices, change, -1)
        )

    def take_whole(self, prices: _BytePrices, change: list[int], sign: int) -> int:
        """`take` without subtracting ``less``."""
        if self.can_offload and self.nbytes * prices.offload < self._kept(prices.before):
            return self.nbytes
        for low, high in self.spans:
            change[low] += sign * self.nbytes
            change[high + 1] -= sign * self.nbytes
        return 0


class Relaxation:
    """The choices of a schedule, with the rules of `simulate` as far as a cut expresses them."""

    def __init__(self, live: Liveness, *, offload: bool = False) -> None:
        self._live = live
        self._graph = live.graph
        self._offload = offload
        #: Edges with prices, with seconds, and without limit.
        self._network = Network()
        self._items: list[_Item] = []
        self._seconds: list[tuple[int, float]] = []
        self._fixed: list[int] = []
        ops = self._graph.ops
        numbers = [n for n in sorted(self._graph.needed) if not ops[n].forced]
        self._nodes = {number: self._network.node() for number in numbers}
        #: By value: the nodes that read it, with the event until which it is held for each.
        self._readers: dict[int, list[tuple[int, int]]] = {}
        for number in numbers:
            self._add(number)
        for number in numbers:
            for value in self._graph.results[number]:
                self._add_readers(number, value)

    def _add(self, number: int) -> None:
        graph, live, node = self._graph, self._live, self._nodes[number]
        op = graph.ops[number]
        edge = self._network.edge(node, 1)
        self._seconds.append((edge, graph.rerun_seconds[number]))
        for read in op.reads:
            maker = graph.values[read].op
            # A value that a saved tensor holds anyway, and for long enough, costs a reader nothing.
            is_there = (
                live.is_unpacked[maker] and live.saved_until[read] >= live.inputs_until[number]
            )
            if maker in self._nodes and not is_there:
                self._readers.setdefault(read, []).append((live.inputs_until[number], node))
        if not live.is_unpacked[number]:
            return
        if not self._is_choice(number):
            self._fixed.append(self._network.edge(0, node))
            return
        for value in graph.results[number]:
            if live.saved_until[value] >= 0:
                item = self._item(value, live.saved_until[value])
                item.edge = self._network.edge(0, node)
                self._items.append(item)

    def _can_offload(self, number: int) -> bool:
        return self._offload and self._graph.ops[number].can_offload

    def _is_choice(self, number: int) -> bool:
        return self._graph.ops[number].can_keep or self._can_offload(number)

    def _item(self, value: int, end: int, less: _Item | None = None) -> _Item:
        each = self._graph.values[value]
        spans = self._live.added_by(value, end)
        return _Item(each.nbytes, spans, self._can_offload(each.op), less)

    def _add_readers(self, number: int, value: int) -> None:
        """Add edges from the readers of a value to the op that makes it.

        The longer the value is held for a reader, the higher the price, and nothing is paid twice:
        there is one level for each end of a live range, and each leads to the next shorter one.
        """
        network, node = self._network, self._nodes[number]
        readers = self._readers.get(value, ())
        if not self._is_choice(number):
            self._fixed += [network.edge(reader, node) for _, reader in readers]
            return
        end = self._live.saved_until[value]
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
        """The seconds of recomputation if nothing is kept."""
        return sum(each for _, each in self._seconds)

    def solve(self, events: Sequence[float], offload: float = math.inf) -> Cut:
        """The cheapest choice at prices for a byte at each event, and for a byte offloaded."""
        prices = _BytePrices([0.0, *accumulate(events)], offload)
        network = self._network
        cost = self._fill(prices)
        beyond, to = network.levels(), network.to
        is_cut = [beyond[to[edge + 1]] >= 0 > beyond[to[edge]] for edge in range(0, len(to), 2)]
        seconds = sum([each for edge, each in self._seconds if is_cut[edge // 2]])
        change = [0] * (len(events) + 1)
        offloaded = sum([i.take(prices, change) for i in self._items if is_cut[i.edge // 2]])
        held = accumulate(change)
        memory = [least + more for least, more in zip(self._live.least, held, strict=False)]
        return Cut(cost, seconds, offloaded, memory)

    def _fill(self, prices: _BytePrices) -> float:
        capacities = self._network.residual
        capacities[:] = [0.0] * len(capacities)
        for edge, each in self._seconds:
            capacities[edge] = each
        for item in self._items:
            capacities[item.edge] = item.price(prices)
        most = max(capacities, default=0.0)
        for edge in self._fixed:
            capacities[edge] = math.inf
        return self._network.fill(most)


# --- live ranges ----------------------------------------------------------------------------------


class Liveness:
    """At which events values and storages are allocated, as far as every schedule agrees on it.

    The lower bound may count only memory that `simulate` counts too. So for each storage this has
    the events at which it is allocated under any schedule, and what keeping a value adds to that.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        last = len(graph.events) - 1
        #: By value: the spans from unpacking a saved tensor of it to freeing or dropping that.
        self._unpacked: list[list[_Span]] = [[] for _ in graph.values]
        #: By value: the last event until which a saved tensor holds it if it is kept; -1: none.
        self.saved_until = [-1] * len(graph.values)
        #: By op: whether backward unpacks any of its results, and when each is freed.
        self.is_unpacked = [False] * len(graph.ops)
        self._frees: list[list[int]] = [[] for _ in graph.ops]
        unpacks: dict[int, int] = {}
        frees: dict[int, int] = {}
        drops: dict[int, int] = {}
        for now, event in enumerate(graph.events):
            for number in event.unpacks:
                unpacks.setdefault(number, now)
            for number in event.frees:
                frees.setdefault(number, now)
            for number in event.drops:
                drops.setdefault(number, now)
        freed_early: set[int] = set()
        for number, saved in enumerate(graph.saved):
            end, op = frees.get(number, last), graph.values[saved.value].op
            if number in unpacks:
                self.is_unpacked[op] = True
                self.saved_until[saved.value] = max(self.saved_until[saved.value], end)
                self._unpacked[saved.value].append((unpacks[number], drops.get(number, end)))
                self._frees[op].append(end)
            if end < unpacks.get(number, end + 1):
                freed_early.add(saved.value)
        # A tensor freed before it is unpacked is freed in place of another tensor of the value.
        for value in freed_early:
            self._unpacked[value] = []
        self._values_in: list[list[int]] = [[] for _ in graph.storages]
        for number, each in enumerate(graph.values):
            self._values_in[each.storage].append(number)

    @cached_property
    def inputs_until(self) -> list[int]:
        """By op: if it is recomputed, the event until which its inputs are held for that.

        A kept input is held until the first tensor that needs it is dead, and all that were saved
        after that. The results of the op are among those, or what leads to it.
        """
        graph = self.graph
        until = [-1] * len(graph.ops)
        users: list[list[int]] = [[] for _ in graph.ops]
        for number in sorted(graph.needed, reverse=True):
            of_users = (until[user] for user in users[number])
            until[number] = max(self._frees[number], default=min(of_users, default=-1))
            if not graph.ops[number].forced:
                for read in graph.ops[number].reads:
                    users[graph.values[read].op].append(number)
        return until

    @cached_property
    def _always(self) -> list[list[_Span]]:
        """By storage: when it, or as much elsewhere, is allocated under every schedule."""
        result = []
        for storage, values in zip(self.graph.storages, self._values_in, strict=True):
            spans = [(storage.born, storage.dies)]
            for value in values:
                spans += self._unpacked[value]
                if self.graph.ops[self.graph.values[value].op].forced:
                    spans.append((storage.born, self.saved_until[value]))
            result.append(_union(spans))
        return result

    @cached_property
    def least(self) -> list[int]:
        """By event: the bytes that are allocated under every schedule."""
        graph = self.graph
        change = [0] * (len(graph.events) + 1)
        for storage, spans in zip(graph.storages, self._always, strict=True):
            for low, high in spans:
                change[low] += storage.nbytes
                change[high + 1] -= storage.nbytes
        return [
            graph.base + event.during + held
            for event, held in zip(graph.events, accumulate(change), strict=False)
        ]

    def added_by(self, value: int, end: int) -> list[_Span]:
        """When it takes memory in addition to keep a value until ``end``.

        Values made in place share their storage, so only one of them counts.
        """
        storage = self.graph.values[value].storage
        if self.counted[storage] != value:
            return []
        return _subtract((self.graph.storages[storage].born, end), self._always[storage])

    @cached_property
    def counted(self) -> list[int]:
        """By storage: the value in it that counts if it is kept; -1 if none can be."""
        ops, values = self.graph.ops, self.graph.values
        return [
            max((n for n in numbers if ops[values[n].op].can_keep), default=-1)
            for numbers in self._values_in
        ]


def _union(spans: list[_Span]) -> list[_Span]:
    """The same events in disjoint spans, in order."""
    result: list[_Span] = []
    for low, high in sorted(spans):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        elif low <= high:
            result.append((low, high))
    return result


def _subtract(span: _Span, others: Iterable[_Span]) -> list[_Span]:
    """The part of a span that is in none of the others, which are in order."""
    result = []
    low, high = span
    for other_low, other_high in others:
        if low < other_low:
            result.append((low, min(high, other_low - 1)))
        low = max(low, other_high + 1)
    result.append((low, high))
    return [(low, high) for low, high in result if low <= high]
