"""Offloading: candidates in which part of the kept values goes to the host.

A copy costs no time as long as it overlaps with computation. The values that are made first are
unpacked last: they have the longest time to be copied out and back, and take memory for the longest
time. So the first values that a schedule keeps are offloaded, as many as the link can take during
forward. They are fetched as backward frees the memory of the last, early enough to be there when
they are unpacked.

Where a step runs several compiled graphs, each hides its own copies: of each the first values.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import uses_under
from recollect.planning.solving.pool import Pool, Solution

#: Values to try: the share of the bytes that the link can take; the share of these that may be
#: fetched ahead; and how early fetching begins, as a multiple of the time that it takes.
_Grid = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
_COARSE: _Grid = (1.0, 0.6), (0.06, 0.12, 0.3), (1.2, 3.0)
_FINE: _Grid = (1.1, 0.95, 0.8, 0.3), (0.03, 0.09, 0.2, 0.5), (1.0, 1.5, 5.0)
#: For large steps: the values that are best most often, so that more solutions get a try.
_COARSE_FEW: _Grid = (1.0,), (0.06, 0.3), (1.2,)
_FINE_FEW: _Grid = (0.95, 0.6), (0.03, 0.2), (1.0,)
_FEW_TRIES = 400
#: For one budget: how many solutions get a try; how they fetch, as above; and how much more they
#: offload at most than the link can take during forward.
_BASES = 6
_FETCHES = (0.06, 1.2), (0.3, 1.2)
_OVER_CAPACITY = 1.2
#: A result that is this many times smaller than the largest is not worth a copy.
_SMALL = 64


class Offloader:
    """Adds variants of schedules that offload to a pool."""

    def __init__(self, graph: Graph, pool: Pool) -> None:
        self._graph, self._pool = graph, pool
        self._choices = frozenset(graph.choices)
        #: By event: when it ends in the plain step.
        self._clock = list(accumulate(event.seconds for event in graph.events))

    def add(self, tries: int) -> None:
        """Add variants of the known solutions that offload part of what they keep."""
        coarse, fine = (_COARSE, _FINE) if tries >= _FEW_TRIES else (_COARSE_FEW, _FINE_FEW)
        self._try_grid(self._pool.frontier(), coarse, tries // 2)
        # Where that helped, other values may help more.
        offloading = [each for each in self._pool.frontier() if each.schedule.offloaded]
        self._try_grid(offloading, fine, tries - tries // 2)

    def add_for(self, bases: Sequence[Solution], budget: int) -> None:
        """Add solutions for one budget: of others, with just as much offloaded as it takes.

        ``bases``: solutions that offload nothing, in ascending bytes.
        """
        above = [each.schedule for each in bases if each.outcome.peak > budget]
        for kept in above[:: max(1, len(above) // _BASES)]:
            for ahead, lead in _FETCHES:
                self._fit(kept, budget, ahead, lead)

    def _try_grid(self, solutions: list[Solution], grid: _Grid, tries: int) -> None:
        if not solutions:
            return
        limit = self._pool.count + tries
        count = max(1, min(len(solutions), tries // math.prod(map(len, grid))))
        step = (len(solutions) - 1) / max(1, count - 1)
        for number in sorted({round(n * step) for n in range(count)}):
            for schedule in self._variants(solutions[number].schedule, grid):
                if self._pool.count >= limit:
                    return
                self._pool.try_out(schedule)

    def _variants(self, schedule: Schedule, grid: _Grid) -> Iterator[Schedule]:
        """The schedule with some of the kept values offloaded."""
        shares, aheads, leads = grid
        # The plain step keeps results that no plan can keep.
        kept = (schedule.kept | schedule.offloaded) & self._choices
        ops = self._worth_a_copy(Schedule(kept))
        capacity = self._capacity(ops)
        for share in shares:
            offloaded = frozenset(ops[: round(capacity * share)])
            if offloaded:
                yield from self._fetched(Schedule(kept - offloaded, offloaded), aheads, leads)

    def _fit(self, schedule: Schedule, budget: int, ahead: float, lead: float) -> None:
        """Offload as few values of a schedule as it takes to be within a budget."""
        kept = schedule.kept & self._choices
        ops = self._worth_a_copy(Schedule(kept))
        low, high = 1, min(len(ops), math.ceil(_OVER_CAPACITY * self._capacity(ops)))
        while low <= high:
            middle = (low + high) // 2
            offloaded = frozenset(ops[:middle])
            (found,) = self._fetched(Schedule(kept - offloaded, offloaded), (ahead,), (lead,))
            if self._pool.evaluate(found).peak <= budget:
                high = middle - 1
            else:
                low = middle + 1

    def _fetched(
        self, schedule: Schedule, aheads: tuple[float, ...], leads: tuple[float, ...]
    ) -> Iterator[Schedule]:
        """The schedule with several limits and begins of fetching ahead."""
        link = self._graph.link
        assert link is not None
        sizes = [self._size(op) for op in schedule.offloaded]
        offloaded, largest = sum(sizes), max(sizes)
        if self._graph.calls:  # each begins to fetch with its backward
            by_call = Counter[int]()
            for op in schedule.offloaded:
                by_call[self._graph.call_of(op)] += self._size(op)
            most = max(by_call.values())
            for ahead in sorted({max(round(most * share), largest) for share in aheads}):
                yield Schedule(schedule.kept, schedule.offloaded, offloaded, ahead)
            return
        needed = self._first_unpack(schedule)
        for ahead in sorted({max(round(offloaded * share), largest) for share in aheads}):
            for lead in leads:
                start = self._clock[needed] - lead * ahead / link.in_rate
                begin = self._tickets_left(schedule, bisect_left(self._clock, start))
                yield Schedule(schedule.kept, schedule.offloaded, offloaded, ahead, begin)

    def _capacity(self, ops: list[int], last: int | None = None) -> int:
        """How many of ``ops`` can be copied out during forward, or until ``last`` has run."""
        link = self._graph.link
        assert link is not None
        ran = self._graph.tables.ran
        end = self._clock[max(ran) if last is None else ran[last]]
        clock = 0.0
        for count, op in enumerate(ops):
            clock = max(clock, self._clock[ran[op]]) + self._size(op) / link.out_rate
            if clock > end:
                return count
        return len(ops)

    def _first_unpack(self, schedule: Schedule) -> int:
        values = self._graph.values
        unpacks = [
            self._graph.tables.unpacks[number]
            for number, saved in enumerate(self._graph.saved)
            if values[saved.value].op in schedule.offloaded
        ]
        return min([*unpacks, len(self._clock) - 1])

    def _tickets_left(self, schedule: Schedule, event: int) -> int:
        """How many saved tensors that are not on the device the engine counts at an event."""
        graph = self._graph
        here = schedule.kept | graph.forced
        frees = [
            graph.tables.frees[number]
            for number, saved in enumerate(graph.saved)
            if graph.values[saved.value].op not in here
        ]
        return max((n + 1 for n, end in enumerate(frees) if end >= event), default=0)

    def _worth_a_copy(self, schedule: Schedule) -> list[int]:
        """The kept ops that backward needs and that are worth offloading, in order."""
        graph = self._graph
        saved = {tensor.value for tensor in graph.saved}
        uses = uses_under(graph, schedule)
        found = [
            op
            for op in sorted(schedule.kept)
            if graph.ops[op].can_offload
            and not graph.ops[op].forced
            and any(value in saved or uses[value] for value in graph.results[op])
        ]
        largest = max((self._size(op) for op in found), default=0)
        found = [op for op in found if self._size(op) * _SMALL >= largest]
        if not graph.calls:
            return found
        chosen = list[int]()
        for first, end in pairwise((*graph.calls, len(graph.ops))):
            own = [op for op in found if first <= op < end]
            chosen += own[: self._capacity(own, end - 1)]
        return chosen

    def _size(self, op: int) -> int:
        return sum(self._graph.values[value].nbytes for value in self._graph.results[op])
