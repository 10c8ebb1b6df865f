"""The solver: what to keep for a step to stay within a budget and take the least time (P4).

1. The ops that may be recomputed are put in a row, which is cut where few bytes cross
   (`linearization`). Each segment has options: choices that are best at some price for memory
   (`select`, `segments`). A dynamic program picks cuts and options for all budgets (`chain`).
2. The simulator judges them, and small changes improve them (`search`).
3. If offload is allowed, some of what is kept goes to the host (`offload`).

All of this depends on the graph alone, and makes one pool of solutions (`pool`). The answer for a
budget is the best of the pool, so more memory never costs time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.planning.solving.chain import Chain
from recollect.planning.solving.linearization import Line, far_readers
from recollect.planning.solving.offload import send_away
from recollect.planning.solving.pool import Pool, Solution
from recollect.planning.solving.search import Search

__all__ = ["Solution", "Solver"]

#: The budgets for which solutions are bettered.
_BUDGETS = 40
#: For the search: ops simulated in all, twice as many if a step has few; and the most simulations,
#: in all and by op to choose.
_WORK = 1_000_000
_FEW = 4_000
_TRIES = 3_000
_TRIES_OF_EACH = 100
#: The least simulations that are spent on what to send to the host.
_SENDINGS = 240
#: The part of the range of budgets that is looked at most closely.
_LOW = 0.1
#: With more choices than that, one way to put them in a row has to do.
_MANY = 1_500


class Solver:
    """Finds what to keep in a graph.

    Args:
        graph: The step.
        offload: Whether results may go to the host, if the graph has a way there.
        rough: Whether a tenth of the work will do: what the dynamic program finds, and the least.
        progress: Told how much of the work is done, from 0 to 1.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        offload: bool = False,
        rough: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._graph = graph
        self._offload = offload and graph.link is not None
        self._is_rough = rough
        self._progress = progress
        self._pool: Pool | None = None

    def least(self) -> Solution:
        """The solution with the lowest peak."""
        return self._solutions().frontier()[0]

    def solve(self, budget: int) -> Solution | None:
        """The quickest solution that stays within ``budget`` bytes, if there is one."""
        return self._solutions().under(budget)

    def frontier(self) -> list[Solution]:
        """All solutions that no other is better than: ascending peaks, descending seconds."""
        return self._solutions().frontier()

    def _solutions(self) -> Pool:
        if self._pool is None:
            self._pool = self._build()
            self._tell(1.0)
        return self._pool

    def _tell(self, done: float) -> None:
        if self._progress is not None:
            self._progress(done)

    def _build(self) -> Pool:
        graph, pool = self._graph, Pool(self._graph)
        choices = frozenset(graph.choices)
        pool.try_out(Schedule(choices))
        if not graph.needed <= choices | graph.forced:
            # Results that no plan can keep are there if there is no plan.
            pool.try_out(Schedule(frozenset(range(len(graph.ops)))))
        work = max(1, len(graph.ops) + len(graph.events))
        affordable = (2 * _WORK if work <= _FEW else _WORK) // work
        tries = min(_TRIES, affordable, _TRIES_OF_EACH * len(choices))
        if 2 ** len(choices) <= tries:
            _try_all(pool, graph.choices)
        elif choices:
            self._explore(pool, choices, tries, max(40, min(100, _WORK // work)))
        if self._offload and choices:
            self._tell(0.9)
            send_away(graph, pool, max(tries, _SENDINGS))
        return pool

    def _explore(self, pool: Pool, choices: frozenset[int], tries: int, samples: int) -> None:
        graph = self._graph
        families = [frozenset[int]()]
        if pins := far_readers(graph) & choices:
            # Without them no two segments are alike: that takes long, and seldom gains anything.
            families = [*families, pins] if len(choices) <= _MANY else [pins]
        for number, pins in enumerate(families):
            self._tell((1 + 4 * number) / (2 + 4 * len(families)))
            _sample(pool, Chain(Line(graph, pins)), choices, samples)
        self._tell(0.8)
        if self._is_rough:
            Search(graph, pool, Line(graph)).lower(tries // 10)
        else:
            _better(graph, pool, tries)


def _try_all(pool: Pool, choices: list[int]) -> None:
    for count in range(len(choices)):
        for kept in combinations(choices, count):
            pool.try_out(Schedule(frozenset(kept)))


def _sample(pool: Pool, chain: Chain, choices: frozenset[int], most: int) -> None:
    """Try out answers for all budgets."""
    count = len(chain)
    step = max(1.0, (count - 1) / max(1, most - 1))
    chosen = {min(count - 1, round(n * step)) for n in range(min(most, count))} | {0, count - 1}
    for number in sorted(chosen):
        pool.try_out(Schedule(chain.kept(number) & choices))


def _better(graph: Graph, pool: Pool, tries: int) -> None:
    search = Search(graph, pool, Line(graph))
    # With few tries to spend there is one round, and fewer budgets that get enough of them.
    rounds = 2 if tries >= 1000 else 1
    budgets = max(10, min(_BUDGETS, tries // 10))
    for _ in range(rounds):
        search.lower(tries // (4 * rounds))
        found = pool.frontier()
        low, high = found[0].outcome.peak, found[-1].outcome.peak
        for number in range(budgets):
            # The lower the budget, the more a byte is worth, and the closer they are.
            budget = low + round((high - low) * (number / (budgets - 1)) ** 2)
            search.quicken(budget, tries // (2 * rounds * budgets))
        search.wander(tries // (4 * rounds))
    if rounds > 1:
        # Where memory is least, most is left to gain.
        search.wander(tries // 2, _LOW)
    low = pool.frontier()[0].outcome.peak
    search.splice(low, tries // 20)
    search.quicken(low, tries // 10)
