"""What a plan decides for a step, and for the same step with a batch of another shape.

For another batch none of the user's code runs, no memory is allocated and nothing is timed or
solved: the graph of the planned step is rescaled, and the schedules that the plan carries are
simulated on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from recollect.graph.graph import Graph, Tally
from recollect.graph.simulate import simulate, simulate_plain
from recollect.planning.batch import tensors_of_batch
from recollect.planning.estimate import Footprint
from recollect.planning.model_state import ModelState
from recollect.planning.rescale import CannotPredict, rescaled
from recollect.planning.sizes import dense_strides
from recollect.planning.trace import StepTrace, TensorLayout, layout_of
from recollect.replay.named_schedule import NamedSchedule

__all__ = ["Basis", "PlannedStep", "with_larger_batch"]

#: How many times larger a larger batch is.
_LARGER = 2


@dataclass(frozen=True)
class Basis:
    """The step that was planned.

    ``excess``: the part of the simulated peak by which it took more when it was run.
    """

    graph: Graph
    trace: StepTrace
    excess: float = 0.0

    def rescaled(self, batch: Sequence[torch.Tensor]) -> tuple[Graph, int]:
        """The step with another batch, and the bytes beside it that there are more.

        Raises `CannotPredict` if the step cannot be rescaled.
        """
        if len(batch) != len(self.trace.batch):
            raise CannotPredict("the batch has another number of tensors")
        layouts = [layout for tensor in batch if (layout := layout_of(tensor)) is not None]
        if len(layouts) != len(batch):
            raise CannotPredict("the batch has tensors that are no memory with strides")
        step = rescaled(self.graph, self.trace, layouts)
        return step.graph, step.more + self._growth(layouts)

    def _growth(self, batch: Sequence[TensorLayout]) -> int:
        """How many bytes more the batch has, where the planned one was counted: on a device."""
        origins = self.graph.origins
        if origins is None or origins.block == 1:
            return 0
        before = [self.trace.layouts[number] for number in self.trace.batch]
        sizes = [
            sum(origins.size(each.nbytes) for each in layouts if each is not None)
            for layouts in (before, batch)
        ]
        return max(0, sizes[1] - sizes[0])


@dataclass(frozen=True, kw_only=True, repr=False)
class PlannedStep:
    """The schedule of a plan, and what is known of the steps under it; see `Plan`."""

    budget: int
    predicted_peak: int
    predicted_time: float
    plain_peak: int
    schedule: NamedSchedule
    base: int
    signature: tuple[Any, ...]
    state: ModelState
    footprint: Footprint
    alternatives: tuple[NamedSchedule, ...] = ()
    basis: Basis | None = field(default=None, compare=False)
    measured_peak: int | None = None
    measured_time: float | None = None
    measured_plain_time: float | None = None
    output_bytes: int | None = None

    @property
    def least(self) -> NamedSchedule:
        """The schedule of the least peak, for a step of which nothing is known."""
        return self.alternatives[-1] if self.alternatives else self.schedule

    def for_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedStep:
        """The step with a batch of another shape: the quickest schedule of this one that fits.

        If none fits, those of the least peak. Raises `CannotPredict` if it cannot be rescaled.
        """
        basis = self.basis
        if basis is None:
            raise CannotPredict("the plan was loaded or copied, without the step that it is for")
        graph, more = basis.rescaled(tensors_of_batch(args, kwargs))

        def expected(peak: int) -> int:
            return math.ceil(peak * (1 + basis.excess)) + more

        options = dict.fromkeys((self.schedule, *self.alternatives))
        outcomes = [(each, simulate(graph, each.schedule_in(graph))) for each in options]
        fitting = [pair for pair in outcomes if expected(pair[1].peak) <= self.budget]
        if fitting:
            schedule, outcome = min(fitting, key=lambda pair: pair[1].seconds)
        else:
            schedule, outcome = min(outcomes, key=lambda pair: pair[1].peak)
        plain_peak = expected(simulate_plain(graph).peak)
        tally = _rescaled_tally(self.footprint.tally, basis.graph, graph)
        return replace(
            self,
            schedule=schedule,
            footprint=replace(self.footprint, tally=tally),
            predicted_peak=plain_peak if plain_peak <= self.budget else expected(outcome.peak),
            predicted_time=outcome.seconds,
            plain_peak=plain_peak,
            measured_peak=None,  # which were of another batch
            measured_time=None,
            measured_plain_time=None,
        )


def _rescaled_tally(tally: Tally, graph: Graph, other: Graph) -> Tally:
    """The bytes of the forward of ``other``, which is ``graph`` rescaled."""
    before, now = _made(graph), _made(other)
    made = [
        (path, math.ceil(size * now[path] / before[path]) if before.get(path) else size)
        for path, size in tally.made
    ]
    return replace(tally, made=tuple(made))


def _made(graph: Graph) -> dict[str, int]:
    """By module: the bytes that its ops make."""
    found: dict[str, int] = {}
    for op in graph.ops:
        nbytes = sum(graph.values[value].nbytes for value in op.makes)
        found[op.path] = found.get(op.path, 0) + nbytes
    return found


def with_larger_batch(graph: Graph, trace: StepTrace) -> Graph | None:
    """The step with a larger batch, if it can be rescaled."""
    batch = []
    for number in trace.batch:
        layout = trace.layouts[number]
        if layout is not None:
            size, stride, dtype = layout
            shape = (size[0] * _LARGER, *size[1:]) if size else size
            batch.append(TensorLayout(shape, dense_strides(shape, size, stride), dtype))
    try:
        return rescaled(graph, trace, batch).graph
    except CannotPredict:
        return None
