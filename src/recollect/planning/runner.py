"""Running the forward of a model under a plan (P7).

Each call is one of a `Variant`: calls with batches of one shape, of the model in one state. A call
that is not the planned one gets a variant of its own (P8): it runs with little memory, its step is
traced as the loop runs it (`live`), and later ones run by a schedule that suits them.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from recollect._torch.dynamo import (
    dynamo_callback,
    hide_from_dynamo,
    never_traced,
    run_without_dynamo,
)
from recollect._torch.modes import forward_ad_active, is_transforming
from recollect.planning.batch import describe_difference, is_alike, is_smaller, signature_of_batch
from recollect.planning.live import LiveStep, obstacle_to_tracing
from recollect.planning.model_state import (
    Differences,
    ModelState,
    compare_state,
    facts_of,
    gradient_bytes,
)
from recollect.planning.module_regions import run_modules, unwrap_modules, wrap_modules
from recollect.planning.planned_step import PlannedStep
from recollect.planning.record import find_blocks
from recollect.planning.sharded import play_regions, regions_of, warn_not_in_effect
from recollect.planning.variant import Variant
from recollect.planning.warn_once import WarnOnce
from recollect.planning.watch import PeakWatch, Waiting, report_output, watch_output
from recollect.replay.engine import (
    CallReport,
    LeftToRerun,
    observe_region,
    obstacle_around,
    replay_region,
)
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.rematerialize import Rematerializer
from recollect.report.units import bytes_text
from recollect.store.offload_batch import OffloadBatch

__all__ = ["MakePlan", "Runner", "run_planned"]


#: Makes a plan from a model, a traced step of it, the signature of its batch and its state; None
#: if there can be none.
MakePlan = Callable[[nn.Module, LiveStep, Any, ModelState], PlannedStep | None]
#: For how many shapes of batches variants are remembered.
_REMEMBERED = 64
#: How many forwards are remembered that still wait for their backward.
_WAITING = 64
#: How many forwards may come before the first step of an optimizer.
_UPDATE = 64
#: After how many forwards without a plan a warning says so.
_FUTILE = 8
#: In how many steps it is checked whether the loop holds the output of the model.
_CHECKS = 3


def run_planned(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    by: NamedSchedule,
    warnings: WarnOnce,
    report: CallReport | None = None,
    *,
    is_checked: bool = False,
) -> Any:
    """Call ``function`` with its results kept, offloaded or dropped as decided.

    ``is_checked``: compare what modules recompute with forward, by its values.
    """
    if by.modules:
        if is_transforming() or forward_ad_active():
            warn_not_in_effect(warnings, "it is called by a transform of torch.func")
            return function(*args, **kwargs)
        return run_modules(function, args, kwargs, by.engines, is_checked=is_checked)
    report = CallReport() if report is None else report
    if by.regions:
        return play_regions(function, args, kwargs, by, warnings, report)
    offload_batch = OffloadBatch(host=by.store, last_first=True)
    result = replay_region(function, args, kwargs, by, offload_batch, False, report)
    if type(result) is LeftToRerun:
        warn_not_in_effect(warnings, result.reason)
        return function(*args, **kwargs)
    if by.away:
        offload_batch.release()  # forward is over: what is leaving would only be in the way
    return result


class _Tracing(threading.local):
    """What a thread is tracing."""

    step: LiveStep | None = None
    #: The variant that it is one of; None: there is no plan yet.
    variant: Variant | None = None
    #: Before there is a plan: the signature of the batch, the state of the model, and how many
    #: forwards have run since.
    first: tuple[Any, ModelState] | None = None
    waited: int = 0
    #: How often no step could be traced, before there was a plan.
    futile: int = 0


class Runner:
    """Called in the place of the forward of a model under ``plan``.

    Without a plan the first step is traced, as the loop runs it, and ``make_plan`` makes the plan.
    """

    def __init__(self, plan: PlannedStep | None, make_plan: MakePlan | None = None) -> None:
        self._make_plan = make_plan
        self._warnings = WarnOnce()
        self._tracing = _Tracing()
        #: Forwards whose backward may not have run yet, with their model and thread.
        self._waiting: list[
            tuple[ReferenceType[Any] | None, int, ReferenceType[Rematerializer | Waiting]]
        ] = []
        self._set_plan(plan)

    def _set_plan(self, plan: PlannedStep | None) -> None:
        self.plan = plan
        #: By the signature of a batch, the state of the model and the gradients that are there.
        self._known: dict[Any, Variant] = {}
        #: The facts of the model at the last call, and how they differ from the planned ones.
        self._seen: tuple[Any, Differences | None] = (None, None)
        self._peaks = PeakWatch(plan.budget if plan is not None else sys.maxsize)
        #: In how many calls as planned it is still to be checked who holds the output.
        self._checks = 0 if plan is None or plan.output_bytes is None else _CHECKS
        self._as_planned: Variant | None = None
        #: The variant of the last step whose peak was compared with the budget.
        self._watched: Variant | None = None

    def unwrapped(self, model: nn.Module) -> None:
        """The model runs as it did before."""
        if self._tracing.step is not None:
            self._tracing.step.close()
            self._tracing.step = None
        unwrap_modules(model)

    def __reduce__(self) -> Any:
        return Runner, (self.plan, self._make_plan)

    def __deepcopy__(self, memo: Any) -> Runner:
        return Runner(self.plan, self._make_plan)

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _run_uncompiled(self, function, args, kwargs)
        if dynamo_callback() is not None:
            self._warn_of_compiler()
            return run_without_dynamo(self, _bound(function), args, kwargs)
        model = getattr(function, "__self__", None)
        self._end_trace(model)
        if self.plan is None and self._make_plan is None:
            return function(*args, **kwargs)  # there can be none
        if self.plan is None:
            return self._run_first(model, function, args, kwargs)
        return self._run(self.plan, model, function, args, kwargs)

    def _run(
        self,
        plan: PlannedStep,
        model: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._act_on_last_step()
        before = self._peaks.read(model)
        variant, more = self._variant(plan, model, args, kwargs)
        schedule, waiting = variant.schedule, self._count_waiting(model)
        if waiting and not plan.has_room_for(waiting + 1):
            self._warn_of_two()
            schedule = plan.least
        elif not waiting and variant.wants_trace and self._can_trace(model):
            end = partial(self._end_trace, model)
            live = LiveStep(model, plan.base + more, plan.link, on_end=end)
            self._tracing.step, self._tracing.variant = live, variant
            result = live.forward(function, args, kwargs, schedule)
            self._wait_for(result, model)
            return result
        report = CallReport()
        if schedule is None:
            result = function(*args, **kwargs)
        else:
            result = run_planned(function, args, kwargs, schedule, self._warnings, report)
        self._wait_for(result if report.remat is None else report.remat, model)
        if schedule is None:
            return result
        if report.recording is not None or report.is_unrecorded:
            variant.judge(report)
        if self._checks > 0 and variant is self._as_planned and not waiting:
            self._checks -= 1
            watch_output(result, self._check_output)
        if before is not None:
            self._watched = variant
            self._peaks.compare(result, before)
        return result

    # --- steps that are traced --------------------------------------------------------------------

    def _run_first(
        self, model: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a step before there is a plan: traced if possible, with its blocks recomputed."""
        assert isinstance(model, nn.Module)
        blocks, tracing = find_blocks(model), self._tracing
        obstacle = obstacle_to_tracing()
        if tracing.step is not None:
            tracing.waited += 1
        elif obstacle is not None:
            self._tried_in_vain(obstacle)
        else:
            live = LiveStep(model)
            tracing.step, tracing.variant = live, None
            tracing.first = signature_of_batch(args, kwargs), ModelState.of(model)
            return live.forward(function, args, kwargs, blocks=blocks)
        if obstacle_around() is not None:
            return function(*args, **kwargs)
        regions = regions_of(model)
        if regions:
            wrap_modules(model, regions)
            by = NamedSchedule(regions=regions)
            return run_planned(function, args, kwargs, by, self._warnings)
        return run_blocks(function, args, kwargs, blocks)

    def _can_trace(self, model: Any) -> bool:
        return isinstance(model, nn.Module) and obstacle_to_tracing() is None

    def _tried_in_vain(self, reason: str) -> None:
        """No step could be traced to make the plan from. If that goes on, say so."""
        self._tracing.futile += 1
        if self._tracing.futile == _FUTILE:
            self._warnings.warn(
                "no plan",
                f"there is no plan after {_FUTILE} forwards, and steps may exceed the budget, "
                f"since none could be traced: {reason}. Make a plan with a batch: "
                "recollect.fit(model, batch, budget)",
            )

    def _end_trace(self, model: Any) -> None:
        """Choose a schedule, or make the plan, if a step that this thread traced is over."""
        tracing = self._tracing
        live, variant = tracing.step, tracing.variant
        if live is None:
            return
        if live.is_pending and tracing.waited < _UPDATE:
            tracing.waited += 1
            return  # a second forward before its backward
        if variant is None and live.is_over and not live.has_updated and tracing.waited < _UPDATE:
            return  # gradients accumulate: the optimizer may have no state yet, which counts
        live.close()
        tracing.step, tracing.waited = None, 0
        if variant is None and not live.is_over:
            self._tried_in_vain(
                "no backward went through what the model returned, in the thread that called it"
            )
        elif variant is not None:
            if live.is_over:
                variant.traced(live.graph(), live.recording)
            else:
                variant.failed()
        elif live.is_over and self.plan is None and self._make_plan is not None:
            assert tracing.first is not None
            make_plan, self._make_plan = self._make_plan, None
            self._set_plan(make_plan(model, live, *tracing.first))

    # --- which variant ----------------------------------------------------------------------------

    def _variant(
        self, plan: PlannedStep, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Variant, int]:
        """The variant of such a call, and the bytes that are there beyond the planned ones."""
        other, more = self._differences(plan, model)
        if other is not None:
            more += other.nbytes
        signature = signature_of_batch(args, kwargs)
        key = signature, (other, more)
        variant = self._known.get(key)
        if variant is None:
            variant = self._new_variant(plan, *key)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = variant
        variant.count()
        return variant, more

    def _differences(self, plan: PlannedStep, model: Any) -> tuple[Differences | None, int]:
        """How the model and autocast differ from what was planned, and the gradients in bytes."""
        if not isinstance(model, nn.Module):
            return None, 0
        facts, found = self._seen  # once: another thread may change it
        now, parameters = facts_of(model)
        if now != facts:
            found = compare_state(plan.state, model)
            self._seen = now, found
        return found, gradient_bytes(model, parameters, plan.gradients)

    def _new_variant(
        self, plan: PlannedStep, signature: Any, kind: tuple[Differences | None, int]
    ) -> Variant:
        """``kind``: how the model differs from the planned one, and by how many bytes."""
        warnings, is_planned = self._warnings, kind == (None, 0)
        planned = Variant(plan, warnings, plan.needed_schedule, dict(plan.made))
        if is_planned and signature == plan.signature:
            self._as_planned = planned
            return planned
        larger = [
            (known, variant)
            for (known, of), variant in [*self._known.items()]
            if of == kind and variant.is_known and _is_within(signature, known)
        ]
        if larger:
            return Variant.within(min(larger, key=lambda each: _numbers_in(each[0]))[1])
        if is_planned and _is_within(signature, plan.signature):
            return Variant.within(planned)
        differences = _describe_differences(plan, signature, *kind)
        only_gradients = kind[0] is None and _is_within(signature, plan.signature)
        least = plan.least_with(kind[1]) if only_gradients else plan.least
        return Variant(plan, warnings, least, differences=differences)

    # --- earlier calls ----------------------------------------------------------------------------

    def _wait_for(self, waits: Any, model: Any) -> None:
        """Remember a forward until its backward. ``waits``: what it holds, or its output."""
        # Plain, and by whole modules, there is nothing of ours that waits.
        waits = waits if isinstance(waits, Rematerializer) else Waiting(waits)
        entry = None if model is None else ref(model), threading.get_ident(), ref(waits)
        self._waiting = [*self._waiting[1 - _WAITING :], entry]

    def _count_waiting(self, model: Any) -> int:
        """How many earlier forwards of the model still wait for their backward."""
        thread, count = threading.get_ident(), 0
        self._waiting = [entry for entry in self._waiting if entry[2]() is not None]
        for owner, where, reference in self._waiting:
            waits = reference()
            of = None if owner is None else owner()
            if waits is not None and of is model and where == thread and waits.is_waiting():
                count += 1
        return count

    def _check_output(self, alive: int, _: int) -> None:
        """Backward has reached the output; ``alive`` bytes of it are in memory."""
        plan = self.plan
        if self._checks >= 0 and plan is not None and plan.output_bytes is not None:
            has_warned = report_output(alive, plan.output_bytes, plan.budget)
            self._checks = -1 if has_warned else self._checks

    # --- warnings ---------------------------------------------------------------------------------

    def _act_on_last_step(self) -> None:
        """After a step that exceeded the budget: keep less, and warn where users see it."""
        over, self._peaks.over = self._peaks.over, None
        if over is None or self.plan is None or self._watched is None:
            return
        budget = self.plan.budget
        keeps_less = self._watched.exceeded(over)
        self._warnings.warn(
            "measured",
            f"the last step under the plan took {bytes_text(over)} on the device, "
            f"{bytes_text(over - budget)} more than its budget of {bytes_text(budget)}. "
            + ("Those that follow keep less and recompute more. " if keeps_less else "")
            + "Either something else is in memory beside the step, or the step is another one "
            "than was planned: make the plan with the loss, the optimizer and the largest "
            "batch of the training, recollect.plan(model, batch, budget, loss=..., "
            "optimizer=...)",
        )

    def _warn_of_compiler(self) -> None:
        self._warnings.warn(
            "compiled",
            "this model is called by compiled code, and runs under a plan: torch.compile leaves "
            "its forward as it is, and compiles what is around it. To have it compiled, "
            "plan.remove(model); or compile parts of it before recollect.plan(...)",
        )

    def _warn_of_two(self) -> None:
        self._warnings.warn(
            "two forwards",
            "a forward under the plan begins while an earlier one still waits for its backward: "
            "what both hold is in memory at once, and the budget counts one of them. It runs with "
            "the least memory that the plan knows of. Call backward before the next forward; let "
            "go of outputs that have no backward, or make them under torch.no_grad(); or plan a "
            "module whose forward makes both calls",
        )


def _is_within(signature: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a batch has the tensors of another, none of them larger."""
    return is_alike(signature, other) and is_smaller(signature, other)


def _numbers_in(signature: tuple[Any, ...]) -> int:
    """How many numbers are in a batch."""
    return sum(math.prod(each[0]) for each in signature if isinstance(each, tuple))


def _describe_differences(
    plan: PlannedStep, signature: tuple[Any, ...], other: Differences | None, more: int
) -> Differences:
    """Say how a call differs from the planned ones, and how to plan for it."""
    texts = [] if other is None else [*other.texts]
    cures = [] if other is None else [*other.cures]
    if not is_alike(signature, plan.signature):
        texts.append(f"in the batch {describe_difference(signature, plan.signature)}")
        cures.append("recollect.plan(...) with such a batch")
    elif not is_smaller(signature, plan.signature):
        texts.append("the batch is larger")
        cures.append("recollect.plan(...) with the largest batch")
    gradients = more - (0 if other is None else other.nbytes)
    if gradients:
        texts.append(
            f"{bytes_text(gradients)} of gradients are there when forward begins, as when they "
            "accumulate, or after zero_grad(set_to_none=False)"
        )
        cures.append(
            "recollect.plan(...) after a backward, while gradients are there: it counts "
            "them; or set them to None before each forward"
        )
    return Differences(tuple(texts), tuple(cures), more)


def run_blocks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    blocks: Iterable[nn.Module],
) -> Any:
    """Call the forward of a model with nothing kept but what ``blocks`` return."""
    return observe_region(
        function, args, kwargs, lambda recorder, remat: (recorder.pack, remat.unpack), None, blocks
    )[0]


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
    "the model runs under a plan of recollect, which a compiler cannot look into: leave out "
    "fullgraph=True, or plan.remove(model)",
)
hide_from_dynamo(Runner.__call__)
