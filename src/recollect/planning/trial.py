"""Tries schedules: runs the recorded step under them, measures its peak and its time (P5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import Outcome, simulate
from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.planning.loop.runner import Runner
from recollect.planning.progress import Progress
from recollect.planning.recording.model_state import ModelState, compare_state
from recollect.planning.recording.record import Profile
from recollect.planning.recording.sampling import Timing
from recollect.planning.recording.step import is_out_of_memory
from recollect.planning.regions.module_regions import callable_paths, wrap_modules
from recollect.planning.solving.modules import ModuleSolver, find_units
from recollect.planning.ways import Bench, Peaks, Way, times_under, with_overhead
from recollect.replay.named_schedule import Alike, NamedSchedule, op_counts
from recollect.report.plan_report import Point
from recollect.report.units import percent_text

#: The peak that is assumed for a plan that ran out of memory, as a multiple of the simulated one.
_OUT_OF_MEMORY = 1.1
#: The least peak that is assumed for a step whose forward depends on chance, as such a multiple.
_BY_CHANCE = 1.05
#: The peak that is assumed for modules whose rerun fails.
_NEVER = 1 << 62


@dataclass(frozen=True)
class Candidate:
    """A schedule for a budget, with its measurements; None if the step could not run."""

    schedule: Schedule
    peak: int  #: the peak to expect, in bytes
    peaks: Peaks | None = None
    time: Timing | None = None
    plain_time: Timing | None = None  #: of plain steps that took turns with these
    baselines: tuple[Point, ...] = ()  #: measured for comparison
    remark: str = ""  #: why it was preferred to them


class Trials:
    """The trials of one recorded step, each of which runs once."""

    #: What the step keeps without a plan; None: everything.
    plain_schedule: Schedule | None = None

    def __init__(
        self, bench: Bench, profile: Profile, state: ModelState, progress: Progress
    ) -> None:
        self.step = bench.step
        self.profile = profile
        self._bench = bench
        self._state = state
        self._progress = progress
        #: By schedule that was tried: the peak to expect.
        self.expected: dict[Schedule, int] = {}
        self._peaks: dict[Schedule, Peaks] = {}  #: those that were measured
        #: By schedules that were timed in turn: their times, and that of the plain step.
        self._times: dict[tuple[Schedule, ...], tuple[list[Timing], Timing | None] | None] = {}
        self._named: dict[tuple[Schedule, int], NamedSchedule] = {}
        #: Whether a forward that was tried was not the recorded one.
        self.has_differed = False

    @cached_property
    def graph(self) -> Graph:
        """The step, with the cost of the engine."""
        if self.profile.timing is not None and self._obstacle() is None:
            self._progress("timing the engine", 0.0)
            try:
                with self._plan_removed():
                    self.profile = with_overhead(self.profile, self._bench)
            except RuntimeError as error:
                self._recover_memory(error)
        return self.profile.graph

    def leave_unpriced(self) -> None:
        """Have the engine not be timed: the step runs without it."""
        self.graph = self.profile.graph

    @property
    def title(self) -> str:
        """What the model is called."""
        return type(self.step.model).__name__

    def plain_outcome(self) -> Outcome:
        """The simulated step without a plan."""
        return simulate(self.graph, self.plain_schedule, curve=True)

    @cached_property
    def alike(self) -> Alike:
        """Maps ops that were not in the step to similar ones that were."""
        return Alike(self.op_counts)

    @cached_property
    def op_counts(self) -> Counter[str]:
        """How many ops of each name each module has."""
        return op_counts(self.graph)

    def named(self, schedule: Schedule, region: int = 0) -> NamedSchedule:
        """The schedule that the engine plays, for one of the forwards."""
        # Not `functools.cache`, whose reference to this would keep the batch alive for long.
        known = self._named.get((schedule, region))
        if known is None:
            known = NamedSchedule.of(self.graph, schedule, self.alike, region)
            self._named[schedule, region] = known
        return known

    # --- peaks ------------------------------------------------------------------------------------

    def peak(self, schedule: Schedule) -> int:
        """Run the step under ``schedule``. Returns the peak to expect."""
        if schedule not in self.expected:
            self.expected[schedule] = self._try(schedule)
        return self.expected[schedule]

    def least_tried(self) -> Schedule:
        """The schedule of the least peak, of those that were tried."""
        return min(self.expected, key=self.expected.__getitem__)

    def tried_within(self, room: int) -> list[Schedule]:
        """The schedules that were tried and take no more than ``room``, the fastest one first."""
        found = [each for each, peak in self.expected.items() if peak <= room]
        return sorted(found, key=lambda each: simulate(self.graph, each).seconds)

    def _try(self, schedule: Schedule) -> int:
        simulated = simulate(self.graph, schedule).peak
        if not self.profile.can_run:
            regions = range(len(self.graph.regions))
            by = [self.named(schedule, region) for region in regions]
            return self._bench.predicted_peak(by, simulated)
        try:
            peaks, differs = self._run(schedule)
        except Exception as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                self.step.free_memory()
                return int(simulated * _OUT_OF_MEMORY)
            if schedule.modules:  # run twice, one may do what it does not do when it runs once
                return _NEVER
            raise
        if differs:
            # Forward depends on chance, and the steps that ran may have been smaller ones.
            self.has_differed = True
            peaks = replace(peaks, expected=max(peaks.expected, int(simulated * _BY_CHANCE)))
        self._peaks[schedule] = peaks
        return peaks.expected

    def _run(self, schedule: Schedule) -> tuple[Peaks, bool]:
        """The peaks of steps under a schedule, and whether one was not as recorded."""
        with self._plan_removed():
            return self._bench.peaks(self._way(schedule), self._trying)

    def _way(self, schedule: Schedule | None) -> Way:
        """How steps run under a schedule; None: without a plan."""
        return Way(None if schedule is None else self.named(schedule))

    def _trying(self, done: float) -> None:
        self._progress("trying the plan", done)

    # --- the model as it was recorded -------------------------------------------------------------

    @contextmanager
    def _plan_removed(self) -> Iterator[None]:
        """A context without the plan that was applied since the step was recorded, if any."""
        obstacle = self._obstacle()
        if obstacle is not None:
            raise ValueError(obstacle)
        model = self.step.model
        runner = vars(model).get(OPTIONS)
        if runner is not None:
            unwrap_module(model)
        try:
            yield
        finally:
            if runner is not None:
                wrap_module(model, runner)
                # A lazily fitted model may have no plan yet.
                wrap_modules(model, () if runner.plan is None else runner.plan.wrapped)

    def _obstacle(self) -> str | None:
        model = self.step.model
        if not isinstance(vars(model).get(OPTIONS), Runner | None):
            return (
                f"model: this {type(model).__name__} has been checkpointed since it was recorded, "
                "which hides what there is to plan: recollect.unwrap(model) first"
            )
        return self._difference()

    def _difference(self) -> str | None:
        model = self.step.model
        other = compare_state(self._state, model)
        if other is None:
            return None
        return (
            f"model: this {type(model).__name__} is not as it was when it was recorded, so a plan "
            f"cannot be tried: {'; '.join(other.texts)}. Record it again: recollect.frontier(...) "
            "or recollect.plan(...)"
        )

    def _recover_memory(self, error: RuntimeError) -> None:
        """Free memory if it has run out; raise other errors."""
        if not is_out_of_memory(error):
            raise error
        self.step.free_memory()

    # --- times ------------------------------------------------------------------------------------

    def _time(self, schedules: tuple[Schedule, ...]) -> tuple[list[Timing], Timing | None] | None:
        """Time steps under each schedule, in turn with plain ones if these fit; None: it cannot."""
        if schedules not in self._times:
            self._times[schedules] = None
            if all(each in self._peaks for each in schedules):
                self._progress("timing the plan", 0.0)
                plain, *ways = map(self._way, (None, *schedules))
                both = None if self.profile.timing is None else self._time_in_turn([plain, *ways])
                found = both or self._time_in_turn(ways)
                if found is not None:
                    plain_time = found.pop(0) if both else None
                    self._times[schedules] = found, plain_time
        return self._times[schedules]

    def _time_in_turn(self, ways: Sequence[Way]) -> list[Timing] | None:
        """Time steps that take turns; None if there is no room for one of them."""
        try:
            with self._plan_removed():
                return times_under(ways, self._bench)
        except RuntimeError as error:
            self._recover_memory(error)
            return None

    def fastest(self, schedules: Sequence[Schedule]) -> Candidate:
        """Time the step under each schedule. Returns the fastest one.

        If one of them cannot be timed, it is the one that is predicted to be the fastest.
        """
        untimed = [Candidate(each, self.peak(each), self._peaks.get(each)) for each in schedules]
        times = self._time(tuple(schedules))
        if times is None:
            return min(untimed, key=lambda each: simulate(self.graph, each.schedule).seconds)
        timed = [
            replace(each, time=time, plain_time=times[1])
            for each, time in zip(untimed, times[0], strict=True)
        ]
        first, *others = sorted(timed, key=_seconds)
        points = [
            Point(f"{_label(each)} (measured)", each.peak, _seconds(each), "baseline")
            for each in others
        ]
        return replace(first, baselines=tuple(points), remark=_remark(first, others))

    @cached_property
    def modules(self) -> ModuleSolver | None:
        """Finds modules to checkpoint as a whole; None if none was priced (see `with_overhead`)."""
        if not self.graph.module_costs:
            return None
        return ModuleSolver(self.graph, find_units(self.graph, callable_paths(self.step.model)))


def _seconds(candidate: Candidate) -> float:
    assert candidate.time is not None
    return candidate.time.seconds


def _label(candidate: Candidate) -> str:
    return "whole modules" if candidate.schedule.modules else "op by op"


def _remark(candidate: Candidate, others: Sequence[Candidate]) -> str:
    """Say that a candidate checkpoints whole modules, and why it was preferred."""
    if not candidate.schedule.modules:
        return ""
    text = (
        f"{len(candidate.schedule.modules)} modules are checkpointed as a whole, and everything "
        "else runs plain"
    )
    if not others:
        return f"{text}."
    less = percent_text(1 - _seconds(candidate) / _seconds(others[0]))
    return f"{text}: that was measured to take {less} less time than the best choice op by op."
