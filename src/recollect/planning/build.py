"""Builds the graph that a plan is made on, from the trace of a step and the recording (P2).

The trace has every op of the step, the recording those of the region: the model's forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise

from recollect.graph.graph import Event, Graph, Link, Op, SavedTensor, Storage, Value
from recollect.planning.trace import StepTrace
from recollect.policy.op_info import op_info
from recollect.replay.function_call import PackedTensor
from recollect.replay.recorded_graph import RecordedOp, RecordedValue, is_whole
from recollect.replay.recording import Recording, find_holdable, forced_values

__all__ = ["build_graph"]

#: The allocator of a CUDA device hands out multiples of this many bytes.
_CUDA_BLOCK = 512
#: Smaller results are not worth a copy to the host.
_SMALLEST_TO_OFFLOAD = 1 << 20


def build_graph(
    trace: StepTrace, recording: Recording, *, base: int, on_device: bool, link: Link | None = None
) -> Graph:
    """Build the graph of a step. ``base``: bytes that are allocated throughout."""
    return _Builder(trace, recording, on_device).build(base, link)


class _Builder:
    def __init__(self, trace: StepTrace, recording: Recording, on_device: bool) -> None:
        self._trace = trace
        self._recording = recording
        self._recorded = recording.graph
        self._on_device = on_device
        self._block = _CUDA_BLOCK if on_device else 1
        #: By op of the region: the event in which it ran.
        self._events = {e.op: n for n, e in enumerate(trace.events) if e.op >= 0}
        # First: this leaves the saved tensors to autograd that cannot be recomputed.
        self._forced = forced_values(recording.graph, recording.calls)
        #: By recorded value: its number in the graph.
        self._values: dict[int, int] = {}
        #: The storages of the graph, which the plan decides on: by number in the trace, the number
        #: in the graph; by number in the graph, the number in the trace and the allocating event.
        self._planned: dict[int, int] = {}
        self._storages: list[tuple[int, int]] = []

    def build(self, base: int, link: Link | None) -> Graph:
        values = self._find_values()
        saved = self._saved_tensors()
        ends = self._last_events(values)
        return Graph(
            ops=[self._op(op) for op in self._recorded.ops],
            values=values,
            storages=[Storage(self._size(n), born, ends[n]) for n, born in self._storages],
            saved=list(saved.values()),
            events=self._make_events({number: n for n, number in enumerate(saved)}),
            turn=next((n for n, e in enumerate(self._trace.events) if e.is_backward), 0),
            base=base,
            link=link,
            varies=bool(self._recording.shapes),
        )

    def _size(self, storage: int) -> int:
        """The bytes of a storage of the trace, as the allocator counts them."""
        return -(-self._trace.sizes[storage] // self._block) * self._block

    # --- values -----------------------------------------------------------------------------------

    def _find_values(self) -> list[Value]:
        values: list[Value] = []
        #: By storage of the recording: its number in the trace.
        storages: dict[int, int] = {}
        for op in self._recorded.ops:
            event = self._events.get(op.number)
            if event is None:
                continue
            allocated = self._trace.events[event].allocated
            for path, value in zip(op.paths, op.makes, strict=True):
                storage = allocated.get(path)
                if storage is not None:
                    storages[self._recorded.values[value].storage] = storage
                    self._planned[storage] = len(self._storages)
                    self._storages.append((storage, event))
            for recorded in self._results(op):
                storage = storages.get(recorded.storage)
                if storage is not None:
                    self._values[recorded.number] = len(values)
                    values.append(Value(self._size(storage), op.number, self._planned[storage]))
        return values

    def _results(self, op: RecordedOp) -> list[RecordedValue]:
        return [self._recorded.values[number] for number in op.results]

    def _numbers(self, recorded: Iterable[int]) -> tuple[int, ...]:
        """The numbers in the graph of recorded values, of those that it has."""
        return tuple(self._values[number] for number in recorded if number in self._values)

    # --- ops --------------------------------------------------------------------------------------

    def _op(self, op: RecordedOp) -> Op:
        key = op.key
        path, name, _ = ("", str(op.op), "") if key is None else key.split("|")
        number = self._events.get(op.number)
        event = None if number is None else self._trace.events[number]
        values = self._values
        can_keep = key is not None and self._can_keep(op)
        return Op(
            name=name,
            path=path,
            key=key or "",
            seconds=0.0 if event is None else event.price.seconds,
            reads=self._numbers(op.reads),
            makes=self._numbers(op.makes),
            places=tuple(n for n, value in enumerate(op.makes) if value in values),
            writes=tuple(
                (None if old in op.fresh else values.get(old), values[new])
                for old, new in op.writes
                if new in values
            ),
            workspace=0 if event is None else event.price.workspace,
            state=self._generator_bytes(op),
            can_keep=can_keep,
            can_send=can_keep and self._can_offload(op),
            forced=not self._forced.isdisjoint(op.results),
            last=self._last_ops.get(op.number, -1),
        )

    @cached_property
    def _last_ops(self) -> dict[int, int]:
        """By op: the last op that its function ran."""
        last: dict[int, int] = {}
        for call in self._recording.calls:
            ran = [number for number in range(*call.ops) if number in self._events]
            last.update(dict.fromkeys(ran, ran[-1] if ran else -1))
        return last

    def _generator_bytes(self, op: RecordedOp) -> int:
        """Bytes of the generator state to run it again, which is held in host memory."""
        if op.generator is None or self._on_device:
            return 0
        return int(op.generator.get_state().nbytes)

    @cached_property
    def _holdable(self) -> set[int]:
        return find_holdable(self._recording.calls)

    @cached_property
    def _used(self) -> set[int]:
        """The recorded values that ops read or autograd saved."""
        read = {number for op in self._recorded.ops for number in op.reads}
        return read | {pack.view.value.number for pack in self._packed if pack.view is not None}

    def _can_keep(self, op: RecordedOp) -> bool:
        info = op_info(op.op)
        return (info.can_be_kept or info.writes) and all(
            value.number in self._holdable and value.is_last and value.unsure is None
            for value in self._results(op)
            if value.number in self._used
        )

    def _can_offload(self, op: RecordedOp) -> bool:
        """Whether all of its large results can be offloaded. Small ones stay on the device."""
        large = [
            value
            for value in self._results(op)
            if value.number in self._used and value.nbytes >= _SMALLEST_TO_OFFLOAD
        ]
        whole = [is_whole(value.layout, value.nbytes) for value in large]
        return self._on_device and bool(large) and all(whole)

    # --- saved tensors ----------------------------------------------------------------------------

    @cached_property
    def _packed(self) -> list[PackedTensor]:
        return [pack for call in self._recording.calls for pack in call.packed]

    def _saved_tensors(self) -> dict[int, SavedTensor]:
        """By saved tensor of the trace: that of the graph, if it has the value."""
        saved: dict[int, SavedTensor] = {}
        number = 0
        for call in self._recording.calls:
            first, last = call.ops
            event = self._events.get(first if first < last else first - 1, 0)
            for pack in call.packed:
                value = None if pack.view is None else self._values.get(pack.view.value.number)
                if value is not None:
                    saved[number] = SavedTensor(value, event)
                number += 1
        return saved

    @cached_property
    def _released(self) -> dict[int, int]:
        """By saved tensor of the trace: the event after which autograd released it."""
        events = self._trace.events
        released = {saved: n - 1 for n, event in enumerate(events) for saved in event.released}
        return released | dict.fromkeys(self._trace.released, len(events) - 1)

    # --- storages ---------------------------------------------------------------------------------

    def _last_events(self, values: list[Value]) -> dict[int, int]:
        """By storage of the trace: the last event at which somebody holds it, plan or not."""
        events = self._trace.events
        ends = dict.fromkeys(range(len(self._trace.sizes)), len(events) - 1)
        ends |= {storage: n - 1 for n, event in enumerate(events) for storage in event.freed}
        dropped = {storage: n - 1 for n, event in enumerate(events) for storage in event.dropped}
        # The traced step held what must be kept, and what its schedule keeps; not the results that
        # opaque functions do not return. Another schedule holds them for as long as they are
        # needed, and others until their last read, or until the model and the loop drop them.
        for op in self._recorded.ops:
            kept = op.results if op.keep is not None else op.held
            for value in (self._recorded.values[number] for number in kept):
                if value.unsure is None and value.number in self._values:
                    storage = self._storages[values[self._values[value.number]].storage][0]
                    if op.keep is None and storage in self._trace.outputs:
                        continue  # the loop may hold it too, for as long as was seen
                    last = max(self._last_reads[value.number], dropped.get(storage, len(events)))
                    ends[storage] = min(ends[storage], last)
        for saved, pack in enumerate(self._packed):
            held = self._trace.saved[saved]
            if pack.view is None and held is not None:  # autograd holds it, plan or not
                ends[held] = max(ends[held], self._released.get(saved, 0))
        return ends

    @cached_property
    def _last_reads(self) -> dict[int, int]:
        """By recorded value: the last event of forward that made or read it."""
        return {
            number: self._events.get(op.number, 0)
            for op in self._recorded.ops
            for number in (*op.results, *op.reads)
        }

    # --- events -----------------------------------------------------------------------------------

    def _make_events(self, numbers: dict[int, int]) -> list[Event]:
        """``numbers``: by saved tensor of the trace, its number in the graph."""
        trace = self._trace
        released: list[list[int]] = [[] for _ in trace.events]
        for saved, last in self._released.items():
            if saved in numbers and last >= 0:
                released[last].append(numbers[saved])
        events = []
        for number, (event, (before, during)) in enumerate(
            zip(trace.events, self._fixed_bytes(), strict=True)
        ):
            unpacks = tuple(numbers[saved] for saved in event.unpacked if saved in numbers)
            frees = tuple(released[number])
            events.append(Event(event.price.seconds, before, during, event.op, unpacks, frees))
        return events

    def _fixed_bytes(self) -> Iterator[tuple[int, int]]:
        """By event: the bytes that no plan changes, before it and at most while it runs."""
        events = self._trace.events
        allocated = [self._fixed(event.allocated.values()) for event in events]
        freed = [self._fixed(event.freed) for event in events]
        for number, (event, following) in enumerate(pairwise(events)):
            summed = self._fixed(each for each in following.freed if each == event.adds_to)
            if event.is_backward and self._total(summed) == self._total(allocated[number]):
                # Autograd adds up gradients in place, but not under a dispatch mode.
                allocated[number] = []
                freed[number + 1] = [s for s in freed[number + 1] if s not in summed]
        alive = 0
        for event, made, gone in zip(events, allocated, freed, strict=True):
            alive -= self._total(gone)
            before = alive
            alive += self._total(made)
            yield before, alive + event.price.workspace

    def _fixed(self, storages: Iterable[int]) -> list[int]:
        """Those that no plan changes."""
        return [storage for storage in storages if storage not in self._planned]

    def _total(self, storages: Iterable[int]) -> int:
        return sum(map(self._size, storages))
