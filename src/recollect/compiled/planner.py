"""Makes plans for compiled models (P4 to P6).

As `Planner`, but for what is tried: a schedule is compiled, and then the step runs. Compiling takes
long, so a target is corrected by what the simulation was off, which mostly takes one correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torch import nn

from recollect._torch.fsdp import is_shared
from recollect.checks.place import warn_user
from recollect.compiled.backend import Compiler
from recollect.compiled.decisions import CompiledStep
from recollect.compiled.observe import observe_step
from recollect.compiled.sites import Site, find_sites
from recollect.compiled.tied import TiedSolver
from recollect.compiled.trials import CompiledTrials
from recollect.errors import PlanWarning
from recollect.graph.graph import Link, Schedule
from recollect.graph.simulate import simulate
from recollect.planning.planner import Planner, Solve
from recollect.planning.prepare import Offload, Request, link_for, prepare_step
from recollect.planning.progress import Progress, silent
from recollect.planning.recording.batch import signature_of_batch
from recollect.planning.recording.model_state import ModelState
from recollect.planning.recording.step import TrainingStep
from recollect.planning.solving.pool import Solution
from recollect.planning.solving.solve import Solver
from recollect.planning.trial import Candidate
from recollect.replay.named_schedule import NamedSchedule, trimmed

#: How often a schedule is compiled for a budget: if one fits, and if none does yet.
_COMPILES, _COMPILES_IN_NEED = 3, 5
#: The part of a budget that may stay unused.
_CLOSE = 0.03
#: The part that the first try leaves free in fused code, whose memory is known by rules of thumb.
_MARGIN = 0.01
#: A faster schedule is not compiled for less than this part of a step's time.
WORTH = 0.01


def check_not_offloaded(offload: Offload) -> None:
    """Refuse to offload in a plan of a compiled model that is made from the user's loop."""
    if offload is True:
        raise ValueError(
            "offload=True: the plan of a compiled model offloads only if it is made with a batch: "
            "recollect.fit(model, batch, budget, offload=True). Or leave it out"
        )


def check_not_shared(model: nn.Module) -> None:
    """Refuse a compiled model that is distributed over processes."""
    if is_shared(model):
        raise ValueError(
            "model: it is compiled, and its parameters are distributed by fully_shard or as "
            "DTensor: what compiled code saves of them is not planned. Leave torch.compile "
            "out, or checkpoint blocks in place of a plan: recollect.checkpointed(block)"
        )


class CompiledPlanner(Planner):
    """Makes plans for one compiled step."""

    trials: CompiledTrials
    _tries_slack = False  # each try compiles the step once more

    @classmethod
    def of_compiled(cls, request: Request, progress: Progress = silent) -> CompiledPlanner:
        """A planner for the step of a request, which is observed."""
        step = prepare_step(request)
        check_not_shared(step.model)
        sites = find_sites(request.model)
        link = _link_for(step, sites, request.offload)
        if step.on_cuda:
            _warn_of_cuda_graphs(sites)
        state = ModelState.of(request.model)
        progress("compiling the step as torch does", 0.0)
        if step.on_cuda:
            step.free_memory()
        observed = observe_step(step, sites, link)
        if request.offload is True and observed.profile.graph.link is None:
            raise ValueError(
                f"offload=True: the step of this model runs {len(observed.calls)} compiled graphs, "
                "and plans offload where it runs one. Leave it out, or compile the model as a "
                "whole: torch.compile(model), without graph breaks"
            )
        planner = cls(
            step,
            observed.profile,
            state,
            signature_of_batch(step.args, step.kwargs),
            progress=progress,
        )
        planner.trials = CompiledTrials(step, observed, state, progress)
        return planner

    @cached_property
    def solver(self) -> Solver | TiedSolver:  # type: ignore[override]
        """Finds schedules."""
        observed = self.trials.observed
        solver = Solver(
            self.graph,
            offload=self._offload,
            progress=lambda done: self._progress("solving", done),
        )
        if len({part.key for part in observed.merged.parts}) == len(observed.calls):
            return solver
        return TiedSolver(solver, observed.merged, observed.site_of)

    def _fastest_schedule(self, room: int, solve: Solve) -> Schedule | None:
        target, offloads = self._first_target(room), None
        for count in range(_COMPILES_IN_NEED):
            solution = solve(target)
            if solution is None:
                break
            schedule = self._trimmed(solution.schedule)
            offloads = bool(schedule.offloaded)
            if schedule in self.trials.tried_within(room):
                break
            if count >= _COMPILES and self.trials.tried_within(room):
                break
            peak = self.trials.peak(schedule)
            if 0 <= room - peak <= _CLOSE * room:
                break
            simulated = solution.outcome.peak
            if peak > room:
                target = min(target - 1, simulated - (peak - room))
            else:
                target = room - (peak - simulated)
                if not self._pays(solve(target), schedule):
                    break
        fitting = self.trials.tried_within(room)
        alike = (each for each in fitting if offloads in (None, bool(each.offloaded)))
        return next(alike, None)

    def _first_target(self, room: int) -> int:
        """What to solve for first, by what is known to take more, or less, than simulated."""
        tried = self.trials.expected.items()
        if tried:
            return room - max(0, min(p - simulate(self.graph, s).peak for s, p in tried))
        less = self.trials.plain_outcome().peak - self.plain_peak
        if less > 0:  # schedules that save less are off by less
            return room + less // 2
        is_fused = self.trials.observed.sites[0].compiler.is_fused
        return int(room * (1 - _MARGIN)) if is_fused else room

    def _trimmed(self, schedule: Schedule) -> Schedule:
        """The schedule without results that backward does not need, if calls may differ so."""
        is_tied = isinstance(self.solver, TiedSolver)
        return schedule if is_tied else trimmed(self.graph, schedule)

    def _pays(self, solution: Solution | None, schedule: Schedule) -> bool:
        """Whether it is worth the while to compile another solution."""
        if solution is None:
            return False
        now = simulate(self.graph, schedule).seconds
        return solution.outcome.seconds < now - WORTH * self.graph.plain_seconds

    # --- the plan ---------------------------------------------------------------------------------

    def _compiled_step(self, budget: int, candidate: Candidate) -> CompiledStep:
        trials, schedule = self.trials, candidate.schedule
        if budget >= self.plain_peak:
            return trials.decisions(None, budget)
        target = budget - max(0, candidate.peak - simulate(self.graph, schedule).peak)
        return replace(trials.decisions(schedule, target), code=trials.code.get(schedule))

    @cached_property
    def _alternatives(self) -> tuple[NamedSchedule, ...]:
        return ()


def _warn_of_cuda_graphs(sites: Sequence[Site]) -> None:
    """Warn if the step runs as CUDA graphs: their memory is not what is allocated in a step."""
    if any(site.compiler.uses_cuda_graphs for site in sites):
        warn_user(
            "model: it is compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune'), "
            "which hold the memory of a step in pools of their own, from step to step. The plan "
            "decides what is saved for backward, but whether the step keeps the budget cannot be "
            "measured. Nothing is offloaded. Compile with mode='max-autotune-no-cudagraphs' or the "
            "default mode",
            PlanWarning,
        )


def _link_for(step: TrainingStep, sites: Sequence[Site], offload: Offload) -> Link | None:
    """The link to the host, if results may be offloaded."""
    why = next(filter(None, (_obstacle_in(site.compiler) for site in sites)), None)
    if why is None:
        return link_for(step, offload)
    if offload is True:
        raise ValueError(f"offload=True: {why}")
    return None


def _obstacle_in(compiler: Compiler) -> str | None:
    """Why what a compiler makes cannot offload, if so, and what to do."""
    if compiler.uses_cuda_graphs:
        return (
            "the model is compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune'), "
            "which cannot. Leave it out, or compile with mode='max-autotune-no-cudagraphs' or the "
            "default mode"
        )
    if not compiler.knows_any_op:
        return (
            f"the model is compiled with backend={compiler.name!r}, which may not know the "
            "operations that copy. Leave it out, or compile with backend='inductor' (the default), "
            "'recollect' or 'aot_eager'"
        )
    return None
