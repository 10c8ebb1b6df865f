"""Small changes to a schedule, one after the other, each judged by the simulator.

The segments of a row are judged one by one, and what they keep is the best at some price. What is
left to gain: the bytes that fit in nevertheless, two ops where one is better, and, for the lowest
peak, what is there in the busiest moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.planning.solving.linearization import Line
from recollect.planning.solving.pool import Pool, Solution

__all__ = ["Search"]

#: With fewer simulations left than that it is not worth to look for what to exchange.
_FEW = 4
#: How many ops to drop and to keep instead are looked at.
_SOME = 60
#: How many solutions are spliced in, and the part of a budget by which to exceed it is slight.
_SPLICES = 3
_SLIGHT = 0.002


class _State:
    """What is kept, and what runs again because of that, as one or the other changes."""

    def __init__(self, reads: list[tuple[int, ...]], cost: list[float], asked: list[int]) -> None:
        self._reads = reads
        self._cost = cost
        self._asked = asked
        self.kept: set[int] = set()
        self.again: set[int] = set()
        #: How many want what an op makes.
        self._wanted: list[int] = []

    def set(self, kept: frozenset[int], forced: frozenset[int]) -> None:
        """Keep these."""
        self.kept = set(kept | forced)
        self.again = set()
        self._wanted = [0] * len(self._reads)
        for op in self._asked:
            self._want(op)

    def _want(self, op: int) -> float:
        """One more wants what an op makes; the seconds that takes."""
        seconds = 0.0
        stack = [op]
        while stack:
            op = stack.pop()
            self._wanted[op] += 1
            if self._wanted[op] == 1 and op not in self.kept:
                self.again.add(op)
                seconds += self._cost[op]
                stack += self._reads[op]
        return seconds

    def _give_up(self, op: int) -> float:
        """One less does; the seconds that saves."""
        seconds = 0.0
        stack = [op]
        while stack:
            op = stack.pop()
            self._wanted[op] -= 1
            if not self._wanted[op] and op in self.again:
                self.again.discard(op)
                seconds += self._cost[op]
                stack += self._reads[op]
        return seconds

    def keep(self, op: int) -> float:
        """Keep an op; the seconds that saves."""
        self.kept.add(op)
        if op not in self.again:
            return 0.0
        self.again.discard(op)
        return self._cost[op] + sum(self._give_up(read) for read in self._reads[op])

    def drop(self, op: int) -> float:
        """Do not keep an op; the seconds that costs."""
        self.kept.discard(op)
        if not self._wanted[op]:
            return 0.0
        self.again.add(op)
        return self._cost[op] + sum(self._want(read) for read in self._reads[op])

    def gain(self, op: int) -> float:
        """The seconds that it would save to keep an op."""
        seconds = self.keep(op)
        self.drop(op)
        return seconds

    def loss(self, op: int) -> float:
        """The seconds that it would cost not to keep an op."""
        seconds = self.drop(op)
        self.keep(op)
        return seconds

    def is_useful(self, op: int) -> bool:
        """Whether anybody wants what an op makes."""
        return self._wanted[op] > 0


class Search:
    """Adds to a pool what it finds."""

    def __init__(self, graph: Graph, pool: Pool, line: Line) -> None:
        self._graph = graph
        self._pool = pool
        self._line = line
        values = graph.values
        reads = [
            () if op.forced else tuple(dict.fromkeys(values[read].op for read in op.reads))
            for op in graph.ops
        ]
        cost = [op.seconds + graph.rerun_cost for op in graph.ops]
        self._state = _State(reads, cost, sorted({values[saved.value].op for saved in graph.saved}))
        self._size = [sum(values[value].nbytes for value in results) for results in graph.results]
        self._order = graph.choices
        self._choices = frozenset(self._order)

    def _load(self, schedule: Schedule) -> frozenset[int]:
        """Begin at a schedule; what it keeps to any purpose."""
        self._state.set(schedule.kept & self._choices, self._graph.forced)
        useful = [op for op in schedule.kept & self._choices if self._state.is_useful(op)]
        return frozenset(useful)

    # --- the least seconds within a budget --------------------------------------------------------

    def quicken(self, budget: int, tries: int) -> None:
        """Better the best that is known within a budget, with so many simulations."""
        start = self._pool.under(budget)
        if start is None or start.schedule.away:
            return
        limit = self._pool.count + tries
        kept = self._fill(self._load(start.schedule), budget, limit)
        while self._pool.count + _FEW < limit:
            found = self._exchange(kept, budget, limit)
            if found is None:
                return
            kept = self._fill(self._load(Schedule(found)), budget, limit)

    def _fits(self, kept: frozenset[int], budget: int) -> bool:
        return self._pool.try_out(Schedule(kept)).peak <= budget

    def _fill(self, kept: frozenset[int], budget: int, limit: int) -> frozenset[int]:
        """Keep more, as long as it fits, the best first."""
        for op, _ in self._gains(self._state.again & self._choices):
            if self._pool.count >= limit:
                break
            if op in self._state.again and self._fits(kept | {op}, budget):
                kept |= {op}
                self._state.keep(op)
        return kept

    def _gains(self, ops: Iterable[int]) -> list[tuple[int, float]]:
        """The seconds that it would save to keep each, the most per byte first."""
        found = [(op, self._state.gain(op)) for op in sorted(ops)]
        found.sort(key=lambda each: -each[1] / (self._size[each[0]] + 1))
        return found

    def _exchange(self, kept: frozenset[int], budget: int, limit: int) -> frozenset[int] | None:
        """Keep one op instead of another."""
        seconds = self._pool.try_out(Schedule(kept)).seconds
        for _, drop, op in self._exchanges(kept):
            if self._pool.count >= limit:
                return None
            changed = kept - {drop} | {op}
            outcome = self._pool.try_out(Schedule(changed))
            # The two may have to do with each other: what was worked out for each is a guess.
            if outcome.peak <= budget and outcome.seconds < seconds:
                return changed
        return None

    def _exchanges(self, kept: frozenset[int]) -> list[tuple[float, int, int]]:
        """What saves time if it fits, that which saves bytes as well first."""
        state, size = self._state, self._size
        others = self._gains(state.again & self._choices)[:_SOME]
        losses = [(state.loss(op) / (size[op] + 1), op) for op in kept]
        found = []
        for _, drop in sorted(losses)[:_SOME]:
            known = set(state.again)
            loss = state.drop(drop)
            new = self._gains((state.again - known - {drop}) & self._choices)
            state.keep(drop)
            for op, gain in (*others, *new):
                saved = gain - loss
                if saved > 1e-9 * gain:
                    more = max(0, size[op] - size[drop])
                    found.append((saved / (more + size[op] / 8 + 1), drop, op))
        found.sort(reverse=True)
        return found

    def splice(self, budget: int, tries: int) -> None:
        """Take one end of a row as it is best within a budget, the rest as if there were more."""
        start = self._pool.under(budget)
        if start is None or start.schedule.away:
            return
        limit = self._pool.count + tries
        kept, order = start.schedule.kept & self._choices, self._order
        for each in self._worth_while(start, budget)[:_SPLICES]:
            others = each.schedule.kept & self._choices
            for ops in (order, order[::-1]):
                low, high = 0, len(order)
                while low < high and self._pool.count < limit:
                    middle = (low + high) // 2
                    end = frozenset(ops[:middle])
                    if self._fits(kept & end | others - end, budget):
                        high = middle
                    else:
                        low = middle + 1

    def _worth_while(self, start: Solution, budget: int) -> list[Solution]:
        """Of what takes more memory, that which saves most for it."""

        def worth(each: Solution) -> float:
            saved = start.outcome.seconds - each.outcome.seconds
            return saved / (each.outcome.peak - budget + _SLIGHT * budget)

        found = [each for each in self._pool.frontier() if each.outcome.peak > budget]
        return sorted([each for each in found if not each.schedule.away], key=worth, reverse=True)

    # --- anything ---------------------------------------------------------------------------------

    def wander(self, tries: int, part: float = 1.0) -> None:
        """Change what is known at random, here and there, and see; the same at every call.

        Args:
            tries: How many simulations.
            part: Of the range of peaks that are known, from the lowest, where to begin.
        """
        draw = Random(0)
        limit = self._pool.count + tries
        for _ in range(2 * tries):
            known = self._pool.frontier()
            low, high = known[0].outcome.peak, known[-1].outcome.peak
            if part < 1:
                known = [each for each in known if each.outcome.peak - low <= part * (high - low)]
            start = known[draw.randrange(len(known))].schedule
            if self._pool.count >= limit:
                return
            if not start.away:
                kept = self._load(start)
                self._pool.try_out(Schedule(self._changed(kept, draw)))

    def _changed(self, kept: frozenset[int], draw: Random) -> frozenset[int]:
        """Decides again about some ops that are near to each other."""
        count = len(self._order)
        middle = draw.randrange(count)
        reach = min(count, draw.choice((3, 6, 12, 24)))
        start = max(0, min(count - reach, middle - reach // 2))
        near = self._order[start : start + reach]
        return kept.symmetric_difference(draw.sample(near, min(reach, draw.randint(1, 4))))

    # --- the lowest peak --------------------------------------------------------------------------

    def lower(self, tries: int) -> None:
        """Look for a lower peak than is known, with so many simulations."""
        limit = self._pool.count + tries
        while self._pool.count < limit and self._lower_once(limit):
            pass

    def _lower_once(self, limit: int) -> bool:
        best = self._pool.frontier()[0]
        kept = self._load(best.schedule)
        for changed in self._changes(kept, best.outcome.busiest):
            if self._pool.count >= limit:
                return False
            if self._pool.try_out(Schedule(changed)).peak < best.outcome.peak:
                return True
        return False

    def _changes(self, kept: frozenset[int], busiest: int) -> Iterator[frozenset[int]]:
        """Schedules that differ in one or two ops, those near to a moment of backward first."""
        near = self._near(busiest)
        for op in near:
            yield kept ^ {op}
        near = near[:24]
        for number, op in enumerate(near):
            for other in near[:number]:
                yield kept ^ {op, other}

    def _near(self, event: int) -> list[int]:
        """All choices, those first that are asked for about then."""
        begins = self._line.begins
        place = next((n for n, at in enumerate(begins) if at <= event), len(begins))
        position = self._line.position
        return sorted(self._choices, key=lambda op: (abs(position[op] + 1 - place), op))
