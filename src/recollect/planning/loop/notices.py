"""What users are told of the steps of their loop: the texts of warnings."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import nn

from recollect.checks.place import WarnOnce, warn_user
from recollect.errors import PlanWarning
from recollect.planning.loop.planned_step import ForwardKind, PlannedStep
from recollect.planning.recording.batch import describe_difference, is_alike, is_smaller
from recollect.planning.recording.model_state import Differences, newly_compiled, scripted_parts
from recollect.report.units import bytes_text

#: How many parts of a model are named.
_NAMED = 4
_PLAN_AS_TRAINED = (
    ": make the plan with the loss, the optimizer and the largest batch of the training, "
    "recollect.plan(model, batch, budget, loss=..., optimizer=...)"
)
#: Nothing else is known of the difference between a step and the planned one.
_OTHER_TENSORS = "it keeps other tensors in memory than the planned one"
_BESIDE = (
    "another model under a plan runs inside of it, and keeps other tensors in memory than when "
    "this one was planned: what both keep has to fit into each of their budgets"
)
#: Backward leaves the gradients of parameters to a later one, which no trace sees.
SPLIT = (
    "backward computes the gradients of activations first, and those of parameters later, as "
    "in a zero-bubble schedule of a pipeline. What is held in between is not part of a plan: "
    "there is none for these steps, which may exceed the budget. Checkpoint blocks in place of "
    'it: recollect.checkpointed(block, engine="replay"), perhaps with a policy; or use a '
    "schedule without zero bubbles, such as ScheduleInterleaved1F1B"
)
#: Parts of the model save tensors by hooks of their own.
HOOKS = (
    "a part of forward runs inside of saved-tensor hooks such as those of "
    "torch.utils.checkpoint. The plan does not decide about what it saves, and steps may "
    "exceed the budget: leave checkpointing of parts of the model to the plan"
)
#: A step has more backwards than were planned.
BACKWARDS = (
    "another backward goes through a part of the model's output that the first one did not "
    "reach: the plan is for a step with the first one alone, and this step may exceed its "
    "budget. The next step is traced, and later ones are planned as a whole"
)
#: A step has more forwards than were planned.
FORWARDS = (
    "a forward under the plan begins while an earlier one still waits for its backward: "
    "the tensors of both are in memory at once, and this step may exceed its budget. The "
    "next step like it is traced, and later ones are planned as a whole. If there is no "
    "backward, delete the output, or call the model under torch.no_grad()"
)


class OtherStep(NamedTuple):
    """What is known of a step that is not the planned one."""

    kind: ForwardKind | None  #: of its forward; None: that of the planned one
    forwards: int = 1  #: how many it has
    #: The module whose results are larger than known by the most: its path, bytes now and before.
    grown: tuple[str, int, int] | None = None
    #: The nodes that forward makes in autograd's graph, now and when it was planned.
    nodes: tuple[int, int] | None = None
    #: Whether forwards of other models under plans run inside of it.
    beside: bool = False


def of_other_step(
    warnings: WarnOnce, plan: PlannedStep, step: OtherStep, peak: int, later: int
) -> None:
    """Warn of a step that takes ``peak`` bytes; later ones like it take ``later``."""
    texts, cures = _differences(plan, step.kind)
    if step.forwards > 1:
        texts.insert(0, f"it calls the model {step.forwards} times before backward")
    cause = "; ".join(texts)
    if step.nodes is not None:
        cause = cause or "nodes"
        now, before = step.nodes
        texts.append(
            f"forward makes {now} nodes of autograd's graph, and made {before} when it was planned"
        )
    if step.grown is not None:
        path, now, before = step.grown
        cause = cause or re.sub(r"\d+", "*", path)
        texts.append(
            f"forward makes {bytes_text(now)} in {path or 'the model'}, and made "
            f"{bytes_text(before)} when it was planned"
        )
    texts = texts or [_BESIDE if step.beside else _OTHER_TENSORS]
    if plan.from_loop:  # there was no batch to plan with
        again = f"recollect.unwrap(model), then recollect.fit(model, budget={max(peak, later)})"
        cures.append(f"smaller batches, or a larger budget: {again}")
    elif step.forwards > 1:
        cures = ["smaller batches, or a budget with room for all forwards"]
    cures = cures or ["make the plan with the largest step of the training"]
    warnings.warn(
        cause,
        f"this step is not the one that the plan was made for: {'; '.join(texts)}. "
        f"{_outlook(peak, later, plan.budget)}. To have room for it: {'; '.join(cures)}",
    )


def _differences(plan: PlannedStep, kind: ForwardKind | None) -> tuple[list[str], list[str]]:
    """How a forward differs from the planned one, and how to plan for it."""
    if kind is None:
        return [], []
    other = kind.differences or Differences()
    texts, cures = [*other.texts], [*other.cures]
    if not is_alike(kind.signature, plan.signature):
        texts.append(f"in the batch {describe_difference(kind.signature, plan.signature)}")
        cures.append("recollect.plan(...) with this batch")
    elif not is_smaller(kind.signature, plan.signature):
        texts.append("the batch is larger")
        cures.append("recollect.plan(...) with the largest batch")
    gradients = kind.extra_bytes - other.nbytes
    if plan.from_loop:
        cures = ["optimizer.zero_grad() before each forward"] if gradients else []
    elif gradients:
        cures.append(
            "recollect.plan(...) after a backward, so that it counts the gradients; or set them "
            "to None before each forward"
        )
    if gradients:
        texts.append(
            f"{bytes_text(gradients)} of gradients are there when forward begins, as when they "
            "accumulate, or after zero_grad(set_to_none=False)"
        )
    return texts, cures


def _outlook(peak: int, later: int, budget: int) -> str:
    """What a step takes, and what later ones like it take."""
    if peak <= budget < later:
        return (
            f"Steps like it may take about {bytes_text(later)}, although they keep as little as "
            f"they can, and the budget is {bytes_text(budget)}"
        )
    still = f", but still take about {bytes_text(later)}" if later > budget else ""
    return (
        f"It takes about {bytes_text(peak)}, and the budget is {bytes_text(budget)}. Later steps "
        f"like it keep less and recompute more{still}"
    )


def of_excess(warnings: WarnOnce, plan: PlannedStep, took: int, *, keeps_less: bool) -> None:
    """The last step took more bytes than the budget."""
    warnings.warn(
        "measured",
        f"the last step under the plan took {bytes_text(took)} on the device, "
        f"{bytes_text(took - plan.budget)} more than its budget of {bytes_text(plan.budget)}. "
        + ("Later steps keep less and recompute more. " if keeps_less else "")
        + "Either something else on the device takes memory, or the step is not the one that "
        "was planned" + ("" if plan.from_loop else _PLAN_AS_TRAINED),
    )


def of_first_steps(plan: PlannedStep, took: int, how: str) -> None:
    """Warn if the steps before there was a plan exceeded its budget. ``how``: what they kept."""
    if took > plan.budget >= plan.predicted_peak:
        warn_user(
            f"the training steps before there was a plan took about {bytes_text(took)}, more than "
            f"the budget of {bytes_text(plan.budget)}, {how}. Later steps are within the budget. "
            "For the first ones to be too, make the plan before: recollect.fit(model, batch, "
            "budget), or apply one that was saved",
            PlanWarning,
        )


def of_no_plan(warnings: WarnOnce, forwards: int, reason: str) -> None:
    """No step could be traced to make the plan from."""
    warnings.warn(
        "no plan",
        f"there is no plan after {forwards} forwards, and steps may exceed the budget. No "
        f"step could be traced: {reason}. Make a plan with a batch: "
        "recollect.fit(model, batch, budget)",
    )


def of_opaque_code(warnings: WarnOnce, plan: PlannedStep, model: nn.Module) -> None:
    """Warn of parts of the model that run other code than was recorded."""
    compiled = newly_compiled(plan.state, model)
    if compiled is not None:
        warnings.warn(
            "compiled",
            f"{compiled}. The plan does not see into compiled code, and the step may exceed its "
            "budget: compile first, then recollect.plan(model, batch, budget)",
        )
    scripted = scripted_parts(model)
    if scripted is not None:
        warnings.warn(
            "TorchScript",
            f"{scripted}, which changes its code after a few calls, so that it runs other ops than "
            "the recorded ones: steps may exceed the budget. Train the Python module that it was "
            "made from",
        )


def of_unrecorded(warnings: WarnOnce, plan: PlannedStep, reason: str) -> None:
    """A forward could not be recorded to its end, as the planned one could."""
    if plan.stopped is not None:
        return
    warnings.warn(
        reason,
        "the plan is not in effect for a part of the step, which may exceed its budget: forward "
        f"could not be recorded from some op on ({reason}), and every tensor that autograd saves "
        "after it stays in memory",
    )


def of_no_call(warnings: WarnOnce, model: nn.Module) -> None:
    """The model is trained without a call of its forward."""
    parts = [
        f"model.{name}"
        for name, child in model.named_children()
        if any(parameter.grad is not None for parameter in child.parameters())
    ]
    parts = parts if len(parts) <= _NAMED else [*parts[:_NAMED], "..."]
    of_parts = f", one by one: {', '.join(parts)}" if parts else ""
    warnings.warn(
        "no call",
        f"an optimizer has updated this {type(model).__name__} several times, but its forward was "
        "never called, so it runs without a plan, and steps may exceed the budget. Perhaps the "
        "loop calls parts of it. Call the model itself; or put what the loop does into the forward "
        "of a module and fit that; or recollect.unwrap(model), and fit the parts that the loop "
        f"calls{of_parts}",
    )


def of_compiler(warnings: WarnOnce, unplanned: str) -> None:
    """Compiled code calls the model. ``unplanned``: why it is not planned as a compiled one."""
    warnings.warn(
        "compiled",
        "this model is called by compiled code, and runs under a plan: torch.compile leaves "
        "its forward as it is, and compiles the code around it. To compile it, call "
        "plan.remove(model), or compile it before recollect.plan(...) or fit(...)." + unplanned,
    )


def of_compiled_parts(warnings: WarnOnce, name: str, unplanned: str, *, is_shared: bool) -> None:
    """A part of the model is compiled, so its steps cannot be traced."""
    fix = "" if is_shared else " Pass the batch: recollect.fit(model, batch, budget)."
    warnings.warn(
        "compiled parts",
        f"parts of the model are compiled ({name}), and recollect cannot trace compiled code "
        f"in the loop's own steps: there is no plan, and steps may exceed the budget.{fix}"
        + unplanned,
    )
