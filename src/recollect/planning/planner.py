"""From a model, a batch and a budget to a plan.

1. The step is run and recorded, and all state is restored (`record`).
2. All good trade-offs are found (`solving`), each judged by the simulator.
3. The one for the budget is applied, and the step is run under it and measured (`trial`). If it
   takes more than predicted, one that takes less by as much is tried next.
4. It is timed in turn with the plain step. If it is slow, so is every block checkpointed as a
   whole; if that is quicker within the same budget, the plan does just that.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from recollect._torch.devices import profiler_is_on
from recollect._torch.modules import is_compiled
from recollect.checks.place import warn_user
from recollect.errors import InfeasibleBudget, PlanWarning
from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import Outcome, simulate, simulate_plain
from recollect.modules import OPTIONS
from recollect.planning.batch import check_batch, split_batch
from recollect.planning.describe import PARTS, notes_on, points_of, rows_of, sketch_of
from recollect.planning.estimate import Footprint, counted
from recollect.planning.model_state import ModelState, has_modes
from recollect.planning.plan import Plan
from recollect.planning.planned import Basis, with_larger_batch
from recollect.planning.prices import measured_link
from recollect.planning.record import record_step
from recollect.planning.solving.bound import lower_bound
from recollect.planning.solving.solve import Solution, Solver
from recollect.planning.step import Loss, TrainingStep
from recollect.planning.trial import Candidate, Progress, Times, Trials
from recollect.planning.ways import Peaks
from recollect.replay.named_schedule import NamedSchedule, trimmed
from recollect.report.plan_report import PlanReport, Point
from recollect.report.units import bytes_text

__all__ = ["Offload", "Planner"]

Offload = bool | Literal["auto"]

#: How often a plan is corrected that takes more memory than predicted.
_CORRECTIONS = 6
#: The part of a budget that is used if shapes depend on data.
_IF_SHAPES_VARY = 0.97
#: How many other schedules a plan carries, for batches of other shapes: the best for the planned
#: batch, and as many that are best for a larger one.
_ALTERNATIVES = 8


class Planner:
    """Makes plans for one training step. Arguments as of `recollect.plan`."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        offload: Offload = "auto",
        progress: Progress = lambda _what, _done: None,
        *,
        holds_output: bool = True,
    ) -> None:
        if offload not in (True, False, "auto"):
            raise ValueError(f"offload should be True, False or 'auto', but is {offload!r}")
        if holds_output not in (True, False):
            raise ValueError(f"holds_output should be True or False, but is {holds_output!r}")
        _check_unplanned(model)
        check_batch(batch)
        self.step = TrainingStep(
            model, *split_batch(batch), loss, optimizer, holds_output=holds_output
        )
        self._progress = progress
        link = measured_link(self.step.device) if offload else None
        if offload is True and link is None:
            raise ValueError(
                f"offload=True needs a CUDA device to offload from, but the model is on "
                f"{self.step.device}. Leave it out"
            )
        if profiler_is_on():
            raise RuntimeError(
                "a torch profiler is running, and memory is measured by one: make the plan before "
                "it starts, or after it has ended"
            )
        _warn_of_eval(model)
        self._state = ModelState.of(model)
        progress("recording a step", 0.0)
        if self.step.on_cuda:
            # cuBLAS keeps a workspace for every stream. Those that the step does not use would
            # count towards its peak, and no plan could go below them.
            self.step.free_memory()
        profile = record_step(self.step, link)
        self.trials = Trials(self.step, profile, self._state, progress)
        self._offload = link is not None
        self._bounds: dict[int, float] = {}

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
        return Solver(
            self.graph,
            offload=self._offload,
            progress=lambda done: self._progress("solving", done),
        )

    # --- the schedule for a budget ----------------------------------------------------------------

    def plan_for(self, budget: int) -> Plan:
        """The plan for a budget in bytes."""
        if budget >= self.plain_peak:
            return self.plan_of(budget, self._plain())
        # Shapes that depend on data will be others in other steps.
        room = int(budget * _IF_SHAPES_VARY) if self.graph.varies else budget
        schedule = self._quickest(room) or self._lowest()
        if self.trials.peak(schedule) > budget:
            raise self._infeasible(budget)
        candidate = self.trials.candidate(schedule)
        return self.plan_of(budget, self.trials.or_blocks(candidate, room))

    def least(self) -> int:
        """The lowest budget for which there is a plan."""
        return min(self.trials.peak(self._lowest()), self.plain_peak)  # for which none is needed

    def _plain(self) -> Candidate:
        """The plain step, with what was measured of it."""
        everything = Schedule(frozenset(range(len(self.graph.ops))))
        profile = self.trials.profile
        found = Candidate(trimmed(self.graph, everything), profile.plain_peak)
        if profile.measured_peak is None or profile.timing is None:
            return found
        peaks = Peaks(profile.measured_peak, profile.plain_peak, None)
        return replace(found, peaks=peaks, times=Times(profile.timing, profile.timing))

    def _lowest(self) -> Schedule:
        """The schedule of the lowest peak of those that were tried."""
        self.trials.peak(trimmed(self.graph, self.solver.least().schedule))
        return min(self.trials.expected, key=self.trials.expected.__getitem__)

    def _quickest(self, room: int) -> Schedule | None:
        """The quickest schedule that was tried and took no more than ``room``."""
        target = room
        for _ in range(_CORRECTIONS):
            solution = self.solver.solve(target)
            if solution is None:
                break
            peak = self.trials.peak(trimmed(self.graph, solution.schedule))
            if peak <= room:
                break
            target = min(target, solution.outcome.peak) - (peak - room)
        # One that was tried for another budget may be quicker than what was found for this.
        found = [schedule for schedule, peak in self.trials.expected.items() if peak <= room]
        return min(found, key=lambda each: simulate(self.graph, each).seconds, default=None)

    def _infeasible(self, budget: int) -> InfeasibleBudget:
        least = self.least()
        outcome = self.solver.least().outcome
        parts = sorted(zip(outcome.parts, PARTS, strict=True), reverse=True)
        listed = ", ".join(f"{bytes_text(size)} {name}" for size, name in parts if size)
        return InfeasibleBudget(
            f"budget: no plan brings the step of this {type(self.step.model).__name__} down to "
            f"{bytes_text(budget)} ({budget:,} bytes); the least that works is "
            f"{bytes_text(least)}: budget={least}. At its peak that is {listed}. "
            "Smaller batches, or a smaller optimizer state, need less",
            budget=budget,
            least=least,
        )

    # --- the plan ---------------------------------------------------------------------------------

    def plan_of(self, budget: int, found: Candidate) -> Plan:
        """The plan that runs the step as the candidate does."""
        graph, profile = self.graph, self.trials.profile
        outcome = self._outcome(budget, found)
        bound = self._bound(budget, outcome.seconds)
        spread, times, peaks = self._spread(found.times), found.times, found.peaks
        measured: dict[str, Any] = {
            "measured_peak": None if peaks is None else peaks.measured,
            "measured_time": None if times is None else times.planned.seconds,
            "measured_plain_time": None
            if times is None or times.plain is None
            else times.plain.seconds,
            "spread": spread,
        }
        chosen = Point("this plan", found.peak, outcome.seconds, "chosen")
        points = (*self.points(), *found.others, chosen)
        picture = replace(
            sketch_of(self.trials, outcome, bound, points),
            budget=budget,
            predicted_peak=found.peak,
            rows=rows_of(graph, found.schedule),
            parts=tuple(zip(PARTS, outcome.parts, strict=True)),
            notes=notes_on(self.trials, found, spread),
            **measured,
        )
        schedule = self.trials.named(found.schedule)
        if found.blocks:
            schedule = replace(schedule, blocks=found.blocks)
        return Plan(
            budget=budget,
            predicted_peak=found.peak,
            predicted_time=outcome.seconds,
            plain_peak=self.plain_peak,
            plain_time=profile.seconds,
            bound_time=bound,
            schedule=schedule,
            base=graph.base,
            signature=self.step.signature,
            model=type(self.step.model).__name__,
            state=self._state,
            picture=picture,
            footprint=self._footprint(schedule, found.peak),
            alternatives=self._alternatives,
            basis=self._basis(found.peak, outcome.peak),
            holds_output=self.step.holds_output,
            output_bytes=None if peaks is None else peaks.output,
            **measured,
        )

    def _outcome(self, budget: int, found: Candidate) -> Outcome:
        """The outcome of a candidate: simulated, but for the time of blocks."""
        graph, profile, times = self.graph, self.trials.profile, found.times
        if budget >= self.plain_peak:
            return replace(simulate_plain(graph, curve=True), seconds=profile.seconds)
        outcome = simulate(graph, found.schedule, curve=True)
        if not found.blocks or times is None:
            return outcome
        # What goes from block to block is only nearly what is held. Plain steps in between tell how
        # quick the machine was just then.
        plain = profile.seconds if times.plain is None else times.plain.seconds
        return replace(outcome, seconds=times.planned.seconds * profile.seconds / plain)

    def _spread(self, times: Times | None) -> float:
        """By how much times may be off, as a fraction."""
        profile = self.trials.profile
        spreads = [self.graph.spread]
        if profile.timing is not None:
            spreads.append(profile.timing.spread)
        if times is not None:
            spreads.append(times.spread)
            if times.plain is not None:  # the same step, at another time
                before, after = sorted((times.plain.seconds, profile.seconds))
                spreads.append(after / before - 1 if before else 0.0)
        return max(spreads)

    def _bound(self, budget: int, seconds: float) -> float:
        """A lower bound on the step time of any plan within the budget; ``seconds`` works."""
        bound = min(seconds, lower_bound(self.graph, budget, offload=self._offload))
        for other, found in self._bounds.items():
            bound = min(bound, found) if other <= budget else max(bound, found)
        self._bounds[budget] = bound
        return bound

    # --- for other batches and other steps --------------------------------------------------------

    def _basis(self, peak: int, simulated: int) -> Basis | None:
        """The step to be rescaled, where a plan took ``peak`` bytes."""
        trace = self.trials.profile.trace
        if trace is None:
            return None
        plain = simulate_plain(self.graph).peak
        excess = max(0.0, peak / simulated - 1, self.plain_peak / plain - 1)
        return Basis(self.graph, trace, excess)

    @cached_property
    def _alternatives(self) -> tuple[NamedSchedule, ...]:
        """Schedules from the quickest to the one of least peak, for this batch and larger ones.

        What is least for this batch need not be for a larger one: where weights and their gradients
        are the peak, it is all the same how much is kept elsewhere.
        """
        graph, trace = self.graph, self.trials.profile.trace
        found = _thinned(self.solver.frontier())
        larger = None if trace is None else with_larger_batch(graph, trace)
        if larger is not None:
            found += _thinned(Solver(larger, rough=True).frontier())
        schedules = {trimmed(graph, each.schedule) for each in found}
        # Descending in peaks; of those with equal peaks the quickest.
        outcomes = sorted(
            ((simulate(larger or graph, each), each) for each in schedules),
            key=lambda pair: (-pair[0].peak, pair[0].seconds),
        )
        best = {outcome.peak: each for outcome, each in reversed(outcomes)}
        return tuple(self.trials.named(each) for each in reversed(best.values()))

    def _footprint(self, schedule: NamedSchedule, peak: int) -> Footprint:
        """What steps under the plan are compared with. ``peak``: under its own schedule."""
        graph = self.graph
        assert graph.tally is not None
        peaks = [simulate(graph, each.schedule_in(graph)).peak for each in self._alternatives]
        options = zip((schedule, *self._alternatives), (peak, *peaks), strict=True)
        factors = [
            (taken - graph.base) / self.trials.estimate(graph.outline, each)
            for each, taken in options
        ]
        return Footprint(graph.tally, tuple(factors), counted(graph))

    # --- the frontier -----------------------------------------------------------------------------

    def points(self) -> list[Point]:
        """All trade-offs, plain, and the usual ways."""
        return points_of(self.trials, self.solver.frontier())

    def overview(self) -> PlanReport:
        """The whole trade-off, without a budget."""
        outcome = simulate(self.graph, self.solver.least().schedule, curve=True)
        bound = self._bound(outcome.peak, outcome.seconds)
        note = "Without a budget: the curves are plain, and the plan of the lowest peak."
        return replace(sketch_of(self.trials, outcome, bound, self.points()), notes=(note,))


def _thinned(frontier: list[Solution]) -> list[Solution]:
    """A few solutions at peaks that are evenly apart, the least always among them."""
    low, high = frontier[0].outcome.peak, frontier[-1].outcome.peak
    peaks = [low + (high - low) * n // (_ALTERNATIVES - 1) for n in range(_ALTERNATIVES)]
    places = [bisect_right(frontier, peak, key=lambda each: each.outcome.peak) for peak in peaks]
    return [frontier[place - 1] for place in sorted(set(places))]


def _warn_of_eval(model: nn.Module) -> None:
    """Say that a model in eval mode will be another one in training."""
    layer = None if model.training else has_modes(model)
    if layer is not None:
        warn_user(
            f"this {type(model).__name__} is in eval mode, and so is the step that is planned. In "
            f"train mode its {layer} does more, and the step takes more memory. If it is trained "
            "in train mode: model.train(), then recollect.plan(...)",
            PlanWarning,
        )


def _check_unplanned(model: Any) -> None:
    """Refuse a model with checkpointed parts: they would hide what there is to plan."""
    if not isinstance(model, nn.Module):
        return  # which the step refuses
    if is_compiled(model):
        raise ValueError(
            "model: it is compiled, and what a compiler keeps is up to the compiler. Plan for the "
            "model that it was made from, or leave torch.compile out"
        )
    if getattr(model, "is_gradient_checkpointing", False):
        raise ValueError(
            f"model: gradient checkpointing is on in this {type(model).__name__}, and a plan takes "
            "its place. Switch it off: model.gradient_checkpointing_disable()"
        )
    for name, module in model.named_modules():
        if OPTIONS in vars(module):
            what = f"its {name}" if name else "it"
            raise ValueError(
                f"model: {what} is checkpointed or has a plan already, and a plan takes the place "
                "of that: recollect.unwrap it, or plan.remove(model), first"
            )
