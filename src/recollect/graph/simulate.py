"""What a schedule does to a step: the memory at every moment of it, and the time it takes.

The judge of every solver. It does in numbers what the replay engine does with tensors:

1. Forward runs. What the schedule keeps stays; what it sends to the host stays until it is copied,
   as far as the bound on copies under way allows; the rest goes with its last user in forward.
2. Backward asks for a saved tensor. What is not there is made again: the ops that lead to it from
   what is kept run in the order of forward, and what others will ask for or read stays until the
   last of them has.
3. Tensors from the host are fetched in the order in which they will be asked for, as many ahead as
   the bound allows.

Copies run beside the computation, one each way at a time. The allocator counts memory when work is
issued, far ahead of a device that computes. So the engine cannot wait and see whether a copy is
done: it is told after which op it will be, as found here, and has the device wait if it is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from recollect.graph.graph import Graph

__all__ = ["Outcome", "Schedule", "simulate", "simulate_plain", "uses_under"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What becomes of the results of the ops of a graph. What is not named is made again.

    Args:
        kept: The ops whose results stay on the device.
        away: The ops whose results go to the host.
        limit: Bytes that may be on their way to the host.
        ahead: Bytes that may be fetched ahead; None: as many.
        begin: How many tickets are left, asks for what is not on the device, when fetching ahead
            begins; None: it begins with backward.
    """

    kept: frozenset[int]
    away: frozenset[int] = frozenset()
    limit: int = 0
    ahead: int | None = None
    begin: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a schedule comes to.

    Args:
        peak: The most bytes that are allocated at any moment.
        seconds: What the step takes.
        rerun: The seconds of that in which ops run again.
        waits: The seconds of that in which the device waits for copies.
        busiest: The number of the moment with the peak.
        parts: What the peak is made of: what is there throughout, what the plan cannot change
            (gradients, the loss, workspace), what it keeps, and what was made again or fetched.
        arrivals: The ops after which what had been sent to the host is let go here, and how many of
            those that were sent first.
        curve: At the begin of every event that changes it, the seconds and the bytes, if asked for.
    """

    peak: int
    seconds: float
    rerun: float
    waits: float
    busiest: int
    parts: tuple[int, int, int, int]
    arrivals: tuple[tuple[int, int], ...] = ()
    curve: tuple[tuple[float, int], ...] = ()


def simulate(graph: Graph, schedule: Schedule, *, curve: bool = False) -> Outcome:
    """Run the step of ``graph`` under ``schedule``."""
    return _Run(graph, schedule, curve).run()


def simulate_plain(graph: Graph, *, curve: bool = False) -> Outcome:
    """Run the step without a plan: autograd holds what it saved."""
    run = _Run(graph, Schedule(frozenset(range(len(graph.ops)))), curve)
    run.clock = 0.0
    return run.run()


class _Run:
    """One step."""

    def __init__(self, graph: Graph, schedule: Schedule, curve: bool = False) -> None:
        self.graph = graph
        self.limit = schedule.limit
        self.ahead = schedule.limit if schedule.ahead is None else schedule.ahead
        self.begin = len(graph.asks) if schedule.begin is None else schedule.begin
        kept, away = schedule.kept | graph.forced, schedule.away
        values = graph.values
        count = len(values)
        self.is_here = [value.op in kept for value in values]
        self.is_away = [value.op in away and value.op not in kept for value in values]
        #: How often each value will still be read or asked for, in backward.
        self.uses = [0] * count
        #: Whether a copy of a value is there that was made in backward, and how many tensors of it
        #: autograd has been given.
        self.memo: set[int] = set()
        self.given = [0] * count
        #: How many hold each memory of forward.
        self.holders = [0] * len(graph.memories)
        #: Bytes that are there, and how many of them were made again or fetched.
        self.here = 0
        self.made = 0
        self.parts = (0, 0, 0, 0)
        self.peak = 0
        self.busiest = 0
        self.now = 0
        #: Bytes of states of generators, which are held until all is over.
        self.states = 0
        #: What the engine costs comes first: it is spent all over forward, and helps no copy.
        self.clock = graph.engine_cost
        self.rerun = 0.0
        self.waits = 0.0
        self.curve: list[tuple[float, int]] | None = [(0.0, graph.base)] if curve else None
        self._plan()

    def _plan(self) -> None:
        graph, values = self.graph, self.graph.values
        self.dead = [False] * len(graph.asks)
        #: The asks for what is not here, in the order in which they were saved.
        self.tickets = [n for n, ask in enumerate(graph.asks) if not self.is_here[ask.value]]
        self._count_uses()
        self.born: list[list[int]] = [[] for _ in graph.moments]
        self.dies: list[list[int]] = [[] for _ in graph.moments]
        for number, memory in enumerate(graph.memories):
            self.born[memory.born].append(number)
            self.dies[memory.dies].append(number)
            self.holders[number] = 1
        for ask in graph.asks:
            if self.is_here[ask.value]:
                self.holders[values[ask.value].memory] += 1
        #: What is kept for others to be made from, with how many tickets need it no more by then.
        self.order = self._first_uses()
        for held, _ in self.order:
            self.holders[held] += 1
        #: What has not arrived at the host; what goes there, by the last op of its function.
        self.leaving: deque[tuple[int, int, float]] = deque()
        self.leaving_bytes = 0
        self.out_clock = self.in_clock = 0.0
        self.fetched: dict[int, float] = {}
        self.ahead_bytes = 0
        self.wanted: deque[int] = deque()
        self.has_begun = False
        self.arrivals: list[tuple[int, int]] = []
        self.last_op = graph.last_op
        self.sent: dict[int, list[int]] = {}
        if any(self.is_away):
            for number, value in enumerate(values):
                if self.is_away[number] and self.uses[number]:
                    end = max(value.op, graph.ops[value.op].last)
                    self.sent.setdefault(end, []).append(number)
                    self.holders[value.memory] += 1

    def _count_uses(self) -> None:
        graph, uses, is_here, is_away = self.graph, self.uses, self.is_here, self.is_away
        ops, values = graph.ops, graph.values
        seen = bytearray(len(ops))
        wanted = []
        for number in self.tickets:
            value = graph.asks[number].value
            uses[value] += 1
            wanted.append(value)
        while wanted:
            value = wanted.pop()
            if is_here[value] or is_away[value]:
                continue
            op = values[value].op
            if seen[op]:
                continue
            seen[op] = 1
            self.states += ops[op].state
            for read in ops[op].reads:
                uses[read] += 1
                wanted.append(read)

    def _first_uses(self) -> list[tuple[int, int]]:
        graph, is_here, is_away = self.graph, self.is_here, self.is_away
        ops, values = graph.ops, graph.values
        found: dict[int, int] = {}
        seen = bytearray(len(ops))
        for number, ticket in enumerate(self.tickets):
            wanted = [graph.asks[ticket].value]
            while wanted:
                value = wanted.pop()
                if is_here[value]:
                    found.setdefault(value, number)
                elif not is_away[value] and not seen[values[value].op]:
                    seen[values[value].op] = 1
                    wanted += ops[values[value].op].reads
        return [(values[value].memory, number) for value, number in found.items()]

    def run(self) -> Outcome:
        """The whole step."""
        graph = self.graph
        asks = graph.asks
        ends_of_memory = self.dies
        for now, moment in enumerate(graph.moments):
            self.now = now
            for number in self.born[now]:
                self.here += graph.memories[number].nbytes
            for number in moment.asks:
                self._ask(asks[number].value, moment.before)
            self._note(moment.during)
            self.clock += moment.seconds
            if moment.op in self.sent:
                self._send(self.sent[moment.op])
            if self.leaving and moment.op >= 0 and self._can_arrive_after(moment.op):
                self._let_arrive(moment.op)
            for number in moment.ends:
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
        )

    def _note(self, more: int) -> None:
        """So many bytes that are none of the plan's are there too."""
        total = self.here + self.states + more + self.graph.base
        if total > self.peak:
            self.peak, self.busiest = total, self.now
            kept = self.here - self.made + self.states
            self.parts = (self.graph.base, more, kept, self.made)
        if self.curve is not None:
            self.curve.append((self.clock, total))

    def _drop(self, memory: int) -> None:
        self.holders[memory] -= 1
        if not self.holders[memory]:
            self.here -= self.graph.memories[memory].nbytes

    def _grow(self, value: int) -> None:
        """A value was made again, or is being fetched."""
        nbytes = self.graph.values[value].nbytes
        self.here += nbytes
        self.made += nbytes

    def _shrink(self, value: int) -> None:
        nbytes = self.graph.values[value].nbytes
        self.here -= nbytes
        self.made -= nbytes

    # --- backward ---------------------------------------------------------------------------------

    def _ask(self, value: int, before: int) -> None:
        if self.is_here[value]:
            return
        if value not in self.memo:
            self._let_go_of_the_dead()
            if len(self.tickets) <= self.begin:
                self._begin()
            if self.is_away[value]:
                self._fetch_now(value, before)
            else:
                self.uses[value] += 1
                for op in sorted(self._missing(value)):
                    self._run_op(op, before)
                self.uses[value] -= 1
        self.given[value] += 1
        self._release(value)

    def _end(self, ask: int) -> None:
        """Autograd has let go of a tensor that it had saved."""
        self.dead[ask] = True
        value = self.graph.asks[ask].value
        if self.is_here[value]:
            self._drop(self.graph.values[value].memory)
        elif self.given[value]:
            self.given[value] -= 1
            if not self.given[value] and value not in self.memo:
                self._shrink(value)

    def _release(self, value: int) -> None:
        """A value was used once."""
        self.uses[value] -= 1
        if self.uses[value] <= 0 and value in self.memo:
            self.memo.discard(value)
            if not self.given[value]:
                self._shrink(value)

    def _let_go_of_the_dead(self) -> None:
        tickets, order = self.tickets, self.order
        while tickets and self.dead[tickets[-1]]:
            tickets.pop()
        while order and order[-1][1] >= len(tickets):
            self._drop(order.pop()[0])

    def _missing(self, value: int) -> set[int]:
        graph, memo, is_here, is_away = self.graph, self.memo, self.is_here, self.is_away
        numbers: set[int] = set()
        wanted = [value]
        while wanted:
            each = wanted.pop()
            if each in memo or is_here[each] or is_away[each]:
                continue
            number = graph.values[each].op
            if number not in numbers:
                numbers.add(number)
                wanted += graph.ops[number].reads
        return numbers

    def _run_op(self, number: int, before: int) -> None:
        """Run an op again."""
        graph, uses, memo = self.graph, self.uses, self.memo
        op = graph.ops[number]
        for read in op.reads:
            if self.is_away[read] and read not in memo:
                self._fetch_now(read, before)
        taken = []
        for old, _ in op.writes:
            # Nobody else wants what was there: it is written over, and no copy is made.
            if old is not None and uses[old] <= 1 and old in memo and not self.given[old]:
                memo.discard(old)
                self._shrink(old)
                taken.append(old)
        made = graph.results[number]
        for value in made:
            self._grow(value)
        self._note(before + op.workspace)
        seconds = op.seconds + graph.rerun_cost
        self.clock += seconds
        self.rerun += seconds
        for value in made:
            if uses[value] > 0:
                memo.add(value)
            else:
                self._shrink(value)
        for read in op.reads:
            if read in taken:
                uses[read] -= 1
            else:
                self._release(read)

    # --- the host ---------------------------------------------------------------------------------

    def _send(self, numbers: Iterable[int]) -> None:
        link = self.graph.link
        assert link is not None
        for number in numbers:
            value = self.graph.values[number]
            start = max(self.clock, self.out_clock)
            self.out_clock = start + value.nbytes / link.out_rate
            self.leaving.append((value.memory, value.nbytes, self.out_clock))
            self.leaving_bytes += value.nbytes

    def _can_arrive_after(self, number: int) -> bool:
        """Whether the engine can be told to: when a function is over, by an op that has a name."""
        op = self.graph.ops[number]
        return op.last <= number and (bool(op.key) or number == self.last_op)

    def _let_arrive(self, op: int) -> None:
        """After ``op``: let go of the oldest if too much is leaving, and of what is copied by now.

        At the end of forward, of everything.
        """
        before = len(self.leaving)
        while len(self.leaving) > 1 and self.leaving_bytes > self.limit:
            self._arrive()
        while self.leaving and (self.leaving[0][2] <= self.clock or op == self.last_op):
            self._arrive()
        if len(self.leaving) < before:
            self.arrivals.append((op, before - len(self.leaving)))

    def _arrive(self) -> None:
        """Wait until the oldest of what is leaving has arrived."""
        memory, nbytes, done = self.leaving.popleft()
        self._wait(done)
        self.leaving_bytes -= nbytes
        self._drop(memory)

    def _wait(self, until: float) -> None:
        if until > self.clock:
            self.waits += until - self.clock
            self.clock = until

    def _begin(self) -> None:
        """Backward has begun: start to fetch."""
        if self.has_begun:
            return
        self.has_begun = True
        if not self.sent:
            return
        self.wanted = deque(self._fetch_order())
        self._fetch_ahead()

    def _fetch_order(self) -> list[int]:
        """What is away, in the reverse of the order in which it was sent."""
        return [value for op in sorted(self.sent, reverse=True) for value in self.sent[op][::-1]]

    def _fetch_ahead(self) -> None:
        while self.wanted:
            value = self.wanted[0]
            nbytes = self.graph.values[value].nbytes
            if self.ahead_bytes and self.ahead_bytes + nbytes > self.ahead:
                return
            self.wanted.popleft()
            if self.uses[value] and value not in self.memo:
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
        """Have a value that is away here."""
        nbytes = self.graph.values[value].nbytes
        if value in self.fetched:
            self.ahead_bytes -= nbytes
        else:
            if value in self.wanted:
                self.wanted.remove(value)
            self._fetch(value)
        self._wait(self.fetched.pop(value))
        self.memo.add(value)
        self._fetch_ahead()
        self._note(before)


def uses_under(graph: Graph, schedule: Schedule) -> list[int]:
    """How often each value is read or asked for in backward, for what is not kept."""
    return _Run(graph, schedule).uses
