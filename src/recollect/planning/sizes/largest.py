"""Finds the largest batch for which a plan fits: ``recollect.largest_batch``.

1. The plain step is recorded at a few sizes, small ones first, each predicted to fit from those
   before it. The last is the largest that fits without a plan.
2. From how its numbers grow (`growth`), the graph of the step at every other size is known. The
   solver works on that, and a bisection finds the largest size that is predicted to fit.
3. The plan for it is made, which runs and measures the step. If it does not hold, or takes longer
   than allowed, the prediction is corrected by what was measured, and a smaller size is tried.

No step is run that is predicted to exceed the budget by more than a percent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from recollect.errors import InfeasibleBudget
from recollect.graph.simulate import simulate_plain
from recollect.planning.describe import SMALLER_BATCH
from recollect.planning.loop.planned_step import with_larger_batch
from recollect.planning.plan import Plan
from recollect.planning.planner import Planner, Record
from recollect.planning.progress import Progress
from recollect.planning.recording.record import (
    CannotPredict,
    Profile,
    record_step,
    record_under,
    record_unrun,
)
from recollect.planning.recording.step import is_out_of_memory
from recollect.planning.sizes.forecast import (
    Forecast,
    GraphForecast,
    SizedSteps,
    TrendForecast,
    find_largest,
    forecast_of,
)
from recollect.replay.named_schedule import NamedSchedule
from recollect.report.page import HasPage, sizes_page
from recollect.report.sizes import Limit, SizePoint, SizesReport, sizes_table
from recollect.report.units import bytes_text, percent_text

#: How many times as large as the last one the next recording is: before a prediction was right, and
#: from then on; and how close one has to be for that.
_FIRST_JUMP, _JUMP = 2, 8
_CLOSE = 0.01
#: Sizes that differ by less than this part are alike, as far as times can tell.
_CLOSE_TIME = 0.02
#: How many recordings there should be, to know how a step grows.
_RECORDINGS = 3
#: How many sizes are planned for at most, to confirm what was predicted.
_CONFIRMATIONS = 10
#: How many sizes are solved for at most, before one is confirmed.
_SOLVES = 6
#: How many sizes between those that were run are shown as predicted.
_PREDICTED = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class LargestBatch(SizesReport, HasPage):
    """The largest size for which a plan fits. ``str()`` of it is a table.

    Made by `recollect.largest_batch`. Immutable. Peaks are in bytes, times in seconds.

    Attributes:
        size: The largest size, the argument of ``make_batch``.
        plan: The plan for it. The step was run under it, if it can run.
        plain_size: The largest size that fits without a plan; 0 if none does.
        budget: The highest peak that is allowed.
        time: The limit on the time per sample, as a multiple of plain's; None if there is none.
        time_per_sample: The time of a step under the plan, divided by ``size``.
        plain_time_per_sample: The time of a plain step at ``plain_size``, divided by that. If no
            size fits without a plan: at the smallest size, predicted if it could not be run.
        points: The sizes that were tried, and some that were predicted, in ascending order.
        limited_by: Why there is no larger one: ``"memory"``, ``"time"``, or ``"most"``, the bound
            on sizes.
        title: The class of the model.
        device: The device, in words.
    """

    plan: Plan

    @property
    def samples_per_second(self) -> float:
        """Samples per second of training under the plan."""
        return 1 / self.time_per_sample

    @property
    def slowdown(self) -> float:
        """The time per sample as a multiple of plain's."""
        return self.time_per_sample / self.plain_time_per_sample

    def __repr__(self) -> str:
        return (
            f"<LargestBatch of {self.plan.model}: size {self.size} in {bytes_text(self.budget)}, "
            f"{self.plain_size} without a plan, {percent_text(self.slowdown)} of plain's time "
            "per sample>"
        )

    def __str__(self) -> str:
        return sizes_table(self)

    def _page(self) -> str:
        return sizes_page(self)


@dataclass(frozen=True)
class _Confirmed:
    """A size for which the plan was made, and whether it takes no longer than allowed."""

    size: int
    plan: Plan
    seconds: float
    plain_per_sample: float
    is_fast: bool


@dataclass
class LargestSearch:
    """One search."""

    steps: SizedSteps  #: at every size
    budget: int  #: the highest peak that is allowed
    time: float | None  #: how many times as long as plain a sample may take; None: any
    unit: int  #: sizes are multiples of it
    most: int  #: the largest size to consider
    progress: Progress  #: called with what is being done
    _offload: bool = False
    #: By size: the recorded step; the least measured peak of a plan.
    _profiles: dict[int, Profile] = field(default_factory=dict)
    _leasts: dict[int, int] = field(default_factory=dict)
    _points: dict[int, SizePoint] = field(default_factory=dict)
    _plain_size: int = 0
    _forecast: Forecast | None = None
    #: By how much peaks and times were higher than predicted.
    _excess: float = 1.0
    _slowness: float = 1.0
    #: Plain seconds for each sample: when its recording was timed, and when it was last timed.
    _plain_per_sample: float = 0.0
    _plain_now: float = 0.0
    #: The sizes whose plans fit and take longer than allowed.
    _slow: set[int] = field(default_factory=set)
    #: The schedule for steps that are recorded without being run plain.
    _by: NamedSchedule | None = None

    def run(self) -> LargestBatch:
        """Find it."""
        best = self._search(self._find_plain_size()) or self._confirm_plain()
        self._add_predictions(best.size)
        return LargestBatch(
            title=best.plan.model,
            device=best.plan.report.device,
            budget=self.budget,
            time=self.time,
            size=best.size,
            plan=best.plan,
            plain_size=self._plain_size,
            time_per_sample=best.seconds / best.size,
            plain_time_per_sample=best.plain_per_sample,
            points=tuple(self._points[size] for size in sorted(self._points)),
            limited_by=self._reason(best.size),
        )

    @property
    def _end(self) -> int:
        """The first size that is not considered."""
        return (self.most // self.unit + 1) * self.unit

    def _reason(self, size: int) -> Limit:
        after = size + self.unit
        if after >= self._end:
            return "most"
        if after in self._slow:
            return "time"
        fits = self.time is not None and self._forecasted().fastest(after, self._room) is not None
        return "time" if fits else "memory"

    # --- without a plan ---------------------------------------------------------------------------

    def _find_plain_size(self) -> _Confirmed | None:
        """Find the largest size that fits without a plan.

        Returns the plan for the smallest size, if that needs one.
        """
        low, high, size = 0, self._end, self.unit
        jump = _FIRST_JUMP
        while size > low:
            expected = None if len(self._profiles) < 2 else self._forecasted().plain_peak(size)
            planner = self._record(size)
            profile = planner.trials.profile
            if expected and abs(expected - profile.plain_peak) <= _CLOSE * profile.plain_peak:
                jump = _JUMP
            if self._fits_plain(profile):
                low = size
            else:
                high = size
            self._plain_size = low
            next_size = low if low == 0 else self._next_plain(low, high, jump)
            if next_size == low and size == (low or self.unit):
                # The last one: its batch is there, so all that is left to measure is measured now.
                self._profiles[size] = replace(planner.trials.profile, graph=planner.graph)
                if low == 0:
                    return self._first_plan(planner)
            del planner  # with its batch, before there is another one
            size = next_size
        return None

    def _record(self, size: int, record: Record = record_step) -> Planner:
        planner = self.steps.planner(size, record)
        profile = planner.trials.profile
        self._profiles[size] = profile
        self._forecast = None
        self._offload = self._offload or profile.graph.link is not None
        if record is record_step:
            seconds = profile.seconds
            fits = self._fits_plain(profile)
            self._points[size] = SizePoint(size, fits, profile.plain_peak, None, seconds, "plain")
        return planner

    def _fits_plain(self, profile: Profile) -> bool:
        """Whether a step fits without a plan, and was run so where it can run."""
        was_run = profile.timing is not None or not profile.can_run
        return was_run and profile.plain_peak <= self.budget

    def _next_plain(self, low: int, high: int, jump: int) -> int:
        """The size to record next, which is predicted to fit; ``low`` if there is none."""
        if len(self._profiles) == 1:
            larger = with_larger_batch(self._profiles[low].graph, 2)
            if 2 * low < high and simulate_plain(larger).peak <= self.budget:
                return 2 * low
        if not isinstance(self._forecasted(), GraphForecast):
            self._record_unrun(low)
        forecast = self._forecasted()
        limit = min(high, jump * max(self._profiles) + self.unit)
        return find_largest(
            lambda size: forecast.plain_peak(size) <= self.budget, low, limit, self.unit
        )

    def _record_unrun(self, low: int) -> None:
        """Record steps without running them, to know how the step grows. They take no memory."""
        for number in range(1, _RECORDINGS):
            size = low + number * self.unit
            if len(self._profiles) >= _RECORDINGS or size >= self._end:
                return
            if size not in self._profiles:
                try:
                    self._record(size, record_unrun)
                except CannotPredict:
                    return

    def _forecasted(self) -> Forecast:
        if self._forecast is None:
            self._forecast = forecast_of(
                self._profiles, self._leasts, offload=self._offload, progress=self.progress
            )
        return self._forecast

    # --- with plans -------------------------------------------------------------------------------

    def _first_plan(self, planner: Planner) -> _Confirmed:
        """The plan for the smallest size, which does not fit without one."""
        size = self.unit
        try:
            plan = planner.plan_for(self.budget)
        except InfeasibleBudget as error:
            why = str(error).removeprefix("budget: ").replace(SMALLER_BATCH, "")
            smaller = "" if size == 1 else ", or allow smaller sizes by a smaller multiple_of"
            raise InfeasibleBudget(
                f"budget: not even a batch of size {size} fits: {why}{smaller}",
                budget=error.budget,
                least=error.least,
            ) from None
        self._leasts[size] = min(planner.least_budget(), plan.predicted_peak)
        plain = plan.measured_plain_time or plan.plain_time
        return self._noted(size, plan, plain / size, is_fast=True)

    def _search(self, best: _Confirmed | None) -> _Confirmed | None:
        """Find the largest size above the plain one for which a plan holds; None if there is none.

        ``best``: the plan for the smallest size, if that needs one.
        """
        low, high = best.size if best else self._plain_size, self._end
        self._plain_per_sample = self._plain_now = self._profiles[low].seconds / low
        if len(self._profiles) < _RECORDINGS:
            self._record_unrun(low)
        for _ in range(_CONFIRMATIONS):
            size = self._next_planned(low, high)
            if size == low and self._may_fit(low + self.unit, high):
                size = low + self.unit
            if size == low:
                break
            found = self._confirm(size)
            if found is not None and found.is_fast:
                best, low = found, size
            else:
                high = size
        return best

    def _next_planned(self, low: int, high: int) -> int:
        """The size to plan for next; ``low`` if there is none."""
        size = self._predict(low, high)
        if self.time is None or (size > low and len(self._slow) < 2):
            return size
        # Predictions of time are rough, and no reason to stop: halve what memory leaves.
        if high - low <= max(self.unit, int(_CLOSE_TIME * low)):
            return low
        fits = lambda size: self._forecasted().fastest(size, self._room) is not None  # noqa: E731
        size = find_largest(fits, low, high, self.unit)
        return low + -(-(size - low) // (2 * self.unit)) * self.unit

    def _may_fit(self, size: int, high: int) -> bool:
        """Whether a size exceeds the budget by so little that only a plan for it can tell."""
        if size >= high or self._forecasted().fastest(size, self._room) is not None:
            return False
        return self._forecasted().least(size) <= (1 + _CLOSE) * self._room

    def _predict(self, low: int, high: int) -> int:
        """The largest size between them that is predicted to fit; ``low`` if there is none."""
        if isinstance(self._forecasted(), TrendForecast):
            self._learn_least(low)
            # A line is not to be trusted far from the points that it goes through.
            high = min(high, _FIRST_JUMP * low + self.unit)
        forecast, size = self._forecasted(), low
        for _ in range(_SOLVES):
            size = find_largest(self._is_expected_to_fit, low, high, self.unit)
            after = size + self.unit
            if not isinstance(forecast, GraphForecast) or after >= high:
                break
            if forecast.is_solved(after):
                break
            forecast.solver(after)  # which may know better schedules than those of other sizes
        return size

    @property
    def _room(self) -> int:
        return int(self.budget / self._excess)

    def _is_expected_to_fit(self, size: int) -> bool:
        expected = self._forecasted().fastest(size, self._room)
        if expected is None or self.time is None or expected.seconds is None:
            return expected is not None
        return expected.seconds * self._slowness <= self.time * self._plain_per_sample * size

    def _learn_least(self, size: int) -> None:
        """Find the least peak at a size that fits, and at half of it: a line needs both."""
        half = max(self.unit, size // (2 * self.unit) * self.unit)
        for each in (half, size):
            if self._plain_size and each not in self._leasts:
                plan = self.steps.planner(each).least_plan(self.budget)
                self._leasts[each] = plan.predicted_peak
                self._by = plan.schedule
                self._forecast = None

    def _confirm(self, size: int) -> _Confirmed | None:
        """Make the plan for a size, which runs the step under it; None if there is none."""
        expected = self._forecasted().fastest(size, self._room)
        try:
            plan = self._plan_for(size)
        except InfeasibleBudget as error:
            self._refuse(size, max(error.least, self.budget + 1))
            return None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._refuse(size, self.budget + 1)
            return None
        plain = self._plain_per_sample
        if self._plain_size and plan.measured_time is not None:
            # Again, and now: machines are not as fast at all times.
            plain = self.steps.plain_seconds(self._plain_size) / self._plain_size
            self._plain_now = plain
        seconds = plan.measured_time or plan.predicted_time
        is_fast = self.time is None or seconds <= self.time * plain * size
        if expected is not None and expected.seconds:
            self._slowness = seconds / expected.seconds * self._plain_per_sample / plain
        if not is_fast:
            self._slow.add(size)
        return self._noted(size, plan, plain, is_fast=is_fast)

    def _plan_for(self, size: int) -> Plan:
        """The plan for a size: on the predicted graph, or on one that is recorded for it."""
        forecast = self._forecasted()
        if isinstance(forecast, GraphForecast):
            profile = forecast.profile_at(size)
            # It is known not to fit without a plan.
            profile = replace(profile, plain_peak=max(profile.plain_peak, self.budget + 1))
            planner = self.steps.planner(size, lambda *_: profile)
            planner.solver = forecast.solver(size)
            try:
                plan = planner.plan_for(self.budget)
            except InfeasibleBudget:
                if not planner.trials.has_differed:
                    raise
                plan = planner.least_plan(self.budget)
            if not planner.trials.has_differed:
                return plan
            self._by = plan.schedule  # it runs other ops than were predicted
            del planner
        planner = self._record(size, partial(record_under, by=self._by))
        plan = planner.plan_for(self.budget)
        self._leasts[size] = min(planner.least_budget(), plan.predicted_peak)
        self._by = plan.least
        return plan

    def _refuse(self, size: int, least: int) -> None:
        """Note that no plan fits, and correct the forecast by that."""
        forecast = self._forecasted()
        self._leasts[size] = least
        if isinstance(forecast, GraphForecast):
            self._excess = max(self._excess, least / forecast.least(size))
        plain_peak = forecast.plain_peak(size)
        self._points[size] = SizePoint(size, False, plain_peak, least, None, "plan")

    def _confirm_plain(self) -> _Confirmed:
        size = self._plain_size
        plan = self.steps.planner(size).plan_for(self.budget)
        seconds = plan.measured_time or plan.predicted_time
        return self._noted(size, plan, seconds / size, is_fast=True)

    def _noted(self, size: int, plan: Plan, plain: float, *, is_fast: bool) -> _Confirmed:
        """A size that was confirmed. ``plain``: plain seconds for each sample."""
        seconds = plan.measured_time or plan.predicted_time
        peak = plan.measured_peak or plan.predicted_peak
        self._points[size] = SizePoint(size, is_fast, plan.plain_peak, peak, seconds, "plan")
        return _Confirmed(size, plan, seconds, plain, is_fast)

    # --- for the table and the page ---------------------------------------------------------------

    def _add_predictions(self, size: int) -> None:
        """Add sizes that were not run: some without a plan, and the first that does not fit."""
        forecast, after = self._forecasted(), size + self.unit
        span = (size - self._plain_size) // self.unit
        pace = self._slowness * self._plain_now / (self._plain_per_sample or 1.0)
        steps = {n * span // _PREDICTED for n in range(1, _PREDICTED)}
        is_known = span > 1 and isinstance(forecast, GraphForecast)
        sizes = {self._plain_size + n * self.unit for n in steps if is_known}
        for each in sorted(sizes | {after}):
            if each in self._points or each >= self._end or each <= self._plain_size:
                continue
            found = forecast.fastest(each, self._room)
            peak = forecast.least(each) if found is None else found.peak
            seconds = None if found is None or found.seconds is None else found.seconds * pace
            self._points[each] = SizePoint(
                each,
                self._is_expected_to_fit(each),
                forecast.plain_peak(each),
                int(peak * self._excess),
                seconds,
                "predicted",
            )
