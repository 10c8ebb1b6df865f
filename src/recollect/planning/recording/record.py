"""Records a training step: its ops with their costs, its storages and their lifetimes (P2).

The step runs plain if there is room for that, else with as little kept as possible. If there is no
room for that either, or on the meta device, it is traced on fake tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from recollect._torch.fsdp import shards_of
from recollect._torch.tensors import fake_tensors
from recollect.checks.place import WarnOnce
from recollect.errors import CheckpointError
from recollect.graph.graph import Graph, Link, Schedule
from recollect.graph.simulate import simulate, simulate_plain
from recollect.modules import unwrap_module, wrap_module
from recollect.planning.budget import capacity
from recollect.planning.distributed import communicating_op
from recollect.planning.recording.build import build_graph
from recollect.planning.recording.fakes import FakeStep, no_fakes_left
from recollect.planning.recording.prices import Prices
from recollect.planning.recording.sampling import Timing, timing_of
from recollect.planning.recording.step import TrainingStep, is_out_of_memory
from recollect.planning.recording.trace import StepTrace, TraceMode
from recollect.planning.regions.merge import UnitRecord, merged
from recollect.planning.regions.module_regions import run_regions, unwrap_modules, wrap_modules
from recollect.planning.regions.sharded import play_units, units_of
from recollect.replay.engine import CallReport, Hooks, LeftToRerun, observe_region, replay_region
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.record import Recorder
from recollect.replay.recorded_graph import RecordedGraph
from recollect.replay.recording import Recording
from recollect.replay.rematerialize import Rematerializer
from recollect.store.offload_batch import OffloadBatch

_Tensor = torch.Tensor
#: Seconds that the engine adds to an op that it runs again, until that is measured.
_RERUN_COST = 6e-6
#: If the times of ops add up to this many times the time of the step, they are wrong.
_ABSURD = 3.0
#: The part of a device's memory up to which a sharded step is run plain, and how often it is timed.
_ROOMY = 0.9
_ROUNDS = 3

#: Whether a condition holds in all processes, given whether it holds in this one.
Agree = Callable[[bool], bool]


class CannotPredict(CheckpointError):
    """A step cannot be traced on tensors without values."""


@dataclass(frozen=True)
class Profile:
    """A recorded step."""

    graph: Graph
    made: Mapping[str, int]  #: the bytes that forward made, by module
    stopped: str | None  #: why forward was not recorded to its end, if it was not
    plain_peak: int  #: the peak without a plan: measured if there was room, else simulated
    seconds: float  #: the time without a plan: the same
    can_run: bool = True  #: whether it can run under a plan: not on the meta device
    #: Measured times of the plain step; None if there was no room to run it.
    timing: Timing | None = None
    measured_peak: int | None = None
    untimed: Graph | None = None  #: the graph with the times of single ops

    def timed(self, seconds: float) -> Graph:
        """The graph of a step that takes ``seconds``."""
        return self.graph if self.untimed is None else _timed(self.untimed, seconds)

    def measured(self, timing: Timing, peak: int, plain_peak: int) -> Profile:
        """The profile with what was measured of the plain step."""
        return replace(
            self,
            graph=self.timed(timing.seconds),
            plain_peak=plain_peak,
            seconds=timing.seconds,
            timing=timing,
            measured_peak=peak,
        )


def record_step(step: TrainingStep, link: Link | None, agree: Agree = bool) -> Profile:
    """Record the step in the best way that there is room for.

    ``agree``: combines a condition over all processes that record the step.
    """
    if step.is_shared:
        with step.undone(logs_writes=True):
            return profile_sharded(step, agree)
    for record in (profile_step, profile_with_least):
        if step.device.type == "meta":
            break
        try:
            with step.undone(logs_writes=record is profile_step):
                return record(step, link)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        step.free_memory()
    return record_unrun(step, link)


def record_unrun(step: TrainingStep, link: Link | None) -> Profile:
    """Record the step on fake tensors: it is not run, and takes no memory."""
    with no_fakes_left(step.caches), step.undone():
        return predict_step(step, link)


def record_under(step: TrainingStep, link: Link | None, by: NamedSchedule | None = None) -> Profile:
    """Record the step as it runs under a schedule: the plain step is not run.

    ``by``: by default the outputs of its blocks are kept alone. On the meta device nothing runs.
    """
    if step.device.type == "meta":
        return record_unrun(step, link)
    with step.undone():
        return profile_with_least(step, link, by)


def profile_step(step: TrainingStep, link: Link | None = None) -> Profile:
    """Run the plain step a few times: measure, time and trace it."""
    # This also allocates what is allocated once: optimizer state, workspaces of libraries.
    step.run_first()
    measured_peak = step.measured_peak()
    plain_peak = measured_peak + step.spare_blocks()
    timing = step.measured_seconds()
    prices = Prices(step.device)
    profile = trace_step(step, prices, link)
    if profile.seconds > _ABSURD * timing.seconds:
        # Either the ops were timed while something else ran, or the step is faster than usual.
        prices.forget()
        timing = step.measured_seconds()
        profile = trace_step(step, Prices(step.device), link)
    return profile.measured(timing, measured_peak, plain_peak)


def profile_with_least(
    step: TrainingStep, link: Link | None = None, by: NamedSchedule | None = None
) -> Profile:
    """Trace a step that does not fit plain: a schedule, or the outputs of its blocks, are kept."""
    prices, blocks = Prices(step.device), find_blocks(step.model) if by is None else ()
    trace_step(step, prices, link, blocks, by)  # allocates what is allocated once
    return trace_step(step, prices, link, blocks, by)


def profile_sharded(step: TrainingStep, agree: Agree = bool) -> Profile:
    """Record a step whose processes wait for each other: each runs it equally often.

    If one ran out of memory, the others would wait for it. So it runs with little memory first, and
    plain only if there is room for that everywhere.
    """
    model, device = step.model, step.device
    blocks, prices = find_blocks(model), Prices(device)
    # This also allocates what is allocated once: optimizer state, gathered parameters.
    wrap_module(model, partial(_run_least, units_of(model)))
    try:
        wrap_modules(model, units_of(model))
        step.run_first()
    finally:
        unwrap_modules(model)
        unwrap_module(model)
    profile = trace_step(step, prices, None, blocks)
    if not agree(profile.plain_peak <= _ROOMY * capacity(device)):
        return profile
    peaks = [step.measured_peak() for _ in range(_ROUNDS)]
    plain_peak = max(max(peaks) + step.spare_blocks(), min(peaks) + step.late_bytes())
    timing = timing_of([step.seconds() for _ in range(_ROUNDS)], long=True)
    return profile.measured(timing, max(peaks), plain_peak)


def _run_least(
    units: tuple[str, ...],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call the forward of a model with as little kept as possible."""
    by, report = NamedSchedule(units=units), CallReport()
    if units:
        return play_units(function, args, kwargs, by, WarnOnce(), report)
    result = replay_region(function, args, kwargs, by, OffloadBatch(), False, report)
    return function(*args, **kwargs) if type(result) is LeftToRerun else result


def predict_step(step: TrainingStep, link: Link | None = None) -> Profile:
    """Trace the step on fake tensors. Raises `CannotPredict` if its code depends on values."""
    try:
        with fake_tensors() as mode, torch.enable_grad():
            fake = FakeStep(step, mode)
            # What is planned on the meta device of a CPU would run for minutes there.
            estimates = step.device.type == "meta" and fake.device.type == "cpu"
            prices = Prices(fake.device, fakes=True, estimates=estimates)
            traced = _run_traced(fake, prices, lambda _: _unpack_fake)
            step.has_other_hooks |= fake.has_other_hooks
    except Exception as error:
        # The model and the loss are the user's code, and may raise anything without values.
        text = str(error).partition("\n")[0]
        raise CannotPredict(
            f"model: the step of this {type(step.model).__name__} cannot be recorded without "
            f"running it ({type(error).__name__}: {text}). If that is a mistake in the model or "
            "its config, mend it; else its code depends on values: plan on the device that it "
            "trains on"
        ) from error
    return _profile_of(step, prices, link, traced)


def simulated_profile(
    graph: Graph, made: Mapping[str, int], stopped: str | None, *, can_run: bool = True
) -> Profile:
    """The profile of a step that was never run plain."""
    plain = simulate_plain(graph)
    return Profile(graph, made, stopped, plain.peak, plain.seconds, can_run, untimed=graph)


def trace_step(
    step: TrainingStep,
    prices: Prices,
    link: Link | None = None,
    blocks: Iterable[nn.Module] = (),
    by: NamedSchedule | None = None,
) -> Profile:
    """Run the step once with only a schedule and the outputs of ``blocks`` kept, and trace it."""
    traced = _run_traced(step, prices, lambda remat: remat.unpack, blocks, by)
    return _profile_of(step, prices, link, traced)


class _Traced(NamedTuple):
    trace: StepTrace
    recordings: list[Recording]  #: of each call of its forward
    base: int  #: the bytes before it


def _run_traced(
    step: TrainingStep,
    prices: Prices,
    unpack_of: UnpackOf,
    blocks: Iterable[nn.Module] = (),
    by: NamedSchedule | None = None,
) -> _Traced:
    """Run the step once. ``unpack_of`` gives the function that backward unpacks tensors by."""
    trace = TraceMode(prices, shards_of(step.model))
    recordings: list[Recording] = []
    base, units = step.base_bytes(), units_of(step.model)
    observer = ForwardObserver(trace, by or NamedSchedule(), [*blocks], units, unpack_of)

    def observe(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output, recording, _ = observer.call(function, args, kwargs)
        recordings.append(recording)
        return output

    wrap_module(step.model, observe)
    try:
        with trace:
            step.run()
    finally:
        unwrap_modules(step.model)
        unwrap_module(step.model)
    prices.finish()
    found = trace.finish()
    step.has_other_hooks |= trace.has_other_hooks
    base += step.note_collective(found.largest_collective)
    return _Traced(found, recordings, base)


def _profile_of(step: TrainingStep, prices: Prices, link: Link | None, traced: _Traced) -> Profile:
    if len(traced.recordings) != 1:
        times = "not once" if not traced.recordings else f"{len(traced.recordings)} times"
        raise ValueError(
            f"model: a step calls this {type(step.model).__name__} {times}. A plan is for a "
            "model whose forward runs once in a step: pass the part that does, such as its decoder"
        )
    (recording,) = traced.recordings
    talks = None if step.shards is None else communicating_op(step.model, recording)
    if talks is not None:
        raise ValueError(
            f"model: a region of its plan communicates with other processes by itself ({talks}), "
            "beside what fully_shard does, and before torch 2.13 a plan may miss that. Checkpoint "
            "blocks in place of a plan: recollect.checkpointed(block)"
        )
    graph = build_graph(
        traced.trace,
        traced.recordings,
        base=traced.base,
        on_device=prices.device.type == "cuda",
        link=link,
    )
    graph = replace(graph, spread=prices.spread, units=units_of(step.model))
    can_run = step.device.type != "meta"
    return simulated_profile(graph, bytes_by_module(recording), recording.reason, can_run=can_run)


# --- one forward ----------------------------------------------------------------------------------

#: Gives the function that backward unpacks tensors by.
UnpackOf = Callable[[Rematerializer], Callable[[Any], _Tensor]]


@dataclass
class ForwardObserver:
    """Records forwards of a model while a `TraceMode` traces the step."""

    trace: TraceMode
    by: NamedSchedule  #: what is kept
    blocks: list[nn.Module]  #: modules whose outputs are kept too
    units: tuple[str, ...]  #: the modules that are recorded, each by itself; empty: the whole is
    unpack_of: UnpackOf = lambda remat: remat.unpack
    _calls: Counter[str] = field(default_factory=Counter)
    _records: list[UnitRecord] = field(default_factory=list)
    _remat: Rematerializer | None = None

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Recording, Rematerializer | None]:
        """Call a forward, a method of the model.

        Returns what it returns, the recording, and what it holds if it was recorded as a whole.
        """
        self._calls.clear()
        if self.units:
            model: Any = getattr(function, "__self__", None)
            wrap_modules(model, self.units)  # if they are not
            output = run_regions(function, args, kwargs, self.units, self._observe)
        else:
            output = self._observe("", function, args, kwargs)
        self.trace.note_end()
        records, self._records = self._records, []
        remat, self._remat = self._remat, None
        if self.units:
            return output, merged(records), None
        return output, records[0].recording, remat

    def _observe(
        self, path: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Call the forward of the unit at ``path``; if that is empty, of the model."""
        if path and not torch.is_grad_enabled():
            return function(*args, **kwargs)
        trace, before = self.trace, self.trace.saved_so_far
        by = self.by.within(path, self._calls[path]) if path else self.by
        self._calls[path] += 1
        try:
            output, recording = observe_region(function, args, kwargs, self._hooks, by, self.blocks)
        finally:
            trace.end_region()
        trace.note_output(output)
        self._records.append(UnitRecord(recording, trace.saved_so_far - before))
        return output

    def _hooks(self, recorder: Recorder, remat: Rematerializer) -> Hooks:
        """The saved-tensor hooks of a recorded call, which the trace sees too."""
        self._remat = remat
        unpack = partial(self.trace.unpack, self.unpack_of(remat))
        self.trace.begin_region(recorder.count_ops, unpack)
        return partial(self.trace.pack, recorder.pack), unpack


# --- what recordings say --------------------------------------------------------------------------


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that a model applies one after the other, as far as its containers tell."""
    blocks: list[nn.Module] = []
    pending = [model]
    for module in pending:  # the list grows in this loop
        children = [*module.children()]
        if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            pending += children
        elif any([*each.children()] for each in children):
            blocks += children
        else:  # single layers: their results are nearly all that there is
            blocks += children[:: math.isqrt(len(children)) or 1]
    return blocks or [*model.children()]


def bytes_made(report: CallReport, known: Mapping[str, int]) -> dict[str, int]:
    """The bytes that the ops of a call made, by module, if it was recorded at all.

    ``known``: the same of the call that was planned, for units that ran as they did then.
    """
    if report.unit_reports:
        made = dict(known)
        for part in report.unit_reports:
            made |= {} if part.recording is None else bytes_made(part, {})
        return made
    graphs = [] if report.difference is None else [report.before]
    return _made_in([*graphs, *([] if report.recording is None else [report.recording.graph])])


def schedule_of(recordings: Iterable[Recording]) -> Schedule:
    """The schedule by which the forwards of a step ran."""
    ops = [op for recording in recordings for op in recording.graph.ops]
    return Schedule(frozenset(number for number, op in enumerate(ops) if op.planned is not None))


def peak_of_run(graph: Graph, recordings: Iterable[Recording]) -> int:
    """The simulated peak of the step that was traced, or of a graph like it."""
    ops = [op for recording in recordings for op in recording.graph.ops]
    # Of a block its output alone is held, which may be one of the results of an op.
    unheld = frozenset(
        value
        for op, recorded in zip(graph.ops, ops, strict=True)
        for value, place in zip(op.makes, op.places, strict=True)
        if recorded.planned is not None and place not in recorded.planned
    )
    return simulate(graph, schedule_of(recordings), unheld=unheld).peak


def bytes_by_module(recording: Recording) -> dict[str, int]:
    """The bytes that the ops of a forward made."""
    return _made_in([recording.graph])


def _made_in(graphs: Iterable[RecordedGraph]) -> dict[str, int]:
    made: Counter[str] = Counter()
    for recorded in graphs:
        for op in recorded.ops:
            path = "" if op.key is None else op.key.partition("|")[0]
            made[path] += sum(recorded.values[number].nbytes for number in op.makes)
    return dict(made)


def _unpack_fake(ticket: list[Any]) -> _Tensor:
    """A fake tensor like the saved one, without recomputing it."""
    tensor, _, view = ticket
    if view is None or tensor is not None:
        return tensor  # type: ignore[no-any-return]
    size, stride, _, dtype, _ = view.layout
    return torch.empty_strided(size, stride, dtype=dtype, device=view.value.device)


def _timed(graph: Graph, seconds: float) -> Graph:
    """The graph with times of ops that add up to ``seconds``, the time of the plain step.

    The measured times of single ops do not. If the step takes longer, the rest is overhead between
    ops; if it takes less, ops overlap.
    """
    total = graph.plain_seconds
    if seconds >= total:
        between = (seconds - total) / len(graph.events)
        events = [replace(m, seconds=m.seconds + between) for m in graph.events]
        return replace(graph, events=events, rerun_cost=min(between, _RERUN_COST))
    factor = seconds / total
    events = [replace(m, seconds=m.seconds * factor) for m in graph.events]
    ops = [replace(op, seconds=op.seconds * factor) for op in graph.ops]
    return replace(graph, events=events, ops=ops)
