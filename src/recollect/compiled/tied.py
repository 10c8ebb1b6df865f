"""Schedules for steps in which one compiled graph serves several calls (P4).

All calls of a graph from one compiled module save the same. Equal modules that were compiled one by
one share their code, too; each of them may have code of its own, but every variant has to be
compiled. So there are few, and a schedule for such a step says which variant each module gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import permutations

from recollect.compiled.merge import Decided, Merged
from recollect.graph.graph import Schedule
from recollect.planning.solving.pool import Pool, Solution, best_of
from recollect.planning.solving.solve import Solver

#: How many solutions for calls that are free to differ are looked at.
_LOOKED_AT = 24
#: How many decisions for equal modules are tried in pairs, and with how many places to change.
_PAIRED = 6
_PLACES = 8

#: The compiled module and the joint graph of a call.
Unit = tuple[int, str]


def unit_of(merged: Merged, sites: Sequence[int], call: int) -> Unit:
    """What calls have in common that cannot differ."""
    return sites[call], merged.parts[call].key


class TiedSolver:
    """As `Solver`, for a step whose calls are tied.

    ``solver`` finds schedules in which all calls may differ; ``sites``: by call, the number of its
    compiled module.
    """

    def __init__(self, solver: Solver, merged: Merged, sites: Sequence[int]) -> None:
        self._solver = solver
        self._merged = merged
        self._units = [unit_of(merged, sites, call) for call in range(len(merged.parts))]

    def least_solution(self) -> Solution:
        """The solution with the lowest peak."""
        return self.frontier()[0]

    def solve(self, budget: int) -> Solution | None:
        """The quickest solution that stays within ``budget`` bytes, if there is one."""
        found = filter(None, (pool.under(budget) for pool in self._pools))
        return min(found, key=lambda each: each.outcome.seconds, default=None)

    def solve_here(self, budget: int) -> Solution | None:
        """`solve` without offload; None if nothing is offloaded anyway."""
        here, away = self._pools
        return here.under(budget) if away.count else None

    def frontier(self) -> list[Solution]:
        """All solutions that no other dominates: ascending peaks, descending seconds."""
        return best_of(each for pool in self._pools for each in pool.frontier())

    @cached_property
    def _pools(self) -> tuple[Pool, Pool]:
        """The solutions that offload nothing, and the others."""
        pools = Pool(self._merged.graph), Pool(self._merged.graph)
        for schedule in self._tied():
            pools[bool(schedule.offloaded)].try_out(schedule)
        return pools

    def _free(self) -> list[Solution]:
        """A few solutions for calls that are free to differ."""
        found = self._solver.frontier()
        found = [*found[:: max(1, len(found) // _LOOKED_AT)], found[-1]]
        here = (self._solver.solve_here(each.outcome.peak) for each in found)
        by_schedule = {each.schedule: each for each in (*found, *here) if each is not None}
        return [*by_schedule.values()]

    def _tied(self) -> Iterator[Schedule]:
        merged, keys = self._merged, [key for _, key in self._units]
        everything = Schedule(frozenset(merged.graph.choices))
        yield self._with(
            [merged.decided(call, everything) for call in range(len(keys))], everything
        )
        seen: Counter[tuple[str, Decided, int | None]] = Counter()
        for solution in self._free():
            like = solution.schedule
            decided = [(key, merged.decided(call, like)) for call, key in enumerate(keys)]
            seen.update((*each, like.ahead) for each in decided)
            usual = dict(each for each, _ in reversed(Counter(decided).most_common()))
            for key, own in dict.fromkeys(decided):  # all calls of each graph decide the same
                chosen = {**usual, key: own}
                yield self._with([chosen[each] for each in keys], like)
        yield from self._in_pairs(seen)

    def _with(self, decided: Sequence[Decided], like: Schedule) -> Schedule:
        """Calls that cannot differ decide as the first of them."""
        first = dict(zip(reversed(self._units), reversed(decided), strict=True))
        return self._merged.together([first[unit] for unit in self._units], like)

    def _in_pairs(self, seen: Counter[tuple[str, Decided, int | None]]) -> Iterator[Schedule]:
        """The first modules decide in one way, the others in another."""
        keys = [key for _, key in self._units]
        main = Counter(keys).most_common(1)[0][0]
        common = (each for each, _ in seen.most_common())
        chosen = [(each, ahead) for key, each, ahead in common if key == main][:_PAIRED]
        calls = [n for n, key in enumerate(keys) if key == main]
        least = self._solver.least_solution().schedule
        others = [self._merged.decided(n, least) for n in range(len(keys))]
        places = range(1, len(calls), max(1, len(calls) // _PLACES))
        everything = sum(value.nbytes for value in self._merged.graph.values)
        for (early, ahead), (late, _) in permutations(chosen, 2):
            like = replace(least, limit=everything, ahead=ahead)
            for place in places:
                decided = [*others]
                for number, call in enumerate(calls):
                    decided[call] = early if number < place else late
                yield self._with(decided, like)
