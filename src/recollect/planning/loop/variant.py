"""One kind of forwards under a plan: its schedule, and a warning if that does not fit (P8).

The first forward of a new kind runs with the least memory, and its step is traced as the loop runs
it. Then a schedule is chosen for the kind (`choice`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from recollect.checks.place import WarnOnce
from recollect.planning.loop import notices
from recollect.planning.loop.companions import RunsBy
from recollect.planning.loop.contest import Contest
from recollect.planning.loop.planned_step import PlannedStep
from recollect.planning.recording.model_state import Differences
from recollect.planning.recording.record import bytes_by_module, bytes_made
from recollect.replay.engine import CallReport
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording import Recording
from recollect.report.units import bytes_text

#: A forward that makes this fraction more bytes than the known one still counts as that one.
_TOLERANCE = 0.01
#: A new node of autograd's graph may keep this many times as much memory as a known one.
_UNEVEN = 2
#: A kind that runs by the schedule of a larger one is traced when it has come this often.
_RECURS = 3
#: How often the trace of a kind may fail.
_TRIES = 3
#: After the n-th unexpected forward, more forwards are expected for this many steps to the power n.
_EXPECTED = 3


class Variant:
    """Forwards with batches of one shape, of a model in one state, at one place in a step.

    Args:
        plan: The plan that is applied.
        warnings: Warns the user, once for each cause.
        schedule: The schedule by which they run; None: plain.
        made: The bytes that they make, by module, if that is known.
        differences: How they differ from the planned ones.
        first: The first forward of such steps; None: it is this one.
    """

    def __init__(
        self,
        plan: PlannedStep,
        warnings: WarnOnce,
        schedule: NamedSchedule | None,
        made: Mapping[str, int] | None = None,
        differences: Differences | None = None,
        first: Variant | None = None,
    ) -> None:
        self._plan = plan
        self._warnings = warnings
        self._differences = differences
        self.first = first or self
        self.schedule = schedule
        self._made = made
        #: A recording of such a forward, under this schedule or another one.
        self.recording: Recording | None = None
        #: Whether the traced forward keeps the results of blocks, too: where more parameters are
        #: trained than planned, no schedule of the plan divides what is recomputed.
        self.keeps_blocks = differences is not None and differences.for_optimizer > 0
        #: The peak to expect of the step.
        self.peak = plan.predicted_peak
        #: Whether it is a kind of its own, for which a schedule was chosen.
        self.is_known = made is not None
        #: Of a first forward: whether the next step is traced.
        self.wants_trace = False
        self._tries = 0  #: how many traces had no backward
        self.expects = 0  #: for how many more steps further forwards are expected
        self._surprises = 0  #: how often a further forward came unexpectedly
        #: What ran a forward that has made more bytes than expected since a schedule was chosen.
        self.outgrown: RunsBy | None = None
        self.differs = False  #: whether what it does has ever differed from step to step
        self._uses = 0
        #: The most nodes that a forward is known to make in the graph of autograd.
        self.nodes: int | None = None
        #: Schedules that take turns, until the fastest is known.
        self.contest: Contest | None = None
        self.is_predicted = False  #: whether its step was predicted, not traced
        self.version = -1  #: that of `Shapes` when a prediction was tried
        #: The bytes made by the last recorded forward, relative to the expected ones.
        self.ratio = 1.0
        if not self.is_known:
            self.first.wants_trace = True

    @classmethod
    def within(cls, other: Variant, first: Variant | None) -> Variant:
        """A variant that takes no more memory than ``other``."""
        found = cls(
            other._plan, other._warnings, other.schedule, other._made, other._differences, first
        )
        found.is_known, found.peak = False, other.peak
        return found

    def count(self) -> None:
        """Count a call. A kind that recurs gets its own schedule, if it has that of another."""
        self._uses += 1
        if self.contest is not None:
            winner = self.contest.winner()
            self.schedule = winner or self.contest.next()
            self.contest = self.contest if winner is None else None
        if not self.is_known and self._uses == _RECURS and self.schedule is not None:
            self.first.wants_trace = True

    def failed(self) -> None:
        """The trace of a step failed: there was no backward."""
        self._tries += 1
        self.wants_trace = self._tries < _TRIES

    def surprised(self) -> None:
        """More forwards followed than expected: for a while, keep as little as possible."""
        self._surprises += 1
        self.expects = _EXPECTED**self._surprises
        self.forget()

    def forget(self) -> None:
        """The step does more than is known: until it is traced, it takes little memory."""
        self.schedule, self.first.wants_trace = self._plan.least, True
        self.contest = None

    @property
    def ran_by(self) -> NamedSchedule | None:
        """The schedule of the last forward that was not run with less memory to be traced."""
        return self.schedule if self.outgrown is None else self.outgrown.schedule

    def is_as_expected(self, report: CallReport) -> bool:
        """Compare the bytes of a call that was recorded, whole or from some op on, with the known.

        Returns whether it made no more than those.
        """
        recording = report.recording
        if report.is_unrecorded:
            notices.of_unrecorded(self._warnings, self._plan, str(report.difference))
        elif report.difference is None and recording is not None and recording.reason is not None:
            notices.of_unrecorded(self._warnings, self._plan, str(recording.reason))
        if recording is None or self._made is None:
            return False
        made = bytes_made(report, self._made)
        known = max(1, sum(self._made.values()))
        # Where shapes depend on data, one module may make more bytes and another one fewer. Nor is
        # it known which modules ran the ops that were as recorded before others came.
        added = sum(made.values()) - known
        in_all = bool(recording.shapes) or report.difference is not None
        grown = sum(now - was for _, now, was in _growth(self._made, made))
        self.ratio = 1 + added / known
        if (added if in_all else grown) <= _TOLERANCE * known:
            return True
        # A rough estimate: all new bytes are there at once, or in proportion. The trace will tell.
        share = added / known * (self.peak - self._plan.base)
        peak = self.peak + (min(share, added) if recording.shapes else grown)
        if peak > self._plan.budget:
            self.warn(round(peak), made)
        elif recording.shapes:
            return True  # the margin is there for that
        self.outgrown = RunsBy(self.schedule)
        self._run_with_least()
        return False

    def ran_plain(self, nodes: int) -> None:
        """A forward ran without the engine, and made so many nodes in the graph of autograd.

        More of them than known are more work, as that of a layer which was skipped before.
        """
        known = self.nodes = self.nodes or nodes
        more = (self.peak - self._plan.base) * (nodes - known) / max(1, known)
        if more > 0 and self.peak + more > self._plan.budget:
            self.warn(round(self.peak + more), nodes=nodes)
        # How much each node keeps is not known: the trace of the next step will tell.
        if more > 0 and self.peak + _UNEVEN * more > self._plan.budget:
            self._run_with_least()

    def _run_with_least(self) -> None:
        """What forwards do differs: the next step is traced, and takes little memory."""
        self.differs = True
        self.forget()

    def traced(self, recording: Recording, is_whole: bool) -> Mapping[str, int]:
        """A step was traced. Returns the bytes that the forward made, by module.

        ``is_whole``: whether it is recorded as a whole, and not merged from its units.
        """
        self.recording = recording if is_whole else None
        self.nodes = recording.nodes
        if recording.reason is not None:
            notices.of_unrecorded(self._warnings, self._plan, str(recording.reason))
        return bytes_by_module(recording)

    def choose(self, schedule: NamedSchedule | None, peak: int) -> None:
        """Run by ``schedule`` from now on, in steps that are expected to take ``peak`` bytes."""
        self.schedule, self.peak, self.contest = schedule, peak, None
        self.is_known, self.wants_trace, self.outgrown = True, False, None
        self.keeps_blocks, self.expects = False, 0

    def learn(self, made: Mapping[str, int]) -> None:
        """Remember the most bytes that a forward has made, by module."""
        if self._made is not None:
            known = self._made
            paths = {**known, **made}
            made = {path: max(known.get(path, 0), made.get(path, 0)) for path in paths}
        self._made = made

    # --- warnings ---------------------------------------------------------------------------------

    def warn(
        self,
        peak: int,
        made: Mapping[str, int] | None = None,
        later: int = 0,
        forwards: int = 1,
        nodes: int = 0,
    ) -> None:
        """Warn of a step that takes ``peak`` bytes; later ones take ``later``.

        ``made``: the bytes that this forward made, by module, or ``nodes``: the nodes of autograd's
        graph; ``forwards``: how many the step has.
        """
        differences = self._differences or Differences()
        texts = [*differences.texts]
        if forwards > 1:
            texts.insert(0, f"it calls the model {forwards} times before backward")
        cause = "; ".join(texts)
        if nodes:
            cause = cause or "nodes"
            texts.append(
                f"forward makes {nodes} nodes of autograd's graph, and made {self.nodes} when it "
                "was planned"
            )
        if grown := _growth(self._made or dict(self._plan.made), made or {}):
            path, now, before = grown[0]
            cause = cause or re.sub(r"\d+", "*", path)
            if bytes_text(now) != bytes_text(before):
                texts.append(
                    f"forward makes {bytes_text(now)} in {path or 'the model'}, and made "
                    f"{bytes_text(before)} when it was planned"
                )
        texts = texts or ["it keeps other tensors in memory than the planned one"]
        cures = self._cures(differences, forwards, max(peak, later))
        self._warnings.warn(
            cause,
            f"this step is not the one that the plan was made for: {'; '.join(texts)}. "
            f"{_outlook(peak, later, self._plan.budget)}. To have room for it: {'; '.join(cures)}",
        )

    def _cures(self, differences: Differences, forwards: int, most: int) -> tuple[str, ...]:
        """What makes room for a step of so many forwards that takes up to ``most`` bytes."""
        if self._plan.from_loop:  # there was no batch to plan with
            again = f"recollect.unwrap(model), then recollect.fit(model, budget={most})"
            return (*differences.cures, f"smaller batches, or a larger budget: {again}")
        if forwards > 1:
            return ("smaller batches, or a budget with room for all forwards",)
        return differences.cures or ("make the plan with the largest step of the training",)


def _outlook(peak: int, later: int, budget: int) -> str:
    """Say what a step takes, and what later ones like it take."""
    if peak <= budget < later:
        return (
            f"Steps like it may take about {bytes_text(later)}, although they keep as little as "
            f"they can, and the budget is {bytes_text(budget)}"
        )
    still = f", but still take about {bytes_text(later)}" if later > budget else ""
    return (
        f"It takes about {bytes_text(peak)}, and the budget is {bytes_text(budget)}. Later steps "
        f"like it keep less and recompute more{still}"
    )


def _growth(known: Mapping[str, int], made: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """The modules whose results are larger than known: path, bytes now and before."""
    modules = [(path, size, known.get(path, 0)) for path, size in made.items()]
    return sorted(
        (each for each in modules if each[1] > each[2]), key=lambda each: each[2] - each[1]
    )
