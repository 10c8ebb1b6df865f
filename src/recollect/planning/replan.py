"""What a plan comes to for a batch of another shape: the same choices if they fit, else others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from recollect.modules import OPTIONS
from recollect.planning.choices import Choices, trimmed
from recollect.planning.fake import trace_fake
from recollect.planning.links import measured_link
from recollect.planning.simulate import simulate
from recollect.planning.solving.solve import Solver
from recollect.planning.step import Loss, Step

__all__ = ["Replanned", "replanned"]


@dataclass(frozen=True)
class Replanned:
    """The choices for a batch, and what is predicted of them."""

    choices: Choices
    peak: int
    seconds: float


def replanned(
    choices: Choices,
    budget: int,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Loss | None,
    base: int,
) -> Replanned:
    """The choices for a batch of ``model``, which is in the midst of a call by a plan.

    The step is not run, but recorded on tensors without values. ``base``: bytes that are there
    throughout. Raises ``CannotPredict`` if it cannot be.
    """
    step = Step(model, args, kwargs, loss)
    runner = vars(model).pop(OPTIONS)  # to be called as it is without a plan
    try:
        with step.undone():
            link = measured_link(step.device) if choices.away else None
            graph = trace_fake(step, link, base=base)
    finally:
        vars(model)[OPTIONS] = runner
    outcome = simulate(graph, choices.schedule_in(graph))
    if outcome.peak <= budget:
        return Replanned(choices, outcome.peak, outcome.seconds)
    solver = Solver(graph, offload=graph.link is not None)
    solution = solver.solve(budget) or solver.least()
    other = Choices.of(graph, trimmed(graph, solution.schedule))
    return Replanned(other, solution.outcome.peak, solution.outcome.seconds)
