"""Local search: small changes to known schedules, each simulated.

The dynamic program (`chain`) solves segments one by one, at one price per byte. The search gains
what is left: values that fit into the rest of the budget, an op kept in place of another, and a
lower peak by changes near the event with the peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from recollect.graph.graph import Graph, Schedule
from recollect.planning.solving.linearization import Linearization
from recollect.planning.solving.pool import Pool, Solution

#: With fewer simulations left than this, no exchange is looked for.
_FEW = 4
#: The most ops to drop, and to keep in their place, in an exchange.
_CANDIDATES = 60
#: How many solutions are spliced in; and the part of a budget by which exceeding it is slight.
_SPLICES = 3
_SLIGHT = 0.002


@dataclass(eq=False)
class _KeptOps:
    """The ops that are kept and recomputed, updated as one op is kept or dropped."""

    _reads: list[tuple[int, ...]]  #: by op: the ops whose results it reads
    _cost: list[float]  #: by op: the seconds to recompute it
    _saved: list[int]  #: the ops whose results backward unpacks
    kept: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    #: By op: how many recomputed ops and saved tensors need its results.
    _users: list[int] = field(default_factory=list)

    def set(self, kept: frozenset[int]) -> None:
        """Keep these ops."""
        self.kept = set(kept)
        self.again = set()
        self._users = [0] * len(self._reads)
        for op in self._saved:
            self._add_user(op)

    def _add_user(self, op: int) -> float:
        """Add a user of an op; return the seconds that this costs."""
        seconds = 0.0
        stack = [op]
        while stack:
            op = stack.pop()
            self._users[op] += 1
            if self._users[op] == 1 and op not in self.kept:
                self.again.add(op)
                seconds += self._cost[op]
                stack += self._reads[op]
        return seconds

    def _remove_user(self, op: int) -> float:
        """Remove a user of an op; return the seconds that this saves."""
        seconds = 0.0
        stack = [op]
        while stack:
            op = stack.pop()
            self._users[op] -= 1
            if not self._users[op] and op in self.again:
                self.again.discard(op)
                seconds += self._cost[op]
                stack += self._reads[op]
        return seconds

    def keep(self, op: int) -> float:
        """Keep an op; return the seconds that this saves."""
        self.kept.add(op)
        if op not in self.again:
            return 0.0
        self.again.discard(op)
        return self._cost[op] + sum(self._remove_user(read) for read in self._reads[op])

    def drop(self, op: int) -> float:
        """Do not keep an op; return the seconds that this costs."""
        self.kept.discard(op)
        if not self._users[op]:
            return 0.0
        self.again.add(op)
        return self._cost[op] + sum(self._add_user(read) for read in self._reads[op])

    def gain(self, op: int) -> float:
        """The seconds that keeping an op would save."""
        seconds = self.keep(op)
        self.drop(op)
        return seconds

    def loss(self, op: int) -> float:
        """The seconds that dropping an op would cost."""
        seconds = self.drop(op)
        self.keep(op)
        return seconds

    def is_used(self, op: int) -> bool:
        """Whether backward needs the results of an op."""
        return self._users[op] > 0


class Search:
    """Adds better schedules to a pool."""

    def __init__(self, graph: Graph, pool: Pool, line: Linearization) -> None:
        self._graph = graph
        self._pool = pool
        self._line = line
        values = graph.values
        reads = [
            () if op.forced else tuple(dict.fromkeys(values[read].op for read in op.reads))
            for op in graph.ops
        ]
        saved = sorted({values[tensor.value].op for tensor in graph.saved})
        self._state = _KeptOps(reads, graph.rerun_seconds, saved)
        self._size = [sum(values[value].nbytes for value in results) for results in graph.results]
        self._order = graph.choices
        self._choices = frozenset(self._order)
        #: The start of the search. Its offloaded values stay offloaded.
        self._start = Schedule(frozenset())

    def _load(self, start: Schedule, kept: frozenset[int]) -> frozenset[int]:
        """Start from a schedule that keeps ``kept``; return those of them that backward needs."""
        self._start = start
        kept &= self._choices
        self._state.set(kept | self._graph.forced | start.offloaded)
        return frozenset(op for op in kept if self._state.is_used(op))

    def _keeping(self, kept: frozenset[int]) -> Schedule:
        return replace(self._start, kept=kept)

    # --- less time within a budget ----------------------------------------------------------------

    def speed_up(self, budget: int, tries: int) -> None:
        """Improve the quickest schedule within a budget, in at most ``tries`` simulations."""
        found = self._pool.under(budget)
        if found is None:
            return
        start, limit = found.schedule, self._pool.count + tries
        kept = self._fill(self._load(start, start.kept), budget, limit)
        while self._pool.count + _FEW < limit:
            changed = self._exchange(kept, budget, limit)
            if changed is None:
                return
            kept = self._fill(self._load(start, changed), budget, limit)

    def _fits(self, kept: frozenset[int], budget: int) -> bool:
        outcome = self._pool.try_out(self._keeping(kept))
        return outcome is not None and outcome.peak <= budget

    def _fill(self, kept: frozenset[int], budget: int, limit: int) -> frozenset[int]:
        """Keep more ops as long as they fit, those first that save most per byte."""
        for op, _ in self._gains(self._state.again & self._choices):
            if self._pool.count >= limit:
                break
            if op in self._state.again and self._fits(kept | {op}, budget):
                kept |= {op}
                self._state.keep(op)
        return kept

    def _gains(self, ops: Iterable[int]) -> list[tuple[int, float]]:
        """The seconds that keeping each op would save, the most per byte first."""
        found = [(op, self._state.gain(op)) for op in sorted(ops)]
        found.sort(key=lambda each: -each[1] / (self._size[each[0]] + 1))
        return found

    def _exchange(self, kept: frozenset[int], budget: int, limit: int) -> frozenset[int] | None:
        seconds = self._pool.evaluate(self._keeping(kept)).seconds
        for _, drop, op in self._exchanges(kept):
            if self._pool.count >= limit:
                return None
            changed = kept - {drop} | {op}
            outcome = self._pool.try_out(self._keeping(changed))
            # The two may depend on each other: the gain of each alone is an estimate.
            if outcome and outcome.peak <= budget and outcome.seconds < seconds:
                return changed
        return None

    def _exchanges(self, kept: frozenset[int]) -> list[tuple[float, int, int]]:
        """Exchanges that save time, ordered by seconds per additional byte."""
        state, size = self._state, self._size
        others = self._gains(state.again & self._choices)[:_CANDIDATES]
        losses = [(state.loss(op) / (size[op] + 1), op) for op in kept]
        found = []
        for _, drop in sorted(losses)[:_CANDIDATES]:
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
        """Join one end of the best schedule within a budget to the rest of one with more memory."""
        start = self._pool.under(budget)
        if start is None or start.schedule.offloaded:
            return
        limit = self._pool.count + tries
        self._start, order = start.schedule, self._order
        kept = start.schedule.kept & self._choices
        for each in self._steepest(start, budget)[:_SPLICES]:
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

    def _steepest(self, start: Solution, budget: int) -> list[Solution]:
        """The solutions over the budget, those first that save most seconds per byte."""

        def slope(each: Solution) -> float:
            saved = start.outcome.seconds - each.outcome.seconds
            return saved / (each.outcome.peak - budget + _SLIGHT * budget)

        found = [each for each in self._pool.frontier() if each.outcome.peak > budget]
        return sorted(
            [each for each in found if not each.schedule.offloaded], key=slope, reverse=True
        )

    # --- random changes ---------------------------------------------------------------------------

    def perturb(self, tries: int, part: float = 1.0) -> None:
        """Change known schedules at random, always by the same numbers, in at most ``tries``.

        ``part``: the part of the range of peaks, from the lowest, that is changed.
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
            if not start.offloaded:
                kept = self._load(start, start.kept)
                self._pool.try_out(Schedule(self._changed(kept, draw)))

    def _changed(self, kept: frozenset[int], draw: Random) -> frozenset[int]:
        """Keep or drop up to four ops that are near each other."""
        count = len(self._order)
        middle = draw.randrange(count)
        reach = min(count, draw.choice((3, 6, 12, 24)))
        start = max(0, min(count - reach, middle - reach // 2))
        near = self._order[start : start + reach]
        return kept.symmetric_difference(draw.sample(near, min(reach, draw.randint(1, 4))))

    # --- a lower peak -----------------------------------------------------------------------------

    def lower_peak(self, tries: int) -> None:
        """Lower the lowest known peak, in at most ``tries`` simulations."""
        limit = self._pool.count + tries
        while self._pool.count < limit and self._lower_peak_once(limit):
            pass

    def _lower_peak_once(self, limit: int) -> bool:
        best = self._pool.frontier()[0]
        kept = self._load(best.schedule, best.schedule.kept)
        for changed in self._changes(kept, best.outcome.busiest):
            if self._pool.count >= limit:
                return False
            outcome = self._pool.try_out(Schedule(changed))
            if outcome is not None and outcome.peak < best.outcome.peak:
                return True
        return False

    def _changes(self, kept: frozenset[int], busiest: int) -> Iterator[frozenset[int]]:
        """Schedules that differ in one or two ops, those near an event of backward first."""
        near = self._near(busiest)
        for op in near:
            yield kept ^ {op}
        near = near[:24]
        for number, op in enumerate(near):
            for other in near[:number]:
                yield kept ^ {op, other}

    def _near(self, event: int) -> list[int]:
        """All choices, those first whose backward is near an event."""
        backward_begins = self._line.backward_begins
        place = next(
            (n for n, at in enumerate(backward_begins) if at <= event), len(backward_begins)
        )
        position = self._line.position
        return sorted(self._choices, key=lambda op: (abs(position[op] + 1 - place), op))
