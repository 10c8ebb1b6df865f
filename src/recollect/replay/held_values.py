"""The values that one call of a region holds until backward, on the device or in a store.

Copy-on-write: a held tensor is copied before it is written to in place, if backward needs it.

=====================================  ================================  ========================
When                                   Who calls                         what
=====================================  ================================  ========================
An op that is recorded writes          MemoryTracker.before_change       before_overwrite
Any op writes, once recording stopped  MemoryTracker.protect             before_write
After a write that was not seen        MemoryTracker.note_unseen_writes  after_overwrite
Metadata changes in place              MemoryTracker, Checker            before_metadata_change
The rest of a checked call is held     Checker, CopyOnWrite              before_write
A call returns                         Recorder.finish, Checker.finish   copy_outputs, before_write
=====================================  ================================  ========================
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from recollect._torch.autograd import detached, view_base, without_graph, without_history
from recollect._torch.dtensors import USUAL_TENSORS, has_dtensors, is_wrapper, local_tensor
from recollect._torch.modes import DispatchMode
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import memory_key, version_of
from recollect.checks.changed_input import source_changed
from recollect.graph.release import find_needs
from recollect.policy.op_info import op_info
from recollect.replay.recorded_graph import (
    Layout,
    RecordedGraph,
    RecordedValue,
    copy_of_storage,
    is_whole,
    view_of,
)
from recollect.replay.recording import ExpectedCall
from recollect.store.offload_batch import OffloadBatch, OffloadedTensor

#: Replaces a saved tensor in the autograd graph: the tensor if it is held, its version, and if it
#: is not held the view to recompute it by. A list because it is fast to make.
Ticket = list[Any]


def hold_for_good(ticket: Ticket) -> None:
    """Hold a ticket's tensor until the autograd graph is freed.

    Detached: a result's grad_fn is the node that saves it, a cycle that the garbage collector does
    not see.
    """
    ticket[0] = without_graph(ticket[0])


class HeldTensor:
    """A tensor of a value, on the device or in a store."""

    __slots__ = ("away", "counter", "layout", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, layout: Layout, version: int | None) -> None:
        self.layout = layout
        self.version = version
        self.tensor = tensor
        #: A tensor whose version counts writes as well: those to a ``DTensor`` are not counted for
        #: its local tensor.
        self.counter: torch.Tensor | None = None
        self.away: OffloadedTensor | None = None

    @property
    def storage_key(self) -> int | None:
        """The key of its storage, or of the one it was offloaded from; None if that is gone."""
        return memory_key(self.tensor) if self.away is None else self.away.memory

    def send(self, offload_batch: OffloadBatch, layout: Layout) -> None:
        """Offload the whole tensor, which has this ``layout``."""
        if self.layout is not layout:
            self.tensor, self.layout = view_of(self.tensor, self.layout, layout), layout
        self.away = offload_batch.put(self.tensor)
        del self.tensor

    def before_write(self) -> None:
        """Copy-on-write: hold a copy, because the storage is about to be written to."""
        if self.away is not None:
            self.away.before_write()
        elif self.is_unchanged():  # else backward raises
            self.tensor, self.counter = copy_of_storage(self.tensor), None
            self.version = version_of(self.tensor)

    def is_unchanged(self) -> bool:
        """Whether the tensor is on the device, and has not been written to."""
        return self.away is None and self._version() == self.version

    def _version(self) -> int | None:
        version = version_of(self.tensor)
        if self.counter is None or version is None:
            return version
        return version + (version_of(self.counter) or 0)

    def count_by(self, wrapper: torch.Tensor) -> None:
        """Have writes counted by a ``DTensor`` that wraps the tensor, too."""
        if self.away is None:
            self.counter = without_history(wrapper)
            self.version = self._version()

    def count_version(self) -> None:
        """Accept the current version: the writes so far were known."""
        if self.away is None:
            self.version = self._version()
        else:
            self.away.count_version()

    def get(self, own: Layout, is_guarded: bool) -> torch.Tensor:
        """The tensor in layout ``own``. ``is_guarded``: raise if it has been changed."""
        if self.away is not None:
            return view_of(self.away.get(), self.layout, own)
        tensor = self.tensor
        if is_guarded and self.version is not None:  # torch counts writes to it
            version = tensor._version if self.counter is None else self._version()
            if version != self.version:
                raise source_changed(tensor)
        return tensor if self.layout is own else view_of(tensor, self.layout, own)


class HeldValues:
    """The values of ``graph`` that a call holds, and the tickets of the tensors it dropped."""

    def __init__(self, graph: RecordedGraph, offload_batch: OffloadBatch) -> None:
        self.graph = graph
        self.offload_batch = offload_batch
        #: By number of the value.
        self.kept: dict[int, HeldTensor] = {}
        #: In the order in which they were kept, each with the number of tickets before it.
        self._order: list[tuple[int, int]] = []
        #: Generator states, by number of the op that drew.
        self.states: dict[int, torch.Tensor] = {}
        #: The tickets of saved tensors that are not held.
        self.tickets: list[Ticket] = []
        #: By value: how often backward uses it if all tickets are alive; None if that is unknown.
        self._uses: list[int] | None = None

    def keep(
        self, value: RecordedValue, tensor: torch.Tensor, layout: Layout, *, away: bool
    ) -> HeldTensor:
        """Hold ``value``; ``tensor`` is a view of it.

        The tensor must be detached: its graph would lead back to this object.
        """
        try:
            version: int | None = tensor._version
        except RuntimeError:  # an inference tensor
            version = None
        held = self.kept[value.number] = HeldTensor(tensor, layout, version)
        self._order.append((value.number, len(self.tickets)))
        if away:
            self.send(value)
        return held

    def count_writes_to(self, result: Any) -> None:
        """Notice writes to what a region returned, in a ``DTensor`` too."""
        for tensor in () if type(result) in USUAL_TENSORS else tree_leaves(result):
            if is_wrapper(type(tensor)):
                for held in self.held_of(tensor):
                    held.count_by(tensor)

    def send(self, value: RecordedValue) -> None:
        """Offload ``value``, if it is still held and fills its storage."""
        held = self.kept.get(value.number)
        if held is not None and held.away is None and is_whole(value.layout, value.nbytes):
            held.send(self.offload_batch, value.layout)

    def release_last(self) -> None:
        """Release the value kept last after all others, because older tickets need it."""
        number, _ = self._order.pop()
        self._order.insert(0, (number, 0))

    def drop_or_hold(self, expected: ExpectedCall, tickets: list[Ticket]) -> None:
        """Hold the saved tensors of a checked function that the schedule holds; drop the others."""
        for place, value, layout, away in expected.caught_packed:
            hold_for_good(tickets[place])
            self.keep(value, local_tensor(tickets[place][0]), layout, away=away)
        dropped, is_of_torch = self.tickets, expected.is_of_torch
        for ticket, view in zip(tickets, expected.saved, strict=False):
            if view is not None:
                ticket[0] = None
                ticket[2] = view
                dropped.append(ticket)
                continue
            tensor = ticket[0]
            base = view_base(tensor)
            # `hold_for_good` without a call for most of them. A view of a parameter leads to the
            # parameter alone, unless it is the result of a custom function that saves it.
            is_free = is_of_torch and base is not None and base.is_leaf and base.requires_grad
            if not (is_free or (base is None and tensor.is_leaf)):
                ticket[0] = detached(tensor)
        tickets.clear()

    # --- writes -----------------------------------------------------------------------------------

    def held_of(self, tensor: torch.Tensor) -> list[HeldTensor]:
        """The held tensors on the storage of ``tensor``, or offloaded from it."""
        key = memory_key(tensor)
        if key is None:
            return []
        return [each for each in self.kept.values() if each.storage_key == key]

    def before_write(self, tensor: torch.Tensor) -> None:
        """Before an in-place write to ``tensor``: copy all held tensors on its storage."""
        for held in self.held_of(tensor):
            held.before_write()

    def before_overwrite(self, value: RecordedValue) -> None:
        """Before an in-place write to a held ``value``: copy it if needed, else free it."""
        held = self.kept[value.number]
        if held.away is not None or value.is_wanted:
            held.before_write()
        else:
            del self.kept[value.number]

    def after_overwrite(self, value: RecordedValue) -> None:
        """An unseen write has changed ``value``: backward recomputes it, or raises."""
        held = self.kept.get(value.number)
        if held is None or held.away is not None:
            return
        maker = self.graph.maker_of(value)
        if maker is not None and maker.keep is None:
            del self.kept[value.number]
        else:
            held.version = -1  # `HeldTensor.get` raises

    def before_metadata_change(self, tensor: torch.Tensor) -> list[HeldTensor]:
        """Before an in-place change of the metadata of ``tensor``, which counts as a write.

        Returns the held tensors whose versions must be read again afterwards.
        """
        held = self.held_of(tensor)
        for each in held:
            if each.away is not None:
                each.away.before_write()
        return [each for each in held if each.is_unchanged()]

    def copy_outputs(self, saved: Container[int]) -> None:
        """Copy held outputs, which the user may change; not the ``saved`` ones."""
        for number, held in self.kept.items():
            value = self.graph.values[number]
            must_stay = number in saved and value.unsure is None
            if value.is_output and held.away is None and not must_stay:
                held.before_write()

    # --- release ----------------------------------------------------------------------------------

    def release_unneeded(self) -> None:
        """After a recorded call: free values that no saved tensor needs."""
        saved = [ticket[2].value.number for ticket in self.tickets]
        needs = find_needs(self.graph, saved, self.kept)
        self._order, self._uses = needs.order, needs.uses
        wanted = {number for number, _ in needs.order}
        for number in self.kept.keys() - wanted:
            del self.kept[number]
        for number in self.states.keys() - needs.again:
            del self.states[number]


class CopyOnWrite(DispatchMode):
    """After a difference: copies a held tensor before an op writes to it in place."""

    def __init__(self, held: HeldValues) -> None:
        super().__init__()
        self._held = held

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if has_dtensors(types):
            return NotImplemented
        info = op_info(func)
        kwargs = kwargs or {}
        if info.writes:
            for tensor in info.written(args, kwargs):
                self._held.before_write(tensor)
        return info.call(*args, **kwargs)
