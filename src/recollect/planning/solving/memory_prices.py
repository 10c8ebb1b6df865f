"""The prices of memory, per byte and event, that give the best lower bound for a budget.

At any prices, the cost of the cheapest choice (`relaxation`), less the worth of the budget at them,
is a lower bound on the seconds of recomputation (Lagrange). Better prices come from the cheapest
mixture of known choices that is within the budget (`lp`): its dual prices give another choice,
until its cost and the bound are close (Dantzig and Wolfe).
"""

from __future__ import annotations

import math
from collections import Counter

from recollect.graph.graph import Graph
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
#: The most units of memory to round budgets to.
_MOST_UNITS = 8


class PriceSearch:
    """Finds the best prices for a budget."""

    def __init__(self, live: Liveness, relaxation: Relaxation, budget: int) -> None:
        self._relaxation = relaxation
        self._least = live.least
        #: By event: the bytes that may be allocated.
        self._limits = _limits(live, budget)
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
        self._send = 0.0

    def run(self, link: float = math.inf) -> float:
        """A lower bound on the seconds of recomputation if ``link`` bytes can be offloaded."""
        best = 0.0
        for _ in range(self._rounds):
            cut = self._relaxation.solve(self._prices, self._send)
            best = max(best, cut.cost - self._worth(link))
            self._found.append(cut)
            reached = self._mix(link)
            while self._add_event():
                reached = self._mix(link)
            if reached - best <= CLOSE * self._plain:
                break
        return best if best <= self._relaxation.most * (1 + _EXCESS) else math.inf

    def _worth(self, link: float) -> float:
        """The worth of the budget and the link at the prices."""
        rest = sum([self._prices[n] * (self._limits[n] - self._least[n]) for n in self._events])
        return rest + self._send * link if self._send else rest

    def _mix(self, link: float) -> float:
        """Find the cheapest mixture, its weights and its prices; return its cost."""
        found, budget = self._found, self._budget
        rows = [[each.memory[now] / budget for each in found] for now in self._events]
        limits = [self._limits[now] / budget for now in self._events]
        if link < math.inf:
            rows.append([each.sent / link for each in found])
            limits.append(1.0)
        costs = [each.seconds for each in found]
        reached, self._weights, worth = best_mixture(costs, rows, limits)
        self._prices = [0.0] * len(self._least)
        for now, each in zip(self._events, worth, strict=False):
            self._prices[now] = each / budget
        self._send = worth[-1] / link if link < math.inf else 0.0
        return reached

    def _add_event(self) -> bool:
        """Give a price to the event at which the mixture exceeds the budget most, if any does."""
        parts = zip(self._weights, self._found, strict=True)
        scales = [(weight, cut.memory) for weight, cut in parts if weight > 0]
        most, event = 0.0, -1
        for now, limit in enumerate(self._limits):
            excess = sum([weight * memory[now] for weight, memory in scales]) - limit
            if excess > most:
                most, event = excess, now
        if most <= self._budget * _EXCESS or event in self._events:
            return False
        self._events.append(event)
        return True


def _limits(live: Liveness, budget: int) -> list[int]:
    """By event: the most bytes up to the budget that whole values can fill.

    If the large values are all multiples of some unit, the part of the budget beyond the last
    multiple is useful for small ones only.
    """
    units = _units(live.graph)
    limits = []
    for least in live.least:
        room = budget - least
        most = min(
            (room - room % unit + min(room % unit, rest) for unit, rest in units), default=room
        )
        limits.append(least + most)
    return limits


def _units(graph: Graph) -> list[tuple[int, int]]:
    """Common divisors of the large values, each with the bytes of all other values."""
    counts = Counter(graph.values[v].nbytes for n in graph.needed for v in graph.results[n])
    rest = sum(nbytes * count for nbytes, count in counts.items())
    unit, units = 0, []
    for nbytes in sorted(counts, reverse=True):
        unit = math.gcd(unit, nbytes)
        rest -= nbytes * counts[nbytes]
        if unit > rest:
            units.append((unit, rest))
    return units[-_MOST_UNITS:]
