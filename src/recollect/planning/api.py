"""What users call: ``plan``, ``fit`` and ``frontier``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from recollect.graph.graph import Graph
from recollect.planning.budget import check_budget, resolve_budget
from recollect.planning.plan import Plan
from recollect.planning.planner import Offload, Planner
from recollect.planning.step import Loss
from recollect.planning.trial import Progress
from recollect.report.page import page
from recollect.report.plan_report import PlanReport, Point
from recollect.report.table import frontier_table
from recollect.report.units import bytes_text

__all__ = ["Frontier", "fit", "frontier", "plan", "planner_of"]

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
    """Choose what to keep, recompute and offload for a training step to stay within a budget.

    Runs the step a few times: plain, to record it, and under the plan, to measure it. Nothing is
    left changed: parameters, gradients, buffers, optimizers in hooks, state of hooks and closures,
    random streams. What cannot be restored is an error that names it.

    Args:
        model: What is trained. Its forward is called once in a step.
        batch: A tuple is its arguments, a dict its keyword arguments, anything else its argument.
        budget: The most bytes that may be allocated on the device at any moment of a step, with
            parameters, buffers, gradients and optimizer state: a number, ``"12GiB"``, ``"8GB"``, a
            fraction of the plain step's peak such as ``0.5``, or ``"auto"``: what the device has.
        loss: From the output of the model to the number that backward starts from. By default the
            output if it is a scalar, its ``loss``, else the sum of its floating tensors.
        optimizer: Its state and what its step allocates count too.
        offload: Whether results may be held in the memory of the host: by default where there is a
            device to offload from, and it pays.
        holds_output: Whether the training loop still holds the output of the model while backward
            runs, as ``out = model(x); loss = f(out); loss.backward()`` does. False where it is gone
            by then, as in the ``Trainer`` of transformers: its memory is used for something else.

    Raises:
        InfeasibleBudget: No plan fits. Says what is the least that would.

    Example::

        plan = recollect.plan(model, batch, "12GiB", optimizer=optimizer)
        print(plan)
        plan.apply(model)
    """
    check_budget(budget)
    planner = Planner(model, batch, loss, optimizer, offload, holds_output=holds_output)
    return planner.plan_for(resolve_budget(budget, planner.plain_peak, planner.step.device))


def fit(
    model: M,
    batch: Any,
    budget: float | str = "auto",
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    offload: Offload = "auto",
    holds_output: bool = True,
) -> M:
    """Plan for a budget and apply the plan, in one call. Arguments as of `plan`. Returns the model.

    The default budget is what the device has.
    """
    made = plan(
        model,
        batch,
        budget,
        loss=loss,
        optimizer=optimizer,
        offload=offload,
        holds_output=holds_output,
    )
    return made.apply(model)


def frontier(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    offload: Offload = "auto",
    holds_output: bool = True,
) -> Frontier:
    """The trade-off of memory for time of a step, to choose from. Arguments as of `plan`."""
    return Frontier(Planner(model, batch, loss, optimizer, offload, holds_output=holds_output))


def planner_of(model: nn.Module, batch: Any, progress: Progress, **options: Any) -> Planner:
    """A planner that reports its progress."""
    return Planner(model, batch, progress=progress, **options)


class Frontier:
    """The trade-off of memory for time of a training step. ``str()`` of it is a table."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    @property
    def points(self) -> tuple[Point, ...]:
        """All trade-offs, the plain step, and the usual ways of checkpointing."""
        return tuple(self._planner.points())

    @property
    def least(self) -> int:
        """The lowest budget for which there is a plan, in bytes."""
        return self._planner.least()

    @property
    def plain_peak(self) -> int:
        """Bytes that the step takes without a plan."""
        return self._planner.plain_peak

    @property
    def graph(self) -> Graph:
        """The step as it was recorded: ops, values and events."""
        return self._planner.graph

    def plan_for(self, budget: float | str) -> Plan:
        """The plan for a budget, as `plan` would make it."""
        planner = self._planner
        return planner.plan_for(resolve_budget(budget, planner.plain_peak, planner.step.device))

    def __repr__(self) -> str:
        name = type(self._planner.step.model).__name__
        return f"<Frontier of {name}: plain {bytes_text(self.plain_peak)}>"

    def __str__(self) -> str:
        return frontier_table(self.picture)

    def to_html(self, path: str | Path) -> None:
        """Write a page that shows the frontier, for any browser, in one file."""
        Path(path).write_text(page(self.picture), encoding="utf-8")

    @property
    def picture(self) -> PlanReport:
        """What is shown, as data."""
        return self._planner.overview()
