"""While a region is recorded: which storages there are, and which value each holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from recollect._torch.autograd import cast_weight, is_in_custom_function, without_history
from recollect._torch.modes import detach_below_autograd
from recollect._torch.ops import CAST, bare_op
from recollect._torch.tensors import (
    is_plain_tensor,
    key_of_storage,
    memory_key,
    unsupported_tensor,
    version_of,
)
from recollect.replay.function_call import FunctionCall
from recollect.replay.held_tensor import HeldTensor
from recollect.replay.recorded_graph import RecordedOp, RecordedValue, View, layout_of
from recollect.replay.rematerialize import Rematerializer
from recollect.state.flags import Flags

__all__ = ["OPAQUE", "MemoryTracker", "RecordedStorage", "start_of"]

_Tensor = torch.Tensor

#: Why a value is kept that another call may compute differently, or that no op was seen to make.
OPAQUE = "opaque"


def start_of(tensor: _Tensor) -> int:
    """The byte offset of ``tensor`` in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


@dataclass(eq=False, slots=True)
class RecordedStorage:
    """A storage, the value that it holds now, and the offset of the first tensor seen of it."""

    storage: ReferenceType[Any]
    value: RecordedValue
    start: int
    #: The number of the tensor by which it was first seen, if the region did not make it.
    outside: int | None
    #: Whether the first tensor seen of it has the same offset in every call.
    is_placed: bool = False
    #: Tensors that autograd saved, each with its version and its value at the time.
    saved: list[tuple[ReferenceType[_Tensor], int, RecordedValue]] = field(default_factory=list)
    #: Whether there is a tensor from ``.data``, by which to write to it unnoticed by autograd.
    has_data: bool = False
    #: Whether somebody unseen can write to it.
    is_exposed: bool = False
    #: By id: the tensors on it, each with its version after the last write that was seen.
    versions: dict[int, tuple[ReferenceType[_Tensor], int]] = field(default_factory=dict)
    #: Whether a custom function that is still running will count its last write once more.
    counts_late: bool = False

    @property
    def is_outside(self) -> bool:
        """Whether the region did not make it."""
        return self.outside is not None

    def watch(self, tensor: _Tensor) -> None:
        """Notice unseen writes to ``tensor`` by its version from now on."""
        version = version_of(tensor)
        if version is not None:
            self.versions[id(tensor)] = (ref(tensor), version)

    def count_versions(self) -> None:
        """Note that all writes so far were seen."""
        found = [reference() for reference, _ in self.versions.values()]
        self.versions = {id(t): (ref(t), t._version) for t in found if t is not None}

    def is_changed(self, tensor: _Tensor) -> bool:
        """Whether there was an unseen write to ``tensor``."""
        reference, version = self.versions.get(id(tensor), (None, 0))
        if reference is None or reference() is not tensor or tensor._version == version:
            return False
        is_counted = self.counts_late and tensor._version == version + 1
        self.counts_late = False
        self.count_versions()
        return not is_counted


class MemoryTracker:
    """The state that the two modes which record a call share.

    Args:
        remat: What the call holds.
        earlier: What the first part of the call holds, if only the rest is recorded.
    """

    def __init__(self, remat: Rematerializer, earlier: Rematerializer | None) -> None:
        self.remat = remat
        self.earlier = earlier
        self.graph = remat.graph
        #: The function that is running.
        self.call: FunctionCall | None = None
        #: Whether it runs under autocast, which ops cannot tell.
        self.is_casting = False
        #: Its flags, if they differ from those of the region.
        self.flags: Flags | None = None
        #: Why nothing is recorded any more, and everything is held.
        self.stopped: str | None = None
        #: While ops run that are not the region's.
        self.paused = False
        #: While an op of the region runs: below autograd, and before its writes are counted.
        self.is_in_op = False
        #: Whether the region writes to a storage that it did not make.
        self.writes_outside = False
        #: The storages that the function has written to.
        self.written: set[RecordedStorage] = set()
        #: The storages of tensors whose metadata was changed, which counts as a write.
        self._reshaped: set[RecordedStorage] = set()
        #: By number of an outside tensor: its offset, if that matters.
        self.places: dict[int, int] = {}
        #: The storages that an opaque function has made so far. Only what it returns can be read.
        self.inner: set[RecordedStorage] = set()
        self._storages: dict[int, RecordedStorage] = {}
        #: Held tensors whose last write may not have been counted yet.
        self._new: list[HeldTensor] = []
        #: Values to offload when the function is over, and how many of those offloaded before are
        #: freed then.
        self._leaving: list[RecordedValue] = []
        self.arrivals = 0

    def is_idle(self) -> bool:
        """Whether nothing is recorded."""
        return self.paused or self.stopped is not None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context whose ops are not the region's."""
        paused, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = paused

    def stop(self, reason: str) -> None:
        """Hold everything from now on."""
        if self.stopped is None:
            self.stopped = reason
            if self.call is not None:
                self.call.is_opaque = True

    def stop_at(self, tensor: _Tensor) -> None:
        """Hold everything from now on, since ``tensor`` is not supported."""
        self.stop(unsupported_tensor(tensor))

    # --- storages ---------------------------------------------------------------------------------

    def storage(self, tensor: _Tensor) -> RecordedStorage | None:
        """The storage of ``tensor``, if it is known."""
        key = memory_key(tensor)
        return None if key is None else self._alive(key)

    def storage_of(self, untyped: torch.UntypedStorage) -> RecordedStorage | None:
        """The same, by torch's storage."""
        return self._alive(key_of_storage(untyped))

    def _alive(self, key: int) -> RecordedStorage | None:
        storage = self._storages.get(key)
        return storage if storage is not None and storage.storage() is not None else None

    def add(self, tensor: _Tensor, outside: int | None = None) -> RecordedStorage:
        """Add a storage that is seen for the first time."""
        untyped = tensor.untyped_storage()
        start = start_of(tensor)
        value = self.graph.new(tensor, untyped.nbytes(), start)
        value.outside = outside
        storage = self._storages[key_of_storage(untyped)] = RecordedStorage(
            ref(untyped), value, start, outside
        )
        if not untyped.resizable() and not isinstance(tensor, nn.Parameter):
            # Not allocated by torch: perhaps an array of numpy, by which others can write to it.
            storage.is_exposed = True
            value.unsure = OPAQUE
        return storage

    def add_stranger(self, tensor: _Tensor) -> RecordedStorage:
        """Add a storage that nothing seen has made."""
        storage = self.add(tensor)
        storage.value.unsure = OPAQUE
        return storage

    def find(self, tensor: _Tensor) -> RecordedStorage | None:
        """Add a storage that no op has made: perhaps a weight that autocast had cast before."""
        if not is_plain_tensor(tensor):
            self.stop_at(tensor)
            return None
        storage = self.add_stranger(tensor)
        weight = cast_weight(tensor)
        if weight is not None and self.storage(weight) is not None:
            storage.value.unsure = None
            op = self.new_op(CAST, bare_op(CAST))
            view = self.view(weight)
            assert view is not None
            op.args, op.kwargs, op.reads = [view], {"dtype": tensor.dtype}, [view.value.number]
            op.make((), storage.value)
        return storage

    def view(self, tensor: _Tensor) -> View | None:
        """The view that ``tensor`` is; None if it is not supported."""
        storage = self.storage(tensor) or self.find(tensor)
        return None if storage is None else self.view_in(storage, tensor)

    @staticmethod
    def view_in(storage: RecordedStorage, tensor: _Tensor) -> View:
        """The same, of a tensor on a known storage."""
        own = storage.value.layout
        layout = layout_of(tensor, storage.start)
        return View(storage.value, own if layout == own else layout)

    def new_op(self, op: Any, call: Any) -> RecordedOp:
        """Record an op that runs now."""
        made = RecordedOp(len(self.graph.ops), op, call, self.flags)
        self.graph.ops.append(made)
        return made

    # --- changes ----------------------------------------------------------------------------------

    def before_change(self, storage: RecordedStorage) -> None:
        """``storage`` is about to be written to: copy what is held of it and still needed."""
        value = storage.value
        self.writes_outside |= storage.is_outside
        if value.op < 0:
            # A later call could hold it, but would not copy it before the write.
            value.unsure = value.unsure or "changed later"
        if value.number in self.remat.kept:
            with self.pause():
                self.remat.before_overwrite(value)

    def protect(self, tensor: _Tensor) -> None:
        """``tensor`` is about to be written to: copy held tensors that nobody else copies.

        These are tensors of the earlier part of the call, and all once nothing is recorded.
        """
        if self.paused:
            return
        for held in self._new:  # the ops before this one are over
            held.count_version()
        with self.pause():
            if self.earlier is not None:
                self.earlier.before_write(tensor)
            if self.stopped is not None:
                self.remat.before_write(tensor)

    def end_writes(self) -> None:
        """A function that wrote to storages is over."""
        for storage in self.written:
            self._note_spoilt(storage)
            held = self.remat.kept.get(storage.value.number)
            if held is not None and storage.counts_late:
                self._new.append(held)  # a custom function counts its writes when it is over
        self.written.clear()

    def _note_spoilt(self, storage: RecordedStorage) -> None:
        """After a write: find the saved tensors that autograd would refuse to use now."""
        for reference, version, value in storage.saved:
            tensor = reference()
            if not value.is_last and tensor is not None and tensor._version != version:
                value.is_spoilt = True

    def find_changes(self, tensor: _Tensor) -> None:
        """Look for writes to ``tensor`` by no op that was seen.

        Another thread may have written, or compiled code. The value before is gone: if it cannot be
        recomputed, backward raises.
        """
        storage = self.storage(tensor)
        if storage is None or not storage.is_changed(tensor):
            return
        old = storage.value
        self.writes_outside |= storage.is_outside
        if old.op < 0:  # as before a write that is seen: a later call must not hold it
            old.unsure = old.unsure or "changed later"
        self.remat.after_overwrite(old)
        storage.is_exposed = True
        storage.value = self.graph.after(old)
        storage.value.unsure = OPAQUE
        self._note_spoilt(storage)

    def note_place(self, tensor: _Tensor) -> None:
        """A view of ``tensor`` is made whose offset counts from the beginning of the storage."""
        storage = self.storage(tensor) or self.find(tensor)
        if storage is None:
            return
        if storage.outside is not None:
            self.places[storage.outside] = storage.start
        elif self.call is not None and not storage.is_placed:
            self.call.is_opaque = True

    def end_inner(self) -> None:
        """An opaque function is over: values of its own that are not held by now are lost."""
        for storage in self.inner:
            if storage.value.number not in self.remat.kept:
                storage.value.unsure = OPAQUE
        self.inner.clear()

    def expose(self, tensor: _Tensor) -> None:
        """Somebody unseen gets access to the storage of a tensor, and may write to it."""
        self.protect(tensor)
        storage = self.storage(tensor)
        if storage is not None:
            self.before_change(storage)
            storage.is_exposed = True
            storage.value = self.graph.after(storage.value)
            storage.value.unsure = OPAQUE

    # --- held tensors -----------------------------------------------------------------------------

    def hold(self, view: View, tensor: _Tensor, ruling: Any) -> None:
        """Hold the value of ``view``, which is ``tensor``."""
        remat = self.remat
        alias = detach_below_autograd(tensor) if self.is_in_op else without_history(tensor)
        self._new.append(remat.keep(view.value, alias, view.layout, away=False))
        if ruling is not None and (ruling.offloads or remat.offload_batch.chosen):
            self._leaving.append(view.value)

    def note_metadata_change(self, tensor: _Tensor) -> None:
        """The metadata of ``tensor`` is changed in place. That counts as a write, but is none."""
        if self.call is not None:
            self.call.changes_metadata = True
        storage = self.storage(tensor)
        if storage is not None:
            self._reshaped.add(storage)
        for remat in (self.remat, self.earlier):
            self._new += [] if remat is None else remat.before_metadata_change(tensor)

    def end_function(self) -> None:
        """Offload what is to be offloaded, and free what has arrived.

        Only when a function is over its writes have been counted: before, a store would take them
        for changes to the tensors that it was given.
        """
        for held in self._new:
            held.count_version()
        self._new.clear()
        if self.written or self._reshaped:
            is_inside = is_in_custom_function(sys._getframe(1))
            for storage in self.written | self._reshaped:
                storage.counts_late = is_inside
                storage.count_versions()
            self._reshaped.clear()
        if not self._leaving and not self.arrivals:
            return
        leaving, self._leaving = self._leaving, []
        arrivals, self.arrivals = self.arrivals, 0
        with self.pause():
            for value in leaving:
                self.remat.send(value)
            self.remat.offload_batch.release(arrivals)
