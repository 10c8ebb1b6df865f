"""A region of the replay engine: its tape beside the storages that its ops were seen to make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.ops import CAST
from recollect.explaining.storages import Region, StorageTable, TrackedStorage
from recollect.policy.op_info import op_info
from recollect.replay.engine import CallReport
from recollect.replay.held_tensor import HeldTensor
from recollect.replay.reasons import Reasons
from recollect.replay.recorded_graph import RecordedOp, RecordedValue
from recollect.replay.rematerialize import Rematerializer

__all__ = ["ReplayRegion"]

_COPY = "(copy)"


class _Part:
    """A call, or a part of it that was recorded by itself."""

    def __init__(self) -> None:
        #: The ops that ran, each with its number and the storages that it made.
        self.ops: list[tuple[Any, int, list[TrackedStorage]]] = []
        #: What the graph has in place of saved tensors: the first item is the tensor, if held.
        self.tickets: list[Any] = []


class ReplayRegion(Region):
    """Runs ops again, and not the function. Holds tensors until its forward is over."""

    engine = "replay"

    def __init__(self, name: str, report: CallReport) -> None:
        assert report.remat is not None
        super().__init__(name, report.remat.offload_batch)
        self._witness: CallReport | None = report
        #: One, or two if the call was recorded from its middle on.
        self._parts: list[_Part] = []
        self._recalls: list[ReferenceType[Rematerializer]] = []
        #: The numbers of the ops that will run again.
        self.again: set[int] = set()
        #: Whether the call was recorded, and the next one will run otherwise.
        self.is_rehearsal = False

    @property
    def is_alive(self) -> bool:
        return any(remat() is not None for remat in self._recalls)

    def runs_again(self, number: int) -> bool:
        return number in self.again

    def note_hooks(self) -> None:
        self._parts.append(_Part())

    def note_op(self, op: Any, made: list[TrackedStorage]) -> None:
        if self._parts:  # else the engine prepares the call
            self._parts[-1].ops.append((op, self.ops, made))

    def note_packed(self, packed: Any) -> None:
        self._parts[-1].tickets.append(packed)

    def end(self, table: StorageTable) -> None:
        report, self._witness = self._witness, None
        assert report is not None
        self.is_rehearsal = report.is_rehearsal
        if report.unsettled is not None:
            self.notes.append(f"recorded at every call: {report.unsettled}")
        if report.stopped is not None:
            what = "everything is held" if report.rest is None else "it is recorded again"
            self.notes.append(f"{what} from some point on: {report.stopped}")
        recalls = [remat for remat in (report.remat, report.rest) if remat is not None]
        for remat, part in reversed([*zip(recalls, self._parts, strict=False)]):
            self._recalls.append(ref(remat))
            self.rng_bytes += sum(state.nbytes for state in remat.states.values())
            reasons = Reasons(remat, report.policy, report.stopped)
            is_rest = remat is report.rest
            _Findings(self, remat, part, reasons, table, is_rest=is_rest).note()
        self._parts.clear()


class _Findings:
    """What is held, and what runs again, of one part of a call."""

    def __init__(
        self,
        region: ReplayRegion,
        remat: Rematerializer,
        part: _Part,
        reasons: Reasons,
        table: StorageTable,
        *,
        is_rest: bool,
    ) -> None:
        self._region = region
        self._remat = remat
        self._part = part
        self._reasons = reasons
        self._table = table
        self._is_rest = is_rest
        values = remat.graph.values
        #: Each op of the tape with its number, a buffer that it makes, and the storage of that.
        self._made = [
            (op, number, values[value], storage)
            for op, number, storages in _matched(remat.graph.ops, part)
            for value, storage in zip(op.makes, storages, strict=False)
        ]
        self._origins = {buffer.storage: storage for _, _, buffer, storage in self._made}

    def note(self) -> None:
        """Tell the storages."""
        for number, held in self._remat.kept.items():
            self._note_held(self._remat.graph.values[number], held)
        self._note_saved()
        for op, number, buffer, storage in self._made:
            reason = self._reasons.recomputing(op, buffer.storage)
            if reason is None:
                storage.not_held = self._reasons.leaving_out(op)
            else:
                self._region.again.add(number)
                storage.ruling = storage.ruling or reason

    def _note_held(self, buffer: RecordedValue, held: HeldTensor) -> None:
        """``held`` is what the region itself holds of ``buffer``, here or in a store."""
        origin, region = self._origins.get(buffer.storage), self._region
        if held.away is not None:
            if origin is not None:
                origin.ruling = self._reasons.holding(buffer)
            return
        storages = self._table.find([held.tensor])
        is_copy = any(storage.is_made_in(region) for storage in storages)
        for storage in storages:
            if buffer.outside is None or (is_copy and not self._is_rest):
                storage.kept = self._reasons.holding(buffer), region
                self._describe_copy(storage, buffer, held.tensor)
            elif is_copy:  # what the rest of the call takes from the part before it
                storage.kept = storage.kept or (self._reasons.other, region)
            else:
                storage.input_of = storage.input_of or region

    def _describe_copy(
        self, storage: TrackedStorage, buffer: RecordedValue, tensor: torch.Tensor
    ) -> None:
        """The region may hold a copy: of what is changed later, or of what it returns."""
        origin = self._origins.get(buffer.storage)
        if buffer.outside is not None:
            storage.describe(tensor, _COPY, self._region.name)
        elif origin is not None and storage is not origin:
            storage.describe(tensor, origin.op, origin.path)

    def _note_saved(self) -> None:
        """What autograd saved and holds as it is."""
        last = {buffer.storage: buffer for buffer in self._remat.graph.values}
        buffers = {storage: last[buffer.storage] for _, _, buffer, storage in self._made}
        for storage in self._table.find(ticket[0] for ticket in self._part.tickets):
            if not storage.is_made_in(self._region):
                storage.input_of = storage.input_of or self._region
            elif storage.kept is None:
                known = storage in buffers
                reason = self._reasons.holding(buffers[storage]) if known else self._reasons.other
                storage.kept = reason, self._region


def _matched(
    ops: list[RecordedOp], part: _Part
) -> Iterator[tuple[RecordedOp, int, list[TrackedStorage]]]:
    """The ops of a tape, each with its number among those that ran, and what it made."""
    place = 0
    for func, number, made in part.ops:
        if op_info(func).runs_no_kernel:
            continue
        found = place
        # The casts of weights that autocast caches are on the tape, and were done before.
        while found < len(ops) and ops[found].op is CAST and func is not CAST:
            found += 1
        # Others are on no tape: those by which the engine reads random states.
        if found < len(ops) and ops[found].op is func:
            yield ops[found], number, made
            place = found + 1
