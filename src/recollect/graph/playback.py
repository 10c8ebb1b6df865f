"""Plays a step under a schedule in bytes and seconds, as the replay engine does with tensors.

Both use the rules of `release`:

1. Forward runs. Kept results stay. Offloaded results stay until they are copied, or until the limit
   on copies in flight is reached. All others are freed after their last use in forward.
2. Backward unpacks a saved tensor. If it is not there, the ops that compute it from held values run
   again, in the order of forward.
3. Tensors are fetched from the host in the reverse order of offloading, as `OffloadBatch` does
   under a plan. At most ``ahead`` bytes are prefetched. Each of several compiled graphs fetches its
   own, and its copies to the host end with its forward.

Copies overlap with computation, one at a time in each direction. The allocator frees memory when
work is issued, far ahead of the device. So the plan says after which op a copy counts as done, as
simulated here, and the device waits if it is late.

Only events at which something is recomputed, freed or copied are played one by one. For the others,
changes of memory are summed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from functools import reduce
from itertools import accumulate
from operator import add

from recollect.graph.graph import BACKWARD, DROP, FREE, OP, UNPACK, Action, Graph, Schedule, Tables
from recollect.graph.release import WorkingSet, find_needs, missing_ops, pop_unneeded

#: The memory while an op runs again, or once a tensor is fetched: the event; the bytes by which
#: memory has changed since it began; fixed bytes; the bytes that were recomputed or fetched; and
#: the time.
Note = tuple[int, int, int, int, float]


def results_of(graph: Graph, ops: Iterable[int]) -> set[int]:
    """The values that ops make."""
    results = graph.results
    return {value for op in ops for value in results[op]}


class Playback:
    """One step under a schedule; None: without a plan. Its attributes hold the result.

    ``unheld``: values that are recomputed although other results of their op are kept. ``tables``:
    those of ``graph``, perhaps with other numbers in place of bytes. Whatever is added up is taken
    from them, but how long copies take and when they begin depends on bytes.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule | None,
        unheld: frozenset[int] = frozenset(),
        tables: Tables | None = None,
    ) -> None:
        is_plain = schedule is None
        schedule = schedule or Schedule(frozenset(range(len(graph.ops))))
        self.graph, self.unheld = graph, unheld
        self.tables = tables or graph.tables
        kept = schedule.kept | graph.forced
        here = results_of(graph, kept) - unheld
        self.offloaded = results_of(graph, schedule.offloaded - kept)
        #: The values that are not recomputed.
        self.held = here | self.offloaded if self.offloaded else here
        self._find_tickets(here)
        #: Bytes of generator states, which are held until the end.
        self.states = sum([graph.ops[op].state for op in self.again])
        #: By value: how many unpacked tensors of it autograd still holds; and how many copies of it
        #: earlier backwards through the same graph have unpacked.
        self.given = [0] * len(graph.values)
        self.copies: dict[int, int] = {}
        #: By saved tensor: whether autograd has freed it.
        self.dead = [False] * len(graph.saved)
        #: The time, and how many events are over.
        self.clock, self.over = 0.0, 0
        #: The seconds in which ops run again, and in which the device waits for copies.
        self.rerun = self.waits = 0.0
        self._find_costs(schedule, is_plain=is_plain)
        self._plan_copies(schedule)
        self._hold(kept)
        #: The current phase; the change of memory in it; the live bytes that were recomputed or
        #: fetched, now and at its start.
        self.phase = self.change = 0
        self.made = self.made_before = 0
        #: By event: ``change`` and ``clock`` once all is unpacked.
        self.unpacked: dict[int, int] = {}
        self.clocks: dict[int, float] = {}
        self.notes: list[Note] = []

    def _find_tickets(self, here: set[int]) -> None:
        """Find what is needed for the saved tensors that are not kept. ``here``: what is kept."""
        graph, tables = self.graph, self.tables
        #: By saved tensor: whether it is not kept on the device.
        self.is_ticket = [value not in here for value in tables.saved]
        #: By region: those saved tensors, in the order of forward.
        self.tickets: list[list[int]] = [[] for _ in graph.regions]
        missing = [n for n, is_ticket in enumerate(self.is_ticket) if is_ticket]
        for number in missing:
            self.tickets[tables.regions[number]].append(number)
        needs = find_needs(graph, [tables.saved[n] for n in missing], self.held)
        #: The values that backward has recomputed or fetched.
        self.working = WorkingSet[int](needs.uses)
        #: By region: the kept values that others are recomputed from, with the first of its tickets
        #: that needs each.
        self.order: list[list[tuple[int, int]]] = [[] for _ in graph.regions]
        begins = [*accumulate(map(len, self.tickets), initial=0)]
        for value, index in needs.order:
            if value in here:
                region = tables.regions[missing[index]]
                self.order[region].append((value, index - begins[region]))
        #: The ops that run again.
        self.again = needs.again

    def _find_costs(self, schedule: Schedule, *, is_plain: bool) -> None:
        """Add the cost of the engine, or of modules, which includes their recomputation.

        It counts before the first event, so that it hides no copy.
        """
        graph = self.graph
        if schedule.modules:
            self.seconds = [0.0] * len(graph.ops)
            self.rerun = sum(graph.module_costs.get(each, 0.0) for each in schedule.modules)
            self.clock = self.rerun
        else:
            self.seconds = graph.rerun_seconds
            self.clock = 0.0 if is_plain else graph.engine_cost

    def _plan_copies(self, schedule: Schedule) -> None:
        """Find what is offloaded, and after which op of forward."""
        graph = self.graph
        self.link = graph.link and graph.link.slowed(schedule.link_share)
        self.limit = schedule.limit
        self.ahead = schedule.limit if schedule.ahead is None else schedule.ahead
        self.begin = len(graph.saved) if schedule.begin is None else schedule.begin
        #: The copies to the host that are in flight.
        self.leaving: deque[tuple[int, int, float]] = deque()
        self.leaving_bytes = 0
        self.out_clock = self.in_clock = 0.0
        self.fetched: dict[int, float] = {}
        self.ahead_bytes = 0
        self.wanted: deque[int] = deque()
        #: The compiled graphs that have begun to fetch.
        self.begun = set[int]()
        #: The copies so far, each way: begin, end and value.
        self.out: list[tuple[float, float, int]] = []
        self.back: list[tuple[float, float, int]] = []
        #: By offloaded value: the event before which it was first fetched.
        self.fetches: dict[int, int] = {}
        self.arrivals: list[tuple[int, int]] = []
        self.last_op = graph.last_op
        #: The ops after which all copies have arrived.
        self.halts = {self.last_op, *(first - 1 for first in graph.calls[1:])}
        #: The values to offload, by the last op of their function.
        self.offloads: dict[int, list[int]] = {}
        for value in sorted(self.offloaded):
            if self.working.uses[value]:
                op = graph.values[value].op
                self.offloads.setdefault(max(op, graph.ops[op].last), []).append(value)

    def _hold(self, kept: Iterable[int]) -> None:
        """Find until when the storages of forward are held."""
        storages, values, holds = self.graph.storages, self.graph.values, self.tables.holds
        dropped = {values[value].storage for value in self.unheld}
        #: By storage: how many holders it has that release it in backward, or when a copy is done.
        self.holders: dict[int, int] = {}
        held = [value for order in self.order for value, _ in order]
        for value in (*held, *(value for each in self.offloads.values() for value in each)):
            number = values[value].storage
            self.holders[number] = self.holders.get(number, 0) + 1
        #: By storage that the schedule holds longer: the last event at which anything else holds
        #: it.
        ends = self.ends = {number: storages[number].dies for number in self.holders}
        for op in kept:
            for number, end in holds[op]:
                if end > ends.get(number, -1) and number not in dropped:
                    ends[number] = end
        #: By event: by how many bytes the schedule changes memory before it; and the part that was
        #: recomputed or fetched.
        self.changes = [0] * (len(self.graph.events) + 2)
        self.changes_made = self.changes[:]
        sizes = self.tables.sizes
        for number, end in ends.items():
            self.changes[storages[number].dies + 1] += sizes[number]
            if number not in self.holders:
                self.changes[end + 1] -= sizes[number]

    def play(self) -> Playback:
        """Play the whole step. Returns the playback."""
        self.forward()
        self.backward()
        return self

    def forward(self) -> None:
        """Play forward."""
        tables, is_ticket = self.tables, self.is_ticket
        if self.offloads:
            actions = [a for a in tables.actions if a[1] in (OP, BACKWARD) or is_ticket[a[2]]]
        else:
            actions = [a for a in tables.of_saved if a[1] == BACKWARD or is_ticket[a[2]]]
        turn = bisect_left(actions, (2 * self.graph.turn,))
        self._play(actions[:turn])
        self.left = actions[turn:]

    def backward(self) -> None:
        """Play what follows forward."""
        self._play(self.left)
        self._begin_phase(2 * len(self.graph.events))

    def _play(self, actions: Iterable[Action]) -> None:
        for phase, kind, number in actions:
            if phase != self.phase:
                self._begin_phase(phase)
            if kind == UNPACK:
                self._unpack(number)
            elif kind == DROP:
                self._drop_unpacked(self.tables.saved[number])
            elif kind == FREE:
                self._free(number)
            elif kind == OP:
                if number in self.offloads:
                    self._send(self.offloads[number])
                if self.leaving and self._can_arrive_after(number):
                    self._let_arrive(number)
            else:
                self._begin_backward()
        self._begin_phase(self.phase)

    # --- memory -----------------------------------------------------------------------------------

    def _begin_phase(self, phase: int) -> None:
        """Add up what has changed in the phase before."""
        event = (self.phase + 1) // 2
        self.clocks[event] = self.clock
        if self.change or self.made != self.made_before:
            self.changes[event] += self.change
            self.changes_made[event] += self.made - self.made_before
            if self.phase % 2 == 0:
                self.unpacked[event] = self.change
            self.change = 0
            self.made_before = self.made
        self.phase = phase
        over = (phase + 1) // 2
        if over > self.over:
            # In order: the last digit of the sum depends on it.
            self.clock = reduce(add, self.tables.event_seconds[self.over : over], self.clock)
            self.over = over

    def _note(self, more: int) -> None:
        """Note the memory while an op runs again, with ``more`` fixed bytes."""
        self.notes.append((self.phase // 2, self.change, more, self.made, self.clock))

    def _drop(self, storage: int) -> None:
        """Release a storage; it is freed when nothing else holds it."""
        self.holders[storage] -= 1
        if self.holders[storage]:
            return
        nbytes = self.tables.sizes[storage]
        after = self.ends[storage] + 1  # the first event at which nothing else holds it
        if after <= (self.phase + 1) // 2:
            self.change -= nbytes
        else:
            self.changes[after] -= nbytes

    def _shrink(self, value: int) -> None:
        nbytes = self.tables.nbytes[value]
        self.change -= nbytes
        self.made -= nbytes

    # --- backward ---------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        """Another backward begins. What the one before recomputed and did not use is released."""
        for value in self.working.here:
            if not self.given[value]:
                self._shrink(value)
        for value, count in enumerate(self.given):
            if count:  # by a graph that was retained: they are held as long as that
                self.given[value] = 0
                self.copies[value] = self.copies.get(value, 0) + 1
        alive = [n for tickets in self.tickets for n in tickets if not self.dead[n]]
        saved = [self.tables.saved[number] for number in alive]
        self.working = WorkingSet(find_needs(self.graph, saved, self.held).uses)

    def _unpack(self, saved: int) -> None:
        """Autograd unpacks a saved tensor that is not kept."""
        working, value = self.working, self.tables.saved[saved]
        if value not in working.here:
            region = self.tables.regions[saved]
            self._release_held(region)
            if len(self.tickets[region]) <= self.begin:
                self._begin_fetching(value)
            if value in self.offloaded:
                self._fetch_now(value)
            else:
                working.uses[value] += 1  # not to be released before it is unpacked
                for op in missing_ops(self.graph, value, working.here, self.held):
                    self._run_op(op)
                working.uses[value] -= 1
        self.given[value] += 1
        working.give(value)

    def _free(self, saved: int) -> None:
        """Autograd has freed a saved tensor that is not kept."""
        self.dead[saved] = True
        value = self.tables.saved[saved]
        if self.copies:
            for _ in range(self.copies.pop(value, 0)):
                self._shrink(value)
        self._drop_unpacked(value)

    def _drop_unpacked(self, value: int) -> None:
        if self.given[value]:
            self.given[value] -= 1
            if not self.given[value] and value not in self.working.here:
                self._shrink(value)

    def _release_held(self, region: int) -> None:
        tickets = self.tickets[region]
        while tickets and self.dead[tickets[-1]]:
            tickets.pop()
        for value in pop_unneeded(self.order[region], len(tickets)):
            self._drop(self.graph.values[value].storage)

    def _run_op(self, number: int) -> None:
        tables, working, given = self.tables, self.working, self.given
        here, nbytes = working.here, tables.nbytes
        op = self.graph.ops[number]
        reads = op.reads
        if self.offloaded:
            for read in reads:
                if read in self.offloaded and read not in here:
                    self._fetch_now(read)
        was_here = [read for read in reads if read in here]
        written = tables.written[number]
        if written:
            for old in written:
                if working.use_up(old) and old in was_here:
                    self._shrink(old)  # it is overwritten
                    was_here.remove(old)
            reads = tuple(read for read in reads if read not in written)
        results = tables.results[number]
        self.change += tables.made[number]
        self.made += tables.made[number]
        self._note(tables.before[self.phase // 2] + op.workspace)
        seconds = self.seconds[number]
        self.clock += seconds
        self.rerun += seconds
        working.end_op(reads, results)
        freed = sum([nbytes[value] for value, _ in results if value not in here])
        freed += sum(
            [nbytes[value] for value in was_here if value not in here and not given[value]]
        )
        self.change -= freed
        self.made -= freed

    # --- the host ---------------------------------------------------------------------------------

    def _send(self, numbers: Iterable[int]) -> None:
        link = self.link
        assert link is not None
        for number in numbers:
            value = self.graph.values[number]
            self.clock += self.graph.offload_cost
            start = max(self.clock, self.out_clock)
            self.out_clock = start + value.nbytes / link.out_rate
            self.out.append((start, self.out_clock, number))
            self.leaving.append((value.storage, value.nbytes, self.out_clock))
            self.leaving_bytes += value.nbytes

    def _can_arrive_after(self, number: int) -> bool:
        """Whether a schedule can name this op: the last one of its function, with a key."""
        op = self.graph.ops[number]
        return op.last <= number and (bool(op.key) or number == self.last_op)

    def _let_arrive(self, op: int) -> None:
        """After ``op``: free copied tensors, and the oldest if too many bytes are in flight.

        At the end of forward, or of a compiled graph, all.
        """
        before = len(self.leaving)
        while len(self.leaving) > 1 and self.leaving_bytes > self.limit:
            self._arrive()
        while self.leaving and (self.leaving[0][2] <= self.clock or op in self.halts):
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

    def _begin_fetching(self, value: int) -> None:
        """Start to fetch ahead: with ``value``, all that is unpacked in the same graph."""
        if not self.offloads:
            return
        graph = self.graph
        call = graph.call_of(graph.values[value].op)
        if call in self.begun:
            return
        self.begun.add(call)
        # In the reverse of the order in which they were offloaded.
        order = [v for op in sorted(self.offloads, reverse=True) for v in self.offloads[op][::-1]]
        self.wanted = deque(v for v in order if graph.call_of(graph.values[v].op) == call)
        self._fetch_ahead()

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
        link = self.link
        assert link is not None
        start = max(self.clock, self.in_clock)
        self.in_clock = start + self.graph.values[value].nbytes / link.in_rate
        self.back.append((start, self.in_clock, value))
        self.fetched[value] = self.in_clock
        self.fetches.setdefault(value, self.phase // 2)
        self.change += self.tables.nbytes[value]
        self.made += self.tables.nbytes[value]

    def _fetch_now(self, value: int) -> None:
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
        self._note(self.tables.before[self.phase // 2])
