"""One call of a region: what it holds, and how backward gets its tensors from that.

Backward asks for one saved tensor after the other. The ops that make it are run below autograd,
from what is held. When a value is released is decided in `graph.release`, for tensors here and for
bytes in the simulator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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
from recollect.replay.held_tensor import Held, Ticket
from recollect.replay.tape import (
    NEEDS_CARE,
    Buffer,
    Layout,
    Op,
    Tape,
    View,
    Views,
    copy_of_memory,
    is_whole,
)
from recollect.settings import version_guard_enabled
from recollect.state.flags import Flags, read_flags, write_flags
from recollect.store.offload_batch import OffloadBatch

__all__ = ["Recall"]

_LOST = (
    "a tensor that {op} made cannot be had again: please report this, it is a fault of recollect's "
    "replay engine"
)
#: How many backwards through one region may be under way before the oldest has to start anew.
_PASSES = 4


class _Pass(WorkingSet[torch.Tensor]):
    """What was recomputed for one backward."""

    __slots__ = ("flags", "is_announced")

    def __init__(self, uses: list[int], flags: Flags | None) -> None:
        super().__init__(uses)
        #: The switches to set, if they are others now.
        self.flags = flags
        #: Whether the store knows that this has begun.
        self.is_announced = False


class Recall:
    """What one call of a region holds."""

    __slots__ = (
        "__weakref__",
        "_is_guarded",
        "_lock",
        "_order",
        "_uses",
        "begin",
        "deposit",
        "flags",
        "is_running",
        "kept",
        "passes",
        "pause",
        "saw_all",
        "states",
        "tape",
        "tickets",
    )

    def __init__(self, deposit: OffloadBatch, flags: Flags) -> None:
        self.tape = Tape()
        self.deposit = deposit
        #: How many tickets are left when the store is told what will be wanted; None: at once.
        self.begin: int | None = None
        #: The switches that the region ran under.
        self.flags = flags
        #: By number of the buffer.
        self.kept: dict[int, Held] = {}
        #: In which order, and how many tickets there were.
        self._order: list[tuple[int, int]] = []
        #: Where a generator stood, by number of the op that drew from it.
        self.states: dict[int, torch.Tensor] = {}
        #: Those that ask for what is not held.
        self.tickets: list[Ticket] = []
        self.is_running = True
        #: Whether the whole call went as the tape says.
        self.saw_all = True
        #: Called while the region is running, for ops not to be taken for its own.
        self.pause: Callable[[], Any] | None = None
        self._is_guarded = version_guard_enabled()
        #: How often each buffer will be wanted, if that is known.
        self._uses: list[int] | None = None
        self.passes: dict[int, _Pass] = {}
        self._lock = threading.RLock()

    def follow(self, tape: Tape, uses: list[int]) -> None:
        """Go by what is known from an earlier call."""
        self.tape = tape
        self._uses = uses

    def order(self, order: list[tuple[int, int]]) -> None:
        """The call went as planned: let go in this order."""
        self._order = order.copy()

    def keep(self, buffer: Buffer, tensor: torch.Tensor, layout: Layout, *, away: bool) -> None:
        """Hold ``buffer``, of which ``tensor`` is a view.

        Without history, which would lead back to what holds this.
        """
        self.kept[buffer.number] = Held(tensor, layout)
        self._order.append((buffer.number, len(self.tickets)))
        if away:
            self.send(buffer)

    def send(self, buffer: Buffer) -> None:
        """Send what is held of ``buffer`` away, if it still is and can be."""
        held = self.kept.get(buffer.number)
        if held is not None and held.away is None and is_whole(buffer.layout, buffer.nbytes):
            held.send(self.deposit, buffer.layout)

    def let_go_last(self) -> None:
        """What was kept just now goes last: tensors that need it had been saved before."""
        number, _ = self._order.pop()
        self._order.insert(0, (number, 0))

    def held_of(self, tensor: torch.Tensor) -> list[Held]:
        """What is held of the memory of ``tensor``, or was sent away from there."""
        memory = memory_key(tensor)
        if memory is None:
            return []
        return [each for each in self.kept.values() if each.memory == memory]

    def before_write(self, tensor: torch.Tensor) -> None:
        """Something writes to ``tensor``, whose memory may be held."""
        for held in self.held_of(tensor):
            if held.away is not None:
                held.away.before_write()
            elif held.is_unchanged():  # else somebody unseen has written to it: backward says so
                held.become_copy()

    def before_look(self, tensor: torch.Tensor) -> list[Held]:
        """``tensor`` gets another look, which counts as a write. What has to be counted anew."""
        held = self.held_of(tensor)
        for each in held:
            if each.away is not None:
                each.away.before_write()
        return [each for each in held if each.away is None and each.is_unchanged()]

    def release_unneeded(self) -> None:
        """After a call that was recorded: release what no saved tensor needs."""
        saved = [ticket[2].buffer.number for ticket in self.tickets]
        needs = find_needs(self.tape, saved, self.kept)
        self._order = needs.order
        wanted = {number for number, _ in needs.order}
        for number in self.kept.keys() - wanted:
            del self.kept[number]
        for number in self.states.keys() - needs.again:
            del self.states[number]

    def _release_held(self) -> None:
        """Release what only parts of the graph needed that have been freed."""
        tickets = self.tickets
        if not tickets or _references_to_last(tickets) > _OF_THE_DEAD_LAST:
            return
        while tickets and _references_to_last(tickets) <= _OF_THE_DEAD_LAST:
            tickets.pop()
        self._uses = None
        for number in pop_unneeded(self._order, len(tickets)):
            self.kept.pop(number, None)

    def is_waiting(self) -> bool:
        """Whether part of the graph is there for which backward has not been.

        To be asked of a call that is over. It is alive as long as something that it saved is.
        """
        tickets = self.tickets
        return not tickets or max(_reference_counts(tickets)) > _OF_THE_DEAD

    # --- backward ---------------------------------------------------------------------------------

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """The saved-tensor hook by which autograd asks for a tensor back."""
        tensor, version, view = ticket
        if tensor is None:
            return self._recall(view)
        if tensor._version != version:
            raise saved_tensor_changed(tensor)
        return tensor  # type: ignore[no-any-return]

    def _recall(self, view: View) -> torch.Tensor:
        buffer = view.buffer
        if buffer.is_spoilt and self.saw_all and not self.is_running:
            raise saved_tensor_changed(view.layout[0])
        passed = self.passes.get(current_graph_task())
        if passed is not None and not self.is_running:
            tensor = passed.here.get(buffer.number)
            if tensor is not None:  # the usual case, since most are made on the way to the first
                passed.give(buffer.number)
                return view.of(tensor)
        pause = self.pause if self.is_running else None
        # Two threads of one backward may ask at once.
        with self._lock, below_autograd(), pause() if pause is not None else _NOTHING:
            passed = self._pass()
            if not self.is_running:
                self._release_held()
                if not passed.is_announced and len(self.tickets) <= (self.begin or 0):
                    passed.is_announced = True
                    self.deposit.announce()
            if passed.flags is None:
                tensor = self._tensor(passed, buffer)
            else:
                flags = read_flags()
                write_flags(passed.flags)
                try:
                    tensor = self._tensor(passed, buffer)
                finally:
                    write_flags(flags)
            passed.give(buffer.number)
            return view.of(tensor)

    def _pass(self) -> _Pass:
        backward = current_graph_task()
        passed = self.passes.get(backward)
        if passed is None:
            passed = _Pass(self._count(), self.flags if read_flags() != self.flags else None)
            if backward >= 0:  # else asked for outside of backward: nothing stays behind
                # One that failed has left its pass here; to lose one costs a recomputation.
                for oldest in [*self.passes][: 1 - _PASSES]:
                    del self.passes[oldest]
                self.passes[backward] = passed
                at_end_of_backward(partial(_end_pass, ref(self), backward))
            passed.is_announced = self.begin is None
            if passed.is_announced:
                self.deposit.announce()
        return passed

    def _count(self) -> list[int]:
        """How often each buffer will be wanted."""
        counts = _reference_counts(self.tickets)
        is_planned = self._uses is not None and self.saw_all and not self.is_running
        if is_planned and min(counts, default=0) > _OF_THE_DEAD:
            assert self._uses is not None
            return self._uses.copy()
        alive = [t for t, count in zip(self.tickets, counts, strict=True) if count > _OF_THE_DEAD]
        return find_needs(self.tape, [ticket[2].buffer.number for ticket in alive], self.kept).uses

    def _tensor(self, passed: _Pass, buffer: Buffer) -> torch.Tensor:
        """The tensor of the buffer's own layout."""
        number, here, uses = buffer.number, passed.here, passed.uses
        tensor = here.get(number)
        if tensor is not None:
            return tensor
        held = self.kept.get(number)
        if held is not None:
            is_guarded = self._is_guarded or buffer.outside is None
            tensor = held.get(buffer.layout, is_guarded=is_guarded)
            if uses[number] > 1:
                here[number] = tensor
            return tensor
        ops = self._missing(passed, number)
        if uses[number] <= 0:  # not foreseen: somebody asks for a tensor a second time
            for op in ops:
                for read in self.tape.ops[op].reads:
                    uses[read] += 1
        uses[number] += 1  # not to be released before it is returned
        for op in ops:
            self._run(passed, self.tape.ops[op])
        tensor = here[number]
        passed.use(number)
        return tensor

    def _missing(self, passed: _Pass, number: int) -> list[int]:
        """The ops that make a value from what is there, in order."""
        # From what the plan has kept, and nothing else: every call starts backward like this.
        is_usual = not (passed.here or self._uses is None or self.is_running) and self.saw_all
        ops = self.tape.chains.get(number) if is_usual else None
        if ops is None:
            ops = missing_ops(self.tape, number, passed.here, self.kept)
            for op in (self.tape.ops[each] for each in ops):
                if op.keep is not None:
                    raise CheckpointError(_LOST.format(op=op.op))
            if is_usual:
                self.tape.chains[number] = ops
        return ops

    def _run(self, passed: _Pass, op: Op) -> None:
        """Run ``op`` again."""
        if torch.is_grad_enabled() is not op.grad_enabled:
            set_grad_enabled(op.grad_enabled)
        slots = op.slots
        if slots is None:
            slots = op.prepare()
        if slots is NEEDS_CARE:
            self._run_with_care(passed, op)
            return
        here = passed.here
        args = op.args.copy()
        for place, view in slots:
            buffer = view.buffer
            tensor = here.get(buffer.number)
            if tensor is None:
                tensor = self._tensor(passed, buffer)
            args[place] = view.of(tensor)
        out = op.call(*args, **op.kwargs)
        passed.end_op(op.reads, _results(op, out) if op.only < 0 else ((op.only, out),))

    def _run_with_care(self, passed: _Pass, op: Op) -> None:
        """Run an op that writes to memory, draws, takes lists, or has switches of its own."""
        if op.flags is None:
            self._run_writing(passed, op)
            return
        flags = read_flags()
        write_flags(op.flags)
        try:
            self._run_writing(passed, op)
        finally:
            write_flags(flags)

    def _run_writing(self, passed: _Pass, op: Op) -> None:
        bases = {old: self._writable(passed, op, old) for old, _ in op.writes}
        args = [self._argument(passed, each, bases) for each in op.args]
        kwargs = {name: self._argument(passed, each, bases) for name, each in op.kwargs.items()}
        out = op.call(*args, **kwargs) if op.generator is None else self._draw(op, args, kwargs)
        written = [(new, bases[old]) for old, new in op.writes]
        reads = [number for number in op.reads if number not in bases]
        passed.end_op(reads, _results(op, out) + written)

    def _argument(self, passed: _Pass, value: Any, bases: dict[int, torch.Tensor]) -> Any:
        if type(value) is View:
            buffer = value.buffer
            base = bases.get(buffer.number) if bases else None
            tensor = self._tensor(passed, buffer) if base is None else base
            return value.of(tensor)
        if type(value) is Views:
            return value.kind([self._argument(passed, each, bases) for each in value])
        return value

    def _writable(self, passed: _Pass, op: Op, number: int) -> torch.Tensor:
        """A memory with the content of a value that ``op`` may write to."""
        buffer = self.tape.values[number]
        if number in op.fresh:
            size, stride, _, dtype, _ = buffer.layout
            return torch.empty_strided(size, stride, dtype=dtype, device=buffer.device)
        tensor = self._tensor(passed, buffer)
        if passed.use_up(number) and number not in self.kept:
            return tensor
        return copy_of_memory(tensor)

    def _draw(self, op: Op, args: list[Any], kwargs: dict[str, Any]) -> Any:
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


#: References to a ticket that only a list holds, as this interpreter counts them.
(_OF_THE_DEAD,) = _reference_counts([[object()]])
_OF_THE_DEAD_LAST = _references_to_last([[object()]])


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


_NOTHING = _Nothing()


def _results(op: Op, out: Any) -> list[tuple[int, torch.Tensor]]:
    """What ``op`` made on new memory, by the number of the value."""
    found = []
    for number, path in zip(op.makes, op.paths, strict=True):
        tensor = out
        for index in path:
            tensor = tensor[index]
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{op.op} gave a tensor in forward, and now {tensor!r}")
        found.append((number, tensor))
    return found


def _end_pass(recall: ReferenceType[Recall], backward: int) -> None:
    """Forget what was recomputed for a backward that is over, and was not asked for."""
    alive = recall()
    if alive is not None:
        alive.passes.pop(backward, None)
