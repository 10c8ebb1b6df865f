"""Running a region by the replay engine.

The first call with a signature:

1. runs the function under modes that record functions, ops, and what autograd saves;
2. holds at once what must not run again, and drops the rest;
3. ends with a schedule of what later calls hold.

A later call:

4. runs the function under a mode that compares functions, constants and tensors;
5. drops or holds what autograd saves, by the schedule;
6. at a difference records the rest of the call, and has the next call recorded from its beginning.

Backward:

7. runs the ops that lead from what is held to the saved tensor that it unpacks;
8. releases each value after its last use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from recollect._torch.autograd import (
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks_active,
)
from recollect._torch.devices import is_capturing
from recollect._torch.dynamo import is_compiling
from recollect._torch.modes import foreign_function_modes, forward_ad_active, is_transforming
from recollect._torch.tensors import UnsupportedTensor
from recollect.checks.place import warn_user
from recollect.observer import observed_pack, observing
from recollect.policy.makers import nothing
from recollect.policy.policy_call import PolicyCall
from recollect.policy.rules import Policy
from recollect.policy.rulings import rulebook_of
from recollect.replay.check import Checker
from recollect.replay.checked_step import checked_steps
from recollect.replay.function_call import FunctionCall
from recollect.replay.named_schedule import NamedSchedule, ScheduleQuery
from recollect.replay.record import Recorder
from recollect.replay.recorded_graph import RecordedGraph
from recollect.replay.recording import Recording
from recollect.replay.recording_cache import CacheEntry, UnsupportedArgument, entry_of, signature_of
from recollect.replay.rematerialize import Rematerializer
from recollect.state.flags import read_flags
from recollect.store.offload_batch import OffloadBatch

__all__ = ["CallReport", "LeftToRerun", "observe_region", "replay_region"]

#: What is called when autograd saves a tensor, and when it unpacks it.
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_NOTHING = nothing()


class _Running(threading.local):
    #: Whether this thread is in a region of this engine.
    is_running = False


_running = _Running()


def _obstacle() -> str | None:
    """What around the call is not supported, if anything is."""
    if saved_tensor_hooks_active():
        # Another region around this one needs it to save the same tensors every time, but a
        # recorded and a checked call save different ones.
        return "it is inside of another region, or of saved-tensor hooks"
    if foreign_function_modes():
        return "it is inside of a function mode, which may do anything"
    if is_compiling():
        return "a compiler traces it"
    if is_transforming() or forward_ad_active():
        return "it is inside of a transform of torch.func, or of forward-mode differentiation"
    if is_capturing():
        return "it is captured into a CUDA graph, where generators cannot be read"
    return None


@dataclass(eq=False)
class CallReport:
    """What a caller learns about a call. Filled in by the engine."""

    #: What the call holds; None if another engine has to run it.
    remat: Rematerializer | None = None
    #: What the rest of it holds, if it differed from the recording.
    rest: Rematerializer | None = None
    policy: Policy | None = None
    #: Why everything is held, or recorded, from some point on.
    stopped: str | None = None
    #: Why every call is recorded.
    unsettled: str | None = None
    #: Whether it was recorded, so that the next call runs differently.
    is_rehearsal: bool = False
    #: What was recorded: the whole call, or the rest of one that differed from the recording.
    recording: Recording | None = None
    #: How it differed from the recording, if it did, and what was as recorded until then.
    difference: str | None = None
    before: RecordedGraph = field(default_factory=RecordedGraph)
    calls: list[FunctionCall] = field(default_factory=list)
    #: Whether the rest could not be recorded, and everything that autograd saved in it is held.
    is_unrecorded: bool = False


class LeftToRerun(NamedTuple):
    """In the place of a result: the function has not run, and the rerun engine has to run it."""

    reason: str


def replay_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy | NamedSchedule | None,
    offload_batch: OffloadBatch,
    offload_inputs: bool,
    report: CallReport | None = None,
) -> Any:
    """Run the function and return its result; `LeftToRerun` if others have to run it."""
    if _running.is_running:
        # The region around it sees every op, and drops what this one would.
        return function(*args, **kwargs)
    obstacle = _obstacle()
    if obstacle is not None:
        return _leave(obstacle, report)
    flags = read_flags()
    try:
        sends_away = (offload_batch.chosen, offload_inputs)
        signature = signature_of(function, args, kwargs, policy, sends_away, flags)
        entry = entry_of(function, signature)
    except UnsupportedArgument as error:
        return _leave(error.args[0], report)
    if entry.fallback is not None:
        return _leave(entry.fallback, report)
    observer = observing.observer
    if observer is not None and report is None:
        report = CallReport()
    call = _Call(function, args, kwargs, policy or _NOTHING, offload_inputs, report)
    remat = Rematerializer(offload_batch, flags)
    if report is not None:
        report.remat = remat
    if isinstance(policy, NamedSchedule):
        remat.begin = policy.begin
    if observer is None or report is None:
        return _run(call, remat, entry)
    report.policy = policy if isinstance(policy, Policy) else None
    with observer.region("replay", function, None, report):
        return _run(call, remat, entry)


def _leave(reason: str, report: CallReport | None) -> LeftToRerun:
    """Leave a region to another engine. Warns, unless the caller gets a report."""
    if isinstance(reason, UnsupportedTensor) and report is None:
        _warn_of_fallback(reason)
    if observing.observer is not None:
        observing.observer.fell_back(reason)
    return LeftToRerun(reason)


def _run(call: _Call, remat: Rematerializer, entry: CacheEntry) -> Any:
    _running.is_running = True
    try:
        recording = entry.recording  # once: another thread may change it
        if recording is None:
            return _record(call, remat, entry)
        return _check(call, remat, recording, entry)
    finally:
        _running.is_running = False


def observe_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wrap: Callable[[Recorder, Rematerializer], Hooks],
) -> tuple[Any, Recording]:
    """Record a call that keeps as little as possible, with the caller's own saved-tensor hooks.

    ``wrap`` is given what records the call and what recomputes in backward, and returns the hooks.
    """
    remat = Rematerializer(OffloadBatch(), read_flags())
    recorder = _Call(function, args, kwargs, NamedSchedule(), False).recorder(remat)
    _running.is_running = True
    push_saved_tensor_hooks(*wrap(recorder, remat))
    try:
        with recorder:
            out = function(*args, **kwargs)
    finally:
        pop_saved_tensor_hooks()
        _running.is_running = False
    return out, recorder.finish(out)


@dataclass(eq=False)
class _Call:
    """A function with its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    policy: Policy | NamedSchedule
    offload_inputs: bool
    #: What the caller learns about it.
    report: CallReport | None = None

    @property
    def is_planned(self) -> bool:
        """Whether it follows a plan, under which no call may hold more than others."""
        return isinstance(self.policy, NamedSchedule)

    def recorder(
        self, remat: Rematerializer, earlier: Rematerializer | None = None, done: int = 0
    ) -> Recorder:
        """What records the call, or the rest of it after ``done`` ops of ``earlier``."""
        is_whole = earlier is None
        query: PolicyCall | ScheduleQuery
        if isinstance(self.policy, NamedSchedule):
            before = () if earlier is None else earlier.graph.ops[:done]
            query = ScheduleQuery(self.policy, self.function, before)
        else:
            values = (*self.args, *self.kwargs.values())
            query = PolicyCall(self.policy, self.function, values, checks=is_whole)
        # The rest hardly ever starts from an input, and then that was offloaded before.
        return Recorder(remat, query, self.offload_inputs and is_whole, earlier)

    def record_rest(self, earlier: Rematerializer, done: int, stack: ExitStack) -> Recorder | None:
        """Start to record the rest of the call after ``done`` ops, until ``stack`` is closed.

        None if that is not possible. Without this everything that follows would be held, and the
        call that differs would be the one that runs out of memory.
        """
        if isinstance(self.policy, Policy) and rulebook_of(self.policy).modules:
            return None  # it is not known which modules are being called
        remat = Rematerializer(earlier.offload_batch, earlier.flags)
        recorder = self.recorder(remat, earlier, done)
        if self.report is not None:
            self.report.rest = remat
        push_saved_tensor_hooks(observed_pack(recorder.pack), remat.unpack)
        stack.callback(pop_saved_tensor_hooks)
        stack.enter_context(recorder)
        return recorder

    def run(self, mode: Recorder | Checker, remat: Rematerializer) -> Any:
        """Call the function under ``mode``."""
        push_saved_tensor_hooks(observed_pack(mode.pack), remat.unpack)
        try:
            with mode:
                return self.function(*self.args, **self.kwargs)
        finally:
            pop_saved_tensor_hooks()


def _record(call: _Call, remat: Rematerializer, entry: CacheEntry) -> Any:
    recorder = call.recorder(remat)
    out = call.run(recorder, remat)
    recording = recorder.finish(out)
    if not recording.is_supported:
        assert recording.reason is not None
        entry.fallback = recording.reason
        if call.report is None:
            _warn_of_fallback(recording.reason)
    if call.report is not None:
        call.report.recording = recording
    entry.recorded(recording, has_budget=call.is_planned)
    if call.report is not None:
        _tell_outcome(call.report, entry, recording.reason)
        call.report.is_rehearsal = entry.recording is not None or entry.fallback is not None
    return out


def _check(call: _Call, remat: Rematerializer, recording: Recording, entry: CacheEntry) -> Any:
    if recording.expected is None:
        recording.expected = checked_steps(recording)
    remat.follow(recording.graph, recording.schedule)
    checker = Checker(recording, recording.expected, remat, call.offload_inputs, call.record_rest)
    out = call.run(checker, remat)
    difference = checker.finish(out)
    if difference is None:
        remat.confirm()
    elif call.report is not None:
        _tell_rest(call.report, checker, recording)
    entry.checked(None if difference == recording.reason else difference)
    if call.report is not None:
        _tell_outcome(call.report, entry, difference)
    return out


def _tell_outcome(report: CallReport, entry: CacheEntry, stopped: str | None) -> None:
    report.stopped, report.unsettled = stopped, entry.unsettled


def _tell_rest(report: CallReport, checker: Checker, recording: Recording) -> None:
    """Report a call that differed from the recording."""
    report.difference = checker.difference
    report.before = recording.graph.until(checker.done)
    report.calls = [call for call in recording.calls if call.ops[1] <= checker.done]
    report.recording = checker.recorded
    # A call that was not recorded to its end is held from there on, as it was when recorded.
    report.is_unrecorded = checker.is_unrecorded and checker.difference != recording.reason


_warned: set[str] = set()


def _warn_of_fallback(reason: str) -> None:
    """Warn once that a region is rerun, and why."""
    if reason not in _warned:
        _warned.add(reason)
        warn_user(
            f"engine='replay' does not support {reason}: the region is run by the rerun engine"
        )
