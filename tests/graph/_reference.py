"""The simulator without shortcuts: every event of a step, one after the other.

`recollect.graph.simulate` must come to the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from recollect.graph.graph import Graph, Schedule
from recollect.graph.release import WorkingSet, find_needs, missing_ops, pop_unneeded
from recollect.graph.simulate import Outcome

__all__ = ["Run", "reference"]


def reference(graph: Graph, schedule: Schedule, *, curve: bool = False) -> Outcome:
    """Simulate the step of ``graph`` under ``schedule``."""
    return Run(graph, schedule, curve).run()


class Run:
    """One step."""

    def __init__(self, graph: Graph, schedule: Schedule, curve: bool = False) -> None:
        self.graph = graph
        self.limit = schedule.limit
        self.ahead = schedule.limit if schedule.ahead is None else schedule.ahead
        self.begin = len(graph.saved) if schedule.begin is None else schedule.begin
        kept, away = schedule.kept | graph.forced, schedule.offloaded
        values = graph.values
        self.is_here = [value.op in kept for value in values]
        self.is_away = [value.op in away and value.op not in kept for value in values]
        #: The values that are not recomputed.
        self.held = {n for n, value in enumerate(values) if value.op in kept or value.op in away}
        #: By value: how many tensors of it autograd has unpacked, and still holds.
        self.given = [0] * len(values)
        #: How many hold each storage of forward.
        self.holders = [0] * len(graph.storages)
        #: Bytes that are not fixed, and how many of them were recomputed or fetched.
        self.here = 0
        self.made = 0
        self.parts = (0, 0, 0, 0)
        self.peak = 0
        self.busiest = 0
        self.now = 0
        #: The costs of a whole engine, or of modules, are spent all over the step. Counted first,
        #: they hide no copy.
        self.modules_cost = sum(graph.module_costs.get(each, 0.0) for each in schedule.modules)
        self.counts_ops = not schedule.modules
        self.clock = graph.engine_cost if self.counts_ops else self.modules_cost
        self.rerun = self.modules_cost
        self.waits = 0.0
        self.starts: list[float] = []
        self.curve: list[tuple[float, int]] | None = [(0.0, graph.base)] if curve else None
        self._plan()

    def _plan(self) -> None:
        graph, values = self.graph, self.graph.values
        self.dead = [False] * len(graph.saved)
        #: The saved tensors that are not kept here, in the order of forward.
        self.tickets = [n for n, saved in enumerate(graph.saved) if not self.is_here[saved.value]]
        needs = find_needs(graph, [graph.saved[n].value for n in self.tickets], self.held)
        #: What backward has recomputed or fetched, in bytes.
        self.working = WorkingSet[int](needs.uses)
        #: Bytes of generator states, which are held until the end.
        self.states = sum(graph.ops[op].state for op in needs.again)
        self.born: list[list[int]] = [[] for _ in graph.events]
        self.dies: list[list[int]] = [[] for _ in graph.events]
        for number, storage in enumerate(graph.storages):
            self.born[storage.born].append(number)
            self.dies[storage.dies].append(number)
            self.holders[number] = 1
        for saved in graph.saved:
            if self.is_here[saved.value]:
                self.holders[values[saved.value].storage] += 1
        #: The kept values that others are recomputed from, with the first ticket that needs each.
        self.order = [(value, index) for value, index in needs.order if self.is_here[value]]
        for held, _ in self.order:
            self.holders[values[held].storage] += 1
        #: The copies to the host that are in flight.
        self.leaving: deque[tuple[int, int, float]] = deque()
        self.leaving_bytes = 0
        self.out_clock = self.in_clock = 0.0
        self.fetched: dict[int, float] = {}
        self.ahead_bytes = 0
        self.wanted: deque[int] = deque()
        self.has_begun = False
        self.arrivals: list[tuple[int, int]] = []
        self.last_op = graph.last_op
        #: The values to offload, by the last op of their function.
        self.sent: dict[int, list[int]] = {}
        if any(self.is_away):
            for number, value in enumerate(values):
                if self.is_away[number] and needs.uses[number]:
                    end = max(value.op, graph.ops[value.op].last)
                    self.sent.setdefault(end, []).append(number)
                    self.holders[value.storage] += 1

    def run(self) -> Outcome:
        """The whole step."""
        graph = self.graph
        saved = graph.saved
        ends_of_memory = self.dies
        for now, event in enumerate(graph.events):
            self.now = now
            for number in self.born[now]:
                self.here += graph.storages[number].nbytes
            for number in event.unpacks:
                self._unpack(saved[number].value, event.before)
            self.starts.append(self.clock)
            self._note(event.during)
            self.clock += event.seconds
            if event.op in self.sent:
                self._send(self.sent[event.op])
            if self.leaving and event.op >= 0 and self._can_arrive_after(event.op):
                self._let_arrive(event.op)
            for number in event.frees:
                self._end(number)
            for number in ends_of_memory[now]:
                self._drop(number)
        self._note(0)
        return Outcome(
            self.peak,
            self.clock,
            self.rerun,
            self.waits,
            self.busiest,
            self.parts,
            tuple(self.arrivals),
            () if self.curve is None else tuple(self.curve),
            () if self.curve is None else tuple(self.starts),
        )

    def _note(self, more: int) -> None:
        """Note the memory now, with ``more`` fixed bytes."""
        total = self.here + self.states + more + self.graph.base
        if total > self.peak:
            self.peak, self.busiest = total, self.now
            kept = self.here - self.made + self.states
            self.parts = (self.graph.base, more, kept, self.made)
        if self.curve is not None:
            self.curve.append((self.clock, total))

    def _drop(self, storage: int) -> None:
        self.holders[storage] -= 1
        if not self.holders[storage]:
            self.here -= self.graph.storages[storage].nbytes

    def _grow(self, value: int) -> None:
        """A value was recomputed, or is being fetched."""
        nbytes = self.graph.values[value].nbytes
        self.here += nbytes
        self.made += nbytes

    def _shrink(self, value: int) -> None:
        nbytes = self.graph.values[value].nbytes
        self.here -= nbytes
        self.made -= nbytes

    # --- backward ---------------------------------------------------------------------------------

    def _unpack(self, value: int, before: int) -> None:
        if self.is_here[value]:
            return
        working = self.working
        if value not in working.here:
            self._release_held()
            if len(self.tickets) <= self.begin:
                self._begin()
            if self.is_away[value]:
                self._fetch_now(value, before)
            else:
                working.uses[value] += 1  # not to be released before it is unpacked
                for op in missing_ops(self.graph, value, working.here, self.held):
                    self._run_op(op, before)
                working.uses[value] -= 1
        self.given[value] += 1
        working.give(value)

    def _end(self, saved: int) -> None:
        """Autograd has freed a saved tensor."""
        self.dead[saved] = True
        value = self.graph.saved[saved].value
        if self.is_here[value]:
            self._drop(self.graph.values[value].storage)
        elif self.given[value]:
            self.given[value] -= 1
            if not self.given[value] and value not in self.working.here:
                self._shrink(value)

    def _release_held(self) -> None:
        tickets = self.tickets
        while tickets and self.dead[tickets[-1]]:
            tickets.pop()
        for value in pop_unneeded(self.order, len(tickets)):
            self._drop(self.graph.values[value].storage)

    def _run_op(self, number: int, before: int) -> None:
        """Run an op again."""
        graph, working = self.graph, self.working
        here = working.here
        op = graph.ops[number]
        for read in op.reads:
            if self.is_away[read] and read not in here:
                self._fetch_now(read, before)
        was_here = [read for read in op.reads if read in here]
        written = [old for old, _ in op.writes if old is not None]
        for old in written:
            if working.use_up(old) and old in was_here:
                self._shrink(old)  # it is overwritten
                was_here.remove(old)
        made = graph.results[number]
        for value in made:
            self._grow(value)
        self._note(before + op.workspace)
        if self.counts_ops:  # else they are in the costs of modules
            seconds = op.seconds + graph.rerun_cost
            self.clock += seconds
            self.rerun += seconds
        reads = [read for read in op.reads if read not in written] if written else op.reads
        working.end_op(reads, [(value, 0) for value in made])
        for value in made:
            if value not in here:
                self._shrink(value)
        for value in was_here:
            if value not in here and not self.given[value]:
                self._shrink(value)

    # --- the host ---------------------------------------------------------------------------------

    def _send(self, numbers: Iterable[int]) -> None:
        link = self.graph.link
        assert link is not None
        for number in numbers:
            value = self.graph.values[number]
            self.clock += self.graph.offload_cost
            start = max(self.clock, self.out_clock)
            self.out_clock = start + value.nbytes / link.out_rate
            self.leaving.append((value.storage, value.nbytes, self.out_clock))
            self.leaving_bytes += value.nbytes

    def _can_arrive_after(self, number: int) -> bool:
        """Whether the engine can be told: only at the end of a function, by an op with a key."""
        op = self.graph.ops[number]
        return op.last <= number and (bool(op.key) or number == self.last_op)

    def _let_arrive(self, op: int) -> None:
        """After ``op``: free what is copied by now, and the oldest if too much is in flight.

        At the end of forward, everything.
        """
        before = len(self.leaving)
        while len(self.leaving) > 1 and self.leaving_bytes > self.limit:
            self._arrive()
        while self.leaving and (self.leaving[0][2] <= self.clock or op == self.last_op):
            self._arrive()
        if len(self.leaving) < before:
            self.arrivals.append((op, before - len(self.leaving)))

    def _arrive(self) -> None:
        """Wait for the oldest copy to the host, and free its storage."""
        storage, nbytes, done = self.leaving.popleft()
        self._wait(done)
        self.leaving_bytes -= nbytes
        self._drop(storage)

    def _wait(self, until: float) -> None:
        if until > self.clock:
            self.waits += until - self.clock
            self.clock = until

    def _begin(self) -> None:
        """Start to fetch ahead."""
        if self.has_begun:
            return
        self.has_begun = True
        if not self.sent:
            return
        self.wanted = deque(self._fetch_order())
        self._fetch_ahead()

    def _fetch_order(self) -> list[int]:
        """The offloaded values, in the reverse of the order in which they were offloaded."""
        return [value for op in sorted(self.sent, reverse=True) for value in self.sent[op][::-1]]

    def _fetch_ahead(self) -> None:
        while self.wanted:
            value = self.wanted[0]
            nbytes = self.graph.values[value].nbytes
            if self.ahead_bytes and self.ahead_bytes + nbytes > self.ahead:
                return
            self.wanted.popleft()
            if self.working.uses[value] and value not in self.working.here:
                self._fetch(value)
                self.ahead_bytes += nbytes

    def _fetch(self, value: int) -> None:
        link = self.graph.link
        assert link is not None
        nbytes = self.graph.values[value].nbytes
        self.in_clock = max(self.clock, self.in_clock) + nbytes / link.in_rate
        self.fetched[value] = self.in_clock
        self._grow(value)

    def _fetch_now(self, value: int, before: int) -> None:
        """Fetch an offloaded value, and wait for it."""
        nbytes = self.graph.values[value].nbytes
        if value in self.fetched:
            self.ahead_bytes -= nbytes
        else:
            if value in self.wanted:
                self.wanted.remove(value)
            self._fetch(value)
        self._wait(self.fetched.pop(value))
        self.working.here[value] = 0
        self._fetch_ahead()
        self._note(before)
