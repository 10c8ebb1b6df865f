"""Calls under a plan that are alike: what they go by, and whether they are what was planned.

A forward under a plan is recorded now and then, always the first time, and every time if it is
never twice the same. Each recording is compared with the forward that was planned. If it is more,
the step is estimated from it; if that is above the budget, the user is told, and later calls go by
the quickest of the plan's alternatives that is within it.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any, Protocol

from recollect.graph.graph import Graph, Tally
from recollect.planning.choices import Choices
from recollect.planning.conditions import Differences
from recollect.planning.footprint import Footprint, estimated, tally_of
from recollect.planning.outline import outline_of
from recollect.replay.engine import Witness
from recollect.replay.planned_ops import Decisions
from recollect.replay.recording import Recording
from recollect.report.units import bytes_text

__all__ = ["Variant"]

#: By how much the estimate for a larger batch has to be above what was predicted to be believed.
_ROUGH = 1.2
#: The part of the budget up to which a step that was predicted to fit without a plan surely does.
_FAR = 0.5
#: The part of what a forward makes by which it may be above what was predicted to be the same.
_SAME = 0.01
#: The part of a growth by which the estimate of its step may be too low.
_EXACT = 8
#: What is left free of the budget by choices that were not tried.
_SPARE = 0.02


class _Tells(Protocol):
    def tell(self, cause: str, message: str) -> None: ...


class Variant:
    """Calls with batches of one shape, of a model in one state."""

    def __init__(
        self,
        plan: Any,
        decisions: Decisions | None,
        told: _Tells,
        *,
        choices: Choices | None,
        differences: Differences | None = None,
        predicted: int | None = None,
        expected: Footprint | None = None,
    ) -> None:
        self._plan = plan
        self._told = told
        #: What to go by; None: as without a plan, which fits.
        self.decisions = decisions
        #: Whether it is predicted that one fits without a plan, and to be seen.
        self._is_trial = False
        #: The choices behind them; None: nothing is known of such calls yet.
        self._choices = choices
        self._differences = differences
        #: For a batch that is larger than planned: what is predicted of it.
        self._predicted, self._expected = predicted, expected
        #: What to compare with; and the growth over that which is known to be accounted for.
        self._footprint: Footprint | None = None if predicted is not None else plan.footprint
        self._accounted = 0.0

    @classmethod
    def planned(cls, plan: Any, told: _Tells) -> Variant:
        """Calls that are those of the plan, or smaller."""
        return cls(plan, _decisions_of(plan), told, choices=plan.choices)

    @classmethod
    def replanned(cls, plan: Any, other: Any, told: _Tells) -> Variant:
        """Calls with another batch, for which ``other`` is the plan."""
        variant = cls(
            plan,
            _decisions_of(other),
            told,
            choices=other.choices,
            predicted=other.predicted_peak,
            expected=other.footprint,
        )
        is_near = other.plain_peak > _FAR * plan.budget
        if variant.decisions is None and is_near and not other.choices.blocks:
            # The first is recorded, since what was predicted may be wrong.
            variant.decisions, variant._is_trial = other.decisions, True
        return variant

    @classmethod
    def unknown(cls, plan: Any, differences: Differences, told: _Tells) -> Variant:
        """Calls that differ from those planned: the first goes by what takes least."""
        return cls(plan, plan.least_decisions, told, choices=None, differences=differences)

    # --- after a call -----------------------------------------------------------------------------

    def judge(self, witness: Witness) -> None:
        """A call was recorded, all of it or a part: see whether it is what was planned."""
        before = self.decisions
        self._judge(witness)
        if self._is_trial and self.decisions is before:
            self.decisions = None
        self._is_trial = False

    def _judge(self, witness: Witness) -> None:
        if witness.difference is not None:
            self._judge_rest(witness)
            return
        recording = witness.recording
        assert recording is not None
        tally = tally_of(recording)
        if self._footprint is None:
            self._footprint = self._first(recording, tally)
        if not tally.is_whole and self._footprint.tally.is_whole:
            self._tell_unrecorded(str(recording.reason))
        growth = self._footprint.growth(tally)
        if self._choices is None:
            self._settle(outline_of(recording), tally)
        elif growth > self._accounted:
            outline = outline_of(recording)
            rough = self._estimate(outline, self._choices) + growth / _EXACT
            if rough > self._plan.budget:
                self._settle(outline, tally)
            self._accounted = max(self._accounted, growth)

    def _first(self, recording: Recording, tally: Tally) -> Footprint:
        """A larger batch as it is first met: what later calls with it are compared with."""
        predicted, expected = self._predicted, self._expected
        assert predicted is not None
        assert expected is not None
        plan = self._plan
        known: Footprint = plan.footprint
        outline = outline_of(recording)
        peak = self._estimate(outline, self._choices)
        more = expected.made_more(tally)
        is_wrong = more > _SAME * sum(size for _, size in expected.tally.made)
        if is_wrong and predicted + more > plan.budget:
            self._settle(outline, tally, predicted + more)  # sizes were mistaken for others
            return known
        if peak > max(plan.budget, _ROUGH * predicted):
            self._settle(outline, tally)  # there is more to it than the batch
            return known
        scale = (predicted - plan.base) / max(1.0, peak - plan.base)
        return replace(known, tally=tally, factors=tuple(scale * each for each in known.factors))

    def _settle(self, outline: Graph, tally: Tally, least: float = 0.0) -> None:
        """Find what to go by from now on. Say so if it is not what was planned.

        ``least``: bytes that the step is known to take, whatever is estimated.
        """
        plan = self._plan
        options = (plan.choices, *plan.alternatives)
        room = plan.budget * (1 - _SPARE)
        peaks = [self._estimate(outline, each) for each in options]
        was_unknown, self._accounted = self._choices is None, math.inf
        growth = plan.footprint.growth(tally)
        if was_unknown and peaks[0] + growth / _EXACT <= plan.budget:
            self._choices, self.decisions = plan.choices, _decisions_of(plan)
            self._accounted = growth
            return
        fitting = [n for n, peak in enumerate(peaks) if n and peak <= room]
        number = fitting[0] if fitting else min(range(len(peaks)), key=peaks.__getitem__)
        peak = peaks[0] if was_unknown else self._estimate(outline, self._choices)
        self._tell(max(peak, least), tally, peaks[number])
        self._choices = options[number]
        self.decisions = plan.decisions_for(self._choices)
        if number < len(options) - 1:
            self._accounted = growth

    def _estimate(self, outline: Graph, choices: Choices | None) -> float:
        """Bytes that a step takes at its peak, by its outline."""
        plan = self._plan
        assert choices is not None
        options = (plan.choices, *plan.alternatives)
        number = options.index(choices) if choices in options else 0
        factors = plan.footprint.factors if self._footprint is None else self._footprint.factors
        more = 0 if self._differences is None else self._differences.nbytes
        guess = estimated(outline, choices, plan.footprint.alike)
        return float(plan.base + factors[number] * guess + more)

    def _judge_rest(self, witness: Witness) -> None:
        """A call differed from what had been recorded, from somewhere on."""
        if witness.is_unrecorded:
            self._tell_unrecorded(str(witness.difference))
        footprint, plan = self._footprint, self._plan
        if witness.recording is None or footprint is None:
            return
        tally = tally_of(witness.recording, witness.before, witness.steps)
        known = footprint.tally
        # What comes from outside of the rest is not from outside of the call.
        tally = Tally(tally.made, tally.saved, known.gradients, tally.is_whole)
        growth = footprint.growth(tally)
        predicted = plan.predicted_peak if self._predicted is None else self._predicted
        # What autograd saved is counted among what was made, too.
        if growth > self._accounted and predicted + growth > plan.budget:
            self._tell(predicted + growth / 2, tally)

    # --- what there is to say ---------------------------------------------------------------------

    def _tell_unrecorded(self, reason: str) -> None:
        self._told.tell(
            reason,
            "the plan is not in effect for a part of the step, which may exceed its budget: what "
            f"autograd saves is held from where forward could not be recorded, for {reason}",
        )

    def _tell(self, peak: float, tally: Tally, then: float = 0.0) -> None:
        """Warn of a step that takes ``peak``, while those that follow take ``then``."""
        plan = self._plan
        footprint = self._footprint or plan.footprint
        texts = [] if self._differences is None else [*self._differences.texts]
        cures = [] if self._differences is None else [*self._differences.cures]
        grown = footprint.grown(tally)
        cause = "; ".join(texts)
        if not texts and grown:
            cause = re.sub(r"\d+", "*", grown[0][0])
        if grown:
            path, now, before = grown[0]
            texts.append(
                f"in {path or 'the model'} forward makes {bytes_text(now)}, and made "
                f"{bytes_text(before)}"
            )
        if not cures:
            cures = ["make the plan with the largest step that there is"]
        is_over = then > plan.budget
        still = f", and take about {bytes_text(round(then))} still" if is_over else ""
        self._told.tell(
            cause,
            f"this step is not the one that the plan was made for: {'; '.join(texts)}. It takes "
            f"about {bytes_text(round(peak))}, and the budget is {bytes_text(plan.budget)}. The "
            f"steps like it that follow keep less and recompute more{still}. For a plan that knows "
            f"of it: {'; '.join(cures)}",
        )


def _decisions_of(plan: Any) -> Decisions | None:
    return None if plan.plain_peak <= plan.budget else plan.decisions
