"""One kind of forwards under a plan: its schedule, and a warning if that does not fit (P8).

The first forward of a new kind runs with the least memory, and its step is traced as the loop runs
it. Then a schedule is chosen for the kind (`choice`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

from recollect.checks.place import WarnOnce
from recollect.planning.loop import notices
from recollect.planning.loop.companions import RunsBy
from recollect.planning.loop.contest import Contest
from recollect.planning.loop.planned_step import ForwardKind, PlannedStep
from recollect.planning.recording.record import bytes_by_module, bytes_made
from recollect.replay.engine import CallReport
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording import Recording

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


@dataclass(eq=False)
class Variant:
    """Forwards with batches of one shape, of a model in one state, at one place in a step.

    Args:
        plan: The plan that is applied.
        warnings: Warns the user, once for each cause.
        schedule: The schedule by which they run; None: plain.
        made: The bytes that they make, by module, if that is known.
        kind: Their kind; None: that of a planned one.
        of_first: The first forward of such steps; None: it is this one.
    """

    plan: PlannedStep
    warnings: WarnOnce
    schedule: NamedSchedule | None
    made: Mapping[str, int] | None = None
    kind: ForwardKind | None = None
    of_first: InitVar[Variant | None] = None
    first: Variant = field(init=False)
    #: A recording of such a forward, under this schedule or another one.
    recording: Recording | None = None
    keeps_blocks: bool = field(init=False)  #: whether the traced forward keeps them, too
    peak: int = field(init=False)  #: the peak to expect of the step
    is_known: bool = field(init=False)  #: whether a schedule was chosen for this very kind
    wants_trace: bool = False  #: of a first forward: whether the next step is traced
    tries: int = 0  #: how many traces had no backward
    expects: int = 0  #: for how many more steps further forwards are expected
    surprises: int = 0  #: how often a further forward came unexpectedly
    #: What ran a forward that has made more bytes than expected since a schedule was chosen.
    outgrown: RunsBy | None = None
    differs: bool = False  #: whether what it does has ever differed from step to step
    uses: int = 0
    nodes: int | None = None  #: the most nodes that a forward made in the graph of autograd
    contest: Contest | None = None  #: schedules that take turns, until the fastest is known
    is_predicted: bool = False  #: whether its step was predicted, not traced
    version: int = -1  #: that of `Shapes` when a prediction was tried
    ratio: float = 1.0  #: of bytes made by the last recorded forward to the expected ones

    def __post_init__(self, of_first: Variant | None) -> None:
        self.first = of_first or self
        self.peak, self.is_known = self.plan.predicted_peak, self.made is not None
        # Where more parameters are trained than planned, no schedule of the plan divides what is
        # recomputed.
        differences = None if self.kind is None else self.kind.differences
        self.keeps_blocks = differences is not None and differences.for_optimizer > 0
        self.first.wants_trace |= not self.is_known

    @classmethod
    def within(cls, other: Variant, first: Variant | None) -> Variant:
        """A variant that takes no more memory than ``other``."""
        found = cls(other.plan, other.warnings, other.schedule, other.made, other.kind, first)
        found.is_known, found.peak = False, other.peak
        return found

    def count(self) -> None:
        """Count a call. A kind that recurs gets its own schedule, if it has that of another."""
        self.uses += 1
        if self.contest is not None:
            winner = self.contest.winner()
            self.schedule = winner or self.contest.next()
            self.contest = self.contest if winner is None else None
        if not self.is_known and self.uses == _RECURS and self.schedule is not None:
            self.first.wants_trace = True

    def trace_failed(self) -> None:
        """The trace of a step failed: there was no backward."""
        self.tries += 1
        self.wants_trace = self.tries < _TRIES

    def surprised(self) -> None:
        """More forwards followed than expected: for a while, keep as little as possible."""
        self.surprises += 1
        self.expects = _EXPECTED**self.surprises
        self.forget()

    def forget(self) -> None:
        """The step does more than is known: until it is traced, it takes little memory."""
        self.schedule, self.first.wants_trace = self.plan.least, True
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
            notices.of_unrecorded(self.warnings, self.plan, str(report.difference))
        elif report.difference is None and recording is not None and recording.reason is not None:
            notices.of_unrecorded(self.warnings, self.plan, str(recording.reason))
        if recording is None or self.made is None:
            return False
        made = bytes_made(report, self.made)
        known = max(1, sum(self.made.values()))
        # Where shapes depend on data, one module may make more bytes and another one fewer. Nor is
        # it known which modules ran the ops that were as recorded before others came.
        added = sum(made.values()) - known
        in_all = bool(recording.shapes) or report.difference is not None
        grown = sum(now - was for _, now, was in _growth(self.made, made))
        self.ratio = 1 + added / known
        if (added if in_all else grown) <= _TOLERANCE * known:
            return True
        # A rough estimate: all new bytes are there at once, or in proportion. The trace will tell.
        share = added / known * (self.peak - self.plan.base)
        peak = self.peak + (min(share, added) if recording.shapes else grown)
        if peak > self.plan.budget:
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
        more = (self.peak - self.plan.base) * (nodes - known) / max(1, known)
        if more > 0 and self.peak + more > self.plan.budget:
            self.warn(round(self.peak + more), nodes=nodes)
        # How much each node keeps is not known: the trace of the next step will tell.
        if more > 0 and self.peak + _UNEVEN * more > self.plan.budget:
            self._run_with_least()

    def _run_with_least(self) -> None:
        """What forwards do differs: the next step is traced, and takes little memory."""
        self.differs = True
        self.forget()

    def add_trace(self, recording: Recording, is_whole: bool) -> Mapping[str, int]:
        """Its step was traced. Returns the bytes that the forward made, by module.

        ``is_whole``: whether it is recorded as a whole, and not merged from its units.
        """
        self.recording = recording if is_whole else None
        self.nodes = recording.nodes
        if recording.reason is not None:
            notices.of_unrecorded(self.warnings, self.plan, str(recording.reason))
        return bytes_by_module(recording)

    def choose(self, schedule: NamedSchedule | None, peak: int) -> None:
        """Run by ``schedule`` from now on, in steps that are expected to take ``peak`` bytes."""
        self.schedule, self.peak, self.contest = schedule, peak, None
        self.is_known, self.wants_trace, self.outgrown = True, False, None
        self.keeps_blocks, self.expects = False, 0

    def learn(self, made: Mapping[str, int]) -> None:
        """Remember the most bytes that a forward has made, by module."""
        if self.made is not None:
            known = self.made
            paths = {**known, **made}
            made = {path: max(known.get(path, 0), made.get(path, 0)) for path in paths}
        self.made = made

    def warn(
        self,
        peak: int,
        made: Mapping[str, int] | None = None,
        later: int = 0,
        forwards: int = 1,
        nodes: int = 0,
        *,
        beside: bool = False,
    ) -> None:
        """Warn of a step that takes ``peak`` bytes; later ones take ``later``.

        ``made``: the bytes that this forward made, by module, or ``nodes``: the nodes of autograd's
        graph; ``forwards``: how many the step has; ``beside``: whether those of other models under
        plans run inside of it.
        """
        counted = None if not nodes or self.nodes is None else (nodes, self.nodes)
        grown = self._grown_most(made or {})
        step = notices.OtherStep(self.kind, forwards, grown, counted, beside)
        notices.of_other_step(self.warnings, self.plan, step, peak, later)

    def _grown_most(self, made: Mapping[str, int]) -> tuple[str, int, int] | None:
        """The module that made the most bytes more than known, if they are worth a word."""
        grown = _growth(self.made or dict(self.plan.made), made)
        path, now, before = grown[0] if grown else ("", 0, 0)
        return (path, now, before) if now > (1 + _TOLERANCE) * before else None


def _growth(known: Mapping[str, int], made: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """The modules whose results are larger than known: path, bytes now and before."""
    modules = [(path, size, known.get(path, 0)) for path, size in made.items()]
    return sorted(
        (each for each in modules if each[1] > each[2]), key=lambda each: each[2] - each[1]
    )
