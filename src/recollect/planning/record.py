"""Recording a training step: its ops, their memory, how long that lives, and what it costs (P2).

The step runs plain if there is room for it, else with as little kept as possible. Where there is no
room for that either, or on the meta device, it is traced on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from recollect._torch.tensors import fake_tensors
from recollect.graph.graph import Graph, Link
from recollect.graph.simulate import simulate_plain
from recollect.modules import unwrap_module, wrap_module
from recollect.planning.batch import tensors_of_batch
from recollect.planning.build import build_graph
from recollect.planning.estimate import outline_of, tally_of
from recollect.planning.fakes import FakeStep, nothing_fake_left
from recollect.planning.prices import Prices
from recollect.planning.rescale import CannotPredict
from recollect.planning.sampling import Timing
from recollect.planning.step import TrainingStep, is_out_of_memory
from recollect.planning.trace import StepTrace, Trace
from recollect.replay.engine import Hooks, observe_region
from recollect.replay.record import Recorder
from recollect.replay.recording import Recording
from recollect.replay.rematerialize import Rematerializer

__all__ = ["Profile", "predict_step", "profile_step", "record_step", "trace_step"]

_Tensor = torch.Tensor
#: Seconds that the engine takes to run an op again, beside the op, until that is measured.
_RERUN_COST = 6e-6
#: If ops alone are measured to take so many times what the step takes, the figures are wrong.
_ABSURD = 3.0


@dataclass(frozen=True)
class Profile:
    """A recorded step."""

    graph: Graph  #: the step
    plain_peak: int  #: peak of the step without a plan: measured if it could run, else simulated
    seconds: float  #: its time then
    can_run: bool = True  #: whether it can run under a plan: its tensors have memory
    trace: StepTrace | None = None  #: all of its ops, to be rescaled to other batches
    #: The measured time of the plain step; None if there was no room for it.
    timing: Timing | None = None
    measured_peak: int | None = None  #: its measured peak
    untimed: Graph | None = None  #: the graph with the time that each op takes alone

    def timed(self, seconds: float) -> Graph:
        """The graph of a step that takes ``seconds``."""
        return self.graph if self.untimed is None else _timed(self.untimed, seconds)


def record_step(step: TrainingStep, link: Link | None) -> Profile:
    """Record the step in the best way that there is room for."""
    for record in (profile_step, profile_with_least):
        if step.device.type == "meta":
            break
        try:
            with step.undone(rehearses=record is profile_step):
                return record(step, link)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        step.free_memory()
    with nothing_fake_left(step.caches), step.undone():
        return predict_step(step, link)


def profile_step(step: TrainingStep, link: Link | None = None) -> Profile:
    """Run the plain step a few times, measure and record it."""
    # What is allocated once (optimizer state, workspaces of libraries) is there afterwards.
    step.rehearse()
    measured_peak = step.measured_peak()
    plain_peak = measured_peak + step.spare_blocks()
    timing = step.measured_seconds()
    prices = Prices(step.device)
    graph, trace = trace_step(step, prices, link)
    if graph.plain_seconds > _ABSURD * timing.seconds:
        # Ops were timed while something else ran, or the step will not take as long again.
        prices.forget()
        timing = step.measured_seconds()
        graph, trace = trace_step(step, Prices(step.device), link)
    return Profile(
        graph=_timed(graph, timing.seconds),
        plain_peak=plain_peak,
        seconds=timing.seconds,
        trace=trace,
        timing=timing,
        measured_peak=measured_peak,
        untimed=graph,
    )


def profile_with_least(step: TrainingStep, link: Link | None = None) -> Profile:
    """Record a step that does not fit plain: it runs with as little kept as possible."""
    prices = Prices(step.device)
    trace_step(step, prices, link)  # what is allocated once is there afterwards
    return _simulated(*trace_step(step, prices, link))


def predict_step(step: TrainingStep, link: Link | None = None) -> Profile:
    """Record the step on fake tensors.

    Raises `CannotPredict` if its code depends on values.
    """
    try:
        with fake_tensors() as mode, torch.enable_grad():
            fake = FakeStep(step, mode)
            prices = Prices(fake.device, fakes=True)
            traced = _traced(fake, prices, lambda _: _fake_of_ticket)
    except Exception as error:
        # The model and the loss are the user's, and may raise anything where there are no values.
        text = str(error).partition("\n")[0]
        raise CannotPredict(
            f"model: the step of this {type(step.model).__name__} cannot be recorded without "
            f"running it ({type(error).__name__}: {text})"
        ) from error
    return _simulated(*_graph_of(traced, link), can_run=step.device.type != "meta")


def _simulated(graph: Graph, trace: StepTrace, *, can_run: bool = True) -> Profile:
    plain = simulate_plain(graph)
    return Profile(graph, plain.peak, plain.seconds, can_run, trace)


def trace_step(
    step: TrainingStep, prices: Prices, link: Link | None = None
) -> tuple[Graph, StepTrace]:
    """Run the step once with as little kept as possible, and record all of it."""
    return _graph_of(_traced(step, prices, lambda remat: remat.unpack), link)


@dataclass(frozen=True)
class _Traced:
    """A step that ran once.

    ``recordings``: of the forward of the model; ``base``: bytes before the step.
    """

    step: TrainingStep
    trace: StepTrace
    recordings: list[Recording]
    base: int
    prices: Prices


def _traced(
    step: TrainingStep,
    prices: Prices,
    unpack_of: Callable[[Rematerializer], Callable[[Any], _Tensor]],
) -> _Traced:
    """Run the step once. ``unpack_of`` gives the function by which backward gets saved tensors."""
    trace = Trace(prices, tensors_of_batch(step.args, step.kwargs), step.static())
    recordings: list[Recording] = []
    base = step.base()

    def hooks(recorder: Recorder, remat: Rematerializer) -> Hooks:
        trace.count_ops = recorder.count_ops
        return partial(trace.pack, recorder.pack), partial(trace.unpack, unpack_of(remat))

    def observe(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            output, recording = observe_region(function, args, kwargs, hooks)
        finally:
            trace.count_ops = None
        recordings.append(recording)
        return output

    wrap_module(step.model, observe)
    try:
        with trace:
            step.run(before_backward=partial(setattr, trace, "is_backward", True))
    finally:
        unwrap_module(step.model)
    prices.settle()
    return _Traced(step, trace.finish(), recordings, base, prices)


def _graph_of(found: _Traced, link: Link | None) -> tuple[Graph, StepTrace]:
    if len(found.recordings) != 1:
        times = "not once" if not found.recordings else f"{len(found.recordings)} times"
        raise ValueError(
            f"model: a step calls this {type(found.step.model).__name__} {times}. A plan is for a "
            "model whose forward runs once in a step: pass the part that does, such as its decoder"
        )
    (recording,) = found.recordings
    on_device = found.prices.device.type == "cuda"
    graph = build_graph(found.trace, recording, base=found.base, on_device=on_device, link=link)
    outline, tally = outline_of(recording), tally_of(recording)
    return replace(graph, outline=outline, tally=tally, spread=found.prices.spread), found.trace


def _fake_of_ticket(ticket: list[Any]) -> _Tensor:
    """A fake tensor like the one that was saved, without recomputing it."""
    tensor, _, view = ticket
    if view is None or tensor is not None:
        return tensor  # type: ignore[no-any-return]
    size, stride, _, dtype, _ = view.layout
    return torch.empty_strided(size, stride, dtype=dtype, device=view.value.device)


def _timed(graph: Graph, seconds: float) -> Graph:
    """The graph with the times of ops such that the plain step takes ``seconds``.

    The times of single ops do not add up to that of a step. If a step takes longer, the rest is the
    overhead between ops; if it takes less, ops overlap.
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
