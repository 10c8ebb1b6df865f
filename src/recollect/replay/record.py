"""Recording: the function runs once, under modes that write down what it does.

One mode sees the functions of torch that are called, the other the ops that these run
(`ops`). Saved-tensor hooks tell which values autograd saves. What must not run again is held at
once, so that everything else can be dropped during forward.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
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
from recollect.replay.planned_ops import Directed
from recollect.replay.recording import Recording
from recollect.replay.region_schedule import saved_by
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
#: The types of most constants.
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
        #: What autograd has saved in the function that is running, each with its storage.
        self._tickets: list[tuple[Ticket, Memory | None]] = []
        self._consultation = consultation
        self._op_recorder = OpRecorder(self._ground, consultation)
        self._stack = ExitStack()
        #: How many dispatch modes are active outside of functions.
        self._modes = 0
        self._stream = current_stream_key()
        recall.pause = self.pause

    # --- around the call --------------------------------------------------------------------------

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._consultation)
            stack.enter_context(self._op_recorder)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._stack = stack.pop_all()
        self._modes = dispatch_mode_count()

    def __exit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._recall.pause = None
        self._stack.__exit__(*exc)

    def finish(self, result: Any) -> Recording:
        """After the call, which returned ``result``: release what nobody needs."""
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
        # In a plan, outputs that autograd saved are not copied: there is no room for copies, and
        # autograd raises if they are changed.
        recall.copy_outputs(set(saved_by(self._steps)) if self._is_planned else ())
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
        """A context whose ops are not the region's."""
        with self._ground.pause(), no_function_modes():
            yield

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
            ground.stop(f"{func} gives a tensor another storage")
        elif func in WRONG_IN_MODES:
            for tensor in tensors_in([*args, *kwargs.values()]):
                ground.protect(tensor)
                if (memory := ground.memory(tensor)) is not None:
                    ground.before_change(memory)
            ground.stop(f"{func} has wrong gradients under a dispatch mode")
            with no_dispatch_modes():
                return func(*args, **kwargs)
        elif self._stream is not None and not is_current_stream(self._stream):
            # Backward recomputes a saved tensor on the stream of the function that saved it.
            ground.stop("several streams")
        if ground.is_idle():
            return func(*args, **kwargs)
        flags = read_flags()
        ground.flags = None if flags == self._recall.flags else flags
        first = len(ground.tape.ops)
        step = Step(func, mood(func), (first, first), ground.flags or self._recall.flags)
        # A mode that was entered inside the region may do anything, as may a function that reads
        # data in Python.
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
        """The function has returned: drop what autograd saved in it."""
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
            # In later calls only the state of the generator before the function is known.
            for op in step.draws:
                op.later = "random, several draws in one function"
        returned = tensors_in(out)
        if step.is_opaque:
            self._forget_looks(step, returned)
            if step.own is not None:
                # Another call may write to another of its arguments.
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
        """A function was not recorded to its end: hold what autograd saved in it."""
        self._steps.remove(step)
        for ticket, _ in tickets:
            hold_for_good(ticket)
        tickets.clear()

    def _forget_looks(self, step: Step, returned: list[_Tensor]) -> None:
        """The function is opaque: another call of it may do something else."""
        for pack in step.packs:
            pack.view = None
        for tensor in returned:
            memory = self._ground.memory(tensor)
            if memory is not None and not _is_made_in(step, memory.buffer):
                # Another call may return a part of another storage.
                memory.buffer.unsure = OPAQUE
                memory.is_exposed = True

    def _returned(self, tensor: _Tensor, step: Step) -> View | None:
        """The view that a returned tensor is."""
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
            # Made from constants, as by torch.tensor(): hold it from now on.
            buffer.unsure = None
            ground.hold(view, tensor, None)
        elif memory in ground.inner and buffer.unsure is None:
            ground.hold(view, tensor, None)
        return view

    def _note_saved(
        self, memory: Memory, tensor: _Tensor, view: View, returned: list[_Tensor]
    ) -> None:
        """Remember a saved tensor, to notice later writes to it."""
        if self._objects.number_of(tensor) is None:
            # Autograd saves a result as another object than the one that is returned.
            same = [each for each in returned if self._ground.memory(each) is memory]
            if not same:
                return
            tensor = same[0]
        memory.saved.append((ref(tensor), tensor._version, view.buffer))

    def _note_changed(self, step: Step, values: list[Any]) -> None:
        """Note by which arguments a later call finds what the function has written to."""
        for tensor in tensors_in(values):
            number = self._objects.number_of(tensor)
            memory = self._ground.memory(tensor)
            if number is not None and memory is not None and _is_made_in(step, memory.buffer):
                step.changed.append((number, self._ground.view_in(memory, tensor)))

    # --- arguments --------------------------------------------------------------------------------

    def _template(self, value: Any, step: Step) -> Any:
        """What stands for an argument in the recording."""
        kind = type(value)
        if kind in _USUAL:
            return value
        if isinstance(value, _Tensor):
            self._ground.find_changes(value)
            number = self._number(value)
            return Number(number, None if number < 0 else self._objects.writes_to(value, number))
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
            # Made by something unseen, on a storage that is known.
            memory.buffer.unsure = OPAQUE
            memory.is_exposed = True
            outside.host = self._find_host(memory, number)
            if outside.host is None:
                ground.stop("a view of a storage that no other tensor is left of")
        return number

    def _find_host(self, memory: Memory, before: int) -> int | None:
        """The first tensor on ``memory`` that is alive and has a number below ``before``."""
        for number, reference in enumerate(self._objects.tensors[:before]):
            tensor = reference()
            if tensor is not None and self._ground.memory(tensor) is memory:
                return number
        return None

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
            writes = self._objects.writes_to(tensor, number)
        first = len(self._ground.tape.ops)
        between = Step(None, None, (first, first))
        memory = _made_memory(self._ground.memory(tensor))
        between.packs.append(Pack(view, number, writes, memory))
        self._steps.append(between)
        self._settle(ticket, view)

    def _saved(self, tensor: _Tensor, memory: Memory | None) -> View | None:
        """The view to recompute ``tensor`` by; None: autograd holds it."""
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
        """Drop a saved tensor that can be recomputed."""
        held = None if view is None else self._recall.kept.get(view.buffer.number)
        if view is None or (held is not None and held.away is None):
            hold_for_good(ticket)  # at no cost if the value is held
            return
        ticket[0], ticket[2] = None, view
        self._recall.tickets.append(ticket)


def _made_memory(memory: Memory | None) -> int | None:
    """The number of a storage, if the region made it."""
    return None if memory is None or memory.is_outside else memory.buffer.memory


def _is_unreadable(function: Any, args: tuple[Any, ...]) -> bool:
    if function in UNREADABLE_IF_PACKED:
        # Without lengths, the fourth argument tells whether there are biases.
        return len(args) < 4 or not isinstance(args[3], bool)
    return function in UNREADABLE or not (is_of_torch(function) or is_op_of_others(function))


def _is_made_in(step: Step, buffer: Buffer) -> bool:
    return buffer.number >= step.first_buffer
