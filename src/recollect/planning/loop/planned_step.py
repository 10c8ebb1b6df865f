"""The planned step: steps of the loop are compared with it, and run by its schedules (P6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from recollect.graph.graph import Graph, Link
from recollect.graph.simulate import simulate
from recollect.planning.recording.batch import is_alike, is_smaller
from recollect.planning.recording.model_state import Differences, ModelState
from recollect.policy.op_info import communicates
from recollect.replay.named_schedule import NamedSchedule

#: The fields of a graph with what the engine costs.
COSTS = ("rerun_cost", "engine_cost", "offload_cost", "module_costs")


class ForwardKind(NamedTuple):
    """A kind of forward."""

    signature: tuple[Any, ...]  #: of its batch
    differences: Differences | None = None  #: of the model, from the planned one
    extra_bytes: int = 0  #: bytes allocated before it, beyond those of the plan

    def is_within(self, other: ForwardKind) -> bool:
        """Whether it takes no more memory: the same model, and no tensor of the batch is larger."""
        mine, others = self.signature, other.signature
        return self[1:] == other[1:] and is_alike(mine, others) and is_smaller(mine, others)


#: The kinds of the forwards of a step.
StepKind = tuple[ForwardKind, ...]


class PlannedForward(NamedTuple):
    """One of the forwards of a step."""

    signature: tuple[Any, ...]  #: of its batch
    schedule: NamedSchedule  #: by which it runs
    made: tuple[tuple[str, int], ...]  #: the bytes that it makes, by module
    extra_bytes: int = 0  #: the bytes of gradients that are there since the first forward


class SeenForward(NamedTuple):
    """A forward after the first one in a step that was traced."""

    signature: tuple[Any, ...]  #: of its batch
    made: Mapping[str, int]  #: the bytes that it made, by module
    extra_bytes: int  #: the bytes of gradients that were there since the first forward

    def planned(self, schedule: NamedSchedule) -> PlannedForward:
        """The forward with the schedule by which it runs from now on."""
        return PlannedForward(self.signature, schedule, tuple(self.made.items()), self.extra_bytes)


@dataclass(frozen=True, kw_only=True, repr=False)
class PlannedStep:
    """The schedules of a plan, and the step that they are for; see `Plan`."""

    budget: int
    predicted_peak: int
    predicted_time: float
    plain_peak: int
    schedule: NamedSchedule
    state: ModelState
    signature: tuple[Any, ...]
    base: int
    made: tuple[tuple[str, int], ...]
    alternatives: tuple[NamedSchedule, ...] = ()
    #: How many ops of each name each module has, to find similar ones for those of other steps.
    op_counts: tuple[tuple[str, int], ...] = ()
    stopped: str | None = None
    excess: float = 0.0
    measured_peak: int | None = None
    output_bytes: int | None = None
    gradients: int = 0
    others: tuple[PlannedForward, ...] = ()
    #: Other schedules within the budget that may be faster; the loop times them.
    rivals: tuple[NamedSchedule, ...] = field(default=(), compare=False)
    from_loop: bool = False
    state_bytes: int = 0
    is_solved: bool = True
    #: The recorded step; None if the plan was loaded or copied.
    graph: Graph | None = field(default=None, compare=False)

    @property
    def needed_schedule(self) -> NamedSchedule | None:
        """The schedule of the planned step; None if it fits plain, or would take no less."""
        return None if self.plain_peak <= max(self.budget, self.predicted_peak) else self.schedule

    @cached_property
    def communicates(self) -> bool:
        """Whether its forward is known to communicate: then it must not run again by itself."""
        return self.graph is not None and any(communicates(op.name) for op in self.graph.ops)

    @property
    def wrapped(self) -> tuple[str, ...]:
        """The modules that are regions of their own under one of its schedules."""
        return tuple(path for each in (self.schedule, *self.rivals) for path in each.wrapped)

    @property
    def forwards(self) -> tuple[PlannedForward, ...]:
        """All forwards of the step."""
        return PlannedForward(self.signature, self.schedule, self.made), *self.others

    @property
    def least(self) -> NamedSchedule:
        """The schedule of the least peak, for unknown steps."""
        return self.alternatives[-1] if self.alternatives else self.schedule

    def least_with(self, gradients: int) -> NamedSchedule:
        """The schedule of the least peak if so many bytes of gradients are there before."""
        if self.graph is None or not self.alternatives:
            return self.least
        graph = with_gradients(self.graph, gradients)
        return min(self.alternatives, key=lambda e: simulate(graph, e.schedule_in(graph)).peak)

    @property
    def link(self) -> Link | None:
        """The link to the host, if results may be offloaded."""
        return None if self.graph is None else self.graph.link

    def with_costs(self, graph: Graph) -> Graph:
        """The graph of another step, with the costs of the engine as they were measured."""
        if self.graph is None:
            return graph
        return replace(graph, **{name: getattr(self.graph, name) for name in COSTS})


# --- the graph of other steps, roughly ------------------------------------------------------------


def with_gradients(graph: Graph, nbytes: int) -> Graph:
    """The graph of a step that adds its gradients to ``nbytes`` of them that are there before."""
    events = [
        replace(event, before=event.before - kept, during=event.during - kept)
        for event, kept in zip(graph.events, _gradients_at(graph, nbytes), strict=True)
    ]
    return replace(graph, events=events, base=graph.base + nbytes)


def with_larger_batch(graph: Graph, times: int) -> Graph:
    """The graph of a step whose activations, and their gradients, are larger."""
    events = [
        replace(
            event,
            before=kept + times * (event.before - kept),
            during=kept + times * (event.during - kept),
        )
        for event, kept in zip(graph.events, _gradients_at(graph), strict=True)
    ]
    return replace(
        graph,
        values=[replace(value, nbytes=times * value.nbytes) for value in graph.values],
        storages=[replace(each, nbytes=times * each.nbytes) for each in graph.storages],
        events=events,
    )


def _gradients_at(graph: Graph, nbytes: int | None = None) -> list[int]:
    """By event: the fixed bytes since the end of forward that stay until the end: gradients.

    ``nbytes``: of all gradients, if known. What the last op reads is there until the end as well.
    """
    befores = [event.before for event in reversed(graph.events)]
    kept = [*accumulate(befores, min)][::-1]
    others = kept[graph.turn] if graph.turn < len(kept) else 0  # as an output that the loop holds
    if nbytes is not None:
        last = len(kept) - 1
        at_end = sum(each.nbytes for each in graph.fixed if each.dies >= last)
        others = max(others, at_end - nbytes)
    return [max(0, each - others) for each in kept]
