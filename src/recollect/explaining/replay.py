"""A region of the replay engine: what it holds and recomputes, and why.

Its recorded ops are matched with the storages that ops made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.ops import CAST, op_name
from recollect.explaining.regions import Region, StorageTable, TrackedStorage
from recollect.graph.release import find_needs
from recollect.policy.op_info import op_info
from recollect.replay.engine import CallReport
from recollect.replay.held_values import HeldTensor
from recollect.replay.recorded_graph import RecordedOp, RecordedValue
from recollect.replay.rematerialize import Rematerializer

_COPY = "(copy)"
_MUST = "must keep: "


class _Part:
    """A call, or a part of it that was recorded by itself."""

    def __init__(self) -> None:
        #: The ops that ran, each with its number and the storages that it made.
        self.ops: list[tuple[Any, int, list[TrackedStorage]]] = []
        #: In place of saved tensors in the graph: the first item is the tensor, if held.
        self.tickets: list[Any] = []


class ReplayRegion(Region):
    """Runs ops again, and not the function. Holds tensors until its forward is over."""

    engine = "replay"

    def __init__(self, name: str, report: CallReport) -> None:
        assert report.remat is not None
        super().__init__(name, report.remat.offload_batch)
        self._report: CallReport | None = report
        #: One, or two if the call was recorded from its middle on.
        self._parts: list[_Part] = []
        self._remats: list[ReferenceType[Rematerializer]] = []
        #: The numbers of the ops that will run again.
        self.again: set[int] = set()
        #: Whether the call was recorded, and the next one will run otherwise.
        self.is_rehearsal = False

    @property
    def is_alive(self) -> bool:
        return any(remat() is not None for remat in self._remats)

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
        report, self._report = self._report, None
        assert report is not None
        self.is_rehearsal = report.is_rehearsal
        if report.unsettled is not None:
            self.notes.append(f"recorded at every call: {report.unsettled}")
        if report.stopped is not None:
            what = "everything is held" if report.rest is None else "it is recorded again"
            self.notes.append(f"{what} from some point on: {report.stopped}")
        remats = [remat for remat in (report.remat, report.rest) if remat is not None]
        for remat, part in reversed([*zip(remats, self._parts, strict=False)]):
            self._remats.append(ref(remat))
            self.rng_bytes += sum(state.nbytes for state in remat.states.values())
            _Findings(self, report, remat, part, table).note()
        self._parts.clear()


class _Findings:
    """The held tensors and the ops that run again in one part of a call."""

    def __init__(
        self,
        region: ReplayRegion,
        report: CallReport,
        remat: Rematerializer,
        part: _Part,
        table: StorageTable,
    ) -> None:
        self._region, self._remat, self._part, self._table = region, remat, part, table
        self._is_rest = remat is report.rest
        self._graph, self._kept = remat.graph, frozenset(remat.kept)
        values = self._graph.values
        #: Each recorded op with its number, a value that it makes, and the storage of that.
        self._made = [
            (op, number, values[value], storage)
            for op, number, storages in _matched(self._graph.ops, part)
            for value, storage in zip(op.makes, storages, strict=False)
        ]
        self._origins = {value.storage_number: storage for _, _, value, storage in self._made}
        self._has_policy = report.policy is not None
        self._titles = {rule.title for rule in (report.policy.rules if report.policy else ())}
        #: For values without a reason of their own.
        self._other = _MUST + (report.stopped or "opaque")
        #: The ops that do not run again because a result computed from theirs is held.
        self._replaced: set[int] = set()
        saved = [ticket[2].value.number for ticket in remat.tickets]
        uses = find_needs(self._graph, saved, self._kept).uses
        again = (v for v in values if uses[v.number] and v.number not in self._kept)
        self._again = {value.storage_number for value in again}

    def note(self) -> None:
        for number, held in self._remat.kept.items():
            self._note_held(self._graph.values[number], held)
        self._note_saved()
        for op, number, value, storage in self._made:
            reason = self._why_recomputed(op, value.storage_number)
            if reason is None:
                storage.not_held = self._why_left_out(op)
            else:
                self._region.again.add(number)
                storage.ruling = storage.ruling or reason

    def _note_held(self, value: RecordedValue, held: HeldTensor) -> None:
        """Mark ``held``, which the region holds of ``value``, here or in a store."""
        origin, region = self._origins.get(value.storage_number), self._region
        if held.away is not None:
            if origin is not None:
                origin.ruling = self._why_held(value)
            return
        storages = self._table.find([held.tensor])
        is_copy = any(storage.is_made_in(region) for storage in storages)
        for storage in storages:
            if value.outside is None or (is_copy and not self._is_rest):
                storage.kept = self._why_held(value), region
                self._describe_copy(storage, value, held.tensor)
            elif is_copy:  # an input of the rest of the call, made by the part before it
                storage.kept = storage.kept or (self._other, region)
            else:
                storage.input_of = storage.input_of or region

    def _describe_copy(
        self, storage: TrackedStorage, value: RecordedValue, tensor: torch.Tensor
    ) -> None:
        """The region may hold a copy of a tensor that is changed later, or of its result."""
        origin = self._origins.get(value.storage_number)
        if value.outside is not None:
            storage.describe(tensor, _COPY, self._region.name)
        elif origin is not None and storage is not origin:
            storage.describe(tensor, origin.op, origin.path)

    def _note_saved(self) -> None:
        """Mark what autograd saved and holds itself."""
        last = {value.storage_number: value for value in self._graph.values}
        values = {storage: last[value.storage_number] for _, _, value, storage in self._made}
        for storage in self._table.find(ticket[0] for ticket in self._part.tickets):
            if not storage.is_made_in(self._region):
                storage.input_of = storage.input_of or self._region
            elif storage.kept is None:
                known = storage in values
                reason = self._why_held(values[storage]) if known else self._other
                storage.kept = reason, self._region

    # --- reasons ----------------------------------------------------------------------------------

    def _why_held(self, value: RecordedValue) -> str:
        sources = self._graph.sources(value.number, self._kept, self._why_not_again)
        self._replaced |= {op.number for op in sources if op.number != value.op}
        if value.unsure is not None:
            return _MUST + value.unsure
        if value.op < 0:
            return f"{_MUST}made of constants"
        if any(op.number == value.op for op in sources):
            return str(self._why_not_again(sources[0]))
        reasons = [f"{self._why_not_again(op)}, for {_name(op)}" for op in sources]
        return "; ".join(dict.fromkeys(reasons)) or self._other

    def _why_recomputed(self, op: RecordedOp, storage: int) -> str | None:
        """Why ``op`` runs again to make the storage ``storage``; None if it does not."""
        if storage not in self._again:
            return None
        if op.ruling is None or not (self._has_policy or op.key is not None):
            return "no policy"
        reason: str = op.ruling.reason
        return f"{reason}, but it has to run again" if op.ruling.keeps else reason

    def _why_left_out(self, op: RecordedOp) -> str | None:
        """Why results of ``op`` are not held although a rule says so. After `_why_held`."""
        if op.keep not in self._titles:
            return None
        is_replaced = op.number in self._replaced
        why = "a result computed from it is held" if is_replaced else "nothing needs it"
        return f"{op.keep}, but {why}"

    def _why_not_again(self, op: RecordedOp) -> str | None:
        """Why ``op`` must not run again; None if it may."""
        if op.held:
            return str(op.ruling.reason)
        if op.keep is not None:
            return op.keep if op.keep in self._titles else _MUST + op.keep
        reason = op.later or self._graph.unsure_read(op)
        return None if reason is None else _MUST + reason


def _name(op: RecordedOp) -> str:
    return op_name(op.op).replace("::", ".")


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
