"""The best option for every segment of a row, and where to cut it: a dynamic program.

From the last segment to the first: the bytes that the rest of the row needs, beside those that the
segments in front of it hold, against the seconds that it takes. With an option in front,

    bytes = max(need of the option, held by the option + bytes of the rest),

so one pass answers for all budgets. The bytes are exact; of the answers that need about the same,
one is gone on with. After Rotor (Beaumont et al., 2019) and Rockmate (Zhao et al., 2023).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from recollect.planning.solving.linearization import Line
from recollect.planning.solving.segments import Option, Segments

__all__ = ["Chain"]

#: Where to cut a row at most, the most pieces of a segment, and the answers that are gone on with
#: at each place.
_PLACES = 400
_LONGEST = 5
_POINTS = 90
#: How much narrower lots are where there is less memory; 1: not at all.
_NARROW = 0.5
#: Bytes, seconds, the number of a way, and of one of its rests.
_Point = tuple[int, float, int, int]


@dataclass(frozen=True, slots=True)
class _Way:
    """An option in front of the rest of a row, and the bytes that it needs."""

    option: Option
    need: int
    first: int
    last: int
    rests: _Answers


@dataclass(slots=True)
class _Answers:
    """For the rest of a row: ascending bytes, descending seconds, and how each comes about."""

    points: list[_Point]
    ways: list[_Way]


class Chain:
    """The answers for a row, in the order of their bytes."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._places, fine = line.cuts(_PLACES)
        self._segments = Segments(line, fine)
        count = len(self._places)
        #: By place: the answers for what is behind it.
        self._answers = [_Answers([(_turn(line), 0.0, -1, -1)], [])] * count
        for at in reversed(range(count - 1)):
            ways = list(self._ways(at))
            self._answers[at] = _Answers(_thin(_pareto(_points_of(ways)), _POINTS), ways)

    def __len__(self) -> int:
        return len(self._answers[0].points)

    def _ways(self, at: int) -> Iterator[_Way]:
        for to in range(at + 1, min(len(self._places), at + 1 + _LONGEST)):
            span = self._places[at : to + 1]
            offset, options = self._segments.options(span)
            for option in options:
                yield _Way(option, option.need + offset, span[0], span[-1], self._answers[to])

    def kept(self, number: int) -> frozenset[int]:
        """What an answer keeps."""
        kept: set[int] = set()
        answers = self._answers[0]
        while answers.ways:
            _, _, which, number = answers.points[number]
            way = answers.ways[which]
            ops = self._segments.ops(way.first, way.last)
            kept.update(ops[n] for n in way.option.kept)
            answers = way.rests
        return frozenset(kept)


def _points_of(ways: list[_Way]) -> list[_Point]:
    """All that ways come to."""
    found: list[_Point] = []
    for number, way in enumerate(ways):
        held, seconds, points = way.option.held, way.option.seconds, way.rests.points
        # What comes to no more than the need anyway: the last of it is the quickest.
        start = bisect_right(points, way.need - held, key=lambda point: point[0])
        if start:
            found.append((way.need, seconds + points[start - 1][1], number, start - 1))
        found += [
            (held + points[n][0], seconds + points[n][1], number, n)
            for n in range(start, len(points))
        ]
    return found


def _turn(line: Line) -> int:
    """The most bytes between the last op of the row and its backward, beside what is held."""
    graph = line.graph
    stop = min(line.begins[-1], len(graph.events))
    start = line.ran[line.ops[-1]] + 1
    changes = [0] * (graph.turn + 1)
    for memory in graph.storages:
        if start <= memory.born < graph.turn:
            changes[memory.born] += memory.nbytes
            changes[min(memory.dies + 1, graph.turn)] -= memory.nbytes
    most = max(line.during[graph.turn : stop], default=0)
    live = 0
    for now in range(start, graph.turn):
        live += changes[now]
        most = max(most, live + graph.events[now].during)
    return most


def _pareto(points: list[_Point]) -> list[_Point]:
    """Those that no other is better than."""
    points.sort()
    found: list[_Point] = []
    least = float("inf")
    for point in points:
        if point[1] < least:
            found.append(point)
            least = point[1]
    return found


def _thin(found: list[_Point], most: int) -> list[_Point]:
    """One of each lot that need about the same.

    The less memory there is, the more a byte is worth, and the narrower are the lots.
    """
    if len(found) <= most:
        return found
    first, last = found[0], found[-1]
    width = last[0] - first[0]
    price = (first[1] - last[1]) / (last[0] - first[0])
    chosen: dict[int, _Point] = {}
    for point in found[1:-1]:
        lot = int(((point[0] - first[0]) / width) ** _NARROW * (most - 2))
        best = chosen.get(lot)
        if best is None or point[1] - best[1] < price * (best[0] - point[0]):
            chosen[lot] = point
    return [first, *chosen.values(), last]
