"""Tracks the storages of a region while it is recorded, and the value in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from recollect._torch.autograd import cast_weight, is_in_custom_function, without_history
from recollect._torch.dtensors import USUAL_TENSORS, local_tensor, spec_of
from recollect._torch.modes import detach_below_autograd
from recollect._torch.ops import CAST, bare_op
from recollect._torch.tensors import (
    is_plain_tensor,
    key_of_storage,
    unsupported_tensor,
    version_of,
)
from recollect.replay.function_call import (
    FunctionCall,
    OutsideTensor,
    TensorNumbers,
    metadata_of,
)
from recollect.replay.held_values import HeldTensor
from recollect.replay.recorded_graph import RecordedOp, RecordedValue, View, layout_of
from recollect.replay.rematerialize import Rematerializer
from recollect.state.flags import Flags

_Tensor = torch.Tensor

#: Why a value is kept: another call may compute it differently, or no recorded op made it.
OPAQUE = "opaque"


def start_of(tensor: _Tensor) -> int:
    """The byte offset of ``tensor`` in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


@dataclass(eq=False, slots=True)
class RecordedStorage:
    """A storage, its current value, and the offset of the first tensor seen on it."""

    untyped: ReferenceType[Any]
    value: RecordedValue
    start: int
    #: The number of the tensor by which it was first seen, if the region did not make it.
    outside: int | None
    #: The numbers of the tensors on it.
    tensors: list[int]
    #: The numbers of the saved ones, each with its version and value when it was saved.
    saved: list[tuple[int, int, RecordedValue]]
    #: Whether the first tensor seen on it has the same offset in every call.
    is_placed: bool = False
    #: Whether a ``.data`` tensor exists: autograd does not notice writes through it.
    has_data: bool = False
    #: Whether code that the engine cannot see may write to it.
    is_exposed: bool = False
    #: Whether a running custom function will count its last write once more.
    counts_late: bool = False
    #: Whether a collective may still write to it, in a thread of the backend.
    is_in_flight: bool = False


class MemoryTracker:
    """The state that the two modes which record a call share.

    Args:
        remat: Holds the call's values.
        earlier: Holds the values of the first part of the call, if only the rest is recorded.
        accepts_dtensors: Whether tensors may be distributed: see `accepts`.
    """

    def __init__(
        self,
        remat: Rematerializer,
        earlier: Rematerializer | None,
        *,
        accepts_dtensors: bool = False,
    ) -> None:
        self.remat = remat
        self.accepts_dtensors = accepts_dtensors
        self.earlier = earlier
        self.graph = remat.graph
        self.numbers = TensorNumbers()
        #: By number of a tensor: its storage, and its version after the last write that was seen.
        self._storage_by_number: list[RecordedStorage | None] = []
        self._seen: list[int | None] = []
        #: The function that is running.
        self.call: FunctionCall | None = None
        #: Whether it runs under autocast, which ops do not show.
        self.is_casting = False
        #: Its flags, if they differ from those of the region.
        self.flags: Flags | None = None
        #: Why nothing is recorded any more, and everything is held.
        self.stopped: str | None = None
        #: Whether the ops that run now are not the region's.
        self.paused = False
        #: Whether nothing is recorded, for one of these two reasons.
        self.is_idle = False
        #: Whether an op of the region is running: below autograd, before its writes are counted.
        self.is_in_op = False
        #: Whether the region writes to a storage that it did not make.
        self.writes_outside = False
        #: The storages that the function wrote to, or changed a view of.
        self.written: set[RecordedStorage] = set()
        #: The tensors that the region did not make, by number.
        self.outsides: dict[int, OutsideTensor] = {}
        #: The storages that the running opaque function made. Later code sees only those it
        #: returns.
        self.inner: set[RecordedStorage] = set()
        self._storages: dict[int, RecordedStorage] = {}
        #: Held tensors whose last write may not have been counted yet.
        self._uncounted: list[HeldTensor] = []
        #: Values to offload when the function ends, and how many offloaded tensors to free then.
        self._leaving: list[RecordedValue] = []
        self.arrivals = 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        paused, self.paused = self.paused, True
        self.is_idle = True
        try:
            yield
        finally:
            self.paused = paused
            self.is_idle = paused or self.stopped is not None

    def stop(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = reason
            self.is_idle = True

    def accepts(self, tensor: _Tensor) -> bool:
        """Whether ``tensor`` is supported.

        A ``DTensor`` is so under a plan alone. Its collectives must not run again, lest ranks
        disagree on them, and without a plan that holds more than a rerun.
        """
        local = local_tensor(tensor)
        return is_plain_tensor(local) and (local is tensor or self.accepts_dtensors)

    def stop_at(self, tensor: _Tensor) -> None:
        """Hold everything from now on, since ``tensor`` is not supported."""
        self.stop(unsupported_tensor(tensor))

    def assign_number(self, tensor: _Tensor, storage: RecordedStorage | None) -> int:
        """Give ``tensor`` on ``storage`` (None if unknown) the next number."""
        number = len(self.numbers.tensors)
        self.numbers.add(tensor)
        self._storage_by_number.append(storage)
        self._seen.append(self.numbers.versions[number])
        if storage is not None:
            storage.tensors.append(number)
        return number

    def number_argument(
        self, tensor: _Tensor, offloads: bool, wrapper: _Tensor | None = None
    ) -> tuple[int, int | None]:
        """The number of ``tensor``, an argument of a function; -1 if it is not supported.

        And how often it was written to since it got that number; None if torch does not count.
        ``offloads``: offload it if it is an activation that the region gets as an input.
        ``wrapper``: the ``DTensor`` that it is the local tensor of, if it is.
        """
        number = self.numbers.number_of(tensor)
        if number is not None:
            if version_of(tensor) != self._seen[number]:
                self.note_unseen_writes(tensor, number)
        elif self.accepts(tensor if wrapper is None else wrapper):
            number = self._add_outside(tensor, offloads, wrapper)
        else:
            self.stop_at(tensor if wrapper is None else wrapper)
            return -1, None
        return number, self.numbers.writes_to(tensor, number)

    def _add_outside(self, tensor: _Tensor, offloads: bool, wrapper: _Tensor | None) -> int:
        number = len(self._seen)
        outside = self.outsides[number] = OutsideTensor(number, metadata_of(tensor))
        storage = self.storage_of(tensor)
        if storage is None:
            storage = self.add(tensor, number)
            value = outside.value = storage.value
            away = offloads and tensor.requires_grad and not tensor.is_leaf
            held = self.remat.keep(value, without_history(tensor), value.layout, away=away)
            if wrapper is not None:
                held.count_by(wrapper)
        elif storage.outside is not None:
            outside.twin = (storage.outside, start_of(tensor) - storage.start)
        else:
            # A new tensor on a known storage, made by unseen code.
            storage.value.unsure = OPAQUE
            storage.is_exposed = True
            alive = (n for n in storage.tensors if self.numbers.tensors[n]() is not None)
            outside.host = next(alive, None)
            if outside.host is None and storage.value.number in self.remat.kept:
                self.stop("a view of a storage that no other tensor is left of")
            elif outside.host is None:
                # A function has left it somewhere, and does not return it.
                storage = self.add(tensor, number)
                storage.is_exposed, storage.value.unsure = True, OPAQUE
                outside.value = storage.value
        return self.assign_number(tensor, storage)

    # --- storages ---------------------------------------------------------------------------------

    def storage_of(self, tensor: _Tensor) -> RecordedStorage | None:
        numbers = self.numbers
        number = numbers.by_id.get(id(tensor))  # as `TensorNumbers.number_of`
        if number is not None and numbers.tensors[number]() is tensor:
            return self._storage_by_number[number]
        try:
            if type(tensor) not in USUAL_TENSORS:
                tensor = local_tensor(tensor)
            untyped = tensor.untyped_storage()
            found = self._storages.get(untyped.data_ptr() or key_of_storage(untyped))
        except (RuntimeError, NotImplementedError):  # it has none
            return None
        return found if found is not None and found.untyped() is not None else None

    def knows(self, untyped: torch.UntypedStorage) -> bool:
        """Whether the region has seen this storage."""
        found = self._storages.get(key_of_storage(untyped))
        return found is not None and found.untyped() is not None

    def add(self, tensor: _Tensor, outside: int | None = None) -> RecordedStorage:
        """Add a storage that is seen for the first time."""
        untyped = tensor.untyped_storage()
        start = start_of(tensor)
        value = self.graph.new(tensor, untyped.nbytes())
        value.outside = outside
        storage = self._storages[key_of_storage(untyped)] = RecordedStorage(
            ref(untyped), value, start, outside, [], []
        )
        if not untyped.resizable() and not isinstance(tensor, nn.Parameter):
            # Not allocated by torch: perhaps shared with a numpy array, which others can write to.
            storage.is_exposed = True
            value.unsure = OPAQUE
        return storage

    def locate(self, tensor: _Tensor) -> RecordedStorage | None:
        """The storage of ``tensor``; None if that is not supported.

        An unknown storage is added. No recorded op made it: perhaps autocast did, when it cast a
        weight.
        """
        storage = self.storage_of(tensor)
        if storage is not None:
            return storage
        if not is_plain_tensor(tensor):
            self.stop_at(tensor)
            return None
        storage = self.add(tensor)
        weight = cast_weight(tensor)
        view = None if weight is None or self.storage_of(weight) is None else self.view(weight)
        if view is None:
            storage.value.unsure = OPAQUE
            return storage
        op = self.new_op(CAST, bare_op(CAST))
        op.args, op.kwargs, op.reads = [view], {"dtype": tensor.dtype}, [view.value.number]
        op.make((), storage.value)
        return storage

    def view(self, tensor: _Tensor) -> View | None:
        """The view for ``tensor``; None if it is not supported."""
        storage = self.storage_of(tensor) or self.locate(tensor)
        return None if storage is None else self.view_in(storage, tensor)

    @staticmethod
    def view_in(storage: RecordedStorage, tensor: _Tensor) -> View:
        local, spec = tensor, None
        if type(tensor) not in USUAL_TENSORS:
            local, spec = local_tensor(tensor), spec_of(tensor)
        layout, own = layout_of(local, storage.start), storage.value.layout
        return View(storage.value, own if layout == own else layout, spec)

    def new_op(self, op: Any, call: Any) -> RecordedOp:
        made = RecordedOp(len(self.graph.ops), op, call, self.flags)
        self.graph.ops.append(made)
        return made

    # --- changes ----------------------------------------------------------------------------------

    def before_change(self, storage: RecordedStorage) -> None:
        """Before an op that is recorded writes to ``storage``: copy its held value if needed."""
        self._note_change(storage)
        if storage.value.number in self.remat.kept:
            with self.pause():
                self.remat.before_overwrite(storage.value)

    def _note_change(self, storage: RecordedStorage) -> None:
        self.writes_outside |= storage.outside is not None
        if storage.value.op < 0:
            # A checked call would not copy it before the write.
            storage.value.unsure = storage.value.unsure or "changed later"

    def _note_unseen(self, storage: RecordedStorage) -> None:
        """Unseen code wrote to ``storage``, or may do so."""
        storage.is_exposed = True
        storage.value = self.graph.after(storage.value)
        storage.value.unsure = OPAQUE

    def before_write(self, tensor: _Tensor) -> RecordedStorage | None:
        """Before other code may write to ``tensor``: `protect` it, and copy its held value."""
        self.protect(tensor)
        storage = self.storage_of(tensor)
        if storage is not None:
            self.before_change(storage)
        return storage

    def protect(self, tensor: _Tensor) -> None:
        """Before a write to ``tensor``, copy held tensors that `before_change` does not know of.

        These are tensors of the earlier part of the call, and all tensors once recording stopped.
        """
        if self.paused:
            return
        for held in self._uncounted:  # the ops before this one are over
            held.count_version()
        with self.pause():
            if self.earlier is not None:
                self.earlier.before_write(tensor)
            if self.stopped is not None:
                self.remat.before_write(tensor)

    def settle_function_writes(self) -> None:
        """A function is over: mark the values that its writes made stale, or that are gone."""
        if not self.inner and not self.written:
            return
        for storage in self.inner:
            if storage.value.number not in self.remat.kept:
                storage.value.unsure = OPAQUE
        self.inner.clear()
        for storage in self.written:
            self._mark_stale(storage)
            held = self.remat.kept.get(storage.value.number)
            if held is not None and storage.counts_late:
                self._uncounted.append(held)  # a custom function counts its writes when it is over
        self.written.clear()

    def _mark_stale(self, storage: RecordedStorage) -> None:
        """After a write: mark the saved values that autograd would refuse to use now."""
        for number, version, value in storage.saved:
            tensor = self.numbers.tensors[number]()
            if not value.is_last and tensor is not None and tensor._version != version:
                value.is_stale = True

    def note_unseen_writes(self, tensor: _Tensor, number: int) -> None:
        """Note unseen writes to ``tensor``, by another thread or by compiled code.

        The old value is gone: if it cannot be recomputed, backward raises.
        """
        before, version = self._seen[number], version_of(tensor)
        if version == before or (storage := self.storage_of(tensor)) is None:
            return
        is_counted = storage.counts_late and version == (before or 0) + 1
        storage.counts_late = False
        self._count_versions(storage)
        if is_counted:
            return
        self._note_change(storage)
        self.remat.after_overwrite(storage.value)
        self._note_unseen(storage)
        self._mark_stale(storage)

    def _count_versions(self, storage: RecordedStorage) -> None:
        """Count all writes to ``storage`` so far as seen."""
        for number in storage.tensors:
            tensor = self.numbers.tensors[number]()
            if tensor is not None:
                self._seen[number] = version_of(tensor)

    def expose(self, tensor: _Tensor) -> None:
        """Unseen code gets access to the storage of ``tensor``, and may write to it."""
        storage = self.before_write(tensor)
        if storage is not None:
            self._note_unseen(storage)

    # --- held tensors -----------------------------------------------------------------------------

    def hold(self, view: View, tensor: _Tensor, ruling: Any) -> None:
        remat = self.remat
        alias = detach_below_autograd(tensor) if self.is_in_op else without_history(tensor)
        self._uncounted.append(remat.keep(view.value, alias, view.layout, away=False))
        if ruling is not None and (ruling.offloads or remat.offload_batch.chosen):
            self._leaving.append(view.value)

    def note_metadata_change(self, tensor: _Tensor) -> None:
        """The metadata of ``tensor`` changes in place. Torch counts that as a write."""
        if self.call is not None:
            self.call.changes_metadata = True
        storage = self.storage_of(tensor)
        if storage is not None:
            self.written.add(storage)
        for remat in (self.remat, self.earlier):
            self._uncounted += [] if remat is None else remat.before_metadata_change(tensor)

    def end_function(self) -> None:
        """Start pending offloads, and free tensors whose copies are done.

        Not before the function ends: until then its writes are not counted, and a store would take
        them for changes to its tensors.
        """
        if self._uncounted:
            for held in self._uncounted:
                held.count_version()
            self._uncounted.clear()
        if self.written:
            is_inside = is_in_custom_function()
            for storage in self.written:
                storage.counts_late = is_inside
                self._count_versions(storage)
        if not self._leaving and not self.arrivals:
            return
        leaving, self._leaving = self._leaving, []
        arrivals, self.arrivals = self.arrivals, 0
        with self.pause():
            for value in leaving:
                self.remat.send(value)
            self.remat.offload_batch.release(arrivals)
