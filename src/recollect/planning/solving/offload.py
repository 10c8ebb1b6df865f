"""What of a schedule to send to the host instead of keeping it.

A copy costs nothing as long as there is enough to compute beside it. What was made first is asked
for last: it has the longest time to leave and to come back, and is the longest in the way. So of
all that a schedule keeps, the first go to the host, as many as the link can take while forward
lasts. They come back as backward frees the memory of what was made last, early enough to be there
when they are asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import uses_under
from recollect.planning.solving.pool import Pool, Solution

__all__ = ["send_away"]

#: What is tried: of what the link can take, the share that is sent; of that, the share that may be
#: fetched ahead; and how much earlier than needed fetching begins, as a multiple of what it takes.
_Ways = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
_FIRST: _Ways = (1.0, 0.6), (0.06, 0.12, 0.3), (1.2, 3.0)
_THEN: _Ways = (1.1, 0.95, 0.8, 0.3), (0.03, 0.09, 0.2, 0.5), (1.0, 1.5, 5.0)
#: How many of the dearest ops are tried that a solution makes again.
_FILLERS = 24
#: A result that is so much smaller than the largest is not worth the copy.
_SMALL = 64


def send_away(graph: Graph, pool: Pool, tries: int) -> None:
    """Add to a pool what comes of its solutions if part of what they keep goes to the host."""
    sender = _Sender(graph)
    here = pool.frontier()
    _try_ways(sender, pool, here, _FIRST, tries // 2)
    # Where that was of use, other ways may be of more.
    better = [solution for solution in pool.frontier() if solution.schedule.away]
    _try_ways(sender, pool, better, _THEN, tries - tries // 2)
    _fill(graph, pool, tries // 2)


def _try_ways(
    sender: _Sender, pool: Pool, solutions: list[Solution], ways: _Ways, tries: int
) -> None:
    if not solutions:
        return
    limit = pool.count + tries
    variants = math.prod(map(len, ways))
    count = max(1, min(len(solutions), tries // variants))
    step = (len(solutions) - 1) / max(1, count - 1)
    for number in sorted({round(n * step) for n in range(count)}):
        for schedule in sender.variants(solutions[number].schedule, ways):
            if pool.count >= limit:
                return
            pool.try_out(schedule)


def _fill(graph: Graph, pool: Pool, tries: int) -> None:
    """Of what solutions that send something make again, keep one more: there may be room for it."""
    limit = pool.count + tries
    for solution in [each for each in pool.frontier() if each.schedule.away]:
        schedule = solution.schedule
        uses = uses_under(graph, schedule)
        again = [
            number
            for number in graph.choices
            if number not in schedule.kept | schedule.away
            and any(uses[value] for value in graph.results[number])
        ]
        again.sort(key=lambda number: graph.ops[number].seconds, reverse=True)
        for number in again[:_FILLERS]:
            if pool.count >= limit:
                return
            pool.try_out(replace(schedule, kept=schedule.kept | {number}))


class _Sender:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._choices = frozenset(graph.choices)
        #: When each moment ends in the plain step, and by ask: when it is asked, when it ends.
        self._clock = list(accumulate(event.seconds for event in graph.events))
        self._made = {event.op: n for n, event in enumerate(graph.events) if event.op >= 0}
        self._asked = [0] * len(graph.saved)
        self._ends = [len(graph.events)] * len(graph.saved)
        for number, event in enumerate(graph.events):
            for saved in event.unpacks:
                self._asked[saved] = number
            for saved in event.frees:
                self._ends[saved] = number

    def variants(self, schedule: Schedule, ways: _Ways) -> Iterator[Schedule]:
        """The schedule with some of what it keeps sent away, in several ways."""
        shares, aheads, leads = ways
        # Plain is among the solutions, and has what no plan can keep.
        kept = (schedule.kept | schedule.away) & self._choices
        ops = self._worth_it(Schedule(kept))
        capacity = self._capacity(ops)
        for share in shares:
            away = frozenset(ops[: round(capacity * share)])
            if away:
                yield from self._fetched(Schedule(kept - away, away), aheads, leads)

    def _fetched(
        self, schedule: Schedule, aheads: tuple[float, ...], leads: tuple[float, ...]
    ) -> Iterator[Schedule]:
        """Ways to fetch what ``schedule`` sends away."""
        link = self._graph.link
        assert link is not None
        sizes = [self._size(op) for op in schedule.away]
        sent, largest = sum(sizes), max(sizes)
        needed = self._first_need(schedule)
        for ahead in sorted({max(round(sent * share), largest) for share in aheads}):
            for lead in leads:
                start = self._clock[needed] - lead * ahead / link.in_rate
                begin = self._tickets_left(schedule, bisect_left(self._clock, start))
                yield Schedule(schedule.kept, schedule.away, sent, ahead, begin)

    def _capacity(self, ops: list[int]) -> int:
        """How many of ``ops`` can be copied out while forward lasts."""
        link = self._graph.link
        assert link is not None
        end = self._clock[max(self._made.values())]
        clock = 0.0
        for count, op in enumerate(ops):
            clock = max(clock, self._clock[self._made[op]]) + self._size(op) / link.out_rate
            if clock > end:
                return count
        return len(ops)

    def _first_need(self, schedule: Schedule) -> int:
        """The moment at which the first of what was sent away is asked for."""
        values = self._graph.values
        asked = [
            self._asked[number]
            for number, saved in enumerate(self._graph.saved)
            if values[saved.value].op in schedule.away
        ]
        return min(asked, default=len(self._clock) - 1)

    def _tickets_left(self, schedule: Schedule, event: int) -> int:
        """How many asks for what is not on the device the engine counts at a moment."""
        graph = self._graph
        here = schedule.kept | graph.forced
        ends = [
            self._ends[number]
            for number, saved in enumerate(graph.saved)
            if graph.values[saved.value].op not in here
        ]
        return max((n + 1 for n, end in enumerate(ends) if end >= event), default=0)

    def _worth_it(self, schedule: Schedule) -> list[int]:
        """What is kept to some purpose and can be sent, in the order of forward."""
        graph = self._graph
        asked = {saved.value for saved in graph.saved}
        uses = uses_under(graph, schedule)
        found = [
            op
            for op in sorted(schedule.kept)
            if graph.ops[op].can_send
            and not graph.ops[op].forced
            and any(value in asked or uses[value] for value in graph.results[op])
        ]
        largest = max((self._size(op) for op in found), default=0)
        return [op for op in found if self._size(op) * _SMALL >= largest]

    def _size(self, op: int) -> int:
        return sum(self._graph.values[value].nbytes for value in self._graph.results[op])
