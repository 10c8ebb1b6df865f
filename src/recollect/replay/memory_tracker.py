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
from recollect.replay.held_tensor import Held
from recollect.replay.rematerialize import Recall
from recollect.replay.steps import Step
from recollect.replay.tape import Buffer, Op, View, layout_of
from recollect.state.flags import Flags

__all__ = ["OPAQUE", "Ground", "Memory", "start_of"]

_Tensor = torch.Tensor

#: Why a value is kept that another call may compute differently, or that no op was seen to make.
OPAQUE = "opaque"


def start_of(tensor: _Tensor) -> int:
    """The byte offset of ``tensor`` in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


@dataclass(eq=False, slots=True)
class Memory:
    """A storage, the value that it holds now, and the offset of the first tensor seen of it."""

    storage: ReferenceType[Any]
    buffer: Buffer
    start: int
    #: The number of the tensor by which it was first seen, if the region did not make it.
    outside: int | None
    #: Whether the first tensor seen of it has the same offset in every call.
    is_placed: bool = False
    #: Tensors that autograd saved, each with its version and its value at the time.
    saved: list[tuple[ReferenceType[_Tensor], int, Buffer]] = field(default_factory=list)
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


class Ground:
    """The state that the two modes which record a call share.

    Args:
        recall: What the call holds.
        earlier: What the first part of the call holds, if only the rest is recorded.
    """

    def __init__(self, recall: Recall, earlier: Recall | None) -> None:
        self.recall = recall
        self.earlier = earlier
        self.tape = recall.tape
        #: The function that is running.
        self.step: Step | None = None
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
        self.written: set[Memory] = set()
        #: The storages of tensors whose metadata was changed, which counts as a write.
        self._looked_at: set[Memory] = set()
        #: By number of an outside tensor: its offset, if that matters.
        self.places: dict[int, int] = {}
        #: The storages that an opaque function has made so far. Only what it returns can be read.
        self.inner: set[Memory] = set()
        self._memories: dict[int, Memory] = {}
        #: Held tensors whose last write may not have been counted yet.
        self._new: list[Held] = []
        #: Values to offload when the function is over, and how many of those offloaded before are
        #: freed then.
        self._leaving: list[Buffer] = []
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
            if self.step is not None:
                self.step.is_opaque = True

    def stop_at(self, tensor: _Tensor) -> None:
        """Hold everything from now on, since ``tensor`` is not supported."""
        self.stop(unsupported_tensor(tensor))

    # --- storages ---------------------------------------------------------------------------------

    def memory(self, tensor: _Tensor) -> Memory | None:
        """The storage of ``tensor``, if it is known."""
        key = memory_key(tensor)
        return None if key is None else self._alive(key)

    def memory_of(self, untyped: torch.UntypedStorage) -> Memory | None:
        """The same, by torch's storage."""
        return self._alive(key_of_storage(untyped))

    def _alive(self, key: int) -> Memory | None:
        memory = self._memories.get(key)
        return memory if memory is not None and memory.storage() is not None else None

    def add(self, tensor: _Tensor, outside: int | None = None) -> Memory:
        """Add a storage that is seen for the first time."""
        untyped = tensor.untyped_storage()
        start = start_of(tensor)
        buffer = self.tape.new(tensor, untyped.nbytes(), start)
        buffer.outside = outside
        memory = self._memories[key_of_storage(untyped)] = Memory(
            ref(untyped), buffer, start, outside
        )
        if not untyped.resizable() and not isinstance(tensor, nn.Parameter):
            # Not allocated by torch: perhaps an array of numpy, by which others can write to it.
            memory.is_exposed = True
            buffer.unsure = OPAQUE
        return memory

    def add_stranger(self, tensor: _Tensor) -> Memory:
        """Add a storage that nothing seen has made."""
        memory = self.add(tensor)
        memory.buffer.unsure = OPAQUE
        return memory

    def find(self, tensor: _Tensor) -> Memory | None:
        """Add a storage that no op has made: perhaps a weight that autocast had cast before."""
        if not is_plain_tensor(tensor):
            self.stop_at(tensor)
            return None
        memory = self.add_stranger(tensor)
        weight = cast_weight(tensor)
        if weight is not None and self.memory(weight) is not None:
            memory.buffer.unsure = None
            op = self.new_op(CAST, bare_op(CAST))
            view = self.view(weight)
            assert view is not None
            op.args, op.kwargs, op.reads = [view], {"dtype": tensor.dtype}, [view.buffer.number]
            op.make((), memory.buffer)
        return memory

    def view(self, tensor: _Tensor) -> View | None:
        """The view that ``tensor`` is; None if it is not supported."""
        memory = self.memory(tensor) or self.find(tensor)
        return None if memory is None else self.view_in(memory, tensor)

    @staticmethod
    def view_in(memory: Memory, tensor: _Tensor) -> View:
        """The same, of a tensor on a known storage."""
        own = memory.buffer.layout
        layout = layout_of(tensor, memory.start)
        return View(memory.buffer, own if layout == own else layout)

    def new_op(self, op: Any, call: Any) -> Op:
        """Record an op that runs now."""
        made = Op(len(self.tape.ops), op, call, self.flags)
        self.tape.ops.append(made)
        return made

    # --- changes ----------------------------------------------------------------------------------

    def before_change(self, memory: Memory) -> None:
        """``memory`` is about to be written to: copy what is held of it and still needed."""
        buffer = memory.buffer
        self.writes_outside |= memory.is_outside
        if buffer.op < 0:
            # A later call could hold it, but would not copy it before the write.
            buffer.unsure = buffer.unsure or "changed later"
        if buffer.number in self.recall.kept:
            with self.pause():
                self.recall.before_overwrite(buffer)

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
                self.recall.before_write(tensor)

    def end_writes(self) -> None:
        """A function that wrote to storages is over."""
        for memory in self.written:
            self._note_spoilt(memory)
            held = self.recall.kept.get(memory.buffer.number)
            if held is not None and memory.counts_late:
                self._new.append(held)  # a custom function counts its writes when it is over
        self.written.clear()

    def _note_spoilt(self, memory: Memory) -> None:
        """After a write: find the saved tensors that autograd would refuse to use now."""
        for reference, version, buffer in memory.saved:
            tensor = reference()
            if not buffer.is_last and tensor is not None and tensor._version != version:
                buffer.is_spoilt = True

    def find_changes(self, tensor: _Tensor) -> None:
        """Look for writes to ``tensor`` by no op that was seen.

        Another thread may have written, or compiled code. The value before is gone: if it cannot be
        recomputed, backward raises.
        """
        memory = self.memory(tensor)
        if memory is None or not memory.is_changed(tensor):
            return
        old = memory.buffer
        self.writes_outside |= memory.is_outside
        if old.op < 0:  # as before a write that is seen: a later call must not hold it
            old.unsure = old.unsure or "changed later"
        self.recall.after_overwrite(old)
        memory.is_exposed = True
        memory.buffer = self.tape.after(old)
        memory.buffer.unsure = OPAQUE
        self._note_spoilt(memory)

    def note_place(self, tensor: _Tensor) -> None:
        """A view of ``tensor`` is made whose offset counts from the beginning of the storage."""
        memory = self.memory(tensor) or self.find(tensor)
        if memory is None:
            return
        if memory.outside is not None:
            self.places[memory.outside] = memory.start
        elif self.step is not None and not memory.is_placed:
            self.step.is_opaque = True

    def end_inner(self) -> None:
        """An opaque function is over: values of its own that are not held by now are lost."""
        for memory in self.inner:
            if memory.buffer.number not in self.recall.kept:
                memory.buffer.unsure = OPAQUE
        self.inner.clear()

    def expose(self, tensor: _Tensor) -> None:
        """Somebody unseen gets access to the storage of a tensor, and may write to it."""
        self.protect(tensor)
        memory = self.memory(tensor)
        if memory is not None:
            self.before_change(memory)
            memory.is_exposed = True
            memory.buffer = self.tape.after(memory.buffer)
            memory.buffer.unsure = OPAQUE

    # --- held tensors -----------------------------------------------------------------------------

    def hold(self, view: View, tensor: _Tensor, ruling: Any) -> None:
        """Hold the value of ``view``, which is ``tensor``."""
        recall = self.recall
        alias = detach_below_autograd(tensor) if self.is_in_op else without_history(tensor)
        self._new.append(recall.keep(view.buffer, alias, view.layout, away=False))
        if ruling is not None and (ruling.offloads or recall.deposit.chosen):
            self._leaving.append(view.buffer)

    def note_looks(self, tensor: _Tensor) -> None:
        """The metadata of ``tensor`` is changed in place. That counts as a write, but is none."""
        if self.step is not None:
            self.step.changes_looks = True
        memory = self.memory(tensor)
        if memory is not None:
            self._looked_at.add(memory)
        for recall in (self.recall, self.earlier):
            self._new += [] if recall is None else recall.before_look(tensor)

    def end_function(self) -> None:
        """Offload what is to be offloaded, and free what has arrived.

        Only when a function is over its writes have been counted: before, a store would take them
        for changes to the tensors that it was given.
        """
        for held in self._new:
            held.count_version()
        self._new.clear()
        if self.written or self._looked_at:
            is_inside = is_in_custom_function(sys._getframe(1))
            for memory in self.written | self._looked_at:
                memory.counts_late = is_inside
                memory.count_versions()
            self._looked_at.clear()
        if not self._leaving and not self.arrivals:
            return
        leaving, self._leaving = self._leaving, []
        arrivals, self.arrivals = self.arrivals, 0
        with self.pause():
            for buffer in leaving:
                self.recall.send(buffer)
            self.recall.deposit.release(arrivals)
