"""From a model, a batch and a budget to a plan: profile, solve, try it out, correct it.

1. The step is run and written down (`profile`), and leaves no trace.
2. All good trade-offs of it are found (`solve`), each judged by the simulator.
3. The one for the budget is applied, and the step is run under it and measured. If it takes more
   than was predicted, one that takes less by as much is tried next.
4. It is timed in turn with the plain step. If it is slow, so is every block checkpointed as a
   whole; if that is quicker within the same budget, the plan does just that.
"""

from __future__ import annotations

import gc
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recollect._torch.devices import free_cuda_workspaces, profiler_is_on
from recollect._torch.modules import is_compiled
from recollect.checks.place import warn_user
from recollect.errors import InfeasibleBudget, PlanWarning
from recollect.graph.graph import Graph, Link
from recollect.graph.simulate import Outcome, Schedule, simulate, simulate_plain
from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.planning.baselines import block_paths, block_schedule, peers_of
from recollect.planning.batch import check_batch, split_batch
from recollect.planning.blocks import Blocks, wrap_blocks
from recollect.planning.choices import Choices, trimmed
from recollect.planning.conditions import Conditions, differences, has_modes
from recollect.planning.fake import predict_step
from recollect.planning.footprint import Footprint, counted, estimated, tally_of
from recollect.planning.identity import identity_of
from recollect.planning.leftovers import nothing_fake_left
from recollect.planning.links import measured_link
from recollect.planning.literals import dense_strides
from recollect.planning.outline import outline_of
from recollect.planning.overhead import with_overhead
from recollect.planning.plan import Plan
from recollect.planning.profile import Profile, profile_step, trace_in_little
from recollect.planning.replan import Basis
from recollect.planning.rescale import CannotPredict, rescaled
from recollect.planning.rows import rows_of
from recollect.planning.runner import Runner, Told
from recollect.planning.solving.bound import lower_bound
from recollect.planning.solving.solve import Solution, Solver
from recollect.planning.step import Loss, Step
from recollect.planning.timing import Timing
from recollect.planning.trial import Peaks, Way, peaks_under, times_under
from recollect.replay.engine import Witness
from recollect.replay.planned_ops import Alike, Decisions
from recollect.report.plan_report import PlanReport, Point
from recollect.report.script import thinned
from recollect.report.units import bytes_text, percent_text

__all__ = ["Planner", "Progress"]

#: Told what is being done, and how much of it is.
Progress = Callable[[str, float], None]

#: How often a plan is corrected that takes more memory than was predicted.
_CORRECTIONS = 6
#: What a plan is taken to need for which there was no room, as a multiple of what was predicted.
_MORE_THAN_THERE_IS = 1.1
#: The part of a budget that is used if shapes depend on data.
_IF_SHAPES_VARY = 0.97
#: How many points of a curve are kept.
_POINTS = 1000
#: How many other choices a plan carries, for batches of other shapes: that are best for the batch
#: that was planned, and as many that are for one which is so much larger.
_ALTERNATIVES = 8
_LARGER = 2
#: How much longer than plain a step under a plan takes for it to be compared with every block
#: checkpointed, as a fraction; and how much quicker that has to be, beside the spread.
_NOTICEABLE = 0.1
_CLEARLY = 0.03
#: How far the peak of that may be simulated above the budget for it to be tried.
_ROUGHLY = 1.25
#: The spread from which on a reader is told.
_TOLD = 0.1

_PARTS = (
    "parameters, optimizer state",
    "gradients, loss and workspace",
    "kept from forward",
    "recomputed or fetched for backward",
)


def _silent(_what: str, _done: float) -> None:
    pass


@dataclass(frozen=True)
class _Times:
    """What steps took that were run in turn."""

    planned: Timing
    plain: Timing | None

    @property
    def spread(self) -> float:
        return max(self.planned.spread, 0.0 if self.plain is None else self.plain.spread)


@dataclass(frozen=True)
class _Found:
    """What becomes of a budget.

    Args:
        schedule: What is kept; of blocks, what they come to.
        peaks: What was measured; None if nothing could be.
        times: The same.
        blocks: The blocks that are checkpointed, if that is all that is done.
        others: Other ways that were measured, for comparison.
        remark: Why it is blocks.
    """

    schedule: Schedule
    peak: int
    peaks: Peaks | None = None
    times: _Times | None = None
    blocks: tuple[str, ...] = ()
    others: tuple[Point, ...] = ()
    remark: str = ""


class Planner:
    """Makes plans for one training step."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        offload: bool | str = "auto",
        progress: Progress = _silent,
        *,
        holds_output: bool = True,
    ) -> None:
        if offload not in (True, False, "auto"):
            raise ValueError(f"offload should be True, False or 'auto', but is {offload!r}")
        if holds_output not in (True, False):
            raise ValueError(f"holds_output should be True or False, but is {holds_output!r}")
        _check_unplanned(model)
        check_batch(batch)
        self.step = Step(model, *split_batch(batch), loss, optimizer, holds_output=holds_output)
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
        self._conditions, self._identity = Conditions.of(model), identity_of(model)
        progress("recording a step", 0.0)
        if self.step.on_cuda:
            # cuBLAS keeps a workspace for every stream. Those that the step does not use would
            # count towards its peak, and no plan could go below them.
            free_memory(self.step.device)
        self.profile: Profile = _profiled(self.step, link)
        self._offload = link is not None
        self._told = Told()
        self._bounds: dict[int, float] = {}
        self._tried: dict[Schedule, int] = {}
        self._peaks: dict[Schedule, Peaks] = {}
        self._times: dict[Schedule, _Times | None] = {}
        self._compared: dict[Schedule, list[Timing] | None] = {}
        self._choices: dict[Schedule, tuple[Choices, Decisions]] = {}

    @cached_property
    def graph(self) -> Graph:
        """The step, with what the engine costs."""
        if self.profile.was_run and self._obstacle() is None:
            self._progress("timing the engine", 0.0)
            try:
                with self._unplanned():
                    self.profile = with_overhead(self.profile, self.step, self._told)
            except RuntimeError as error:
                self._check_memory(error)
        return self.profile.graph

    @cached_property
    def solver(self) -> Solver:
        """What finds schedules."""
        self._progress("solving", 0.0)
        return Solver(
            self.graph,
            offload=self._offload,
            progress=lambda done: self._progress("solving", done),
        )

    @property
    def plain_peak(self) -> int:
        """Bytes that the step allocates without a plan."""
        return self.profile.plain_peak

    # --- plans ------------------------------------------------------------------------------------

    def plan_for(self, budget: int) -> Plan:
        """The plan for a budget in bytes."""
        if budget >= self.plain_peak:
            everything = Schedule(frozenset(range(len(self.graph.ops))))
            found = _Found(trimmed(self.graph, everything), self.plain_peak)
            return self._plan_of(budget, self._as_measured(found))
        # Shapes that depend on data will be others in other steps.
        room = int(budget * _IF_SHAPES_VARY) if self.graph.varies else budget
        schedule = self._quickest(room) or self._lowest()
        if self._measured(schedule) > budget:
            raise self._infeasible(budget)
        found = _Found(
            schedule, self._measured(schedule), self._peaks.get(schedule), self._timed(schedule)
        )
        return self._plan_of(budget, self._or_blocks(found, room))

    def least(self) -> int:
        """The lowest budget for which there is a plan."""
        return min(self._measured(self._lowest()), self.plain_peak)  # for which none is needed

    def _lowest(self) -> Schedule:
        """The schedule that took least of those that were tried, as simulated or not."""
        self._measured(trimmed(self.graph, self.solver.least().schedule))
        return min(self._tried, key=self._tried.__getitem__)

    def _quickest(self, room: int) -> Schedule | None:
        """The quickest schedule that was tried, and took no more than ``room``."""
        target = room
        for _ in range(_CORRECTIONS):
            solution = self.solver.solve(target)
            if solution is None:
                break
            peak = self._measured(trimmed(self.graph, solution.schedule))
            if peak <= room:
                break
            target = min(target, solution.outcome.peak) - (peak - room)
        # One that was tried for another budget may be quicker than what was found for this.
        found = [schedule for schedule, peak in self._tried.items() if peak <= room]
        return min(found, key=lambda each: simulate(self.graph, each).seconds, default=None)

    def _infeasible(self, budget: int) -> InfeasibleBudget:
        least = self.least()
        outcome = self.solver.least().outcome
        parts = sorted(zip(outcome.parts, _PARTS, strict=True), reverse=True)
        listed = ", ".join(f"{bytes_text(size)} {name}" for size, name in parts if size)
        return InfeasibleBudget(
            f"budget: no plan brings the step of this {type(self.step.model).__name__} down to "
            f"{bytes_text(budget)} ({budget:,} bytes); the least that works is "
            f"{bytes_text(least)}: budget={least}. At its peak that is made of {listed}. "
            "Smaller batches, or a smaller optimizer state, need less",
            budget=budget,
            least=least,
        )

    def choices(self, schedule: Schedule) -> tuple[Choices, Decisions]:
        """What the engine goes by. Of one schedule always the same, which recordings know it by."""
        known = self._choices.get(schedule)
        if known is None:
            choices = Choices.of(self.graph, schedule)
            known = self._choices[schedule] = choices, choices.decisions(self._alike)
        return known

    def _measured(self, schedule: Schedule) -> int:
        """The most that the step allocates under ``schedule``, by trying."""
        if schedule not in self._tried:
            self._tried[schedule] = self._try(schedule)
        return self._tried[schedule]

    def _try(self, schedule: Schedule) -> int:
        simulated = simulate(self.graph, schedule).peak
        if not self.profile.can_run:
            return simulated
        try:
            witnesses: list[Witness] = []
            found = self._run_under(Way(self.choices(schedule)[1]), witnesses)
        except RuntimeError as error:
            self._check_memory(error)
            return int(simulated * _MORE_THAN_THERE_IS)
        found = self._of_the_planned(schedule, simulated, found, witnesses)
        self._peaks[schedule] = found
        return found.expected

    def _run_under(self, way: Way, witnesses: list[Witness] | None = None) -> Peaks:
        def progress(done: float) -> None:
            self._progress("trying the plan", done)

        with self._unplanned():
            return peaks_under(way, self.step, self._told, progress, witnesses)

    def _of_the_planned(
        self, schedule: Schedule, simulated: int, found: Peaks, witnesses: list[Witness]
    ) -> Peaks:
        """What steps that were tried tell of the one that is planned.

        They are others if what forward does is up to chance. Then they tell by comparison alone.
        """
        if not any(map(self._is_another, witnesses)):
            return found
        base, choices = self.graph.base, self.choices(schedule)[0]
        scale = (simulated - base) / self._guess(self.graph.outline, choices)
        expected = [found.expected]
        for peak, witness in zip(found.each, witnesses, strict=True):
            if witness.recording is not None and witness.difference is None:
                guess = self._guess(outline_of(witness.recording), choices)
                excess = peak / (base + scale * guess)
                expected.append(math.ceil(simulated * max(1.0, excess)))
        return replace(found, expected=max(expected))

    def _guess(self, outline: Graph | None, choices: Choices) -> int:
        assert outline is not None
        return max(1, estimated(outline, choices, self._alike))

    def _is_another(self, witness: Witness) -> bool:
        """Whether a forward that was tried is not the one that was recorded."""
        recording, tally = witness.recording, self.graph.tally
        if recording is None or tally is None or witness.difference is not None:
            return witness.difference is not None
        return tally_of(recording).made != tally.made

    @contextmanager
    def _unplanned(self) -> Iterator[None]:
        """A context in which the plan is off that has been applied since, if there is one."""
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
                wrap_blocks(model, how.plan.choices.blocks)

    def _obstacle(self) -> str | None:
        """Why the step cannot be run now as it was recorded, if so."""
        model = self.step.model
        if not isinstance(vars(model).get(OPTIONS), Runner | None):
            return (
                f"model: this {type(model).__name__} has been checkpointed since it was recorded, "
                "which hides what there is to plan: recollect.unwrap(model) first"
            )
        other = differences(self._conditions, self._identity, model)
        if other is None:
            return None
        return (
            f"model: this {type(model).__name__} is not as it was when it was recorded, so a plan "
            f"cannot be tried: {'; '.join(other.texts)}. Record it anew: recollect.frontier(...) "
            "or recollect.plan(...)"
        )

    def _check_memory(self, error: RuntimeError) -> None:
        """Go on without what there was no room for; other errors are raised."""
        if not _is_out_of_memory(error):
            raise error
        free_memory(self.step.device)

    # --- times ------------------------------------------------------------------------------------

    def _timed(self, schedule: Schedule) -> _Times | None:
        """What steps take under ``schedule``, and plain ones meanwhile; None if it cannot run."""
        if schedule not in self._times:
            self._times[schedule] = None
            if schedule in self._peaks:
                self._progress("timing the plan", 0.0)
                self._times[schedule] = self._times_of(Way(self.choices(schedule)[1]))
        return self._times[schedule]

    def _times_of(self, way: Way) -> _Times | None:
        if self.profile.was_run and (both := self._in_turn([Way(), way])) is not None:
            return _Times(both[1], both[0])
        alone = self._in_turn([way])
        return None if alone is None else _Times(alone[0], None)

    def _in_turn(self, ways: Sequence[Way]) -> list[Timing] | None:
        """What steps take in several ways; None if there is no room for one of them."""
        try:
            with self._unplanned():
                return times_under(ways, self.step, self._told)
        except RuntimeError as error:
            self._check_memory(error)
            return None

    def _as_measured(self, found: _Found) -> _Found:
        """The plain step, with what is known of it."""
        profile = self.profile
        if profile.measured_peak is None or profile.timing is None:
            return found
        peaks = Peaks(profile.measured_peak, profile.plain_peak, None)
        return replace(found, peaks=peaks, times=_Times(profile.timing, profile.timing))

    # --- every block, for comparison --------------------------------------------------------------

    def _or_blocks(self, found: _Found, room: int) -> _Found:
        """What was found; or every block checkpointed, if that is quicker."""
        schedule = block_schedule(self.graph)
        # What varies has to be looked at in every step, which only the engine for ops does.
        if schedule is None or self.graph.varies or not self._is_slow(found):
            return found
        if simulate(self.graph, schedule).peak > _ROUGHLY * room:
            return found
        blocks = self._blocks
        if blocks is None or blocks.peak > room:
            return found
        timings = self._against_blocks(found, blocks)
        if timings is None:
            return found
        ours, theirs, *rest = timings
        point = Point("every block (measured)", blocks.peak, theirs.seconds, "peer")
        if theirs.seconds * (1 + theirs.spread + ours.spread + _CLEARLY) >= ours.seconds:
            return replace(found, others=(point,))
        less = percent_text(1 - theirs.seconds / ours.seconds)
        remark = (
            "Every block is checkpointed as a whole, and its code runs twice in a step: that was "
            f"measured to take {less} less time than the best choice op by op."
        )
        return replace(blocks, times=_Times(theirs, rest[0] if rest else None), remark=remark)

    def _against_blocks(self, found: _Found, blocks: _Found) -> list[Timing] | None:
        """What steps take as found, with every block checkpointed, and plain if that can be."""
        schedule = found.schedule
        if schedule not in self._compared:
            ways = [Way(self.choices(schedule)[1]), Way(Blocks(), blocks.blocks)]
            if found.times is not None and found.times.plain is not None:
                ways.append(Way())
            self._compared[schedule] = self._in_turn(ways)
        return self._compared[schedule]

    def _is_slow(self, found: _Found) -> bool:
        """Whether a step under a plan takes noticeably longer than the plain one."""
        if found.times is None:
            return False
        planned, plain = found.times.planned, found.times.plain
        seconds = self.profile.seconds if plain is None else plain.seconds
        return planned.seconds > (1 + _NOTICEABLE) * seconds

    @cached_property
    def _blocks(self) -> _Found | None:
        """Every block checkpointed; None if that cannot be."""
        schedule = block_schedule(self.graph)
        paths = block_paths(self.graph, self.step.model)
        if schedule is None or len(paths) < 2:
            return None
        try:
            peaks = self._run_under(Way(Blocks(), paths))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            # What the engine for blocks refuses is no fault of a plan that does without it.
            if isinstance(error, RuntimeError) and _is_out_of_memory(error):
                free_memory(self.step.device)
            return None
        return _Found(schedule, peaks.expected, peaks, blocks=paths)

    # --- the plan ---------------------------------------------------------------------------------

    def _plan(self, budget: int, schedule: Schedule, peak: int) -> Plan:
        """The plan that does by ``schedule``, of which nothing was measured but the peak."""
        return self._plan_of(budget, _Found(schedule, peak))

    def _plan_of(self, budget: int, found: _Found) -> Plan:
        graph, model = self.graph, self.step.model
        outcome = simulate(graph, found.schedule, curve=True)
        times, peaks = found.times, found.peaks
        if budget >= self.plain_peak:
            outcome = replace(simulate_plain(graph, curve=True), seconds=self.profile.seconds)
        if found.blocks and times is not None:
            # It is not simulated: what goes from block to block is only nearly what is held. Plain
            # steps in between tell how quick the machine was just then.
            plain = self.profile.seconds if times.plain is None else times.plain.seconds
            seconds = times.planned.seconds * self.profile.seconds / plain
            outcome = replace(outcome, seconds=seconds)
        bound = self._bound(budget, outcome.seconds)
        choices, decisions = self._chosen(found)
        plan = Plan(
            budget=budget,
            predicted_peak=found.peak,
            predicted_time=outcome.seconds,
            plain_peak=self.plain_peak,
            plain_time=self.profile.seconds,
            bound_time=bound,
            choices=choices,
            base=graph.base,
            signature=self.step.signature,
            model=type(model).__name__,
            identity=self._identity,
            picture=self._picture(budget, found, outcome, bound),
            conditions=self._conditions,
            footprint=self._footprint(choices, found.peak),
            alternatives=self._alternatives,
            basis=self._basis(found.peak, outcome.peak),
            measured_peak=None if peaks is None else peaks.measured,
            measured_time=None if times is None else times.planned.seconds,
            measured_plain_time=_seconds(None if times is None else times.plain),
            spread=self._spread(times),
            holds_output=self.step.holds_output,
            output_bytes=None if peaks is None else peaks.output,
        )
        plan.__dict__["decisions"] = decisions
        return plan

    def _basis(self, peak: int, simulated: int) -> Basis | None:
        """What is needed to plan for other batches, where a plan took ``peak`` bytes."""
        script = self.profile.script
        if script is None:
            return None
        plain = simulate_plain(self.graph).peak
        excess = max(0.0, peak / simulated - 1, self.plain_peak / plain - 1)
        return Basis(self.graph, script, excess)

    @cached_property
    def _alternatives(self) -> tuple[Choices, ...]:
        """Choices from the quickest to the one of least peak, for this batch and larger ones.

        What is least for this batch need not be for a larger one: where weights and their gradients
        are the peak, it is all the same how much is kept elsewhere.
        """
        found = _thinned(self.solver.frontier())
        larger = self._larger()
        if larger is None:
            order = self.graph
        else:
            order = larger
            found += _thinned(Solver(larger, rough=True).frontier())
        schedules = {trimmed(self.graph, each.schedule) for each in found}
        # Descending in peaks, and those that are slower at the same are of no use.
        outcomes = sorted(
            ((simulate(order, each), each) for each in schedules),
            key=lambda pair: (-pair[0].peak, pair[0].seconds),
        )
        best = {outcome.peak: each for outcome, each in reversed(outcomes)}
        return tuple(self.choices(each)[0] for each in reversed(best.values()))

    def _larger(self) -> Graph | None:
        """The step with a larger batch, if it can be told what that would be."""
        script = self.profile.script
        if script is None:
            return None
        looks = [look for n in script.batch if (look := script.looks[n]) is not None]
        shapes = [(size[0] * _LARGER, *size[1:]) if size else size for size, _, _ in looks]
        try:
            return rescaled(
                self.graph,
                script,
                [
                    (shape, dense_strides(shape, size, stride), dtype)
                    for shape, (size, stride, dtype) in zip(shapes, looks, strict=True)
                ],
            ).graph
        except CannotPredict:
            return None

    def _footprint(self, choices: Choices, peak: int) -> Footprint:
        """What steps under the plan are compared with. ``peak``: under its own choices."""
        graph = self.graph
        outline, tally = graph.outline, graph.tally
        assert tally is not None
        peaks = [simulate(graph, each.schedule_in(graph)).peak for each in self._alternatives]
        options = zip((choices, *self._alternatives), (peak, *peaks), strict=True)
        factors = [(taken - graph.base) / self._guess(outline, each) for each, taken in options]
        return Footprint(tally, tuple(factors), counted(graph))

    @cached_property
    def _alike(self) -> Alike:
        return Alike(dict(counted(self.graph)))

    def _chosen(self, found: _Found) -> tuple[Choices, Decisions]:
        choices, decisions = self.choices(found.schedule)
        if not found.blocks:
            return choices, decisions
        choices = replace(choices, blocks=found.blocks)
        return choices, choices.decisions()

    def _spread(self, times: _Times | None) -> float:
        """By how much times may be off, as a fraction."""
        timing = self.profile.timing
        spreads = [self.graph.spread]
        if timing is not None:
            spreads.append(timing.spread)
        if times is not None:
            spreads.append(times.spread)
            if times.plain is not None:  # the same step, at another time
                before, after = sorted((times.plain.seconds, self.profile.seconds))
                spreads.append(after / before - 1 if before else 0.0)
        return max(spreads)

    def _bound(self, budget: int, seconds: float) -> float:
        """What no plan can be below, with ``seconds`` known to work; less with more memory."""
        bound = min(seconds, lower_bound(self.graph, budget, offload=self._offload, known=seconds))
        for other, found in self._bounds.items():
            bound = min(bound, found) if other <= budget else max(bound, found)
        self._bounds[budget] = bound
        return bound

    # --- what there is to say ---------------------------------------------------------------------

    def points(self) -> list[Point]:
        """All trade-offs, plain, and the usual ways."""
        plans = [
            Point("plan", solution.outcome.peak, solution.outcome.seconds)
            for solution in self.solver.frontier()
        ]
        plain = Point("plain", self.plain_peak, self.profile.seconds, "plain")
        return [*plans, plain, *peers_of(self.graph)]

    def _picture(self, budget: int, found: _Found, outcome: Outcome, bound: float) -> PlanReport:
        chosen = Point("this plan", found.peak, outcome.seconds, "chosen")
        times, peaks = found.times, found.peaks
        spread = self._spread(times)
        return replace(
            self._sketch(outcome, bound),
            budget=budget,
            predicted_peak=found.peak,
            rows=rows_of(self.graph, found.schedule),
            points=(*self.points(), *found.others, chosen),
            parts=tuple(zip(_PARTS, outcome.parts, strict=True)),
            notes=self._notes(found, spread),
            measured_peak=None if peaks is None else peaks.measured,
            measured_time=None if times is None else times.planned.seconds,
            measured_plain_time=_seconds(None if times is None else times.plain),
            spread=spread,
        )

    def overview(self) -> PlanReport:
        """The whole trade-off, without a budget."""
        solution = self.solver.least()
        outcome = simulate(self.graph, solution.schedule, curve=True)
        bound = self._bound(outcome.peak, outcome.seconds)
        note = "Without a budget: the curves are plain, and the plan of the lowest peak."
        return replace(self._sketch(outcome, bound), notes=(note,))

    def _sketch(self, outcome: Outcome, bound: float) -> PlanReport:
        """What all pictures of the step show."""
        return PlanReport(
            title=type(self.step.model).__name__,
            device=_name_of(self.step.device),
            budget=None,
            predicted_peak=outcome.peak,
            predicted_time=outcome.seconds,
            plain_peak=self.plain_peak,
            plain_time=self.profile.seconds,
            bound_time=bound,
            gap=outcome.seconds / bound - 1,
            before=_thin(simulate_plain(self.graph, curve=True)),
            after=_thin(outcome),
            rows=(),
            points=tuple(self.points()),
        )

    def _notes(self, found: _Found, spread: float) -> tuple[str, ...]:
        """What a reader should know of how the figures came about."""
        notes = [found.remark] if found.remark else []
        if not self.profile.can_run:
            notes.append("The step was not run: all figures are predicted.")
        else:
            notes.append("The peak was measured: the step was run under this plan.")
            if not self.profile.was_run:
                notes.append("There was no room for the plain step: its figures are predicted.")
        if not self.step.holds_output:
            notes.append("The output of the model is taken to be gone when backward runs.")
        if spread >= _TOLD:
            notes.append(
                f"Timings vary by {spread:.0%}: samples of the same work differed by that much. "
                "Times, and what was chosen by them, are rough; plan on a quiet machine for better "
                "ones. Bytes do not depend on it."
            )
        return tuple(notes)


def _seconds(timing: Timing | None) -> float | None:
    return None if timing is None else timing.seconds


def _thinned(frontier: list[Solution]) -> list[Solution]:
    """A few solutions at peaks that are evenly apart, the least always among them."""
    low, high = frontier[0].outcome.peak, frontier[-1].outcome.peak
    peaks = [low + (high - low) * n // (_ALTERNATIVES - 1) for n in range(_ALTERNATIVES)]
    places = [bisect_right(frontier, peak, key=lambda each: each.outcome.peak) for peak in peaks]
    return [frontier[place - 1] for place in sorted(set(places))]


def _thin(outcome: Outcome) -> tuple[tuple[float, int], ...]:
    return tuple(thinned(outcome.curve, _POINTS))


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _profiled(step: Step, link: Link | None) -> Profile:
    """The step as it runs; if there is no room for that without a plan, with as little as can be.

    If there is no room for that either, or no memory at all, as it would run.
    """
    for profiled in (profile_step, trace_in_little):
        if step.device.type == "meta":
            break
        try:
            with step.undone(rehearses=profiled is profile_step):
                return profiled(step, link)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
        free_memory(step.device)
    with nothing_fake_left(step.caches), step.undone():
        return predict_step(step, link)


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


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_memory(device: torch.device) -> None:
    """Free what earlier work has left on the device: garbage, caches, workspaces of cuBLAS."""
    gc.collect()
    if device.type == "cuda":
        free_cuda_workspaces()
        torch.cuda.empty_cache()


def _check_unplanned(model: Any) -> None:
    """Refuse a model of which parts are checkpointed: they would hide what there is to plan."""
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
