"""Records a call: the function runs once, under modes that record what it does (R6).

One mode sees the torch functions that are called, the other the ops that they run (`ops`).
Saved-tensor hooks see the values that autograd saves. Results that must not be recomputed are held
at once, so that everything else can be dropped during forward.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from recollect._torch.autograd import cast_weight
from recollect._torch.devices import current_stream_key, is_current_stream
from recollect._torch.dtensors import local_tensor
from recollect._torch.modes import (
    any_autocast_enabled,
    dispatch_mode_count,
    no_dispatch_modes,
    no_function_modes,
)
from recollect._torch.modules import misses_fast_path
from recollect._torch.ops import is_of_torch, is_op_of_others
from recollect._torch.pytree import tree_leaves
from recollect.checks.place import warn_user
from recollect.policy.policy_call import PolicyCall
from recollect.replay.function_call import (
    EXPOSING,
    METADATA,
    UNREADABLE,
    UNREADABLE_IF_PACKED,
    UNSUPPORTED,
    FunctionCall,
    Leaves,
    call_mode,
    flatten_all,
    is_comparable,
    locals_in,
    metadata_of,
    runs_other_kernels_under_modes,
)
from recollect.replay.held_values import Ticket, hold_for_good
from recollect.replay.memory_tracker import OPAQUE, MemoryTracker, RecordedStorage
from recollect.replay.named_schedule import ScheduleQuery
from recollect.replay.ops import OpRecorder
from recollect.replay.recorded_graph import RecordedValue, View
from recollect.replay.recording import Recording, saved_by
from recollect.replay.rematerialize import Rematerializer
from recollect.state.flags import read_flags

_Tensor = torch.Tensor
_Args = tuple[Any, ...]
_DATA = _Tensor.data.__get__  # type: ignore[attr-defined]


class Recorder(TorchFunctionMode):
    """Records one call of a region."""

    def __init__(
        self,
        remat: Rematerializer,
        query: PolicyCall | ScheduleQuery,
        offload_inputs: bool,
        earlier: Rematerializer | None = None,
    ) -> None:
        super().__init__()
        self._remat = remat
        is_planned = self._is_planned = isinstance(query, ScheduleQuery)
        self._tracker = MemoryTracker(remat, earlier, accepts_dtensors=is_planned)
        self._calls: list[FunctionCall] = []
        self._offload_inputs = offload_inputs
        #: The tickets of the running function, each with the storage of its tensor.
        self._tickets: list[tuple[Ticket, RecordedStorage | None]] = []
        self._query = query
        self._op_recorder = OpRecorder(self._tracker, query)
        #: Keeps a tensor.
        self.keep = self._op_recorder.keep
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
        """After the call, which returned ``result``: release values that backward does not need."""
        tracker, remat = self._tracker, self._remat
        remat.end(as_recorded=True)
        tracker.end_function()
        for leaf in tree_leaves(result):
            storage = tracker.storage_of(leaf) if isinstance(leaf, _Tensor) else None
            if storage is not None:
                storage.value.is_output = True
                if storage.has_data:  # the user may write to it unnoticed
                    storage.value.unsure = OPAQUE
                    remat.before_write(leaf)
        remat.release_unneeded()
        # A plan has no room for copies of saved outputs. Autograd raises if they are changed.
        remat.copy_outputs(set(saved_by(self._calls)) if self._is_planned else ())
        remat.count_writes_to(result)
        tracker.numbers.forget()
        return Recording(
            tracker.graph,
            self._calls,
            tracker.outsides,
            tracker.writes_outside,
            remat.offload_batch.chosen,
            tracker.stopped,
        )

    def count_ops(self) -> int:
        return len(self._tracker.graph.ops)

    @contextmanager
    def pause(self) -> Any:
        with self._tracker.pause(), no_function_modes():
            yield

    # --- functions --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: _Args = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_dynamo_compiling():  # which traces this mode along with the function
            return func(*args, **kwargs)
        tracker = self._tracker
        if tracker.is_idle or func in METADATA:
            if tracker.stopped is not None and func in EXPOSING:
                for tensor in locals_in(args):
                    tracker.protect(tensor)
            return func(*args, **kwargs)
        tracker.end_function()
        tracker.settle_function_writes()  # ops that ran outside of functions
        values = (*args, *kwargs.values())
        runs_other_kernels = runs_other_kernels_under_modes(func, values)
        run = partial(_run_without_modes, func) if runs_other_kernels else func
        _warn_of_slow_path(func, args, kwargs)
        if runs_other_kernels and "out" in kwargs:
            for tensor in locals_in(values):
                tracker.before_write(tensor)
            tracker.stop(f"{func} does something else under a dispatch mode")
        elif func in UNSUPPORTED:
            tracker.stop(f"{func} gives a tensor another storage")
        elif self._stream is not None and not is_current_stream(self._stream):
            # Backward recomputes a saved tensor on the stream of the function that saved it.
            tracker.stop("several streams")
        else:
            call = self._begin(func, args, values, [*kwargs])
        if tracker.stopped is not None:
            return run(*args, **kwargs)
        call.is_opaque |= runs_other_kernels
        try:
            out = run(*args, **kwargs)
        except BaseException:
            tracker.stop(f"{func} raised")
            self._give_up(call)
            raise
        finally:
            tracker.call = None
        self._end(call, out, values)
        return out

    def _begin(self, func: Any, args: _Args, values: _Args, keys: list[str]) -> FunctionCall:
        """Record the arguments of a function that is about to run, unless recording stops."""
        tracker = self._tracker
        flags = read_flags()
        tracker.flags = None if flags == self._remat.flags else flags
        first = len(tracker.graph.ops)
        call = FunctionCall(
            func, call_mode(func), (first, first), tracker.flags or self._remat.flags
        )
        call.keys = keys or None
        # A mode entered inside the region may do anything, and so may a function that reads data in
        # Python.
        call.custom_function = None if is_of_torch(func) else func
        call.is_opaque = dispatch_mode_count() != self._modes or _is_unreadable(call, args)
        leaves, call.form = flatten_all(values)
        wrappers = leaves.wrappers if isinstance(leaves, Leaves) else None
        call.arity = len(values)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, _Tensor):
                wrapper = wrappers.get(place) if wrappers else None
                number, writes = tracker.number_argument(leaf, self._offload_inputs, wrapper)
                call.tensors.append((place, number, writes))
            elif is_comparable(leaf) or type(leaf) is tuple:
                call.constants.append((place, leaf))
            else:
                call.is_opaque = True
        call.first_value = len(tracker.graph.values)
        if tracker.is_idle:
            return call
        call.has_dtensors = bool(wrappers)
        if func in EXPOSING:
            for tensor in locals_in(args):
                tracker.expose(tensor)
        elif func == _DATA and (storage := tracker.storage_of(leaves[0])) is not None:
            storage.has_data = True
        self._calls.append(call)
        tracker.call, tracker.is_casting = call, any_autocast_enabled()
        return call

    def _end(self, call: FunctionCall, out: Any, values: _Args) -> None:
        """The function has returned: drop or hold its saved tensors."""
        tracker = self._tracker
        try:
            tracker.end_function()
        except BaseException:
            tracker.stop("a store raised")
            self._give_up(call)
            raise
        call.ops = (call.ops[0], len(tracker.graph.ops))
        if tracker.stopped is not None:
            self._give_up(call)
            return
        # Later calls know the generator's state before the function only. On accelerators DTensor
        # moves its offset before a draw.
        is_moved = call.has_dtensors and any(
            op.generator is not None and op.generator.device.type != "cpu" for op in call.draws
        )
        if len(call.draws) > 1 or is_moved:
            for op in call.draws:
                op.later = "random, several draws in one function"
        returned = locals_in(out)
        if call.is_opaque:
            self._end_opaque(call, returned, values)
        for tensor in returned:
            storage = tracker.locate(tensor)
            call.returns.append(None if storage is None else self._returned(tensor, storage, call))
            number = tracker.numbers.number_of(tensor)
            number = tracker.assign_number(tensor, storage) if number is None else number
            call.outs.append(number)
            if storage is not None and storage.is_in_flight:
                call.in_flight.append(number)
        tracker.numbers.follow_collectives(call)
        if call.depends_on_data or call.is_opaque:
            call.metadata = [metadata_of(tensor) for tensor in returned]
        tickets, self._tickets = self._tickets, []
        for (ticket, storage), view in zip(tickets, call.packed, strict=True):
            if view is not None and storage is not None:
                self._note_saved(storage, ticket[0], view, returned)
            self._drop_or_hold(ticket, view)
        if tracker.written:
            self._note_changed(call, values)
        tracker.settle_function_writes()

    def _give_up(self, call: FunctionCall) -> None:
        """A function was not recorded to its end: hold its saved tensors."""
        self._calls.remove(call)
        for ticket, _ in self._tickets:
            hold_for_good(ticket)
        self._tickets = []

    def _end_opaque(self, call: FunctionCall, returned: list[_Tensor], values: _Args) -> None:
        """Another call of the function may save, return or write to something else."""
        tracker = self._tracker
        call.packed = [None] * len(call.packed)
        for tensor in returned:
            storage = tracker.storage_of(tensor)
            if storage is not None and not _is_made_in(call, storage.value):
                storage.value.unsure = OPAQUE
                storage.is_exposed = True
        if call.custom_function is not None:
            for tensor in locals_in(values):
                tracker.expose(tensor)

    def _returned(self, tensor: _Tensor, storage: RecordedStorage, call: FunctionCall) -> View:
        tracker = self._tracker
        value = storage.value
        view = tracker.view_in(storage, tensor)
        is_given = value.op < 0 and value.outside is None and not storage.is_exposed
        if is_given and _is_made_in(call, value):
            value.unsure = None  # made from constants, as by torch.tensor()
            tracker.hold(view, tensor, None)
        elif storage in tracker.inner and value.unsure is None:
            tracker.hold(view, tensor, None)
        return view

    def _note_saved(
        self, storage: RecordedStorage, tensor: _Tensor, view: View, returned: list[_Tensor]
    ) -> None:
        """Remember a saved tensor, to notice later writes to it."""
        tracker = self._tracker
        # Autograd saves a result as another tensor object than the one returned.
        tensor = local_tensor(tensor)
        for each in (tensor, *returned):
            number = tracker.numbers.number_of(each)
            if number is not None and (each is tensor or tracker.storage_of(each) is storage):
                storage.saved.append((number, each._version, view.value))
                return

    def _note_changed(self, call: FunctionCall, values: _Args) -> None:
        """Record through which arguments the function wrote to which values."""
        tracker = self._tracker
        for tensor in locals_in(values):
            number = tracker.numbers.number_of(tensor)
            storage = tracker.storage_of(tensor)
            if number is not None and storage is not None and _is_made_in(call, storage.value):
                call.changed.append((number, tracker.view_in(storage, tensor)))

    # --- saved tensors ----------------------------------------------------------------------------

    def pack(self, tensor: _Tensor) -> Ticket:
        ticket: Ticket = [tensor, tensor._version, None]
        tracker = self._tracker
        if tracker.is_idle:
            hold_for_good(ticket)
        elif tracker.call is not None:
            storage = tracker.storage_of(tensor)
            tracker.call.packed.append(self._saved(tensor, storage))
            self._tickets.append((ticket, storage))
        else:
            with self.pause():
                self._pack_between(ticket, tensor)
        return ticket

    def _pack_between(self, ticket: Ticket, tensor: _Tensor) -> None:
        """A custom function saves a tensor, outside of all functions of torch."""
        tracker, local = self._tracker, local_tensor(tensor)
        number = tracker.numbers.number_of(local)
        view = None
        first = len(tracker.graph.ops)
        between = FunctionCall(None, None, (first, first))
        if number is not None:
            tracker.note_unseen_writes(local, number)
            view = self._saved(tensor, tracker.storage_of(local))
            between.tensors.append((0, number, tracker.numbers.writes_to(local, number)))
        between.packed.append(view)
        self._calls.append(between)
        self._drop_or_hold(ticket, view)

    def _saved(self, tensor: _Tensor, storage: RecordedStorage | None) -> View | None:
        """The view to recompute ``tensor`` by; None if autograd holds it."""
        tracker = self._tracker
        if storage is None:
            if not tracker.accepts(tensor):
                tracker.stop_at(tensor)
                return None
            weight = cast_weight(tensor)
            if weight is None or tracker.storage_of(weight) is None:
                return None
            storage = tracker.locate(local_tensor(tensor))
            assert storage is not None
        held = self._remat.kept.get(storage.value.number)
        is_away = held is not None and held.away is not None
        if storage.value.unsure is not None or (storage.outside is not None and not is_away):
            return None
        storage.value.is_wanted = True
        return tracker.view_in(storage, tensor)

    def _drop_or_hold(self, ticket: Ticket, view: View | None) -> None:
        """Drop a saved tensor that can be recomputed; hold it otherwise."""
        held = None if view is None else self._remat.kept.get(view.value.number)
        if view is None or (held is not None and held.away is None):
            hold_for_good(ticket)  # at no cost if the value is held
            return
        ticket[0], ticket[2] = None, view
        self._remat.tickets.append(ticket)


def _run_without_modes(func: Any, *args: Any, **kwargs: Any) -> Any:
    with no_dispatch_modes():
        return func(*args, **kwargs)


def _is_unreadable(call: FunctionCall, args: tuple[Any, ...]) -> bool:
    function = call.function
    if function in UNREADABLE_IF_PACKED:
        # Without lengths, the fourth argument tells whether there are biases.
        return len(args) < 4 or not isinstance(args[3], bool)
    is_custom = call.custom_function is not None and not is_op_of_others(function)
    return is_custom or function in UNREADABLE


def _is_made_in(call: FunctionCall, value: RecordedValue) -> bool:
    return value.number >= call.first_value


def _warn_of_slow_path(func: Any, args: _Args, kwargs: dict[str, Any]) -> None:
    if misses_fast_path(func, args, kwargs):
        warn_user(
            "nn.MultiheadAttention in eval mode takes a fast path of torch in plain code, but not "
            "where engine='replay' or a plan watches torch's functions. Its results differ by "
            "rounding, and those of nn.TransformerEncoder at padded positions altogether. To have "
            "the same results in both, call torch.backends.mha.set_fastpath_enabled(False) first"
        )
