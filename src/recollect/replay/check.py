"""Checking: a later call runs as it is, and every function is compared with the recording (R8).

As long as functions, constants and tensors are those of the recording, the n-th tensor that
autograd saves is known. It is dropped or held by the schedule once its function has ended as
recorded. From the first difference on the call is recorded, or else everything is held. What was
dropped until then was checked, and can be recomputed.

This runs at every function of every step, and is written for speed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import is_grad_enabled as grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from recollect._torch.autograd import is_in_custom_function, unpacks_by, without_history
from recollect._torch.devices import current_stream_key, is_current_stream
from recollect._torch.modes import DispatchMode, dispatch_mode_count, no_function_modes
from recollect._torch.modes import any_autocast_enabled as autocast_enabled
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key
from recollect.policy.op_info import op_info
from recollect.replay.call_mode import call_mode
from recollect.replay.checked_step import CheckedStep
from recollect.replay.function_call import (
    EXPOSING,
    METADATA,
    WRONG_IN_MODES,
    Constant,
    Items,
    Number,
    TensorNumbers,
    metadata_of,
    same_constant,
    tensors_in,
)
from recollect.replay.held_tensor import HeldTensor, Ticket, hold_for_good, saved_in
from recollect.replay.memory_tracker import start_of
from recollect.replay.record import Recorder
from recollect.replay.recording import Recording
from recollect.replay.rematerialize import Rematerializer
from recollect.state.flags import read_flags

__all__ = ["Checker"]

_Tensor = torch.Tensor


class Checker(TorchFunctionMode):
    """Checks one call."""

    def __init__(
        self,
        recording: Recording,
        first: CheckedStep | None,
        remat: Rematerializer,
        offload_inputs: bool,
        record_rest: Callable[[Rematerializer, int, ExitStack], Recorder | None],
    ) -> None:
        super().__init__()
        self._recording = recording
        #: The function that comes next. None at the end, and after a difference.
        self._next = first
        self._remat = remat
        self._offload_inputs = offload_inputs
        self._numbers = TensorNumbers()
        #: Whether a function is running, and what autograd has saved in it.
        self._is_inside = False
        self._tickets: list[Ticket] = []
        #: Held tensors that the last function wrote to: the write may not have been counted yet.
        self._written: list[HeldTensor] = []
        self._is_paused = False
        #: By key of a storage: the first outside tensor on it, and its offset.
        self._storages: dict[int, tuple[int, int]] = {}
        #: Why the call is not the recorded one, once it differs.
        self.difference: str | None = None
        #: How many ops came before that.
        self.done = 0
        #: The recording of the rest, and whether it could not be recorded, and is held.
        self.recorded: Recording | None = None
        self.is_unrecorded = False
        #: What starts to record the rest, None once it was called; the recorder, and its end.
        self._record_rest: Callable[[Rematerializer, int, ExitStack], Recorder | None] | None = (
            record_rest
        )
        self._rest: Recorder | None = None
        self._end_rest: ExitStack | None = None
        #: How many dispatch modes are active outside of functions.
        self._modes = dispatch_mode_count()
        self._stream = current_stream_key()
        remat.pause = self._pause

    def __exit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._remat.pause = None
        self._record_rest = None
        if self._end_rest is not None:
            self._end_rest.__exit__(*exc)

    @contextmanager
    def _pause(self) -> Any:
        was_paused, self._is_paused = self._is_paused, True
        try:
            with no_function_modes(), nullcontext() if self._rest is None else self._rest.pause():
                yield
        finally:
            self._is_paused = was_paused

    def finish(self, result: Any) -> str | None:
        """After the call, which returned ``result``: how it differed from the recording."""
        if self._next is not None:
            self._differ("the function ended early")
        self._count_versions()
        if self.difference is not None:
            # The user may change what the region returns, and that may be held.
            for leaf in tree_leaves(result):
                if isinstance(leaf, _Tensor):
                    self._remat.before_write(leaf)
        if self._rest is not None:
            self.recorded = self._rest.finish(result)
        self._remat.is_running = False
        self._remat.saw_all = self.difference is None
        return self.difference

    def _differ(self, how: str, *, is_over: bool = False) -> None:
        """Stop comparing, before the next function or, if it ``is_over``, after it."""
        if self.difference is None:
            ops = self._recording.graph.ops
            self.done = len(ops) if self._next is None else self._next.call.ops[is_over]
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
        if self._written:
            self._count_versions()
        values = (*args, *kwargs.values()) if kwargs else args
        is_usual = grad_enabled() is expected.call_mode and not autocast_enabled()
        if not (
            (is_usual or call_mode(func) == expected.call_mode)
            and (list(kwargs) if kwargs else None) == expected.keys
            and dispatch_mode_count() == self._modes
            and (self._stream is None or is_current_stream(self._stream))
            and (expected.flags is None or read_flags() == expected.flags)
            and len(values) == expected.arity
            and self._fits(expected, values)
        ):
            return self._run_unchecked(func, args, kwargs or {})
        for op in expected.draws:
            assert op.generator is not None
            self._remat.states[op.number] = op.generator.get_state()
        if expected.changes_metadata:
            for tensor in tensors_in(values):
                self._written += self._remat.before_metadata_change(tensor)
        self._is_inside = True
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException:
            self._is_inside = False
            self._give_up(f"{func} raised")
            raise
        self._is_inside = False
        self._end(expected, out)
        if expected.written and self.difference is None:
            self._note_writes(expected, values)
        return out

    def _run_unchecked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that is not the next one of the recording."""
        self._count_versions()
        is_at_end = self._next is None
        went_on = self._recording.reason or "the function went on"
        self._differ(went_on if is_at_end else f"another call of {func}")
        self._start_recording()
        if self._rest is not None:
            return func(*args, **kwargs)
        if func not in WRONG_IN_MODES and func not in EXPOSING:
            with _CopyOnWrite(self._remat):
                return func(*args, **kwargs)
        for tensor in tensors_in([*args, *kwargs.values()]):
            self._remat.before_write(tensor)
        return func(*args, **kwargs)

    def _start_recording(self) -> None:
        """Have the rest of the call recorded, if nothing prevents it. Once."""
        record_rest, self._record_rest = self._record_rest, None
        if record_rest is None:
            return
        self.is_unrecorded = True
        if (
            self._recording.reason is not None  # a second recording would not get further
            or dispatch_mode_count() != self._modes  # modes and hooks have to be left in order
            or not unpacks_by(self._remat.unpack)
            or (self._stream is not None and not is_current_stream(self._stream))
        ):
            return
        self._end_rest = ExitStack()
        self._rest = record_rest(self._remat, self.done, self._end_rest)
        self.is_unrecorded = self._rest is None

    def _fits(self, expected: CheckedStep, values: tuple[Any, ...]) -> bool:
        """Whether the arguments are those of the recording."""
        if not expected.is_simple:
            return self._fit(values, expected.values)
        known, versions = self._numbers.tensors, self._numbers.versions
        for place, number, writes in expected.tensors:
            value = values[place]
            if number >= len(known):
                if not self._bind(value, number):
                    return False
                continue
            before = versions[number]
            if (
                known[number]() is not value
                or value is None
                or before is None
                or value._version - before != writes  # there may have been an unseen write
            ):
                return False
        for place, constant, kind in expected.constants:
            value = values[place]
            is_same = value is constant or (type(value) is kind and value == constant)
            if not is_same and not same_constant(value, constant):
                return False
        for place, items in expected.containers:
            value = values[place]
            if value is not items.same and not self._fits_items(value, items):
                return False
        return True

    def _fit(self, values: Any, expected: list[Any]) -> bool:
        """The same for arguments of any kind."""
        return len(values) == len(expected) and all(map(self._fits_one, values, expected))

    def _fits_one(self, value: Any, expected: Any) -> bool:
        if type(expected) is Number:
            return self._fits_number(value, expected)
        if type(expected) is Items:
            return self._fits_items(value, expected)
        return type(expected) is Constant or same_constant(value, expected)

    def _fits_number(self, value: Any, expected: Number) -> bool:
        numbers = self._numbers
        number = numbers.number_of(value)
        if number is None:
            return self._bind(value, expected.number)
        return number == expected.number and numbers.writes_to(value, number) == expected.writes

    def _fits_items(self, value: Any, expected: Items) -> bool:
        """Whether a container is as recorded."""
        kind: type = type(value)
        if kind is not expected.kind:
            return False
        if expected.keys is not None:
            return list(value) == expected.keys and self._fit([*value.values()], expected.items)
        if kind is slice:
            return self._fit((value.start, value.stop, value.step), expected.items)
        return self._fit(value, expected.items)

    def _bind(self, tensor: Any, number: int) -> bool:
        """Take ``tensor`` for the outside tensor of this number, if it can be that."""
        recording = self._recording
        outside = recording.outsides.get(number)
        if (
            outside is None
            or number != len(self._numbers.tensors)
            or not (outside.is_surely_like(tensor) or outside.is_like(tensor))
            or self._numbers.number_of(tensor) is not None
            or (recording.shares_memory and not self._is_placed(tensor, number))
            or (outside.start is not None and start_of(tensor) != outside.start)
            or (outside.host is not None and not self._is_on(tensor, outside.host))
        ):
            return False
        self._numbers.add(tensor)
        if outside.is_held:
            value = outside.value
            assert value is not None
            away = self._offload_inputs and tensor.requires_grad and not tensor.is_leaf
            self._remat.keep(value, without_history(tensor), value.layout, away=away)
        return True

    def _is_on(self, tensor: _Tensor, host: int) -> bool:
        """Whether ``tensor`` is on the storage of the tensor whose number is ``host``."""
        found = self._numbers.tensors[host]()
        return found is not None and storage_key(found) == storage_key(tensor)

    def _is_placed(self, tensor: _Tensor, number: int) -> bool:
        """Whether ``tensor`` shares storages with other outside tensors as recorded."""
        twin = self._recording.outsides[number].twin
        key = storage_key(tensor)
        assert key is not None
        start = start_of(tensor)
        first = self._storages.setdefault(key, (number, start))
        return first == ((number, start) if twin is None else (twin[0], start - twin[1]))

    # --- saved and returned tensors ---------------------------------------------------------------

    def pack(self, tensor: _Tensor) -> Ticket:
        """The saved-tensor hook: autograd saves ``tensor``."""
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
        pack = expected.call.packed[0]
        number = self._numbers.number_of(tensor)
        if pack.view is not None and not (
            number is not None
            and number == pack.number
            and self._numbers.writes_to(tensor, number) == pack.writes
        ):
            self._differ("another tensor is saved")
            hold_for_good(ticket)
            return
        self._next = expected.following
        self._settle(expected, [ticket])

    def _end(self, expected: CheckedStep, out: Any) -> None:
        """The function has returned: if all is as recorded, drop and hold by the schedule."""
        tickets = self._tickets
        numbers = self._numbers
        known = numbers.tensors
        number = len(known)
        if number != expected.first_out or type(out) is not _Tensor:
            self._end_with_care(expected, tensors_in(out))
            return
        other = numbers.by_id.get(id(out))
        if (
            (other is not None and known[other]() is out)
            or (len(tickets) != expected.count and not expected.is_opaque)
            or out.dtype is not expected.dtypes[0]
            or (expected.metadata is not None and metadata_of(out) != expected.metadata[0])
        ):
            self._give_up(f"another result of {expected.function}")
            return
        known.append(ref(out))
        numbers.versions.append(None if out.is_inference() else out._version)
        numbers.by_id[id(out)] = number
        self._next = expected.following
        if expected.caught_returns:
            self._catch(expected, (out,))
        if tickets:
            self._settle(expected, tickets)
            self._tickets = []
        if expected.arrivals:
            self._remat.offload_batch.release(expected.arrivals)

    def _end_with_care(self, expected: CheckedStep, returned: list[_Tensor]) -> None:
        tickets = self._tickets
        if (
            len(returned) != len(expected.dtypes)
            or (len(tickets) != expected.count and not expected.is_opaque)
            or (
                expected.metadata is not None and [*map(metadata_of, returned)] != expected.metadata
            )
            or not all(map(self._is_result, returned, expected.call.outs, expected.dtypes))
        ):
            self._give_up(f"another result of {expected.function}")
            return
        self._next = expected.following
        self._catch(expected, returned)
        self._settle(expected, tickets)
        self._tickets = []
        if expected.arrivals:
            self._remat.offload_batch.release(expected.arrivals)

    def _is_result(self, tensor: _Tensor, expected: int, dtype: torch.dtype | None) -> bool:
        number = self._numbers.number_of(tensor)
        if number is None:
            number = self._numbers.add(tensor)
        return number == expected and tensor.dtype is dtype

    def _give_up(self, how: str) -> None:
        """The function did not end as recorded: hold what autograd saved in it."""
        self._differ(how, is_over=True)
        for ticket in self._tickets:
            hold_for_good(ticket)
        self._tickets = []

    def _catch(self, expected: CheckedStep, returned: Any) -> None:
        """Keep what the schedule says of the returned tensors."""
        for place, value, layout, away in expected.caught_returns:
            self._remat.keep(value, without_history(returned[place]), layout, away=away)

    def _note_writes(self, expected: CheckedStep, values: tuple[Any, ...]) -> None:
        """Keep what the schedule says of the tensors that a function has written to."""
        for tensor in tensors_in(values):
            known = self._numbers.number_of(tensor)
            for number, value, layout, away in expected.caught_args:
                if known == number:
                    self._remat.keep(value, without_history(tensor), layout, away=away)
            if known in expected.written:
                held = self._remat.held_of(tensor)
                if held and is_in_custom_function(sys._getframe(1)):
                    self._written += held
                for each in held:
                    each.count_version()

    def _count_versions(self) -> None:
        """Read versions again: a custom function counts its writes when it is over."""
        for held in self._written:
            held.count_version()
        self._written.clear()

    def _settle(self, expected: CheckedStep, tickets: list[Ticket]) -> None:
        """Hold what the schedule says of the saved tensors, and drop the rest."""
        remat = self._remat
        if expected.is_opaque:
            for ticket in tickets:
                hold_for_good(ticket)
        for place in expected.held:
            hold_for_good(tickets[place])
        for place, value, layout, away in expected.caught_packed:
            remat.keep(value, saved_in(tickets[place]), layout, away=away)
        for place, view in expected.dropped:
            ticket = tickets[place]
            ticket[0] = None
            ticket[2] = view
            remat.tickets.append(ticket)


class _CopyOnWrite(DispatchMode):
    """After a difference: copies a held tensor before an op writes to it."""

    def __init__(self, remat: Rematerializer) -> None:
        super().__init__()
        self._remat = remat

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        info = op_info(func)
        kwargs = kwargs or {}
        if info.writes:
            for tensor in info.written(args, kwargs):
                self._remat.before_write(tensor)
        return info.call(*args, **kwargs)
