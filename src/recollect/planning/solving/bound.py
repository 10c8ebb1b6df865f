"""How fast a step can be at best within a budget: what no schedule can be below.

A relaxation of `simulate`: of what it counts as memory some is left out, and nothing added.

1. At a moment are allocated at least: what is not for the plan to change; what forward itself
   still holds; of the values that backward has been given, one copy each, kept or made again.
2. Besides, what is kept and will be asked for.
3. Besides, what is kept for another op to be made from: `simulate` holds it until the tensors for
   which that op runs again are dead.

4. Besides, of two ops that are made again of which one reads what the other makes, the results of
   the other, if they are asked for later: they are there from when the first is asked for.

5. Besides, what comes together along a row of ops that are all made again (`windows`).

Ops on which a budget leaves no choice are decided on first, and then some others, both ways, as
far as that raises the bound (`branch`).

Each moment at which the budget may be exceeded is given a price for a byte. With prices, each op is
kept or made again, whichever is cheaper, and what is made again needs what it reads: a minimum cut.
Whatever the prices, its cost is a lower bound (Lagrange). Better prices come from mixing the
solutions that were found so that the mixture keeps to the budget at the least cost, and solving for
the prices of that mixture, until both agree (Dantzig and Wolfe).

With a link to the host there is a third choice, which takes no memory but time on the link.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from recollect.graph.graph import Graph
from recollect.graph.simulate import simulate_plain
from recollect.planning.solving.branch import decided, least_of_all
from recollect.planning.solving.conflict_sets import Window, Windows
from recollect.planning.solving.liveness import Lives
from recollect.planning.solving.lp import best_mixture
from recollect.planning.solving.relaxation import Relaxation, Solution

__all__ = ["lower_bound"]

#: Prices are improved until the bound is as close as this to the best that prices can do, or so
#: often; less often the more ops there are.
_CLOSE = 2e-4
_MOST_ROUNDS = 60
_FEWEST_ROUNDS = 12
_WORK = 120_000
#: The part of a budget by which it may be exceeded without notice.
_EXCESS = 1e-6
#: Where the search for prices begins, to the seconds that reruns can take at most.
_DEAR = 1.25
#: How many units of memory are tried.
_MOST_UNITS = 8
#: What rounding may have added to a bound.
_ROUNDING = 1e-9
#: For windows: how often to see what comes together, to the number of ops; in how many solutions of
#: a mixture to look for them; and by how much they have to be exceeded.
_TRIES = 100_000
_COLUMNS = 4
_CLEAR = 1e-3
#: How many bounds to work out to decide on ops, to the number of ops. As many times that if a bound
#: is so far below the best that is known, and there are few ops: with many it hardly helps.
_BRANCHES = 3_000
_MORE = 40
_FAR = 0.04
_FEW_OPS = 150
#: On how many ops.
_CANDIDATES = 4
#: How often prices are improved for that.
_FEW = 6
#: How often the time that the link has is guessed.
_GUESSES = 8


def lower_bound(graph: Graph, budget: int, *, offload: bool = False, known: float = 0.0) -> float:
    """Seconds that no schedule whose peak is within ``budget`` can be below; infinite if none is.

    Args:
        graph: The step.
        budget: Bytes.
        offload: Whether schedules may send to the host what ops make that `Op.can_send` is true of.
        known: The seconds of the best schedule that is known: more is done to come near them.
    """
    if simulate_plain(graph).peak <= budget:
        return graph.plain_seconds
    if offload and graph.link is not None:
        lives = Lives(graph, offload=True)
        fits = max(lives.least, default=graph.base) <= budget
        reruns = _with_link(lives, budget) if fits else math.inf
    else:
        reruns = _without_link(graph, budget, known - graph.engine_cost)
    return graph.plain_seconds + graph.engine_cost + reruns * (1 - _ROUNDING)


def _without_link(graph: Graph, budget: int, known: float) -> float:
    """The seconds of reruns that no schedule can be below that sends nothing."""

    def bound(above: _Search | None, graph: Graph) -> _Search | None:
        lives = decided(graph, budget)
        if lives is None:
            return None
        search = _Search(lives, Relaxation(lives), budget, above)
        search.run()
        return search

    def most(reruns: float) -> int:
        count = max(1, len(graph.needed))
        is_far = known > (1 + _FAR) * (graph.plain_seconds + reruns)
        return (_MORE if is_far and count <= _FEW_OPS else 1) * _BRANCHES // count

    root = bound(None, graph)
    return math.inf if root is None else least_of_all(root, bound, most)


def _with_link(lives: Lives, budget: int) -> float:
    """The same if values may be sent.

    All that is sent has crossed the link when forward is over, in which nothing is made again, and
    comes back after the first ask. So if the step takes no more than some time, so many bytes can
    be sent at most, and it takes at least the seconds that follow from that: the bound is where the
    two meet.
    """
    graph = lives.graph
    assert graph.link is not None
    first = next((n for n, each in enumerate(graph.moments) if each.asks), 0)
    ahead = sum(moment.seconds for moment in graph.moments[:first])
    last = max((n for n, each in enumerate(graph.moments) if each.op >= 0), default=-1)
    forward = sum(moment.seconds for moment in graph.moments[: last + 1])
    high = _Search(lives, Relaxation(lives), budget, link=True).run()
    search = _Search(lives, Relaxation(lives, offload=True), budget, link=True)
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


def _limits(lives: Lives, budget: int) -> list[int]:
    """By moment: the most bytes up to the budget that whole values can fill.

    If the large ones are all multiples of some unit, what is left of the budget beyond the last
    multiple is of use for small ones only.
    """
    units = _units(lives.graph)
    limits = []
    for least in lives.least:
        room = budget - least
        most = min(
            (room - room % unit + min(room % unit, rest) for unit, rest in units), default=room
        )
        limits.append(least + most)
    return limits


def _units(graph: Graph) -> list[tuple[int, int]]:
    """Units of which all values are multiples but for some; and the bytes of those, if not more."""
    counts = Counter(graph.values[v].nbytes for n in graph.needed for v in graph.results[n])
    rest = sum(nbytes * count for nbytes, count in counts.items())
    unit, units = 0, []
    for nbytes in sorted(counts, reverse=True):
        unit = math.gcd(unit, nbytes)
        rest -= nbytes * counts[nbytes]
        if unit > rest:
            units.append((unit, rest))
    return units[-_MOST_UNITS:]


@dataclass(frozen=True, slots=True)
class _Prices:
    """Of a byte at each moment, of making all of a window again, and of a byte that is sent."""

    moments: list[float]
    windows: list[float]
    send: float


class _Search:
    """For the best prices."""

    def __init__(
        self,
        lives: Lives,
        relaxation: Relaxation,
        budget: int,
        above: _Search | None = None,
        *,
        link: bool = False,
    ) -> None:
        self.lives = lives
        self.seconds = 0.0
        self._relaxation = relaxation
        self._least = lives.least
        #: By moment: the bytes that may be allocated.
        self._limits = _limits(lives, budget)
        self._budget = budget
        self._plain = lives.graph.plain_seconds
        rounds = _WORK // max(1, len(lives.graph.needed))
        self._rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, rounds)) if above is None else _FEW
        #: The moments that have prices, and what was found so far.
        self._moments: list[int] = []
        # Mixing begins with something that is within any budget, and dearer than any schedule.
        dear = relaxation.most * _DEAR
        self._found: list[Solution] = [Solution(dear, dear, 0, lives.least)]
        self._weights: list[float] = [1.0]
        #: Ops that cannot all be made again.
        # Of the others, what they count may be counted anyway once more is decided.
        known = [] if above is None else above.windows
        self.windows: list[Window] = [each for each in known if each.moment < 0]
        moments = [0.0] * len(self._least) if above is None else above.prices.moments
        #: The best so far, and those to try next.
        self.prices: _Prices = _Prices(moments, [], 0.0)
        self._next = self.prices
        tries = 0 if above or link else _TRIES // max(1, len(lives.graph.needed))
        self._finder = Windows(lives, self._limits, relaxation.paired, budget, tries)

    def run(self, link: float = math.inf) -> float:
        """The seconds of reruns that no schedule can be below that is within the budget.

        Args:
            link: How many bytes may be sent.
        """
        best = 0.0
        for _ in range(self._rounds):
            prices = self._next
            moments = prices.moments[:]
            for window, price in zip(self.windows, prices.windows, strict=False):
                if window.moment >= 0:
                    moments[window.moment] += price
            solution = self._relaxation.solve(moments, prices.send, self._fines(prices))
            worth = solution.cost - self._owed(prices, link)
            if worth >= best:
                best, self.prices = worth, prices
            self._found.append(solution)
            reached = self._mix(link)
            while self._watch():
                reached = self._mix(link)
            if reached - best <= _CLOSE * self._plain and not self._forbid():
                break
        self.seconds = best if best <= self._relaxation.most * (1 + _EXCESS) else math.inf
        return self.seconds

    def _fines(self, prices: _Prices) -> dict[int, float]:
        fines: dict[int, float] = {}
        for window, price in zip(self.windows, prices.windows, strict=False):
            for number in window.ops:
                fines[number] = fines.get(number, 0.0) + price * window.nbytes
        return fines

    def _forbid(self) -> bool:
        """Take up what cannot all be made again, but is, more or less; whether there is any."""
        before = len(self.windows)
        if self._finder.tries <= 0:
            return False
        parts, memory = self._parts(), self._memory()
        pairs = sorted(zip(self._weights, self._found, strict=True), key=lambda each: -each[0])
        for weight, each in pairs[:_COLUMNS]:
            if weight > 0 and each.again:
                for window in self._finder.find(each.again, memory, parts):
                    if window not in self.windows and self._excess(window) > _CLEAR:
                        self.windows.append(window)
        return len(self.windows) > before

    def _excess(self, window: Window) -> float:
        """By which part of itself the mixture exceeds what a window allows."""
        pairs = zip(self._weights, self._found, strict=True)
        taken = sum([weight * self._take(window, each) for weight, each in pairs if weight])
        return (taken - self._allowed(window)) / self._scale(window)

    def _take(self, window: Window, each: Solution) -> int:
        """The bytes that a solution takes of what a window allows."""
        more = len(window.ops & each.again) * window.nbytes
        now = window.moment
        return more if now < 0 else more + each.memory[now] - self._least[now]

    def _allowed(self, window: Window) -> int:
        now, allowed = window.moment, (len(window.ops) - 1) * window.nbytes
        return allowed if now < 0 else allowed + self._limits[now] - self._least[now]

    def _scale(self, window: Window) -> int:
        return len(window.ops) * window.nbytes

    def _parts(self) -> dict[int, float]:
        """By op: in how much of the mixture it is made again."""
        again: dict[int, float] = defaultdict(float)
        for weight, each in zip(self._weights, self._found, strict=True):
            for number in each.again:
                again[number] += weight
        return again

    def undecided(self) -> list[int]:
        """The ops that are most nearly kept by half."""
        again, whole = self._parts(), sum(self._weights[1:])
        halves = [(min(again[n], whole - again[n]), n) for n in self.lives.graph.choices]
        return [n for _, n in sorted(halves, reverse=True)[:_CANDIDATES]]

    def _owed(self, prices: _Prices, link: float) -> float:
        """What the budget and the link are worth."""
        priced = [(now, price) for now, price in enumerate(prices.moments) if price]
        rest = sum([price * (self._limits[now] - self._least[now]) for now, price in priced])
        pairs = zip(self.windows, prices.windows, strict=False)
        rest += sum([price * self._allowed(window) for window, price in pairs])
        return rest + prices.send * link if prices.send else rest

    def _mix(self, link: float) -> float:
        """What a mixture can reach; sets its weights, and the prices at which it does."""
        found = self._found
        rows = [[each.memory[now] / self._budget for each in found] for now in self._moments]
        limits = [self._limits[now] / self._budget for now in self._moments]
        for window in self.windows:
            scale = self._scale(window)
            rows.append([self._take(window, each) / scale for each in found])
            limits.append(self._allowed(window) / scale)
        if link < math.inf:
            rows.append([each.sent / link for each in found])
            limits.append(1.0)
        costs = [each.seconds for each in found]
        reached, self._weights, worth = best_mixture(costs, rows, limits)
        prices = [0.0] * len(self._least)
        for now, each in zip(self._moments, worth, strict=False):
            prices[now] = each / self._budget
        fines = worth[len(self._moments) : len(self._moments) + len(self.windows)]
        fines = [each / self._scale(w) for each, w in zip(fines, self.windows, strict=True)]
        self._next = _Prices(prices, fines, worth[-1] / link if link < math.inf else 0.0)
        return reached

    def _watch(self) -> bool:
        """Take up the moment at which the mixture exceeds the budget most; whether there is one."""
        excess = [m - limit for m, limit in zip(self._memory(), self._limits, strict=True)]
        moment = max(range(len(excess)), key=excess.__getitem__)
        if excess[moment] <= self._budget * _EXCESS or moment in self._moments:
            return False
        self._moments.append(moment)
        return True

    def _memory(self) -> list[float]:
        """By moment: what the mixture has allocated."""
        parts = [(w, s.memory) for w, s in zip(self._weights, self._found, strict=True) if w > 0]
        scales = [w for w, _ in parts]
        memories = zip(*(m for _, m in parts), strict=True)
        return [sum([w * m for w, m in zip(scales, each, strict=True)]) for each in memories]
