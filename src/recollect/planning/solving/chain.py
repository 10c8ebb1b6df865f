"""The best candidate for every segment of the row, and where to cut it: a dynamic program.

It gives good schedules for all budgets at once, which `search` improves. It goes from the last
segment to the first. For the rest of the row from some place on, it has the frontier of bytes,
beside those that earlier segments hold, against seconds. With a candidate before it,

    bytes = max(need of the candidate, held by the candidate + bytes of the rest).

The bytes are exact; of the points that need about the same, one is kept. After Rotor (Beaumont et
al., 2019) and Rockmate (Zhao et al., 2023).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from recollect.planning.solving.linearization import Linearization
from recollect.planning.solving.segments import SegmentChoice, Segments

#: The most places to cut the row at, and the most points of a frontier.
_PLACES = 400
_POINTS = 90
#: How much narrower bins of points are where there is less memory; 1: not at all.
_NARROW = 0.5
#: Bytes, seconds, the number of an extension, and that of a point of its rest.
_Point = tuple[int, float, int, int]


@dataclass(frozen=True, slots=True)
class _Extension:
    """A candidate for a segment before the rest of the row, and the bytes that it needs."""

    choice: SegmentChoice
    need: int
    first: int
    last: int
    rest: _Frontier


@dataclass(slots=True)
class _Frontier:
    """For the rest of the row: points in ascending bytes, and the extensions that lead to them."""

    points: list[_Point]
    extensions: list[_Extension]


class Chain:
    """Solutions for the row, in the order of their bytes."""

    def __init__(self, line: Linearization) -> None:
        self._places, fine = line.cuts(_PLACES)
        self._segments = Segments(line, self._places, fine)
        end = _Frontier([(_turn(line), 0.0, -1, -1)], [])
        #: By place: the solutions that read, of the values that cross it, only those that are saved
        #: after it as well; and all solutions.
        self._strict = [end] * len(self._places)
        self._loose = [end] * len(self._places)
        for at in reversed(range(len(self._places) - 1)):
            extensions = list(self._extensions(at))
            strict = _points_of(extensions, reads_across=False)
            self._strict[at] = _Frontier(_thin(strict), extensions)
            loose = _pareto(strict + _points_of(extensions, reads_across=True))
            self._loose[at] = _Frontier(_thin(loose), extensions)

    def __len__(self) -> int:
        return len(self._loose[0].points)

    def _extensions(self, at: int) -> Iterator[_Extension]:
        places, count = self._places, len(self._places)
        for to in range(at + 1, min(count, at + 1 + self._segments.limits.longest)):
            span = places[at : to + 1]
            effort = max(0, 3 - (to - at))
            for passes in (False, True):
                rest = (self._loose if passes else self._strict)[to]
                is_last = to == count - 1
                # Long segments are for little memory, where the next one reads across its begin.
                if not rest.points or (is_last if passes else not effort and not is_last):
                    continue
                offset, choices = self._segments.options(span, passes, effort)
                for choice in choices:
                    yield _Extension(choice, choice.need + offset, span[0], span[-1], rest)

    def kept(self, number: int) -> frozenset[int]:
        """The ops that a solution keeps."""
        kept: set[int] = set()
        frontier = self._loose[0]
        while frontier.extensions:
            _, _, which, number = frontier.points[number]
            extension = frontier.extensions[which]
            ops = self._segments.ops(extension.first, extension.last)
            kept.update(ops[n] for n in extension.choice.kept)
            frontier = extension.rest
        return frozenset(kept)


def _points_of(extensions: list[_Extension], *, reads_across: bool) -> list[_Point]:
    """The frontier of the extensions that read across their begin, or of those that do not."""
    found: list[_Point] = []
    for number, extension in enumerate(extensions):
        choice, points = extension.choice, extension.rest.points
        if choice.reads_across is not reads_across:
            continue
        held, seconds = choice.held, choice.seconds
        # Up to here the need of the choice itself counts: the last of these points is the quickest.
        start = bisect_right(points, extension.need - held, key=lambda point: point[0])
        if start:
            found.append((extension.need, seconds + points[start - 1][1], number, start - 1))
        found += [
            (held + points[n][0], seconds + points[n][1], number, n)
            for n in range(start, len(points))
        ]
    return _pareto(found)


def _turn(line: Linearization) -> int:
    """The peak between the last op of the row and its backward, beside the bytes that are held."""
    graph = line.graph
    stop = min(line.backward_begins[-1], len(graph.events))
    start = graph.tables.ran[line.ops[-1]] + 1
    changes = [0] * (graph.turn + 1)
    for storage in graph.storages:
        if start <= storage.born < graph.turn:
            changes[storage.born] += storage.nbytes
            changes[min(storage.dies + 1, graph.turn)] -= storage.nbytes
    most = max(line.fixed_during[graph.turn : stop], default=0)
    live = 0
    for now in range(start, graph.turn):
        live += changes[now]
        most = max(most, live + graph.events[now].during)
    return most


def _pareto(points: list[_Point]) -> list[_Point]:
    points.sort()
    found: list[_Point] = []
    least = float("inf")
    for point in points:
        if point[1] < least:
            found.append(point)
            least = point[1]
    return found


def _thin(found: list[_Point]) -> list[_Point]:
    """One point of each bin of points with about the same bytes.

    The less memory there is, the more a byte is worth, and the narrower are the bins.
    """
    if len(found) <= _POINTS:
        return found
    first, last = found[0], found[-1]
    width = last[0] - first[0]
    price = (first[1] - last[1]) / (last[0] - first[0])
    chosen: dict[int, _Point] = {}
    for point in found[1:-1]:
        number = int(((point[0] - first[0]) / width) ** _NARROW * (_POINTS - 2))
        best = chosen.get(number)
        if best is None or point[1] - best[1] < price * (best[0] - point[0]):
            chosen[number] = point
    return [first, *chosen.values(), last]
