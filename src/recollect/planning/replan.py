"""What a plan comes to for a batch of another shape, told in the midst of a step.

None of the user's code runs, no memory is allocated and nothing is timed or solved: the graph of
the planned step is rescaled, and the choices that the plan carries are simulated on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from recollect.graph.graph import Graph, Tally
from recollect.graph.simulate import simulate, simulate_plain
from recollect.planning.choices import Choices
from recollect.planning.rescale import CannotPredict, rescaled
from recollect.planning.script import Look, Script, look_of

__all__ = ["Basis", "Replanned", "replanned"]


@dataclass(frozen=True)
class Basis:
    """The step that was planned.

    Args:
        graph: What is known of it.
        script: The ops that it ran.
        excess: How much more it took when it was run than was simulated, as a fraction of that.
    """

    graph: Graph
    script: Script
    excess: float = 0.0


@dataclass(frozen=True)
class Replanned:
    """The choices for a batch, and what is predicted of them.

    Args:
        choices: Which.
        peak: Bytes of a step under them.
        seconds: What that takes.
        plain_peak: Bytes of a step without a plan.
        tally: What its forward comes to; None if that is not known.
    """

    choices: Choices
    peak: int
    seconds: float
    plain_peak: int
    tally: Tally | None


def replanned(
    basis: Basis | None, budget: int, options: Iterable[Choices], batch: Sequence[torch.Tensor]
) -> Replanned:
    """The quickest of ``options`` that fits the budget for a batch, else that of the least peak.

    Raises `CannotPredict` if what they come to cannot be told.
    """
    if basis is None:
        raise CannotPredict("the plan was loaded or copied, without the step that it is for")
    if len(batch) != len(basis.script.batch):
        raise CannotPredict("the batch has another number of tensors")
    looks = [look_of(tensor) for tensor in batch]
    known = [look for look in looks if look is not None]
    if len(known) != len(looks):
        raise CannotPredict("the batch has tensors that are no memory with strides")
    step = rescaled(basis.graph, basis.script, known)
    more = step.more + _growth(basis, known)

    def expected(peak: int) -> int:
        return math.ceil(peak * (1 + basis.excess)) + more

    plain = simulate_plain(step.graph)
    outcomes = [(each, simulate(step.graph, each.schedule_in(step.graph))) for each in options]
    fitting = [pair for pair in outcomes if expected(pair[1].peak) <= budget]
    if fitting:
        choices, outcome = min(fitting, key=lambda pair: pair[1].seconds)
    else:
        choices, outcome = min(outcomes, key=lambda pair: pair[1].peak)
    plain_peak = expected(plain.peak)
    peak = plain_peak if plain_peak <= budget else expected(outcome.peak)
    return Replanned(choices, peak, outcome.seconds, plain_peak, _tally(basis.graph, step.graph))


def _tally(graph: Graph, other: Graph) -> Tally | None:
    """What the forward of a rescaled step comes to, of which ``graph`` is the one recorded."""
    if graph.tally is None:
        return None
    before, now = _made(graph), _made(other)
    made = [
        (path, math.ceil(size * now[path] / before[path]) if before.get(path) else size)
        for path, size in graph.tally.made
    ]
    return replace(graph.tally, made=tuple(made))


def _made(graph: Graph) -> dict[str, int]:
    """By module: the bytes that its ops make."""
    found: dict[str, int] = {}
    for op in graph.ops:
        nbytes = sum(graph.values[value].nbytes for value in op.makes)
        found[op.path] = found.get(op.path, 0) + nbytes
    return found


def _growth(basis: Basis, looks: Sequence[Look]) -> int:
    """How much more a batch takes, where the planned one was counted: on a device."""
    origins = basis.graph.origins
    if origins is None or origins.block == 1:
        return 0
    before = [basis.script.looks[number] for number in basis.script.batch]
    sizes = [
        sum(origins.size(math.prod(look[0]) * look[2].itemsize) for look in each if look)
        for each in (before, looks)
    ]
    return max(0, sizes[1] - sizes[0])
