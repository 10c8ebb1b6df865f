"""Running the step plain or under a schedule, and measuring it (P3).

The cost of the engine itself is measured in the same way: steps are timed plain, under a plan that
keeps everything, and under one that runs many ops again. The second minus the first is what the
engine costs in forward; the third minus the second, and minus the ops themselves, is what running
ops again costs. If that is much, checkpointing whole modules may be quicker: what each kind of
module costs, by either engine, is what a step takes longer in which all of them are checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import nn

from recollect.checks.place import WarnOnce
from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import simulate
from recollect.modules import unwrap_module, wrap_module
from recollect.planning.loop.play import run_planned
from recollect.planning.loop.watch import watch_output
from recollect.planning.recording.record import Profile, bytes_made
from recollect.planning.recording.sampling import Timing, timing_of
from recollect.planning.recording.step import TrainingStep
from recollect.planning.regions.module_regions import (
    ENGINES,
    callable_paths,
    unwrap_modules,
    wrap_modules,
)
from recollect.planning.solving.modules import ModuleCandidate, find_units, module_kind
from recollect.policy.op_info import ATTENTION, MATMULS
from recollect.replay.engine import CallReport
from recollect.replay.named_schedule import NamedSchedule, trimmed
from recollect.state.rng import read_streams, settle_streams, write_streams

#: How many steps are run to know a peak: one is recorded, one checked against that, one is known.
_STEPS = 3
#: The least and the most rounds of steps that are timed; after so many seconds, two are enough.
_LEAST, _MOST = 3, 8
_SECONDS = 6.0
#: The engine is not timed if this many seconds for each op were less than this part of the step.
_PER_OP = 50e-6
_LITTLE = 0.03
#: How many tensors are offloaded to see what that costs.
_OFFLOADED = 16
#: Modules are priced in so many seconds, of so many kinds at most.
_PRICING_SECONDS = 10.0
_KINDS = 5
#: A kind is left out if it frees less than this fraction of what the first one frees.
_SLIGHT = 0.1


@dataclass(frozen=True)
class Way:
    """How the step is run."""

    by: NamedSchedule | None = None  #: None: plain
    #: Whether what modules recompute is compared with forward, by its values.
    is_checked: bool = False

    @contextmanager
    def applied(
        self,
        model: nn.Module,
        warnings: WarnOnce,
        on_output: Callable[[int], None] | None = None,
        reports: list[CallReport] | None = None,
    ) -> Iterator[None]:
        """A context in which ``model`` is run so.

        ``on_output`` is given the bytes of its output that are there when backward reaches it;
        ``reports`` gets one for each call.
        """
        by = self.by
        if by is None:
            yield
            return

        def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
            report = CallReport()
            output = run_planned(
                function, args, kwargs, by, warnings, report, is_checked=self.is_checked
            )
            if reports is not None:
                report.remat = None  # which holds tensors: they would count in the next step
                reports.append(report)
            if on_output is not None:
                watch_output(output, lambda alive, _: on_output(alive))
            return output

        wrap_module(model, run)
        try:
            wrap_modules(model, by.wrapped)
            yield
        finally:
            unwrap_modules(model)
            unwrap_module(model)


@dataclass(frozen=True)
class Peaks:
    """The peaks of steps, in bytes."""

    measured: int  #: the highest
    expected: int  #: the same, with room for what other steps like them may take more
    #: Bytes of the model's output that were there when backward reached it, if it did.
    output: int | None = None
    each: tuple[int, ...] = ()  #: the peak of each step

    @classmethod
    def of_one(cls, peak: int) -> Peaks:
        """The peak of one step."""
        return cls(peak, peak, each=(peak,))


def times_under(ways: Sequence[Way], bench: Bench, warm: int = 1) -> list[Timing]:
    """The time of a step in each of several ways, after ``warm`` steps in each.

    They take turns, so that what slows the machine down for a while slows all of them down. All
    draw the same random numbers, on which forward may depend.
    """
    return [timing_of(found, long=True) for found in bench.samples(ways, warm)]


class Bench:
    """Runs a step in ways that are asked for, and measures it.

    ``made``: the bytes that its forward makes, by module.
    """

    #: How often steps are timed; None: until their times agree.
    rounds: int | None = None

    def __init__(self, step: TrainingStep, made: Mapping[str, int]) -> None:
        self.step = step
        self._made = made
        self._warnings = WarnOnce()

    def peaks(
        self, way: Way, progress: Callable[[float], None] = lambda _: None, warm: int = 0
    ) -> tuple[Peaks, bool]:
        """The peaks of steps, and whether one of them was not as recorded: it depends on chance.

        The first ``warm`` of them do not count.
        """
        step, reports = self.step, list[CallReport]()
        measured, spare, output = list[int](), list[int](), list[int]()
        with step.undone(), way.applied(step.model, self._warnings, output.append, reports):
            for number in range(_STEPS):
                if number < warm:
                    step.run()
                    continue
                progress(number / _STEPS)
                measured.append(step.measured_peak())
                spare.append(step.spare_blocks())
        expected = max(map(sum, zip(measured, spare, strict=True)))
        # In the lowest of them nothing was late.
        expected = max(expected, min(measured) + step.late_bytes())
        peaks = Peaks(max(measured), expected, max(output, default=None), tuple(measured))
        return peaks, any(map(self._differs, reports))

    def _differs(self, report: CallReport) -> bool:
        if report.recording is None or report.difference is not None:
            return report.difference is not None
        return bytes_made(report, self._made) != self._made

    def predicted_peak(self, by: Sequence[NamedSchedule], simulated: int) -> int:
        """The peak of a step that cannot be run here, which was ``simulated``.

        ``by``: what its forwards run by.
        """
        return simulated

    def samples(self, ways: Sequence[Way], warm: int) -> list[list[float]]:
        """The seconds of steps, by way and round; see `times_under`."""
        step, samples = self.step, [list[float]() for _ in ways]
        with step.undone():
            streams = read_streams(())
            for way in ways:
                with way.applied(step.model, self._warnings):
                    for _ in range(warm):
                        write_streams(settle_streams(streams))
                        step.run()
            while not self._is_enough(samples):
                for way, found in zip(ways, samples, strict=True):
                    with way.applied(step.model, self._warnings):
                        write_streams(settle_streams(streams))
                        found.append(step.seconds())
        return samples

    def _is_enough(self, samples: list[list[float]]) -> bool:
        count, seconds = len(samples[0]), sum(map(sum, samples))
        if self.rounds is not None:
            return count >= self.rounds
        if count < _LEAST:
            return count > 1 and seconds > _SECONDS
        timings = (timing_of(found, long=True) for found in samples)
        return count >= _MOST or seconds > _SECONDS or all(each.is_steady for each in timings)

    def can_run(self, way: Way) -> bool:
        """Whether the step runs so, and recomputes what forward computed.

        An engine may refuse what a module does. A module that counts its calls, and computes with
        the count, computes something else when it runs twice.
        """
        try:
            with (
                self.step.undone(),
                replace(way, is_checked=True).applied(self.step.model, self._warnings),
            ):
                self.step.run()
        except Exception:  # noqa: BLE001 - the user's code, run once more than it expects
            return False
        return True


# --- the cost of the engine -----------------------------------------------------------------------


def with_overhead(profile: Profile, bench: Bench) -> Profile:
    """The profile with the costs of the engine in its graph."""
    graph = profile.graph
    if _PER_OP * len(graph.events) < _LITTLE * profile.seconds or not graph.choices:
        return profile
    again, offloaded = _that_runs_again(graph), _that_offloads(graph)
    schedules = [Schedule(frozenset(graph.choices)), again, *offloaded]
    ways = [Way(), *(Way(NamedSchedule.of(graph, each)) for each in schedules)]
    plain, kept, rerun, *others = times_under(ways, bench, warm=2)
    if profile.timing is None or plain.seconds <= profile.seconds:  # which was less disturbed
        graph = profile.timed(plain.seconds)
        profile = replace(profile, seconds=plain.seconds, timing=plain)
    in_forward = max(0.0, kept.seconds - plain.seconds)
    costs: dict[str, Any] = {"rerun_cost": _unit_cost(graph, "rerun_cost", again, kept, rerun)}
    for schedule, timing in zip(offloaded, others, strict=True):
        costs["offload_cost"] = _unit_cost(graph, "offload_cost", schedule, kept, timing)
    graph = replace(graph, engine_cost=in_forward, **costs)
    # What varies has to be checked in every step, which only the replay engine does, op by op.
    # And hooks around units must not run again with a module, nor must collectives.
    is_alone = not (graph.varies or graph.units or bench.step.is_shared)
    if in_forward > _LITTLE * profile.seconds and is_alone:
        graph = replace(graph, module_costs=_module_costs(graph, bench))
    return replace(profile, graph=graph)


def _unit_cost(graph: Graph, name: str, schedule: Schedule, kept: Timing, found: Timing) -> float:
    """What the cost ``name`` of the graph has to be for ``schedule`` to take as long as it did."""
    usual: float = getattr(graph, name)
    options: list[dict[str, Any]] = [{name: 0.0}, {name: 1.0}]
    free, one = (simulate(replace(graph, **each), schedule).seconds for each in options)
    count = round(one - free)
    if not count:
        return usual
    # The measured cost is off by the spread. Take the usual one if that is within the spread, else
    # the nearest that is: noise must not decide what runs again.
    measured = (found.seconds - kept.seconds - (free - graph.plain_seconds)) / count
    noise = sum(each.spread * each.seconds for each in (found, kept)) / count
    return max(0.0, min(max(usual, measured - noise), measured + noise))


def _module_costs(graph: Graph, bench: Bench) -> dict[tuple[str, str], float]:
    """Seconds that checkpointing adds to a step, by module and engine."""
    steps = len(ENGINES) * (_LEAST + 2)
    count = max(1, min(_KINDS, int(_PRICING_SECONDS / (steps * graph.plain_seconds))))
    kinds = _largest_module_kinds(find_units(graph, callable_paths(bench.step.model)), count)
    ways: dict[tuple[str, str], Way] = {}
    for kind, units in kinds.items():
        for engine in ENGINES:
            way = Way(NamedSchedule(modules=tuple((unit.path, engine) for unit in units)))
            if bench.can_run(way):
                ways[kind, engine] = way
    plain, *others = bench.samples([Way(), *ways.values()], warm=2)
    costs = {}
    for (kind, engine), samples in zip(ways, others, strict=True):
        # Of pairs, since what slows a machine down for a while slows down both.
        added = median(longer - short for longer, short in zip(samples, plain, strict=True))
        units = kinds[kind]
        work = sum(map(_work, units))
        for unit in units:
            costs[unit.path, engine] = max(0.0, added) * _work(unit) / work
    return costs


def _largest_module_kinds(
    units: Sequence[ModuleCandidate], count: int
) -> dict[str, list[ModuleCandidate]]:
    """The modules by kind: the ``count`` kinds that free most, if that is not little."""
    found: dict[str, list[ModuleCandidate]] = {}
    for unit in units:
        found.setdefault(module_kind(unit.path), []).append(unit)
    freed = {kind: sum(unit.freed for unit in found[kind]) for kind in found}
    most = max(freed.values(), default=0)
    kinds = sorted(freed, key=freed.__getitem__, reverse=True)[:count]
    return {kind: found[kind] for kind in kinds if freed[kind] > _SLIGHT * most}


def _work(unit: ModuleCandidate) -> float:
    """What the cost of modules of one kind is shared by."""
    return unit.seconds + unit.count * _PER_OP


def _that_runs_again(graph: Graph) -> Schedule:
    """A schedule as plans are: what is expensive is kept, the rest runs again."""
    kept = expensive_ops(graph)
    schedule = trimmed(graph, Schedule(frozenset(kept)))
    plain = Schedule(frozenset(graph.choices))
    if kept and simulate(graph, schedule).peak <= simulate(graph, plain).peak:
        return schedule
    return trimmed(graph, Schedule(frozenset(graph.choices[::2])))


def _that_offloads(graph: Graph) -> list[Schedule]:
    """A schedule that offloads some tensors and keeps the rest; none if none can be offloaded."""
    able = [n for n in graph.choices if graph.ops[n].can_offload]
    sizes = {n: sum(graph.values[v].nbytes for v in graph.results[n]) for n in able}
    offloaded = frozenset(sorted(able, key=sizes.__getitem__)[len(able) // 2 :][:_OFFLOADED])
    if graph.link is None or not offloaded:
        return []
    return [
        Schedule(
            frozenset(graph.choices) - offloaded, offloaded, limit=sum(sizes[n] for n in offloaded)
        )
    ]


def expensive_ops(graph: Graph) -> set[int]:
    """Matrix products and attention."""
    return {n for n in graph.choices if graph.ops[n].name in MATMULS | ATTENTION}
