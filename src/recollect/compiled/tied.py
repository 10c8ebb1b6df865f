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

#: How many variants of the code of equal modules there may be.
_VARIANTS = 3
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

    Args:
        solver: Finds schedules in which all calls may differ.
        merged: The step.
        sites: By call: the number of its compiled module.
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
        merged, graph = self._merged, self._merged.graph
        calls = range(len(merged.parts))
        choices = Schedule(frozenset(graph.choices))
        yield self._with([merged.decided(call, choices) for call in calls], choices)
        seen: Counter[tuple[str, Decided, int | None]] = Counter()
        for solution in self._free():
            like = solution.schedule
            decided = [merged.decided(call, like) for call in calls]
            seen.update((self._units[call][1], decided[call], like.ahead) for call in calls)
            yield self._with(self._reduced(decided), like)
            for call in calls:  # all calls of a graph as one of them
                key, own = self._units[call][1], decided[call]
                others = [self._units[each][1] == key for each in calls]
                mixed = [own if o else d for o, d in zip(others, decided, strict=True)]
                yield self._with(mixed, like)
        yield from self._in_pairs(seen)

    def _with(self, decided: Sequence[Decided], like: Schedule) -> Schedule:
        """Calls that cannot differ decide as the first of them."""
        first = dict(zip(reversed(self._units), reversed(decided), strict=True))
        return self._merged.together([first[unit] for unit in self._units], like)

    def _reduced(self, decided: Sequence[Decided]) -> list[Decided]:
        """The same with few variants of each graph: others become the one that is most like."""
        found = [*decided]
        for key in {key for _, key in self._units}:
            calls = [n for n, unit in enumerate(self._units) if unit[1] == key]
            common = [each for each, _ in Counter(decided[n] for n in calls).most_common(_VARIANTS)]
            for call in calls:
                own = decided[call]
                found[call] = min(common, key=lambda each: self._distance(call, each, own))
        return found

    def _distance(self, call: int, first: Decided, second: Decided) -> int:
        """By how many bytes two decisions for a call differ."""
        part = self._merged.parts[call]
        ops = [n for one, other in zip(first, second, strict=True) for n in one ^ other]
        return sum(part.values[value].nbytes for n in ops for value in part.ops[n].makes)

    def _in_pairs(self, seen: Counter[tuple[str, Decided, int | None]]) -> Iterator[Schedule]:
        """The first modules decide in one way, the others in another."""
        keys = [unit[1] for unit in self._units]
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
