"""Measures training steps of the user's loop in a compiled model, and makes the plan of one (P8).

A step begins when the model is called and no forward of it waits for its backward. It ends with the
backward after which none waits. A profiler of memory is on for that time. No step is run again:
peaks are simulated, and corrected by what the steps of the loop were measured to take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.autograd.profiler import profile

from recollect._torch.autograd import after_each_backward, current_graph_task
from recollect.compiled.applied import Code
from recollect.compiled.backend import Call, Notes
from recollect.compiled.decisions import CompiledStep
from recollect.compiled.merge import Merged, saved_schedule, unmodelled_bytes
from recollect.compiled.observe import ObservedStep, saves_of
from recollect.compiled.planner import WORTH, CompiledPlanner, CompiledTrials
from recollect.compiled.sites import Site
from recollect.compiled.timeline import Timeline, timeline_of
from recollect.graph.graph import Link, Schedule
from recollect.graph.simulate import simulate
from recollect.planning.loop.updates import Updates
from recollect.planning.loop.watch import Waiting, weakly
from recollect.planning.plan import Plan
from recollect.planning.progress import Progress
from recollect.planning.recording.memory_events import (
    ended_profiler,
    may_communicate,
    started_profiler,
)
from recollect.planning.recording.model_state import ModelState, parameters_of
from recollect.planning.recording.record import Profile
from recollect.planning.recording.sampling import Timing
from recollect.planning.recording.step import TrainingStep, bytes_of_gradients, device_of
from recollect.planning.trial import Candidate
from recollect.planning.ways import Peaks


class LoopSteps:
    """The training steps of one loop. ``notes`` count what is compiled, until others do.

    ``on_begin`` is called before the first forward of a step, and returns whether to measure it;
    ``on_measured`` after a step was measured.
    """

    def __init__(
        self,
        model: nn.Module,
        notes: Notes,
        on_begin: Callable[[], bool],
        on_measured: Callable[[Timeline], None],
    ) -> None:
        self.device = device_of(model)
        self._model, self._on_begin, self._on_measured = ref(model), on_begin, on_measured
        self.updates = Updates(parameters_of(model))
        self.updates.begin()
        self._notes = notes
        #: The profiler that is on, if one is.
        self._profilers: list[profile] = []
        self._thread = threading.get_ident()
        self._waiting: list[Waiting] = []
        #: How many calls of the model and its modules are under way: the outermost begins a step.
        self._depth = 0
        self.count = 0  #: how many steps have begun
        self.missed = 0  #: how many of them could not be measured
        self._is_over = False
        #: Whether the step is not to be measured, which backward is still part of.
        self._is_void = False
        #: The most bytes of gradients that were there when a step began.
        self.gradients = 0
        self._stop = after_each_backward(weakly(self._after_backward))
        finalize(self, self._stop)
        finalize(self, _end_all, self._profilers)

    def run(self, call: Callable[[], Any]) -> Any:
        """Call a compiled module, or the model around it."""
        if self._is_over or not torch.is_grad_enabled() or threading.get_ident() != self._thread:
            return call()
        if _is_in_backward():  # of a region that runs again, which may end halfway
            return call()
        if not self._depth:
            self._begin()
        self._depth += 1
        try:
            result = call()
        except BaseException:
            self._give_up()
            raise
        finally:
            self._depth -= 1
        self._waiting.append(Waiting(result))
        return result

    def watch_compiler(self, notes: Notes) -> None:
        """Other code is in effect; ``notes`` count what it compiles."""
        self._notes.on_compile = None
        self._notes, self.missed = notes, 0

    def end(self) -> None:
        """Notice no more."""
        self._is_over = True
        self._give_up()
        self._notes.on_compile = None
        self._stop()

    # --- steps ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._is_waiting():
            return
        self._give_up()  # of a step without backward
        self._waiting.clear()
        model = self._model()
        if model is not None:
            self.device = device_of(model)  # to which it may have been moved since
            self.gradients = max(self.gradients, bytes_of_gradients(model))
        is_wanted = self._on_begin()
        self.count += 1
        if self._is_over or not is_wanted:
            return
        if not self._notes.compiled:  # a step that compiles says nothing: its compiler is measured
            self.missed += 1
            return
        profiler = None if may_communicate() else started_profiler()
        self._notes.on_compile = self._give_up
        self._profilers += [] if profiler is None else [profiler]
        self.missed += profiler is None

    def _is_waiting(self) -> bool:
        return any(each.is_waiting() for each in self._waiting)

    def _after_backward(self) -> None:
        if _is_in_backward() or threading.get_ident() != self._thread:
            return
        if self._is_void:
            self._give_up()
        if self._profilers and not self._is_waiting():
            timeline = timeline_of(ended_profiler(self._profilers.pop()).events(), self.device)
            if len(timeline.stretches) > 1:
                self._on_measured(timeline)
            else:  # nothing compiled has run
                self.missed += 1

    def _give_up(self) -> None:
        """Do not measure the step that has begun."""
        self._is_void = _is_in_backward()
        if self._is_void:  # a profiler that ended here would be on again after backward
            return
        self.missed += len(self._profilers)
        _end_all(self._profilers)


def _is_in_backward() -> bool:
    return current_graph_task() != -1


def _end_all(profilers: list[profile]) -> None:
    while profilers:
        ended_profiler(profilers.pop())


# --- the plan ------------------------------------------------------------------------------------

#: The fraction of a budget that stays free before a plan was measured: where ops run as they are,
#: and in fused code, whose memory is known by rules of thumb.
_UNTRIED, _UNTRIED_FUSED = 0.005, 0.03
_MEASURED = "The peak was measured: a step of the loop ran under this plan. Times are predicted."


class LoopTrials(CompiledTrials):
    """Knows what the loop's steps took, and simulates the others."""

    #: By how many bytes steps take more than simulated.
    excess_bytes = 0

    def _try(self, schedule: Schedule) -> int:
        return simulate(self.graph, schedule).peak + self.excess_bytes

    def _time(self, schedules: tuple[Schedule, ...]) -> tuple[list[Timing], Timing | None] | None:
        return None

    def note(self, schedule: Schedule, peak: int, code: Code) -> None:
        """A step of the loop under a schedule has taken ``peak`` bytes."""
        self._peaks[schedule] = Peaks.of_one(peak)
        self.code[schedule] = code
        self.excess_bytes = peak - simulate(self.graph, schedule).peak
        self.forget_simulated()

    def measured(self, schedule: Schedule) -> Peaks | None:
        """What a step of the loop under a schedule has taken, if one has run."""
        return self._peaks.get(schedule)

    def forget_simulated(self) -> None:
        """Know nothing but what steps of the loop have taken."""
        self.expected = {each: peaks.expected for each, peaks in self._peaks.items()}


class LoopPlanner(CompiledPlanner):
    """Makes plans for one step of the user's loop."""

    trials: LoopTrials
    #: What the last plan was made of.
    last: Candidate

    @classmethod
    def of_loop(
        cls,
        model: nn.Module,
        observed: ObservedStep,
        state: ModelState,
        gradients: int,
        peak: int,
        progress: Progress,
    ) -> LoopPlanner:
        """A planner for a step that was seen.

        ``gradients``: the bytes of those that were there before it; ``peak``: what it took.
        """
        step = TrainingStep.of_loop(model, gradients)
        is_fused = any(site.compiler.is_fused for site in observed.sites)
        untried = _UNTRIED_FUSED if is_fused else _UNTRIED
        planner = cls(step, observed.profile, state, (), progress=progress, untried=untried)
        planner.trials = LoopTrials(step, observed, state, progress)
        saves = saves_of(observed.calls, lambda graph: graph.saved)
        ran = simulate(planner.graph, saved_schedule(observed.merged, saves)).peak
        planner.trials.excess_bytes = max(0, peak - ran)
        planner._from_loop = True
        return planner

    def make_plan(self, budget: int, candidate: Candidate) -> Plan:
        """Make the plan that compiles the step as ``candidate`` does."""
        is_torchs = candidate.schedule == self.trials.observed.torch_schedule
        if candidate.peaks is None and not is_torchs:
            candidate = replace(candidate, peaks=self.trials.measured(candidate.schedule))
        self.last = candidate
        plan = super().make_plan(budget, candidate)
        if candidate.peaks is not None:
            notes = (_MEASURED, *plan.report.notes[1:])
            plan = replace(plan, report=replace(plan.report, notes=notes))
        return plan

    def _compiled_step(self, budget: int, candidate: Candidate) -> CompiledStep:
        code = self.trials.code.get(candidate.schedule)
        return replace(super()._compiled_step(budget, candidate), code=code)

    def note(self, peak: int, code: Code) -> None:
        """A step under the last plan has taken ``peak`` bytes."""
        trials, schedule = self.trials, self.last.schedule
        trials.note(schedule, peak, code)
        if schedule == trials.observed.torch_schedule:
            trials.profile = replace(trials.profile, plain_peak=peak)

    def better_plan(self, plan: Plan, peak: int) -> Plan:
        """The next plan to take, after a step under ``plan`` has taken ``peak`` bytes."""
        budget, last = plan.budget, self.last
        found = self.plan_or_least(budget)
        gain = plan.predicted_time - found.predicted_time
        is_close = peak >= (1 - self._untried) * budget
        if peak <= budget and (is_close or gain < WORTH * plan.plain_time):
            return self.make_plan(budget, replace(last, peak=peak, peaks=Peaks.of_one(peak)))
        return found

    def best_known(self, budget: int) -> Plan:
        """The plan to stay with: of those that steps ran by, or of torch's split if none fits."""
        trials = self.trials
        trials.forget_simulated()
        fitting = trials.tried_within(budget)
        if not fitting:
            trials.peak(trials.observed.torch_schedule)
        return self.make_plan(budget, trials.fastest(fitting[:1] or [trials.least_tried()]))

    @property
    def is_measured(self) -> bool:
        """Whether a step of the loop has run by the last plan."""
        return self.last.schedule in self.trials.code


def observed_loop(
    calls: Sequence[Call], sites: Sequence[Site], merged: Merged, link: Link | None, forwards: int
) -> ObservedStep:
    """A step of the loop. ``link``: that to the host; ``forwards``: as in `ObservedStep`."""
    merged = replace(merged, graph=replace(merged.graph, link=link))
    saves = saves_of(calls, lambda graph: graph.torch_saves)
    torchs = saved_schedule(merged, saves)
    outcome = simulate(merged.graph, torchs)
    plain_peak = outcome.peak + sum(unmodelled_bytes(merged, saves))
    profile = Profile(merged.graph, {}, None, plain_peak, outcome.seconds, can_run=False)
    return ObservedStep(sites, {}, calls, merged, torchs, profile, forwards)
