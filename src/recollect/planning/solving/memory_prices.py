"""The prices of memory, per byte and event, that give the best lower bound for a budget.

At any prices, the cost of the cheapest choice (`relaxation`), less the worth of the budget at them,
is a lower bound on the seconds of recomputation (Lagrange). Better prices come from the cheapest
mixture of known choices that is within the budget (`lp`): its dual prices give another choice,
until its cost and the bound are close (Dantzig and Wolfe).
"""

from __future__ import annotations

import math

from recollect.planning.solving.liveness import Liveness
from recollect.planning.solving.lp import best_mixture
from recollect.planning.solving.relaxation import Cut, Relaxation

#: Prices are improved until the bound is this close to the best that prices can do, as a part of
#: the plain time; in no more rounds than that, and fewer the more ops there are.
CLOSE = 2e-4
_MOST_ROUNDS = 60
_FEWEST_ROUNDS = 12
_WORK = 120_000
#: Exceeding the budget by this part of it does not count.
_EXCESS = 1e-6
#: The cost of the first choice in a mixture, relative to recomputing everything.
_EXPENSIVE = 1.25


class PriceSearch:
    """Finds the best prices for a budget."""

    def __init__(self, live: Liveness, relaxation: Relaxation, budget: int) -> None:
        self._relaxation = relaxation
        self._least = live.least
        self._budget = budget
        self._plain = live.graph.plain_seconds
        rounds = _WORK // max(1, len(live.graph.needed))
        self._rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, rounds))
        #: The events that have prices.
        self._events: list[int] = []
        # The first choice is within any budget, and slower than any schedule.
        slowest = relaxation.most * _EXPENSIVE
        self._found = [Cut(slowest, slowest, 0, live.least)]
        self._weights = [1.0]
        self._prices = [0.0] * len(self._least)
        self._offload_price = 0.0

    def run(self, link_bytes: float = math.inf) -> float:
        """A lower bound on the seconds of recomputation if so many bytes can be offloaded."""
        best = 0.0
        for _ in range(self._rounds):
            cut = self._relaxation.solve(self._prices, self._offload_price)
            best = max(best, cut.cost - self._worth(link_bytes))
            self._found.append(cut)
            reached = self._mix(link_bytes)
            while self._add_event():
                reached = self._mix(link_bytes)
            if reached - best <= CLOSE * self._plain:
                break
        return best if best <= self._relaxation.most * (1 + _EXCESS) else math.inf

    def _worth(self, link_bytes: float) -> float:
        """The worth of the budget and the link at the prices."""
        rest = sum([self._prices[n] * (self._budget - self._least[n]) for n in self._events])
        return rest + self._offload_price * link_bytes if self._offload_price else rest

    def _mix(self, link_bytes: float) -> float:
        """Find the cheapest mixture, its weights and its prices; return its cost."""
        found, budget = self._found, self._budget
        rows = [[each.memory[now] / budget for each in found] for now in self._events]
        limits = [1.0] * len(self._events)
        if link_bytes < math.inf:
            rows.append([each.offloaded / link_bytes for each in found])
            limits.append(1.0)
        costs = [each.seconds for each in found]
        reached, self._weights, worth = best_mixture(costs, rows, limits)
        self._prices = [0.0] * len(self._least)
        for now, each in zip(self._events, worth, strict=False):
            self._prices[now] = each / budget
        self._offload_price = worth[-1] / link_bytes if link_bytes < math.inf else 0.0
        return reached

    def _add_event(self) -> bool:
        """Give a price to the event at which the mixture exceeds the budget most, if any does."""
        parts = zip(self._weights, self._found, strict=True)
        scales = [(weight, cut.memory) for weight, cut in parts if weight > 0]
        most, event = 0.0, -1
        for now in range(len(self._least)):
            excess = sum([weight * memory[now] for weight, memory in scales]) - self._budget
            if excess > most:
                most, event = excess, now
        if most <= self._budget * _EXCESS or event in self._events:
            return False
        self._events.append(event)
        return True
