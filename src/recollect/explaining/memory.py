"""The pieces of memory that ops make: known by their storages, and never held.

A tensor is a view of a storage, and a storage is freed with the last tensor that shows it. Storages
are watched through weak references, so to watch them changes nothing of what is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.modes import below_python, no_function_modes
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import inner_tensors, storage_key
from recollect.explaining.region import Region
from recollect.state.argument_snapshot import Contents
from recollect.store.offload_batch import OffloadedTensor

__all__ = ["Memories", "Memory", "storages_of", "tensors_in"]

_Tensor = torch.Tensor
_PLAIN = (_Tensor, torch.nn.Parameter)


def storages_of(tensor: _Tensor) -> list[torch.UntypedStorage]:
    """The memory behind ``tensor``: of a subclass or a sparse tensor, that of its parts."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        with no_function_modes():  # who looks for the memory is no part of the model
            return [] if storage_key(tensor) is None else [tensor.untyped_storage()]
    if tensor.is_quantized or tensor.is_mkldnn:  # torch has no way to their memory
        return []
    with below_python():
        inner = inner_tensors(tensor) or []
    return [s for part in inner if part is not tensor for s in storages_of(part)]


def tensors_in(value: Any) -> list[_Tensor]:
    """The tensors in nested containers, and in objects."""
    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, _Tensor)]
    others = [leaf for leaf in tree_leaves(value) if not isinstance(leaf, _Tensor)]
    contents = Contents()
    contents.look_into(others)
    return found + contents.tensors


class Memory:
    """A piece of memory that an op made."""

    __slots__ = (
        "_size",
        "dtype",
        "input_of",
        "kept",
        "let_go",
        "numbers",
        "op",
        "parcels",
        "path",
        "ruling",
        "saved",
        "shape",
        "storage",
    )

    def __init__(self, storage: torch.UntypedStorage, tensor: _Tensor, op: Any, path: str) -> None:
        self.storage: ReferenceType[torch.UntypedStorage] = ref(storage)
        self._size = storage.nbytes()
        self.describe(tensor, op, path)
        #: The regions that the op ran in, the outermost first, each with how many ops it had run.
        self.numbers: tuple[tuple[Region, int], ...] = ()
        #: Whether a region has autograd save it.
        self.saved = False
        #: Why a policy has it recomputed or kept.
        self.ruling: str | None = None
        #: By which rule which region keeps it; why it is not kept, though a rule says so.
        self.kept: tuple[str, Region] | None = None
        self.let_go: str | None = None
        #: The region that holds it to be called again.
        self.input_of: Region | None = None
        #: What was put into stores: the parcel, why, and the region.
        self.parcels: list[tuple[ReferenceType[OffloadedTensor], str, Region]] = []

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

    def is_made_in(self, region: Region) -> bool:
        """Whether an op in ``region`` made it."""
        return any(each is region for each, _ in self.numbers)

    @property
    def bytes(self) -> int:
        """Its size, or what that was."""
        storage = self.storage()
        if storage is not None:
            self._size = storage.nbytes()  # it may have been resized
        return self._size


class Memories:
    """All pieces that were made, in their order; and what was there before."""

    def __init__(self) -> None:
        self.all: list[Memory] = []
        self._known: dict[int, Memory] = {}
        self._foreign: dict[int, ReferenceType[torch.UntypedStorage]] = {}

    def add_foreign(self, tensors: Iterable[_Tensor]) -> None:
        """Whatever of ``tensors`` is not known was there before."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                if self._find(storage) is None:
                    self._foreign[_key(storage)] = ref(storage)

    def is_foreign(self, storage: torch.UntypedStorage) -> bool:
        """Whether it was there before."""
        known = self._foreign.get(_key(storage))
        return known is not None and known() is storage

    def find(self, tensor: _Tensor) -> Iterator[Memory]:
        """What is known of the memory behind ``tensor``."""
        for storage in storages_of(tensor):
            memory = self._find(storage)
            if memory is not None:
                yield memory

    def _find(self, storage: torch.UntypedStorage) -> Memory | None:
        # An address may be that of another storage by now.
        memory = self._known.get(_key(storage))
        return memory if memory is not None and memory.storage() is storage else None

    def has_new(self, tensor: _Tensor) -> bool:
        """Whether there is memory behind ``tensor`` that is not known yet."""
        return any(map(self._is_new, storages_of(tensor)))

    def _is_new(self, storage: torch.UntypedStorage) -> bool:
        return self._find(storage) is None and not self.is_foreign(storage)

    def add(self, tensor: _Tensor, op: Any, path: str) -> list[Memory]:
        """Note what of the memory behind ``tensor`` is new: ``op`` made it."""
        made = []
        for storage in storages_of(tensor):
            if self._is_new(storage):
                memory = self._known[_key(storage)] = Memory(storage, tensor, op, path)
                self.all.append(memory)
                made.append(memory)
        return made


def _key(storage: torch.UntypedStorage) -> int:
    return id(storage)
