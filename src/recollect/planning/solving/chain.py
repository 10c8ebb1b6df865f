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

#: Where to cut a row at most, and the answers that are gone on with at each place.
_PLACES = 400
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
        self._places, fine = line.cuts(_PLACES)
        self._segments = Segments(line, self._places, fine)
        end = _Answers([(_turn(line), 0.0, -1, -1)], [])
        #: By place: answers that read nothing that crosses it but what is asked for, and any.
        self._strict = [end] * len(self._places)
        self._loose = [end] * len(self._places)
        for at in reversed(range(len(self._places) - 1)):
            ways = list(self._ways(at))
            strict = _points_of(ways, wants=False)
            self._strict[at] = _Answers(_thin(strict), ways)
            # What wants nothing is an answer in any case.
            either = _pareto(strict + _points_of(ways, wants=True))
            self._loose[at] = _Answers(_thin(either), ways)

    def __len__(self) -> int:
        return len(self._loose[0].points)

    def _ways(self, at: int) -> Iterator[_Way]:
        places, count = self._places, len(self._places)
        for to in range(at + 1, min(count, at + 1 + self._segments.care.longest)):
            span = places[at : to + 1]
            effort = max(0, 3 - (to - at))
            for passes in (False, True):
                rests = (self._loose if passes else self._strict)[to]
                is_last = to == count - 1
                # Long segments are for little memory, where the next one wants what crosses.
                if not rests.points or (is_last if passes else not effort and not is_last):
                    continue
                offset, options = self._segments.options(span, passes, effort)
                for option in options:
                    yield _Way(option, option.need + offset, span[0], span[-1], rests)

    def kept(self, number: int) -> frozenset[int]:
        """What an answer keeps."""
        kept: set[int] = set()
        answers = self._loose[0]
        while answers.ways:
            _, _, which, number = answers.points[number]
            way = answers.ways[which]
            ops = self._segments.ops(way.first, way.last)
            kept.update(ops[n] for n in way.option.kept)
            answers = way.rests
        return frozenset(kept)


def _points_of(ways: list[_Way], *, wants: bool) -> list[_Point]:
    """The best of the ways that want what crosses their begin, or of those that do not."""
    found: list[_Point] = []
    for number, way in enumerate(ways):
        if way.option.wants is not wants:
            continue
        held, seconds, points = way.option.held, way.option.seconds, way.rests.points
        # What comes to no more than the need anyway: the last of it is the quickest.
        start = bisect_right(points, way.need - held, key=lambda point: point[0])
        if start:
            found.append((way.need, seconds + points[start - 1][1], number, start - 1))
        found += [
            (held + points[n][0], seconds + points[n][1], number, n)
            for n in range(start, len(points))
        ]
    return _pareto(found)


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


def _thin(found: list[_Point]) -> list[_Point]:
    """One of each lot that need about the same.

    The less memory there is, the more a byte is worth, and the narrower are the lots.
    """
    if len(found) <= _POINTS:
        return found
    first, last = found[0], found[-1]
    width = last[0] - first[0]
    price = (first[1] - last[1]) / (last[0] - first[0])
    chosen: dict[int, _Point] = {}
    for point in found[1:-1]:
        lot = int(((point[0] - first[0]) / width) ** _NARROW * (_POINTS - 2))
        best = chosen.get(lot)
        if best is None or point[1] - best[1] < price * (best[0] - point[0]):
            chosen[lot] = point
    return [first, *chosen.values(), last]
