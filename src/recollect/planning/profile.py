"""Recording one step: what is run, what it makes, how long that lives, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from recollect.graph.graph import Graph, Link
from recollect.graph.simulate import simulate_plain
from recollect.modules import bound_to, copy_signature
from recollect.planning.batch import tensors_of_batch
from recollect.planning.build import build_graph
from recollect.planning.footprint import tally_of
from recollect.planning.outline import outline_of
from recollect.planning.rates import Rates
from recollect.planning.script import Script
from recollect.planning.step import Step
from recollect.planning.timing import Timing
from recollect.planning.trace import Trace
from recollect.replay.engine import Hooks, observe_region
from recollect.replay.record import Recorder
from recollect.replay.recording import Recording
from recollect.replay.rematerialize import Recall

__all__ = ["Profile", "graph_of", "observed", "profile_step", "trace_in_little", "trace_step"]

#: Seconds that the engine takes to run an op again, beside the op, as long as nothing is measured.
_RERUN_COST = 6e-6
#: If ops alone are measured to take so many times what the step takes, the figures are wrong.
_ABSURD = 3.0


@dataclass(frozen=True)
class Profile:
    """What is known of a step.

    Args:
        graph: The step.
        plain_peak: The most bytes that it allocates without a plan: measured, if it could run.
        seconds: What it takes then.
        timing: What was measured of that, if it did run.
        measured_peak: The same of its peak.
        untimed: The step with the times of ops as each takes alone.
        was_run: Whether it did run; else all of this is predicted.
        can_run: Whether it can run under a plan: its tensors have memory.
        script: The ops that it ran, for batches of other shapes.
    """

    graph: Graph
    plain_peak: int
    seconds: float
    was_run: bool
    can_run: bool
    script: Script | None = None
    timing: Timing | None = None
    measured_peak: int | None = None
    untimed: Graph | None = None

    def timed(self, seconds: float) -> Graph:
        """The graph of a step that takes ``seconds``."""
        return self.graph if self.untimed is None else _timed(self.untimed, seconds)


def profile_step(step: Step, link: Link | None = None) -> Profile:
    """Run the step a few times, and write it down."""
    # What is made once (state of the optimizer, workspaces of libraries) is there afterwards.
    step.rehearse()
    measured_peak = step.measured_peak()
    plain_peak = measured_peak + step.spare_blocks()
    timing = step.measured_seconds()
    rates = Rates(step.device)
    graph, script = trace_step(step, rates, link)
    if graph.plain_seconds > _ABSURD * timing.seconds:
        # Ops were timed while something else ran, or the step will not take as long again.
        rates.forget()
        rates, timing = Rates(step.device), step.measured_seconds()
        graph, script = trace_step(step, rates, link)
    return Profile(
        graph=_timed(graph, timing.seconds),
        plain_peak=plain_peak,
        seconds=timing.seconds,
        was_run=True,
        can_run=True,
        script=script,
        timing=timing,
        measured_peak=measured_peak,
        untimed=graph,
    )


def trace_in_little(step: Step, link: Link | None = None) -> Profile:
    """Write down a step for which there is no room without a plan: all that can be is let go."""
    rates = Rates(step.device)
    trace_step(step, rates, link)  # what is made once is there now
    graph, script = trace_step(step, rates, link)
    plain = simulate_plain(graph)
    return Profile(
        graph=graph,
        plain_peak=plain.peak,
        seconds=plain.seconds,
        was_run=False,
        can_run=True,
        script=script,
    )


def trace_step(step: Step, rates: Rates, link: Link | None = None) -> tuple[Graph, Script]:
    """Run the step once, watched. Keeps as little as can be."""
    trace = Trace(rates, Script(tensors_of_batch(step.args, step.kwargs), step.static()))
    base = step.base()
    recordings: list[Recording] = []

    def wrap(recorder: Recorder, recall: Recall) -> Hooks:
        trace.count_ops = recorder.count_ops
        return partial(trace.pack, recorder.pack), partial(trace.unpack, recall.unpack)

    with observed(step.model, trace, recordings, wrap), trace:
        step.run(before_backward=partial(setattr, trace, "is_backward", True))
    rates.settle()
    return graph_of(step, trace, recordings, base, link)


def graph_of(
    step: Step, trace: Trace, recordings: list[Recording], base: int, link: Link | None
) -> tuple[Graph, Script]:
    """The graph of a step that was watched, and its script."""
    trace.script.close(trace.sizes)
    if len(recordings) != 1:
        times = "not once" if not recordings else f"{len(recordings)} times"
        raise ValueError(
            f"model: a step calls this {type(step.model).__name__} {times}. A plan is for a model "
            "whose forward runs once in a step: pass the part that does, such as its decoder"
        )
    on_device = trace.rates.device.type == "cuda"
    graph = build_graph(trace, recordings[0], base=base, on_device=on_device, link=link)
    graph = replace(
        graph,
        outline=outline_of(recordings[0]),
        tally=tally_of(recordings[0]),
        spread=trace.rates.spread,
    )
    return graph, trace.script


@contextmanager
def observed(
    model: nn.Module,
    trace: Trace,
    recordings: list[Recording],
    wrap: Callable[[Recorder, Recall], Hooks],
) -> Iterator[None]:
    """Have the forward of ``model`` recorded."""
    own = model.__dict__.get("forward")
    forward = bound_to(model, model.forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            output, recording = observe_region(forward, args, kwargs, wrap)
        finally:
            trace.count_ops = None
        recordings.append(recording)
        return output

    model.__dict__["forward"] = copy_signature(model.forward, run)
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if own is not None:
            model.__dict__["forward"] = own


def _timed(graph: Graph, seconds: float) -> Graph:
    """The graph with the times of ops such that the plain step takes ``seconds``.

    What ops take alone does not add up to what a step takes. If it takes longer, somebody decides
    between the ops what comes next; if not, they overlap.
    """
    total = graph.plain_seconds
    if seconds >= total:
        between = (seconds - total) / len(graph.moments)
        moments = [replace(m, seconds=m.seconds + between) for m in graph.moments]
        return replace(graph, moments=moments, rerun_cost=min(between, _RERUN_COST))
    factor = seconds / total
    moments = [replace(m, seconds=m.seconds * factor) for m in graph.moments]
    ops = [replace(op, seconds=op.seconds * factor) for op in graph.ops]
    return replace(graph, moments=moments, ops=ops)
