"""The known schedules of a graph with their simulated peaks and times, and the frontier of these.

All stages of the solver add to one pool, so a budget gets the best of all that was ever tried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import Outcome, simulate, simulate_if


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and its outcome."""

    schedule: Schedule
    outcome: Outcome


class Pool:
    """Solutions in the order of their peaks, each quicker than the one before it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[Schedule, Outcome | None] = {}
        self._peaks: list[int] = []
        self._best: list[Solution] = []
        #: How many schedules were tried.
        self.count = 0

    def evaluate(self, schedule: Schedule) -> Outcome:
        """Simulate a schedule, and remember it."""
        outcome = self._known.get(schedule)
        if outcome is None:
            outcome = simulate(self._graph, schedule)
            self._remember(schedule, outcome)
        return outcome

    def try_out(self, schedule: Schedule) -> Outcome | None:
        """`evaluate`, or None if a known schedule is certain to be better."""
        if schedule not in self._known:
            outcome = simulate_if(self._graph, schedule, self._is_useful)
            self._remember(schedule, outcome)
        return self._known[schedule]

    def _remember(self, schedule: Schedule, outcome: Outcome | None) -> None:
        self._known[schedule] = outcome
        self.count += 1
        if outcome is not None:
            self._add(Solution(schedule, outcome))

    def _is_useful(self, peak: int, seconds: float) -> bool:
        at = bisect_right(self._peaks, peak)
        return not at or self._best[at - 1].outcome.seconds > seconds

    def _add(self, solution: Solution) -> None:
        peak, seconds = solution.outcome.peak, solution.outcome.seconds
        at = bisect_right(self._peaks, peak)
        if at and self._best[at - 1].outcome.seconds <= seconds:
            return
        start = at
        while start and self._peaks[start - 1] == peak:
            start -= 1
        stop = at
        while stop < len(self._best) and self._best[stop].outcome.seconds >= seconds:
            stop += 1
        self._best[start:stop] = [solution]
        self._peaks[start:stop] = [peak]

    def under(self, budget: int) -> Solution | None:
        """The quickest solution within a budget."""
        at = bisect_right(self._peaks, budget)
        return self._best[at - 1] if at else None

    def frontier(self) -> list[Solution]:
        """The solutions that no other dominates, in ascending bytes."""
        return list(self._best)


def best_of(solutions: Iterable[Solution]) -> list[Solution]:
    """The solutions that no other dominates, in ascending bytes."""
    found: list[Solution] = []
    for each in sorted(solutions, key=lambda each: (each.outcome.peak, each.outcome.seconds)):
        if not found or each.outcome.seconds < found[-1].outcome.seconds:
            found.append(each)
    return found
