"""Checks a later call: every function is compared with the recording (R8).

As long as functions, constants and tensors match the recording, the n-th saved tensor is known. It
is dropped or held by the schedule once its function has ended as recorded. At the first difference,
such as another branch, the rest of the call is recorded (`_start_recording`). If that is
impossible, all saved tensors from there on are held. Tensors dropped before had been checked, and
can be recomputed.

This code runs at every function of every step, and is written for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch.compiler import is_dynamo_compiling

from recollect._torch.autograd import (
    is_in_custom_function,
    unpacks_by,
    without_history,
)
from recollect._torch.devices import (
    current_device,
    current_raw_stream,
    current_stream_key,
    is_current_stream,
)
from recollect._torch.dtensors import local_tensor
from recollect._torch.modes import (
    dispatch_mode_count,
    no_function_modes,
    pop_function_mode,
    push_function_mode,
)
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key
from recollect.replay.function_call import (
    EXPOSING,
    METADATA,
    OutsideTensor,
    TensorNumbers,
    call_mode,
    flatten_all,
    locals_in,
    metadata_of,
    runs_other_kernels_under_modes,
    same_constants,
)
from recollect.replay.held_values import CopyOnWrite, HeldTensor, Ticket, hold_for_good
from recollect.replay.memory_tracker import start_of
from recollect.replay.record import Recorder
from recollect.replay.recording import ExpectedCall, Recording
from recollect.replay.rematerialize import Rematerializer
from recollect.state.flags import call_it

_Tensor = torch.Tensor
#: Starts recording the rest of a call after so many ops; see `engine._Call.record_rest`.
RecordRest = Callable[[int, ExitStack], Recorder | None]


class Checker:
    """Checks one call. A function mode by duck typing: torch only needs it on its mode stack."""

    def __init__(
        self,
        recording: Recording,
        remat: Rematerializer,
        offload_inputs: bool,
        record_rest: RecordRest,
    ) -> None:
        self._recording = recording
        #: The next function. None at the end, and after a difference.
        self._next = recording.expected
        self._remat = remat
        self._offload_inputs = offload_inputs
        #: The outside tensors to keep, and whether it matters which memory they share.
        self._wanted = recording.schedule.outsides
        self._places_matter = recording.places_matter
        self._numbers = TensorNumbers()
        #: Whether a function is running, and the tickets of the tensors saved in it.
        self._is_inside = False
        self._tickets: list[Ticket] = []
        #: Held tensors that the last function wrote to: the write may not have been counted yet.
        self._uncounted: list[HeldTensor] = []
        self._is_paused = False
        #: By key of a storage: the first outside tensor on it, and its offset.
        self._storages: dict[int, tuple[int, int]] = {}
        #: How the call differs from the recording, once it does.
        self.difference: str | None = None
        #: How many ops came before the difference.
        self.done = 0
        #: The rest of the call as recorded, if there was a difference.
        self.rest_recording: Recording | None = None
        #: Whether the rest could not be recorded, and is held instead.
        self.is_unrecorded = False
        #: Starts to record the rest; None once it was called.
        self._start_rest: RecordRest | None = record_rest
        #: Records the rest.
        self._rest_recorder: Recorder | None = None
        #: Ends that.
        self._end_rest: ExitStack | None = None
        #: How many dispatch modes are active outside of functions.
        self._modes = dispatch_mode_count()
        self._stream = current_stream_key()
        remat.pause = self._pause

    def __enter__(self) -> None:
        push_function_mode(self)

    def __exit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on
        pop_function_mode()
        self._remat.pause = None
        self._start_rest = None
        if self._end_rest is not None:
            self._end_rest.__exit__(*exc)

    @contextmanager
    def _pause(self) -> Any:
        was_paused, self._is_paused = self._is_paused, True
        try:
            rest = self._rest_recorder
            with no_function_modes(), nullcontext() if rest is None else rest.pause():
                yield
        finally:
            self._is_paused = was_paused

    def finish(self, result: Any) -> str | None:
        """After the call, which returned ``result``: how it differed from the recording."""
        if self._next is not None:
            self._differ("the function ended early")
        self._count_versions()
        if self.difference is not None:
            # The user may write to the region's outputs, which may be held.
            for leaf in tree_leaves(result):
                if isinstance(leaf, _Tensor):
                    self._remat.before_write(leaf)
        if self._rest_recorder is not None:
            self.rest_recording = self._rest_recorder.finish(result)
        self._remat.count_writes_to(result)
        self._remat.end(as_recorded=self.difference is None)
        self._numbers.forget()
        return self.difference

    def _differ(self, how: str, *, is_over: bool = False) -> None:
        """Stop comparing, before the next function or, if it ``is_over``, after it."""
        if self.difference is None:
            count = len(self._recording.graph.ops)
            first, end = (count, count) if self._next is None else self._next.call.ops
            self.done = end if is_over else first
            self.difference = how
        self._next = None

    # --- functions --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_dynamo_compiling():  # which traces this mode along with the function
            return func(*args, **kwargs) if kwargs else func(*args)
        expected = self._next
        if expected is None or not (func is expected.function or func == expected.function):
            if func in METADATA:
                return func(*args, **kwargs) if kwargs else func(*args)
            return self._run_unchecked(func, args, kwargs or {})
        values = (*args, *kwargs.values()) if kwargs else args
        if (expected.keys is not None if not kwargs else [*kwargs] != expected.keys) or not (
            self._fits(expected, values)
        ):
            return self._run_unchecked(func, args, kwargs or {})
        if expected.has_preparations:
            self._prepare(expected, values)
        self._is_inside = True
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException:
            self._is_inside = False
            self._give_up(f"{func} raised")
            raise
        self._is_inside = False
        # As `_end_with_care` ends it, for the usual function: it returns one new tensor.
        numbers, tickets, only, key = self._numbers, self._tickets, expected.only, id(out)
        known, by_id = numbers.tensors, numbers.by_id
        if (
            only < 0
            or type(out) is not _Tensor
            or len(tickets) != expected.count
            or (key in by_id and known[by_id[key]]() is out)
            # It follows from the arguments and the default dtype, which is one of the flags.
            or (expected.flags is None and out.dtype is not expected.dtype)
        ):
            self._end_with_care(expected, locals_in(out))
        else:
            by_id[key] = only
            known.append(ref(out))
            try:
                numbers.versions.append(out._version)
            except RuntimeError:  # an inference tensor
                numbers.versions.append(None)
            self._next = expected.following
            for _, value, layout, away in expected.caught_returns:
                self._remat.keep(value, without_history(out), layout, away=away)
            if tickets:
                self._remat.drop_or_hold(expected, tickets)
        if expected.written and self.difference is None:
            self._note_writes(expected, values)
        return out

    def _prepare(self, expected: ExpectedCall, values: tuple[Any, ...]) -> None:
        """Save the state of generators, and the versions that a change of metadata will raise."""
        for op, generator in expected.draws:
            self._remat.states[op] = generator.get_state()
        if expected.call.changes_metadata:
            for tensor in locals_in(values):
                self._uncounted += self._remat.before_metadata_change(tensor)

    def _run_unchecked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._count_versions()
        went_on = self._recording.reason or "the function went on"
        name = getattr(func, "__qualname__", None) or str(func)
        self._differ(went_on if self._next is None else f"another call of {name}")
        self._start_recording()
        if self._rest_recorder is not None:
            return func(*args, **kwargs)
        values = (*args, *kwargs.values())
        if not runs_other_kernels_under_modes(func, values) and func not in EXPOSING:
            with CopyOnWrite(self._remat):
                return func(*args, **kwargs)
        for tensor in locals_in(values):
            self._remat.before_write(tensor)
        return func(*args, **kwargs)

    def _start_recording(self) -> None:
        """After a difference, record the rest of the call, if nothing prevents it. Once."""
        record_rest, self._start_rest = self._start_rest, None
        if record_rest is None:
            return
        self.is_unrecorded = True
        if not unpacks_by(self._remat.unpack):
            self.difference = (
                f"{self.difference}, inside of saved-tensor hooks such as those of "
                "torch.utils.checkpoint: leave checkpointing of parts of the model to the plan"
            )
            return
        if (
            self._recording.reason is not None  # a second recording would not get further
            or dispatch_mode_count() != self._modes  # modes and hooks have to be left in order
            or (self._stream is not None and not is_current_stream(self._stream))
        ):
            return
        self._end_rest = ExitStack()
        self._rest_recorder = record_rest(self.done, self._end_rest)
        self.is_unrecorded = self._rest_recorder is None

    def _fits(self, expected: ExpectedCall, values: tuple[Any, ...]) -> bool:
        """Whether the arguments and the call mode match the recording.

        The usual case; all others are left to `_fits_with_care`.
        """
        if self._uncounted:
            self._count_versions()
        numbers = self._numbers
        known: list[Any] = numbers.tensors
        versions: list[Any] = numbers.versions
        stream = self._stream
        try:
            if [*map(call_it, expected.getters), *map(type, values)] != expected.state or (
                stream is not None
                and (current_device() != stream[0] or current_raw_stream(stream[0]) != stream[1])
            ):
                return self._fits_with_care(expected, values)
            for place, number, writes in expected.seen:
                value = values[place]
                if known[number]() is not value or value._version - versions[number] != writes:
                    return False
        except RuntimeError:  # an inference tensor, or a flag that torch refuses to read
            return self._fits_with_care(expected, values)
        if expected.pick(values) != expected.picked or (
            expected.others and not same_constants(values, expected.others)
        ):
            return False
        for place, outside in expected.new:
            value = values[place]
            if self._places_matter or not outside.quick_test(value) or not numbers.add(value):
                if not self._bind(value, outside.number, None):
                    return False
            elif outside.number in self._wanted:
                self._keep_outside(value, outside)
        return True

    def _fits_with_care(self, expected: ExpectedCall, values: tuple[Any, ...]) -> bool:
        """Whether they match, in any call mode and with arguments of any types."""
        call = expected.call
        if (
            call_mode(call.function) != call.call_mode
            or dispatch_mode_count() != self._modes
            or (self._stream is not None and not is_current_stream(self._stream))
            or (expected.flags is not None and expected.read_flags() != expected.flags)
            or len(values) != call.arity
        ):
            return False
        leaves: Any = values
        wrappers = None
        if call.form is not None:
            leaves, form = flatten_all(values)
            if form != call.form:
                return False
            wrappers = leaves.wrappers
        numbers = self._numbers
        for place, number, writes in call.tensors:
            value = leaves[place]
            if number >= len(numbers.tensors):
                wrapper = wrappers.get(place) if wrappers else None
                if not self._bind(value, number, wrapper):
                    return False
            # Unseen writes. Torch does not count those to inference tensors.
            elif numbers.number_of(value) != number or numbers.writes_to(value, number) != writes:
                return False
        if not same_constants(leaves, call.constants):
            return False
        if not self._modes:
            expected.learn(values)
        return True

    def _bind(self, tensor: Any, number: int, wrapper: _Tensor | None) -> bool:
        """Bind ``tensor`` to the outside tensor of this number, if it matches.

        ``wrapper``: the ``DTensor`` that it is the local tensor of, if it is.
        """
        outside = self._recording.outsides.get(number)
        numbers = self._numbers
        if (
            outside is None
            or number != len(numbers.tensors)
            or not (outside.quick_test(tensor) or outside.is_like(tensor))
            or (self._places_matter and not self._is_at_place(tensor, outside))
            or not numbers.add(tensor)
        ):
            return False
        if number in self._wanted:
            self._keep_outside(tensor, outside, wrapper)
        return True

    def _keep_outside(
        self, tensor: _Tensor, outside: OutsideTensor, wrapper: _Tensor | None = None
    ) -> None:
        """Keep an outside tensor, if it is the first on its storage."""
        value = outside.value
        if value is not None:
            away = self._offload_inputs and tensor.requires_grad and not tensor.is_leaf
            held = self._remat.keep(value, without_history(tensor), value.layout, away=away)
            if wrapper is not None:
                held.count_by(wrapper)

    def _is_at_place(self, tensor: _Tensor, outside: OutsideTensor) -> bool:
        """Whether ``tensor`` shares memory with the recorded tensors, if that matters."""
        if self._recording.shares_memory:
            key = storage_key(tensor)
            assert key is not None
            start, twin = start_of(tensor), outside.twin
            first = self._storages.setdefault(key, (outside.number, start))
            if first != ((outside.number, start) if twin is None else (twin[0], start - twin[1])):
                return False
        if outside.host is None:
            return True
        host = self._numbers.tensors[outside.host]()
        return host is not None and storage_key(host) == storage_key(tensor)

    # --- saved and returned tensors ---------------------------------------------------------------

    def pack(self, tensor: _Tensor) -> Ticket:
        ticket: Ticket = [tensor, tensor._version, None]
        if self._is_inside:
            self._tickets.append(ticket)
        elif self.difference is None and not self._is_paused:
            with self._pause():
                self._pack_between(ticket, tensor)
        else:
            hold_for_good(ticket)
        return ticket

    def _pack_between(self, ticket: Ticket, tensor: _Tensor) -> None:
        """A custom function saves a tensor, outside of all functions of torch."""
        expected = self._next
        if expected is None or expected.function is not None:
            self._differ("other tensors are saved")
            hold_for_good(ticket)
            return
        (view,), tensor = expected.call.packed, local_tensor(tensor)
        number = self._numbers.number_of(tensor)
        writes = None if number is None else self._numbers.writes_to(tensor, number)
        if view is not None and (0, number, writes) not in expected.call.tensors:
            self._differ("another tensor is saved")
            hold_for_good(ticket)
            return
        self._next = expected.following
        self._remat.drop_or_hold(expected, [ticket])

    def _end_with_care(self, expected: ExpectedCall, returned: list[_Tensor]) -> None:
        """The function has returned: if it ended as recorded, drop or hold its saved tensors.

        Of any function: the usual ones end in `__torch_function__`.
        """
        tickets, call = self._tickets, expected.call
        if (
            len(returned) != len(expected.dtypes)
            or (len(tickets) != expected.count and not call.is_opaque)
            or (call.metadata is not None and [*map(metadata_of, returned)] != call.metadata)
            or not all(map(self._is_result, returned, call.outs, expected.dtypes))
        ):
            self._give_up(f"another result of {expected.function}")
            return
        self._next = expected.following
        for place, value, layout, away in expected.caught_returns:
            self._remat.keep(value, without_history(returned[place]), layout, away=away)
        self._numbers.follow_collectives(call)
        for number in call.arrived:
            tensor = self._numbers.tensors[number]()
            for held in () if tensor is None else self._remat.held_of(tensor):
                held.count_version()
        if tickets:
            self._remat.drop_or_hold(expected, tickets)
        if expected.arrivals:
            self._remat.offload_batch.release(expected.arrivals)

    def _is_result(self, tensor: _Tensor, expected: int, dtype: torch.dtype | None) -> bool:
        self._numbers.add(tensor)
        return self._numbers.number_of(tensor) == expected and tensor.dtype is dtype

    def _give_up(self, how: str) -> None:
        """The function did not end as recorded: hold its saved tensors."""
        self._differ(how, is_over=True)
        for ticket in self._tickets:
            hold_for_good(ticket)
        self._tickets = []

    def _note_writes(self, expected: ExpectedCall, values: tuple[Any, ...]) -> None:
        """Keep the written tensors that the schedule holds, and count the writes to held ones."""
        for tensor in locals_in(values):
            known = self._numbers.number_of(tensor)
            for number, value, layout, away in expected.caught_args:
                if known == number:
                    self._remat.keep(value, without_history(tensor), layout, away=away)
            if known in expected.written:
                held = self._remat.held_of(tensor)
                if held and is_in_custom_function():
                    self._uncounted += held
                for each in held:
                    each.count_version()

    def _count_versions(self) -> None:
        """Read versions again: a custom function counts its writes when it is over."""
        for held in self._uncounted:
            held.count_version()
        self._uncounted.clear()
