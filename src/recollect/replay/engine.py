"""Runs a region with the replay engine (R6 to R9), or falls back to rerun.

The first call with a signature is recorded, later ones are checked. After a difference, such as
another branch, the rest of a checked call is recorded, and the next call from its start.

Replay falls back to rerun inside other regions, modes and transforms (`obstacle_around`), and for
unsupported tensors: `replay_region` then returns `LeftToRerun` with the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from recollect._torch.autograd import (
    current_operation,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks_active,
)
from recollect._torch.devices import is_capturing
from recollect._torch.dynamo import is_compiling
from recollect._torch.modes import (
    foreign_function_modes,
    forward_ad_active,
    is_transforming,
    nothing_around,
)
from recollect._torch.modules import sharded_part
from recollect._torch.tensors import UnsupportedTensor
from recollect.checks.place import warn_user
from recollect.observer import observed_pack, observing
from recollect.policy import nothing
from recollect.policy.op_info import tensors_in
from recollect.policy.policy_call import PolicyCall, rulebook_of
from recollect.policy.rules import Policy
from recollect.replay.check import Checker
from recollect.replay.function_call import FunctionCall
from recollect.replay.named_schedule import NamedSchedule, ScheduleQuery
from recollect.replay.record import Recorder
from recollect.replay.recorded_graph import RecordedGraph
from recollect.replay.recording import Recording
from recollect.replay.recording_cache import CacheEntry, UnsupportedArgument, entry_of
from recollect.replay.rematerialize import Rematerializer
from recollect.state.flags import read_flags
from recollect.store.offload_batch import OffloadBatch

#: Saved-tensor hooks: pack and unpack.
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_NOTHING = nothing()
_UNWATCHED = nullcontext()


class _Running(threading.local):
    #: Whether this thread is in a region of this engine.
    is_running = False


_running = _Running()


def obstacle_around() -> str | None:
    """Why replay falls back to rerun where this call is made; None if it need not."""
    if saved_tensor_hooks_active():
        # The outer region needs the same saved tensors every time, but a recorded and a checked
        # call save different ones.
        return "it is inside another region, or inside saved-tensor hooks"
    if foreign_function_modes():
        return "it is inside a function mode, which may do anything"
    if is_compiling():
        return "a compiler traces it"
    if is_transforming() or forward_ad_active():
        return "it is inside a transform of torch.func, or forward-mode differentiation"
    if is_capturing():
        return "a CUDA graph captures it, and meanwhile generators cannot be read"
    return None


@dataclass(eq=False)
class CallReport:
    """What the engine reports about a call."""

    #: Holds the call's values; None if replay fell back to rerun.
    remat: Rematerializer | None = None
    #: Holds the values of the rest of the call, if it differed from the recording.
    rest: Rematerializer | None = None
    policy: Policy | None = None
    #: Why everything is held, or recorded, from some point on.
    stopped: str | None = None
    #: Why every call is recorded.
    unsettled: str | None = None
    #: Whether this call was recorded and the next one will be checked, or will fall back.
    is_rehearsal: bool = False
    #: What was recorded: the whole call, or the rest of one that differed from the recording.
    recording: Recording | None = None
    #: How it differed from the recording, if it did, and the ops and functions before that.
    difference: str | None = None
    before: RecordedGraph = field(default_factory=RecordedGraph)
    calls: list[FunctionCall] = field(default_factory=list)
    #: Whether the rest could not be recorded, so that all its saved tensors are held.
    is_unrecorded: bool = False
    #: One for each region that the call ran, if it is not one region itself.
    unit_reports: list[CallReport] = field(default_factory=list)


class LeftToRerun(NamedTuple):
    """Returned instead of a result: the function has not run, and replay falls back to rerun."""

    reason: str


def replay_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy | NamedSchedule | None,
    offload_batch: OffloadBatch,
    offload_inputs: bool,
    report: CallReport | None = None,
    known: Recording | None = None,
) -> Any:
    """Run the function and return its result; `LeftToRerun` if replay cannot run it.

    ``known``: a recording of such a call under another schedule of a plan. The call is checked
    against it, and need not be recorded first.
    """
    if _running.is_running:
        # The outer region sees every op, and frees the same activations.
        return function(*args, **kwargs)
    flags = read_flags()
    by = policy if isinstance(policy, NamedSchedule) else None
    reason = None if nothing_around() and not is_capturing() else obstacle_around()
    if reason is None:
        try:
            offloads = (offload_batch.chosen, offload_inputs)
            entry = entry_of(function, args, kwargs, policy, offloads, flags)
        except UnsupportedArgument as error:
            return _leave(error.args[0], report)
        if entry.recording is None:
            _prepare(entry, function, by, known)
        reason = entry.fallback
    if reason is not None:
        return _leave(reason, report)
    recording = entry.recording  # once: another thread may change it
    observer = observing.observer
    if observer is not None and report is None:
        report = CallReport()
    remat = Rematerializer(offload_batch, flags, recording, None if by is None else by.begin)
    call = _Call(function, args, kwargs, policy or _NOTHING, offload_inputs, remat, report)
    watch: AbstractContextManager[object] = _UNWATCHED
    if report is not None:
        report.remat = remat
        if observer is not None:
            report.policy = policy if isinstance(policy, Policy) else None
            watch = observer.region("replay", function, None, report)
    _running.is_running = True
    try:
        with watch:
            return call.record(entry) if recording is None else call.check(recording, entry)
    finally:
        _running.is_running = False


def _prepare(
    entry: CacheEntry,
    function: Callable[..., Any],
    by: NamedSchedule | None,
    known: Recording | None,
) -> None:
    """Note in an entry without a recording what is known of the function all the same."""
    if by is None:
        # Sharded parameters. Recording would find them too, but that call would hold everything.
        module = getattr(function, "__self__", function)
        if entry.is_new() and isinstance(module, torch.nn.Module):
            part = sharded_part(module)
            entry.fallback = None if part is None else UnsupportedTensor(part)
    elif known is not None and entry.is_untried():
        if isinstance(known.reason, UnsupportedTensor):
            entry.fallback = known.reason
        else:
            entry.give(known.under(by))


def _leave(reason: str, report: CallReport | None) -> LeftToRerun:
    """Fall back to rerun. Warns of an unsupported tensor, unless the caller gets a report.

    Obstacles are silent, since they are the caller's choice; `explain` shows them.
    """
    if isinstance(reason, UnsupportedTensor) and report is None:
        _warn_of_fallback(reason)
    if observing.observer is not None:
        observing.observer.fell_back(reason)
    return LeftToRerun(reason)


def observe_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wrap: Callable[[Recorder, Rematerializer], Hooks],
    by: NamedSchedule | None = None,
    blocks: Iterable[torch.nn.Module] = (),
) -> tuple[Any, Recording]:
    """Record a call with the caller's own saved-tensor hooks.

    Args:
        function: The region.
        args: Its arguments.
        kwargs: Its keyword arguments.
        wrap: Makes the saved-tensor hooks from the recorder and the rematerializer.
        by: What is kept; by default as little as possible.
        blocks: Modules whose outputs are kept too.
    """
    by = by or NamedSchedule()
    offload_batch = OffloadBatch(host=by.store, last_first=True)
    remat = Rematerializer(offload_batch, read_flags(), begin=by.begin)
    call = _Call(function, args, kwargs, by, False, remat)
    recorder = call.recorder()
    since = current_operation()
    _running.is_running = True
    try:
        with _outputs_kept(recorder, blocks):
            out = call.run(recorder, wrap(recorder, remat))
    finally:
        _running.is_running = False
    recording = recorder.finish(out)
    recording.nodes = current_operation() - since
    if by.offloaded:
        remat.offload_batch.release()
    return out, recording


@contextmanager
def _outputs_kept(recorder: Recorder, blocks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """A context that keeps the outputs of ``blocks``, as a schedule would."""
    wanted, thread = {id(block) for block in blocks}, threading.get_ident()
    if not wanted:
        yield
        return

    def keep(module: torch.nn.Module, _: Any, output: Any) -> None:
        if id(module) in wanted and threading.get_ident() == thread:
            with recorder.pause():
                for tensor in tensors_in([output]):
                    if tensor.requires_grad:
                        recorder.keep(tensor)

    handle = torch.nn.modules.module.register_module_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


@dataclass(eq=False)
class _Call:
    """One call of a region."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    policy: Policy | NamedSchedule
    offload_inputs: bool
    remat: Rematerializer
    report: CallReport | None = None

    def run(self, mode: Recorder | Checker, hooks: Hooks | None = None) -> Any:
        push_saved_tensor_hooks(*hooks or (observed_pack(mode.pack), self.remat.unpack))
        try:
            with mode:
                return self.function(*self.args, **self.kwargs)
        finally:
            pop_saved_tensor_hooks()

    def recorder(self) -> Recorder:
        query: PolicyCall | ScheduleQuery
        if isinstance(self.policy, NamedSchedule):
            query = ScheduleQuery(self.policy, self.function)
        else:
            query = PolicyCall(self.policy, self.function, (*self.args, *self.kwargs.values()))
        return Recorder(self.remat, query, self.offload_inputs)

    def record(self, entry: CacheEntry) -> Any:
        recorder = self.recorder()
        out = self.run(recorder)
        recording = recorder.finish(out)
        if isinstance(recording.reason, UnsupportedTensor):
            entry.fallback = recording.reason
            if self.report is None:
                _warn_of_fallback(recording.reason)
        # Under a plan no call may hold more than the others.
        entry.recorded(recording, has_budget=isinstance(self.policy, NamedSchedule))
        if self.report is not None:
            self.report.recording = recording
            self.report.stopped, self.report.unsettled = recording.reason, entry.unsettled
            self.report.is_rehearsal = entry.recording is not None or entry.fallback is not None
        return out

    def check(self, recording: Recording, entry: CacheEntry) -> Any:
        checker = Checker(recording, self.remat, self.offload_inputs, self.record_rest)
        out = self.run(checker)
        difference = checker.finish(out)
        # If the recording ends early, a checked call ends the same way: that is no difference.
        is_new = difference is not None and difference != recording.reason
        entry.checked(difference if is_new else None)
        if (report := self.report) is not None:
            report.stopped, report.unsettled = difference, entry.unsettled
            if difference is not None:
                report.difference = difference
                report.before = recording.graph.until(checker.done)
                report.calls = [call for call in recording.calls if call.ops[1] <= checker.done]
                report.recording = checker.rest_recording
                report.is_unrecorded = checker.is_unrecorded and is_new
        return out

    def record_rest(self, done: int, stack: ExitStack) -> Recorder | None:
        """Record the rest of the call after ``done`` ops, until ``stack`` is closed.

        Returns None if that is not possible: then everything saved from here on is held.
        """
        query: PolicyCall | ScheduleQuery
        if isinstance(self.policy, NamedSchedule):
            query = ScheduleQuery(self.policy, self.function, self.remat.graph.ops[:done])
        elif rulebook_of(self.policy).modules:
            return None  # the modules entered before are unknown
        else:
            query = PolicyCall(self.policy, checks=False)
        rest = Rematerializer(self.remat.offload_batch, self.remat.flags)
        # Inputs are rarely read again in the rest, and are already offloaded then.
        recorder = Recorder(rest, query, False, self.remat)
        if self.report is not None:
            self.report.rest = rest
        push_saved_tensor_hooks(observed_pack(recorder.pack), rest.unpack)
        stack.callback(pop_saved_tensor_hooks)
        stack.enter_context(recorder)
        return recorder


@cache
def _warn_of_fallback(reason: str) -> None:
    """Warn once that a region is rerun, and why."""
    warn_user(
        f"engine='replay' does not support {reason}: the region falls back to the rerun engine"
    )
