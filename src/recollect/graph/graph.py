"""A training step for the planner: ops, the values they make, and when backward uses them.

A step is a list of `Event`, one for each op that ran, forward and backward. The ops of the planned
region (`Op`) make values. Autograd saves some (`SavedTensor`), and unpacks them in backward.
A plan decides by op: the results of an op are kept, offloaded to the host, or recomputed. All other
memory (gradients, the loss, parameters) is fixed, and appears in the events as a number of bytes.

Pure data: neither this package nor the solver imports torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any

from recollect.graph.release import find_needs

#: What can happen at an event, in this order: another backward begins, a saved tensor is unpacked,
#: an op runs, a saved tensor of a graph that is retained is dropped, a saved tensor is freed.
BACKWARD, UNPACK, OP, DROP, FREE = range(5)
#: The phase in which it happens (twice the number of the event, and one more once its op has run),
#: which of these it is, and the number of the saved tensor or op.
Action = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that ops of the region allocate in forward."""

    nbytes: int  #: as the allocator counts it
    born: int  #: the event of the op that allocates it
    dies: int  #: the last event at which anything but autograd and the plan holds it


@dataclass(frozen=True, slots=True)
class Value:
    """The content of a storage from one write to the next. An op makes it."""

    nbytes: int  #: of its storage
    op: int  #: the number of the op that makes it
    #: The number of its storage in forward. Values made in place share one.
    storage: int


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the region, which may run again in backward."""

    name: str  #: such as ``aten::mm``
    path: str  #: the module that called it
    key: str  #: its key in a plan: the same in every call of the model, whatever the shapes
    seconds: float  #: the time that it takes
    reads: tuple[int, ...]  #: the values of the region that it reads
    makes: tuple[int, ...]  #: the values that it makes on new storages
    #: The values that it makes in place: for each the value before (None if it does not read that),
    #: and the value after.
    writes: tuple[tuple[int | None, int], ...] = ()
    places: tuple[int, ...] = ()  #: the position of each of ``makes`` among its results
    workspace: int = 0  #: the extra bytes that it allocates while it runs
    state: int = 0  #: the bytes of generator state held for its rerun
    can_keep: bool = True  #: whether its results can be kept
    can_offload: bool = False  #: whether they can be offloaded
    forced: bool = False  #: whether every plan keeps them: it must not run again
    #: The number of the last op of its function, after which results are offloaded; -1: this op
    #: itself is the last.
    last: int = -1
    source: str = ""  #: the line of the model that called it, as ``file:line``, if that is known


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that autograd saved, and unpacks once in backward."""

    value: int  #: its value
    event: int  #: the event of forward at which it was saved


@dataclass(frozen=True, slots=True)
class Event:
    """An op that ran in the step."""

    seconds: float  #: the time that it took
    before: int  #: fixed bytes that are allocated before it runs, in addition to `Graph.base`
    during: int  #: the peak of them while it runs
    op: int = -1  #: its number among the ops of the region; -1 if it is not one of them
    unpacks: tuple[int, ...] = ()  #: the saved tensors that autograd unpacks before it
    frees: tuple[int, ...] = ()  #: the saved tensors that autograd frees after it
    backward: int = 0  #: the number of the backward that it is part of, if a step has several
    #: Those that autograd does not free, since the graph is retained, but no longer uses: if they
    #: were recomputed, they are gone.
    drops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """The link between device and host."""

    out_rate: float  #: bytes per second to the host
    in_rate: float  #: bytes per second from the host

    def slowed(self, share: float) -> Link:
        """The link with a part of its rates."""
        return Link(self.out_rate * share, self.in_rate * share)


@dataclass(frozen=True)
class Graph:
    """One training step."""

    ops: Sequence[Op]  #: those of the region, in the order of forward
    values: Sequence[Value]  #: the values that they make
    storages: Sequence[Storage]  #: the storages of these in forward
    saved: Sequence[SavedTensor]  #: the saved tensors among them, in the order of forward
    events: Sequence[Event]  #: the step: forward, backward from ``turn`` on, and what follows it
    turn: int  #: the number of the first event of backward after the last forward
    base: int = 0  #: bytes that are allocated throughout: parameters, buffers, optimizer state
    rerun_cost: float = 0.0  #: seconds that rerunning an op costs on top of its own time
    #: Seconds that the engine adds to a planned step, whatever the plan keeps.
    engine_cost: float = 0.0
    #: Seconds that offloading a tensor adds, not counting waits for copies.
    offload_cost: float = 0.0
    #: Seconds that checkpointing a module adds, by its path and the engine. Empty: no module is
    #: checkpointed as a whole.
    module_costs: Mapping[tuple[str, str], float] = field(default_factory=dict)
    spread: float = 0.0  #: the relative error of op times, from the spread of the samples
    link: Link | None = None  #: the link to the host, if there is one
    varies: bool = False  #: whether the memory of the next step may differ: shapes depend on data
    #: The number of the first op of each region. A step that calls the model several times has one
    #: for each call: what they hold is released apart from each other.
    regions: tuple[int, ...] = (0,)
    #: The paths of the modules that are recorded and run each by itself, with hooks of others
    #: around them, as in a sharded model. Empty: a forward is recorded as a whole.
    units: tuple[str, ...] = ()
    #: The number of the first op of each compiled graph, if the step runs several. A copy to the
    #: host, or back, runs beside the forward or backward of its own graph only.
    calls: tuple[int, ...] = ()
    #: The storages that are in ``before`` and ``during`` of the events, if that is known.
    fixed: Sequence[Storage] = ()
    block: int = 1  #: the allocator hands out multiples of this many bytes

    def region_of(self, op: int) -> int:
        """The number of the region of an op."""
        return bisect_right(self.regions, op) - 1

    def call_of(self, op: int) -> int:
        """The number of the compiled graph of an op; -1 if the step does not run several."""
        return bisect_right(self.calls, op) - 1

    def ops_of(self, region: int) -> range:
        """The numbers of the ops of a region."""
        return range(*(*self.regions, len(self.ops))[region : region + 2])

    @cached_property
    def results(self) -> list[tuple[int, ...]]:
        """By op: the values that it makes."""
        return [(*op.makes, *(new for _, new in op.writes)) for op in self.ops]

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """What graphs of the same step have in common at every size.

        Without numbers, what can be offloaded (which depends on bytes), and when storages die
        (which a traced step tells only roughly).
        """
        return (
            [_decisions(op) for op in self.ops],
            [(value.op, value.storage) for value in self.values],
            [storage.born for storage in (*self.storages, *self.fixed)],
            list(self.saved),
            [(event.op, event.unpacks, sorted(event.frees)) for event in self.events],
            (self.turn, self.regions),
        )

    @cached_property
    def tables(self) -> Tables:
        """Data for the simulator that is the same under every schedule."""
        return Tables(self)

    @cached_property
    def rerun_seconds(self) -> list[float]:
        """By op: the seconds to run it again."""
        return [op.seconds + self.rerun_cost for op in self.ops]

    @cached_property
    def plain_seconds(self) -> float:
        """The time of the step if everything is kept."""
        return sum(event.seconds for event in self.events)

    @cached_property
    def forced(self) -> frozenset[int]:
        """The ops that must not run again."""
        return frozenset(number for number, op in enumerate(self.ops) if op.forced)

    @cached_property
    def needed(self) -> frozenset[int]:
        """The ops whose results backward needs if only forced results are kept."""
        return self.wanted(frozenset())

    def wanted(self, kept: frozenset[int]) -> frozenset[int]:
        """The ops whose results are unpacked, or read by ops that run again."""
        kept |= self.forced
        held = {number for number, value in enumerate(self.values) if value.op in kept}
        needs = find_needs(self, [saved.value for saved in self.saved], held)
        return frozenset(needs.again).union(self.values[number].op for number, _ in needs.order)

    @cached_property
    def last_op(self) -> int:
        """The last op that ran in forward; -1 if there is none."""
        return max((event.op for event in self.events), default=-1)

    @cached_property
    def choices(self) -> list[int]:
        """The ops that a plan can decide on, in the order of forward."""
        ops = self.ops
        return sorted(n for n in self.needed if ops[n].can_keep and not ops[n].forced)


def _decisions(op: Op) -> tuple[Any, ...]:
    flags = (op.can_keep, op.forced, op.last)
    return op.key, op.name, op.reads, op.makes, op.writes, op.places, flags


class Tables:
    """Data about a graph for the simulator that is the same under every schedule.

    The end of the step counts as one more event.
    """

    def __init__(self, graph: Graph) -> None:
        events, values = graph.events, graph.values
        #: By value, and by storage: its bytes.
        self.nbytes = [value.nbytes for value in values]
        self.sizes = [storage.nbytes for storage in graph.storages]
        self.saved = [saved.value for saved in graph.saved]
        #: By op: its results, as a `WorkingSet` takes them, and their bytes; the values that it
        #: writes over.
        self.results = [[(value, 0) for value in made] for made in graph.results]
        self.made = [sum(self.nbytes[value] for value in made) for made in graph.results]
        self.written = [[old for old, _ in op.writes if old is not None] for op in graph.ops]
        #: By event: its seconds, and fixed bytes before and during it.
        self.event_seconds = [event.seconds for event in events]
        self.before = [event.before for event in events]
        self.during = [*(event.during for event in events), 0]
        #: By event: the bytes during it if nothing is kept for backward.
        self.least = list(map(add, _live(graph), self.during))
        self._find_actions(graph)
        #: By saved tensor: its region.
        self.regions = [graph.region_of(values[value].op) for value in self.saved]
        #: By op: the storages that autograd holds longest if its results are kept, and until when.
        self.holds: list[list[tuple[int, int]]] = [[] for _ in graph.ops]
        for value, end in zip(self.saved, self.frees, strict=True):
            storage = values[value].storage
            if end > graph.storages[storage].dies:
                self.holds[values[value].op].append((storage, end))

    def _find_actions(self, graph: Graph) -> None:
        events = graph.events
        #: All actions of the step; ``of_saved`` is the same without ``OP``.
        self.actions: list[Action] = []
        #: By saved tensor: the event that unpacks it, and the one after which autograd frees it;
        #: the end if there is none.
        self.unpacks = [len(events)] * len(graph.saved)
        self.frees = self.unpacks[:]
        #: By op: the event at which it ran.
        self.ran = [0] * len(graph.ops)
        backward = 0
        for now, event in enumerate(events):
            if event.unpacks and event.backward != backward:
                if backward:
                    self.actions.append((2 * now, BACKWARD, 0))
                backward = event.backward
            for number in event.unpacks:
                self.actions.append((2 * now, UNPACK, number))
                self.unpacks[number] = now
            if event.op >= 0:
                self.actions.append((2 * now + 1, OP, event.op))
                self.ran[event.op] = now
            self.actions += [(2 * now + 1, DROP, number) for number in event.drops]
            for number in event.frees:
                self.actions.append((2 * now + 1, FREE, number))
                self.frees[number] = now
        self.of_saved = [action for action in self.actions if action[1] != OP]


def fixed_bytes(fixed: Sequence[Storage], workspaces: Sequence[int]) -> list[tuple[int, int]]:
    """By event: the bytes of ``fixed`` before it, and the most while it runs.

    ``workspaces``: by event, the bytes that it needs beside its results.
    """
    born = [0] * (len(workspaces) + 2)
    for storage in fixed:
        born[storage.born] += storage.nbytes
    alive = _alive(fixed, len(workspaces))
    return [
        (now - new, now + more) for now, new, more in zip(alive, born, workspaces, strict=False)
    ]


def _live(graph: Graph) -> list[int]:
    """By event: the base, and the bytes of storages of forward that are alive."""
    return [graph.base + nbytes for nbytes in _alive(graph.storages, len(graph.events))]


def _alive(storages: Sequence[Storage], events: int) -> list[int]:
    """By event, of so many and the end of the step: the bytes of storages that are alive."""
    change = [0] * (events + 2)
    for storage in storages:
        change[storage.born] += storage.nbytes
        change[storage.dies + 1] -= storage.nbytes
    return list(accumulate(change))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Decisions for the ops of a graph. The results of ops that are not named are recomputed.

    With ``modules``, these are checkpointed as a whole and everything else runs plain; ``kept`` is
    then what that keeps.
    """

    kept: frozenset[int]  #: the ops whose results stay on the device
    offloaded: frozenset[int] = frozenset()  #: the ops whose results are offloaded to the host
    limit: int = 0  #: bytes that may be in flight to the host
    ahead: int | None = None  #: bytes that may be prefetched; None: ``limit``
    #: Prefetching starts when this many saved tensors off the device are left; None: when backward
    #: starts.
    begin: int | None = None
    #: Paths of modules, each with the engine that runs it.
    modules: tuple[tuple[str, str], ...] = ()
    link_share: float = 1.0  #: the part of the link's rates that it relies on
