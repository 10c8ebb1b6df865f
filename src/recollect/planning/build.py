"""From a step that was watched to the graph that is planned on (P2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from recollect.graph.graph import Event, Graph, Link, Op, Origins, SavedTensor, Storage, Value
from recollect.planning.trace import StepTrace
from recollect.policy.op_info import op_info
from recollect.replay.function_call import PackedTensor
from recollect.replay.recorded_graph import RecordedOp, RecordedValue, is_whole
from recollect.replay.recording import Recording
from recollect.replay.region_schedule import find_holdable, forced_values

__all__ = ["build_graph", "resized"]

#: What the allocator of a CUDA device hands out are multiples of this.
_BLOCK = 512
#: What is smaller is not worth a copy to the host.
_SMALLEST_TO_SEND = 1 << 20


def build_graph(
    trace: StepTrace, recording: Recording, *, base: int, on_device: bool, link: Link | None = None
) -> Graph:
    """The graph of a step: ``trace`` saw all of it, ``recording`` is of the region."""
    return _Builder(trace, recording, on_device).graph(base, link)


class _Builder:
    def __init__(self, trace: StepTrace, recording: Recording, on_device: bool) -> None:
        self._trace = trace
        self._recording = recording
        self._recorded = recording.graph
        self._on_device = on_device
        self._block = _BLOCK if on_device else 1
        #: By number of an op of the region: the event in which it ran.
        self._events = {e.op: n for n, e in enumerate(trace.events) if e.op >= 0}
        self._forced = forced_values(recording.graph, recording.calls)
        #: The results of ops that must not run again, but for what opaque functions do not return.
        self._held = {
            value.number
            for op in self._recorded.ops
            if op.keep is not None
            for value in self._results(op)
            if value.unsure is None
        }
        #: Memories of the trace that are the region's, each with its number in the graph.
        self._managed: dict[int, int] = {}
        #: By number of a recorded value: its number in the graph.
        self._values: dict[int, int] = {}
        self._memories: list[tuple[int, int]] = []

    def graph(self, base: int, link: Link | None) -> Graph:
        values = self._find_values()
        asks = self._asks()
        dies = self._deaths(values)
        memories = [
            Storage(self._size(number), born, dies[number]) for number, born in self._memories
        ]
        origins = self._origins()
        return Graph(
            ops=[self._op(op) for op in self._recorded.ops],
            values=values,
            storages=memories,
            saved=list(asks.values()),
            events=self._make_events({pack: n for n, pack in enumerate(asks)}, origins),
            turn=next((n for n, e in enumerate(self._trace.events) if e.is_backward), 0),
            base=base,
            link=link,
            varies=bool(self._recording.shapes),
            origins=origins,
        )

    def _size(self, number: int) -> int:
        nbytes = self._trace.sizes[number]
        return -(-nbytes // self._block) * self._block

    # --- values -----------------------------------------------------------------------------------

    def _find_values(self) -> list[Value]:
        values: list[Value] = []
        #: By number of a memory of the tape: of that of the trace.
        of_recorded: dict[int, int] = {}
        for op in self._recorded.ops:
            event = self._events.get(op.number)
            if event is None:
                continue
            made = self._trace.events[event].made
            for path, value in zip(op.paths, op.makes, strict=True):
                recorded = self._recorded.values[value]
                number = made.get(path)
                if number is not None:
                    of_recorded[recorded.storage] = number
                    self._managed[number] = len(self._memories)
                    self._memories.append((number, event))
            for recorded in self._results(op):
                number = of_recorded.get(recorded.storage)
                if number is not None:
                    self._values[recorded.number] = len(values)
                    values.append(Value(self._size(number), op.number, self._managed[number]))
        return values

    def _results(self, op: RecordedOp) -> list[RecordedValue]:
        return [self._recorded.values[number] for number in op.results]

    def _numbers(self, recorded: Iterable[int]) -> tuple[int, ...]:
        found = map(self._values.get, recorded)
        return tuple(number for number in found if number is not None)

    # --- ops --------------------------------------------------------------------------------------

    def _op(self, op: RecordedOp) -> Op:
        key = op.key
        path, name, _ = ("", str(op.op), "") if key is None else key.split("|")
        number = self._events.get(op.number)
        event = None if number is None else self._trace.events[number]
        values = self._values
        writes = tuple(
            (None if old in op.fresh else values.get(old), values[new])
            for old, new in op.writes
            if new in values
        )
        forced = any(number in self._forced for number in op.results)
        can_keep = key is not None and self._can_keep(op)
        return Op(
            name=name,
            path=path,
            key=key or "",
            seconds=0.0 if event is None else event.seconds,
            reads=self._numbers(op.reads),
            makes=self._numbers(op.makes),
            places=tuple(n for n, value in enumerate(op.makes) if value in self._values),
            writes=writes,
            workspace=0 if event is None else event.workspace,
            state=self._state(op),
            can_keep=can_keep,
            can_send=can_keep and self._can_send(op),
            forced=forced,
            last=self._lasts.get(op.number, -1),
        )

    @cached_property
    def _lasts(self) -> dict[int, int]:
        """By number of an op: of the last one that its function ran."""
        found: dict[int, int] = {}
        for step in self._recording.calls:
            ran = [number for number in range(*step.ops) if number in self._events]
            found.update(dict.fromkeys(ran, ran[-1] if ran else -1))
        return found

    def _state(self, op: RecordedOp) -> int:
        """What it takes to draw the same random numbers again; it is held in the host's memory."""
        if op.generator is None or self._on_device:
            return 0
        return int(op.generator.get_state().nbytes)

    @cached_property
    def _holdable(self) -> set[int]:
        return find_holdable(self._recording.calls)

    @cached_property
    def _wanted(self) -> set[int]:
        wanted = {read for op in self._recorded.ops for read in op.reads}
        return wanted | {pack.view.value.number for pack in self._packs if pack.view is not None}

    def _can_keep(self, op: RecordedOp) -> bool:
        info = op_info(op.op)
        wanted = [value for value in self._results(op) if value.number in self._wanted]
        return (info.can_be_kept or info.writes) and all(
            value.number in self._holdable and value.is_last and value.unsure is None
            for value in wanted
        )

    def _can_send(self, op: RecordedOp) -> bool:
        wanted = [value for value in self._results(op) if value.number in self._wanted]
        large = [value for value in wanted if value.nbytes >= _SMALLEST_TO_SEND]
        # Small ones stay where they are.
        return (
            self._on_device
            and bool(large)
            and all(is_whole(value.layout, value.nbytes) for value in large)
        )

    # --- saved tensors ----------------------------------------------------------------------------

    @cached_property
    def _packs(self) -> list[PackedTensor]:
        return [pack for step in self._recording.calls for pack in step.packed]

    def _asks(self) -> dict[int, SavedTensor]:
        """What backward asks for, by the number of the saved tensor."""
        asks: dict[int, SavedTensor] = {}
        number = 0
        for step in self._recording.calls:
            first, last = step.ops
            event = self._events.get(first if first < last else first - 1, 0)
            for pack in step.packed:
                value = None if pack.view is None else self._values.get(pack.view.value.number)
                if value is not None:
                    asks[number] = SavedTensor(value, event)
                number += 1
        return asks

    # --- events -----------------------------------------------------------------------------------

    def _ends(self) -> dict[int, int]:
        """By number of a saved tensor: the event after which it was freed."""
        events = self._trace.events
        ends = {saved: n - 1 for n, event in enumerate(events) for saved in event.ends}
        return ends | dict.fromkeys(self._trace.ends, len(events) - 1)

    def _deaths(self, values: list[Value]) -> dict[int, int]:
        """By number of a memory of the trace: the last event at which somebody holds it."""
        events = self._trace.events
        dies = dict.fromkeys(range(len(self._trace.sizes)), len(events) - 1)
        dies |= {memory: n - 1 for n, event in enumerate(events) for memory in event.freed}
        for recorded, event in self._last_reads().items():
            # What has to be kept was held while the step was watched. In a plan it is as well, for
            # as long as it is needed; others hold it until they have read it.
            if recorded in self._held:
                number = self._memories[values[self._values[recorded]].storage][0]
                dies[number] = min(dies[number], event)
        ends = self._ends()
        for saved, pack in enumerate(self._packs):
            memory = self._trace.saved[saved]
            if pack.view is None and memory is not None:  # autograd holds it by any plan
                dies[memory] = max(dies[memory], ends.get(saved, 0))
        return dies

    def _last_reads(self) -> dict[int, int]:
        """By number of a recorded value: the event that made it, or read it last in forward."""
        found: dict[int, int] = {}
        for op in self._recorded.ops:
            event = self._events.get(op.number, 0)
            for number in [*op.results, *op.reads]:
                if number in self._values:
                    found[number] = event
        return found

    def _origins(self) -> Origins:
        """What the bytes are made of."""
        events = self._trace.events
        made = [self._others(event.made.values()) for event in events]
        freed = [self._others(event.freed) for event in events]
        for number, (event, following) in enumerate(pairwise(events)):
            summed = self._others(m for m in following.freed if m == event.sum_of)
            if event.is_backward and self._total(summed) == self._total(made[number]):
                # Autograd adds up gradients in place, but not where a mode looks on.
                made[number] = ()
                freed[number + 1] = tuple(m for m in freed[number + 1] if m not in summed)
        return Origins(
            tuple(number for number, _ in self._memories),
            tuple(made),
            tuple(freed),
            tuple(event.workspace for event in events),
            self._block,
        )

    def _others(self, memories: Iterable[int]) -> tuple[int, ...]:
        """Those that are not for the plan to change."""
        return tuple(memory for memory in memories if memory not in self._managed)

    def _total(self, memories: Iterable[int]) -> int:
        return sum(map(self._size, memories))

    def _make_events(self, numbers: dict[int, int], origins: Origins) -> list[Event]:
        trace = self._trace
        ends: list[list[int]] = [[] for _ in trace.events]
        for saved, last in self._ends().items():
            if saved in numbers and last >= 0:
                ends[last].append(numbers[saved])
        events = []
        levels = _levels(origins, trace.sizes, origins.workspaces)
        for number, (event, (before, during)) in enumerate(zip(trace.events, levels, strict=True)):
            asks = tuple(numbers[saved] for saved in event.asks if saved in numbers)
            events.append(Event(event.seconds, before, during, event.op, asks, tuple(ends[number])))
        return events


def _levels(
    origins: Origins, sizes: Sequence[int], workspaces: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """By event: bytes not for the plan to change before it, and the most of them while it lasts.

    ``sizes``: by number of a memory.
    """

    def total(memories: Iterable[int]) -> int:
        return sum(origins.size(sizes[memory]) for memory in memories)

    alive = 0
    for made, freed, workspace in zip(origins.made, origins.freed, workspaces, strict=True):
        alive -= total(freed)
        before = alive
        alive += total(made)
        yield before, alive + workspace


def resized(graph: Graph, sizes: Sequence[int], factors: Mapping[int, float]) -> Graph:
    """The graph with memories of other sizes.

    ``factors``: by event: how much more its op has to do, if it has, for seconds and workspace.
    """
    origins = graph.origins
    assert origins is not None
    workspaces = [math.ceil(w * factors.get(n, 1.0)) for n, w in enumerate(origins.workspaces)]
    memories = [
        replace(memory, nbytes=origins.size(sizes[number]))
        for memory, number in zip(graph.storages, origins.storages, strict=True)
    ]
    ops = list(graph.ops)
    events = []
    levels = _levels(origins, sizes, workspaces)
    for number, (event, (before, during)) in enumerate(zip(graph.events, levels, strict=True)):
        factor = factors.get(number, 1.0)
        seconds = event.seconds * factor
        events.append(replace(event, seconds=seconds, before=before, during=during))
        if event.op >= 0 and factor != 1.0:
            op = ops[event.op]
            ops[event.op] = replace(op, seconds=op.seconds * factor, workspace=workspaces[number])
    return replace(
        graph,
        ops=ops,
        values=[replace(v, nbytes=memories[v.storage].nbytes) for v in graph.values],
        storages=memories,
        events=events,
        origins=replace(origins, workspaces=tuple(workspaces)),
    )
