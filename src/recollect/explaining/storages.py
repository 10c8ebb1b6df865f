"""The storages that ops allocate, and the regions that hold or recompute them.

Storages are watched through weak references, so that watching changes nothing of what is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.modes import below_python, no_function_modes
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import inner_tensors, storage_key
from recollect.state.argument_snapshot import ArgumentSnapshot
from recollect.store.offload_batch import OffloadBatch

__all__ = ["Region", "StorageTable", "TrackedStorage", "storages_of", "tensors_in"]

_Tensor = torch.Tensor
_PLAIN = (_Tensor, torch.nn.Parameter)


def storages_of(tensor: _Tensor) -> list[torch.UntypedStorage]:
    """The storage of ``tensor``; of a subclass or a sparse tensor, those of its parts."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        with no_function_modes():  # this is no operation of the model
            return [] if storage_key(tensor) is None else [tensor.untyped_storage()]
    if tensor.is_quantized or tensor.is_mkldnn:  # torch does not expose their storage
        return []
    with below_python():
        inner = inner_tensors(tensor) or []
    return [s for part in inner if part is not tensor for s in storages_of(part)]


def tensors_in(value: Any) -> list[_Tensor]:
    """The tensors in nested containers, and in objects."""
    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, _Tensor)]
    others = [leaf for leaf in tree_leaves(value) if not isinstance(leaf, _Tensor)]
    contents = ArgumentSnapshot()
    contents.add(others)
    return found + contents.tensors


class TrackedStorage:
    """A storage that an op allocated."""

    def __init__(self, storage: torch.UntypedStorage, tensor: _Tensor, op: Any, path: str) -> None:
        self.storage: ReferenceType[torch.UntypedStorage] = ref(storage)
        self._bytes = storage.nbytes()
        self.describe(tensor, op, path)
        #: The regions that the op ran in, the outermost first, each with the number of the op.
        self.regions: tuple[tuple[Region, int], ...] = ()
        #: Whether autograd has saved it inside of a region.
        self.saved = False
        #: What the policy said of the op, and the entries that keep its results for a rerun.
        self.ruling: str | None = None
        self.entries: list[tuple[str, ReferenceType[Any]]] = []
        #: The tensors of it in stores, each with the batch that it belongs to.
        self.offloads: list[tuple[ReferenceType[Any], ReferenceType[Any]]] = []
        # Found when the forward of a region is over:
        #: The region that holds it to be called with again.
        self.input_of: Region | None = None
        #: By which rule which region keeps it; or why it is not kept, though a rule says so.
        self.kept: tuple[str, Region] | None = None
        self.not_held: str | None = None

    def describe(self, tensor: _Tensor, op: Any, path: str) -> None:
        """Say what it is: ``tensor``, which ``op`` has made."""
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.op = op
        self.path = path

    @property
    def is_alive(self) -> bool:
        """Whether anybody holds it."""
        return self.storage() is not None

    @property
    def bytes(self) -> int:
        """Its size, or its last known size."""
        storage = self.storage()
        if storage is not None:
            self._bytes = storage.nbytes()  # it may have been resized
        return self._bytes

    def is_made_in(self, region: Region) -> bool:
        """Whether an op in ``region`` made it."""
        return any(each is region for each, _ in self.regions)


class StorageTable:
    """The storages that ops have allocated, in their order; and those that were there before."""

    def __init__(self) -> None:
        self.all: list[TrackedStorage] = []
        #: By id, which another storage may have by now: the reference tells.
        self._known: dict[int, TrackedStorage] = {}
        self._foreign: dict[int, ReferenceType[torch.UntypedStorage]] = {}

    def add_foreign(self, tensors: Iterable[_Tensor]) -> None:
        """Those of ``tensors`` that are not known were there before."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                if self._find(storage) is None:
                    self._foreign[id(storage)] = ref(storage)

    def add(self, tensor: _Tensor, op: Any, path: str) -> list[TrackedStorage]:
        """Note the storages of ``tensor`` that are new: ``op`` made them."""
        made = [
            TrackedStorage(storage, tensor, op, path)
            for storage in storages_of(tensor)
            if self._is_new(storage)
        ]
        for tracked in made:
            self._known[id(tracked.storage())] = tracked
        self.all += made
        return made

    def find(self, tensors: Iterable[Any]) -> list[TrackedStorage]:
        """The storages behind those of ``tensors`` that are tensors, as far as they are known."""
        found = [self._find(s) for t in tensors if isinstance(t, _Tensor) for s in storages_of(t)]
        return [tracked for tracked in found if tracked is not None]

    def has_new(self, tensor: _Tensor) -> bool:
        """Whether a storage of ``tensor`` is not known yet."""
        return any(map(self._is_new, storages_of(tensor)))

    def _find(self, storage: torch.UntypedStorage) -> TrackedStorage | None:
        tracked = self._known.get(id(storage))
        return tracked if tracked is not None and tracked.storage() is storage else None

    def _is_new(self, storage: torch.UntypedStorage) -> bool:
        foreign = self._foreign.get(id(storage))
        is_foreign = foreign is not None and foreign() is storage
        return self._find(storage) is None and not is_foreign


class Region:
    """One call of a checkpointed region."""

    engine: str
    #: Whether all that its ops made would be held without it, as far as anybody knows.
    spares_all = False
    #: Why an op runs again on which no policy decides.
    otherwise = "no policy"

    def __init__(self, name: str, batch: OffloadBatch | None) -> None:
        self.name = name
        self.batch = batch
        #: What it is called with, if it holds that.
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

    def note_hooks(self) -> None:
        """The engine has made the hooks for what autograd saves from here on."""

    def note_op(self, op: Any, made: list[TrackedStorage]) -> None:
        """An op has run, and made these storages."""

    def note_packed(self, packed: Any) -> None:
        """The engine has packed a tensor that autograd saves."""

    def end(self, table: StorageTable) -> None:
        """The forward of the region is over: tell the storages that it holds."""
        for storage in self.inputs:
            if storage.input_of is None and not self.has_sent(storage):
                storage.input_of = self

    def has_sent(self, storage: TrackedStorage) -> bool:
        """Whether the region has put ``storage`` into a store."""
        is_own = (batch() is self.batch for _, batch in storage.offloads)
        return self.batch is not None and any(is_own)
