"""The functions that users call: ``plan``, ``fit`` and ``frontier``."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from recollect._torch.fsdp import is_shared
from recollect.checks.place import hide_own_frames
from recollect.compiled.lazy import LazyFit
from recollect.compiled.planner import CompiledPlanner, check_not_shared
from recollect.compiled.sites import is_compiled_throughout
from recollect.graph.graph import Graph
from recollect.modules import OPTIONS, wrap_module
from recollect.planning.budget import check_budget
from recollect.planning.distributed import ranks_of
from recollect.planning.lazy import LazyPlanner
from recollect.planning.loop.runner import Runner
from recollect.planning.plan import Plan
from recollect.planning.planner import Planner
from recollect.planning.prepare import Offload, Request, check_offload, check_unplanned
from recollect.planning.progress import Progress, reporter, silent, tell_plan
from recollect.planning.ranks.together import make_plan
from recollect.planning.recording.model_state import check_model
from recollect.planning.recording.sampling import now
from recollect.planning.recording.step import Loss
from recollect.report.page import HasPage, page
from recollect.report.plan_report import PlanReport, Point
from recollect.report.table import frontier_table
from recollect.report.units import bytes_text

M = TypeVar("M", bound=nn.Module)


def plan(
    model: nn.Module,
    batch: Any,
    budget: float | str,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    offload: Offload = "auto",
    holds_output: bool = True,
) -> Plan:
    """Plan what a training step keeps, recomputes and offloads to stay within a budget.

    Runs the step a few times: plain, to record it, and under the plan, to measure it. Everything
    is restored: parameters, gradients, buffers, optimizers in hooks, state of hooks and closures,
    random streams. If something cannot be restored, an error names it.

    If a process group exists, this is a collective call: the ranks that have the model make one
    plan together, and the highest of their peaks counts.

    Args:
        model: The model to train, as it is, sharded by ``fully_shard``, or compiled. A step calls
            its forward once.
        batch: What the model is called with. A tuple is its arguments, a dict or another mapping
            its keyword arguments, anything else its one argument: a tensor, a list, an object.
        budget: The highest allowed peak of bytes allocated on the device in a step, including
            parameters, buffers, gradients and optimizer state: a number, ``"12GiB"``, ``"8GB"``, a
            fraction of the plain step's peak such as ``0.5``, or ``"auto"``: what the device has.
        loss: ``loss(output)`` or ``loss(output, batch)``: the scalar that backward starts from. By
            default the output if it is a scalar, its ``loss``, else the sum of its floating
            tensors.
        optimizer: Its state, and the memory that its step allocates, count too.
        offload: Whether results may be held in host memory. By default on CUDA, where it pays.
        holds_output: Whether the training loop still holds the output of the model while backward
            runs, as ``out = model(x); loss = f(out); loss.backward()`` does. False, as for the
            ``Trainer`` of transformers, leaves its memory to other tensors.

    Raises:
        InfeasibleBudget: No plan fits. Says the least feasible budget.

    Example::

        plan = recollect.plan(model, batch, "12GiB", optimizer=optimizer)
        print(plan)
        plan.apply(model)
    """
    check_budget(budget)
    return _make_plan(Request(model, batch, loss, optimizer, offload, holds_output), budget)


def _make_plan(request: Request, budget: float | str, progress: Progress = silent) -> Plan:
    """The plan for a model, which all ranks make together if it is not compiled."""
    try:
        if _is_compiled(request.model):
            return CompiledPlanner.of_compiled(request, progress).plan_for(budget)
        return make_plan(request, budget, progress)
    except Exception as error:
        hide_own_frames(error)
        raise


def _is_compiled(model: Any) -> bool:
    return isinstance(model, nn.Module) and is_compiled_throughout(model)


def fit(
    model: M,
    batch: Any = None,
    budget: float | str = "auto",
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    offload: Offload = "auto",
    holds_output: bool = True,
    progress: bool | Progress | None = None,
) -> M:
    """Keep the training steps of a model within a budget. Returns the same model.

    With a batch, the plan is made and applied at once; the arguments are those of `plan`.

    Without a batch, nothing runs here. The first training step of your own loop is traced as it
    happens: forward, loss and backward. Every block is recomputed in that step, so it fits even if
    the plain step would not. The plan is made before the second step, once the optimizer has its
    state. (For a compiled model: after a few steps, whose graphs save little.) Later steps of
    another kind (another shape, accumulated gradients, unfrozen parameters) are traced in the same
    way, once for each kind.

    If a process group exists, call it on every rank, like `plan`. `recollect.unwrap` undoes it.

    Args:
        model: The model to train.
        batch: What the model is called with. Leave it out to plan from the steps of your loop.
        budget: The highest allowed peak, as in `plan`; by default what the device has.
        loss: As in `plan`; only with a batch, since your loop has its own.
        optimizer: As in `plan`; only with a batch.
        offload: As in `plan`.
        holds_output: As in `plan`; used only with a batch.
        progress: True: show progress, as a bar if tqdm is installed, else in lines. Or a function
            of the current stage (a text) and the fraction done.

    Example::

        model = recollect.fit(model, budget="22GiB")
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    check_budget(budget)
    report = reporter(progress)
    if batch is not None:
        request = Request(model, batch, loss, optimizer, offload, holds_output)
        start = now()
        plan = _make_plan(request, budget, report)
        tell_plan(plan, now() - start, report)
        return plan.apply(model)
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if value is not None:
            raise ValueError(
                f"{name}: without a batch the plan is made from the steps of your own loop, with "
                f"the loop's {name}. Leave it out, or pass the batch too: recollect.fit(model, "
                f"batch, budget, {name}=...)"
            )
    lazy = lazy_runner(model, budget, offload=offload, progress=progress)
    if isinstance(lazy, LazyFit) and lazy.is_of_model:
        vars(model)[OPTIONS] = lazy
    else:
        wrap_module(model, lazy)
    if isinstance(lazy, Runner):
        lazy.expect_calls(model)
    return model


def lazy_runner(
    model: nn.Module,
    budget: float | str,
    *,
    offload: Offload = "auto",
    progress: bool | Progress | None = None,
) -> Runner | LazyFit:
    """What runs the forward of a model without a plan, and makes one after its first steps."""
    check_model(model)
    check_budget(budget)
    check_offload(offload)
    check_unplanned(model, runs_steps=False)
    if _is_compiled(model):
        check_not_shared(model)
        return LazyFit(model, budget, offload, reporter(progress))
    lazy = LazyPlanner(budget, offload, reporter(progress))
    if not torch.cuda.is_available():  # else the model may be moved to a device yet
        lazy.check(model)
    return Runner(None, lazy)


def frontier(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    offload: Offload = "auto",
    holds_output: bool = True,
    progress: bool | Progress | None = None,
) -> Frontier:
    """The memory/time frontier of a training step.

    The arguments are those of `plan`, and ``progress`` as in `fit`. With several processes, each
    has its own frontier. A step that communicates has none, because every query may run steps.
    """
    if isinstance(model, nn.Module) and is_shared(model) and ranks_of(model):
        raise ValueError(
            "model: its parameters are distributed over several processes, for which there is no "
            "frontier. recollect.plan(model, batch, budget) on every rank names the least feasible "
            "budget"
        )
    make = CompiledPlanner.of_compiled if _is_compiled(model) else Planner.of
    request = Request(model, batch, loss, optimizer, offload, holds_output)
    try:
        return Frontier(make(request, reporter(progress)))
    except Exception as error:
        hide_own_frames(error)
        raise


class Frontier(HasPage):
    """The memory/time frontier of a training step. ``str()`` of it is a table."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    @property
    def points(self) -> tuple[Point, ...]:
        """The best plans, the plain step, and every block checkpointed."""
        return tuple(self._planner.points())

    @property
    def least(self) -> int:
        """The least feasible budget in bytes."""
        return self._planner.least_budget()

    @property
    def plain_peak(self) -> int:
        """The peak of the step without a plan, in bytes."""
        return self._planner.plain_peak

    @property
    def graph(self) -> Graph:
        """The step as it was recorded: ops, values and events."""
        return self._planner.graph

    def plan_for(self, budget: float | str) -> Plan:
        """The plan for a budget, as `plan` would make it."""
        return self._planner.plan_for(budget)

    def __repr__(self) -> str:
        name = type(self._planner.step.model).__name__
        return f"<Frontier of {name}: plain {bytes_text(self.plain_peak)}>"

    def __str__(self) -> str:
        return frontier_table(self.report)

    def _page(self) -> str:
        return page(self.report)

    @property
    def report(self) -> PlanReport:
        """The contents of the table and of the page."""
        return self._planner.frontier_report()
