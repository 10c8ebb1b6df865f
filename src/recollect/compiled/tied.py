"""Schedules for steps in which one compiled graph serves several calls (P4).

All calls of a graph from one compiled module save the same. Equal modules that were compiled one by
one share their code, too; each of them may have code of its own, but every variant has to be
compiled. So there are few, and a schedule for such a step says which variant each module gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations

from recollect.compiled.merge import Merged
from recollect.graph.graph import Schedule
from recollect.planning.solving.pool import Pool, Solution
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
        self._pool: Pool | None = None

    def least_solution(self) -> Solution:
        """The solution with the lowest peak."""
        return self.frontier()[0]

    def solve(self, budget: int) -> Solution | None:
        """The quickest solution that stays within ``budget`` bytes, if there is one."""
        return self._solutions().under(budget)

    def solve_here(self, _: int) -> None:
        """The same without offload: nothing is offloaded in a step of several graphs."""

    def frontier(self) -> list[Solution]:
        """All solutions that no other dominates: ascending peaks, descending seconds."""
        return self._solutions().frontier()

    def _solutions(self) -> Pool:
        if self._pool is None:
            self._pool = Pool(self._merged.graph)
            for schedule in self._tied():
                self._pool.try_out(schedule)
        return self._pool

    def _tied(self) -> Iterator[Schedule]:
        merged, graph = self._merged, self._merged.graph
        calls = range(len(merged.parts))
        free = self._solver.frontier()
        step = max(1, len(free) // _LOOKED_AT)
        choices = Schedule(frozenset(graph.choices))
        yield self._with([merged.decided(call, choices) for call in calls])
        seen: Counter[tuple[str, frozenset[int]]] = Counter()
        for solution in (*free[::step], free[-1]):
            decided = [merged.decided(call, solution.schedule) for call in calls]
            seen.update((self._units[call][1], decided[call]) for call in calls)
            yield self._with(self._reduced(decided))
            for call in calls:  # all calls of a graph as one of them
                key, own = self._units[call][1], decided[call]
                others = [self._units[each][1] == key for each in calls]
                yield self._with([own if o else d for o, d in zip(others, decided, strict=True)])
        yield from self._in_pairs(seen)

    def _with(self, decided: Sequence[frozenset[int]]) -> Schedule:
        """Calls that cannot differ decide as the first of them."""
        first = dict(zip(reversed(self._units), reversed(decided), strict=True))
        return self._merged.together([first[unit] for unit in self._units])

    def _reduced(self, decided: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        """The same with few variants of each graph: others become the one that is most like."""
        found: list[frozenset[int]] = list(decided)
        for key in {key for _, key in self._units}:
            calls = [n for n, unit in enumerate(self._units) if unit[1] == key]
            common = [kept for kept, _ in Counter(decided[n] for n in calls).most_common(_VARIANTS)]
            for call in calls:
                own = decided[call]
                found[call] = min(common, key=lambda kept: self._distance(call, kept, own))
        return found

    def _distance(self, call: int, kept: frozenset[int], other: frozenset[int]) -> int:
        """By how many bytes two decisions for a call differ."""
        part = self._merged.parts[call]
        made = [part.values[value].nbytes for n in kept ^ other for value in part.ops[n].makes]
        return sum(made)

    def _in_pairs(self, seen: Counter[tuple[str, frozenset[int]]]) -> Iterator[Schedule]:
        """The first modules decide in one way, the others in another."""
        keys = [unit[1] for unit in self._units]
        main = Counter(keys).most_common(1)[0][0]
        chosen = [kept for (key, kept), _ in seen.most_common() if key == main][:_PAIRED]
        calls = [n for n, key in enumerate(keys) if key == main]
        least = self._solver.least_solution().schedule
        others = [self._merged.decided(n, least) for n in range(len(keys))]
        places = range(1, len(calls), max(1, len(calls) // _PLACES))
        for early, late in permutations(chosen, 2):
            for place in places:
                decided = list(others)
                for number, call in enumerate(calls):
                    decided[call] = early if number < place else late
                yield self._with(decided)
