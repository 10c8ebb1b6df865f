"""Recomputes saved tensors in backward, from the values that a call holds (R9).

Backward unpacks one saved tensor after another. The ops that compute it run below autograd, from
held values. `graph.release` decides when a value is freed, for tensors here and for bytes in the
simulator. `unpack` and `_run` have its `give` and `end_op` inlined for speed. A test in
tests/graph/test_simulate.py compares both (`test_once_it_is_known_the_peak_is_the_simulated_one`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from sys import getrefcount
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import is_grad_enabled as grad_enabled

from recollect._torch.autograd import DEAD_COUNT, at_end_of_backward, current_graph_task
from recollect._torch.dynamo import hide_with_calls
from recollect._torch.modes import below_autograd, no_function_modes, set_grad_enabled
from recollect.checks.changed_input import saved_tensor_changed
from recollect.errors import CheckpointError
from recollect.graph.release import WorkingSet, find_needs, missing_ops, pop_unneeded
from recollect.replay.held_values import HeldValues, Ticket
from recollect.replay.recorded_graph import (
    NEEDS_CARE,
    RecordedGraph,
    RecordedOp,
    RecordedValue,
    View,
    Views,
    copy_of_storage,
)
from recollect.replay.recording import Chains, Recording
from recollect.settings import version_guard_enabled
from recollect.state.flags import Flags, read_flags, write_flags
from recollect.store.offload_batch import OffloadBatch

_LOST = (
    "a tensor that {op} made cannot be recomputed. This is a bug in recollect's replay engine: "
    "please report it, and use engine='rerun' until it is fixed."
)
_NOTHING = nullcontext()
#: How many backwards through one region keep their recomputed values at the same time.
_PASSES = 4
#: How many chains of a schedule are cached.
_CHAINS = 4096


class _Pass(WorkingSet[torch.Tensor]):
    """The values that one backward has recomputed."""

    __slots__ = ("chains", "flags", "is_announced")

    def __init__(self, uses: list[int], chains: Chains | None, flags: Flags | None) -> None:
        super().__init__(uses)
        #: The cache of chains, valid if the call holds what the schedule says.
        self.chains = chains
        #: The flags to set, if others are set now.
        self.flags = flags
        #: Whether the store was told that backward has begun.
        self.is_announced = False


class Rematerializer(HeldValues):
    """Holds values of one call of a region, and recomputes the others in backward.

    Args:
        offload_batch: The tensors that it offloads.
        flags: The flags that the region runs under.
        recording: The recording that the call is checked against, if any.
        begin: The store starts to prefetch when this many tickets are left; None: at once.
    """

    def __init__(
        self,
        offload_batch: OffloadBatch,
        flags: Flags,
        recording: Recording | None = None,
        begin: int | None = None,
    ) -> None:
        super().__init__(RecordedGraph() if recording is None else recording.graph, offload_batch)
        self._schedule = None if recording is None else recording.schedule
        self.begin = begin
        self.flags = flags
        #: Whether the call has ended, and went as recorded if it was recorded before.
        self.is_complete = False
        #: While the region runs: a context for ops that are not the region's.
        self.pause: Callable[[], Any] | None = None
        self._is_guarded = version_guard_enabled()
        self.passes: dict[int, _Pass] = {}
        self._lock = threading.RLock()

    def end(self, *, as_recorded: bool) -> None:
        """The call is over. ``as_recorded``: it matched its recording, if it has one."""
        self.is_complete = as_recorded
        if as_recorded and self._schedule is not None:
            self._order = self._schedule.order.copy()  # the order in which to release
            self._uses = self._schedule.uses

    def _release_held(self) -> None:
        """Free held values that only freed parts of the autograd graph needed."""
        tickets, before = self.tickets, len(self.tickets)
        while tickets and getrefcount(tickets[-1]) <= DEAD_COUNT:
            tickets.pop()
        if len(tickets) == before:
            return
        self._schedule = self._uses = None  # the counts include dead tickets
        for number in pop_unneeded(self._order, len(tickets)):
            self.kept.pop(number, None)

    def count_waiting(self) -> int:
        """How many of the saved tensors are still in the graph.

        To be asked after the call. The object is alive as long as one of them is.
        """
        return sum(count > DEAD_COUNT for count in map(getrefcount, self.tickets))

    # --- backward ---------------------------------------------------------------------------------

    @hide_with_calls
    def unpack(self, ticket: Ticket) -> torch.Tensor:
        tensor: torch.Tensor | None = ticket[0]
        if tensor is not None:
            if tensor._version != ticket[1]:
                raise saved_tensor_changed(tensor)
            return tensor
        view: View = ticket[2]
        value, backward = view.value, current_graph_task()
        working = self.passes.get(backward)
        if working is not None and not value.is_stale and self.pause is None:
            here, uses, number = working.here, working.uses, value.number
            tensor = here.get(number)
            if tensor is not None:  # the usual case: recomputed on the way to an earlier one
                working.given.add(number)  # `WorkingSet.give`, inlined
                uses[number] -= 1
                if uses[number] <= 0:
                    here.pop(number, None)  # another thread may have been faster
                return tensor if view.is_own else (view.maker or view.find_maker())(tensor)
        return self._recompute(backward, view)

    def _recompute(self, backward: int, view: View) -> torch.Tensor:
        if view.value.is_stale and self.is_complete:
            raise saved_tensor_changed(view.layout[0])
        was_enabled = grad_enabled()
        unseen = no_function_modes() if self.pause is None else self.pause()
        try:
            # Two threads of one backward may get here at once.
            with self._lock, unseen, below_autograd():
                return self._recompute_now(backward, view)
        finally:
            set_grad_enabled(was_enabled)

    def _recompute_now(self, backward: int, view: View) -> torch.Tensor:
        working = self.passes.get(backward)
        if working is None:
            working = self._begin(backward)
        if self.pause is None:
            self._release_held()
        if not working.is_announced and (self.begin is None or len(self.tickets) <= self.begin):
            working.is_announced = True
            self.offload_batch.announce()
        if working.flags is None:
            tensor = self._obtain(working, view.value)
        else:
            with _under(working.flags):
                tensor = self._obtain(working, view.value)
        working.give(view.value.number)
        return view.of(tensor)

    def _begin(self, backward: int) -> _Pass:
        uses, chains = self._count()
        working = _Pass(uses, chains, None if read_flags() == self.flags else self.flags)
        if backward >= 0:  # outside of backward nothing may stay behind
            if len(self.passes) >= _PASSES:
                # A failed backward left its pass here. Dropping one only costs time.
                del self.passes[next(iter(self.passes))]
            self.passes[backward] = working
            at_end_of_backward(partial(_end_pass, ref(self), backward))
        return working

    def _count(self) -> tuple[list[int], Chains | None]:
        """How often backward will use each value, and the cache of chains if it is valid."""
        counts = [*map(getrefcount, self.tickets)]
        if self._uses is not None and min(counts, default=0) > DEAD_COUNT:
            schedule = self._schedule
            return self._uses.copy(), None if schedule is None else schedule.chains
        alive = [t for t, count in zip(self.tickets, counts, strict=True) if count > DEAD_COUNT]
        saved = [ticket[2].value.number for ticket in alive]
        return find_needs(self.graph, saved, self.kept).uses, None

    def _obtain(self, working: _Pass, value: RecordedValue) -> torch.Tensor:
        """The tensor of ``value``, in the value's own layout: as it is there, or recomputed."""
        number = value.number
        tensor = working.here.get(number)
        if tensor is not None:
            return tensor
        held = self.kept.get(number)
        if held is None:
            return self._recompute_value(working, number)
        tensor = held.get(value.layout, self._is_guarded or value.outside is None)
        if working.uses[number] > 1:
            working.here[number] = tensor
        return tensor

    def _recompute_value(self, working: _Pass, number: int) -> torch.Tensor:
        """Run the ops that make a value which is neither held nor recomputed yet."""
        uses = working.uses
        ops = self._ops_to_recompute(working, number)
        if uses[number] <= 0:  # not counted: a second unpack of a tensor
            for op in ops:
                for read in op.reads:
                    uses[read] += 1
        uses[number] += 1  # not to be released before it is returned
        self._run(working, ops)
        tensor = working.here[number]
        working.use(number)
        return tensor

    def _ops_to_recompute(self, working: _Pass, number: int) -> list[RecordedOp]:
        """The ops that recompute a value from held and recomputed ones, in order."""
        # They depend on the recomputed and the held values. If the call held all that the schedule
        # says when backward began, then values freed since are not needed any more. So the key
        # determines the ops.
        chains, key = working.chains, (number, *working.here)
        ops = None if chains is None else chains.get(key)
        if ops is None:
            found = missing_ops(self.graph, number, working.here, self.kept)
            ops = [self.graph.ops[each] for each in found]
            for op in ops:
                if op.is_lost:
                    raise CheckpointError(_LOST.format(op=op.op))
            if chains is not None and len(chains) < _CHAINS:
                chains[key] = ops
        return ops

    def _run(self, working: _Pass, ops: list[RecordedOp]) -> None:
        here, uses, values = working.here, working.uses, self.graph.values
        for op in ops:
            if grad_enabled() is not op.grad_enabled:
                set_grad_enabled(op.grad_enabled)
            fills = op.fills
            if fills is None:
                fills = op.prepare()
            if fills is NEEDS_CARE:
                self._run_with_care(working, op)
                continue
            old = op.old
            base = None if old < 0 else self._writable(working, op, old)
            args: Any = op.args.copy()
            for place, number, make in fills:
                tensor = here.get(number) if number != old else base
                if tensor is None:
                    tensor = self._obtain(working, values[number])
                args[place] = tensor if make is None else make(tensor)
            out = op.call(*args, **op.kwargs)
            args = tensor = None  # what follows frees them
            if op.only < 0:
                working.end_op(op.reads, _results(op, out))
            else:  # `WorkingSet.end_op`, inlined for the usual op: it has one result
                for read in op.others:
                    left = uses[read] - 1
                    uses[read] = left
                    if left <= 0:
                        here.pop(read, None)
                if uses[op.only] > 0:
                    here[op.only] = out if base is None else base
            base = out = None

    def _run_with_care(self, working: _Pass, op: RecordedOp) -> None:
        """Rerun an op that writes to several tensors, draws, takes tensor lists, or has flags."""
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
            return arg.of(self._obtain(working, arg.value) if base is None else base)
        if type(arg) is Views:
            return arg.kind([self._argument(working, each, bases) for each in arg])
        return arg

    def _writable(self, working: _Pass, op: RecordedOp, number: int) -> torch.Tensor:
        """A tensor that ``op`` may write to in place: its own, or a copy if still needed."""
        value = self.graph.values[number]
        if number in op.fresh:
            size, stride, _, dtype, _ = value.layout
            return torch.empty_strided(size, stride, dtype=dtype, device=value.device)
        tensor = self._obtain(working, value)
        if working.use_up(number) and number not in self.kept:
            return tensor
        return copy_of_storage(tensor)

    def _draw(self, op: RecordedOp, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Rerun a random op, such as dropout, from the generator state of forward."""
        generator = op.generator
        assert generator is not None
        now = generator.get_state()
        generator.set_state(self.states[op.number])
        try:
            return op.call(*args, **kwargs)
        finally:
            generator.set_state(now)


@contextmanager
def _under(flags: Flags) -> Iterator[None]:
    """A context with ``flags`` set."""
    before = read_flags()
    write_flags(flags)
    try:
        yield
    finally:
        write_flags(before)


def _results(op: RecordedOp, out: Any) -> list[tuple[int, torch.Tensor]]:
    """The tensors that ``op`` made on new storages, with the numbers of their values."""
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


@hide_with_calls
def _end_pass(remat: ReferenceType[Rematerializer], backward: int) -> None:
    """A backward is over: free values that it recomputed and did not use."""
    alive = remat()
    if alive is not None:
        alive.passes.pop(backward, None)
