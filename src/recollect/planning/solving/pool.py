"""The schedules that are known for a graph, each simulated; of them, those none is better than."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import Outcome, simulate

__all__ = ["Pool", "Solution"]


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and what it comes to."""

    schedule: Schedule
    outcome: Outcome


class Pool:
    """Solutions in the order of their peaks, each quicker than the one before it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[Schedule, Outcome] = {}
        self._peaks: list[int] = []
        self._best: list[Solution] = []
        #: How often a step was simulated.
        self.count = 0

    def try_out(self, schedule: Schedule) -> Outcome:
        """Simulate a schedule, and remember it if it is of use."""
        outcome = self._known.get(schedule)
        if outcome is None:
            outcome = self._known[schedule] = simulate(self._graph, schedule)
            self.count += 1
            self._add(Solution(schedule, outcome))
        return outcome

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
        """The quickest that stays within a budget."""
        at = bisect_right(self._peaks, budget)
        return self._best[at - 1] if at else None

    def frontier(self) -> list[Solution]:
        """All that none is better than, ascending in bytes."""
        return list(self._best)
