"""One call of a region: what it holds, and how backward recomputes saved tensors from that (R9).

Backward unpacks one saved tensor after the other. The ops that lead to it run below autograd, from
what is held. `graph.release` decides when a value is released, for tensors here and for bytes in
the simulator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from sys import getrefcount
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.autograd import at_end_of_backward, current_graph_task
from recollect._torch.modes import below_autograd, set_grad_enabled
from recollect._torch.tensors import memory_key
from recollect.checks.changed_input import saved_tensor_changed
from recollect.errors import CheckpointError
from recollect.graph.release import WorkingSet, find_needs, missing_ops, pop_unneeded
from recollect.replay.held_tensor import HeldTensor, Ticket
from recollect.replay.recorded_graph import (
    NEEDS_CARE,
    Layout,
    RecordedGraph,
    RecordedOp,
    RecordedValue,
    View,
    Views,
    copy_of_storage,
    is_whole,
)
from recollect.replay.region_schedule import RegionSchedule
from recollect.settings import version_guard_enabled
from recollect.state.flags import Flags, read_flags, write_flags
from recollect.store.offload_batch import OffloadBatch

__all__ = ["Rematerializer"]

_LOST = (
    "a tensor that {op} made cannot be recomputed. This is a bug in recollect's replay engine: "
    "please report it, and use engine='rerun' until it is fixed."
)
_NOTHING = nullcontext()
#: How many backwards through one region may run at once before the oldest has to start over.
_PASSES = 4


class _Pass(WorkingSet[torch.Tensor]):
    """What one backward has recomputed."""

    __slots__ = ("flags", "is_announced")

    def __init__(self, uses: list[int], flags: Flags | None) -> None:
        super().__init__(uses)
        #: The flags to set, if others are set now.
        self.flags = flags
        #: Whether the store was told that backward has begun.
        self.is_announced = False


class Rematerializer:
    """What one call of a region holds."""

    def __init__(self, offload_batch: OffloadBatch, flags: Flags) -> None:
        self.graph = RecordedGraph()
        #: The schedule that the call follows, if it was recorded before.
        self._schedule: RegionSchedule | None = None
        self.offload_batch = offload_batch
        #: How many tickets are left when the store is told to fetch ahead; None: it is at once.
        self.begin: int | None = None
        #: The flags that the region ran under.
        self.flags = flags
        #: By number of the value.
        self.kept: dict[int, HeldTensor] = {}
        #: These in the order in which they were kept, each with the number of tickets before.
        self._order: list[tuple[int, int]] = []
        #: The state of the generator, by number of the op that drew from it.
        self.states: dict[int, torch.Tensor] = {}
        #: Of saved tensors that are not held.
        self.tickets: list[Ticket] = []
        self.is_running = True
        #: Whether the whole call went as recorded.
        self.saw_all = True
        #: While the region is running: a context whose ops are not the region's.
        self.pause: Callable[[], Any] | None = None
        self._is_guarded = version_guard_enabled()
        self.passes: dict[int, _Pass] = {}
        self._lock = threading.RLock()

    def follow(self, graph: RecordedGraph, schedule: RegionSchedule) -> None:
        """Hold what the schedule of an earlier call says."""
        self.graph = graph
        self._schedule = schedule

    def confirm(self) -> None:
        """The call went as recorded: release in the order of the schedule."""
        assert self._schedule is not None
        self._order = self._schedule.order.copy()

    def keep(
        self, value: RecordedValue, tensor: torch.Tensor, layout: Layout, *, away: bool
    ) -> HeldTensor:
        """Hold ``value``; ``tensor`` is a view of it.

        The tensor must have no history, which would lead back to this.
        """
        held = self.kept[value.number] = HeldTensor(tensor, layout)
        self._order.append((value.number, len(self.tickets)))
        if away:
            self.send(value)
        return held

    def send(self, value: RecordedValue) -> None:
        """Offload what is held of ``value``, if it still is and can be."""
        held = self.kept.get(value.number)
        if held is not None and held.away is None and is_whole(value.layout, value.nbytes):
            held.send(self.offload_batch, value.layout)

    def release_last(self) -> None:
        """Release the value that was kept just now after all others: older tickets need it."""
        number, _ = self._order.pop()
        self._order.insert(0, (number, 0))

    # --- writes -----------------------------------------------------------------------------------

    def held_of(self, tensor: torch.Tensor) -> list[HeldTensor]:
        """What is held on the storage of ``tensor``, or was offloaded from there."""
        storage = memory_key(tensor)
        if storage is None:
            return []
        return [each for each in self.kept.values() if each.storage == storage]

    def before_write(self, tensor: torch.Tensor) -> None:
        """Copy what is held on the storage of ``tensor``, which is about to be written to."""
        for held in self.held_of(tensor):
            if held.away is not None:
                held.away.before_write()
            elif held.is_unchanged():  # if not, there was an unseen write: backward raises
                held.become_copy()

    def before_overwrite(self, value: RecordedValue) -> None:
        """The held ``value`` is about to be overwritten: copy it if it is needed."""
        held = self.kept[value.number]
        if held.away is not None:
            held.away.before_write()
        elif value.is_wanted:
            held.become_copy()
        else:
            del self.kept[value.number]

    def after_overwrite(self, value: RecordedValue) -> None:
        """An unseen write has changed ``value``: recompute it, or raise if that is impossible."""
        held = self.kept.get(value.number)
        if held is None or held.away is not None:
            return
        maker = self.graph.maker_of(value)
        if maker is not None and maker.keep is None:
            del self.kept[value.number]
        else:
            held.spoil()

    def before_metadata_change(self, tensor: torch.Tensor) -> list[HeldTensor]:
        """The metadata of ``tensor`` is about to be changed in place, which counts as a write.

        Returns the held tensors whose version has to be read again afterwards.
        """
        held = self.held_of(tensor)
        for each in held:
            if each.away is not None:
                each.away.before_write()
        return [each for each in held if each.away is None and each.is_unchanged()]

    def copy_outputs(self, saved: Container[int]) -> None:
        """Copy held outputs of the region, since the user may change them; not the ``saved``."""
        for number, held in self.kept.items():
            value = self.graph.values[number]
            must_stay = number in saved and value.unsure is None
            is_here = held.away is None and held.is_unchanged()
            if value.is_output and is_here and not must_stay:
                held.become_copy()

    # --- release ----------------------------------------------------------------------------------

    def release_unneeded(self) -> None:
        """After a call that was recorded: release what no saved tensor needs."""
        saved = [ticket[2].value.number for ticket in self.tickets]
        needs = find_needs(self.graph, saved, self.kept)
        self._order = needs.order
        wanted = {number for number, _ in needs.order}
        for number in self.kept.keys() - wanted:
            del self.kept[number]
        for number in self.states.keys() - needs.again:
            del self.states[number]

    def _release_held(self) -> None:
        """Release what only freed parts of the autograd graph needed."""
        tickets = self.tickets
        if not tickets or _references_to_last(tickets) > _OF_THE_DEAD_LAST:
            return
        while tickets and _references_to_last(tickets) <= _OF_THE_DEAD_LAST:
            tickets.pop()
        self._schedule = None  # which counts uses by tickets that are dead
        for number in pop_unneeded(self._order, len(tickets)):
            self.kept.pop(number, None)

    def is_waiting(self) -> bool:
        """Whether backward has yet to go through part of the graph.

        To be asked after the call. The object is alive as long as a saved tensor of the call is.
        """
        tickets = self.tickets
        return not tickets or max(_reference_counts(tickets)) > _OF_THE_DEAD

    # --- backward ---------------------------------------------------------------------------------

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """The saved-tensor hook: autograd unpacks a tensor."""
        tensor, version, view = ticket
        if tensor is None:
            return self._recompute(view)
        if tensor._version != version:
            raise saved_tensor_changed(tensor)
        return tensor  # type: ignore[no-any-return]

    def _recompute(self, view: View) -> torch.Tensor:
        value = view.value
        if value.is_spoilt and self.saw_all and not self.is_running:
            raise saved_tensor_changed(view.layout[0])
        working = self.passes.get(current_graph_task())
        if working is not None and not self.is_running:
            tensor = working.here.get(value.number)
            if tensor is not None:  # the usual case: most are recomputed on the way to the first
                working.give(value.number)
                return view.of(tensor)
        pause = self.pause if self.is_running else None
        # Two threads of one backward may be here at once.
        with self._lock, below_autograd(), pause() if pause is not None else _NOTHING:
            working = self._pass()
            if not self.is_running:
                self._release_held()
                if not working.is_announced and len(self.tickets) <= (self.begin or 0):
                    working.is_announced = True
                    self.offload_batch.announce()
            if working.flags is None:
                tensor = self._tensor(working, value)
            else:
                with _under(working.flags):
                    tensor = self._tensor(working, value)
            working.give(value.number)
            return view.of(tensor)

    def _pass(self) -> _Pass:
        backward = current_graph_task()
        working = self.passes.get(backward)
        if working is None:
            working = _Pass(self._count(), self.flags if read_flags() != self.flags else None)
            if backward >= 0:  # else this is outside of backward, and nothing may stay behind
                # A backward that failed has left its pass here. Dropping one only costs time.
                for oldest in [*self.passes][: 1 - _PASSES]:
                    del self.passes[oldest]
                self.passes[backward] = working
                at_end_of_backward(partial(_end_pass, ref(self), backward))
            working.is_announced = self.begin is None
            if working.is_announced:
                self.offload_batch.announce()
        return working

    def _count(self) -> list[int]:
        """By value: how often backward will use it."""
        counts = _reference_counts(self.tickets)
        schedule = self._schedule
        is_planned = schedule is not None and self.saw_all and not self.is_running
        if is_planned and min(counts, default=0) > _OF_THE_DEAD:
            assert schedule is not None
            return schedule.uses.copy()
        alive = [t for t, count in zip(self.tickets, counts, strict=True) if count > _OF_THE_DEAD]
        return find_needs(self.graph, [ticket[2].value.number for ticket in alive], self.kept).uses

    def _tensor(self, working: _Pass, value: RecordedValue) -> torch.Tensor:
        """The tensor of the value's own layout."""
        number, here, uses = value.number, working.here, working.uses
        tensor = here.get(number)
        if tensor is not None:
            return tensor
        held = self.kept.get(number)
        if held is not None:
            is_guarded = self._is_guarded or value.outside is None
            tensor = held.get(value.layout, is_guarded=is_guarded)
            if uses[number] > 1:
                here[number] = tensor
            return tensor
        ops = self._missing(working, number)
        if uses[number] <= 0:  # not counted: a tensor is unpacked for the second time
            for op in ops:
                for read in self.graph.ops[op].reads:
                    uses[read] += 1
        uses[number] += 1  # not to be released before it is returned
        for op in ops:
            self._run(working, self.graph.ops[op])
        tensor = here[number]
        working.use(number)
        return tensor

    def _missing(self, working: _Pass, number: int) -> list[int]:
        """The ops that recompute a value from what is there, in order."""
        schedule, chains = self._schedule, None
        if not (working.here or schedule is None or self.is_running) and self.saw_all:
            chains = schedule.chains  # there is what the schedule keeps, and nothing else
        ops = None if chains is None else chains.get(number)
        if ops is None:
            ops = missing_ops(self.graph, number, working.here, self.kept)
            for op in (self.graph.ops[each] for each in ops):
                if op.is_lost:
                    raise CheckpointError(_LOST.format(op=op.op))
            if chains is not None:
                chains[number] = ops
        return ops

    def _run(self, working: _Pass, op: RecordedOp) -> None:
        """Run ``op`` again."""
        if torch.is_grad_enabled() is not op.grad_enabled:
            set_grad_enabled(op.grad_enabled)
        views = op.views
        if views is None:
            views = op.prepare()
        if views is NEEDS_CARE:
            self._run_with_care(working, op)
            return
        here = working.here
        args = op.args.copy()
        for place, view in views:
            value = view.value
            tensor = here.get(value.number)
            if tensor is None:
                tensor = self._tensor(working, value)
            args[place] = view.of(tensor)
        out = op.call(*args, **op.kwargs)
        working.end_op(op.reads, _results(op, out) if op.only < 0 else ((op.only, out),))

    def _run_with_care(self, working: _Pass, op: RecordedOp) -> None:
        """Run an op that writes, draws, takes lists of tensors, or has flags of its own."""
        bases = {old: self._writable(working, op, old) for old, _ in op.writes}
        args = [self._argument(working, each, bases) for each in op.args]
        kwargs = {name: self._argument(working, each, bases) for name, each in op.kwargs.items()}
        with _NOTHING if op.flags is None else _under(op.flags):
            out = op.call(*args, **kwargs) if op.generator is None else self._draw(op, args, kwargs)
        written = [(new, bases[old]) for old, new in op.writes]
        reads = [number for number in op.reads if number not in bases]
        working.end_op(reads, _results(op, out) + written)

    def _argument(self, working: _Pass, arg: Any, bases: dict[int, torch.Tensor]) -> Any:
        if type(arg) is View:
            base = bases.get(arg.value.number) if bases else None
            return arg.of(self._tensor(working, arg.value) if base is None else base)
        if type(arg) is Views:
            return arg.kind([self._argument(working, each, bases) for each in arg])
        return arg

    def _writable(self, working: _Pass, op: RecordedOp, number: int) -> torch.Tensor:
        """A tensor with the content of a value, which ``op`` may write to."""
        value = self.graph.values[number]
        if number in op.fresh:
            size, stride, _, dtype, _ = value.layout
            return torch.empty_strided(size, stride, dtype=dtype, device=value.device)
        tensor = self._tensor(working, value)
        if working.use_up(number) and number not in self.kept:
            return tensor
        return copy_of_storage(tensor)

    def _draw(self, op: RecordedOp, args: list[Any], kwargs: dict[str, Any]) -> Any:
        generator = op.generator
        assert generator is not None
        now = generator.get_state()
        generator.set_state(self.states[op.number])
        try:
            return op.call(*args, **kwargs)
        finally:
            generator.set_state(now)


def _reference_counts(tickets: list[Ticket]) -> list[int]:
    return [getrefcount(ticket) for ticket in tickets]


def _references_to_last(tickets: list[Ticket]) -> int:
    return getrefcount(tickets[-1])


#: How many references this interpreter counts to a ticket that only a list holds.
(_OF_THE_DEAD,) = _reference_counts([[object()]])
_OF_THE_DEAD_LAST = _references_to_last([[object()]])


@contextmanager
def _under(flags: Flags) -> Iterator[None]:
    """A context in which ``flags`` are set."""
    before = read_flags()
    write_flags(flags)
    try:
        yield
    finally:
        write_flags(before)


def _results(op: RecordedOp, out: Any) -> list[tuple[int, torch.Tensor]]:
    """The tensors that ``op`` made on new storages, by number of the value."""
    found = []
    for number, path in zip(op.makes, op.paths, strict=True):
        tensor = out
        for index in path:
            tensor = tensor[index]
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{op.op} returned a tensor in forward, but {tensor!r} when it ran again. Keep its "
                "result by a policy, or use engine='rerun'."
            )
        found.append((number, tensor))
    return found


def _end_pass(remat: ReferenceType[Rematerializer], backward: int) -> None:
    """Release what a backward has recomputed and not used: it is over."""
    alive = remat()
    if alive is not None:
        alive.passes.pop(backward, None)
