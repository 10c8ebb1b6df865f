"""Running the forward of a model under a plan (P7).

Each call is one of a `Variant`: calls with batches of one shape, of the model in one state. A call
that is not the planned one gets a variant of its own, whose schedule suits it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from recollect._torch.dynamo import (
    dynamo_is_watching,
    hide_from_dynamo,
    never_traced,
    run_without_dynamo,
)
from recollect.checks.place import warn_user
from recollect.errors import PlanWarning
from recollect.planning.batch import is_alike, is_smaller, signature_of_batch, told_apart
from recollect.planning.blocks import run_blocks, unwrap_blocks
from recollect.planning.model_state import Differences, differences, facts_of
from recollect.planning.planned import PlannedStep
from recollect.planning.rescale import CannotPredict
from recollect.planning.variant import Variant
from recollect.planning.watch import PeakWatch, tell_of_output, watch_output
from recollect.replay.engine import CallReport, LeftToRerun, replay_region
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.rematerialize import Rematerializer
from recollect.report.units import bytes_text
from recollect.store.offload_batch import OffloadBatch

__all__ = ["Runner", "WarnOnce", "run_planned"]


#: For how many shapes of batches variants are remembered.
_REMEMBERED = 64
#: How many forwards are remembered that still wait for their backward.
_WAITING = 64
#: In how many steps it is checked whether the loop holds the output of the model.
_CHECKS = 3


class WarnOnce:
    """Warns once for each cause."""

    def __init__(self) -> None:
        self._causes: set[str] = set()

    def tell(self, cause: str, message: str) -> None:
        """Warn at the user's line, unless it was done before for the same cause."""
        if cause not in self._causes:
            self._causes.add(cause)
            warn_user(message, PlanWarning)


def run_planned(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    by: NamedSchedule,
    told: WarnOnce,
    report: CallReport | None = None,
) -> Any:
    """Call ``function`` with its results kept, offloaded or dropped as decided."""
    if by.blocks:
        return run_blocks(function, args, kwargs)
    offload_batch = OffloadBatch(host=by.store, last_first=True)
    report = CallReport() if report is None else report
    result = replay_region(function, args, kwargs, by, offload_batch, False, report)
    if type(result) is LeftToRerun:
        reason = result.reason
        told.tell(
            reason, f"the plan is not in effect, and the step may exceed its budget: {reason}"
        )
        return function(*args, **kwargs)
    if by.away:
        offload_batch.release()  # forward is over: what is leaving would only be in the way
    return result


class Runner:
    """Called in the place of the forward of a model under ``plan``."""

    def __init__(self, plan: PlannedStep) -> None:
        self.plan = plan
        self._known: dict[Any, Variant] = {}
        self.told = WarnOnce()
        #: The facts of the model at the last call, and how they differ from the planned ones.
        self._seen: tuple[Any, Differences | None] = (None, None)
        #: Forwards whose backward may not have run yet, with their model and thread.
        self._waiting: list[
            tuple[ReferenceType[Any] | None, int, ReferenceType[Rematerializer]]
        ] = []
        self._peaks = PeakWatch(plan.budget)
        #: In how many calls as planned it is still to be checked who holds the output.
        self._checks = 0 if plan.output_bytes is None else _CHECKS
        self._as_planned: Variant | None = None

    def unwrapped(self, model: nn.Module) -> None:
        """The model runs as it did before."""
        unwrap_blocks(model)

    def __reduce__(self) -> Any:
        return Runner, (self.plan,)

    def __deepcopy__(self, memo: Any) -> Runner:
        return Runner(self.plan)

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _run_uncompiled(self, function, args, kwargs)
        if dynamo_is_watching():
            self._tell_of_compiler()
            return run_without_dynamo(self, _bound(function), args, kwargs)
        model = getattr(function, "__self__", None)
        self._tell_of_last_step()
        before = self._peaks.read(model)
        variant = self._variant(model, args, kwargs)
        is_crowded = self._is_waiting(model)
        schedule = variant.schedule
        if schedule is None:
            return function(*args, **kwargs)
        if is_crowded:
            self._tell_of_two()
            schedule = self.plan.least
        report = CallReport()
        result = run_planned(function, args, kwargs, schedule, self.told, report)
        if report.remat is not None:
            owner = None if model is None else ref(model)
            entry = owner, threading.get_ident(), ref(report.remat)
            self._waiting = [*self._waiting[1 - _WAITING :], entry]
        if report.recording is not None or report.is_unrecorded:
            variant.judge(report)
        if self._checks > 0 and variant is self._as_planned and not is_crowded:
            self._checks -= 1
            watch_output(result, self._check_output)
        if before is not None:
            self._peaks.compare(result, before)
        return result

    # --- which variant ----------------------------------------------------------------------------

    def _variant(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """The variant of calls with such a batch, of the model as it is now."""
        other = self._differences(model)
        signature = signature_of_batch(args, kwargs)
        key = signature, other
        variant = self._known.get(key)
        if variant is None:
            variant = self._new_variant(signature, other, args, kwargs)
            if signature == self.plan.signature and other is None:
                self._as_planned = variant
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = variant
        return variant

    def _differences(self, model: Any) -> Differences | None:
        """How the model and autocast differ from what was planned."""
        if not isinstance(model, nn.Module):
            return None
        facts, found = self._seen  # once: another thread may change it
        now = facts_of(model)
        if now != facts:
            found = differences(self.plan.state, model)
            self._seen = now, found
        return found

    def _new_variant(
        self,
        signature: Any,
        other: Differences | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Variant:
        plan, told = self.plan, self.told
        if other is not None:
            return Variant(plan, told, differences=other)
        if not is_alike(signature, plan.signature):
            text = f"in the batch {told_apart(signature, plan.signature)}"
            cure = "recollect.plan(...) with such a batch"
            return Variant(plan, told, differences=Differences((text,), (cure,)))
        if is_smaller(signature, plan.signature):
            return Variant(plan, told)
        try:
            larger = plan.for_batch(args, kwargs)
        except CannotPredict as error:
            text = f"the batch is larger, and its memory cannot be predicted ({error})"
            cure = "recollect.plan(...) with the largest batch"
            return Variant(plan, told, differences=Differences((text,), (cure,)))
        if larger.predicted_peak > plan.budget:
            told.tell(
                f"larger: {larger.predicted_peak}",
                f"the plan was made for another batch, and this one needs "
                f"{larger.predicted_peak:,} bytes at least, which is more than its budget of "
                f"{plan.budget:,}. Make a plan with the largest batch that there is",
            )
        return Variant(plan, told, larger=larger)

    # --- earlier calls ----------------------------------------------------------------------------

    def _is_waiting(self, model: Any) -> bool:
        """Whether an earlier forward of the model still waits for its backward."""
        thread = threading.get_ident()
        self._waiting = [entry for entry in self._waiting if entry[2]() is not None]
        for owner, where, reference in self._waiting:
            remat = reference()
            of = None if owner is None else owner()
            if remat is not None and of is model and where == thread and remat.is_waiting():
                return True
        return False

    def _check_output(self, alive: int, _: int) -> None:
        """Backward has reached the output; ``alive`` bytes of it are in memory."""
        planned = self.plan.output_bytes
        if self._checks >= 0 and planned is not None:
            is_told = tell_of_output(alive, planned, self.plan.budget)
            self._checks = -1 if is_told else self._checks

    # --- warnings ---------------------------------------------------------------------------------

    def _tell_of_last_step(self) -> None:
        """Tell of a step that exceeded the budget, now that the user's line can be named."""
        over, self._peaks.over = self._peaks.over, None
        if over is not None:
            budget = self.plan.budget
            self.told.tell(
                "measured",
                f"the last step under the plan took {bytes_text(over)} on the device, "
                f"{bytes_text(over - budget)} more than its budget of {bytes_text(budget)}. "
                "Either something else is in memory beside the step, or the step is another one "
                "than was planned: make the plan with the loss, the optimizer and the largest "
                "batch of the training, recollect.plan(model, batch, budget, loss=..., "
                "optimizer=...)",
            )

    def _tell_of_compiler(self) -> None:
        self.told.tell(
            "compiled",
            "this model is called by compiled code, and runs under a plan: torch.compile leaves "
            "its forward as it is, and compiles what is around it. To have it compiled, "
            "plan.remove(model); or compile parts of it before recollect.plan(...)",
        )

    def _tell_of_two(self) -> None:
        plan = self.plan
        if 2 * plan.predicted_peak - plan.base <= plan.budget:
            return
        self.told.tell(
            "two forwards",
            "a forward under the plan begins while an earlier one still waits for its backward: "
            "what both hold is in memory at once, and the budget counts one of them. It runs with "
            "the least memory that the plan knows of. Call backward before the next forward; let "
            "go of outputs that have no backward, or make them under torch.no_grad(); or plan a "
            "module whose forward makes both calls",
        )


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
