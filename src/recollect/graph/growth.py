"""The graph of a step at sizes that it was not recorded at, from recordings at others (P2).

A larger batch, or a longer sequence, mostly runs the same ops, saves the same tensors and frees
them at the same events. Then only numbers change. The bytes of a tensor are a product of a few
dimensions: one term such as ``c * batch * length``, or two if a dimension is one more or less than
that of the batch. A formula counts only if it has fewer terms than there are recordings: then one
of them confirms it. All other numbers, such as workspaces of libraries, are taken to be no less at
larger sizes, and to follow a line beyond the largest. Times follow a line too, within limits.

Pure: works on graphs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import combinations, product
from math import ceil, prod
from typing import Any, NamedTuple

from recollect.graph.graph import Graph, fixed_bytes

#: The dimensions of a batch that grow.
Size = tuple[int, ...]

#: The largest power of one dimension in a formula, and of all of them; times grow by no more.
_POWER, _DEGREE = 2, 3
#: Of more recordings the last ones count, by the product of their dimensions.
_RECORDINGS = 6


def is_same_step(graph: Graph, other: Graph) -> bool:
    """Whether two graphs differ in numbers of bytes and seconds alone."""
    return graph.structure == other.structure


@dataclass(frozen=True)
class Growth:
    """How the numbers of a step grow with its size."""

    #: Those of the recordings, in ascending order of their products; at least two.
    sizes: Sequence[Size]
    graphs: Sequence[Graph]  #: what was recorded, each of the same step

    @classmethod
    def of(cls, recordings: Iterable[tuple[Size, Graph]]) -> Growth | None:
        """By the last of the recordings that are of the same step as the largest one.

        None if there are fewer than two, or if shapes depend on data.
        """
        ordered = sorted(dict(recordings).items(), key=lambda each: prod(each[0]))
        if not ordered:
            return None
        last = ordered[-1][1]
        alike = [each for each in ordered if is_same_step(each[1], last)][-_RECORDINGS:]
        if len(alike) < 2 or last.varies:
            return None
        sizes, graphs = zip(*alike, strict=True)
        return cls(sizes, graphs)

    def graph_at(self, size: Size) -> Graph:
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
        of_storage: dict[str, Callable[..., int]] = {"nbytes": nbytes, "dies": max}
        events, fixed = grown("events", {"seconds": seconds}), grown("fixed", of_storage)
        workspaces = [nbytes(*each) for each in self._workspaces]
        return replace(
            last,
            ops=grown("ops", {"seconds": seconds, "workspace": nbytes, "state": nbytes}),
            values=grown("values", {"nbytes": nbytes}),
            storages=grown("storages", of_storage),
            events=[
                replace(event, before=before, during=during)
                for event, (before, during) in zip(
                    events, fixed_bytes(fixed, workspaces), strict=True
                )
            ],
            fixed=fixed,
            base=nbytes(*(graph.base for graph in graphs)),
            module_costs={unit: cost * factor for unit, cost in last.module_costs.items()},
        )

    def doubt_at(self, size: Size) -> float:
        """How much of the memory of the step at ``size`` is not known for sure, as a fraction."""
        numbers = _Numbers(size, self.sizes, self.graphs[-1].block)
        storages = zip(*((*graph.storages, *graph.fixed) for graph in self.graphs), strict=True)
        found = [numbers.at(*(each.nbytes for each in same)) for same in storages]
        spaces = (numbers.at(*each) for each in self._workspaces)
        doubt = sum(each.doubt for each in found) + max((e.doubt for e in spaces), default=0)
        return doubt / max(1, sum(each.value for each in found))

    def number_at(self, size: Size) -> Callable[..., int]:
        """A function from a number at each of `sizes` to an upper estimate at ``size``."""
        numbers = _Numbers(size, self.sizes, self.graphs[-1].block)
        return lambda *known: numbers.at(*known).value

    @cached_property
    def _workspaces(self) -> list[tuple[int, ...]]:
        """By event: the bytes that its op allocated beside its results, in each recording."""
        of_graphs = []
        for graph in self.graphs:
            alive = fixed_bytes(graph.fixed, [0] * len(graph.events))
            pairs = zip(graph.events, alive, strict=True)
            of_graphs.append([event.during - during for event, (_, during) in pairs])
        return [*zip(*of_graphs, strict=True)]

    def _seconds_at(self, size: Size) -> Callable[..., float]:
        volumes, now = [*map(prod, self.sizes)], prod(size)
        last = volumes[-1]
        place = max((n for n, each in enumerate(volumes) if each < last), default=-1)
        part = (now - last) / (last - volumes[place]) if place >= 0 else 0.0
        limit = (now / last) ** _POWER

        def seconds(*measured: float) -> float:
            smaller, larger = measured[place], measured[-1]
            low, high = sorted((larger, larger * limit))
            return min(max(larger + part * (larger - smaller), low), high)

        return seconds


# --- numbers --------------------------------------------------------------------------------------


class _Number(NamedTuple):
    value: int  #: at most
    doubt: int  #: by how much it may be less


class _Numbers:
    """Extrapolates numbers of bytes, rounded up to blocks, from some sizes to another one.

    ``sizes``: in ascending order of their products.
    """

    def __init__(self, size: Size, sizes: Sequence[Size], block: int = 1) -> None:
        powers = [p for p in product(range(_POWER + 1), repeat=len(size)) if sum(p) <= _DEGREE]
        #: By term: its value at each of the sizes, and at this one. The first is the constant.
        self._terms = [([_term(each, p) for each in sizes], _term(size, p)) for p in powers]
        self._volumes, self._volume = [*map(prod, sizes)], prod(size)
        self._block = block
        #: Most numbers of a graph occur many times.
        self.at = cache(self._at)

    def _at(self, *known: int) -> _Number:
        if not any(known):
            return _Number(0, 0)
        for terms in range(1, min(2, len(known) - 1) + 1):
            fitting = [self._fit(known, each) for each in combinations(self._terms, terms)]
            found = [value for value in fitting if value is not None]
            if found:
                return _Number(max(found), max(found) - min(found))
        value, pairs = self._on_line(known), zip(known, self._volumes, strict=True)
        return _Number(value, value - max((y for y, v in pairs if v <= self._volume), default=0))

    def _fit(self, known: Sequence[int], terms: Sequence[tuple[Sequence[int], int]]) -> int | None:
        """The number by a formula with these terms; None if it does not hold at the sizes."""
        (column, here), *other = terms
        slack = self._block - 1
        if not other:
            # Sizes are rounded up to blocks: each number may be up to a block less.
            low = max(Fraction(y - slack, x) for y, x in zip(known, column, strict=True))
            high = min(Fraction(y, x) for y, x in zip(known, column, strict=True))
            return None if low > high else self._whole(high * here)
        ((second, there),) = other
        rows = [*zip(column, second, known, strict=True)]
        (a, b, y), (c, d, z) = rows[0], rows[-1]
        scale = a * d - b * c
        if not scale:
            return None
        one, two = Fraction(y * d - b * z, scale), Fraction(a * z - y * c, scale)
        if any(abs(one * x + two * w - v) > 2 * slack for x, w, v in rows):
            return None
        return self._whole(one * here + two * there)

    def _whole(self, exact: Fraction) -> int | None:
        """Rounded up to blocks; None if it cannot be a number of bytes."""
        if exact < 0 or (self._block == 1 and exact.denominator > 1):
            return None
        return ceil(exact / self._block) * self._block

    def _on_line(self, known: Sequence[int]) -> int:
        """A number that no formula holds for: no less than at smaller sizes."""
        larger = [y for y, v in zip(known, self._volumes, strict=True) if v >= self._volume]
        if larger:
            return max(larger[0], *(y for y in known[: -len(larger)]), 0)
        most, last = max(known), self._volumes[-1]
        before = [(v, y) for v, y in zip(self._volumes, known, strict=True) if v < last]
        if not before:
            return ceil(Fraction(most * self._volume, last))
        volume, number = before[-1]
        slope = Fraction(known[-1] - number, last - volume)
        return max(most, ceil(known[-1] + slope * (self._volume - last)))


def _term(size: Size, powers: Sequence[int]) -> int:
    return prod(dimension**power for dimension, power in zip(size, powers, strict=True))
