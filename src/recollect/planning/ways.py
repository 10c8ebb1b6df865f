"""Running the step plain, under a schedule or with blocks checkpointed, and measuring it (P3).

The cost of the engine itself is measured in the same way: steps are timed plain, under a plan that
keeps everything, and under one that runs many ops again. The second minus the first is what the
engine costs in forward; the third minus the second, and minus the ops themselves, is what running
ops again costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import simulate
from recollect.modules import unwrap_module, wrap_module
from recollect.planning.blocks import unwrap_blocks, wrap_blocks
from recollect.planning.record import Profile
from recollect.planning.runner import WarnOnce, run_planned
from recollect.planning.sampling import Timing, timing_of
from recollect.planning.step import TrainingStep
from recollect.planning.watch import watch_output
from recollect.policy.op_sets import ATTENTION, MATMULS
from recollect.replay.engine import CallReport
from recollect.replay.named_schedule import NamedSchedule, trimmed
from recollect.state.streams import read_streams, settle_streams, write_streams

__all__ = ["Peaks", "Way", "expensive_ops", "peaks_under", "times_under", "with_overhead"]

#: How many steps are run to know a peak: one is recorded, one checked against that, one is known.
_STEPS = 3
#: Rounds of steps that are timed; and the seconds after which two have to do.
_LEAST, _MOST = 3, 8
_SECONDS = 6.0
#: The engine is not timed if this many seconds for each op were less than this part of the step.
_PER_OP = 50e-6
_LITTLE = 0.03


@dataclass(frozen=True)
class Way:
    """How the step is run."""

    by: NamedSchedule | None = None  #: None: plain

    @contextmanager
    def taken(
        self,
        model: nn.Module,
        told: WarnOnce,
        note: Callable[[int], None] | None = None,
        witnesses: list[CallReport] | None = None,
    ) -> Iterator[None]:
        """A context in which ``model`` is run so.

        ``note`` is given the bytes of its output that are there when backward reaches it;
        ``witnesses`` one for each call.
        """
        by = self.by
        if by is None:
            yield
            return

        def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
            report = CallReport()
            output = run_planned(function, args, kwargs, by, told, report)
            if witnesses is not None:
                report.remat = None  # which holds tensors: they would count in the next step
                witnesses.append(report)
            if note is not None:
                watch_output(output, lambda alive, _: note(alive))
            return output

        wrap_module(model, run)
        try:
            wrap_blocks(model, by.blocks)
            yield
        finally:
            unwrap_blocks(model)
            unwrap_module(model)


@dataclass(frozen=True)
class Peaks:
    """The peaks of steps, in bytes."""

    measured: int  #: the highest
    expected: int  #: the same, with room for what other steps like them may take more
    #: Bytes of the model's output that were there when backward reached it, if it did.
    output: int | None
    each: tuple[int, ...] = ()  #: the peak of each step


def peaks_under(
    way: Way,
    step: TrainingStep,
    told: WarnOnce,
    progress: Callable[[float], None],
    witnesses: list[CallReport] | None = None,
) -> Peaks:
    """The peaks of steps that are run in a way."""
    measured, spare = [], []
    output: list[int] = []
    with step.undone(), way.taken(step.model, told, output.append, witnesses):
        for number in range(_STEPS):
            progress(number / _STEPS)
            measured.append(step.measured_peak())
            spare.append(step.spare_blocks())
    expected = max(map(sum, zip(measured, spare, strict=True)))
    return Peaks(max(measured), expected, max(output, default=None), tuple(measured))


def times_under(
    ways: Sequence[Way], step: TrainingStep, told: WarnOnce, warm: int = 1
) -> list[Timing]:
    """The time of a step in each of several ways, after ``warm`` steps in each.

    They take turns, so that what slows the machine down for a while slows all of them down. All
    draw the same random numbers, on which forward may depend.
    """
    samples: list[list[float]] = [[] for _ in ways]
    with step.undone():
        streams = read_streams(())
        for way in ways:
            with way.taken(step.model, told):
                for _ in range(warm):
                    write_streams(settle_streams(streams))
                    step.run()
        while True:
            for way, found in zip(ways, samples, strict=True):
                with way.taken(step.model, told):
                    write_streams(settle_streams(streams))
                    found.append(step.seconds())
            timings = [timing_of(found, long=True) for found in samples]
            if _is_enough(len(samples[0]), sum(map(sum, samples)), timings):
                return timings


def _is_enough(rounds: int, seconds: float, timings: Sequence[Timing]) -> bool:
    if rounds < _LEAST:
        return rounds > 1 and seconds > _SECONDS
    return rounds >= _MOST or seconds > _SECONDS or all(t.is_steady for t in timings)


# --- the cost of the engine -----------------------------------------------------------------------


def with_overhead(profile: Profile, step: TrainingStep, told: WarnOnce) -> Profile:
    """The profile with the costs of the engine in its graph."""
    graph = profile.graph
    if _PER_OP * len(graph.events) < _LITTLE * profile.seconds or not graph.choices:
        return profile
    everything, again = Schedule(frozenset(graph.choices)), _that_runs_again(graph)
    ways = [Way(), *(Way(NamedSchedule.of(graph, each)) for each in (everything, again))]
    plain, kept, rerun = times_under(ways, step, told, warm=2)
    if profile.timing is None or plain.seconds <= profile.seconds:  # which was less disturbed
        graph = profile.timed(plain.seconds)
        profile = replace(profile, seconds=plain.seconds, timing=plain)
    in_forward = max(0.0, kept.seconds - plain.seconds)
    free, one = (simulate(replace(graph, rerun_cost=cost), again).rerun for cost in (0.0, 1.0))
    count = round(one - free)
    cost = graph.rerun_cost
    if count:
        # The measured cost is off by the spread. Take the usual one if that is within the spread,
        # else the nearest that is: noise must not decide what runs again.
        measured = (rerun.seconds - kept.seconds - free) / count
        noise = sum(each.spread * each.seconds for each in (rerun, kept)) / count
        cost = max(0.0, min(max(cost, measured - noise), measured + noise))
    return replace(profile, graph=replace(graph, engine_cost=in_forward, rerun_cost=cost))


def _that_runs_again(graph: Graph) -> Schedule:
    """A schedule as plans are: what is expensive is kept, the rest runs again."""
    kept = expensive_ops(graph)
    schedule = trimmed(graph, Schedule(frozenset(kept)))
    plain = Schedule(frozenset(graph.choices))
    if kept and simulate(graph, schedule).peak <= simulate(graph, plain).peak:
        return schedule
    return trimmed(graph, Schedule(frozenset(graph.choices[::2])))


def expensive_ops(graph: Graph) -> set[int]:
    """Matrix products and attention."""
    return {n for n in graph.choices if graph.ops[n].name in MATMULS | ATTENTION}
