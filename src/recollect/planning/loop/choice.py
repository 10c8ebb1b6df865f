"""Chooses the schedules of one kind of training steps by simulation (P8).

A step may call the model several times before backward. Each forward has its own schedule. They are
chosen together, because the activations of all forwards are in memory at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import Outcome, simulate, simulate_plain
from recollect.planning.budget import IF_SHAPES_VARY
from recollect.planning.loop.planned_step import PlannedStep
from recollect.planning.solving.solve import Solver
from recollect.replay.named_schedule import Alike, NamedSchedule, trimmed

#: The schedule of each forward of a step; None: plain.
Schedules = tuple[NamedSchedule | None, ...]

#: Where shapes depend on data: how many steps use `IF_SHAPES_VARY` of the budget.
_LEARNED = 8
#: The smallest change of the margin for which to choose again.
_WORTH = 1e-3
#: The most forwards of a step that get different schedules, since each has its own recording.
_APART = 6
#: How many solutions for a graph are considered.
_SOLUTIONS = 16


class Choice:
    """Compares the schedules of a plan, and the plain step, on steps of one kind.

    Args:
        plan: The plan that is applied.
        graph: A step of this kind, as it was traced or predicted.
        may_be_plain: Whether the step may run without the engine, which checks its ops.
        is_predicted: Whether no forward of this kind was recorded yet. The first one will be, and
            holds all results that its schedule names, needed or not, until it ends.
        other_schedules: Schedules beside those of the plan.
        can_solve: Whether to solve for this graph if none of them fits.
    """

    def __init__(
        self,
        plan: PlannedStep,
        graph: Graph,
        *,
        may_be_plain: bool = True,
        is_predicted: bool = False,
        other_schedules: Sequence[NamedSchedule] = (),
        can_solve: bool = True,
    ) -> None:
        self._plan = plan
        self.may_be_plain = may_be_plain
        self._count = len(graph.regions)
        self._varies = graph.varies  #: whether shapes depend on data
        self._seen = 0  #: how many steps were seen, if so
        #: The most and the least bytes that a forward made in them, relative to the graph.
        self._most = self._least = 1.0
        #: The ratio of measured to simulated peaks.
        self._scale = 1 + plan.excess
        self._outcomes: dict[Schedules, Outcome] = {}
        graph = plan.with_costs(graph)
        self._unrecorded = graph if is_predicted else None
        #: Bytes of random states, which a recorded call holds too.
        self._states = sum(op.state for op in graph.ops) if is_predicted else 0
        self._outcomes[self.alike(None)] = simulate_plain(graph)
        for each in dict.fromkeys((plan.schedule, *plan.alternatives, *other_schedules)):
            self._outcomes[self.alike(each)] = simulate(graph, each.schedule_in(graph))
        #: The schedules to choose from, the same for all forwards.
        self.options = [each[0] for each in self._outcomes]
        fitting = [each for each in self._outcomes if self.fits(each)]
        is_joint = 1 < self._count <= _APART and self.alike(None) not in fitting
        #: Schedules solved for this graph, if it has one forward: the least, and the fastest.
        self.solved: tuple[NamedSchedule, ...] = ()
        #: Until schedules are searched for, if nobody has yet.
        self._unsolved = None if plan.is_solved or not can_solve else graph
        if can_solve and (is_joint or not fitting):
            self._solve(graph)
        else:
            self._solve_if_needed()

    def _solve_if_needed(self) -> None:
        """Search if that was put off, since the planned step fits plain, and this one does not."""
        if self._unsolved is not None and not self.fits(self.alike(None)):
            self._solve(self._unsolved)

    def _solve(self, graph: Graph) -> None:
        """Add schedules for this graph, which may differ from forward to forward."""
        may_offload = self._unsolved is not None and self._count == 1
        self._unsolved = None
        frontier = Solver(graph, rough=True, offload=may_offload).frontier()
        fitting = [each for each in frontier if self._has_room(each.outcome.peak)]
        names = Alike.to_ops_of(graph)
        for solution in (frontier[0], *fitting[-_SOLUTIONS:]):
            schedule = trimmed(graph, solution.schedule)
            parts = [NamedSchedule.of(graph, schedule, names, n) for n in range(self._count)]
            self._outcomes[tuple(parts)] = simulate(graph, schedule)
            if self._count == 1:
                self.solved = (*self.solved[:1], parts[0])

    def alike(self, schedule: NamedSchedule | None) -> Schedules:
        """The same schedule for all forwards."""
        return (schedule,) * self._count

    def expected(self, schedules: Schedules) -> int | None:
        """The peak to expect; None if that is not known."""
        outcome = self._outcomes.get(schedules)
        return None if outcome is None else math.ceil(outcome.peak * self._scale)

    def simulate(self, graph: Graph, schedules: Schedules) -> int | None:
        """The simulated peak of forwards by any schedules; None if that is not known."""
        if None in schedules or schedules in self._outcomes:
            outcome = self._outcomes.get(schedules)
            return None if outcome is None else outcome.peak
        parts = [each.schedule_in(graph, [n]) for n, each in enumerate(schedules) if each]
        kept = frozenset().union(*(part.kept | part.offloaded for part in parts))
        return simulate(graph, Schedule(kept)).peak

    def seconds(self, schedules: Schedules) -> float:
        """The time to expect."""
        return self._outcomes[schedules].seconds

    def fits(self, schedules: Schedules) -> bool:
        """Whether steps are within the budget."""
        return self._has_room(self._outcomes[schedules].peak)

    def _has_room(self, simulated: int) -> bool:
        plan, peak = self._plan, (simulated + self._states) * self._scale
        room = plan.budget * (IF_SHAPES_VARY if self._varies and self._seen < _LEARNED else 1.0)
        return peak <= room and plan.base + (peak - plan.base) * self._margin <= plan.budget

    @property
    def _margin(self) -> float:
        """How many times as large what a step allocates may become: by half the spread more."""
        return self._most + (self._most - self._least) / 2

    def saw(self, ratio: float) -> bool:
        """A forward made so many times the bytes of the graph. Whether other schedules may fit."""
        before = self._margin
        self._seen += 1
        self._most, self._least = max(self._most, ratio), min(self._least, ratio)
        self._solve_if_needed()
        return self._margin > before + _WORTH or self._seen == _LEARNED

    def peak(self, schedules: Schedules) -> int:
        """The simulated peak."""
        return self._outcomes[schedules].peak

    @property
    def plain_peak(self) -> int:
        """The simulated peak without a plan."""
        return self._outcomes[self.alike(None)].peak

    def best(self) -> Schedules:
        """The fastest schedules that fit, or else those of the least peak."""
        allowed = [each for each in self._outcomes if self.may_be_plain or None not in each]
        fitting = [each for each in allowed if self.fits(each)]
        best = min(fitting, key=self.seconds) if fitting else min(allowed, key=self.peak)
        return best if self._unrecorded is None else self._without_unneeded(self._unrecorded, best)

    def _without_unneeded(self, graph: Graph, schedules: Schedules) -> Schedules:
        """``schedules`` without results that only other kinds of steps need, not ``graph``."""
        needed = tuple(
            each
            and NamedSchedule.of(graph, trimmed(graph, each.schedule_in(graph)), each.alike, region)
            for region, each in enumerate(schedules)
        )
        self._outcomes = {needed if e == schedules else e: o for e, o in self._outcomes.items()}
        return needed

    def recorded(self) -> None:
        """A forward of a predicted step was recorded: later ones hold what they need alone."""
        self._unrecorded, self._states = None, 0

    def measured(self, schedules: Schedules, peak: int) -> None:
        """A step was measured."""
        if schedules in self._outcomes:
            self._scale = max(self._scale, peak / self._outcomes[schedules].peak)
            self._solve_if_needed()


def choose(choices: Sequence[Choice]) -> list[Schedules]:
    """The schedules for steps of each kind, all of which begin with the same forward.

    Which of them it is is not known when that forward runs. So if there are several, all of their
    forwards run by the same schedule.
    """
    if len(choices) == 1:
        return [choices[0].best()]
    may_be_plain = all(choice.may_be_plain for choice in choices)
    options = [each for each in choices[0].options if may_be_plain or each is not None]
    fitting = [e for e in options if all(choice.fits(choice.alike(e)) for choice in choices)]
    if fitting:
        best = min(
            fitting, key=lambda e: sum(choice.seconds(choice.alike(e)) for choice in choices)
        )
    else:
        best = min(options, key=lambda e: max(choice.peak(choice.alike(e)) for choice in choices))
    return [choice.alike(best) for choice in choices]
