"""One plan for all ranks (P5): the leader of a `Team` searches, and all of them run the steps.

A plan is tried by steps that may have collectives: all ranks run each of them. What a step takes is
the most that it takes on any rank, whose batches may be of different shapes. Under the plan ranks
do not depend on each other: nothing that is run again communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from recollect._torch.fsdp import is_shared
from recollect._torch.groups import group_timeout
from recollect.checks.place import warn_user
from recollect.errors import CheckpointError, PlanWarning
from recollect.graph.graph import Graph
from recollect.graph.simulate import simulate
from recollect.planning.budget import resolve_budget
from recollect.planning.distributed import ranks_of
from recollect.planning.loop.planned_step import COSTS, SeenForward
from recollect.planning.plan import Plan
from recollect.planning.planner import Planner
from recollect.planning.prepare import Prepared, Request, prepare
from recollect.planning.progress import Progress, silent
from recollect.planning.ranks.team import Team
from recollect.planning.recording.model_state import ModelState
from recollect.planning.recording.record import Profile, record_step
from recollect.planning.recording.step import TrainingStep, is_out_of_memory
from recollect.planning.solving.solve import Solver
from recollect.planning.ways import Bench, Peaks, Way
from recollect.replay.named_schedule import NamedSchedule, trimmed
from recollect.report.units import bytes_text

T = TypeVar("T")
#: How often steps are timed, the same on all ranks.
_ROUNDS = 3
#: Seconds that a rank waits for others in the middle of training. Less than these wait for it.
_IN_A_LOOP = 30.0


def make_plan(request: Request, budget: float | str, progress: Progress = silent) -> Plan:
    """The plan of `recollect.plan`, the same on all ranks that have the model."""
    ranks = ranks_of(request.model)
    if ranks is None:
        return _only_plan(Planner.of(request, progress), budget)
    team = Team(ranks)
    with team.failing_together():
        prepared = prepare(request)
        about = Meeting.of(request.model, prepared.state, budget)
        team, _ = meet(team, about, "recollect.plan or fit")
    with team.failing_together():
        progress("recording a step", 0.0)
        profile = record_step(prepared.step, prepared.link, team.agree)
        local = Local.of(prepared, profile)
        if not team.leads:
            return follow(team, Follower(prepared.step, local, profile.plain_peak))
        leader = Leader(prepared.step, profile.made, team)
        profile = replace(profile, plain_peak=leader.largest_plain_peak(profile.plain_peak))
        step, _, state, signature = prepared
        planner = Planner(step, profile, state, signature, progress=progress, bench=leader)
        plan = _only_plan(planner, budget)
        return leader.finish(plan)


def _only_plan(planner: Planner, budget: float | str) -> Plan:
    """The only plan that a planner makes.

    If the step fits plain, the engine is not timed, and nothing is searched for.
    """
    room = resolve_budget(budget, planner.plain_peak, planner.step.device)
    if room < planner.plain_peak:
        return planner.plan_for(budget)
    planner.trials.leave_unpriced()
    least = Solver(planner.graph, rough=True).least_solution().schedule
    return planner.plain_plan(room, trimmed(planner.graph, least))


def make_traced_plan(
    model: nn.Module,
    profile: Profile,
    local: Local,
    budget: float | str,
    talks: str | None,
    sends: bool,
    plan: Callable[[Profile, Bench | None], Plan],
) -> Plan | None:
    """The plan for a step that every rank has traced in its loop; None if there can be none.

    Nothing is run for it. If the others do not come, this rank makes one of its own.

    Args:
        model: The model.
        profile: What was traced of its step here.
        local: The parts of the plan that belong to this rank.
        budget: The budget.
        talks: The op by which its forward communicates, if it does.
        sends: Whether the step exchanges messages with single processes.
        plan: Makes the plan, with what asks other ranks if there are any.
    """
    ranks = ranks_of(model, sends=sends)
    if ranks is None:
        return plan(profile, None) if _may_plan(talks) else None
    team = Team(ranks, min(_IN_A_LOOP, group_timeout() / 3))
    about = Meeting.of(model, local.state, budget, 1 + len(local.others), talks)
    try:
        with team.failing_together():
            team, found = meet(team, about, "a forward after recollect.fit")
    except (CheckpointError, ValueError) as error:
        warn_user(f"{error}. This rank makes a plan of its own", PlanWarning)
        return plan(profile, None) if _may_plan(talks) else None
    if not _may_plan(next((each.obstacle for each in found if each.obstacle), None)):
        return None
    with team.failing_together():
        return _plan_in_loop(model, team, profile, local, plan)


def _plan_in_loop(
    model: nn.Module,
    team: Team,
    profile: Profile,
    local: Local,
    plan: Callable[[Profile, Bench | None], Plan],
) -> Plan:
    """The plan for a traced step: made by the leader, received by the others."""
    step = TrainingStep.of_loop(model, local.gradients)
    if team.leads:
        leader = Leader(step, profile.made, team)
        highest = leader.largest_plain_peak(profile.plain_peak)
        return leader.finish(plan(replace(profile, plain_peak=highest), leader))
    received = follow(team, Follower(step, local, profile.plain_peak))
    if received.predicted_peak > received.budget:
        warn_user(
            f"budget: no plan brings the step of this {type(model).__name__} down to "
            f"{bytes_text(received.budget)} on every rank. Training goes on under "
            "the plan of the least peak",
            PlanWarning,
        )
    return received


def _may_plan(talks: str | None) -> bool:
    """Whether there can be a plan for a forward; if not, say why."""
    if talks is not None:
        warn_user(
            f"model: its forward communicates with other processes ({talks}), and a plan of "
            "one process may run such operations again when another does not. It runs without "
            "a plan from now on. Fit a part that does not communicate",
            PlanWarning,
        )
    return talks is None


# --- who plans with whom --------------------------------------------------------------------------


@dataclass(frozen=True)
class Meeting:
    """What a rank announces to the others before planning."""

    model: str
    tensors: tuple[tuple[str, str, bool], ...]
    budget: str
    is_shared: bool
    #: How many forwards a step has.
    forwards: int = 1
    #: Why there can be no plan, if so.
    obstacle: str | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        state: ModelState,
        budget: float | str,
        forwards: int = 1,
        obstacle: str | None = None,
    ) -> Meeting:
        """The announcement for ``model`` in ``state``."""
        tensors = tuple((name, text, trained) for name, text, _, trained in state.tensors)
        name = type(model).__name__
        return cls(name, tensors, repr(budget), is_shared(model), forwards, obstacle)


def meet(team: Team, about: Meeting, call: str) -> tuple[Team, list[Meeting]]:
    """Wait for all ranks. Returns the team of those that plan for the same model, and what for."""
    found: Mapping[int, Meeting] = team.meet(about, call)
    same = [rank for rank, each in found.items() if each.tensors == about.tensors]
    if len(same) < len(found) and about.is_shared:
        other = next(rank for rank in found if rank not in same)
        raise ValueError(
            f"model: this {about.model} is distributed over the ranks {list(found)}, and rank "
            f"{other} plans for another model, {found[other].model}. Call {call} for the same "
            "model, in the same order, on every rank"
        )
    budgets = _differing({rank: found[rank].budget for rank in same})
    if budgets:
        raise ValueError(
            f"budget: all ranks make one plan, and need one budget, but it is {budgets}"
        )
    forwards = _differing({rank: found[rank].forwards for rank in same})
    if forwards:
        raise ValueError(
            f"model: all ranks make one plan, for steps with as many forwards of this "
            f"{about.model} before backward on each, but there are {forwards}"
        )
    return team.among(same), [found[rank] for rank in same]


def _differing(by_rank: Mapping[int, object]) -> str | None:
    """The values by rank in words; None if they are all equal."""
    if len(set(by_rank.values())) == 1:
        return None
    return ", ".join(f"{value} on rank {rank}" for rank, value in by_rank.items())


# --- what is run on every rank --------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    """The parts of a plan that differ between ranks: batches, and shards of uneven size."""

    graph: Graph
    made: Mapping[str, int]
    signature: tuple[Any, ...]
    state: ModelState
    gradients: int
    #: The forwards after the first.
    others: tuple[SeenForward, ...] = ()

    @classmethod
    def of(cls, prepared: Prepared, profile: Profile) -> Local:
        """Of a step that was recorded here."""
        gradients = prepared.step.gradient_bytes
        return cls(profile.graph, profile.made, prepared.signature, prepared.state, gradients)

    def of_plan(self, plan: Plan, costs: Mapping[str, Any]) -> Plan:
        """The plan of the leader, for this rank."""
        others = zip(plan.others, self.others, strict=True)
        return replace(
            plan,
            graph=replace(self.graph, **costs),
            others=tuple(own.planned(forward.schedule) for forward, own in others),
            base=self.graph.base,
            made=tuple(self.made.items()),
            signature=self.signature,
            state=self.state,
            gradients=self.gradients,
        )


class Leader(Bench):
    """Has steps run on all ranks. Each method says what a follower's does."""

    rounds = _ROUNDS

    def __init__(self, step: TrainingStep, made: Mapping[str, int], team: Team) -> None:
        super().__init__(step, made)
        self._team = team

    def _all(self, name: str, run: Callable[[], T], *args: Any) -> list[T]:
        """Have all ranks do something. Returns what each has found, this one first."""
        self._team.order(name, *args)
        own = _attempt(self.step, run)
        found = [own, *self._team.answers()]
        failed = [each for each in found if isinstance(each, _Failure)]
        if failed:
            raise failed[0].error()
        return found

    def largest_plain_peak(self, here: int) -> int:
        """The peak of the plain step, on the rank where it is the highest."""
        return max(self._all("plain_peak", lambda: here))

    def peaks(
        self, way: Way, progress: Callable[[float], None] = lambda _: None, warm: int = 0
    ) -> tuple[Peaks, bool]:
        run = partial(super().peaks, way, progress, warm)
        found = self._all("peaks", run, way)
        peaks = [each for each, _ in found]
        outputs = [each.output for each in peaks if each.output is not None]
        highest = Peaks(
            max(each.measured for each in peaks),
            max(each.expected for each in peaks),
            max(outputs, default=None),
            tuple(map(max, zip(*(each.each for each in peaks), strict=True))),
        )
        return highest, any(differs for _, differs in found)

    def predicted_peak(self, by: Sequence[NamedSchedule], simulated: int) -> int:
        return max(self._all("predicted_peak", lambda: simulated, by, simulated))

    def samples(self, ways: Sequence[Way], warm: int) -> list[list[float]]:
        found = self._all("samples", partial(super().samples, ways, warm), ways, warm)
        return [[*map(max, zip(*of_way, strict=True))] for of_way in zip(*found, strict=True)]

    def can_run(self, way: Way) -> bool:
        return all(self._all("can_run", partial(super().can_run, way), way))

    def finish(self, plan: Plan) -> Plan:
        """Tell the plan to all."""
        costs = {name: getattr(plan.graph, name) for name in COSTS}
        self._team.order("plan", plan, costs)
        return plan


class Follower(Bench):
    """Runs steps as the leader says."""

    rounds = _ROUNDS

    def __init__(self, step: TrainingStep, local: Local, plain_peak: int) -> None:
        super().__init__(step, local.made)
        self.local = local
        self._plain_peak = plain_peak

    def plain_peak(self) -> int:
        """The peak of the plain step here."""
        return self._plain_peak

    def predicted_peak(self, by: Sequence[NamedSchedule], simulated: int) -> int:
        graph = self.local.graph
        parts = [each.schedule_in(graph, [region]) for region, each in enumerate(by)]
        kept = frozenset[int]().union(*(part.kept for part in parts))
        offloaded = frozenset[int]().union(*(part.offloaded for part in parts))
        return simulate(graph, replace(parts[0], kept=kept, offloaded=offloaded)).peak


def follow(team: Team, bench: Follower) -> Plan:
    """Do what the leader says, until there is a plan."""
    while True:
        name, args = team.next_order()
        if name == "plan":
            return bench.local.of_plan(*args)
        team.answer(_attempt(bench.step, partial(getattr(bench, name), *args)))


@dataclass(frozen=True)
class _Failure:
    """An error on a rank while it ran steps."""

    is_memory: bool
    text: str

    def error(self) -> RuntimeError:
        return (torch.OutOfMemoryError if self.is_memory else RuntimeError)(self.text)


def _attempt(step: TrainingStep, run: Callable[[], T]) -> T | _Failure:
    """Run it; return a `_Failure` if it fails and no other rank waits for this one."""
    try:
        return run()
    except Exception as error:
        if step.is_shared:
            raise  # in the middle of a step of all: nothing but the end of this helps the others
        is_memory = isinstance(error, RuntimeError) and is_out_of_memory(error)
        if is_memory:
            step.free_memory()
        return _Failure(is_memory, f"{type(error).__name__}: {error}")
