"""Trying a recorded step under schedules: its peak and its time; blocks checkpointed too (P5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import simulate
from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.planning.blocks import block_paths, block_schedule, wrap_blocks
from recollect.planning.estimate import counted, estimated, outline_of, tally_of
from recollect.planning.model_state import ModelState, differences
from recollect.planning.record import Profile
from recollect.planning.runner import Runner, WarnOnce
from recollect.planning.sampling import Timing
from recollect.planning.step import TrainingStep, is_out_of_memory
from recollect.planning.ways import Peaks, Way, peaks_under, times_under, with_overhead
from recollect.replay.engine import CallReport
from recollect.replay.named_schedule import Alike, NamedSchedule
from recollect.report.plan_report import Point
from recollect.report.units import percent_text

__all__ = ["Candidate", "Progress", "Times", "Trials"]

#: Told what is being done, and how much of it is.
Progress = Callable[[str, float], None]

#: The peak of a plan for which there was no room, as a multiple of the simulated one.
_MORE_THAN_THERE_IS = 1.1
#: How much longer than plain a step under a plan takes for it to be compared with every block
#: checkpointed, as a fraction; and how much quicker that has to be, beside the spread.
_NOTICEABLE = 0.1
_CLEARLY = 0.03
#: How far the simulated peak of that may exceed the budget for it to be tried.
_ROUGHLY = 1.25


@dataclass(frozen=True)
class Times:
    """The times of planned and plain steps that took turns."""

    planned: Timing
    plain: Timing | None

    @property
    def spread(self) -> float:
        """By how much they may be off, as a fraction."""
        return max(self.planned.spread, 0.0 if self.plain is None else self.plain.spread)


@dataclass(frozen=True)
class Candidate:
    """A way to run the step within a budget."""

    schedule: Schedule  #: what is kept; with blocks, what goes from one to the next
    peak: int  #: bytes of the step
    peaks: Peaks | None = None  #: what was measured; None if nothing could be
    times: Times | None = None  #: the same
    blocks: tuple[str, ...] = ()  #: the blocks that are checkpointed, if that is all that is done
    others: tuple[Point, ...] = ()  #: other ways that were measured, for comparison
    remark: str = ""  #: why it is blocks


class Trials:
    """The recorded step, and what was measured of it."""

    def __init__(
        self, step: TrainingStep, profile: Profile, state: ModelState, progress: Progress
    ) -> None:
        self.step = step
        self.profile = profile
        self._state = state
        self._progress = progress
        self._told = WarnOnce()
        #: By schedule: the expected peak; what was measured; times in turn with blocks.
        self.expected: dict[Schedule, int] = {}
        self._peaks: dict[Schedule, Peaks] = {}
        self._times: dict[Schedule, Times | None] = {}
        self._compared: dict[Schedule, list[Timing] | None] = {}
        self._named: dict[Schedule, NamedSchedule] = {}

    @cached_property
    def graph(self) -> Graph:
        """The step, with the cost of the engine."""
        if self.profile.timing is not None and self._obstacle() is None:
            self._progress("timing the engine", 0.0)
            try:
                with self._unplanned():
                    self.profile = with_overhead(self.profile, self.step, self._told)
            except RuntimeError as error:
                self._check_memory(error)
        return self.profile.graph

    @cached_property
    def alike(self) -> Alike:
        """Maps ops that were not in the step to similar ones that were."""
        return Alike(dict(counted(self.graph)))

    def named(self, schedule: Schedule) -> NamedSchedule:
        """The schedule that the engine plays."""
        known = self._named.get(schedule)
        if known is None:
            known = self._named[schedule] = NamedSchedule.of(self.graph, schedule, self.alike)
        return known

    def candidate(self, schedule: Schedule) -> Candidate:
        """All that can be measured of a schedule."""
        peak = self.peak(schedule)
        return Candidate(schedule, peak, self._peaks.get(schedule), self._timed(schedule))

    # --- peaks ------------------------------------------------------------------------------------

    def peak(self, schedule: Schedule) -> int:
        """The peak of the step under ``schedule``, by running it."""
        if schedule not in self.expected:
            self.expected[schedule] = self._try(schedule)
        return self.expected[schedule]

    def _try(self, schedule: Schedule) -> int:
        simulated = simulate(self.graph, schedule).peak
        if not self.profile.can_run:
            return simulated
        witnesses: list[CallReport] = []
        try:
            found = self._run(Way(self.named(schedule)), witnesses)
        except RuntimeError as error:
            self._check_memory(error)
            return int(simulated * _MORE_THAN_THERE_IS)
        if any(map(self._is_another, witnesses)):
            found = self._compare(schedule, simulated, found, witnesses)
        self._peaks[schedule] = found
        return found.expected

    def _run(self, way: Way, witnesses: list[CallReport] | None = None) -> Peaks:
        def progress(done: float) -> None:
            self._progress("trying the plan", done)

        with self._unplanned():
            return peaks_under(way, self.step, self._told, progress, witnesses)

    def _is_another(self, report: CallReport) -> bool:
        """Whether a forward that was tried is not the recorded one."""
        recording, tally = report.recording, self.graph.tally
        if recording is None or tally is None or report.difference is not None:
            return report.difference is not None
        return tally_of(recording).made != tally.made

    def _compare(
        self, schedule: Schedule, simulated: int, found: Peaks, witnesses: list[CallReport]
    ) -> Peaks:
        """The peak of the recorded step, from those of steps whose forward is random."""
        base, named = self.graph.base, self.named(schedule)
        scale = (simulated - base) / self.estimate(self.graph.outline, named)
        expected = [found.expected]
        for peak, report in zip(found.each, witnesses, strict=True):
            if report.recording is not None and report.difference is None:
                guess = self.estimate(outline_of(report.recording), named)
                excess = peak / (base + scale * guess)
                expected.append(math.ceil(simulated * max(1.0, excess)))
        return replace(found, expected=max(expected))

    def estimate(self, outline: Graph | None, schedule: NamedSchedule) -> int:
        """The bytes that an outline is estimated at."""
        assert outline is not None
        return max(1, estimated(outline, schedule))

    # --- as it was recorded -----------------------------------------------------------------------

    @contextmanager
    def _unplanned(self) -> Iterator[None]:
        """A context in which a plan is off that was applied since the step was recorded."""
        obstacle = self._obstacle()
        if obstacle is not None:
            raise ValueError(obstacle)
        model = self.step.model
        how = vars(model).get(OPTIONS)
        if how is not None:
            unwrap_module(model)
        try:
            yield
        finally:
            if how is not None:
                wrap_module(model, how)
                wrap_blocks(model, how.plan.schedule.blocks)

    def _obstacle(self) -> str | None:
        """Why the step cannot be run now as it was recorded, if so."""
        model = self.step.model
        if not isinstance(vars(model).get(OPTIONS), Runner | None):
            return (
                f"model: this {type(model).__name__} has been checkpointed since it was recorded, "
                "which hides what there is to plan: recollect.unwrap(model) first"
            )
        other = differences(self._state, model)
        if other is None:
            return None
        return (
            f"model: this {type(model).__name__} is not as it was when it was recorded, so a plan "
            f"cannot be tried: {'; '.join(other.texts)}. Record it again: recollect.frontier(...) "
            "or recollect.plan(...)"
        )

    def _check_memory(self, error: RuntimeError) -> None:
        """Go on without what there was no room for; other errors are raised."""
        if not is_out_of_memory(error):
            raise error
        self.step.free_memory()

    # --- times ------------------------------------------------------------------------------------

    def _timed(self, schedule: Schedule) -> Times | None:
        """The times of steps under ``schedule``, and of plain ones; None if it cannot run."""
        if schedule not in self._times:
            self._times[schedule] = None
            if schedule in self._peaks:
                self._progress("timing the plan", 0.0)
                way = Way(self.named(schedule))
                both = None if self.profile.timing is None else self._in_turn([Way(), way])
                found = both or self._in_turn([way])
                if found is not None:
                    self._times[schedule] = Times(found[-1], both[0] if both else None)
        return self._times[schedule]

    def _in_turn(self, ways: Sequence[Way]) -> list[Timing] | None:
        """The times of steps in several ways; None if there is no room for one of them."""
        try:
            with self._unplanned():
                return times_under(ways, self.step, self._told)
        except RuntimeError as error:
            self._check_memory(error)
            return None

    # --- every block checkpointed -----------------------------------------------------------------

    def or_blocks(self, found: Candidate, room: int) -> Candidate:
        """The candidate; or every block checkpointed, if the candidate is slow and that quicker."""
        schedule = block_schedule(self.graph)
        # What varies has to be checked in every step, which only the replay engine does.
        if schedule is None or self.graph.varies or not self._is_slow(found):
            return found
        if simulate(self.graph, schedule).peak > _ROUGHLY * room:
            return found
        blocks = self.blocks
        if blocks is None or blocks.peak > room:
            return found
        timings = self._against_blocks(found, blocks)
        if timings is None:
            return found
        ours, theirs, *rest = timings
        if theirs.seconds * (1 + theirs.spread + ours.spread + _CLEARLY) >= ours.seconds:
            point = Point("every block (measured)", blocks.peak, theirs.seconds, "peer")
            return replace(found, others=(point,))
        less = percent_text(1 - theirs.seconds / ours.seconds)
        remark = (
            "Every block is checkpointed as a whole, and its code runs twice in a step: that was "
            f"measured to take {less} less time than the best choice op by op."
        )
        return replace(blocks, times=Times(theirs, rest[0] if rest else None), remark=remark)

    def _is_slow(self, found: Candidate) -> bool:
        """Whether a step under a plan takes noticeably longer than the plain one."""
        if found.times is None:
            return False
        plain = found.times.plain
        seconds = self.profile.seconds if plain is None else plain.seconds
        return found.times.planned.seconds > (1 + _NOTICEABLE) * seconds

    def _against_blocks(self, found: Candidate, blocks: Candidate) -> list[Timing] | None:
        """The times of the candidate, of every block checkpointed, and of plain if that fits."""
        schedule = found.schedule
        if schedule not in self._compared:
            ways = [Way(self.named(schedule)), Way(NamedSchedule(blocks=blocks.blocks))]
            if found.times is not None and found.times.plain is not None:
                ways.append(Way())
            self._compared[schedule] = self._in_turn(ways)
        return self._compared[schedule]

    @cached_property
    def blocks(self) -> Candidate | None:
        """Every block checkpointed; None if that is impossible."""
        schedule = block_schedule(self.graph)
        paths = block_paths(self.graph, self.step.model)
        if schedule is None or len(paths) < 2:
            return None
        try:
            peaks = self._run(Way(NamedSchedule(blocks=paths)))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            # What the rerun engine refuses is no fault of a plan that does without it.
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                self.step.free_memory()
            return None
        return Candidate(schedule, peaks.expected, peaks, blocks=paths)
