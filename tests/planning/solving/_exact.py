"""The best schedule there is, by integer programming, for steps of up to a few hundred ops.

A model that is never stricter than `simulate`, which grows until it is strict enough: whatever is
best in the model is simulated. If that exceeds the budget, what the model left out at the point
where it does is added: for that point, which ops have run again by then, and so what is there. If
that had been added already, that one solution is ruled out. So the first solution that keeps to the
budget is the best.

An oracle for tests. Needs scipy, for HiGHS; tests that call it are skipped without.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import simulate
from recollect.planning.solving.relaxation import Liveness
from tests.graph._reference import Run

__all__ = ["solve_exact"]

#: Solvers stop at a gap that is an absolute number: how much a plain step is to be for that.
_SCALE = 1e4
#: A point at which a budget is exceeded is added for each of so many events at a time.
_AT_ONCE = 4
_HALF = 0.5
#: What scipy says of a program without solution.
_INFEASIBLE = 2


def solve_exact(graph: Graph, budget: int, *, seconds: float = 60) -> Schedule | None:
    """The quickest schedule whose peak is within ``budget`` bytes; None if there is none.

    Args:
        graph: The step.
        budget: Bytes.
        seconds: How long to try.

    Raises:
        TimeoutError: If the best has not been found in that time.
    """
    if budget <= 0:
        return None
    if not graph.choices:
        nothing = Schedule(frozenset())
        return nothing if simulate(graph, nothing).peak <= budget else None
    deadline = time.monotonic() + seconds
    model = _Model(graph, budget)
    while True:
        kept = model.solve(deadline)
        if kept is None:
            return None
        watch = _Watch(graph, kept, budget)
        outcome = watch.run()
        if outcome.peak <= budget:
            return Schedule(kept)
        # The worst come first.
        points = sorted(watch.exceeded.values(), key=lambda each: -each[0])
        is_new = [model.add(point) for _, point in points[:_AT_ONCE]]
        if not any(is_new):
            model.rule_out(kept)


@dataclass(frozen=True, slots=True)
class _Point:
    """A point of the step.

    Args:
        event: Its event.
        unpacked: How many saved tensors have been unpacked by then.
        op: The op that is running again for the next of them; -1 if it is that of the event.
    """

    event: int
    unpacked: int
    op: int


class _Watch(Run):
    """A run that notes where the budget is exceeded: by event, by how much at the worst point."""

    def __init__(self, graph: Graph, kept: frozenset[int], budget: int) -> None:
        super().__init__(graph, Schedule(kept))
        self.exceeded: dict[int, tuple[int, _Point]] = {}
        self._budget = budget
        self._unpacked = 0
        self._op = -1

    def _unpack(self, value: int, before: int) -> None:
        super()._unpack(value, before)
        self._unpacked += 1

    def _run_op(self, number: int, before: int) -> None:
        self._op = number
        super()._run_op(number, before)
        self._op = -1

    def _note(self, more: int) -> None:
        super()._note(more)
        excess = self.here + self.states + more + self.graph.base - self._budget
        if excess > self.exceeded.get(self.now, (0,))[0]:
            self.exceeded[self.now] = excess, _Point(self.now, self._unpacked, self._op)


@dataclass(slots=True)
class _Rows:
    """Rows of a program: sums of variables that are at least something."""

    at_least: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)

    def add(self, at_least: float, *terms: tuple[float, int]) -> None:
        row = len(self.at_least)
        self.at_least.append(at_least)
        for factor, column in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.factors.append(factor)


class _Model:
    """An integer program."""

    def __init__(self, graph: Graph, budget: int) -> None:
        self._graph = graph
        self._budget = budget
        self._live = Liveness(graph)
        self._rows = _Rows()
        self._costs: list[float] = []
        self._ops = sorted(n for n in graph.needed if not graph.ops[n].forced)
        self._choices = frozenset(graph.choices)
        #: The saved tensors in the order in which they are unpacked.
        self._order = [number for event in graph.events for number in event.unpacks]
        #: By value: the ops that may run again and read it.
        self._readers: dict[int, list[int]] = {}
        for number in self._ops:
            for read in set(graph.ops[number].reads):
                self._readers.setdefault(read, []).append(number)
        #: By storage that is always kept: until when backward needs it.
        self._forced: dict[int, int] = {}
        for number in graph.forced & graph.needed:
            for value in graph.results[number]:
                storage = graph.values[value].storage
                end = self._live.saved_until[value]
                self._forced[storage] = max(end, self._forced.get(storage, -1))
        #: More than a budget can be exceeded by.
        self._slack = 2.0 * sum(value.nbytes for value in graph.values)
        self._slack += max(op.workspace for op in graph.ops) + sum(op.state for op in graph.ops)
        self._slack += graph.base + max(each.during for each in graph.events)
        self._keep = {number: self._variable() for number in sorted(self._choices)}
        self._ran: dict[int, dict[int, int]] = {}
        self._runs = self._ran_by(len(self._order))
        scale = _SCALE / (graph.plain_seconds or 1.0)
        for number, column in self._runs.items():
            self._costs[column] = (graph.ops[number].seconds + graph.rerun_cost) * scale
        self._points: set[_Point] = set()

    def _variable(self) -> int:
        self._costs.append(0.0)
        return len(self._costs) - 1

    def _ran_by(self, unpacked: int) -> dict[int, int]:
        """By op: the variable that says whether it has run again once so many are unpacked."""
        if unpacked in self._ran:
            return self._ran[unpacked]
        graph = self._graph
        found = self._ran[unpacked] = {}
        wanted = {graph.values[graph.saved[n].value].op for n in self._order[:unpacked]}
        for number in reversed(self._ops):
            readers = (r for value in graph.results[number] for r in self._readers.get(value, ()))
            users = [found[user] for user in dict.fromkeys(readers) if user in found]
            if number in wanted or users:
                column = found[number] = self._variable()
                keep = [(1.0, self._keep[number])] if number in self._keep else []
                if number in wanted:
                    self._rows.add(1.0, (1.0, column), *keep)
                else:
                    self._rows.add(0.0, (-1.0, column), *((1.0, user) for user in users))
                for user in users:
                    self._rows.add(0.0, (1.0, column), (-1.0, user), *keep)
                if keep:
                    self._rows.add(-1.0, (-1.0, column), (-1.0, keep[0][1]))
        return found

    # --- memory -----------------------------------------------------------------------------------

    def add(self, point: _Point) -> bool:
        """Add what is there at a point; whether that is new."""
        if point in self._points:
            return False
        self._points.add(point)
        before = self._ran_by(point.unpacked)
        after = before if point.op < 0 else self._ran_by(point.unpacked + 1)
        ran = {n: column for n, column in after.items() if n < point.op}
        ran |= {n: column for n, column in before.items() if n >= point.op}
        room = float(self._budget - self._fixed(point))
        terms = [(float(self._graph.ops[n].state), column) for n, column in self._runs.items()]
        for number in self._ops:
            if number != point.op:
                for value in self._graph.results[number]:
                    terms += self._there(value, point, ran)
        if point.op >= 0:
            # It holds only if the op runs just then.
            terms.append((self._slack, after[point.op]))
            if point.op in before:
                terms.append((-self._slack, before[point.op]))
            room += self._slack
        unit = 1.0 / self._budget
        self._rows.add(-room * unit, *((-factor * unit, column) for factor, column in terms))
        return True

    def _fixed(self, point: _Point) -> int:
        """What is there whatever is kept."""
        graph, now = self._graph, point.event
        total = graph.base + sum(m.nbytes for m in graph.storages if m.born <= now <= m.dies)
        for number, end in self._forced.items():
            storage = graph.storages[number]
            if storage.born <= now <= end and now > storage.dies:
                total += storage.nbytes
        if point.op < 0:
            return total + graph.events[now].during
        made = sum(graph.values[value].nbytes for value in graph.results[point.op])
        return total + graph.events[now].before + graph.ops[point.op].workspace + made

    def _is_free(self, value: int, now: int) -> bool:
        """Whether it makes no difference then if a value is kept."""
        number = self._graph.values[value].storage
        storage = self._graph.storages[number]
        is_natural = now <= max(storage.dies, self._forced.get(number, -1))
        return is_natural or now < storage.born or self._live.counted[number] != value

    def _there(self, value: int, point: _Point, ran: dict[int, int]) -> list[tuple[float, int]]:
        """The bytes of a value that are there, kept or made again."""
        each = self._graph.values[value]
        here: list[tuple[float, int]] = []
        kept: list[tuple[float, int]] = []
        if each.op in self._keep and not self._is_free(value, point.event):
            kept = [(1.0, self._keep[each.op])]
            here += kept
        if each.op in ran:
            here.append((1.0, ran[each.op]))
        if self._live.saved_until[value] >= point.event:
            return [(float(each.nbytes), column) for _, column in here]
        column = -1
        for user in self._readers.get(value, ()):
            if user not in self._runs:
                continue  # backward does not need it
            if user == point.op and any(value == old for old, _ in self._graph.ops[user].writes):
                continue
            will_run = (-1.0, self._runs[user])
            has_run = [(1.0, ran[user])] if user in ran else []
            is_held = self._live.inputs_until[user] >= point.event
            column = self._variable() if column < 0 else column
            if here:
                less = [(-1.0, each) for _, each in here]
                self._rows.add(-1.0, (1.0, column), *less, will_run, *has_run)
            if kept and is_held:
                self._rows.add(-1.0, (1.0, column), (-1.0, kept[0][1]), will_run)
        return [] if column < 0 else [(float(each.nbytes), column)]

    # --- solving ----------------------------------------------------------------------------------

    def rule_out(self, kept: frozenset[int]) -> None:
        """Decide otherwise on one of the ops on which it depends what happens."""
        wanted = self._graph.wanted(kept)
        chosen = [(n, column) for n, column in self._keep.items() if n in wanted]
        terms = [(-1.0 if n in kept else 1.0, column) for n, column in chosen]
        self._rows.add(1.0 - len(kept & wanted), *terms)

    def solve(self, deadline: float) -> frozenset[int] | None:
        """What is best to keep, as far as the model goes; None if there is nothing."""
        optimize = pytest.importorskip("scipy.optimize")
        sparse = pytest.importorskip("scipy.sparse")
        rows, count = self._rows, len(self._costs)
        shape = (len(rows.at_least), count)
        matrix = sparse.csr_matrix((rows.factors, (rows.rows, rows.columns)), shape=shape)
        left = deadline - time.monotonic()
        result = optimize.milp(
            self._costs,
            integrality=[int(column < len(self._keep)) for column in range(count)],
            bounds=optimize.Bounds(0.0, 1.0),
            constraints=optimize.LinearConstraint(matrix, lb=rows.at_least),
            options={"mip_rel_gap": 0.0, "time_limit": max(0.01, left)},
        )
        if result.status == _INFEASIBLE:
            return None
        if result.status != 0 or left <= 0:
            raise TimeoutError(f"no exact solution in time: {result.message}")
        return frozenset(n for n, column in self._keep.items() if result.x[column] > _HALF)
