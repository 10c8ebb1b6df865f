"""A step with a price for memory in place of a budget: what is cheapest is a minimum cut.

Each op that backward asks for is kept, or it is made again, which takes its seconds and everything
that it reads. An edge from the source to the op is the price of keeping it, one from the op to the
sink its seconds, one from an op to another that it reads cannot be cut.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from recollect.graph.flow import Network
from recollect.planning.solving.liveness import Lives, Span, without

__all__ = ["Relaxation", "Solution"]

#: How many moments are told apart until which a value is held for what reads it.
_MOST_LEVELS = 16


@dataclass(frozen=True, slots=True)
class Solution:
    """What is cheapest at some prices.

    Args:
        cost: In seconds, with what is paid for the link, and for memory above the least.
        seconds: Of reruns.
        sent: Bytes that go to the host.
        memory: By moment, the bytes that are allocated at least.
        again: The ops that are made again, of those on which there is something to decide.
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
    """A value that may be there in backward without being made again, for a price.

    Args:
        nbytes: How large it is.
        spans: When it is held, if kept.
        can_send: Whether it may go to the host instead.
        less: What has been paid for already: the same value, held for less long.
        edge: Of the network, that is cut if the price is paid.
    """

    nbytes: int
    spans: list[Span]
    can_send: bool
    less: _Item | None = None
    edge: int = -1

    def price(self, prices: _Prices) -> float:
        """What there is to pay besides."""
        before = 0.0 if self.less is None else self.less.whole(prices)
        return max(0.0, self.whole(prices) - before)

    def whole(self, prices: _Prices) -> float:
        """What there is to pay, kept or sent."""
        kept = self._kept(prices.before)
        return min(kept, self.nbytes * prices.send) if self.can_send else kept

    def _kept(self, before: list[float]) -> float:
        return self.nbytes * sum([before[high + 1] - before[low] for low, high in self.spans])

    def take(self, prices: _Prices, change: list[int]) -> int:
        """Add to ``change`` when it is held; the bytes that go to the host instead."""
        sent = self.take_whole(prices, change, 1)
        return sent if self.less is None else sent - self.less.take_whole(prices, change, -1)

    def take_whole(self, prices: _Prices, change: list[int], sign: int) -> int:
        """The same as if nothing had been paid for."""
        if self.can_send and self.nbytes * prices.send < self._kept(prices.before):
            return self.nbytes
        for low, high in self.spans:
            change[low] += sign * self.nbytes
            change[high + 1] -= sign * self.nbytes
        return 0


class _Sides:
    """Which of two sides each of a row is on, as far as it follows from what was joined."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))
        self._is_other = [False] * count

    def is_turned(self, number: int) -> bool:
        """Whether it is on the other side than that to which all are compared."""
        return self._find(number)[1]

    def _find(self, number: int) -> tuple[int, bool]:
        above, sides = self._above, self._is_other
        way = []
        while above[number] != number:
            way.append(number)
            number = above[number]
        is_other = False
        for each in reversed(way):  # the next time it is one step
            is_other ^= sides[each]
            above[each], sides[each] = number, is_other
        return number, is_other

    def join(self, a: int, b: int, *, is_other: bool) -> bool:
        """Have two on the same side, or on different ones; whether they are then."""
        (top, turned), (below, also) = self._find(a), self._find(b)
        if top == below:
            return (turned ^ also) == is_other
        self._above[below] = top
        self._is_other[below] = turned ^ also ^ is_other
        return True


def _rounded(readers: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Moments and nodes, with moments put earlier for there to be no more than some."""
    ends = sorted({end for end, _ in readers})
    if len(ends) <= _MOST_LEVELS:
        return readers
    step = len(ends) / _MOST_LEVELS
    ends = [ends[int(n * step)] for n in range(_MOST_LEVELS)]
    return [(ends[bisect_right(ends, end) - 1], node) for end, node in readers]


class Relaxation:
    """What a schedule decides, with the rules of `simulate` as far as a cut can express them.

    Args:
        lives: When what is allocated.
        offload: Whether values may go to the host.
    """

    def __init__(self, lives: Lives, *, offload: bool = False) -> None:
        self._lives = lives
        self._graph = lives.graph
        self._offload = offload
        #: Ops on which no other decision depends, with their seconds.
        self._alone: list[tuple[int, float, list[_Item]]] = []
        #: The seconds of those that are made again in any case.
        self._always = 0.0
        #: All others are nodes of a network. Its edges: with prices, with seconds, without limit.
        self._network = Network()
        self._nodes: dict[int, int] = {}
        self._edges: dict[int, int] = {}
        self._items: list[_Item] = []
        self._seconds: list[tuple[int, float]] = []
        self._fixed: list[int] = []
        #: By value: the nodes that read it, each with the moment until which it is held for them.
        self._readers: dict[int, list[tuple[int, int]]] = {}
        #: Pairs that cost more if both are made again.
        self._paired: list[tuple[int, int, _Item]] = []
        self._pair_spans: dict[int, list[Span]] = {}
        self._sides = _Sides(len(lives.graph.ops))
        self._with = self._groups()
        self._build()
        self._is_turned = {number: self._sides.is_turned(number) for number in self._nodes}

    # --- what is decided together -----------------------------------------------------------------

    def _groups(self) -> list[int]:
        """By op: the one with which it is made again, and only with that; itself if there is none.

        Such an op is read by one other, and to keep that is better, or the only choice.
        """
        graph, lives = self._graph, self._lives
        result = list(range(len(graph.ops)))
        for number in sorted(graph.needed, reverse=True):
            users = {result[user] for user in lives.users[number]}
            if len(users) == 1 and not lives.is_asked[number] and not graph.ops[number].forced:
                user = users.pop()
                if not graph.ops[number].can_keep or self._is_better(user, number):
                    result[number] = user
        return result

    def _is_better(self, user: int, number: int) -> bool:
        """Whether to keep ``user`` is better than to keep ``number`` for it to be made from."""
        graph, lives = self._graph, self._lives
        mine, other = graph.results[number], graph.results[user]
        if len(mine) != 1 or len(other) != 1 or not graph.ops[user].can_keep:
            return False
        if self._can_send(number) and not self._can_send(user):
            return False
        a, b = graph.values[mine[0]], graph.values[other[0]]
        if len(lives.of_memory[a.memory]) > 1 or a.nbytes < b.nbytes:
            return False
        if lives.is_asked[user] and lives.horizon[user] < lives.end[other[0]]:
            return False
        return graph.memories[a.memory].dies <= graph.memories[b.memory].dies

    def _can_send(self, number: int) -> bool:
        return self._offload and self._graph.ops[number].can_send

    # --- the network ------------------------------------------------------------------------------

    def _build(self) -> None:
        graph, lives = self._graph, self._lives
        seconds: dict[int, float] = {}
        reads: dict[int, list[int]] = {}
        for number in sorted(graph.needed):
            op, to = graph.ops[number], self._with[number]
            if not op.forced:
                seconds[to] = seconds.get(to, 0.0) + op.seconds + graph.rerun_cost
                reads.setdefault(to, []).extend(op.reads)
        wanted = {number: self._wanted(number, reads[number]) for number in seconds}
        pairs = self._pairs(seconds, reads)
        self._turn(wanted, pairs)
        together = {graph.values[value].op for values in wanted.values() for value in values}
        together |= {number for pair in self._paired for number in pair[:2]}
        for number in sorted(seconds):
            if wanted[number] or number in together or not lives.is_asked[number]:
                self._add(number, seconds[number], wanted[number])
            elif self._is_choice(number):
                self._alone.append((number, seconds[number], self._kept(number)))
            else:
                self._always += seconds[number]
        for number in sorted(self._nodes):
            for value in graph.results[number]:
                self._link(number, value)
        for user, number, item in self._paired:
            ends = self._nodes[user], self._nodes[number]
            item.edge = self._network.edge(*(ends[::-1] if self._sides.is_turned(user) else ends))
            self._items.append(item)

    def _pairs(
        self, seconds: dict[int, float], reads: dict[int, list[int]]
    ) -> list[tuple[int, int, _Item]]:
        """Two ops of which one reads what the other makes, and what it costs to make both again.

        That is there, then, from when the first is asked for, though the other is asked for later.
        Of several that read a value, the one counts that is most likely to be made again.
        """
        graph, lives = self._graph, self._lives
        found: dict[int, int] = {}
        for user in sorted(seconds, key=seconds.__getitem__):
            for read in reads[user]:
                is_wanted = lives.given[read] and not graph.ops[graph.values[read].op].forced
                if is_wanted and graph.values[read].op != user:
                    found.setdefault(read, user)
        result = []
        for read, user in found.items():
            value = graph.values[read]
            span = (lives.first[user], lives.end[read])
            if spans := without(span, lives.free[value.memory]):
                self._pair_spans[read] = spans
                result.append((user, value.op, _Item(value.nbytes, spans, False)))
        return sorted(result, key=lambda pair: -pair[2].nbytes)

    def _turn(self, wanted: dict[int, set[int]], pairs: list[tuple[int, int, _Item]]) -> None:
        """Decide which ops are on the side of the source if they are made again.

        Those on which others depend, as these do. If a pair is to cost more when both are made
        again, one of them has to be on the side of the sink. Not all pairs can have that.
        """
        for number, values in wanted.items():
            for value in values:
                self._sides.join(number, self._graph.values[value].op, is_other=False)
        for pair in pairs:
            if self._sides.join(pair[0], pair[1], is_other=True):
                self._paired.append(pair)

    def _is_choice(self, number: int) -> bool:
        return self._graph.ops[number].can_keep or self._can_send(number)

    def _wanted(self, number: int, reads: Iterable[int]) -> set[int]:
        """Of what an op reads, that which is not there anyway for as long as the op wants it."""
        graph, lives = self._graph, self._lives
        result = set()
        for read in reads:
            op = graph.values[read].op
            if self._with[op] == number or graph.ops[op].forced:
                continue
            if not lives.is_asked[op] or lives.end[read] < lives.horizon[number]:
                result.add(read)
        return result

    def _add(self, number: int, seconds: float, wanted: Iterable[int]) -> None:
        lives = self._lives
        node = self._nodes[number] = self._network.node()
        self._edges[number] = self._edge(number, node, 1)
        self._seconds.append((self._edges[number], seconds))
        for read in wanted:
            self._readers.setdefault(read, []).append((lives.horizon[number], node))
        if not lives.is_asked[number]:
            return
        if not self._is_choice(number):
            self._fixed.append(self._edge(number, 0, node))
            return
        for item in self._kept(number):
            item.edge = self._edge(number, 0, node)
            self._items.append(item)

    def _edge(self, number: int, a: int, b: int) -> int:
        """A new edge, for an op that may be on the other side."""
        if self._sides.is_turned(number):
            a, b = (1 - b if b < 2 else b), (1 - a if a < 2 else a)
        return self._network.edge(a, b)

    def _kept(self, number: int) -> list[_Item]:
        """What an op makes and backward asks for."""
        end = self._lives.end
        return [self._item(v, end[v]) for v in self._graph.results[number] if end[v] >= 0]

    def _item(self, value: int, end: int, less: _Item | None = None) -> _Item:
        each = self._graph.values[value]
        spans = self._lives.held(value, end)
        return _Item(each.nbytes, spans, self._can_send(each.op), less)

    def _link(self, number: int, value: int) -> None:
        """Lead from those that read a value to the op that makes it.

        The longer the value is held for a reader, the more there is to pay, and never twice: the
        readers enter at as many levels, from each of which it goes on to that below. If they are
        many, it is taken to be held for some a little less long.
        """
        node = self._nodes[number]
        readers = _rounded(self._readers.get(value, ()))
        if not self._is_choice(number):
            self._fixed += [self._edge(number, reader, node) for _, reader in readers]
            return
        end = self._lives.end[value]
        less = self._item(value, end) if end >= 0 else None
        below = -1
        for end in sorted({end for end, _ in readers}):
            level = self._network.node()
            if below >= 0:
                self._fixed.append(self._edge(number, level, below))
            entries = [reader for at, reader in readers if at == end]
            self._fixed += [self._edge(number, reader, level) for reader in entries]
            less = self._item(value, end, less)
            less.edge = self._edge(number, level, node)
            self._items.append(less)
            below = level

    # --- solving ----------------------------------------------------------------------------------

    @property
    def most(self) -> float:
        """The seconds that reruns can take."""
        seconds = self._always + sum(each for _, each, _ in self._alone)
        return seconds + sum(each for _, each in self._seconds)

    @property
    def paired(self) -> dict[int, list[Span]]:
        """By value: when it counts if it is made again together with something that reads it."""
        return self._pair_spans

    def solve(
        self,
        moments: list[float],
        send: float = math.inf,
        fines: Mapping[int, float] = MappingProxyType({}),
    ) -> Solution:
        """The cheapest at a price for a byte at each moment, and for a byte that is sent.

        Args:
            moments: The prices of a byte, by moment.
            send: That of a byte that is sent.
            fines: By op: what is to be paid besides its seconds if it is made again.
        """
        prices = _Prices([0.0, *accumulate(moments)], send)
        cost = seconds = self._always
        taken: list[_Item] = []
        again = set()
        for number, each, items in self._alone:
            price = sum([item.price(prices) for item in items])
            fine = fines.get(number, 0.0)
            if price < each + fine:
                cost += price
                taken += items
            else:
                cost += each + fine
                seconds += each
                again.add(number)
        cost += self._cut(prices, fines)
        beyond, to = self._network.levels(), self._network.to
        is_cut = [beyond[to[edge + 1]] >= 0 > beyond[to[edge]] for edge in range(0, len(to), 2)]
        seconds += sum([each for edge, each in self._seconds if is_cut[edge // 2]])
        taken += [item for item in self._items if is_cut[item.edge // 2]]
        change = [0] * (len(moments) + 1)
        sent = sum([item.take(prices, change) for item in taken])
        held = accumulate(change)
        memory = [least + more for least, more in zip(self._lives.least, held, strict=False)]
        again.update(n for n, at in self._nodes.items() if (beyond[at] < 0) == self._is_turned[n])
        return Solution(cost, seconds, sent, memory, frozenset(again))

    def _cut(self, prices: _Prices, fines: Mapping[int, float]) -> float:
        room = self._network.room
        room[:] = [0.0] * len(room)
        for edge, each in self._seconds:
            room[edge] = each
        for number, fine in fines.items():
            if number in self._edges:
                room[self._edges[number]] += fine
        for item in self._items:
            room[item.edge] = item.price(prices)
        most = max(room, default=0.0)
        for edge in self._fixed:
            room[edge] = math.inf
        return self._network.fill(most)
