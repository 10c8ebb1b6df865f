"""Builds the graph that a plan is made on, from the trace of a step and its recordings (P2).

The trace has every op of the step, the recordings those of the regions: the forwards of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from recollect.graph.graph import Event, Graph, Link, Op, SavedTensor, Storage, Value, fixed_bytes
from recollect.planning.recording.trace import StepTrace
from recollect.policy.op_info import op_info
from recollect.replay.recorded_graph import RecordedOp, RecordedValue, is_whole
from recollect.replay.recording import Recording, find_holdable, forced_values

#: The allocator of a CUDA device hands out multiples of this many bytes.
_CUDA_BLOCK = 512
#: Smaller results are not worth a copy to the host.
_SMALLEST_TO_OFFLOAD = 1 << 20


def build_graph(
    trace: StepTrace,
    recordings: Sequence[Recording],
    *,
    base: int,
    on_device: bool,
    link: Link | None = None,
) -> Graph:
    """Build the graph of a step.

    ``recordings``: of each forward, in their order. ``base``: bytes that are allocated before it;
    those that the step frees are no part of the base of the graph.
    """
    return _Builder(trace, recordings, on_device).build(base, link)


class _Storages:
    def __init__(self, trace: StepTrace, block: int) -> None:
        self._sizes = trace.sizes
        self.block = block
        #: By number in the trace: the number in the graph.
        self.planned: dict[int, int] = {}
        #: By number in the graph: the number in the trace, and the event that allocates it.
        self.found: list[tuple[int, int]] = []

    def add(self, storage: int, event: int) -> None:
        self.planned[storage] = len(self.found)
        self.found.append((storage, event))

    def size(self, storage: int) -> int:
        """The bytes of a storage of the trace, as the allocator counts them."""
        return -(-self._sizes[storage] // self.block) * self.block


class _ForwardPart:
    """One forward of the step, with so many ops before it that are of others."""

    def __init__(
        self, trace: StepTrace, recording: Recording, first: int, *, on_device: bool
    ) -> None:
        self._trace = trace
        self._recording = recording
        self.recorded = recording.graph
        self._first = first
        self._on_device = on_device
        count = len(recording.graph.ops)
        #: By op: the event in which it ran.
        self.events = {
            e.op - first: n for n, e in enumerate(trace.events) if first <= e.op < first + count
        }
        # First: this leaves the saved tensors to autograd that cannot be recomputed.
        self._forced = forced_values(recording.graph, recording.calls)
        #: By recorded value: its number in the graph.
        self.values: dict[int, int] = {}
        #: The tensors that autograd saved, in the order of forward.
        self.packed = [view for call in recording.calls for view in call.packed]

    # --- values -----------------------------------------------------------------------------------

    def add_values(self, values: list[Value], storages: _Storages) -> None:
        """Add its values and storages to those of the graph."""
        #: By storage of the recording: its number in the trace.
        known: dict[int, int] = {}
        for op in self.recorded.ops:
            event = self.events.get(op.number)
            if event is None:
                continue
            allocated = self._trace.events[event].allocated
            for path, value in zip(op.paths, op.makes, strict=True):
                storage = allocated.get(path)
                if storage is not None:
                    known[self.recorded.values[value].storage_number] = storage
                    storages.add(storage, event)
            for recorded in self._results(op):
                storage = known.get(recorded.storage_number)
                if storage is not None:
                    self.values[recorded.number] = len(values)
                    number = self._first + op.number
                    values.append(Value(storages.size(storage), number, storages.planned[storage]))

    def _results(self, op: RecordedOp) -> list[RecordedValue]:
        return [self.recorded.values[number] for number in op.results]

    def _numbers(self, recorded: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.values[number] for number in recorded if number in self.values)

    # --- ops --------------------------------------------------------------------------------------

    def op(self, op: RecordedOp) -> Op:
        """The op of the graph for a recorded one."""
        key = op.key
        path, name, _ = ("", op_info(op.op).name, "") if key is None else key.split("|")
        number = self.events.get(op.number)
        event = None if number is None else self._trace.events[number]
        values, last = self.values, self._last_ops.get(op.number, -1)
        can_keep = key is not None and self._can_keep(op)
        # To run it again: in host memory, even if the op runs on a device.
        state = None if op.generator is None or self._on_device else op.generator.get_state()
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
            state=0 if state is None else state.nbytes,
            can_keep=can_keep,
            can_offload=can_keep and self._can_offload(op),
            forced=not self._forced.isdisjoint(op.results),
            last=last if last < 0 else self._first + last,
            source="" if event is None else event.source,
        )

    @cached_property
    def _last_ops(self) -> dict[int, int]:
        """By op: the last op that its function ran."""
        last: dict[int, int] = {}
        for call in self._recording.calls:
            ran = [number for number in range(*call.ops) if number in self.events]
            last.update(dict.fromkeys(ran, ran[-1] if ran else -1))
        return last

    @cached_property
    def _holdable(self) -> set[int]:
        return find_holdable(self._recording.calls)

    @cached_property
    def _used(self) -> set[int]:
        """The recorded values that ops read or autograd saved."""
        read = {number for op in self.recorded.ops for number in op.reads}
        return read | {view.value.number for view in self.packed if view is not None}

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

    def saved_tensors(self) -> Iterator[SavedTensor | None]:
        """The saved tensors in their order: that of the graph, if it has the value."""
        for call in self._recording.calls:
            first, last = call.ops
            event = self.events.get(first if first < last else first - 1, 0)
            for view in call.packed:
                value = None if view is None else self.values.get(view.value.number)
                yield None if value is None else SavedTensor(value, event)

    # --- storages ---------------------------------------------------------------------------------

    def held_for_the_trace(self) -> Iterator[tuple[int, int, bool]]:
        """The values of the graph that were held for the schedule of the traced step.

        Each with the last event at which forward made or read it, and whether it must be kept.
        """
        # Results that opaque functions do not return were not held.
        for op in self.recorded.ops:
            kept = op.results if op.keep is not None else op.held
            for value in (self.recorded.values[number] for number in kept):
                if value.unsure is None and value.number in self.values:
                    last = self._last_reads[value.number]
                    yield self.values[value.number], last, op.keep is not None

    @cached_property
    def _last_reads(self) -> dict[int, int]:
        """By recorded value: the last event of forward that made or read it."""
        return {
            number: self.events.get(op.number, 0)
            for op in self.recorded.ops
            for number in (*op.results, *op.reads)
        }


class _Builder:
    def __init__(self, trace: StepTrace, recordings: Sequence[Recording], on_device: bool) -> None:
        self._trace = trace
        self._regions: list[_ForwardPart] = []
        first = 0
        for recording in recordings:
            self._regions.append(_ForwardPart(trace, recording, first, on_device=on_device))
            first += len(recording.graph.ops)
        self._storages = _Storages(trace, _CUDA_BLOCK if on_device else 1)
        self._varies = any(each.shapes for each in recordings)

    def build(self, base: int, link: Link | None) -> Graph:
        values: list[Value] = []
        for region in self._regions:
            region.add_values(values, self._storages)
        saved = {
            number: each
            for number, each in enumerate(s for r in self._regions for s in r.saved_tensors())
            if each is not None
        }
        ops = [[region.op(op) for op in region.recorded.ops] for region in self._regions]
        ends, size, fixed = self._last_events(values), self._storages.size, self._fixed_storages()
        return Graph(
            ops=[op for of_region in ops for op in of_region],
            values=values,
            storages=[Storage(size(n), born, ends[n]) for n, born in self._storages.found],
            saved=list(saved.values()),
            events=self._make_events({number: n for n, number in enumerate(saved)}, fixed),
            turn=self._turn(),
            base=base - sum(map(size, self._freed_early)),
            link=link,
            varies=self._varies,
            regions=tuple(sum(map(len, ops[:number])) for number in range(len(ops))),
            fixed=fixed,
            block=self._storages.block,
        )

    def _turn(self) -> int:
        events = self._trace.events
        begin = max((n for n, event in enumerate(events) if event.op >= 0), default=-1) + 1
        later = (n for n, event in enumerate(events[begin:], begin) if event.is_backward)
        return next(later, 0)

    @cached_property
    def _released(self) -> dict[int, int]:
        """By saved tensor of the trace: the event after which autograd released it."""
        events = self._trace.events
        released = {saved: n - 1 for n, event in enumerate(events) for saved in event.released}
        return released | dict.fromkeys(self._trace.released, len(events) - 1)

    def _last_events(self, values: list[Value]) -> dict[int, int]:
        """By storage of the trace: the last event at which somebody holds it, plan or not."""
        events = self._trace.events
        ends = dict.fromkeys(range(len(self._trace.sizes)), len(events) - 1)
        ends |= {storage: n - 1 for n, event in enumerate(events) for storage in event.freed}
        dropped = {storage: n - 1 for n, event in enumerate(events) for storage in event.dropped}
        # The traced step held what must be kept, and what its schedule keeps. Another schedule
        # holds it for as long as it is needed, and others until their last read, or until the model
        # and the loop drop it.
        last_region = self._regions[-1]
        for region in self._regions:
            for value, last_read, is_forced in region.held_for_the_trace():
                storage = self._storages.found[values[value].storage][0]
                may_be_held = not is_forced or region is not last_region
                if may_be_held and storage in self._trace.outputs:
                    continue  # by the loop or a later forward too, for as long as was seen
                last = max(last_read, dropped.get(storage, len(events)))
                ends[storage] = min(ends[storage], last)
        packed = (view for region in self._regions for view in region.packed)
        for saved, view in enumerate(packed):
            held = self._trace.saved[saved]
            if view is None and held is not None:  # autograd holds it, plan or not
                ends[held] = max(ends[held], self._released.get(saved, 0))
        return ends

    # --- events -----------------------------------------------------------------------------------

    def _make_events(self, numbers: dict[int, int], fixed: list[Storage]) -> list[Event]:
        """``numbers``: by saved tensor of the trace, its number in the graph."""
        trace = self._trace
        released: list[list[int]] = [[] for _ in trace.events]
        for saved, last in self._released.items():
            if saved in numbers and last >= 0:
                released[last].append(numbers[saved])
        dropped = [[numbers[n] for n in e.returned if n in numbers] for e in trace.events]
        dropped = [*dropped[1:], []]  # before the next one
        workspaces = [event.price.workspace for event in trace.events]
        events = []
        for number, (event, bytes_at) in enumerate(
            zip(trace.events, fixed_bytes(fixed, workspaces), strict=True)
        ):
            # FSDP gathers before the op, or frees after it.
            before = bytes_at[0] + event.gathered[0]
            during = bytes_at[1] + max(event.gathered)
            unpacks = tuple(numbers[saved] for saved in event.unpacked if saved in numbers)
            frees = tuple(released[number])
            seconds, backward = event.price.seconds, event.backward
            drops = tuple(dropped[number])
            events.append(Event(seconds, before, during, event.op, unpacks, frees, backward, drops))
        return events

    @cached_property
    def _freed_early(self) -> list[int]:
        """The storages that were there before the step, and that it frees."""
        earlier = self._trace.earlier
        return [n for event in self._trace.events for n in event.freed if n in earlier]

    def _fixed_storages(self) -> list[Storage]:
        """The storages that no plan changes."""
        events, size = self._trace.events, self._storages.size
        freed = {storage: n - 1 for n, event in enumerate(events) for storage in event.freed}
        born = dict.fromkeys(self._freed_early, 0) | {
            storage: n
            for n, event in enumerate(events)
            for storage in event.allocated.values()
            if storage not in self._storages.planned
        }
        for event, following in pairwise(events):
            old, made = event.adds_to, [*event.allocated.values()]
            if event.is_backward and old in born and old in following.freed and len(made) == 1:
                (new,) = made
                if new in born and size(new) == size(old):
                    # Autograd adds up gradients in place, but not under a dispatch mode.
                    born[new] = born.pop(old)
        return [Storage(size(s), n, freed.get(s, len(events) - 1)) for s, n in born.items()]
