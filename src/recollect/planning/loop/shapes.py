"""Predicts steps with batches of other shapes from those that were traced (P8).

How a step with a batch of another shape is planned for: the dimensions that change from step to
step are the size of a batch. Two or more traced steps tell how the graph of a step grows with the
size (`growth`), so most shapes need not be traced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recollect.graph.graph import Graph
from recollect.graph.growth import Growth, Size, is_same_step
from recollect.planning.recording.batch import dimensions_of, is_smaller, outline_of

Signature = tuple[Any, ...]

#: How many dimensions may change independently.
_DIMENSIONS = 3
#: The largest doubt about a predicted step, as a fraction of its memory.
_DOUBT = 0.05
#: How many traced steps of each kind are remembered.
_REMEMBERED = 6
#: Every so many steps that could not be predicted, one more is traced, up to so many in all.
_EVERY, _ENOUGH = 3, 4


class Predicted(NamedTuple):
    """A step that was not traced."""

    graph: Graph
    made: Mapping[str, int]  #: the bytes that forward makes, by module
    #: Whether a step was seen that is no smaller.
    is_covered: bool


@dataclass
class _Group:
    """Steps that differ in the sizes of their batches alone."""

    steps: dict[Signature, tuple[Graph, Mapping[str, int]]] = field(default_factory=dict)
    #: The one that the planner recorded, if the loop has run none yet.
    planned: Signature | None = None
    #: The batches of steps that were as predicted.
    confirmed: set[Signature] = field(default_factory=set)
    missed: int = 0


class Shapes:
    """The steps that were traced under a plan."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}
        #: Changes when something was learned.
        self.version = 0

    def add(
        self,
        signature: Signature,
        state: Hashable,
        graph: Graph,
        made: Mapping[str, int],
        *,
        is_planned: bool = False,
    ) -> None:
        """A step was traced. ``state``: of the model. ``is_planned``: by the planner."""
        if graph.units:
            return  # what is gathered at each moment is in no storage
        group = self._group(signature, state)
        if group.planned in group.steps and not is_same_step(group.steps[group.planned][0], graph):
            del group.steps[group.planned]  # it had another loss than the loop
        group.planned = signature if is_planned else None
        group.steps.pop(signature, None)
        group.steps[signature] = graph, made
        if len(group.steps) > _REMEMBERED:
            del group.steps[next(iter(group.steps))]
        self.version += 1

    def predict(self, signature: Signature, state: Hashable) -> Predicted | None:
        """The step with another batch; None if the traced steps do not tell."""
        group = self._group(signature, state)
        sizes = _sizes([*group.steps, signature])
        if sizes is None or len(group.steps) < 2:
            return None
        *known, size = sizes
        growth = Growth.of(
            (each, graph) for each, (graph, _) in zip(known, group.steps.values(), strict=True)
        )
        near = min(known, key=lambda each: abs(math.log(math.prod(each) / math.prod(size))))
        if growth is None or near not in growth.sizes or growth.doubt_at(size) > _DOUBT:
            return None
        recorded, made = [*group.steps.values()][known.index(near)]
        graph = growth.graph_at(size)
        before, after = _made_in(recorded), _made_in(graph)
        made = {path: max(0, n + after[path] - before[path]) for path, n in made.items()}
        seen = (*group.steps, *group.confirmed)
        return Predicted(graph, made, any(is_smaller(signature, each) for each in seen))

    def note_unpredicted(self, signature: Signature, state: Hashable) -> bool:
        """A step could not be predicted. Returns whether to trace it to predict others from it."""
        group = self._group(signature, state)
        group.missed += 1
        varies = any(graph.varies for graph, _ in group.steps.values())
        return not varies and group.missed % _EVERY == 0 and 0 < len(group.steps) < _ENOUGH

    def ran(self, signature: Signature, state: Hashable, *, is_right: bool) -> None:
        """A predicted forward ran: it was as predicted, or it made more bytes."""
        group = self._group(signature, state)
        if is_right:
            group.confirmed.add(signature)
        else:
            group.steps.clear()  # what was learned from them is wrong
        self.version += 1

    def _group(self, signature: Signature, state: Hashable) -> _Group:
        return self._groups.setdefault((outline_of(signature), state), _Group())


def _sizes(signatures: Sequence[Signature]) -> list[Size] | None:
    """The dimensions in which batches differ, each once; the last batch is to be predicted.

    None if it differs in one in which the others do not, or if there are too many.
    """
    columns: Iterable[Size] = zip(*map(dimensions_of, signatures), strict=True)
    distinct = [each for each in dict.fromkeys(columns) if len(set(each)) > 1]
    is_new = any(len(set(each[:-1])) == 1 for each in distinct)
    if is_new or len(distinct) > _DIMENSIONS or not all(map(all, distinct)):
        return None
    return [*zip(*distinct, strict=True)] if distinct else None


def _made_in(graph: Graph) -> Counter[str]:
    """The bytes that the ops of a graph make, by module."""
    made: Counter[str] = Counter()
    for op in graph.ops:
        made[op.path] += sum(graph.values[value].nbytes for value in op.makes)
    return made
