"""Makes a plan from a step that the user's own loop ran (P8): ``fit(model, budget=...)``."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from recollect._torch.fsdp import is_shared
from recollect._torch.groups import has_peers
from recollect.compiled.lazy import fit_called_by_compiler, fit_lazily
from recollect.compiled.planner import check_not_shared
from recollect.compiled.sites import is_compiled_throughout
from recollect.errors import CheckpointError
from recollect.planning.budget import resolve_budget
from recollect.planning.distributed import communicating_op
from recollect.planning.host_costs import with_host_costs
from recollect.planning.loop import notices
from recollect.planning.loop.live import LiveStep, TracedStep
from recollect.planning.loop.planned_step import SeenForward, with_gradients
from recollect.planning.loop.updates import StateWatch
from recollect.planning.plan import Plan
from recollect.planning.planner import Planner
from recollect.planning.prepare import Offload, check_can_offload
from recollect.planning.progress import Progress, silent, tell_plan
from recollect.planning.ranks.together import Local, make_traced_plan
from recollect.planning.recording.model_state import gradients_of, parameters_of
from recollect.planning.recording.record import (
    Profile,
    bytes_by_module,
    peak_of_run,
    schedule_of,
    simulated_profile,
)
from recollect.planning.recording.sampling import measured_link, now
from recollect.planning.recording.step import device_of, storage_sizes
from recollect.planning.ways import Bench
from recollect.replay.named_schedule import trimmed

_log = logging.getLogger("recollect")
_FIRST_STEPS = (
    "although they kept only the outputs of the modules in nn.ModuleList and nn.Sequential, and "
    "recomputed the rest"
)


@dataclass(frozen=True)
class LazyPlanner:
    """What `fit` was given without a batch. Called with a traced step, it makes the plan."""

    budget: float | str
    offload: Offload
    progress: Progress

    def __call__(self, model: nn.Module, live: LiveStep) -> Plan | None:
        """The plan; None if there can be none, which a warning says."""
        start, traced, recordings = now(), live.finish(model), live.recordings
        profile = self._profile(model, live, traced)
        graph = profile.graph
        others = tuple(
            SeenForward(kind.signature, bytes_by_module(recording), kind.extra_bytes)
            for kind, recording in zip(live.kinds[1:], recordings[1:], strict=True)
        )
        signature = live.kinds[0].signature
        local = Local(graph, profile.made, signature, live.state, live.gradients, others)
        talks = next(filter(None, (communicating_op(model, each) for each in recordings)), None)
        make = partial(self._plan, model, live, others)
        plan = make_traced_plan(
            model, profile, local, self.budget, talks, traced.has_messages, make
        )
        if plan is None:
            return None
        # Of this process: another may have made the plan, and copies of the model start from zero.
        state_bytes = StateWatch().nbytes(parameters_of(model)) + live.updates.own_bytes
        plan = replace(plan, state_bytes=state_bytes)
        first = replace(graph, base=traced.first_base)
        graphs = (first, with_gradients(first, live.accumulated))
        took = max(peak_of_run(each, recordings) for each in graphs)
        notices.of_first_steps(plan, took, _FIRST_STEPS)
        tell_plan(plan, now() - start, self.progress)
        _log.debug("%s", plan)
        return plan

    def _profile(self, model: nn.Module, live: LiveStep, traced: TracedStep) -> Profile:
        """The profile of a later step like the one that was traced."""
        is_single = len(live.recordings) == 1 and not is_shared(model)
        link = measured_link(live.device) if self.offload and is_single else None
        graph = replace(traced.graph, base=traced.later_base, link=link)
        reason = next((each.reason for each in live.recordings if each.reason), None)
        made = bytes_by_module(live.recordings[0])
        profile = simulated_profile(graph, made, reason, can_run=False)
        # Where several processes share a host, a small op tells little of it.
        return with_host_costs(profile, model) if is_single and not has_peers() else profile

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose plan cannot be as it was asked for."""
        if self.offload is True:
            check_can_offload(device_of(model), is_shared=is_shared(model))

    def for_compiled(self, model: nn.Module, callback: Any) -> str | None:
        """Have a model be planned as a compiled one, if it is. Returns why not, if it cannot.

        Its modules are compiled, or it is called by compiled code: ``callback`` is that of dynamo.
        """
        try:
            check_not_shared(model)
            if is_compiled_throughout(model):
                fit_lazily(model, self.budget, self.offload, self.progress)
            elif not fit_called_by_compiler(
                model, self.budget, self.offload, self.progress, callback
            ):
                return "only small parts of it are compiled, or the code that calls it was before"
        except (ValueError, CheckpointError) as error:
            return str(error)
        return None

    def _plan(
        self,
        model: nn.Module,
        live: LiveStep,
        others: tuple[SeenForward, ...],
        profile: Profile,
        bench: Bench | None,
    ) -> Plan:
        """The plan for the budget, or of the least peak."""
        # Gradients that are there now are there in the forwards of later steps as well.
        held = max(0, sum(storage_sizes(gradients_of(model))) - live.gradients)
        planner = Planner.of_traced(
            model, live, profile, others=others, held=held, progress=self.progress, bench=bench
        )
        # Where many forwards are under way at once, the solver may not find as little.
        least = trimmed(planner.graph, schedule_of(live.recordings))
        planner.trials.peak(least)
        budget = resolve_budget(self.budget, planner.plain_peak, planner.step.device)
        if budget >= planner.plain_peak:
            return planner.plain_plan(budget, least)
        return planner.plan_or_least(self.budget)

    def __reduce__(self) -> Any:
        return LazyPlanner, (self.budget, self.offload, silent)  # what reports may not be picklable
