"""While a region is recorded: which memories there are, and what each holds."""

from __future__ import annotations

import sys
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

#: Why something is kept that another call may make otherwise, or that nobody was seen to make.
OPAQUE = "opaque"


def start_of(tensor: _Tensor) -> int:
    """At how many bytes of its memory ``tensor`` begins."""
    return int(tensor.storage_offset()) * tensor.element_size()


class Memory:
    """A memory that is alive: what it holds now, and where the first tensor seen of it began."""

    __slots__ = (
        "buffer",
        "counts_late",
        "has_data",
        "is_exposed",
        "is_placed",
        "outside",
        "saved",
        "start",
        "storage",
        "versions",
    )

    def __init__(self, storage: Any, buffer: Buffer, start: int) -> None:
        self.storage: ReferenceType[Any] = ref(storage)
        self.buffer = buffer
        self.start = start
        #: The number of the tensor by which it was first seen, if the region did not make it.
        self.outside = buffer.outside
        #: Whether the first tensor seen of it begins in the same place in every call.
        self.is_placed = False
        #: Tensors that autograd saved, with the version and the buffer they were then.
        self.saved: list[tuple[ReferenceType[_Tensor], int, Buffer]] = []
        #: Whether there is a tensor by which to write to it without autograd's knowledge.
        self.has_data = False
        #: Whether somebody unseen has a way to it.
        self.is_exposed = False
        #: By id: the tensors on it, each with how often it had been written to when that was seen.
        self.versions: dict[int, tuple[ReferenceType[_Tensor], int]] = {}
        #: Whether its last write is counted once more, by a custom function that is not over yet.
        self.counts_late = False

    @property
    def is_outside(self) -> bool:
        """Whether the region did not make it."""
        return self.outside is not None

    def watch(self, tensor: _Tensor) -> None:
        """Know ``tensor`` by its version from now on."""
        version = version_of(tensor)
        if version is not None:
            self.versions[id(tensor)] = (ref(tensor), version)

    def count_versions(self) -> None:
        """What was written to it by now is known."""
        found = [reference() for reference, _ in self.versions.values()]
        self.versions = {id(t): (ref(t), t._version) for t in found if t is not None}

    def is_changed(self, tensor: _Tensor) -> bool:
        """Whether ``tensor`` has been written to by somebody who was not seen."""
        reference, version = self.versions.get(id(tensor), (None, 0))
        if reference is None or reference() is not tensor or tensor._version == version:
            return False
        is_counted = self.counts_late and tensor._version == version + 1
        self.counts_late = False
        self.count_versions()
        return not is_counted


class Ground:
    """What the two modes that record a call have in common."""

    def __init__(self, recall: Recall, earlier: Recall | None) -> None:
        self.recall = recall
        #: What the part of the call holds that came before, if only the rest is recorded.
        self.earlier = earlier
        self.tape = recall.tape
        #: The function that is running.
        self.step: Step | None = None
        #: Whether it runs under autocast, which ops cannot tell.
        self.is_casting = False
        #: Why everything is held from here on.
        self.stopped: str | None = None
        #: While ops are run that are none of the region's.
        self.paused = False
        #: While an op is: below autograd, and before its writes are counted.
        self.is_in_op = False
        self.writes_outside = False
        #: What the function has written to.
        self.written: set[Memory] = set()
        #: What was looked at otherwise, which counts as a write.
        self._looked_at: set[Memory] = set()
        #: The switches of the function that is running, if they are not those of the region.
        self.flags: Flags | None = None
        #: By number of a tensor outside: where it begins in its memory, if that matters.
        self.places: dict[int, int] = {}
        #: What an opaque function has made so far. Only what it returns will be read again.
        self.inner: set[Memory] = set()
        self._memories: dict[int, Memory] = {}
        #: What is held whose last write may not have been counted yet.
        self._new: list[Held] = []
        #: Of that what is to be sent away, and how many of those sent before are let go then.
        self._leaving: list[Buffer] = []
        self.arrivals = 0

    def is_idle(self) -> bool:
        """Whether nothing is written down."""
        return self.paused or self.stopped is not None

    def stop(self, reason: str) -> None:
        """Hold everything from now on."""
        if self.stopped is None:
            self.stopped = reason
            if self.step is not None:
                self.step.is_opaque = True

    def stop_at(self, tensor: _Tensor) -> None:
        """Hold everything, since ``tensor`` is one that is not understood."""
        self.stop(unsupported_tensor(tensor))

    # --- memories ---------------------------------------------------------------------------------

    def memory(self, tensor: _Tensor) -> Memory | None:
        """The memory of ``tensor``, if it is known."""
        key = memory_key(tensor)
        return None if key is None else self._alive(key)

    def memory_of(self, storage: torch.UntypedStorage) -> Memory | None:
        """The same, of a storage."""
        return self._alive(key_of_storage(storage))

    def _alive(self, key: int) -> Memory | None:
        memory = self._memories.get(key)
        return memory if memory is not None and memory.storage() is not None else None

    def add(self, tensor: _Tensor, outside: int | None = None) -> Memory:
        """A memory that is seen for the first time."""
        storage = tensor.untyped_storage()
        start = start_of(tensor)
        buffer = self.tape.new(tensor, storage.nbytes(), start)
        buffer.outside = outside
        memory = self._memories[key_of_storage(storage)] = Memory(storage, buffer, start)
        if not storage.resizable() and not isinstance(tensor, nn.Parameter):
            # Not torch's own: an array of numpy, perhaps, by which others can write to it.
            memory.is_exposed = True
            buffer.unsure = OPAQUE
        return memory

    def add_stranger(self, tensor: _Tensor) -> Memory:
        """A memory that nothing seen has made."""
        memory = self.add(tensor)
        memory.buffer.unsure = OPAQUE
        return memory

    def find(self, tensor: _Tensor) -> Memory | None:
        """Where a tensor comes from that no op has made: autocast remembers weights converted."""
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
        """What ``tensor`` is a view of; None if that cannot be said."""
        memory = self.memory(tensor) or self.find(tensor)
        return None if memory is None else self.view_in(memory, tensor)

    @staticmethod
    def view_in(memory: Memory, tensor: _Tensor) -> View:
        """The same, of a tensor of a known memory."""
        own = memory.buffer.layout
        layout = layout_of(tensor, memory.start)
        return View(memory.buffer, own if layout == own else layout)

    def new_op(self, op: Any, call: Any) -> Op:
        """An op that runs now."""
        made = Op(len(self.tape.ops), op, call, self.flags)
        self.tape.ops.append(made)
        return made

    # --- changes ----------------------------------------------------------------------------------

    def before_change(self, memory: Memory, tensor: _Tensor) -> None:
        """``memory`` is about to be written to: what relies on its content gets a copy."""
        buffer = memory.buffer
        self.writes_outside |= memory.is_outside
        if buffer.op < 0:
            # A later call can hold it, but nobody would copy it then before it is written to.
            buffer.unsure = buffer.unsure or "changed later"
        held = self.recall.kept.get(buffer.number)
        if held is None:
            return
        if held.away is not None:
            held.away.before_write()
        elif buffer.is_wanted:
            paused, self.paused = self.paused, True
            try:
                held.become_copy()
            finally:
                self.paused = paused
        else:
            del self.recall.kept[buffer.number]

    def protect(self, tensor: _Tensor) -> None:
        """``tensor`` is about to be written to: what nobody else looks after gets a copy.

        That is what the part before holds, and what is held since nothing is written down any more.
        """
        if self.paused:
            return
        self.paused = True
        for held in self._new:  # the ops before this one are over
            held.count_version()
        try:
            if self.earlier is not None:
                self.earlier.before_write(tensor)
            if self.stopped is not None:
                self.recall.before_write(tensor)
        finally:
            self.paused = False

    def end_writes(self) -> None:
        """The function is over that wrote to memories."""
        for memory in self.written:
            self._note_spoilt(memory)
            held = self.recall.kept.get(memory.buffer.number)
            if held is not None and memory.counts_late:
                self._new.append(held)  # a custom function counts its writes when it is over
        self.written.clear()

    def _note_spoilt(self, memory: Memory) -> None:
        """After a write: what autograd saved before, and would now refuse to use."""
        for reference, version, buffer in memory.saved:
            tensor = reference()
            if not buffer.is_last and tensor is not None and tensor._version != version:
                buffer.is_spoilt = True

    def find_changes(self, tensor: _Tensor) -> None:
        """Look for writes to ``tensor`` that no op was seen to make.

        Those of another thread, or of code that a compiler made. What the memory held before is
        gone: where it cannot be made again, backward says so.
        """
        memory = self.memory(tensor)
        if memory is None or not memory.is_changed(tensor):
            return
        old = memory.buffer
        self.writes_outside |= memory.is_outside
        if old.op < 0:  # as before a write that is seen: a later call must not hold it
            old.unsure = old.unsure or "changed later"
        held = self.recall.kept.get(old.number)
        maker = self.tape.maker_of(old)
        if held is not None and held.away is None:
            if maker is not None and maker.keep is None:
                del self.recall.kept[old.number]
            else:
                held.spoil()
        memory.is_exposed = True
        memory.buffer = self.tape.after(old)
        memory.buffer.unsure = OPAQUE
        self._note_spoilt(memory)

    def note_place(self, tensor: _Tensor) -> None:
        """A view is made that counts from the beginning of the memory of ``tensor``."""
        memory = self.memory(tensor) or self.find(tensor)
        if memory is None:
            return
        if memory.outside is not None:
            self.places[memory.outside] = memory.start
        elif self.step is not None and not memory.is_placed:
            self.step.is_opaque = True

    def end_inner(self) -> None:
        """The opaque function is over: what of its own is not held by now is not to be had."""
        for memory in self.inner:
            if memory.buffer.number not in self.recall.kept:
                memory.buffer.unsure = OPAQUE
        self.inner.clear()

    def expose(self, tensor: _Tensor) -> None:
        """Somebody gets a way to the memory of a tensor, and may change it."""
        self.protect(tensor)
        memory = self.memory(tensor)
        if memory is not None:
            self.before_change(memory, tensor)
            memory.is_exposed = True
            memory.buffer = self.tape.after(memory.buffer)
            memory.buffer.unsure = OPAQUE

    # --- what is held -----------------------------------------------------------------------------

    def hold(self, view: View, tensor: _Tensor, ruling: Any) -> None:
        """Hold a buffer, of which ``tensor`` is a view."""
        recall = self.recall
        away = ruling is not None and (ruling.offloads or recall.deposit.chosen)
        alias = detach_below_autograd(tensor) if self.is_in_op else without_history(tensor)
        recall.keep(view.buffer, alias, view.layout, away=False)
        self._new.append(recall.kept[view.buffer.number])
        if away:
            self._leaving.append(view.buffer)

    def note_looks(self, tensor: _Tensor) -> None:
        """Another look at the memory of ``tensor`` counts as a write, and leaves it as it is."""
        if self.step is not None:
            self.step.changes_looks = True
        memory = self.memory(tensor)
        if memory is not None:
            self._looked_at.add(memory)
        for recall in (self.recall, self.earlier):
            self._new += [] if recall is None else recall.before_look(tensor)

    def end_function(self) -> None:
        """Send away what is to leave, and let go of what has arrived.

        Now, since the writes of a function have been counted when it is over: a store would take
        them for changes of what it was given.
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
        paused, self.paused = self.paused, True
        try:
            for buffer in leaving:
                self.recall.send(buffer)
            self.recall.deposit.release(arrivals)
        finally:
            self.paused = paused
