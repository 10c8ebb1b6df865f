"""Segments of a row of ops, and the options there are for each: bytes held, bytes needed, seconds.

A segment is judged by itself, by the simulator: what comes from outside is there, as the options of
the segments before it provide for it. Models repeat themselves, and so do their segments: options
are found once for all that are alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from recollect.graph.graph import Event, Graph, Op, SavedTensor, Storage, Value
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import simulate
from recollect.planning.solving.linearization import Line
from recollect.planning.solving.select import Piece, corners, reruns

__all__ = ["Option", "Segments"]


@dataclass(frozen=True, slots=True)
class Option:
    """What to keep in a segment.

    Args:
        held: The bytes that it holds until its own backward.
        need: The bytes that there must be in its own backward, counted from those that
            `Segments.options` says.
        seconds: Of the ops that run again.
        wants: Whether it reads what crosses its begin, other than what is asked for there anyway.
        kept: The ops to keep, by their number in the segment.
    """

    held: int
    need: int
    seconds: float
    wants: bool
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Care:
    """How much to do, for segments of many pieces, of two, and of one.

    Args:
        corners: How many choices to look at.
        inner: How many for each place at which the segment may be cut again.
        longest: The most pieces of a segment.
    """

    corners: tuple[int, int, int]
    inner: tuple[int, int, int]
    longest: int


_CARES = (
    _Care((3, 6, 24), (0, 3, 6), 6),
    _Care((3, 5, 10), (0, 3, 4), 5),
    _Care((2, 3, 6), (0, 0, 0), 3),
)
#: The options that are gone on with, again for segments of many pieces, of two, and of one.
_MOST = (3, 8, 40)
#: Up to how many kinds of pieces there are, for all but the last.
_KINDS = (40, 120)
#: With more places than that within a segment, only those between its pieces are tried; with no
#: more than that, also two at once.
_MANY = 24
_FEW = 6


class _Segment:
    """The ops between two places, as a graph of their own."""

    def __init__(self, line: Line, first: int, last: int) -> None:
        self.line = line
        self.before, self.after = line.crossing(first), line.crossing(last)
        self.first, self.last = first, last
        self.ops = [*self.before.leaks, *line.ops[first:last]]
        self.number = {op: n for n, op in enumerate(self.ops)}
        self.values = [v for op in self.ops for v in line.graph.results[op]]
        self.local = {value: n for n, value in enumerate(self.values)}
        self.span = (line.begins[last], line.begins[first])
        if first == 0:
            self.span = (line.begins[last], len(line.graph.events))
        self.offset = 0
        self.graph = self._graph()
        self._weigh()

    # --- as a graph -------------------------------------------------------------------------------

    def _graph(self) -> Graph:
        line, whole = self.line, self.line.graph
        memories: dict[int, int] = {}
        lives: list[Storage] = []
        values: list[Value] = []
        for value in self.values:
            old = whole.values[value]
            number = self.number[old.op]
            if old.storage not in memories:
                memories[old.storage] = len(lives)
                size = 0 if self._is_there_anyway(old.storage) else old.nbytes
                lives.append(Storage(size, number, number))
            values.append(Value(old.nbytes, number, memories[old.storage]))
        numbers = [
            saved
            for place in range(self.first, self.last)
            for saved in line.asks_of[place]
            if whole.saved[saved].value in self.local
        ]
        asks = [
            SavedTensor(self.local[whole.saved[n].value], self.number[line.ops[line.place[n]]])
            for n in numbers
        ]
        forward = [Event(0.0, 0, -(1 << 60), op=n) for n in range(len(self.ops))]
        backward = self._backward({saved: n for n, saved in enumerate(numbers)})
        return Graph(
            ops=[self._op(op) for op in self.ops],
            values=values,
            storages=lives,
            saved=asks,
            events=[*forward, *backward],
            turn=len(forward),
            rerun_cost=whole.rerun_cost,
        )

    def _is_there_anyway(self, memory: int) -> bool:
        return self.line.graph.storages[memory].dies >= max(self.span[0], self.line.graph.turn)

    def _op(self, number: int) -> Op:
        op, local = self.line.graph.ops[number], self.local
        return replace(
            op,
            reads=tuple(local[read] for read in op.reads if read in local),
            makes=tuple(local[value] for value in op.makes),
            writes=tuple(
                (None if old is None else local.get(old), local[new]) for old, new in op.writes
            ),
            forced=number in self.line.free,
        )

    def _backward(self, numbers: dict[int, int]) -> list[Event]:
        """The moments of its backward; those in which nothing changes are put together."""
        whole, (start, stop) = self.line.graph, self.span
        found: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
        done: set[int] = set()
        at_first, at_most = self.line.before, self.line.during
        for now in range(start, stop):
            event = whole.events[now]
            asks = tuple(numbers[n] for n in event.unpacks if n in numbers)
            ends = tuple(numbers[n] for n in event.frees if n in numbers)
            done.update(asks)
            if found and not asks and not ends and not found[-1][2] and not found[-1][3]:
                before, during, _, _ = found[-1]
                found[-1] = (max(before, at_first[now]), max(during, at_most[now]), (), ())
            else:
                found.append((at_first[now], at_most[now], asks, ends))
        late = tuple(n for n in numbers.values() if n not in done)
        if late:
            bytes_then = at_first[min(stop, len(at_first)) - 1]
            found.append((bytes_then, bytes_then, late, late))
        self.offset = min((min(each[0], each[1]) for each in found), default=0)
        return [Event(0.0, b - self.offset, d - self.offset, -1, a, e) for b, d, a, e in found]

    # --- what to choose ---------------------------------------------------------------------------

    def _weigh(self) -> None:
        whole = self.line.graph
        asked = {saved.value for saved in whole.saved}
        things = sorted(
            {
                read
                for op in self.ops
                for read in whole.ops[op].reads
                if read not in self.local and self.line.last_ask[read] < self.first
            }
        )
        self.things = {value: n for n, value in enumerate(things)}
        self.prices = [whole.values[value].nbytes for value in things]
        self.reads: list[list[int]] = []
        self.outside: list[list[int]] = []
        self.nbytes: list[int] = []
        for op in self.ops:
            read = [whole.values[r].op for r in whole.ops[op].reads if r in self.local]
            self.reads.append([self.number[each] for each in dict.fromkeys(read)])
            self.outside.append([self.things[r] for r in whole.ops[op].reads if r in self.things])
            self.nbytes.append(
                sum(
                    self.graph.storages[self.graph.values[self.local[v]].storage].nbytes
                    for v in whole.results[op]
                    if v in asked or self.line.last_read[v] >= 0
                )
            )

    def piece(self, required: Iterable[int], *, pays: bool) -> Piece:
        """What there is to choose with ``required`` kept; ``pays`` for what it reads outside."""
        free = {self.number[op] for op in required if op in self.number}
        ops = self.graph.ops
        cost = self.graph.rerun_cost
        return Piece(
            [op.seconds + cost for op in ops],
            [self.nbytes[n] if op.can_keep else None for n, op in enumerate(ops)],
            [op.forced or n in free for n, op in enumerate(ops)],
            self.reads,
            self.outside,
            self.prices if pays else [0] * len(self.prices),
            frozenset(self.graph.values[saved.value].op for saved in self.graph.saved),
        )

    def judge(self, piece: Piece, kept: frozenset[int], *, passes: bool) -> Option:
        """What a choice comes to. ``passes``: what crosses the whole segment is wanted behind."""
        outcome = simulate(self.graph, Schedule(kept))
        again = reruns(piece, kept)
        wants = any(self.outside[op] for op in again)
        wants = wants or (passes and self._has_passing())
        return Option(
            self._held(kept, again, passes), outcome.peak, outcome.rerun, wants, tuple(sorted(kept))
        )

    def _has_passing(self) -> bool:
        whole = self.line.graph
        crossing = set(self.after.values) - self.after.asked
        for leak in self.after.leaks:
            crossing.update(r for r in whole.ops[leak].reads if self.line.last_ask[r] < self.first)
        return any(value not in self.local for value in crossing)

    def _held(self, kept: frozenset[int], again: set[int], passes: bool) -> int:
        graph, whole = self.graph, self.line.graph
        read = {value for op in again for value in graph.ops[op].reads}
        read |= {saved.value for saved in graph.saved}
        crossing = self.after.values if passes else self.after.asked
        read |= {self.local[value] for value in crossing if value in self.local}
        # What crosses but cannot be kept is made from what can.
        for leak in self.after.leaks:
            read |= {self.local[v] for v in whole.ops[leak].reads if v in self.local}
        memories = {graph.values[v].storage for v in read if graph.values[v].op in kept}
        states = sum(graph.ops[op].state for op in again)
        return states + sum(graph.storages[memory].nbytes for memory in memories)


class Segments:
    """The segments of a row, with their options."""

    def __init__(self, line: Line, places: Sequence[int], fine: Sequence[int]) -> None:
        self._line = line
        self._fine = fine
        self._signs: dict[tuple[int, int], int] = {}
        self._known: dict[object, int] = {}
        self._options: dict[object, tuple[int, list[Option]]] = {}
        kinds = {self._sign(first, last) for first, last in pairwise(places)}
        #: What there is to do for each. The more differ, the less can be done for each.
        self.care = _CARES[bisect_left(_KINDS, len(kinds))]

    def ops(self, first: int, last: int) -> list[int]:
        """The ops of a segment, in the order of the numbers in an `Option`."""
        return [*self._line.crossing(first).leaks, *self._line.ops[first:last]]

    def options(self, places: Sequence[int], passes: bool, effort: int) -> tuple[int, list[Option]]:
        """The options of the segment from the first to the last of ``places``.

        The bytes that all their needs are counted from, and the options. ``passes``: whether all
        that crosses its end is to be there, or only what is asked for.
        """
        line, first, last = self._line, places[0], places[-1]
        signs = tuple(self._sign(a, b) for a, b in pairwise(places))
        leaks = [
            (first - line.position[op], line.graph.ops[op].name, line.graph.ops[op].seconds)
            for op in line.crossing(first).leaks
        ]
        key = (signs, tuple(leaks), passes, effort)
        start = line.begins[last]
        at = line.before[start] if start < len(line.before) else 0
        if key not in self._options:
            segment = _Segment(line, first, last)
            self._options[key] = segment.offset - at, self._find(segment, places, passes, effort)
        offset, found = self._options[key]
        return at + offset, found

    def _find(
        self, segment: _Segment, places: Sequence[int], passes: bool, effort: int
    ) -> list[Option]:
        end = segment.after.kept if passes else segment.after.asked_kept
        found: dict[frozenset[int], Option] = {}
        for cut in self._inner(places, effort):
            required = end.union(*(self._line.crossing(place).kept for place in cut))
            most = (self.care.inner if cut else self.care.corners)[effort]
            # What is read outside has to be kept for it, or is there anyway.
            for pays in (True, False) if effort and not cut else (False,):
                piece = segment.piece(required, pays=pays)
                free = frozenset(n for n, is_free in enumerate(piece.is_free) if is_free)
                for chosen in corners(piece, most):
                    kept = chosen | free
                    if kept not in found:
                        found[kept] = segment.judge(piece, kept, passes=passes)
        return _best(found.values(), _MOST[effort])

    def _inner(self, places: Sequence[int], effort: int) -> list[tuple[int, ...]]:
        """Places within a segment at which it may be cut again."""
        if not effort or not self.care.inner[effort]:
            return [()]
        fine = [place for place in self._fine if places[0] < place < places[-1]]
        if effort == 1 or len(fine) > _MANY:
            fine = list(places[1:-1])
        found: list[tuple[int, ...]] = [(), *((place,) for place in fine)]
        if effort == 2 and 2 < len(fine) <= _FEW:
            found += combinations(fine, 2)
        return found

    def _sign(self, first: int, last: int) -> int:
        """The same number for segments that are alike."""
        if (first, last) not in self._signs:
            sign = _describe(self._line, first, last)
            self._signs[first, last] = self._known.setdefault(sign, len(self._known))
        return self._signs[first, last]


def _best(options: Iterable[Option], most: int) -> list[Option]:
    """Those that no other is better than in every respect."""
    found: list[Option] = []
    for option in sorted(options, key=lambda o: (o.seconds, o.held, o.need, o.wants, o.kept)):
        if not any(
            o.held <= option.held and o.need <= option.need and o.wants <= option.wants
            for o in found
        ):
            found.append(option)
    if len(found) <= most:
        return found
    # Ends of the row are the quickest and the smallest: keep them, and an even choice between.
    step = (len(found) - 1) / (most - 1)
    chosen = {round(n * step) for n in range(most)}
    chosen.add(min(range(len(found)), key=lambda n: found[n].need))
    chosen.add(min(range(len(found)), key=lambda n: (found[n].held, found[n].need)))
    return [found[n] for n in sorted(chosen)]


def _describe(line: Line, first: int, last: int) -> object:
    """All that matters of the ops between two places, in words that repeat when they do."""
    graph = line.graph
    before, after = line.crossing(first), line.crossing(last)
    names: dict[int, object] = {value: -1 - n for n, value in enumerate(before.values)}
    rows: list[object] = []
    start = line.begins[last]
    for place in range(first, last):
        op = graph.ops[line.ops[place]]
        for value in graph.results[line.ops[place]]:
            names[value] = len(names)
        rows.append(
            (
                op.name,
                op.seconds,
                op.workspace,
                op.state,
                op.can_keep,
                line.ops[place] in line.free,
                tuple(names.get(read) for read in op.reads),
                tuple(names.get(old) if old is not None else None for old, _ in op.writes),
                tuple(_value(line, v, start) for v in graph.results[line.ops[place]]),
                tuple(names.get(graph.saved[n].value) for n in line.asks_of[place]),
            )
        )
    edges = (
        tuple((names[v], graph.values[v].nbytes, v in before.asked) for v in before.values),
        tuple((names[v], v in after.asked) for v in after.values),
    )
    return (tuple(rows), edges, _moments(line, first, last))


def _value(line: Line, value: int, start: int) -> object:
    graph = line.graph
    each = graph.values[value]
    return each.nbytes, graph.storages[each.storage].dies >= max(start, graph.turn)


def _moments(line: Line, first: int, last: int) -> object:
    graph = line.graph
    start = line.begins[last]
    stop = len(graph.events) if first == 0 else line.begins[first]
    before, during = line.before, line.during
    at = before[min(start, len(before) - 1)]
    rows = []
    for now in range(start, stop):
        event = graph.events[now]
        asks = tuple(line.place[n] - first for n in event.unpacks)
        rows.append((before[now] - at, during[now] - at, asks, len(event.frees)))
    return tuple(rows), before[min(stop, len(before) - 1)] - at
