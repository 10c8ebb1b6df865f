"""A lower bound on the step time of any schedule within a budget.

A plan shows how far it is above this bound, so that users know what is left to gain. The bound
relaxes `simulate`: it leaves out some of the memory and adds none. At an event at least these bytes
are allocated:

1. fixed bytes; what forward itself still holds; one copy of each value that backward has
   unpacked, kept or recomputed (`Liveness`);
2. values that are kept and will be unpacked;
3. values that are kept for another op to be recomputed from: `simulate` holds them until the
   tensors for which that op is recomputed are dead.

At any prices per byte and event, the cost of the cheapest choice (`relaxation`), less the worth of
the budget at them, is a lower bound on the seconds of recomputation (Lagrange). Better prices come
from the cheapest mixture of known choices that is within the budget, a small linear program: its
dual prices give another choice, until its cost and the bound are close (Dantzig and Wolfe). With a
link to the host there is a third choice for a value, which takes no memory but time on the link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from recollect.graph.graph import Graph
from recollect.graph.simulate import simulate_plain
from recollect.planning.solving.relaxation import Cut, Liveness, Relaxation

#: The error of a bound by rounding.
_ROUNDING = 1e-9
#: Steps of the bisection for the time that the link has.
_GUESSES = 8
#: Prices are improved until the bound is this close to the best that prices can do, as a part of
#: the plain time; in no more rounds than that, and fewer the more ops there are.
_CLOSE = 2e-4
_MOST_ROUNDS = 60
_FEWEST_ROUNDS = 12
_WORK = 120_000
#: Exceeding the budget by this part of it does not count.
_EXCESS = 1e-6
#: The cost of the first choice in a mixture, relative to recomputing everything.
_EXPENSIVE = 1.25
#: Of the linear program: what counts as zero, and when it gives up.
_NOTHING = 1e-12
_MOST_PIVOTS = 500


def lower_bound(graph: Graph, budget: int, *, offload: bool = False) -> float:
    """A lower bound on the seconds of schedules within ``budget`` bytes; infinite: none fits.

    ``offload``: whether they may offload results.
    """
    if simulate_plain(graph).peak <= budget:
        return graph.plain_seconds
    offload = offload and graph.link is not None
    live = Liveness(graph)
    if max(live.least, default=graph.base) > budget:
        return math.inf
    if offload:
        reruns = _with_link(live, budget)
    else:
        reruns = _PriceSearch(live, Relaxation(live), budget).run()
    return graph.plain_seconds + graph.engine_cost + reruns * (1 - _ROUNDING)


def _with_link(live: Liveness, budget: int) -> float:
    """A lower bound on the seconds of recomputation if values may be offloaded.

    All offloaded bytes cross the link before forward ends, in which nothing is recomputed, and come
    back after the first tensor is unpacked. So the time of a step limits the bytes that it can
    offload, and these limit the time that it can save: the bound is where the two meet.
    """
    graph = live.graph
    assert graph.link is not None
    first = next((n for n, each in enumerate(graph.events) if each.unpacks), 0)
    ahead = sum(event.seconds for event in graph.events[:first])
    last = max((n for n, each in enumerate(graph.events) if each.op >= 0), default=-1)
    forward = sum(event.seconds for event in graph.events[: last + 1])
    high = _PriceSearch(live, Relaxation(live), budget).run()
    search = _PriceSearch(live, Relaxation(live, offload=True), budget)
    low = best = search.run()
    for _ in range(_GUESSES):
        guess = (low + high) / 2
        whole = graph.plain_seconds + guess
        room = min(graph.link.out_rate * (forward + guess), graph.link.in_rate * (whole - ahead))
        room = max(1.0, room)  # a step may have no time at all
        reached = search.run(room)
        best = max(best, min(guess, reached))
        if reached >= guess:
            low = guess
        else:
            high = guess
        if high - low <= _CLOSE * whole:
            break
    return best


class _PriceSearch:
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
            # Less the worth of the budget and the link at the prices.
            rooms = [self._prices[n] * (self._budget - self._least[n]) for n in self._events]
            worth = sum(rooms)
            if self._offload_price:
                worth += self._offload_price * link_bytes
            best = max(best, cut.cost - worth)
            self._found.append(cut)
            reached = self._mix(link_bytes)
            while self._add_event():
                reached = self._mix(link_bytes)
            if reached - best <= _CLOSE * self._plain:
                break
        return best if best <= self._relaxation.most * (1 + _EXCESS) else math.inf

    def _mix(self, link_bytes: float) -> float:
        """Find the cheapest mixture, its weights and its prices; return its cost."""
        found, budget = self._found, self._budget
        rows = [[each.memory[now] / budget for each in found] for now in self._events]
        if link_bytes < math.inf:
            rows.append([each.offloaded / link_bytes for each in found])
        reached, self._weights, worth = best_mixture([each.seconds for each in found], rows)
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


def best_mixture(
    costs: Sequence[float], rows: Sequence[Sequence[float]]
) -> tuple[float, list[float], list[float]]:
    """The least cost of a mixture of columns, their weights, which add up to one, and row prices.

    The sum of each row, so weighted, is at most one. That of the first column alone is.
    """
    first = costs[0]
    table = [[each - row[0] for each in row[1:]] for row in rows]
    table.append([1.0] * (len(costs) - 1))
    room = [1.0 - row[0] for row in rows] + [1.0]
    for number, row in enumerate(table):
        row += [float(number == other) for other in range(len(table))]
        row.append(max(0.0, room[number]))
    gains = [cost - first for cost in costs[1:]] + [0.0] * (len(table) + 1)
    basis = [len(costs) - 1 + number for number in range(len(table))]
    _improve(table, gains, basis)
    weights = [0.0] * len(costs)
    for row, column in zip(table, basis, strict=True):
        if column < len(costs) - 1:
            weights[column + 1] = row[-1]
    weights[0] = max(0.0, 1.0 - sum(weights))
    prices = [max(0.0, gain) for gain in gains[len(costs) - 1 : -2]]
    return first - gains[-1], weights, prices


def _improve(table: list[list[float]], gains: list[float], basis: list[int]) -> None:
    """The simplex method, on a table whose last column is the rest of each limit."""
    for pivot in range(_MOST_PIVOTS):
        column = _entering(gains, careful=pivot > _MOST_PIVOTS // 2)
        if column < 0:
            return
        leaving = min(
            (row[-1] / row[column], basis[number], number)
            for number, row in enumerate(table)
            if row[column] > _NOTHING
        )[2]
        chosen = table[leaving]
        factor = chosen[column]
        chosen[:] = [each / factor for each in chosen]
        for row in (*table, gains):
            if row is not chosen and (factor := row[column]):
                row[:] = [a - factor * b for a, b in zip(row, chosen, strict=True)]
        basis[leaving] = column


def _entering(gains: list[float], *, careful: bool) -> int:
    """The column that gains most; or the first that gains anything, which avoids cycles."""
    scale = max(abs(gain) for gain in gains) or 1.0
    best, found = -_NOTHING * scale, -1
    for column, gain in enumerate(gains[:-1]):
        if gain < best:
            best, found = gain, column
            if careful:
                break
    return found
