"""Recording: the function runs once, under modes that write down what it does (R6).

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
from recollect.replay.call_mode import call_mode
from recollect.replay.function_call import (
    EXPOSING,
    METADATA,
    UNREADABLE,
    UNREADABLE_IF_PACKED,
    UNSUPPORTED,
    WRONG_IN_MODES,
    Constant,
    FunctionCall,
    Items,
    Number,
    OutsideTensor,
    PackedTensor,
    TensorNumbers,
    is_comparable,
    metadata_of,
    tensors_in,
)
from recollect.replay.held_tensor import Ticket, hold_for_good
from recollect.replay.memory_tracker import OPAQUE, MemoryTracker, RecordedStorage, start_of
from recollect.replay.named_schedule import ScheduleQuery
from recollect.replay.ops import OpRecorder
from recollect.replay.recorded_graph import RecordedValue, View
from recollect.replay.recording import Recording
from recollect.replay.region_schedule import saved_by
from recollect.replay.rematerialize import Rematerializer
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
        remat: Rematerializer,
        query: PolicyCall | ScheduleQuery,
        offload_inputs: bool,
        earlier: Rematerializer | None = None,
    ) -> None:
        super().__init__()
        self._remat = remat
        self._tracker = MemoryTracker(remat, earlier)
        self._calls: list[FunctionCall] = []
        self._outsides: dict[int, OutsideTensor] = {}
        self._numbers = TensorNumbers()
        self._offload_inputs = offload_inputs
        self._is_planned = isinstance(query, ScheduleQuery)
        #: What autograd has saved in the function that is running, each with its storage.
        self._tickets: list[tuple[Ticket, RecordedStorage | None]] = []
        self._query = query
        self._op_recorder = OpRecorder(self._tracker, query)
        self._stack = ExitStack()
        #: How many dispatch modes are active outside of functions.
        self._modes = 0
        self._stream = current_stream_key()
        remat.pause = self.pause

    # --- around the call --------------------------------------------------------------------------

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._query)
            stack.enter_context(self._op_recorder)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._stack = stack.pop_all()
        self._modes = dispatch_mode_count()

    def __exit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._remat.pause = None
        self._stack.__exit__(*exc)

    def finish(self, result: Any) -> Recording:
        """After the call, which returned ``result``: release what nobody needs."""
        tracker, remat = self._tracker, self._remat
        remat.is_running = False
        tracker.end_function()
        for leaf in tree_leaves(result):
            storage = tracker.storage(leaf) if isinstance(leaf, _Tensor) else None
            if storage is not None:
                storage.value.is_output = True
                if storage.has_data:  # the user may change it without anybody's knowledge
                    storage.value.unsure = OPAQUE
                    remat.before_write(leaf)
        remat.release_unneeded()
        # In a plan, outputs that autograd saved are not copied: there is no room for copies, and
        # autograd raises if they are changed.
        remat.copy_outputs(set(saved_by(self._calls)) if self._is_planned else ())
        for number, start in tracker.places.items():
            self._outsides[number].start = start
        return Recording(
            tracker.graph,
            self._calls,
            self._outsides,
            tracker.writes_outside,
            remat.offload_batch.chosen,
            tracker.stopped,
        )

    def count_ops(self) -> int:
        """How many ops have begun."""
        return len(self._tracker.graph.ops)

    @contextmanager
    def pause(self) -> Any:
        """A context whose ops are not the region's."""
        with self._tracker.pause(), no_function_modes():
            yield

    # --- functions --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_dynamo_compiling():  # which traces this mode along with the function
            return func(*args, **kwargs)
        tracker = self._tracker
        if tracker.is_idle() or func in METADATA:
            return self._run_unrecorded(func, args, kwargs)
        tracker.end_function()
        if func in UNSUPPORTED:
            tracker.stop(f"{func} gives a tensor another storage")
        elif func in WRONG_IN_MODES:
            for tensor in tensors_in([*args, *kwargs.values()]):
                tracker.protect(tensor)
                if (storage := tracker.storage(tensor)) is not None:
                    tracker.before_change(storage)
            tracker.stop(f"{func} has wrong gradients under a dispatch mode")
            with no_dispatch_modes():
                return func(*args, **kwargs)
        elif self._stream is not None and not is_current_stream(self._stream):
            # Backward recomputes a saved tensor on the stream of the function that saved it.
            tracker.stop("several streams")
        if tracker.is_idle():
            return func(*args, **kwargs)
        flags = read_flags()
        tracker.flags = None if flags == self._remat.flags else flags
        first = len(tracker.graph.ops)
        call = FunctionCall(
            func, call_mode(func), (first, first), tracker.flags or self._remat.flags
        )
        # A mode that was entered inside the region may do anything, as may a function that reads
        # data in Python.
        call.is_opaque = dispatch_mode_count() != self._modes or _is_unreadable(func, args)
        call.own = None if is_of_torch(func) else func
        call.args = Items(tuple, [self._template(each, call) for each in args])
        call.kwargs = self._template(kwargs, call) if kwargs else None
        call.first_value = len(tracker.graph.values)
        if tracker.is_idle():
            return func(*args, **kwargs)
        if func in EXPOSING:
            for tensor in tensors_in(args):
                tracker.expose(tensor)
        elif func == _DATA and (storage := tracker.storage(args[0])) is not None:
            storage.has_data = True
        out = self._run(call, func, args, kwargs)
        self._end(call, out, args, kwargs)
        return out

    def _run_unrecorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._tracker.stopped is not None and func in EXPOSING:
            for tensor in tensors_in(args):
                self._tracker.protect(tensor)
        return func(*args, **kwargs)

    def _run(
        self, call: FunctionCall, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tracker = self._tracker
        self._calls.append(call)
        tracker.call = call
        tracker.is_casting = any_autocast_enabled()
        try:
            return func(*args, **kwargs)
        except BaseException:
            tracker.stop(f"{func} raised")
            self._give_up(call, self._tickets)
            raise
        finally:
            tracker.call = None

    def _end(
        self, call: FunctionCall, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The function has returned: drop what autograd saved in it."""
        tracker = self._tracker
        tickets, self._tickets = self._tickets, []
        try:
            tracker.end_function()
        except BaseException:
            tracker.stop("a store raised")
            self._give_up(call, tickets)
            raise
        call.ops = (call.ops[0], len(tracker.graph.ops))
        if tracker.stopped is not None:
            self._give_up(call, tickets)
            return
        if len(call.draws) > 1:
            # In later calls only the state of the generator before the function is known.
            for op in call.draws:
                op.later = "random, several draws in one function"
        returned = tensors_in(out)
        if call.is_opaque:
            self._forget_metadata(call, returned)
            if call.own is not None:
                # Another call may write to another of its arguments.
                for tensor in tensors_in([*args, *kwargs.values()]):
                    tracker.expose(tensor)
        for tensor in returned:
            number = self._numbers.number_of(tensor)
            call.returns.append(self._returned(tensor, call))
            call.outs.append(self._add(tensor) if number is None else number)
            call.is_new &= number is None
        if call.depends_on_data or call.is_opaque:
            call.metadata = [metadata_of(tensor) for tensor in returned]
        for (ticket, storage), pack in zip(tickets, call.packed, strict=True):
            if pack.view is not None and storage is not None:
                self._note_saved(storage, ticket[0], pack.view, returned)
            self._settle(ticket, pack.view)
        tracker.end_inner()
        if tracker.written:
            self._note_changed(call, [*args, *kwargs.values()])
            tracker.end_writes()

    def _give_up(
        self, call: FunctionCall, tickets: list[tuple[Ticket, RecordedStorage | None]]
    ) -> None:
        """A function was not recorded to its end: hold what autograd saved in it."""
        self._calls.remove(call)
        for ticket, _ in tickets:
            hold_for_good(ticket)
        tickets.clear()

    def _forget_metadata(self, call: FunctionCall, returned: list[_Tensor]) -> None:
        """The function is opaque: another call of it may do something else."""
        for pack in call.packed:
            pack.view = None
        for tensor in returned:
            storage = self._tracker.storage(tensor)
            if storage is not None and not _is_made_in(call, storage.value):
                # Another call may return a part of another storage.
                storage.value.unsure = OPAQUE
                storage.is_exposed = True

    def _returned(self, tensor: _Tensor, call: FunctionCall) -> View | None:
        """The view that a returned tensor is."""
        tracker = self._tracker
        storage = tracker.storage(tensor)
        if storage is None:
            if not is_plain_tensor(tensor):
                tracker.stop_at(tensor)
                return None
            storage = tracker.add_stranger(tensor)
        value = storage.value
        view = tracker.view_in(storage, tensor)
        is_given = value.op < 0 and value.outside is None and not storage.is_exposed
        if is_given and _is_made_in(call, value):
            # Made from constants, as by torch.tensor(): hold it from now on.
            value.unsure = None
            tracker.hold(view, tensor, None)
        elif storage in tracker.inner and value.unsure is None:
            tracker.hold(view, tensor, None)
        return view

    def _note_saved(
        self, storage: RecordedStorage, tensor: _Tensor, view: View, returned: list[_Tensor]
    ) -> None:
        """Remember a saved tensor, to notice later writes to it."""
        if self._numbers.number_of(tensor) is None:
            # Autograd saves a result as another object than the one that is returned.
            same = [each for each in returned if self._tracker.storage(each) is storage]
            if not same:
                return
            tensor = same[0]
        storage.saved.append((ref(tensor), tensor._version, view.value))

    def _note_changed(self, call: FunctionCall, values: list[Any]) -> None:
        """Note by which arguments a later call finds what the function has written to."""
        for tensor in tensors_in(values):
            number = self._numbers.number_of(tensor)
            storage = self._tracker.storage(tensor)
            if number is not None and storage is not None and _is_made_in(call, storage.value):
                call.changed.append((number, self._tracker.view_in(storage, tensor)))

    # --- arguments --------------------------------------------------------------------------------

    def _template(self, value: Any, call: FunctionCall) -> Any:
        """What stands for an argument in the recording."""
        kind = type(value)
        if kind in _USUAL:
            return value
        if isinstance(value, _Tensor):
            self._tracker.find_changes(value)
            number = self._number(value)
            return Number(number, None if number < 0 else self._numbers.writes_to(value, number))
        items = self._items(value, kind, call)
        if items is not None:
            return items
        if is_comparable(value):
            return value
        call.is_opaque = True
        return Constant()

    def _items(self, value: Any, kind: type, call: FunctionCall) -> Items | None:
        """What stands for a container; None if it is none."""
        if isinstance(value, (tuple, list)) and kind is not torch.Size:
            items = [self._template(each, call) for each in value]
            is_constant = kind is tuple and all(map(is_comparable, value))
            return Items(kind, items, same=value) if is_constant else Items(kind, items)
        if isinstance(value, dict):
            items = [self._template(each, call) for each in value.values()]
            return Items(kind, items, list(value))
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return Items(kind, [self._template(each, call) for each in parts])
        return None

    def _number(self, tensor: _Tensor) -> int:
        number = self._numbers.number_of(tensor)
        if number is not None:
            return number
        tracker = self._tracker
        if not is_plain_tensor(tensor):
            tracker.stop_at(tensor)
            return -1
        number = self._add(tensor)
        outside = self._outsides[number] = OutsideTensor(number, metadata_of(tensor))
        storage = tracker.storage(tensor)
        if storage is None:
            storage = tracker.add(tensor, number)
            storage.watch(tensor)
            value = outside.value = storage.value
            away = self._offload_inputs and tensor.requires_grad and not tensor.is_leaf
            self._remat.keep(value, without_history(tensor), value.layout, away=away)
        elif storage.value.outside is not None:
            outside.twin = (storage.value.outside, start_of(tensor) - storage.start)
        else:
            # Made by something unseen, on a storage that is known.
            storage.value.unsure = OPAQUE
            storage.is_exposed = True
            outside.host = self._find_host(storage, number)
            if outside.host is None:
                tracker.stop("a view of a storage that no other tensor is left of")
        return number

    def _find_host(self, storage: RecordedStorage, before: int) -> int | None:
        """The first tensor on ``storage`` that is alive and has a number below ``before``."""
        for number, reference in enumerate(self._numbers.tensors[:before]):
            tensor = reference()
            if tensor is not None and self._tracker.storage(tensor) is storage:
                return number
        return None

    def _add(self, tensor: _Tensor) -> int:
        """Give ``tensor`` the next number."""
        number = self._numbers.add(tensor)
        storage = self._tracker.storage(tensor)
        if storage is not None:
            storage.watch(tensor)
        return number

    # --- saved tensors ----------------------------------------------------------------------------

    def pack(self, tensor: _Tensor) -> Ticket:
        """The saved-tensor hook: autograd saves ``tensor``."""
        ticket: Ticket = [tensor, tensor._version, None]
        tracker = self._tracker
        if tracker.is_idle():
            hold_for_good(ticket)
            return ticket
        if tracker.call is not None:
            storage = tracker.storage(tensor)
            pack = PackedTensor(self._saved(tensor, storage), storage=_made_storage(storage))
            tracker.call.packed.append(pack)
            self._tickets.append((ticket, storage))
        else:
            with self.pause():
                self._pack_between(ticket, tensor)
        return ticket

    def _pack_between(self, ticket: Ticket, tensor: _Tensor) -> None:
        """A custom function saves a tensor, outside of all functions of torch."""
        number = self._numbers.number_of(tensor)
        view = writes = None
        if number is not None:
            self._tracker.find_changes(tensor)
            view = self._saved(tensor, self._tracker.storage(tensor))
            writes = self._numbers.writes_to(tensor, number)
        first = len(self._tracker.graph.ops)
        between = FunctionCall(None, None, (first, first))
        storage = _made_storage(self._tracker.storage(tensor))
        between.packed.append(PackedTensor(view, number, writes, storage))
        self._calls.append(between)
        self._settle(ticket, view)

    def _saved(self, tensor: _Tensor, storage: RecordedStorage | None) -> View | None:
        """The view to recompute ``tensor`` by; None: autograd holds it."""
        tracker = self._tracker
        if storage is None:
            if not is_plain_tensor(tensor):
                tracker.stop_at(tensor)
                return None
            weight = cast_weight(tensor)
            if weight is None or tracker.storage(weight) is None:
                return None
            storage = tracker.find(tensor)
            assert storage is not None
        held = self._remat.kept.get(storage.value.number)
        is_away = held is not None and held.away is not None
        if storage.value.unsure is not None or (storage.is_outside and not is_away):
            return None
        storage.value.is_wanted = True
        return tracker.view_in(storage, tensor)

    def _settle(self, ticket: Ticket, view: View | None) -> None:
        """Drop a saved tensor that can be recomputed."""
        held = None if view is None else self._remat.kept.get(view.value.number)
        if view is None or (held is not None and held.away is None):
            hold_for_good(ticket)  # at no cost if the value is held
            return
        ticket[0], ticket[2] = None, view
        self._remat.tickets.append(ticket)


def _made_storage(storage: RecordedStorage | None) -> int | None:
    """The number of a storage, if the region made it."""
    return None if storage is None or storage.is_outside else storage.value.storage


def _is_unreadable(function: Any, args: tuple[Any, ...]) -> bool:
    if function in UNREADABLE_IF_PACKED:
        # Without lengths, the fourth argument tells whether there are biases.
        return len(args) < 4 or not isinstance(args[3], bool)
    return function in UNREADABLE or not (is_of_torch(function) or is_op_of_others(function))


def _is_made_in(call: FunctionCall, value: RecordedValue) -> bool:
    return value.number >= call.first_value
