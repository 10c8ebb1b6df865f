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
from weakref import finalize, ref

import torch
from torch import nn

from recollect._torch.autograd import after_each_backward, current_operation
from recollect._torch.dynamo import (
    dynamo_callback,
    hide_from_dynamo,
    is_exporting,
    never_traced,
    run_without_dynamo,
)
from recollect.graph.graph import Link
from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.planning.distributed import obstacle_in
from recollect.planning.loop import notices
from recollect.planning.loop.attempt import Attempt
from recollect.planning.loop.forwards import Forwards
from recollect.planning.loop.kinds import Kind, Kinds, Step
from recollect.planning.loop.live import SPLIT, LiveStep, obstacle_to_tracing
from recollect.planning.loop.planned_step import PlannedStep
from recollect.planning.loop.play import run_blocks, run_planned
from recollect.planning.loop.updates import FirstCall
from recollect.planning.loop.variant import Variant
from recollect.planning.loop.watch import PeakWatch, Waiting, report_output, watch_output
from recollect.planning.recording.batch import signature_of_batch
from recollect.planning.recording.model_state import ModelState, gradient_bytes, parameters_of
from recollect.planning.recording.record import find_blocks
from recollect.planning.recording.step import is_out_of_memory
from recollect.planning.regions.module_regions import unwrap_modules, wrap_modules
from recollect.planning.regions.sharded import units_of
from recollect.planning.warn_once import WarnOnce
from recollect.replay.engine import CallReport, obstacle_around
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording import Recording
from recollect.report.units import bytes_text


class MakePlan(Protocol):
    """Makes the plan for a fit without a batch."""

    def __call__(
        self, model: nn.Module, live: LiveStep, kinds: Step, state: ModelState, /
    ) -> PlannedStep | None:
        """Make it from a traced step, the kinds of its forwards and the state of the model.

        None if there can be none.
        """

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose plan cannot be as it was asked for, before its first step."""

    def for_compiled(self, model: nn.Module, callback: Any) -> str | None:
        """Hand a compiled model over to the planner of compiled models. Returns why not, if so.

        ``callback``: dynamo's callback, if compiled code calls the model.
        """


#: The number of forwards without a plan after which a warning says so.
_FUTILE = 8
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
        self._is_watching = False
        #: Whether backwards go through parts of an output, one after the other.
        self._in_parts = False
        #: Why a compiled model is not planned as such.
        self._unplanned = ""
        #: Whether backward is split, so that no step can be traced.
        self._is_split = False
        #: While the model was not called yet.
        self._first_call: FirstCall | None = None
        self._set_plan(plan)

    def _set_plan(self, plan: PlannedStep | None, recordings: Sequence[Recording] = ()) -> None:
        self.plan = plan
        self._kinds = None if plan is None else Kinds(plan, self._warnings, recordings)
        self._peaks = PeakWatch(plan.budget if plan is not None else sys.maxsize)
        #: In how many more planned calls to check whether the loop holds the output.
        self._checks = 0 if plan is None or plan.output_bytes is None else _CHECKS
        #: The last step whose peak was compared with the budget.
        self._watched: Step = ()

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

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled() or is_exporting():
            return function(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _run_uncompiled(self, function, args, kwargs)
        if dynamo_callback() is not None:
            run = self._run_in_compiled
            return run_without_dynamo(run, dynamo_callback(), _bound(function), args, kwargs)
        self._is_called()
        model = getattr(function, "__self__", None)
        self._forwards.begin(model)
        self._end_trace(model)
        if self._kinds is None and self._make_plan is None:
            return function(*args, **kwargs)  # there can be none
        if self._kinds is None or self.plan is None:
            return self._run_first(model, function, args, kwargs)
        return self._run(self.plan, self._kinds, model, function, args, kwargs)

    def _run_in_compiled(
        self, callback: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a forward that compiled code has called."""
        model: Any = getattr(function, "__self__", None)
        if self._is_handed_over(model, callback):
            return self._run_untraced(model, function, args, kwargs)
        notices.of_compiler(self._warnings, self._unplanned)
        return self(function, args, kwargs)

    def _run(
        self,
        plan: PlannedStep,
        kinds: Kinds,
        model: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._act_on_last_step(kinds)
        before, forwards = self._peaks.read(model), self._forwards
        kind = kinds.kind_of(model, signature_of_batch(args, kwargs))
        step = (*forwards.step, kind)
        live = forwards.live
        if live is None and kinds.is_surprise(step) and not kinds.has_room(step):
            kinds.surprised(step)
            notices.of_forwards(self._warnings)
        variant = kinds.find(step)
        schedule = variant.schedule
        if live is None and len(step) == 1 and variant.wants_trace and self._can_trace(model):
            end = partial(self._end_trace, model)
            live = forwards.live = self._live_step(model, plan.base + kind.more, plan.link, end)
        if live is not None:
            forwards.traced = step
            blocks = find_blocks(model) if variant.keeps_blocks else ()
            result, waiting = live.forward(function, args, kwargs, schedule, blocks)
            forwards.add(kind, waiting)
            return result
        since = current_operation()
        attempt = None if before is None else Attempt(model)
        try:
            result, report = self._run_by(variant, function, args, kwargs)
        except RuntimeError as error:
            if attempt is None or not is_out_of_memory(error):
                raise
            if not self._tighten(kinds, step, error) or not attempt.undo():
                raise
            is_retried = True
        else:
            is_retried = False
        if is_retried:  # when nothing holds the frames of the first attempt any more
            torch.cuda.empty_cache()
            schedule = variant.schedule
            result, report = self._run_by(variant, function, args, kwargs)
        again = partial(_again, ref(self), step)
        in_parts = self._in_parts
        forwards.add(
            kind, Waiting(result, report.remat, None, None, again, in_parts=in_parts, since=since)
        )
        if schedule is not None:
            if report.recording is not None or report.is_unrecorded:
                kinds.judge(step, report)
            if self._checks > 0 and kinds.is_planned(step):
                self._checks -= 1
                watch_output(result, self._check_output)
        if before is not None and (schedule is not None or variant.is_predicted):
            self._watch_backward()
            self._watched = step
            self._peaks.compare(result, before)
        return result

    def _run_by(
        self,
        variant: Variant,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, CallReport]:
        report, schedule, known = CallReport(), variant.schedule, variant.recording
        if schedule is None:
            since = current_operation()
            result = function(*args, **kwargs)
            variant.ran_plain(current_operation() - since)
            return result, report
        result = run_planned(function, args, kwargs, schedule, self._warnings, report, known)
        if variant.contest is not None:
            variant.contest.watch(result)
        return result, report

    # --- memory that has run out ------------------------------------------------------------------

    def _tighten(self, kinds: Kinds, step: Step, error: BaseException) -> bool:
        """A step ran out of memory: have later ones keep less. Returns whether they do."""
        less = kinds.tighten(step)
        note = (
            f"recollect: steps like this one take {bytes_text(less)} less from now on: they keep "
            "less and recompute more. This one cannot be run again: backward had begun, or forward "
            "had changed buffers or other state of the model"
            if less
            else "recollect: this step already runs by the schedule of the least memory"
        )
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10
            self._warnings.warn("out of memory", note)
        return less > 0

    def _watch_backward(self) -> None:
        """Notice backwards that run out of memory."""
        if not self._is_watching:
            self._is_watching, weak = True, ref(self)
            finalize(self, after_each_backward(lambda: _backward_is_over(weak)))

    def backward_failed(self, error: BaseException) -> None:
        """A backward ran out of memory: perhaps that of this model."""
        forwards = self._forwards
        if self._kinds is not None and any(each.is_broken for each in forwards.waiting):
            self._tighten(self._kinds, forwards.step, error)

    # --- steps that are traced --------------------------------------------------------------------

    def _run_first(
        self, model: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a step before there is a plan: traced if possible, with its blocks recomputed."""
        assert isinstance(model, nn.Module)
        if self._forwards.live is None and (compiled := ModelState.of(model).compiled):
            if self._is_handed_over(model):
                return vars(model)[OPTIONS](function, args, kwargs)
            notices.of_compiled_parts(self._warnings, compiled[0], self._unplanned)
            self._make_plan = None
            return function(*args, **kwargs)
        blocks, forwards = find_blocks(model), self._forwards
        obstacle = obstacle_to_tracing()
        live, kind = forwards.live, Kind(signature_of_batch(args, kwargs))
        if live is None and self._make_plan is not None:
            self._make_plan.check(model)
        if live is None and (unsupported := obstacle_in(model)) is not None:
            self._make_plan = None
            self._warnings.warn("no plan", f"{unsupported}. The model runs without a plan")
            return function(*args, **kwargs)
        if live is None and obstacle is not None and not self._is_split:
            self._tried_in_vain(obstacle)
        elif live is None and not self._is_split:
            live = forwards.live = self._live_step(model)
            forwards.kinds, forwards.state = (), ModelState.of(model)
        if live is not None and not live.is_over:
            more = gradient_bytes(model, parameters_of(model), live.gradients)
            kind = kind._replace(more=more)
            forwards.kinds += (kind,)
            result, waiting = live.forward(function, args, kwargs, blocks=blocks)
        else:
            if live is not None:
                live.is_followed = True
            result = self._run_untraced(model, function, args, kwargs)
            waiting = Waiting(result)
        forwards.add(kind, waiting)
        forwards.is_outgrown |= live is not None and len(forwards.step) > len(live.recordings)
        return result

    def _is_handed_over(self, model: Any, callback: Any = None) -> bool:
        """Hand an unplanned compiled model to the planner of those. Whether it took it."""
        is_mine = isinstance(model, nn.Module) and vars(model).get(OPTIONS) is self
        if self.plan is not None or self._make_plan is None or not is_mine:
            return False
        unwrap_module(model)
        reason = self._make_plan.for_compiled(model, callback)
        if reason is not None:
            wrap_module(model, self)
            self._unplanned = f" It is not planned as a compiled model: {reason}"
        return reason is None

    def _run_untraced(
        self, model: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
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

    def _live_step(
        self,
        model: nn.Module,
        base: int = 0,
        link: Link | None = None,
        end: Callable[[], None] | None = None,
    ) -> LiveStep:
        """A step of ``model`` to trace, whose forward begins now."""
        again = partial(_again, ref(self))
        return LiveStep(model, base, link, end, again, self._in_parts)

    def again(self, step: Step = ()) -> None:
        """A backward follows the one that ended ``step``: the next one is traced to its end."""
        if self._in_parts:
            return
        self._in_parts = self._forwards.is_outgrown = True
        if self._kinds is not None and self.plan is not None:
            self._kinds.forget(step)
            notices.of_backwards(self._warnings)

    def _can_trace(self, model: Any) -> bool:
        is_free = isinstance(model, nn.Module) and obstacle_to_tracing() is None
        return is_free and not self._is_split and obstacle_in(model) is None

    def _tried_in_vain(self, reason: str) -> None:
        """No step could be traced to make the plan from. Warn if that happens again and again."""
        self._forwards.futile += 1
        if self._forwards.futile == _FUTILE:
            notices.of_no_plan(self._warnings, _FUTILE, reason)

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
        is_first = self.plan is None
        if is_first and forwards.is_outgrown and not forwards.waiting:
            # As after a pipeline has tried its stages with one batch: the next one is traced.
            live.close()
            forwards.live, forwards.waited, forwards.is_outgrown = None, 0, False
            return
        if is_first and live.is_over and live.updates.are_awaited(forwards.waited, model):
            return  # the optimizer may have no state yet, which counts
        live.close()
        forwards.live, forwards.waited = None, 0
        if live.has_other_hooks:
            notices.of_hooks(self._warnings)
        if live.is_split:
            self._is_split = True
            self._warnings.warn("split", SPLIT)
        if not is_first and self._kinds is not None:
            if live.is_over and not live.is_split:
                self._kinds.traced(forwards.traced, live.graph(), live.recordings)
            else:
                self._kinds.failed(forwards.traced)
        elif not (live.is_over or live.is_split):
            self._tried_in_vain(
                "no backward ran through the output of the model, in the thread that called it. "
                "If there is no backward, call the model under torch.no_grad()"
            )
        elif self._make_plan is not None and not live.is_split:
            assert forwards.state is not None
            make_plan, self._make_plan = self._make_plan, None
            plan = make_plan(model, live, forwards.kinds, forwards.state)
            if plan is not None:
                wrap_modules(model, plan.wrapped)
            self._set_plan(plan, () if live.units else live.recordings)

    def _check_output(self, alive: int, _: int) -> None:
        """Backward has reached the output; ``alive`` bytes of it are in memory."""
        plan = self.plan
        if self._checks >= 0 and plan is not None and plan.output_bytes is not None:
            has_warned = report_output(alive, plan.output_bytes, plan.budget)
            self._checks = -1 if has_warned else self._checks

    # --- warnings ---------------------------------------------------------------------------------

    def _act_on_last_step(self, kinds: Kinds) -> None:
        """When the last step exceeded its budget: have later ones keep less, and warn."""
        over, self._peaks.over = self._peaks.over, None
        if over is None or self.plan is None or not self._watched:
            return
        keeps_less = kinds.exceeded(self._watched, over)
        notices.of_excess(self._warnings, self.plan, over, keeps_less=keeps_less)


def _again(weak: Callable[[], Runner | None], step: Step = ()) -> None:
    runner = weak()
    if runner is not None:
        runner.again(step)


def _backward_is_over(weak: Callable[[], Runner | None]) -> None:
    runner, error = weak(), sys.exc_info()[1]
    if runner is not None and isinstance(error, RuntimeError) and is_out_of_memory(error):
        runner.backward_failed(error)


def _run_uncompiled(
    runner: Runner, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run by the plan from within code that is compiled."""
    return runner(_bound(function), args, kwargs)


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
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
