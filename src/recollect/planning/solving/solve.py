"""The solver: what to keep so that a step fits into a budget and takes the least time (P4).

1. The ops that may be recomputed are put in a row, which is cut where few bytes cross
   (`linearization`). Each segment gets candidates, which are best at some price per byte
   (`segments`). A dynamic program picks cuts and candidates for all budgets (`chain`).
2. These are simulated, and local search improves them (`search`).
3. If offload is allowed, some of the kept values are offloaded (`offload`), once more for each
   budget that is asked for.

All of this makes one pool of solutions (`pool`). The answer for a budget is the best of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import combinations

from recollect.graph.graph import Graph, Schedule
from recollect.planning.solving.chain import Chain
from recollect.planning.solving.linearization import Linearization, far_readers
from recollect.planning.solving.modules import kept_between_blocks
from recollect.planning.solving.offload import Offloader
from recollect.planning.solving.pool import Pool, Solution
from recollect.planning.solving.search import Search

#: The budgets for which the search speeds solutions up.
_BUDGETS = 40
#: The work of the search: ops and events to simulate in all, twice as many for a small step; and
#: the most simulations, in all and for each op to choose.
_WORK = 1_000_000
_SMALL_STEP = 4_000
_TRIES = 3_000
_TRIES_PER_CHOICE = 100
#: The part of the link's rates that a schedule with slack relies on. On an H200 a step whose copies
#: go on during all of forward took longer than one without copies: each copy was a little late, and
#: the step waited for every one. With this much slack a step waits for none, and still gains most.
_SLACK = 0.6
#: The least simulations for offload; and those for a budget that is asked for.
_OFFLOAD_TRIES = 120
_TRIES_PER_BUDGET = 120
#: How many solutions of the dynamic program are simulated: as many as this work allows, or this if
#: the solver is to be quick, within these limits.
_SAMPLED_WORK = 400_000
_ROUGHLY_SAMPLED_WORK = 200_000
_SAMPLES = 44, 100
#: The lower part of the range of budgets, which gets most random changes.
_LOW = 0.1
#: With more choices than this, only one linearization is tried.
_MANY_CHOICES = 1_500


@dataclass(eq=False)
class Solver:
    """Finds schedules for a graph."""

    graph: Graph
    _: KW_ONLY
    offload: bool = False  #: whether results may be offloaded, if the graph has a link to the host
    rough: bool = False  #: skip most of the search, and take about a tenth of the time
    #: Called with the part of the work that is done, from 0 to 1.
    progress: Callable[[float], None] = lambda _: None
    _pool: Pool | None = field(default=None, init=False)
    #: The solutions that offload nothing, if others may; and the budgets that were looked at.
    _here: list[Solution] = field(default_factory=list, init=False)
    _asked: set[int] = field(default_factory=set, init=False)
    _with_slack: dict[int, Solution | None] = field(default_factory=dict, init=False)

    def least_solution(self) -> Solution:
        """The solution with the lowest peak."""
        return self._solutions().frontier()[0]

    def solve(self, budget: int) -> Solution | None:
        """The quickest solution that stays within ``budget`` bytes, if there is one."""
        pool = self._solutions()
        if self._here and not self.rough and budget not in self._asked:
            self._asked.add(budget)
            Offloader(self.graph, pool).add_for(self._here, budget)
            search = Search(self.graph, pool, Linearization(self.graph))
            search.speed_up(budget, _TRIES_PER_BUDGET)
        return pool.under(budget)

    def solve_here(self, budget: int) -> Solution | None:
        """`solve` without offload; None if offload is not allowed anyway."""
        self._solutions()
        fitting = [each for each in self._here if each.outcome.peak <= budget]
        return fitting[-1] if fitting else None

    def solve_with_slack(self, budget: int) -> Solution | None:
        """`solve` with copies that have more time; None if offload does not help then."""
        best = self._solutions().under(budget)
        if best is None or not best.schedule.offloaded:
            return None
        if budget not in self._with_slack:
            self._with_slack[budget] = self._offload_with_slack(budget)
        return self._with_slack[budget]

    def _offload_with_slack(self, budget: int) -> Solution | None:
        assert self.graph.link is not None
        link = self.graph.link.slowed(_SLACK)
        graph = replace(self.graph, link=link)
        pool = Pool(graph)
        in_forward = link.out_rate * sum(each.seconds for each in graph.events[: graph.turn])
        bases = [each for each in self._here if each.outcome.peak <= budget + in_forward]
        Offloader(graph, pool).add_for(bases, budget)
        Search(graph, pool, Linearization(graph)).speed_up(budget, _TRIES_PER_BUDGET)
        found, here = pool.under(budget), self.solve_here(budget)
        if found is None or (here and here.outcome.seconds <= found.outcome.seconds):
            return None
        return replace(found, schedule=replace(found.schedule, link_share=_SLACK))

    def frontier(self) -> list[Solution]:
        """All solutions that no other dominates: ascending peaks, descending seconds."""
        return self._solutions().frontier()

    def _solutions(self) -> Pool:
        if self._pool is None:
            self._pool = self._build()
            self.progress(1.0)
        return self._pool

    def _build(self) -> Pool:
        graph, pool = self.graph, Pool(self.graph)
        choices = frozenset(graph.choices)
        pool.try_out(Schedule(choices))
        if not graph.needed <= choices | graph.forced:
            # The plain step keeps results that no plan can keep.
            pool.try_out(Schedule(frozenset(range(len(graph.ops)))))
        work = max(1, len(graph.ops) + len(graph.events))
        affordable = (2 * _WORK if work <= _SMALL_STEP else _WORK) // work
        tries = min(_TRIES, affordable, _TRIES_PER_CHOICE * len(choices))
        if 2 ** len(choices) <= tries:
            for count in range(len(choices)):
                for kept in combinations(graph.choices, count):
                    pool.try_out(Schedule(frozenset(kept)))
        elif choices:
            fewest, most = _SAMPLES
            affordable = (_ROUGHLY_SAMPLED_WORK if self.rough else _SAMPLED_WORK) // work
            self._explore(pool, choices, tries, max(fewest, min(most, affordable)))
        if self.offload and graph.link is not None and choices:
            self.progress(0.9)
            self._here = pool.frontier()
            Offloader(graph, pool).add(max(tries, _OFFLOAD_TRIES))
        return pool

    def _explore(self, pool: Pool, choices: frozenset[int], tries: int, samples: int) -> None:
        graph = self.graph
        families = [frozenset[int]()]
        if pins := far_readers(graph) & choices:
            # Unless they are kept, no two segments are equal: that takes long, and seldom pays.
            families = [*families, pins] if len(choices) <= _MANY_CHOICES else [pins]
        # What checkpointing by hand does: a plan is never worse.
        pool.try_out(Schedule(kept_between_blocks(graph) & choices))
        for number, pins in enumerate(families):
            self.progress((1 + 4 * number) / (2 + 4 * len(families)))
            _sample(pool, Chain(Linearization(graph, pins)), choices, samples)
        self.progress(0.8)
        if self.rough:
            Search(graph, pool, Linearization(graph)).lower_peak(tries // 10)
        else:
            _improve(graph, pool, tries)


def _sample(pool: Pool, chain: Chain, choices: frozenset[int], most: int) -> None:
    """Try about ``most`` solutions of the dynamic program, evenly spread."""
    count = len(chain)
    step = max(1.0, (count - 1) / max(1, most - 1))
    chosen = {min(count - 1, round(n * step)) for n in range(min(most, count))} | {0, count - 1}
    for number in sorted(chosen):
        pool.try_out(Schedule(chain.kept(number) & choices))


def _improve(graph: Graph, pool: Pool, tries: int) -> None:
    search = Search(graph, pool, Linearization(graph))
    # With few tries there is one round, with fewer budgets.
    rounds = 2 if tries >= 1000 else 1
    budgets = max(10, min(_BUDGETS, tries // 10))
    for _ in range(rounds):
        search.lower_peak(tries // (4 * rounds))
        found = pool.frontier()
        low, high = found[0].outcome.peak, found[-1].outcome.peak
        for number in range(budgets):
            # The lower the budget, the more a byte is worth: low budgets are closer together.
            budget = low + round((high - low) * (number / (budgets - 1)) ** 2)
            search.speed_up(budget, tries // (2 * rounds * budgets))
        search.perturb(tries // (4 * rounds))
    if rounds > 1:
        # Most is left to gain at low budgets.
        search.perturb(tries // 2, _LOW)
    low = pool.frontier()[0].outcome.peak
    search.splice(low, tries // 20)
    search.speed_up(low, tries // 10)
