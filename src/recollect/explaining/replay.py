"""A region of the replay engine: its recorded ops, matched with the storages that ops made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.ops import CAST
from recollect.explaining.regions import Region, StorageTable, TrackedStorage
from recollect.policy.op_info import op_info
from recollect.replay.engine import CallReport
from recollect.replay.held_values import HeldTensor
from recollect.replay.hold_reasons import HoldReasons
from recollect.replay.recorded_graph import RecordedOp, RecordedValue
from recollect.replay.rematerialize import Rematerializer

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

    def packing(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        self._parts.append(_Part())

        def pack_and_note(tensor: torch.Tensor) -> Any:
            ticket = pack(tensor)
            self._parts[-1].tickets.append(ticket)
            return ticket

        return pack_and_note

    def note_op(self, op: Any, made: list[TrackedStorage]) -> None:
        if self._parts:  # else the engine prepares the call
            self._parts[-1].ops.append((op, self.ops, made))

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
            reasons = HoldReasons(remat, report.policy, report.stopped)
            _Findings(self, remat, part, reasons, table, is_rest=remat is report.rest).note()
        self._parts.clear()


@dataclass
class _Findings:
    """What is held, and what runs again, of one part of a call."""

    region: ReplayRegion
    remat: Rematerializer
    part: _Part
    reasons: HoldReasons
    table: StorageTable
    is_rest: bool

    def __post_init__(self) -> None:
        values = self.remat.graph.values
        #: Each recorded op with its number, a value that it makes, and the storage of that.
        self._made = [
            (op, number, values[value], storage)
            for op, number, storages in _matched(self.remat.graph.ops, self.part)
            for value, storage in zip(op.makes, storages, strict=False)
        ]
        self._origins = {value.storage: storage for _, _, value, storage in self._made}

    def note(self) -> None:
        """Mark the storages."""
        for number, held in self.remat.kept.items():
            self._note_held(self.remat.graph.values[number], held)
        self._note_saved()
        for op, number, value, storage in self._made:
            reason = self.reasons.recomputing(op, value.storage)
            if reason is None:
                storage.not_held = self.reasons.leaving_out(op)
            else:
                self.region.again.add(number)
                storage.ruling = storage.ruling or reason

    def _note_held(self, value: RecordedValue, held: HeldTensor) -> None:
        """``held`` is what the region itself holds of ``value``, here or in a store."""
        origin, region = self._origins.get(value.storage), self.region
        if held.away is not None:
            if origin is not None:
                origin.ruling = self.reasons.holding(value)
            return
        storages = self.table.find([held.tensor])
        is_copy = any(storage.is_made_in(region) for storage in storages)
        for storage in storages:
            if value.outside is None or (is_copy and not self.is_rest):
                storage.kept = self.reasons.holding(value), region
                self._describe_copy(storage, value, held.tensor)
            elif is_copy:  # what the rest of the call takes from the part before it
                storage.kept = storage.kept or (self.reasons.other, region)
            else:
                storage.input_of = storage.input_of or region

    def _describe_copy(
        self, storage: TrackedStorage, value: RecordedValue, tensor: torch.Tensor
    ) -> None:
        """The region may hold a copy: of what is changed later, or of what it returns."""
        origin = self._origins.get(value.storage)
        if value.outside is not None:
            storage.describe(tensor, _COPY, self.region.name)
        elif origin is not None and storage is not origin:
            storage.describe(tensor, origin.op, origin.path)

    def _note_saved(self) -> None:
        """Mark what autograd saved and holds itself."""
        last = {value.storage: value for value in self.remat.graph.values}
        values = {storage: last[value.storage] for _, _, value, storage in self._made}
        for storage in self.table.find(ticket[0] for ticket in self.part.tickets):
            if not storage.is_made_in(self.region):
                storage.input_of = storage.input_of or self.region
            elif storage.kept is None:
                known = storage in values
                reason = self.reasons.holding(values[storage]) if known else self.reasons.other
                storage.kept = reason, self.region


def _matched(
    ops: list[RecordedOp], part: _Part
) -> Iterator[tuple[RecordedOp, int, list[TrackedStorage]]]:
    """The recorded ops, each with its number among those that ran, and the storages it made."""
    place = 0
    for func, number, made in part.ops:
        if op_info(func).runs_no_kernel:
            continue
        found = place
        # The casts of weights that autocast caches are recorded, and were done before.
        while found < len(ops) and ops[found].op is CAST and func is not CAST:
            found += 1
        # Others are not recorded: those by which the engine reads random states.
        if found < len(ops) and ops[found].op is func:
            yield ops[found], number, made
            place = found + 1
