"""Recording: the function runs once, under modes that write down what it does.

Two modes look on. One sees the functions of torch that are called (`Step`), the other the ops that
these come down to (`Op`). Saved-tensor hooks say which values autograd saves. What must not run
again is held on the spot, so that everything else can be dropped as forward goes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from recollect._torch.autograd import cast_weight, without_history
from recollect._torch.devices import current_stream_key, is_current_stream
from recollect._torch.modes import (
    any_autocast_enabled,
    dispatch_mode_count,
    no_dispatch_modes,
    no_function_modes,
)
from recollect._torch.ops import is_of_torch, is_op_of_others
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import is_plain_tensor
from recollect.policy.policy_call import PolicyCall
from recollect.replay.call_mode import mood
from recollect.replay.held_tensor import Ticket, hold_for_good
from recollect.replay.memory_tracker import OPAQUE, Ground, Memory, start_of
from recollect.replay.ops import OpRecorder
from recollect.replay.plan import saved_by
from recollect.replay.planned_ops import Directed
from recollect.replay.recording import Recording
from recollect.replay.rematerialize import Recall
from recollect.replay.steps import (
    EXPOSING,
    METADATA,
    UNREADABLE,
    UNREADABLE_IF_PACKED,
    UNSUPPORTED,
    WRONG_IN_MODES,
    Constant,
    Items,
    Number,
    Objects,
    Outside,
    Pack,
    Step,
    is_comparable,
    looks_of,
    tensors_in,
)
from recollect.replay.tape import Buffer, View
from recollect.state.flags import read_flags

__all__ = ["Recorder"]

_Tensor = torch.Tensor
#: Most constants are of these types, and these are quick to tell.
_USUAL = frozenset({int, bool, float, str, type(None)})
_DATA = _Tensor.data.__get__  # type: ignore[attr-defined]


class Recorder(TorchFunctionMode):
    """Writes down one call of a region."""

    def __init__(
        self,
        recall: Recall,
        consultation: PolicyCall | Directed,
        offload_inputs: bool,
        earlier: Recall | None = None,
    ) -> None:
        super().__init__()
        self._recall = recall
        self._ground = Ground(recall, earlier)
        self._steps: list[Step] = []
        self._outsides: dict[int, Outside] = {}
        self._objects = Objects()
        self._offload_inputs = offload_inputs
        self._is_planned = isinstance(consultation, Directed)
        #: What autograd has saved in the function that is running, and on which memory that is.
        self._tickets: list[tuple[Ticket, Memory | None]] = []
        self._around: list[AbstractContextManager[Any]] = [
            consultation,
            OpRecorder(self._ground, consultation),
        ]
        self._stack = ExitStack()
        #: How many dispatch modes there are outside of functions.
        self._modes = 0
        self._stream = current_stream_key()
        recall.pause = self.pause

    # --- around the call --------------------------------------------------------------------------

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._around:
                stack.enter_context(context)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._stack = stack.pop_all()
        self._modes = dispatch_mode_count()

    def __exit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._recall.pause = None
        self._stack.__exit__(*exc)

    def finish(self, result: Any) -> Recording:
        """After the call, which returned ``result``: let go of what nobody needs."""
        ground, recall = self._ground, self._recall
        recall.is_running = False
        ground.end_function()
        for leaf in tree_leaves(result):
            memory = ground.memory(leaf) if isinstance(leaf, _Tensor) else None
            if memory is not None:
                memory.buffer.is_output = True
                if memory.has_data:  # the user may change it without anybody's knowledge
                    memory.buffer.unsure = OPAQUE
                    recall.before_write(leaf)
        recall.release_unneeded()
        # The user may change what the region returns. In a plan, what autograd has saved must not
        # be: a copy would take more than there is room for.
        saved = set(saved_by(self._steps)) if self._is_planned else set()
        for number, held in recall.kept.items():
            buffer = ground.tape.values[number]
            must_stay = number in saved and buffer.unsure is None
            is_here = held.away is None and held.is_unchanged()
            if buffer.is_output and is_here and not must_stay:
                held.become_copy()
        for number, start in ground.places.items():
            self._outsides[number].start = start
        return Recording(
            ground.tape,
            self._steps,
            self._outsides,
            ground.writes_outside,
            recall.deposit.chosen,
            ground.stopped,
        )

    def count_ops(self) -> int:
        """How many ops have begun."""
        return len(self._ground.tape.ops)

    @contextmanager
    def pause(self) -> Any:
        """A context whose ops are none of the region's."""
        ground = self._ground
        paused, ground.paused = ground.paused, True
        try:
            with no_function_modes():
                yield
        finally:
            ground.paused = paused

    # --- functions --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_dynamo_compiling():  # which traces this mode along with the function
            return func(*args, **kwargs)
        ground = self._ground
        if ground.is_idle() or func in METADATA:
            return self._run_unrecorded(func, args, kwargs)
        ground.end_function()
        if func in UNSUPPORTED:
            ground.stop(f"{func} gives a tensor another memory")
        elif func in WRONG_IN_MODES:
            for tensor in tensors_in([*args, *kwargs.values()]):
                ground.protect(tensor)
                if (memory := ground.memory(tensor)) is not None:
                    ground.before_change(memory, tensor)
            ground.stop(f"{func} is wrong inside of a dispatch mode")
            with no_dispatch_modes():
                return func(*args, **kwargs)
        elif self._stream is not None and not is_current_stream(self._stream):
            # Backward runs what it asks for on the stream of the function that saved it.
            ground.stop("several streams")
        if ground.is_idle():
            return func(*args, **kwargs)
        flags = read_flags()
        ground.flags = None if flags == self._recall.flags else flags
        step = Step(func, mood(func), len(ground.tape.ops), ground.flags or self._recall.flags)
        # Somebody has entered a mode inside the region, which may do anything; or a function looks
        # at memory itself, and at how it is called.
        step.is_opaque = dispatch_mode_count() != self._modes or _is_unreadable(func, args)
        step.own = None if is_of_torch(func) else func
        step.args = Items(tuple, [self._template(each, step) for each in args])
        step.kwargs = self._template(kwargs, step) if kwargs else None
        step.first_buffer = len(ground.tape.values)
        if ground.is_idle():
            return func(*args, **kwargs)
        if func in EXPOSING:
            for tensor in tensors_in(args):
                ground.expose(tensor)
        elif func == _DATA and (memory := ground.memory(args[0])) is not None:
            memory.has_data = True
        out = self._run(step, func, args, kwargs)
        self._end(step, out, args, kwargs)
        return out

    def _run_unrecorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._ground.stopped is not None and func in EXPOSING:
            for tensor in tensors_in(args):
                self._ground.protect(tensor)
        return func(*args, **kwargs)

    def _run(self, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ground = self._ground
        self._steps.append(step)
        ground.step = step
        ground.is_casting = any_autocast_enabled()
        try:
            return func(*args, **kwargs)
        except BaseException:
            ground.stop(f"{func} raised")
            self._give_up(step, self._tickets)
            raise
        finally:
            ground.step = None

    def _end(self, step: Step, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The function has returned: drop what it saved."""
        ground = self._ground
        tickets, self._tickets = self._tickets, []
        try:
            ground.end_function()
        except BaseException:
            ground.stop("a store raised")
            self._give_up(step, tickets)
            raise
        step.ops = (step.ops[0], len(ground.tape.ops))
        if ground.stopped is not None:
            self._give_up(step, tickets)
            return
        if len(step.draws) > 1:
            # Only where a generator stood before the function is known in later calls.
            for op in step.draws:
                op.later = "random, several draws in one function"
        returned = tensors_in(out)
        if step.is_opaque:
            self._forget_looks(step, returned)
            if step.own is not None:
                # Another call may write to another one of its arguments.
                for tensor in tensors_in([*args, *kwargs.values()]):
                    ground.expose(tensor)
        for tensor in returned:
            number = self._objects.number_of(tensor)
            step.returns.append(self._returned(tensor, step))
            step.outs.append(self._add(tensor) if number is None else number)
            step.is_new &= number is None
        if step.depends_on_data or step.is_opaque:
            step.looks = [looks_of(tensor) for tensor in returned]
        for (ticket, memory), pack in zip(tickets, step.packs, strict=True):
            if pack.view is not None and memory is not None:
                self._note_saved(memory, ticket[0], pack.view, returned)
            self._settle(ticket, pack.view)
        ground.end_inner()
        if ground.written:
            self._note_changed(step, [*args, *kwargs.values()])
            ground.end_writes()

    def _give_up(self, step: Step, tickets: list[tuple[Ticket, Memory | None]]) -> None:
        """A function is not known to the end."""
        self._steps.remove(step)
        for ticket, _ in tickets:
            hold_for_good(ticket)
        tickets.clear()

    def _forget_looks(self, step: Step, returned: list[_Tensor]) -> None:
        """What the function did another call of it may do otherwise."""
        for pack in step.packs:
            pack.view = None
        for tensor in returned:
            memory = self._ground.memory(tensor)
            if memory is not None and not _is_made_in(step, memory.buffer):
                # Which part of which memory is returned is not known.
                memory.buffer.unsure = OPAQUE
                memory.is_exposed = True

    def _returned(self, tensor: _Tensor, step: Step) -> View | None:
        """What a tensor that a function returns is a view of."""
        ground = self._ground
        memory = ground.memory(tensor)
        if memory is None:
            if not is_plain_tensor(tensor):
                ground.stop_at(tensor)
                return None
            memory = ground.add_stranger(tensor)
        buffer = memory.buffer
        view = ground.view_in(memory, tensor)
        is_given = buffer.op < 0 and buffer.outside is None and not memory.is_exposed
        if is_given and _is_made_in(step, buffer):
            # Made of constants, as by torch.tensor(): it is there as of now.
            buffer.unsure = None
            ground.hold(view, tensor, None)
        elif memory in ground.inner and buffer.unsure is None:
            ground.hold(view, tensor, None)
        return view

    def _note_saved(
        self, memory: Memory, tensor: _Tensor, view: View, returned: list[_Tensor]
    ) -> None:
        """Remember a tensor that autograd saved, to see whether it is written to later."""
        if self._objects.number_of(tensor) is None:
            # A result is saved as another object than the one that is returned.
            same = [each for each in returned if self._ground.memory(each) is memory]
            if not same:
                return
            tensor = same[0]
        memory.saved.append((ref(tensor), tensor._version, view.buffer))

    def _note_changed(self, step: Step, values: list[Any]) -> None:
        """Where to find what a function has written to."""
        for tensor in tensors_in(values):
            number = self._objects.number_of(tensor)
            memory = self._ground.memory(tensor)
            if number is not None and memory is not None and _is_made_in(step, memory.buffer):
                step.changed.append((number, self._ground.view_in(memory, tensor)))

    # --- arguments --------------------------------------------------------------------------------

    def _template(self, value: Any, step: Step) -> Any:
        """What stands for an argument of a function."""
        kind = type(value)
        if kind in _USUAL:
            return value
        if isinstance(value, _Tensor):
            self._ground.find_changes(value)
            number = self._number(value)
            return Number(number, None if number < 0 else self._objects.writes_to(value))
        items = self._items(value, kind, step)
        if items is not None:
            return items
        if is_comparable(value):
            return value
        step.is_opaque = True
        return Constant()

    def _items(self, value: Any, kind: type, step: Step) -> Items | None:
        """What stands for a container; None if it is none."""
        if isinstance(value, (tuple, list)) and kind is not torch.Size:
            items = [self._template(each, step) for each in value]
            is_constant = kind is tuple and all(map(is_comparable, value))
            return Items(kind, items, same=value) if is_constant else Items(kind, items)
        if isinstance(value, dict):
            items = [self._template(each, step) for each in value.values()]
            return Items(kind, items, list(value))
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return Items(kind, [self._template(each, step) for each in parts])
        return None

    def _number(self, tensor: _Tensor) -> int:
        number = self._objects.number_of(tensor)
        if number is not None:
            return number
        ground = self._ground
        if not is_plain_tensor(tensor):
            ground.stop_at(tensor)
            return -1
        number = self._add(tensor)
        outside = self._outsides[number] = Outside(number, looks_of(tensor))
        memory = ground.memory(tensor)
        if memory is None:
            memory = ground.add(tensor, number)
            memory.watch(tensor)
            buffer = outside.buffer = memory.buffer
            away = self._offload_inputs and tensor.requires_grad and not tensor.is_leaf
            self._recall.keep(buffer, without_history(tensor), buffer.layout, away=away)
        elif memory.buffer.outside is not None:
            outside.twin = (memory.buffer.outside, start_of(tensor) - memory.start)
        else:
            # Made by something that is not seen, on memory that is known.
            memory.buffer.unsure = OPAQUE
            memory.is_exposed = True
            hosts = [n for n, each in self._objects.alive() if ground.memory(each) is memory]
            outside.host = hosts[0] if hosts[0] != number else None
            if outside.host is None:
                ground.stop("memory of which nothing else is left")
        return number

    def _add(self, tensor: _Tensor) -> int:
        """Give ``tensor`` the next number."""
        number = self._objects.add(tensor)
        memory = self._ground.memory(tensor)
        if memory is not None:
            memory.watch(tensor)
        return number

    # --- saved tensors ----------------------------------------------------------------------------

    def pack(self, tensor: _Tensor) -> Ticket:
        """The saved-tensor hook: autograd saves ``tensor``."""
        ticket: Ticket = [tensor, tensor._version, None]
        ground = self._ground
        if ground.is_idle():
            hold_for_good(ticket)
            return ticket
        if ground.step is not None:
            memory = ground.memory(tensor)
            pack = Pack(self._saved(tensor, memory), memory=_made_memory(memory))
            ground.step.packs.append(pack)
            self._tickets.append((ticket, memory))
        else:
            with self.pause():
                self._pack_between(ticket, tensor)
        return ticket

    def _pack_between(self, ticket: Ticket, tensor: _Tensor) -> None:
        """A custom function saves a tensor, outside of all functions of torch."""
        number = self._objects.number_of(tensor)
        view = writes = None
        if number is not None:
            self._ground.find_changes(tensor)
            view = self._saved(tensor, self._ground.memory(tensor))
            writes = self._objects.writes_to(tensor)
        between = Step(None, None, len(self._ground.tape.ops))
        memory = _made_memory(self._ground.memory(tensor))
        between.packs.append(Pack(view, number, writes, memory))
        self._steps.append(between)
        self._settle(ticket, view)

    def _saved(self, tensor: _Tensor, memory: Memory | None) -> View | None:
        """How to have ``tensor`` again; None if it is held."""
        ground = self._ground
        if memory is None:
            if not is_plain_tensor(tensor):
                ground.stop_at(tensor)
                return None
            weight = cast_weight(tensor)
            if weight is None or ground.memory(weight) is None:
                return None
            memory = ground.find(tensor)
            assert memory is not None
        held = self._recall.kept.get(memory.buffer.number)
        is_away = held is not None and held.away is not None
        if memory.buffer.unsure is not None or (memory.is_outside and not is_away):
            return None
        memory.buffer.is_wanted = True
        return ground.view_in(memory, tensor)

    def _settle(self, ticket: Ticket, view: View | None) -> None:
        """Let go of a saved tensor that can be had again."""
        held = None if view is None else self._recall.kept.get(view.buffer.number)
        if view is None or (held is not None and held.away is None):
            hold_for_good(ticket)  # which costs nothing if it is held anyway
            return
        ticket[0], ticket[2] = None, view
        self._recall.tickets.append(ticket)


def _made_memory(memory: Memory | None) -> int | None:
    """The number of a memory that the region made."""
    return None if memory is None or memory.is_outside else memory.buffer.memory


def _is_unreadable(function: Any, args: tuple[Any, ...]) -> bool:
    if function in UNREADABLE_IF_PACKED:
        # In the fourth place is a switch otherwise, whether there are biases.
        return len(args) < 4 or not isinstance(args[3], bool)
    return function in UNREADABLE or not (is_of_torch(function) or is_op_of_others(function))


def _is_made_in(step: Step, buffer: Buffer) -> bool:
    return buffer.number >= step.first_buffer
