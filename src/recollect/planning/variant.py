"""Chooses the schedule for one kind of calls under a plan, and warns if they do not fit (P8).

Calls of a kind that is not known run with the least memory, and their step is traced as the loop
runs it. The plan's schedules are simulated on what was traced, and the fastest that fits is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from recollect.graph.graph import Graph
from recollect.graph.simulate import Outcome, simulate, simulate_plain
from recollect.planning.model_state import Differences
from recollect.planning.planned_step import PlannedStep
from recollect.planning.record import bytes_by_module, bytes_made
from recollect.planning.warn_once import WarnOnce
from recollect.replay.engine import CallReport
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording import Recording
from recollect.report.units import bytes_text

__all__ = ["IF_SHAPES_VARY", "Variant"]

#: A forward that makes this fraction more bytes than the known one still counts as that one.
_TOLERANCE = 0.01
#: The part of a budget that is used if shapes depend on data.
IF_SHAPES_VARY = 0.97
#: A kind of calls that a larger kind allows for is traced for itself when it comes so often.
_RECURS = 3
#: How often a step is traced in vain before its kind is given up.
_TRIES = 3


class Variant:
    """Calls with batches of one shape, of a model in one state.

    Args:
        plan: The plan that is applied.
        warnings: Warns the user, once for each cause.
        schedule: What they run by; None: plain.
        made: The bytes that their forward makes, by module, if that is known.
        differences: How they differ from the planned calls.
    """

    def __init__(
        self,
        plan: PlannedStep,
        warnings: WarnOnce,
        schedule: NamedSchedule | None,
        made: Mapping[str, int] | None = None,
        differences: Differences | None = None,
    ) -> None:
        self._plan = plan
        self._warnings = warnings
        self._differences = differences
        self.schedule = schedule
        self._made = made
        #: The peak to expect, and by what factor it is above the simulated one.
        self._peak = plan.predicted_peak
        self._scale = 1 + plan.excess
        #: By schedule, None being plain: how it would do, as far as that is known.
        self._outcomes: dict[NamedSchedule | None, Outcome] | None = None
        self._varies = False
        #: Whether it is a kind of its own, for which a schedule was chosen.
        self.is_known = made is not None
        #: Whether the next step is to be traced, and how often that has been in vain.
        self.wants_trace = not self.is_known
        self._tries = 0
        #: The schedule that a step ran by which made more than was known.
        self._outgrown: NamedSchedule | None = None
        self._has_outgrown = False
        self._uses = 0

    # --- what is known of it ----------------------------------------------------------------------

    @classmethod
    def within(cls, other: Variant) -> Variant:
        """A variant that takes no more memory than ``other``."""
        found = cls(other._plan, other._warnings, other.schedule, other._made, other._differences)
        found.is_known = False
        return found

    def count(self) -> None:
        """Count a call. One that recurs gets a schedule of its own, if it runs by another's."""
        self._uses += 1
        if not self.is_known and self._uses == _RECURS and self.schedule is not None:
            self.wants_trace = True

    def failed(self) -> None:
        """A step was traced in vain: its backward did not come."""
        self._tries += 1
        self.wants_trace = self._tries < _TRIES

    def judge(self, report: CallReport) -> None:
        """Compare a call that was recorded, as a whole or from some op on, with the known one."""
        recording = report.recording
        if report.is_unrecorded:
            self._warn_unrecorded(str(report.difference))
        elif report.difference is None and recording is not None and recording.reason is not None:
            self._warn_unrecorded(str(recording.reason))
        if recording is None or self._made is None:
            return
        made = bytes_made(report, self._made)
        known = max(1, sum(self._made.values()))
        # Where shapes depend on data, what one module makes more another makes less.
        added = sum(made.values()) - known
        grown = sum(now - was for _, now, was in _growth(self._made, made))
        if (added if recording.shapes else grown) > _TOLERANCE * known:
            # Roughly: as if all that is new were there at once, or in proportion. The trace will
            # tell.
            share = added / known * (self._peak - self._plan.base)
            peak = self._peak + (min(share, added) if recording.shapes else grown)
            if peak > self._plan.budget:
                self._warn(round(peak), made)
            self._has_outgrown, self._outgrown = True, self.schedule
            self.schedule, self.wants_trace = self._plan.least, True

    def traced(self, graph: Graph, recording: Recording) -> None:
        """A step was traced: choose the schedule of those that follow."""
        plan, made = self._plan, bytes_by_module(recording)
        if recording.reason is not None:
            self._warn_unrecorded(str(recording.reason))
        self._outcomes = _outcomes_of(plan, graph)
        self._varies = graph.varies
        ran = self._outgrown if self._has_outgrown else self.schedule
        self.schedule = self._chosen()
        self._peak = self._expected(self.schedule)
        ran_peak = self._expected(ran) if ran in self._outcomes else self._peak
        if max(self._peak, ran_peak) > plan.budget:
            self._warn(ran_peak, made, self._peak)
        if self._made is not None:  # the most that was seen
            made = {path: max(size, self._made.get(path, 0)) for path, size in made.items()}
        self._made = made
        self.is_known, self.wants_trace, self._has_outgrown = True, False, False

    def exceeded(self, measured: int) -> bool:
        """A step took ``measured`` bytes, more than its budget. Whether later ones take less."""
        before, plan = self.schedule, self._plan
        if self._outcomes is None:
            if plan.graph is None:
                self.schedule = plan.least
                return self.schedule != before
            self._outcomes = _outcomes_of(plan, plan.graph)
        if before in self._outcomes:
            self._scale = max(self._scale, measured / self._outcomes[before].peak)
            self.schedule = self._chosen()
        return self.schedule != before

    def _chosen(self) -> NamedSchedule | None:
        """The fastest schedule that fits, or else the one of the least peak."""
        outcomes = self._outcomes
        assert outcomes is not None
        room = self._plan.budget * (IF_SHAPES_VARY if self._varies else 1.0)
        fitting = [each for each in outcomes if self._expected(each) <= room]
        if fitting:
            return min(fitting, key=lambda each: outcomes[each].seconds)
        return min(outcomes, key=lambda each: outcomes[each].peak)

    def _expected(self, schedule: NamedSchedule | None) -> int:
        """The peak to expect under a schedule."""
        assert self._outcomes is not None
        return math.ceil(self._outcomes[schedule].peak * self._scale)

    # --- warnings ---------------------------------------------------------------------------------

    def _warn_unrecorded(self, reason: str) -> None:
        if self._plan.stopped is not None:
            return  # as when it was planned
        self._warnings.warn(
            reason,
            "the plan is not in effect for a part of the step, which may exceed its budget: from "
            f"some op on forward could not be recorded ({reason}), and all that autograd saves "
            "after it stays in memory",
        )

    def _warn(self, peak: int, made: Mapping[str, int], later: int = 0) -> None:
        """Warn of a step that takes ``peak`` bytes; those that follow take ``later``."""
        plan = self._plan
        texts: list[str] = []
        cures: tuple[str, ...] = ("make the plan with the largest step that there is",)
        if self._differences is not None:
            texts, cures = [*self._differences.texts], self._differences.cures or cures
        grown = _growth(self._made or dict(plan.made), made)
        cause = "; ".join(texts)
        if grown:
            path, now, before = grown[0]
            cause = cause or re.sub(r"\d+", "*", path)
            texts.append(
                f"in {path or 'the model'} forward makes {bytes_text(now)}, and made "
                f"{bytes_text(before)}"
            )
        texts = texts or ["what it keeps in memory is not what was planned"]
        still = f", and take about {bytes_text(later)} still" if later > plan.budget else ""
        self._warnings.warn(
            cause,
            f"this step is not the one that the plan was made for: {'; '.join(texts)}. It takes "
            f"about {bytes_text(peak)}, and the budget is {bytes_text(plan.budget)}. The "
            f"steps like it that follow keep less and recompute more{still}. For a plan that knows "
            f"of it: {'; '.join(cures)}",
        )


def _outcomes_of(plan: PlannedStep, graph: Graph) -> dict[NamedSchedule | None, Outcome]:
    """How the schedules of a plan, and the plain step, do on the graph of a step."""
    graph = plan.with_costs(graph)
    outcomes: dict[NamedSchedule | None, Outcome] = {None: simulate_plain(graph)}
    for each in dict.fromkeys((plan.schedule, *plan.alternatives)):
        outcomes[each] = simulate(graph, each.schedule_in(graph))
    return outcomes


def _growth(known: Mapping[str, int], made: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """The modules whose results are larger than known: path, bytes now and before."""
    modules = [(path, size, known.get(path, 0)) for path, size in made.items()]
    return sorted(
        (each for each in modules if each[1] > each[2]), key=lambda each: each[2] - each[1]
    )
