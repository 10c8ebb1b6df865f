"""Checking: a later call runs as it is, and every function is compared with the recording.

As long as functions, constants and wiring are those of the recording, the n-th tensor that autograd
saves is known, and is dropped or kept as the plan says: after the function that saved it, when all
has turned out as it was. At the first difference everything is held from there on. What was dropped
until then was verified, and can be had again.

This runs at every function of every step, and is written for speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from recollect.engines.replay.held import Ticket, hold_for_good
from recollect.engines.replay.moods import is_mood
from recollect.engines.replay.protect import Protector
from recollect.engines.replay.recall import Recall
from recollect.engines.replay.record import Recording
from recollect.engines.replay.steps import (
    METADATA,
    WRONG_IN_MODES,
    Constant,
    Items,
    Number,
    looks_of,
    same_constant,
    tensors_in,
)
from recollect.engines.replay.tape import Buffer, Layout
from recollect.store.handles import version_of
from recollect.torch_private import (
    current_stream_key,
    dispatch_mode_count,
    is_plain_tensor,
    no_function_modes,
    storage_key,
    without_history,
)

__all__ = ["Checker", "checks_of"]

_Tensor = torch.Tensor


class _Checks:
    """What to do in one step of a recording. Made once."""

    __slots__ = (
        "caught_args",
        "caught_packs",
        "caught_returns",
        "count",
        "draws",
        "dropped",
        "dtypes",
        "first_out",
        "has_kwargs",
        "held",
        "is_opaque",
        "step",
    )

    def __init__(self, recording: Recording, number: int, caught: set[int]) -> None:
        step = self.step = recording.steps[number]
        plan = recording.plan
        self.has_kwargs = bool(step.kwargs is not None and step.kwargs.items)
        self.count = len(step.packs)
        #: Whether everything it saves is held.
        self.is_opaque = step.is_opaque
        #: If the function returns one tensor, and that is new, its number.
        self.first_out = step.outs[0] if len(step.outs) == 1 and step.is_new else None
        #: Which may follow from the default dtype.
        self.dtypes = [None if view is None else view.layout[3] for view in step.returns]
        #: Which of the saved tensors are dropped, and what they are.
        self.dropped = [
            (place, pack.view)
            for place, pack in enumerate(step.packs)
            if pack.view is not None
            and (pack.view.buffer.number not in plan.kept or pack.view.buffer.number in plan.away)
        ]
        gone = {place for place, _ in self.dropped}
        self.held = [place for place in range(self.count) if place not in gone]
        #: Where buffers that are kept are to be had: among what is saved, among what is returned.
        self.caught_packs = self._caught([pack.view for pack in step.packs], recording, caught)
        self.caught_returns = self._caught(step.returns, recording, caught)
        self.caught_args = [
            (step.changed[place][0], buffer, layout, away)
            for place, buffer, layout, away in self._caught(
                [view for _, view in step.changed], recording, caught
            )
        ]
        self.draws = [op for op in step.draws if op.number in plan.draws]

    @staticmethod
    def _caught(
        views: Iterable[Any], recording: Recording, caught: set[int]
    ) -> list[tuple[int, Buffer, Layout, bool]]:
        plan = recording.plan
        found = []
        for place, view in enumerate(views):
            number = -1 if view is None else view.buffer.number
            if number in plan.caught and number not in caught:
                caught.add(number)
                found.append((place, view.buffer, view.layout, number in plan.away))
        return found


def checks_of(recording: Recording) -> list[_Checks]:
    """What to do in each step."""
    caught: set[int] = set()
    return [_Checks(recording, number, caught) for number in range(len(recording.steps))]


class Checker(TorchFunctionMode):
    """Checks one call."""

    def __init__(
        self, recording: Recording, checks: list[_Checks], recall: Recall, offload_inputs: bool
    ) -> None:
        super().__init__()
        self._recording = recording
        self._checks = checks
        self._length = len(checks)
        self._recall = recall
        self._offload_inputs = offload_inputs
        #: The tensors by id, as in `Objects`.
        self._known: dict[int, tuple[ReferenceType[_Tensor], int, int | None]] = {}
        self._count = 0
        self._next = 0
        self._is_inside = False
        self._paused = False
        self._tickets: list[Ticket] = []
        self._memories: dict[int, tuple[int, int]] = {}
        #: Why the call is not the recorded one, once it is not.
        self.difference: str | None = None
        #: How many dispatch modes there are outside of functions.
        self._modes = dispatch_mode_count()
        self._stream = current_stream_key()
        recall.pause = self._pause

    def __exit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._recall.pause = None

    @contextmanager
    def _pause(self) -> Any:
        paused, self._paused = self._paused, True
        try:
            with no_function_modes():
                yield
        finally:
            self._paused = paused

    def finish(self) -> str | None:
        """After the call: how it differed from the recording."""
        if self.difference is None and self._next < self._length:
            self.difference = "the function ended early"
        self._recall.is_running = False
        self._recall.saw_all = self.difference is None
        return self.difference

    # --- functions --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_dynamo_compiling():  # which traces this mode along with the function
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._paused or func in METADATA:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.difference is not None:
            return self._run_unchecked(func, args, kwargs or {})
        if self._next == self._length:
            self.difference = self._recording.reason or "the function went on"
            return self._run_unchecked(func, args, kwargs or {})
        checks = self._checks[self._next]
        step = checks.step
        if not (
            (func is step.function or func == step.function)
            and is_mood(step.mood, func)
            and dispatch_mode_count() == self._modes
            and (self._stream is None or current_stream_key() == self._stream)
            and self._fits(args, step.args.items)
            and (self._fits_keywords(kwargs, step.kwargs) if kwargs else not checks.has_kwargs)
        ):
            self.difference = f"another call of {func}"
            return self._run_unchecked(func, args, kwargs or {})
        for op in checks.draws:
            assert op.generator is not None
            self._recall.states[op.number] = op.generator.get_state()
        self._is_inside = True
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException:
            self.difference = f"{func} raised"
            for ticket in self._tickets:
                hold_for_good(ticket)
            self._tickets = []
            raise
        finally:
            self._is_inside = False
        self._end(checks, out)
        if checks.caught_args and self.difference is None:
            self._catch_changed(checks, [*args, *(kwargs or {}).values()])
        return out

    def _run_unchecked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that the recording does not know."""
        if func not in WRONG_IN_MODES:
            with Protector(self._recall):
                return func(*args, **kwargs)
        for tensor in tensors_in([*args, *kwargs.values()]):
            self._recall.before_write(storage_key(tensor))
        return func(*args, **kwargs)

    def _fits(self, values: Any, expected: list[Any]) -> bool:
        if len(values) != len(expected):
            return False
        known = self._known
        for value, template in zip(values, expected, strict=True):
            if type(template) is Number:
                found = known.get(id(value))
                if found is None or found[0]() is not value:
                    fits = self._bind(value, template.number)
                else:
                    tensor, before = cast(Any, value), cast(Any, found[2])
                    # Somebody unseen may have written to it.
                    fits = found[1] == template.number and (
                        template.writes is None or tensor._version - before == template.writes
                    )
                if not fits:
                    return False
            elif value is template or type(template) is Constant:
                continue
            elif type(template) is Items:
                if not self._fits_items(value, template):
                    return False
            elif not same_constant(value, template):
                return False
        return True

    def _fits_items(self, value: Any, known: Items) -> bool:
        """Whether a container is as it was."""
        if type(value) is not known.kind:
            return False
        if known.keys is not None:
            return self._fits_keywords(value, known)  # type: ignore[arg-type]
        if type(value) is slice:
            return self._fits([value.start, value.stop, value.step], known.items)
        return self._fits(value, known.items)

    def _fits_keywords(self, kwargs: dict[str, Any], known: Items) -> bool:
        return list(kwargs) == known.keys and self._fits(kwargs.values(), known.items)

    def _bind(self, tensor: Any, number: int) -> bool:
        """Take ``tensor``, which is new, for the outside tensor of this number."""
        recording = self._recording
        outside = recording.outsides.get(number)
        if (
            outside is None
            or number != self._count
            or not isinstance(tensor, _Tensor)
            or not is_plain_tensor(tensor)
            or looks_of(tensor) != outside.looks
            or (recording.shares_memory and not self._is_placed(tensor, number))
            or (outside.host is not None and not self._is_on(tensor, outside.host))
        ):
            return False
        self._add(tensor)
        if outside.buffer is not None and number in recording.plan.outsides:
            away = self._offload_inputs and tensor.requires_grad and not tensor.is_leaf
            alias = without_history(tensor)
            self._recall.keep(outside.buffer, alias, outside.buffer.layout, away=away)
        return True

    def _is_on(self, tensor: _Tensor, host: int) -> bool:
        """Whether ``tensor`` is on the memory of the tensor whose number is ``host``."""
        hosts = (known[0]() for known in self._known.values() if known[1] == host)
        found = next((each for each in hosts if each is not None), None)
        return found is not None and storage_key(found) == storage_key(tensor)

    def _add(self, tensor: _Tensor) -> int:
        number = self._count
        self._count = number + 1
        self._known[id(tensor)] = (ref(tensor), number, version_of(tensor))
        return number

    def _is_placed(self, tensor: _Tensor, number: int) -> bool:
        """Whether ``tensor`` shares memory with the others as in the recording."""
        twin = self._recording.outsides[number].twin
        key = storage_key(tensor)
        assert key is not None
        start = int(tensor.storage_offset()) * tensor.element_size()
        first = self._memories.setdefault(key, (number, start))
        return first == ((number, start) if twin is None else (twin[0], start - twin[1]))

    # --- saved tensors ----------------------------------------------------------------------------

    def pack(self, tensor: _Tensor) -> Ticket:
        """The saved-tensor hook: autograd saves ``tensor``."""
        ticket: Ticket = [tensor, tensor._version, None]
        if self._is_inside:
            self._tickets.append(ticket)
        elif self.difference is None and not self._paused:
            with self._pause():
                self._pack_between(ticket, tensor)
        else:
            hold_for_good(ticket)
        return ticket

    def _pack_between(self, ticket: Ticket, tensor: _Tensor) -> None:
        """A custom function saves a tensor, outside of all functions of torch."""
        number = self._next
        checks = self._checks[number] if number < self._length else None
        if checks is None or checks.step.function is not None:
            self.difference = "other tensors are saved"
            hold_for_good(ticket)
            return
        pack = checks.step.packs[0]
        if pack.view is not None:
            found = self._known.get(id(tensor))
            if found is None or found[0]() is not tensor or found[1] != pack.number:
                self.difference = "another tensor is saved"
                hold_for_good(ticket)
                return
        self._next = number + 1
        self._settle(checks, [ticket])

    def _end(self, checks: _Checks, out: Any) -> None:
        """The function has returned: if all is as it was, drop and keep as planned."""
        tickets = self._tickets
        if tickets:
            self._tickets = []
        if self.difference is not None or not (len(tickets) == checks.count or checks.is_opaque):
            self._differs(checks, tickets)
        elif checks.first_out is not None and type(out) is _Tensor:
            if id(out) in self._known and self._known[id(out)][0]() is out:
                self._differs(checks, tickets)
                return
            number = self._count
            self._count = number + 1
            version = None if out.is_inference() else out._version
            self._known[id(out)] = (ref(out), number, version)
            returned = (out,)
            if (number != checks.first_out or out.dtype is not checks.dtypes[0]) or (
                checks.step.looks is not None and [looks_of(out)] != checks.step.looks
            ):
                self._differs(checks, tickets)
                return
            self._next += 1
            if checks.caught_returns:
                self._catch(checks, returned)
            if tickets:
                self._settle(checks, tickets)
        else:
            self._end_with_care(checks, tensors_in(out), tickets)

    def _end_with_care(
        self, checks: _Checks, returned: list[_Tensor], tickets: list[Ticket]
    ) -> None:
        step = checks.step
        if len(returned) != len(step.outs) or (
            step.looks is not None and [looks_of(tensor) for tensor in returned] != step.looks
        ):
            self._differs(checks, tickets)
            return
        for tensor, number, dtype in zip(returned, step.outs, checks.dtypes, strict=True):
            found = self._known.get(id(tensor))
            is_known = found is not None and found[0]() is tensor
            known = found[1] if is_known and found is not None else self._add(tensor)
            if known != number or tensor.dtype is not dtype:
                self._differs(checks, tickets)
                return
        self._next += 1
        self._catch(checks, returned)
        if tickets:
            self._settle(checks, tickets)

    def _differs(self, checks: _Checks, tickets: list[Ticket]) -> None:
        if self.difference is None:
            self.difference = f"another result of {checks.step.function}"
        for ticket in tickets:
            hold_for_good(ticket)

    def _catch(self, checks: _Checks, returned: Any) -> None:
        """Keep what the plan says of what a function returns."""
        for place, buffer, layout, away in checks.caught_returns:
            self._recall.keep(buffer, returned[place].detach(), layout, away=away)

    def _catch_changed(self, checks: _Checks, values: list[Any]) -> None:
        """Keep what the plan says of what a function has written to."""
        for tensor in tensors_in(values):
            known = self._known.get(id(tensor))
            for number, buffer, layout, away in checks.caught_args:
                if known is not None and known[1] == number:
                    self._recall.keep(buffer, tensor.detach(), layout, away=away)

    def _settle(self, checks: _Checks, tickets: list[Ticket]) -> None:
        """Keep what the plan says of what was saved, and drop the rest."""
        recall = self._recall
        for ticket in tickets if checks.is_opaque else [tickets[place] for place in checks.held]:
            hold_for_good(ticket)
        for place, buffer, layout, away in checks.caught_packs:
            recall.keep(buffer, without_history(tickets[place][0]), layout, away=away)
        for place, view in checks.dropped:
            ticket = tickets[place]
            ticket[0] = None
            ticket[2] = view
            recall.tickets.append(ticket)
