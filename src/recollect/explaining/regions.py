"""The storages that ops allocate, and the regions that hold or recompute them.

Storages are tracked through weak references, so tracking keeps nothing alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.modes import below_python, no_function_modes
from recollect._torch.ops import CAST, op_name
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import inner_tensors, storage_key
from recollect.graph.release import find_needs
from recollect.policy.op_info import op_info
from recollect.replay.engine import CallReport
from recollect.replay.held_values import HeldTensor
from recollect.replay.recorded_graph import RecordedOp, RecordedValue
from recollect.replay.rematerialize import Rematerializer
from recollect.rerun.engine import Frame
from recollect.rerun.selective import RecordMode
from recollect.rerun.selective.ledger import Kept
from recollect.state.contents import Contents
from recollect.state.rng import RngState, read_rng
from recollect.store.offload_batch import OffloadBatch

_Tensor = torch.Tensor
_PLAIN = (_Tensor, torch.nn.Parameter)
_COPY = "(copy)"
_MUST = "must keep: "


def storages_of(tensor: _Tensor) -> list[torch.UntypedStorage]:
    """The storage of ``tensor``; of a subclass or a sparse tensor, those of its parts."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        with no_function_modes():  # not an operation of the model
            return [] if storage_key(tensor) is None else [tensor.untyped_storage()]
    if tensor.is_quantized or tensor.is_mkldnn:  # torch does not expose their storage
        return []
    with below_python():
        inner = inner_tensors(tensor) or []
    return [s for part in inner if part is not tensor for s in storages_of(part)]


def tensors_in(value: Any) -> list[_Tensor]:
    """The tensors in nested containers, and in objects."""
    leaves = tree_leaves(value)
    contents = Contents([leaf for leaf in leaves if not isinstance(leaf, _Tensor)])
    found = [leaf for leaf in leaves if isinstance(leaf, _Tensor)]
    return found + contents.tensors + contents.copied


class TrackedStorage:
    """A storage that an op allocated."""

    def __init__(self, storage: torch.UntypedStorage, tensor: _Tensor, op: Any) -> None:
        self.storage: ReferenceType[torch.UntypedStorage] = ref(storage)
        self._bytes = storage.nbytes()
        self.describe(tensor, op, "")
        #: The regions that the op ran in, the outermost first, each with the number of the op.
        self.regions: tuple[tuple[Region, int], ...] = ()
        #: Whether autograd has saved it inside of a region.
        self.saved = False
        #: What the policy decided for the op, and the entries that keep its results for a rerun.
        self.ruling: str | None = None
        self.entries: list[tuple[str, ReferenceType[Any]]] = []
        #: Its tensors in stores, each with its batch.
        self.offloads: list[tuple[ReferenceType[Any], OffloadBatch]] = []
        # Found when the forward of a region is over:
        #: The region that holds it as an input.
        self.input_of: Region | None = None
        #: The rule and the region that keep it; or why it is not kept although a rule says so.
        self.kept: tuple[str, Region] | None = None
        self.not_held: str | None = None

    def describe(self, tensor: _Tensor, op: Any, path: str) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.op = op
        self.path = path

    @property
    def bytes(self) -> int:
        storage = self.storage()
        if storage is not None:
            self._bytes = storage.nbytes()  # it may have been resized
        return self._bytes

    def is_made_in(self, region: Region) -> bool:
        return any(each is region for each, _ in self.regions)


class StorageTable:
    """The storages that ops have allocated, in their order; and those that were there before."""

    def __init__(self) -> None:
        self.all: list[TrackedStorage] = []
        #: By id; the reference shows whether another storage has the id now. None: from before
        #: forward.
        self._known: dict[
            int, tuple[ReferenceType[torch.UntypedStorage], TrackedStorage | None]
        ] = {}

    def is_new(self, storage: torch.UntypedStorage) -> bool:
        known = self._known.get(id(storage))
        return known is None or known[0]() is not storage

    def add_foreign(self, tensors: Iterable[_Tensor]) -> None:
        for storage in (storage for tensor in tensors for storage in storages_of(tensor)):
            if self.is_new(storage):
                self._known[id(storage)] = ref(storage), None

    def add(self, tensors: Iterable[_Tensor], op: Any) -> list[TrackedStorage]:
        """Add the storages of ``tensors`` that are new: ``op`` made them."""
        made = []
        for tensor in tensors:
            for storage in filter(self.is_new, storages_of(tensor)):
                tracked = TrackedStorage(storage, tensor, op)
                self._known[id(storage)] = tracked.storage, tracked
                made.append(tracked)
        self.all += made
        return made

    def find(self, tensors: Iterable[Any]) -> list[TrackedStorage]:
        """The storages of ``tensors`` (items of other types are skipped) that ops have made."""
        storages = [s for t in tensors if isinstance(t, _Tensor) for s in storages_of(t)]
        known = (self._known[id(storage)][1] for storage in storages if not self.is_new(storage))
        return [tracked for tracked in known if tracked is not None]


# --- regions --------------------------------------------------------------------------------------


class Region:
    """One call of a checkpointed region."""

    engine: str
    #: Whether to assume that all results of its ops would be held without it.
    spares_all = False
    #: The reason of ops that no policy decides about.
    otherwise = "no policy"

    def __init__(self, name: str, batch: OffloadBatch | None) -> None:
        self.name = name
        self.batch = batch
        #: Its inputs, if it holds them.
        self.inputs: Sequence[TrackedStorage] = ()
        self.notes: list[str] = []
        #: How many ops have run; how many had when autograd last saved a tensor.
        self.ops = 0
        self.last_save = 0
        #: Bytes of the random states that it holds.
        self.rng_bytes = 0

    @property
    def is_alive(self) -> bool:
        """Whether it can be recomputed: the graph is there."""
        raise NotImplementedError

    def runs_again(self, number: int) -> bool:
        """Whether backward runs the op with that number again."""
        raise NotImplementedError

    def packing(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``pack``, the engine's hook for saved tensors, or one around it."""
        return pack

    def note_op(self, op: Any, made: list[TrackedStorage]) -> None:
        """An op has run, and made these storages."""

    def end(self, table: StorageTable) -> None:
        """The forward of the region is over: mark the storages that it holds."""
        for storage in self.inputs:
            is_sent = any(batch is self.batch for _, batch in storage.offloads)
            if storage.input_of is None and not is_sent:
                storage.input_of = self


class ReentrantRegion(Region):
    """Runs forward without a graph: what backward needs is not known."""

    engine = "reentrant"
    spares_all = True
    otherwise = "reentrant: forward runs without grad"
    is_alive = True

    def runs_again(self, number: int) -> bool:
        return True


class RerunRegion(Region):
    """Runs the function again, and gives out what a policy keeps."""

    engine = "rerun"

    def __init__(self, name: str, frame: Frame) -> None:
        record = _recorded(frame)
        super().__init__(name, frame.offloaded if record is None else record.ledger.offload_batch)
        self._frame = ref(frame)
        self._early_stop = frame.early_stop
        if frame.contexts is not None:
            self.otherwise = "context_fn"
        if frame.region_state.preserves_rng:
            self.rng_bytes = _bytes_of(read_rng())

    @property
    def is_alive(self) -> bool:
        return self._frame() is not None

    def runs_again(self, number: int) -> bool:
        return not self._early_stop or number <= self.last_save

    def end(self, table: StorageTable) -> None:
        super().end(table)
        record = _recorded(self._frame())
        for entry in () if record is None else record.ledger.entries.values():
            places = tree_leaves(entry.results)
            for storage in table.find(place.val for place in places if type(place) is Kept):
                storage.kept = entry.reason, self
            if entry.rng is not None:
                self.rng_bytes += _bytes_of(entry.rng)


def _recorded(frame: Frame | None) -> RecordMode | None:
    if frame is None or frame.contexts is None or not isinstance(frame.contexts[0], RecordMode):
        return None
    return frame.contexts[0]


def _bytes_of(state: RngState) -> int:
    cpu, devices = state
    return sum(each.nbytes for each in (cpu, *(devices or ())))


# --- of the replay engine -------------------------------------------------------------------------


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
