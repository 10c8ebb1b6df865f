"""Runs the forward of a model under a plan (P7).

Each call belongs to a kind: calls with batches of one shape, of the model in one state, at one
place in a step (`kinds`). The first call of a new kind runs with little memory, and its step is
traced as the loop runs it (`live`). Later ones run by a schedule chosen for them (P8).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from recollect._torch.autograd import current_operation
from recollect._torch.dynamo import (
    dynamo_callback,
    hide_from_dynamo,
    is_exporting,
    never_traced,
    run_without_dynamo,
)
from recollect._torch.fsdp import is_shared
from recollect._torch.modes import is_transforming
from recollect.checks.place import WarnOnce, hide_own_frames
from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.planning.distributed import obstacle_in, obstacle_to_rerun
from recollect.planning.loop import notices
from recollect.planning.loop.attempt import Attempt, Attempts
from recollect.planning.loop.companions import Companion, RunsBy
from recollect.planning.loop.forwards import Forwards
from recollect.planning.loop.kinds import Kinds
from recollect.planning.loop.live import (
    LiveStep,
    drop_stale_trace,
    note_companion,
    obstacle_to_tracing,
)
from recollect.planning.loop.planned_step import ForwardKind, PlannedStep, StepKind
from recollect.planning.loop.play import run_blocks, run_planned
from recollect.planning.loop.updates import FirstCall
from recollect.planning.loop.variant import Variant
from recollect.planning.loop.watch import PeakWatch, Waiting, report_output, watch_output, weakly
from recollect.planning.recording.batch import signature_of_batch
from recollect.planning.recording.model_state import ModelState, extra_gradient_bytes, parameters_of
from recollect.planning.recording.record import find_blocks
from recollect.planning.regions.module_regions import unwrap_modules, wrap_modules
from recollect.planning.regions.sharded import units_of, warn_not_in_effect
from recollect.replay.engine import CallReport, obstacle_around
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording import Recording

_Function = Callable[..., Any]
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class MakePlan(Protocol):
    """Makes the plan for a fit without a batch."""

    def __call__(self, model: nn.Module, live: LiveStep, /) -> PlannedStep | None:
        """Make it from a traced step. None if there can be none."""

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose plan cannot be as it was asked for, before its first step."""

    def for_compiled(self, model: nn.Module, callback: Any) -> str | None:
        """Hand a compiled model over to the planner of compiled models. Returns why not, if so.

        ``callback``: dynamo's callback, if compiled code calls the model.
        """


#: The number of forwards without a plan after which a warning says so.
_FUTILE = 8
#: The number of threads that may call a model without a plan, each for the first time.
_THREADS = 32
#: The number of steps in which to check whether the loop holds the output of the model.
_CHECKS = 3


class Runner:
    """Called instead of the forward of a model under ``plan``.

    Without a plan, the first step is traced as the loop runs it, and ``make_plan`` makes the plan.
    """

    def __init__(self, plan: PlannedStep | None, make_plan: MakePlan | None = None) -> None:
        self._make_plan = make_plan
        self._warnings = WarnOnce()
        self._forwards = Forwards()
        self._attempts = Attempts(self._forwards, self._warnings)
        #: Whether backwards go through parts of an output, one after the other.
        self._in_parts = False
        self._on_again = weakly(self.again)
        #: Why a compiled model is not planned as such.
        self._unplanned = ""
        #: Whether backward is split, so that no step can be traced.
        self._is_split = False
        #: How many threads have called the model while there was no plan.
        self._threads = 0
        #: While the model was not called yet.
        self._first_call: FirstCall | None = None
        self._set_plan(plan)

    def _set_plan(
        self,
        plan: PlannedStep | None,
        recordings: Sequence[Recording] = (),
        companions: Sequence[Companion] = (),
    ) -> None:
        kinds = Kinds(plan, self._warnings, recordings, companions) if plan is not None else None
        #: The kinds of steps under the plan; None if there is no plan.
        self._kinds = kinds
        self._peaks = PeakWatch(plan.budget if plan is not None else sys.maxsize)
        #: In how many more planned steps to check whether the loop holds the output.
        self._checks = 0 if plan is None or plan.output_bytes is None else _CHECKS
        #: The last step whose peak was compared with the budget.
        self._watched: StepKind = ()

    @property
    def plan(self) -> PlannedStep | None:
        """The plan that is in effect."""
        return None if self._kinds is None else self._kinds.plan

    def expect_calls(self, model: nn.Module) -> None:
        """Warn if the model is trained without a call of its forward."""
        missed = partial(notices.of_no_call, self._warnings)
        self._first_call = FirstCall(model, missed)

    def _is_called(self) -> None:
        if self._first_call is not None:
            self._first_call.end()
            self._first_call = None

    def unwrapped(self, model: nn.Module) -> None:
        """The model runs as it did before."""
        self._is_called()
        if self._forwards.live is not None:
            self._forwards.live.close()
            self._forwards.live = None
        unwrap_modules(model)

    def __reduce__(self) -> Any:
        return Runner, (self.plan, self._make_plan)

    def __deepcopy__(self, memo: Any) -> Runner:
        return Runner(self.plan, self._make_plan)

    def __call__(self, function: _Function, args: _Args, kwargs: _Kwargs) -> Any:
        if not torch.is_grad_enabled() or is_exporting() or self._is_apart_from_transforms():
            return function(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _run_uncompiled(self, function, args, kwargs)
        if dynamo_callback() is not None:
            run = self._run_in_compiled
            return run_without_dynamo(run, dynamo_callback(), _bound(function), args, kwargs)
        self._is_called()
        model = getattr(function, "__self__", None)
        self._forwards.begin(model)
        drop_stale_trace()
        self._end_trace(model)
        if self._runs_plain(model):
            return function(*args, **kwargs)
        try:
            if self._kinds is not None:
                return self._run(self._kinds, model, function, args, kwargs)
            return self._run_first(model, function, args, kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    def _is_apart_from_transforms(self) -> bool:
        """Whether a transform of torch.func calls the model while it is traced or has no plan.

        Its own tensors may be in the place of the parameters: nothing is learned from them.
        """
        if torch.compiler.is_dynamo_compiling() or not is_transforming():
            return False
        self._is_called()
        reason = "it is called by a transform of torch.func"
        if self._forwards.live is None:
            if self._kinds is None and self._make_plan is not None:
                self._tried_in_vain(reason)
            return self._kinds is None
        if self._kinds is not None:
            warn_not_in_effect(self._warnings, reason)
        return True

    def _runs_plain(self, model: Any) -> bool:
        """Whether there can be no plan, or none that can be in effect now."""
        if self._kinds is None:
            return self._make_plan is None
        unsupported = obstacle_to_rerun(model)
        if unsupported is not None:
            warn_not_in_effect(self._warnings, unsupported)
        return unsupported is not None

    def _run_in_compiled(
        self, callback: Any, function: _Function, args: _Args, kwargs: _Kwargs
    ) -> Any:
        """Run a forward that compiled code has called."""
        model: Any = getattr(function, "__self__", None)
        if self._hand_over_if_compiled(model, callback):
            return self._run_untraced(model, function, args, kwargs)
        notices.of_compiler(self._warnings, self._unplanned)
        return self(function, args, kwargs)

    def _run(
        self, kinds: Kinds, model: Any, function: _Function, args: _Args, kwargs: _Kwargs
    ) -> Any:
        self._act_on_last_step(kinds)
        before, forwards = self._peaks.read(model), self._forwards
        kind = kinds.kind_of(model, signature_of_batch(args, kwargs))
        step = (*forwards.step, kind)
        if forwards.live is None and kinds.surprised(step):
            self._warnings.warn("several forwards", notices.FORWARDS)
        variant = kinds.begin(step)
        live = forwards.live = forwards.live or self._live_for(kinds, model, step, variant)
        if live is not None:
            blocks = find_blocks(model) if variant.keeps_blocks else ()
            result, waiting = live.forward(kind, function, args, kwargs, variant.schedule, blocks)
            forwards.add(kind, waiting)
            return result
        self._note_companion(step, RunsBy(variant.schedule))
        since = current_operation()
        attempt = None if before is None or kinds.plan.communicates else Attempt(model)
        run = partial(self._run_by, variant, function, args, kwargs)
        result, report = self._attempts.run(kinds, step, run, attempt)
        remat = None if report is None else report.remat
        forwards.add(kind, self._waiting_for(step)(result, remat, since=since))
        if report is not None:
            if report.recording is not None or report.is_unrecorded:
                kinds.compare(step, report)
            if self._checks > 0 and kinds.is_planned(step):
                watch_output(result, self._check_output)
        if before is not None and (report is not None or variant.is_predicted):
            self._attempts.watch_backward(kinds)
            self._watched = step
            self._peaks.compare(result, before)
        return result

    def _live_for(
        self, kinds: Kinds, model: Any, step: StepKind, variant: Variant
    ) -> LiveStep | None:
        """The step to trace from its first forward on; None if it is not to be traced."""
        is_wanted = len(step) == 1 and variant.wants_trace and not self._is_split
        if not is_wanted or not isinstance(model, nn.Module):
            return None
        if obstacle_to_tracing() is not None or obstacle_in(model) is not None:
            return None
        return LiveStep(
            model,
            kinds.plan.base + step[0].extra_bytes,
            kinds.plan.link,
            on_end=partial(self._end_trace, model),
            wait=self._waiting_for(),
        )

    def _waiting_for(self, step: StepKind = ()) -> Callable[..., Waiting]:
        """Makes what tells whether the backward of the last forward of ``step`` has come."""
        again = partial(self._on_again, step)
        return partial(Waiting, on_again=again, in_parts=self._in_parts)

    def _run_by(
        self, variant: Variant, function: _Function, args: _Args, kwargs: _Kwargs
    ) -> tuple[Any, CallReport | None]:
        """Run a forward by its schedule; the report is None if it runs plain."""
        schedule, known = variant.schedule, variant.recording
        if schedule is None:
            since = current_operation()
            result = function(*args, **kwargs)
            variant.ran_plain(current_operation() - since)
            return result, None
        report = CallReport()
        result = run_planned(function, args, kwargs, schedule, self._warnings, report, known)
        if variant.contest is not None:
            variant.contest.watch(result)
        return result, report

    # --- steps that are traced --------------------------------------------------------------------

    def _run_first(self, model: Any, function: _Function, args: _Args, kwargs: _Kwargs) -> Any:
        """Run a step before there is a plan: traced if possible, with its blocks recomputed."""
        forwards, kind = self._forwards, ForwardKind(signature_of_batch(args, kwargs))
        if forwards.is_new:  # to this thread
            forwards.is_new, self._threads = False, self._threads + 1
            if self._threads == _THREADS:
                reason = "each ran in another thread, and a step is planned in the thread it ran in"
                notices.of_no_plan(self._warnings, _THREADS, reason)
        if forwards.live is None:
            if self._hand_over_if_compiled(model):
                return vars(model)[OPTIONS](function, args, kwargs)
            if self._is_refused(model):
                self._make_plan = None
                return function(*args, **kwargs)
            forwards.live = self._first_live(model)
        live = forwards.live
        if live is not None and not live.is_over:
            extra_bytes = extra_gradient_bytes(model, parameters_of(model), live.gradients)
            kind = kind._replace(extra_bytes=extra_bytes)
            blocks = find_blocks(model)
            result, waiting = live.forward(kind, function, args, kwargs, blocks=blocks)
        else:
            if live is not None:
                live.is_followed = True
            self._note_companion((), None)
            result = self._run_untraced(model, function, args, kwargs)
            waiting = Waiting(result)
        forwards.add(kind, waiting)
        forwards.is_outgrown |= live is not None and len(forwards.step) > len(live.recordings)
        return result

    def _is_refused(self, model: nn.Module) -> bool:
        """Whether there can be no plan for the model as it is now, which a warning says."""
        if compiled := ModelState.of(model).compiled:
            shared = is_shared(model)
            notices.of_compiled_parts(
                self._warnings, compiled[0], self._unplanned, is_shared=shared
            )
            return True
        if self._make_plan is not None:
            self._make_plan.check(model)
        unsupported = obstacle_in(model)
        if unsupported is not None:
            self._warnings.warn("no plan", f"{unsupported}. The model runs without a plan")
        return unsupported is not None

    def _first_live(self, model: nn.Module) -> LiveStep | None:
        """The step to trace from this forward on; None if that is impossible."""
        obstacle = None if self._is_split else obstacle_to_tracing()
        if obstacle is not None:
            self._tried_in_vain(obstacle)
        if self._is_split or obstacle is not None:
            return None
        return LiveStep(model, wait=self._waiting_for())

    def _hand_over_if_compiled(self, model: Any, callback: Any = None) -> bool:
        """Hand an unplanned compiled model to the planner of those. Whether it took it.

        ``callback``: as in `MakePlan.for_compiled`.
        """
        is_mine = isinstance(model, nn.Module) and vars(model).get(OPTIONS) is self
        if self.plan is not None or self._make_plan is None or not is_mine:
            return False
        if callback is None and not ModelState.of(model).compiled:
            return False
        unwrap_module(model)
        reason = self._make_plan.for_compiled(model, callback)
        if reason is not None:
            wrap_module(model, self)
            self._unplanned = f" It is not planned as a compiled model: {reason}"
        return reason is None

    def _run_untraced(
        self, model: nn.Module, function: _Function, args: _Args, kwargs: _Kwargs
    ) -> Any:
        """Run a forward before there is a plan with little kept, if possible."""
        if obstacle_around() is not None:
            return function(*args, **kwargs)
        units = units_of(model)
        if units:
            wrap_modules(model, units)
            by = NamedSchedule(units=units)
            return run_planned(function, args, kwargs, by, self._warnings)
        return run_blocks(function, args, kwargs, find_blocks(model))

    def _note_companion(self, step: StepKind, ran: RunsBy | None) -> None:
        """A forward runs, perhaps inside of a step of another model that is traced."""
        note_companion(lambda: Companion(ran, partial(weakly(self.runs_by), step)))

    def runs_by(self, step: StepKind) -> RunsBy | None:
        """By what the last forward of ``step`` runs from now on; None if that is yet to be seen."""
        if self._kinds is None:
            return None
        return self._kinds.runs_by(step) if step else RunsBy(None)

    def again(self, step: StepKind = ()) -> None:
        """A backward follows the one that ended ``step``: the next one is traced to its end."""
        if self._in_parts:
            return
        self._in_parts = self._forwards.is_outgrown = True
        if self._kinds is not None:
            self._kinds.forget(step)
            self._warnings.warn("several backwards", notices.BACKWARDS)

    def _tried_in_vain(self, reason: str) -> None:
        """No step could be traced to make the plan from. Warn if that happens again and again."""
        self._forwards.futile += 1
        if self._forwards.futile == _FUTILE:
            notices.of_no_plan(self._warnings, _FUTILE, reason)

    def _had_no_backward(self, live: LiveStep) -> None:
        """A forward was traced in vain. That of a frozen model keeps nothing and does not count."""
        if live.has_graph:
            self._tried_in_vain(
                "no backward ran through the output of the model, in the thread that called it. "
                "If there is no backward, call the model under torch.no_grad()"
            )

    def _end_trace(self, model: Any) -> None:
        """Choose schedules, or make the plan, if a step that this thread traced is over."""
        forwards = self._forwards
        live = forwards.live
        if live is None:
            return
        live.end_if_retained()
        if forwards.waiting and live.can_join():
            return  # another forward of the same step
        forwards.waited += 1
        if self._kinds is None:
            if forwards.is_outgrown and not forwards.waiting:
                # As after a pipeline has tried its stages with one batch: the next one is traced.
                live.close()
                forwards.live, forwards.waited, forwards.is_outgrown = None, 0, False
                return
            if live.is_over and live.updates.are_awaited(forwards.waited, model):
                return  # the optimizer may have no state yet, which counts
        live.close()
        forwards.live, forwards.waited = None, 0
        self._learn_from(live, model)

    def _learn_from(self, live: LiveStep, model: nn.Module) -> None:
        """Choose schedules, or make the plan, if a whole step was traced."""
        is_first = self._kinds is None
        if live.is_split:
            self._is_split = True
            self._warnings.warn("split", notices.SPLIT)
        if self._kinds is not None:
            if live.is_over and not live.is_split:
                graph, recordings = live.finish(model).graph, live.recordings
                self._kinds.add_trace(live.kinds, graph, recordings, live.companions)
            else:
                self._kinds.trace_failed(live.kinds)
        elif not (live.is_over or live.is_split):
            self._had_no_backward(live)
        elif self._make_plan is not None and not live.is_split:
            plan = self._make_plan(model, live)
            self._make_plan = None  # not before: a later step makes it if this is interrupted
            if plan is not None:
                wrap_modules(model, plan.wrapped)
            self._set_plan(plan, () if live.units else live.recordings, live.companions)
        self._check_hooks(live, () if is_first else live.kinds)

    def _check_hooks(self, live: LiveStep, step: StepKind) -> None:
        """Warn of hooks inside of a traced step, by default the planned one, unless it fits so."""
        kinds = self._kinds
        if live.has_other_hooks and kinds is not None and not kinds.has_room_for_plain(step):
            self._warnings.warn("hooks", notices.HOOKS)

    def _check_output(self, alive: int, _: int) -> None:
        """Backward has reached the output; ``alive`` bytes of it are in memory."""
        plan = self.plan
        if self._checks > 0 and plan is not None and plan.output_bytes is not None:
            is_told = report_output(alive, plan.output_bytes, plan.budget)
            self._checks = 0 if is_told else self._checks - 1

    # --- warnings ---------------------------------------------------------------------------------

    def _act_on_last_step(self, kinds: Kinds) -> None:
        """When the last step exceeded its budget: have later ones keep less, and warn."""
        over = self._peaks.take_excess()
        if over is not None and self._watched:
            keeps_less = kinds.exceeded(self._watched, over)
            notices.of_excess(self._warnings, kinds.plan, over, keeps_less=keeps_less)


def _run_uncompiled(runner: Runner, function: _Function, args: _Args, kwargs: _Kwargs) -> Any:
    """Run by the plan from within code that is compiled."""
    return runner(_bound(function), args, kwargs)


def _bound(function: _Function) -> _Function:
    """The forward of a model as a method, which dynamo turns into a partial."""
    if isinstance(function, partial) and isinstance(function.args[0], nn.Module):
        return MethodType(function.func, function.args[0])
    return function


never_traced(
    _run_uncompiled,
    "the model runs under a plan of recollect, which a compiler cannot trace: leave out "
    "fullgraph=True, or plan.remove(model)",
)
hide_from_dynamo(Runner.__call__)
