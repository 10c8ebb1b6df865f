"""Makes plans for compiled models (P4 to P6).

As `Planner`, but for what is tried: a schedule is compiled, and then the step runs. Compiling takes
long, so a target is corrected by what the simulation was off, which mostly takes one correction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from recollect._torch.fsdp import is_shared
from recollect.checks.place import warn_user
from recollect.compiled.applied import Code, make_code
from recollect.compiled.backend import Compiler
from recollect.compiled.decisions import Away, CompiledStep, GraphDecision
from recollect.compiled.observe import ObservedStep, observe_step, sizes_of
from recollect.compiled.sites import Called, Site, find_sites, installed, model_name
from recollect.compiled.tied import TiedSolver, Unit, unit_of
from recollect.errors import PlanWarning
from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import simulate
from recollect.planning.planner import Planner, Solve
from recollect.planning.prepare import Offload, Request, link_for, prepare_step
from recollect.planning.progress import Progress, silent
from recollect.planning.recording.batch import signature_of_batch
from recollect.planning.recording.model_state import ModelState
from recollect.planning.recording.step import TrainingStep
from recollect.planning.solving.pool import Solution
from recollect.planning.solving.solve import Solver
from recollect.planning.trial import Candidate, Trials
from recollect.planning.ways import Bench, Peaks, Way
from recollect.replay.named_schedule import NamedSchedule, trimmed

#: How often a schedule is compiled for a budget: if one fits, and if none does yet.
_COMPILES, _COMPILES_IN_NEED = 3, 5
#: The part of a budget that may stay unused.
_CLOSE = 0.03
#: The part that the first try leaves free in fused code, whose memory is known by rules of thumb.
_MARGIN = 0.01
#: A faster schedule is not compiled for less than this part of a step's time.
WORTH = 0.01


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
        link = link_for(step, request.offload) if can_offload(sites, request.offload) else None
        if step.on_cuda:
            _warn_of_cuda_graphs(sites)
        state = ModelState.of(request.model)
        progress("compiling the step as torch does", 0.0)
        if step.on_cuda:
            step.free_memory()
        observed = observe_step(step, sites, link)
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


def can_offload(sites: Sequence[Site], offload: Offload) -> bool:
    """Whether compiled modules may offload. If they cannot, ``offload=True`` is an error."""
    why = next(filter(None, (_obstacle_in(site.compiler) for site in sites)), None)
    if why is not None and offload is True:
        raise ValueError(f"offload=True: {why}")
    return why is None


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


# --- trials --------------------------------------------------------------------------------------

#: The names of what a graph saves, or None, and what of that is held on the host.
_Chosen = tuple[tuple[str, ...] | None, tuple[Away, ...]]


@dataclass(frozen=True, kw_only=True)
class _CompiledWay(Way):
    """The step with certain code in its compiled modules."""

    called: Called

    @contextmanager
    def applied(self, *_: Any) -> Iterator[None]:
        with installed(self.called):
            yield


class CompiledTrials(Trials):
    """The trials of one compiled step. Each compiles it once."""

    def __init__(
        self, step: TrainingStep, observed: ObservedStep, state: ModelState, progress: Progress
    ) -> None:
        super().__init__(Bench(step, observed.profile.made), observed.profile, state, progress)
        self.observed = observed
        self.plain_schedule = observed.torch_schedule
        #: By schedule that was tried: the code.
        self.code: dict[Schedule, Code] = {}

    @cached_property
    def graph(self) -> Graph:
        """The step."""
        return self.profile.graph

    @property
    def title(self) -> str:
        """What the model is called."""
        return f"compiled {model_name(self.step.model)}"

    def decisions(self, schedule: Schedule | None, target: int = 0) -> CompiledStep:
        """What a schedule decides for the graphs; None: everything as torch chooses."""
        observed = self.observed
        merged, sites = observed.merged, observed.site_of
        chosen: dict[Unit, _Chosen] = {}
        #: By key of a graph, what it keeps and what it sends: when. Clocks of calls are not exact.
        alike: dict[Any, tuple[Away, ...]] = {}
        aways = [()] * len(merged.parts) if schedule is None else merged.away(schedule)
        for call, (part, away) in enumerate(zip(merged.parts, aways, strict=True)):
            names = None
            if schedule is not None:  # without what only other graphs read, which is returned
                names = tuple(sorted(merged.kept_in(call, schedule) & part.needed))
            like = part.key, names, tuple(each.name for each in away)
            unit = unit_of(merged, sites, call)
            chosen.setdefault(unit, (names, alike.setdefault(like, away)))
        variants = _variants(chosen, len(observed.sites))
        sources = {call.graph.key: call.source for call in observed.calls if call.graph}
        sizes = {key: tuple(each.values()) for key, each in sizes_of(observed.calls).items()}
        graphs = {
            GraphDecision(key, sources[key], names, variants[site], sizes[key], sent): None
            for (site, key), (names, sent) in chosen.items()
        }
        return CompiledStep(
            graphs=tuple(graphs),
            sites=tuple((site.path, variants[n]) for n, site in enumerate(observed.sites)),
            backend=observed.sites[0].compiler.name,
            target=target,
            base=merged.graph.base,
            around=tuple(merged.around) if len(merged.parts) == 1 else (),
            returned=merged.parts[0].returned,
            forwards=observed.forwards,
            made=tuple(observed.calls[0].made) if len(merged.parts) == 1 else (),
        )

    # --- peaks ------------------------------------------------------------------------------------

    def _run(self, schedule: Schedule) -> tuple[Peaks, bool]:
        self._progress("compiling", 0.0)
        code = make_code(self.decisions(schedule), self.observed.sites)
        way = _CompiledWay(called=code.called)
        with self._plan_removed():  # the first step compiles
            peaks = self._bench.peaks(way, self._trying, warm=1)
        self.code[schedule] = code
        return peaks

    def _way(self, schedule: Schedule | None) -> Way:
        plain = self.observed.called
        return _CompiledWay(called=plain if schedule is None else self.code[schedule].called)

    @contextmanager
    def _plan_removed(self) -> Iterator[None]:
        obstacle = self._difference()
        if obstacle is not None:
            raise ValueError(obstacle)
        yield  # whatever runs has code of its own


def _variants(chosen: dict[Unit, _Chosen], count: int) -> list[int]:
    """By site: the number of its variant. Sites that decide the same have the same."""
    decided: list[dict[str, Any]] = [{} for _ in range(count)]
    for (site, key), each in chosen.items():
        decided[site][key] = each
    found: list[dict[str, Any]] = []
    variants = []
    for own in decided:
        number = next((n for n, other in enumerate(found) if _agree(own, other)), len(found))
        if number == len(found):
            found.append({})
        found[number].update(own)
        variants.append(number)
    return variants


def _agree(own: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two sites decide the same where both decide."""
    return all(other[key] == each for key, each in own.items() if key in other)
