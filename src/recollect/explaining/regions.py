"""The storages that ops allocate, and the regions that hold or recompute them.

Storages are tracked through weak references, so tracking keeps nothing alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.modes import below_python, no_function_modes
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import inner_tensors, storage_key
from recollect.rerun.engine import Frame
from recollect.rerun.selective import RecordMode
from recollect.rerun.selective.ledger import Kept
from recollect.state.contents import Contents
from recollect.state.rng import RngState, read_rng
from recollect.store.offload_batch import OffloadBatch

_Tensor = torch.Tensor
_PLAIN = (_Tensor, torch.nn.Parameter)


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
    """The mode of a policy in the forward of ``frame``."""
    if frame is None or frame.contexts is None or not isinstance(frame.contexts[0], RecordMode):
        return None
    return frame.contexts[0]


def _bytes_of(state: RngState) -> int:
    cpu, devices = state
    return sum(each.nbytes for each in (cpu, *(devices or ())))
