"""Calls under a plan that are alike: their schedule, and whether they are what was planned (P8).

A forward under a plan is recorded at its first call, and at every call if no two are the same. Each
recording is compared with the planned forward. If it makes more, the step is estimated from it; if
the estimate exceeds the budget, the user is warned, and later calls go by the quickest of the
plan's alternatives that fits.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Protocol

from recollect.graph.graph import Graph, Tally
from recollect.planning.estimate import Footprint, estimated, outline_of, tally_of
from recollect.planning.model_state import Differences
from recollect.planning.planned import PlannedStep
from recollect.replay.engine import CallReport
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording import Recording
from recollect.report.units import bytes_text

__all__ = ["Variant"]

#: An estimate for a larger batch overrides the prediction if it is this many times as high.
_ROUGH = 1.2
#: A step predicted to take less than this part of the budget without a plan is not checked.
_FAR = 0.5
#: A forward may make this part more bytes than predicted, and still count as the predicted one.
_SAME = 0.01
#: The estimate of a step that grew may be too low by this part of the growth.
_ESTIMATE_ERROR = 1 / 8
#: Schedules that were not tried leave this part of the budget free.
_SPARE = 0.02


class _Tells(Protocol):
    def tell(self, cause: str, message: str) -> None: ...


class Variant:
    """Calls with batches of one shape, of a model in one state.

    Args:
        plan: The plan that is applied.
        told: Warns the user.
        larger: The plan for their batch, if that is larger than the planned one.
        differences: How they differ from the planned ones, if nothing else is known of them.
    """

    def __init__(
        self,
        plan: PlannedStep,
        told: _Tells,
        *,
        larger: PlannedStep | None = None,
        differences: Differences | None = None,
    ) -> None:
        self._plan = plan
        self._told = told
        self._larger = larger
        self._differences = differences
        by = plan if larger is None else larger
        #: What the engine plays; None: the step fits without a plan.
        self.schedule: NamedSchedule | None = _schedule_of(by)
        #: What would be played if it did not; None: nothing is known of such calls yet.
        self._chosen: NamedSchedule | None = by.schedule
        if differences is not None:  # the first goes by the least memory
            self.schedule, self._chosen = plan.least, None
        #: Whether the first call is recorded only because the prediction may be wrong.
        self._is_trial = (
            larger is not None
            and self.schedule is None
            and larger.plain_peak > _FAR * plan.budget
            and not larger.schedule.blocks
        )
        if self._is_trial:
            self.schedule = by.schedule
        #: The forward to compare with, and the growth over it that has been accounted for.
        self._footprint: Footprint | None = plan.footprint if larger is None else None
        self._accounted = 0.0

    # --- after a call -----------------------------------------------------------------------------

    def judge(self, report: CallReport) -> None:
        """A call was recorded, all of it or a part: compare it with the planned one."""
        before = self.schedule
        if report.difference is None:
            assert report.recording is not None
            self._judge_whole(report.recording)
        else:
            self._judge_rest(report)
        if self._is_trial and self.schedule is before:
            self.schedule = None
        self._is_trial = False

    def _judge_whole(self, recording: Recording) -> None:
        tally = tally_of(recording)
        if self._footprint is None:
            self._footprint = self._first(recording, tally)
        if not tally.is_whole and self._footprint.tally.is_whole:
            self._tell_unrecorded(str(recording.reason))
        growth = self._footprint.growth(tally)
        if self._chosen is None:
            self._choose(outline_of(recording), tally)
        elif growth > self._accounted:
            outline = outline_of(recording)
            rough = self._estimate(outline, self._chosen) + growth * _ESTIMATE_ERROR
            if rough > self._plan.budget:
                self._choose(outline, tally)
            self._accounted = max(self._accounted, growth)

    def _first(self, recording: Recording, tally: Tally) -> Footprint:
        """The footprint of a larger batch that is met for the first time."""
        plan, larger = self._plan, self._larger
        assert larger is not None
        known, predicted = plan.footprint, larger.predicted_peak
        outline = outline_of(recording)
        peak = self._estimate(outline, self._chosen)
        more = larger.footprint.made_more(tally)
        is_wrong = more > _SAME * sum(size for _, size in larger.footprint.tally.made)
        if is_wrong and predicted + more > plan.budget:
            self._choose(outline, tally, predicted + more)  # sizes were mistaken for others
            return known
        if peak > max(plan.budget, _ROUGH * predicted):
            self._choose(outline, tally)  # there is more to it than the batch
            return known
        scale = (predicted - plan.base) / max(1.0, peak - plan.base)
        return replace(known, tally=tally, factors=tuple(scale * each for each in known.factors))

    def _choose(self, outline: Graph, tally: Tally, least: float = 0.0) -> None:
        """Choose among the alternatives for later calls. Warn if the plan's own do not fit.

        ``least``: bytes that the step is known to take, whatever is estimated.
        """
        plan = self._plan
        options = (plan.schedule, *plan.alternatives)
        room = plan.budget * (1 - _SPARE)
        peaks = [self._estimate(outline, each) for each in options]
        was_unknown, self._accounted = self._chosen is None, math.inf
        growth = plan.footprint.growth(tally)
        if was_unknown and peaks[0] + growth * _ESTIMATE_ERROR <= plan.budget:
            self._chosen, self.schedule = plan.schedule, _schedule_of(plan)
            self._accounted = growth
            return
        fitting = [n for n, peak in enumerate(peaks) if n and peak <= room]
        number = fitting[0] if fitting else min(range(len(peaks)), key=peaks.__getitem__)
        peak = peaks[0] if was_unknown else self._estimate(outline, self._chosen)
        self._tell(max(peak, least), tally, peaks[number])
        self._chosen = self.schedule = options[number]
        if number < len(options) - 1:
            self._accounted = growth

    def _estimate(self, outline: Graph, schedule: NamedSchedule | None) -> float:
        """The peak of a step in bytes, estimated from its outline."""
        plan = self._plan
        assert schedule is not None
        options = (plan.schedule, *plan.alternatives)
        number = options.index(schedule) if schedule in options else 0
        factors = (self._footprint or plan.footprint).factors
        more = 0 if self._differences is None else self._differences.nbytes
        return plan.base + factors[number] * estimated(outline, schedule) + more

    def _judge_rest(self, report: CallReport) -> None:
        """A call differed from its recording at some op; the rest of it was recorded."""
        if report.is_unrecorded:
            self._tell_unrecorded(str(report.difference))
        footprint, plan = self._footprint, self._plan
        if report.recording is None or footprint is None:
            return
        tally = tally_of(report.recording, report.before, report.calls)
        # What comes from outside of the rest is not from outside of the call.
        tally = replace(tally, gradients=footprint.tally.gradients)
        growth = footprint.growth(tally)
        predicted = (self._larger or plan).predicted_peak
        # What autograd saved is counted among what was made, too.
        if growth > self._accounted and predicted + growth > plan.budget:
            self._tell(predicted + growth / 2, tally)

    # --- warnings ---------------------------------------------------------------------------------

    def _tell_unrecorded(self, reason: str) -> None:
        self._told.tell(
            reason,
            "the plan is not in effect for a part of the step, which may exceed its budget: what "
            f"autograd saves is held from where forward could not be recorded, for {reason}",
        )

    def _tell(self, peak: float, tally: Tally, then: float = 0.0) -> None:
        """Warn of a step that takes ``peak``; those that follow take ``then``."""
        plan = self._plan
        texts: list[str] = []
        cures: tuple[str, ...] = ("make the plan with the largest step that there is",)
        if self._differences is not None:
            texts, cures = [*self._differences.texts], self._differences.cures or cures
        grown = (self._footprint or plan.footprint).grown(tally)
        cause = "; ".join(texts)
        if grown:
            path, now, before = grown[0]
            cause = cause or re.sub(r"\d+", "*", path)
            texts.append(
                f"in {path or 'the model'} forward makes {bytes_text(now)}, and made "
                f"{bytes_text(before)}"
            )
        is_over = then > plan.budget
        still = f", and take about {bytes_text(round(then))} still" if is_over else ""
        self._told.tell(
            cause,
            f"this step is not the one that the plan was made for: {'; '.join(texts)}. It takes "
            f"about {bytes_text(round(peak))}, and the budget is {bytes_text(plan.budget)}. The "
            f"steps like it that follow keep less and recompute more{still}. For a plan that knows "
            f"of it: {'; '.join(cures)}",
        )


def _schedule_of(plan: PlannedStep) -> NamedSchedule | None:
    return None if plan.plain_peak <= plan.budget else plan.schedule
