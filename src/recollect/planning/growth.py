"""The graph of a step at a size that it was not recorded at, from recordings at others (P2).

A larger batch, or a longer sequence, mostly runs the same ops, saves the same tensors and frees
them at the same events. Then only numbers change: bytes are affine in the size of a batch, and at
most quadratic in the length of a sequence, so three recordings determine them. What grows slower
than that, as workspaces of libraries do, follows the line through the last two recordings. So do
times, within limits.

Pure: works on graphs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm, prod
from operator import mul
from typing import Any

from recollect.graph.graph import Graph, Op

__all__ = ["Growth", "is_same_step"]

#: As many recordings as it takes to know a quadratic.
_RECORDINGS = 3
#: Times grow at most by this power of the size.
_DEGREE = 2


def is_same_step(graph: Graph, other: Graph) -> bool:
    """Whether two graphs differ in numbers of bytes and seconds alone."""
    return _structure(graph) == _structure(other)


def _structure(graph: Graph) -> tuple[Any, ...]:
    """All of a graph but its numbers, and what can be offloaded, which depends on bytes."""
    return (
        [_decisions(op) for op in graph.ops],
        [(value.op, value.storage) for value in graph.values],
        [(storage.born, storage.dies) for storage in graph.storages],
        list(graph.saved),
        [(event.op, event.unpacks, sorted(event.frees)) for event in graph.events],
        graph.turn,
    )


def _decisions(op: Op) -> tuple[Any, ...]:
    flags = (op.can_keep, op.forced, op.last)
    return op.key, op.name, op.reads, op.makes, op.writes, op.places, flags


@dataclass(frozen=True)
class Growth:
    """How the numbers of a step grow with its size.

    Args:
        sizes: Those of the recordings, in ascending order; at least two.
        graphs: What was recorded, each of the same step.
    """

    sizes: Sequence[int]
    graphs: Sequence[Graph]

    @classmethod
    def of(cls, recordings: Sequence[tuple[int, Graph]]) -> Growth | None:
        """By the last of the recordings that are of the same step as the largest one.

        None if there are fewer than two, or if shapes depend on data.
        """
        if not recordings:
            return None
        ordered = sorted(recordings, key=lambda each: each[0])
        (_, last) = ordered[-1]
        alike = [each for each in ordered if is_same_step(each[1], last)][-_RECORDINGS:]
        if len(alike) < 2 or last.varies:
            return None
        sizes, graphs = zip(*alike, strict=True)
        return cls(sizes, graphs)

    def graph_at(self, size: int) -> Graph:
        """The graph of the step at ``size``."""
        nbytes, seconds = self.number_at(size), self._seconds_at(size)
        graphs, last = self.graphs, self.graphs[-1]

        def grown(name: str, fields: Mapping[str, Callable[..., Any]]) -> list[Any]:
            """The members of a sequence of the graph, with the ``fields`` that grow."""
            members = zip(*(getattr(graph, name) for graph in graphs), strict=True)
            return [
                replace(
                    each[-1],
                    **{
                        field: by(*(getattr(m, field) for m in each))
                        for field, by in fields.items()
                    },
                )
                for each in members
            ]

        factor = seconds(*(graph.plain_seconds for graph in graphs)) / (last.plain_seconds or 1.0)
        return replace(
            last,
            ops=grown("ops", {"seconds": seconds, "workspace": nbytes, "state": nbytes}),
            values=grown("values", {"nbytes": nbytes}),
            storages=grown("storages", {"nbytes": nbytes}),
            events=grown("events", {"seconds": seconds, "before": nbytes, "during": nbytes}),
            base=nbytes(*(graph.base for graph in graphs)),
            module_costs={unit: cost * factor for unit, cost in last.module_costs.items()},
        )

    def number_at(self, size: int) -> Callable[..., int]:
        """A function of a number at each of `sizes`: what it is at ``size``, rounded up.

        By the polynomial through them, in exact arithmetic.
        """
        line, curve = _Weights.at(size, self.sizes[-2:]), _Weights.at(size, self.sizes)
        middle = _Weights.at(self.sizes[-2], (self.sizes[0], self.sizes[-1]))

        def number(*known: int) -> int:
            if len(set(known)) == 1:
                return known[0]
            is_convex = len(known) > 2 and known[1] <= middle(known[0], known[-1])
            return max(0, curve(*known) if is_convex else line(*known[-2:]))

        return number

    def _seconds_at(self, size: int) -> Callable[..., float]:
        before, last = self.sizes[-2:]
        part = (size - last) / (last - before)
        limit = (size / last) ** _DEGREE

        def seconds(*measured: float) -> float:
            smaller, larger = measured[-2:]
            low, high = sorted((larger, larger * limit))
            return min(max(larger + part * (larger - smaller), low), high)

        return seconds


@dataclass(frozen=True)
class _Weights:
    """The polynomial through several points, at one place: a weighted sum of their numbers."""

    weights: Sequence[int]
    divisor: int

    @classmethod
    def at(cls, place: int, places: Sequence[int]) -> _Weights:
        exact = [
            prod((Fraction(place - b, a - b) for b in places if b != a), start=Fraction(1))
            for a in places
        ]
        divisor = lcm(*(weight.denominator for weight in exact))
        return cls([int(weight * divisor) for weight in exact], divisor)

    def __call__(self, *numbers: int) -> int:
        total: int = sum(map(mul, self.weights, numbers))
        return -(-total // self.divisor)
