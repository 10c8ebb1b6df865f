"""What a plan comes to for a batch of another shape: the same choices if they fit, else others."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from recollect.modules import OPTIONS
from recollect.planning.choices import Choices, trimmed
from recollect.planning.fake import CannotPredict, trace_fake
from recollect.planning.links import measured_link
from recollect.planning.simulate import simulate, simulate_plain
from recollect.planning.solving.solve import Solver
from recollect.planning.step import Loss, Step

__all__ = ["Replanned", "replanned"]


@dataclass(frozen=True)
class Replanned:
    """The choices for a batch, and what is predicted of them."""

    choices: Choices
    peak: int
    seconds: float
    plain_peak: int


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

    The step is not run, but recorded on tensors without values, with ``loss`` or else the default
    one. ``base``: bytes that are there throughout. Raises ``CannotPredict`` or ``ValueError`` if
    it cannot be.
    """
    shadow = _shadow(model)
    vars(shadow).pop(OPTIONS, None)  # to be called as it is without a plan
    link = measured_link(Step(shadow, args, kwargs).device) if choices.away else None
    try:
        graph = trace_fake(Step(shadow, args, kwargs, loss), link, base=base)
    except CannotPredict:
        # A loss of the user's often has targets in it, of the shape of the batch that was planned.
        if loss is None:
            raise
        graph = trace_fake(Step(shadow, args, kwargs), link, base=base)
    outcome = simulate(graph, choices.schedule_in(graph))
    plain = simulate_plain(graph)
    if outcome.peak <= budget or plain.peak <= budget:
        return Replanned(choices, min(outcome.peak, plain.peak), outcome.seconds, plain.peak)
    solver = Solver(graph, offload=graph.link is not None)
    solution = solver.solve(budget) or solver.least()
    other = Choices.of(graph, trimmed(graph, solution.schedule))
    return Replanned(other, solution.outcome.peak, solution.outcome.seconds, plain.peak)


#: Where a module has its hooks.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is part of a module of torch's, as that of `weight_norm`.

    Others look at what the model makes, and are to see what it makes of values alone.
    """
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def _shadow(module: nn.Module, known: dict[int, nn.Module] | None = None) -> nn.Module:
    """The same modules once more, with the same parameters: other threads may use the model."""
    known = {} if known is None else known
    twin = known.get(id(module))
    if twin is None:
        twin = known[id(module)] = object.__new__(type(module))
        attributes = vars(module)
        for name, value in attributes.items():
            # What forward notes in a list of the module's is not to be noted twice.
            vars(twin)[name] = copy.copy(value) if type(value) in (list, dict, set) else value
        for name in ("_parameters", "_buffers"):
            vars(twin)[name] = dict(attributes[name])
        for name in _HOOKS:
            vars(twin)[name] = {n: hook for n, hook in attributes[name].items() if _is_torchs(hook)}
        vars(twin)["_modules"] = {
            name: None if child is None else _shadow(child, known)
            for name, child in attributes["_modules"].items()
        }
    return twin
