"""Makes plans: from a model, a batch and a budget to a `Plan` (P1 to P6).

1. The step runs and is recorded, and all state is restored (`record`).
2. The solver finds the good schedules (`solving`), which the simulator judges.
3. The step runs under the schedule for the budget and is measured (`trial`). If it takes more than
   predicted, a schedule that takes less by as much is tried next.
4. It is timed in turn with the plain step. Where the engine is costly, modules that are
   checkpointed as a whole are planned too, and the faster of both is taken.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from recollect._torch.groups import has_peers
from recollect.checks.place import WarnOnce
from recollect.compiled.decisions import CompiledStep
from recollect.errors import InfeasibleBudget
from recollect.graph.graph import Graph, Link, Schedule
from recollect.graph.simulate import Outcome, simulate, simulate_plain
from recollect.planning.budget import IF_SHAPES_VARY, resolve_budget
from recollect.planning.describe import (
    CLEAR_GRADIENTS,
    HELD_GRADIENTS,
    OTHER_HOOKS,
    assumptions,
    infeasible_text,
    list_notes,
    list_parts,
    list_points,
    list_rows,
    make_report,
)
from recollect.planning.loop.live import LiveStep
from recollect.planning.loop.planned_step import SeenForward, with_larger_batch
from recollect.planning.plan import Plan
from recollect.planning.prepare import Request, prepare
from recollect.planning.progress import Progress, silent
from recollect.planning.recording.model_state import ModelState
from recollect.planning.recording.record import Profile, record_step
from recollect.planning.recording.step import TrainingStep
from recollect.planning.solving.bound import lower_bound
from recollect.planning.solving.pool import Solution, best_of
from recollect.planning.solving.solve import Solver
from recollect.planning.trial import Candidate, Trials
from recollect.planning.ways import Bench, Peaks
from recollect.replay.named_schedule import NamedSchedule, trimmed
from recollect.report.plan_report import PlanReport, Point

#: Records a step, with the link to the host if results may be offloaded.
Record = Callable[[TrainingStep, Link | None], Profile]

#: How often a lower target is set for a plan that takes more memory than predicted.
_CORRECTIONS = 6
#: How many schedules a plan carries for the planned batch, and as many for one `_LARGER` times as
#: large.
_ALTERNATIVES = 8
_LARGER = 2
#: The fraction of a budget that stays free if the plan cannot be tried: for blocks of the allocator
#: that are larger than requested (CUDA), and for numbers that autograd saves, as in ``2.0 * x``.
_UNTRIED = 0.01
_UNTRIED_ON_CPU = 1e-4
#: Finds the quickest solution within a budget, if there is one.
Solve = Callable[[int], Solution | None]
#: A schedule that is predicted to take so many times as long as another is not tried; nor in the
#: user's loop, where less is known of times.
_CLEARLY_SLOWER = 1.3
_CLEARLY_SLOWER_IN_LOOP = 2.0


class Planner:
    """Makes plans for one recorded step. ``state``: of its model; ``signature``: of its batch.

    ``untried``: the fraction of a budget that is left free. ``bench``: runs the step, perhaps in
    other processes too; by default in this one.
    """

    #: Whether a schedule is tried that offloads with slack.
    _tries_slack = True

    def __init__(
        self,
        step: TrainingStep,
        profile: Profile,
        state: ModelState,
        signature: tuple[Any, ...],
        *,
        progress: Progress = silent,
        untried: float = 0.0,
        bench: Bench | None = None,
    ) -> None:
        self.step = step
        self.trials = Trials(bench or Bench(step, profile.made), profile, state, progress)
        self._state = state
        self._signature = signature
        self._progress = progress
        self._offload = profile.graph.link is not None
        self._untried = untried
        #: If the step calls the model several times: the forwards after the first.
        self._others: Sequence[SeenForward] = ()
        #: Whether the step is one of the user's loop.
        self._from_loop = False
        #: How many bytes more of gradients later steps begin with.
        self._held = 0
        self._bounds: dict[int, float] = {}
        self._warnings = WarnOnce()
        #: If none is searched for: the only schedule for other steps.
        self._only: Schedule | None = None

    @classmethod
    def of(
        cls, request: Request, progress: Progress = silent, *, record: Record = record_step
    ) -> Planner:
        """A planner for the step of a request, which is recorded by ``record``."""
        step, link, state, signature = prepare(request)
        progress("recording a step", 0.0)
        return cls(step, record(step, link), state, signature, progress=progress)

    @classmethod
    def of_traced(
        cls,
        model: nn.Module,
        live: LiveStep,
        profile: Profile,
        *,
        others: Sequence[SeenForward],
        held: int,
        progress: Progress,
        bench: Bench | None,
    ) -> Planner:
        """A planner for a step that was traced in the user's loop, and is not run again.

        ``held``: how many bytes more of gradients later steps begin with.
        """
        step, signature = TrainingStep.of_loop(model, live.gradients), live.kinds[0].signature
        untried = _UNTRIED if step.on_cuda else _UNTRIED_ON_CPU
        found = cls(
            step, profile, live.state, signature, progress=progress, untried=untried, bench=bench
        )
        found._from_loop, found._others, found._held = True, others, held
        return found

    @property
    def graph(self) -> Graph:
        """The step, with the cost of the engine."""
        return self.trials.graph

    @property
    def plain_peak(self) -> int:
        """Bytes that the step allocates without a plan."""
        return self.trials.profile.plain_peak

    @cached_property
    def solver(self) -> Solver:
        """Finds schedules."""
        self._progress("solving", 0.0)
        progress = partial(self._progress, "solving")
        return Solver(self.graph, offload=self._offload, progress=progress)

    # --- the schedule for a budget ----------------------------------------------------------------

    def plan_for(self, budget: float | str) -> Plan:
        """Make the plan for a budget."""
        budget = resolve_budget(budget, self.plain_peak, self.step.device)
        if budget >= self.plain_peak:
            return self.plain_plan(budget)
        room = int(budget * (1 - self._untried))
        if self.graph.varies:  # shapes that depend on data will differ in other steps
            room = int(room * IF_SHAPES_VARY)
        schedules = self._schedules_for(room) or [self._least_schedule()]
        if self.trials.peak(schedules[0]) > budget:
            raise self._infeasible(budget)
        candidate = self.trials.fastest(schedules)
        plan = self.make_plan(budget, candidate)
        if not self._from_loop or self._others or has_peers():
            return plan
        # Nobody has compared them: the loop will.
        others = [each for each in schedules if each != candidate.schedule]
        return replace(plan, rivals=tuple(map(self.trials.named, others)))

    def _schedules_for(self, room: int) -> list[Schedule]:
        """The schedules of the solvers within ``room``, except those that are clearly slower."""
        modules, solver = self.trials.modules, self.solver
        # How well copies overlap with the computation is for a measurement to tell.
        solvers: list[Solve] = [] if modules is None else [modules.solve]
        solvers += [solver.solve, *([solver.solve_with_slack] if self._tries_slack else [])]
        solvers += [solver.solve_here]
        solutions = [(each, each(room)) for each in solvers]
        times = [found.outcome.seconds for _, found in solutions if found is not None]
        slower = _CLEARLY_SLOWER_IN_LOOP if self._from_loop else _CLEARLY_SLOWER
        limit = slower * min(times, default=0.0)
        fast = [each for each, found in solutions if found and found.outcome.seconds <= limit]
        for tried in (fast, [each for each in solvers if each not in fast]):
            schedules = [self._fastest_schedule(room, solve) for solve in tried]
            if any(schedules):
                return [*dict.fromkeys(each for each in schedules if each is not None)]
        return []

    def least_plan(self, budget: int) -> Plan:
        """The plan of the least peak, for a budget that cannot be met."""
        schedule = self._least_schedule()
        return self.make_plan(budget, Candidate(schedule, self.trials.peak(schedule)))

    def plan_or_least(self, budget: float | str) -> Plan:
        """The plan for a budget; if there is none that of the least peak, with a warning."""
        try:
            return self.plan_for(budget)
        except InfeasibleBudget as error:
            is_useless = self.least_budget() >= self.plain_peak
            how = "plain" if is_useless else "under the plan of the least peak"
            self._warnings.warn("infeasible", f"{error}. Training goes on {how}")
            return (self.plain_plan if is_useless else self.least_plan)(error.budget)

    def plain_plan(self, budget: int, only: Schedule | None = None) -> Plan:
        """The plan by which the step runs plain, whether or not that is within the budget.

        ``only``: a schedule for other steps, in place of searching for some.
        """
        self._only = only
        return self.make_plan(budget, self._plain_candidate())

    def least_budget(self) -> int:
        """The least feasible budget."""
        return min(self.trials.peak(self._least_schedule()), self.plain_peak)

    def _plain_candidate(self) -> Candidate:
        """The plain step as a candidate, with its measurements."""
        everything = Schedule(frozenset(range(len(self.graph.ops))))
        profile = self.trials.profile
        schedule = self.trials.plain_schedule or trimmed(self.graph, everything)
        found = Candidate(schedule, profile.plain_peak)
        if profile.measured_peak is None or profile.timing is None:
            return found
        peaks = Peaks(profile.measured_peak, profile.plain_peak)
        return replace(found, peaks=peaks, time=profile.timing, plain_time=profile.timing)

    def _least_schedule(self) -> Schedule:
        self.trials.peak(self._trimmed(self.solver.least_solution().schedule))
        return self.trials.least_tried()

    def _trimmed(self, schedule: Schedule) -> Schedule:
        """The schedule without results that backward does not need."""
        return trimmed(self.graph, schedule)

    def _fastest_schedule(self, room: int, solve: Solve) -> Schedule | None:
        """The fastest schedule of a solver within ``room``, of those that were tried."""
        target, features = room, None
        for _ in range(_CORRECTIONS):
            solution = solve(target)
            if solution is None:
                break
            features = _features_of(solution.schedule)
            peak = self.trials.peak(self._trimmed(solution.schedule))
            if peak <= room:
                break
            target = min(target, solution.outcome.peak) - (peak - room)
        # A schedule that was tried for another budget may be faster than this one.
        fitting = self.trials.tried_within(room)
        return next((each for each in fitting if _features_of(each) == features), None)

    def _infeasible(self, budget: int) -> InfeasibleBudget:
        least, gradients = self.least_budget(), self.step.gradient_bytes
        is_plain = least == self.plain_peak
        schedule = self._least_schedule()
        outcome = self.trials.plain_outcome() if is_plain else simulate(self.graph, schedule)
        if self._held:
            least = math.ceil((least + self._held) * (1 + self._untried))
        parts = list_parts(outcome, least - self._held, gradients)
        parts = *parts, (HELD_GRADIENTS, self._held)
        hints = [CLEAR_GRADIENTS] if gradients > 0 and not self._from_loop else []
        hints += [OTHER_HOOKS] if self.step.has_other_hooks else []
        title = self.trials.title
        text = infeasible_text(title, budget, least, parts, hints, is_plain=is_plain)
        return InfeasibleBudget(text, budget=budget, least=least)

    # --- the plan ---------------------------------------------------------------------------------

    def make_plan(self, budget: int, candidate: Candidate) -> Plan:
        """Make the plan that runs the step as ``candidate`` does."""
        graph, peaks = self.graph, candidate.peaks
        time, plain_time = candidate.time, candidate.plain_time
        outcome = self._outcome(budget, candidate)
        figures = self._figures(budget, candidate.peak, outcome.seconds) | {
            "measured_peak": None if peaks is None else peaks.measured,
            "measured_time": None if time is None else time.seconds,
            "measured_plain_time": None if plain_time is None else plain_time.seconds,
            "spread": self._time_spread(candidate),
        }
        return Plan(
            **figures,
            schedule=self.trials.named(candidate.schedule),
            base=graph.base,
            signature=self._signature,
            model=self.trials.title,
            state=self._state,
            report=self._report(budget, candidate, outcome, figures),
            made=tuple(self.trials.profile.made.items()),
            stopped=self.trials.profile.stopped,
            op_counts=tuple(self.trials.op_counts.items()),
            alternatives=self._alternatives,
            excess=self._excess(candidate.peak, outcome.peak),
            graph=graph,
            holds_output=self.step.holds_output,
            output_bytes=None if peaks is None else peaks.output,
            gradients=self.step.gradient_bytes,
            others=tuple(
                each.planned(self.trials.named(candidate.schedule, n))
                for n, each in enumerate(self._others, 1)
            ),
            from_loop=self._from_loop,
            is_solved=self._only is None,
            compiled=self._compiled_step(budget, candidate),
        )

    def _report(
        self, budget: int, candidate: Candidate, outcome: Outcome, figures: dict[str, Any]
    ) -> PlanReport:
        chosen = Point("this plan", candidate.peak, outcome.seconds, "chosen")
        is_plain = self._is_plain(budget, candidate)
        shown = self.trials.plain_schedule if is_plain else candidate.schedule
        return replace(
            make_report(self.trials, shown, outcome, figures),
            rows=list_rows(self.graph, candidate.schedule),
            points=(*self.points(), *candidate.baselines, chosen),
            parts=list_parts(outcome, candidate.peak, self.step.gradient_bytes),
            notes=list_notes(self.trials, candidate, figures["spread"]),
        )

    def _compiled_step(self, budget: int, candidate: Candidate) -> CompiledStep | None:
        return None

    def _is_plain(self, budget: int, candidate: Candidate) -> bool:
        return budget >= self.plain_peak or candidate == self._plain_candidate()

    def _figures(self, budget: int | None, peak: int, seconds: float) -> dict[str, Any]:
        """The figures that a plan and its report have in common, by name."""
        return {
            "budget": budget,
            "predicted_peak": peak,
            "predicted_time": seconds,
            "plain_peak": self.plain_peak,
            "plain_time": self.trials.profile.seconds,
            "bound_time": self._bound(peak if budget is None else budget, seconds),
        }

    def _outcome(self, budget: int, candidate: Candidate) -> Outcome:
        """The simulated outcome of a candidate; the time of whole modules as measured."""
        plain, now = self.trials.profile.seconds, candidate.plain_time
        if self._is_plain(budget, candidate):
            return replace(self.trials.plain_outcome(), seconds=plain)
        outcome = simulate(self.graph, candidate.schedule, curve=True)
        if not candidate.schedule.modules or candidate.time is None or now is None:
            return outcome
        # Modules are priced by steps with all of a kind, and a few may cost less than their share.
        # Plain steps in between tell how fast the machine was just then.
        return replace(outcome, seconds=plain * candidate.time.seconds / now.seconds)

    def _time_spread(self, candidate: Candidate) -> float:
        """By how much times may be off, as a fraction."""
        profile, plain = self.trials.profile, candidate.plain_time
        timings = (profile.timing, candidate.time, plain)
        spreads = [timing.spread for timing in timings if timing is not None]
        if plain is not None:  # the same step, timed twice
            low, high = sorted((plain.seconds, profile.seconds))
            spreads.append(high / low - 1 if low else 0.0)
        return max([self.graph.spread, *spreads])

    def _bound(self, budget: int, seconds: float) -> float:
        """A lower bound on the time of any plan within the budget, which one has in ``seconds``."""
        bound = min(seconds, lower_bound(self.graph, budget, offload=self._offload))
        if self.trials.modules is not None and budget < self.plain_peak:
            bound = min(bound, self.trials.modules.bound(budget))
        for other, known in self._bounds.items():
            bound = min(bound, known) if other <= budget else max(bound, known)
        self._bounds[budget] = bound
        return bound

    # --- for other batches and other steps --------------------------------------------------------

    def _excess(self, peak: int, simulated: int) -> float:
        """By what fraction peaks are higher than simulated ones: the plan's, and the plain one."""
        plain = simulate_plain(self.graph).peak
        return max(self._untried, peak / simulated - 1, self.plain_peak / plain - 1)

    @cached_property
    def _alternatives(self) -> tuple[NamedSchedule, ...]:
        """Schedules from the fastest to the one of least peak, for this batch and larger ones.

        The one of least peak for this batch need not be so for a larger one: if weights and their
        gradients make the peak, it does not matter how much is kept elsewhere.
        """
        if self._only is not None:
            regions = range(len(self.graph.regions))
            return tuple(dict.fromkeys(self.trials.named(self._only, each) for each in regions))
        graph, larger = self.graph, with_larger_batch(self.graph, _LARGER)
        found = _sample_evenly(self.solver.frontier())
        found += _sample_evenly(Solver(larger, rough=True).frontier())
        schedules = {trimmed(graph, each.schedule) for each in found}
        regions = range(len(graph.regions))
        named = dict.fromkeys(self.trials.named(e, region) for e in schedules for region in regions)
        # In descending order of peaks; of those with equal peaks the fastest.
        outcomes = sorted(
            ((simulate(larger, each.schedule_in(larger)), each) for each in named),
            key=lambda pair: (-pair[0].peak, pair[0].seconds),
        )
        best = {outcome.peak: each for outcome, each in reversed(outcomes)}
        return tuple(reversed(best.values()))

    # --- the frontier -----------------------------------------------------------------------------

    def points(self) -> list[Point]:
        """The points of the frontier, the plain step and baselines."""
        return list_points(self.trials, self._frontier())

    def _frontier(self) -> list[Solution]:
        if self._only is not None:
            return []
        found = self.solver.frontier()
        if self.trials.modules is not None:
            found = best_of([*found, *self.trials.modules.frontier()])
        return found

    def frontier_report(self) -> PlanReport:
        """The report of the frontier."""
        least, *_ = self._frontier()
        outcome = simulate(self.graph, least.schedule, curve=True)
        outcome = replace(outcome, seconds=least.outcome.seconds)
        figures = self._figures(None, outcome.peak, outcome.seconds)
        report = make_report(self.trials, least.schedule, outcome, figures)
        notes = tuple(assumptions(self.trials))
        return replace(report, points=tuple(self.points()), notes=notes)


def _features_of(schedule: Schedule) -> tuple[bool, bool, float]:
    """Whether it checkpoints whole modules, whether it offloads, and with how much slack."""
    return bool(schedule.modules), bool(schedule.offloaded), schedule.link_share


def _sample_evenly(frontier: list[Solution]) -> list[Solution]:
    """A few solutions with evenly spaced peaks, with that of the least peak."""
    low, high = frontier[0].outcome.peak, frontier[-1].outcome.peak
    peaks = [low + (high - low) * n // (_ALTERNATIVES - 1) for n in range(_ALTERNATIVES)]
    places = [bisect_right(frontier, peak, key=lambda each: each.outcome.peak) for peak in peaks]
    return [frontier[place - 1] for place in sorted(set(places))]
