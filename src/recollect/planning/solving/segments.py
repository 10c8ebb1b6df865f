"""Candidates for each segment of the row: bytes held, bytes needed, seconds.

The dynamic program (`chain`) puts a schedule together from them. A segment is made of one or more
pieces, each between two neighbouring places to cut at. Each segment becomes a small graph of its
own, in which all values from outside are there, and its candidates are simulated. Equal blocks of a
model have equal segments, which are solved once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from recollect.graph.flow import Network
from recollect.graph.graph import Event, Graph, Op, SavedTensor, Schedule, Storage, Value
from recollect.graph.simulate import simulate
from recollect.planning.solving.linearization import Linearization


@dataclass(frozen=True, slots=True)
class SegmentChoice:
    """A candidate for a segment."""

    held: int  #: the bytes that it holds until backward of the segment
    #: The bytes that it allocates in backward of the segment, counted from an offset that
    #: `Segments.options` returns.
    need: int
    seconds: float  #: of the ops that are recomputed
    #: Whether it reads values that cross the begin of the segment, other than those that are saved
    #: behind it.
    reads_across: bool
    kept: tuple[int, ...]  #: the ops to keep, by their number in the segment


@dataclass(frozen=True, slots=True)
class _Limits:
    """How many candidates to try, by effort: for segments of many pieces, of two, and of one."""

    corners: tuple[int, int, int]  #: with no further cut
    inner: tuple[int, int, int]  #: for each place at which a segment is cut again
    longest: int  #: the most pieces of a segment


#: From few kinds of pieces to many.
_LIMITS = (
    _Limits((3, 6, 24), (0, 3, 6), 6),
    _Limits((3, 5, 10), (0, 3, 4), 5),
    _Limits((2, 3, 6), (0, 0, 0), 3),
)
#: The most kinds of pieces for each of the limits but the last.
_MOST_KINDS = (40, 120)
#: The candidates that are kept, for segments of many pieces, of two, and of one.
_MOST_KEPT = (3, 8, 40)
#: A segment with more inner places than _MANY is cut only between its pieces; one with at most _FEW
#: is cut at two places at once as well.
_MANY = 24
_FEW = 6
#: Capacities are integers, so that rounding cannot leave residual capacity.
_UNIT = 1e13
_NO_LIMIT = 1 << 100


class _Segment:
    """The ops between two places, as a graph of its own."""

    def __init__(self, line: Linearization, first: int, last: int) -> None:
        self.line = line
        self.before, self.after = line.crossing(first), line.crossing(last)
        self.first, self.last = first, last
        self.ops = [*self.before.unkeepable, *line.ops[first:last]]
        self.number = {op: n for n, op in enumerate(self.ops)}
        self.values = [v for op in self.ops for v in line.graph.results[op]]
        self.local = {value: n for n, value in enumerate(self.values)}
        self.span = _backward_of(line, first, last)
        self.offset = 0
        self.graph = self._graph()
        self._find_inputs()

    # --- as a graph -------------------------------------------------------------------------------

    def _graph(self) -> Graph:
        line, whole = self.line, self.line.graph
        held_from = max(self.span[0], whole.turn)
        numbers: dict[int, int] = {}
        storages: list[Storage] = []
        values: list[Value] = []
        for value in self.values:
            old = whole.values[value]
            op = self.number[old.op]
            if old.storage not in numbers:
                numbers[old.storage] = len(storages)
                is_held_anyway = whole.storages[old.storage].dies >= held_from
                size = 0 if is_held_anyway else old.nbytes
                storages.append(Storage(size, op, op))
            values.append(Value(old.nbytes, op, numbers[old.storage]))
        inner = [
            saved
            for place in range(self.first, self.last)
            for saved in line.saved_by[place]
            if whole.saved[saved].value in self.local
        ]
        tensors = [
            SavedTensor(self.local[whole.saved[n].value], self.number[line.ops[line.place[n]]])
            for n in inner
        ]
        forward = [Event(0.0, 0, -(1 << 60), op=n) for n in range(len(self.ops))]
        backward = self._backward({saved: n for n, saved in enumerate(inner)})
        return Graph(
            ops=[self._op(op) for op in self.ops],
            values=values,
            storages=storages,
            saved=tensors,
            events=[*forward, *backward],
            turn=len(forward),
            rerun_cost=whole.rerun_cost,
        )

    def _op(self, number: int) -> Op:
        op, local = self.line.graph.ops[number], self.local
        return replace(
            op,
            reads=tuple(local[read] for read in op.reads if read in local),
            makes=tuple(local[value] for value in op.makes),
            writes=tuple(
                (None if old is None else local.get(old), local[new]) for old, new in op.writes
            ),
            forced=number in self.line.always_kept,
        )

    def _backward(self, numbers: dict[int, int]) -> list[Event]:
        """The events of its backward; those without unpacks and frees are merged."""
        whole, (start, stop) = self.line.graph, self.span
        found: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
        done: set[int] = set()
        at_first, at_most = self.line.fixed_before, self.line.fixed_during
        for now in range(start, stop):
            event = whole.events[now]
            unpacks = tuple(numbers[n] for n in event.unpacks if n in numbers)
            frees = tuple(numbers[n] for n in event.frees if n in numbers)
            done.update(unpacks)
            if found and not unpacks and not frees and not found[-1][2] and not found[-1][3]:
                before, during, _, _ = found[-1]
                found[-1] = (max(before, at_first[now]), max(during, at_most[now]), (), ())
            else:
                found.append((at_first[now], at_most[now], unpacks, frees))
        late = tuple(n for n in numbers.values() if n not in done)
        if late:
            bytes_then = at_first[min(stop, len(at_first)) - 1]
            found.append((bytes_then, bytes_then, late, late))
        self.offset = min((min(each[0], each[1]) for each in found), default=0)
        return [Event(0.0, b - self.offset, d - self.offset, -1, a, e) for b, d, a, e in found]

    # --- candidates -------------------------------------------------------------------------------

    def _find_inputs(self) -> None:
        line, whole = self.line, self.line.graph
        #: The values from outside that are kept only if they are read, and their bytes.
        inputs = sorted(
            {
                read
                for op in self.ops
                for read in whole.ops[op].reads
                if read not in self.local and line.last_saved[read] < self.first
            }
        )
        numbers = {value: n for n, value in enumerate(inputs)}
        self.inputs = [whole.values[value].nbytes for value in inputs]
        self.reads: list[list[int]] = []
        self.outside: list[list[int]] = []
        self.nbytes: list[int] = []
        for op in self.ops:
            read = [whole.values[r].op for r in whole.ops[op].reads if r in self.local]
            self.reads.append([self.number[each] for each in dict.fromkeys(read)])
            self.outside.append([numbers[r] for r in whole.ops[op].reads if r in numbers])
            self.nbytes.append(
                sum(
                    self.graph.storages[self.graph.values[self.local[v]].storage].nbytes
                    for v in whole.results[op]
                    if max(line.last_saved[v], line.last_read[v]) >= 0
                )
            )

    def subproblem(self, required: Iterable[int], *, pays: bool) -> _Subproblem:
        """Its ops, with ``required`` kept. ``pays``: whether inputs from outside cost bytes."""
        free = {self.number[op] for op in required if op in self.number}
        ops = self.graph.ops
        return _Subproblem(
            self.graph.rerun_seconds,
            [self.nbytes[n] if op.can_keep else None for n, op in enumerate(ops)],
            [op.forced or n in free for n, op in enumerate(ops)],
            self.reads,
            self.outside,
            self.inputs if pays else [0] * len(self.inputs),
            frozenset(self.graph.values[saved.value].op for saved in self.graph.saved),
        )

    def judge(self, problem: _Subproblem, kept: frozenset[int], *, passes: bool) -> SegmentChoice:
        """Simulate a choice. ``passes``: values that cross the whole segment are read behind it."""
        outcome = simulate(self.graph, Schedule(kept))
        again = problem.reruns(kept)
        reads_across = any(self.outside[op] for op in again)
        reads_across = reads_across or (passes and self._has_passing())
        return SegmentChoice(
            self._held(kept, again, passes),
            outcome.peak,
            outcome.rerun,
            reads_across,
            tuple(sorted(kept)),
        )

    def _has_passing(self) -> bool:
        whole = self.line.graph
        crossing = set(self.after.values) - self.after.saved
        for op in self.after.unkeepable:
            crossing.update(r for r in whole.ops[op].reads if self.line.last_saved[r] < self.first)
        return any(value not in self.local for value in crossing)

    def _held(self, kept: frozenset[int], again: set[int], passes: bool) -> int:
        graph, whole = self.graph, self.line.graph
        read = {value for op in again for value in graph.ops[op].reads}
        read |= {saved.value for saved in graph.saved}
        crossing = self.after.values if passes else self.after.saved
        read |= {self.local[value] for value in crossing if value in self.local}
        # Values that cross and cannot be kept are recomputed from others.
        for op in self.after.unkeepable:
            read |= {self.local[v] for v in whole.ops[op].reads if v in self.local}
        storages = {graph.values[v].storage for v in read if graph.values[v].op in kept}
        states = sum(graph.ops[op].state for op in again)
        return states + sum(graph.storages[number].nbytes for number in storages)


class Segments:
    """The segments of a row, with their candidates."""

    def __init__(self, line: Linearization, places: Sequence[int], fine: Sequence[int]) -> None:
        self._line = line
        self._fine = fine
        self._signs: dict[tuple[int, int], int] = {}
        self._known: dict[object, int] = {}
        self._options: dict[object, tuple[int, list[SegmentChoice]]] = {}
        kinds = {self._sign(first, last) for first, last in pairwise(places)}
        #: The more pieces differ, the less can be done for each.
        self.limits = _LIMITS[bisect_left(_MOST_KINDS, len(kinds))]

    def ops(self, first: int, last: int) -> list[int]:
        """The ops of a segment, by their number in a `SegmentChoice`."""
        return [*self._line.crossing(first).unkeepable, *self._line.ops[first:last]]

    def options(
        self, places: Sequence[int], passes: bool, effort: int
    ) -> tuple[int, list[SegmentChoice]]:
        """The candidates for the segment from the first to the last of ``places``.

        Returns the offset of their needs, and the candidates. ``passes``: whether all values that
        cross its end are to be available, or only those that are saved behind it. ``effort``: 2 for
        segments of one piece, 1 for two, 0 for more; see `_Limits`.
        """
        line, first, last = self._line, places[0], places[-1]
        signs = tuple(self._sign(a, b) for a, b in pairwise(places))
        unkeepable = [
            (first - line.position[op], line.graph.ops[op].name, line.graph.ops[op].seconds)
            for op in line.crossing(first).unkeepable
        ]
        key = (signs, tuple(unkeepable), passes, effort)
        start = line.backward_begins[last]
        at = line.fixed_before[start] if start < len(line.fixed_before) else 0
        if key not in self._options:
            segment = _Segment(line, first, last)
            self._options[key] = segment.offset - at, self._find(segment, places, passes, effort)
        offset, found = self._options[key]
        return at + offset, found

    def _find(
        self, segment: _Segment, places: Sequence[int], passes: bool, effort: int
    ) -> list[SegmentChoice]:
        end = segment.after.kept if passes else segment.after.saved_kept
        found: dict[frozenset[int], SegmentChoice] = {}
        for cut in self._inner(places, effort):
            required = end.union(*(self._line.crossing(place).kept for place in cut))
            most = (self.limits.inner if cut else self.limits.corners)[effort]
            # Inputs from outside have to be kept for the segment, or are kept anyway.
            for pays in (True, False) if effort and not cut else (False,):
                problem = segment.subproblem(required, pays=pays)
                free = frozenset(n for n, is_free in enumerate(problem.is_free) if is_free)
                for chosen in problem.corners(most):
                    kept = chosen | free
                    if kept not in found:
                        found[kept] = segment.judge(problem, kept, passes=passes)
        return _best(found.values(), _MOST_KEPT[effort])

    def _inner(self, places: Sequence[int], effort: int) -> list[tuple[int, ...]]:
        """Places within a segment at which it is cut again."""
        if not effort or not self.limits.inner[effort]:
            return [()]
        fine = [place for place in self._fine if places[0] < place < places[-1]]
        if effort == 1 or len(fine) > _MANY:
            fine = list(places[1:-1])
        found: list[tuple[int, ...]] = [(), *((place,) for place in fine)]
        if effort == 2 and 2 < len(fine) <= _FEW:
            found += combinations(fine, 2)
        return found

    def _sign(self, first: int, last: int) -> int:
        """The same number for equal segments."""
        if (first, last) not in self._signs:
            sign = _describe(self._line, first, last)
            self._signs[first, last] = self._known.setdefault(sign, len(self._known))
        return self._signs[first, last]


def _backward_of(line: Linearization, first: int, last: int) -> tuple[int, int]:
    """The event at which backward of a segment begins, and that of what is before it."""
    stop = line.backward_begins[first] if first else len(line.graph.events)
    return line.backward_begins[last], stop


def _best(options: Iterable[SegmentChoice], most: int) -> list[SegmentChoice]:
    """The candidates that no other dominates, and of these at most about ``most``."""
    found: list[SegmentChoice] = []
    for option in sorted(
        options, key=lambda o: (o.seconds, o.held, o.need, o.reads_across, o.kept)
    ):
        if not any(
            o.held <= option.held
            and o.need <= option.need
            and o.reads_across <= option.reads_across
            for o in found
        ):
            found.append(option)
    if len(found) <= most:
        return found
    # The ends of the list are the quickest and the smallest: keep them, and some between.
    step = (len(found) - 1) / (most - 1)
    chosen = {round(n * step) for n in range(most)}
    chosen.add(min(range(len(found)), key=lambda n: found[n].need))
    chosen.add(min(range(len(found)), key=lambda n: (found[n].held, found[n].need)))
    return [found[n] for n in sorted(chosen)]


def _describe(line: Linearization, first: int, last: int) -> object:
    """A description of the ops between two places, equal for equal blocks."""
    graph = line.graph
    before, after = line.crossing(first), line.crossing(last)
    names: dict[int, object] = {value: -1 - n for n, value in enumerate(before.values)}
    rows: list[object] = []
    start = max(line.backward_begins[last], graph.turn)
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
                line.ops[place] in line.always_kept,
                tuple(names.get(read) for read in op.reads),
                tuple(names.get(old) if old is not None else None for old, _ in op.writes),
                tuple(
                    (graph.values[v].nbytes, graph.storages[graph.values[v].storage].dies >= start)
                    for v in graph.results[line.ops[place]]
                ),
                tuple(names.get(graph.saved[n].value) for n in line.saved_by[place]),
            )
        )
    edges = (
        tuple((names[v], graph.values[v].nbytes, v in before.saved) for v in before.values),
        tuple((names[v], v in after.saved) for v in after.values),
    )
    return (tuple(rows), edges, _describe_backward(line, first, last))


def _describe_backward(line: Linearization, first: int, last: int) -> object:
    graph = line.graph
    start, stop = _backward_of(line, first, last)
    before, during = line.fixed_before, line.fixed_during
    at = before[min(start, len(before) - 1)]
    rows = []
    for now in range(start, stop):
        event = graph.events[now]
        unpacks = tuple(line.place[n] - first for n in event.unpacks)
        rows.append((before[now] - at, during[now] - at, unpacks, len(event.frees)))
    return tuple(rows), before[min(stop, len(before) - 1)] - at


# --- at one price per byte ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Subproblem:
    """Ops to choose from, by their number here.

    An op whose result is needed is kept, at its bytes times the price, or recomputed, which takes
    its seconds and needs its inputs. At a given price the cheapest choice is a minimum cut. The
    choices that are best at some price are the corners of the convex hull of all choices:
    `corners` finds them by solving at the price at which two known ones cost the same.
    """

    seconds: Sequence[float]  #: by op: the time to recompute it
    nbytes: Sequence[int | None]  #: by op: the bytes to keep it; None if it cannot be kept
    is_free: Sequence[bool]  #: by op: whether it is kept in any case
    reads: Sequence[Sequence[int]]  #: by op: the ops whose results it reads
    outside: Sequence[Sequence[int]]  #: by op: the inputs from outside that it reads
    outside_bytes: Sequence[int]  #: the bytes of each of these inputs
    saved: frozenset[int]  #: the ops whose results backward unpacks

    def reruns(self, kept: frozenset[int]) -> set[int]:
        """The ops that are recomputed if ``kept`` are kept."""
        found: set[int] = set()
        wanted = list(self.saved)
        while wanted:
            op = wanted.pop()
            if op not in found and op not in kept and not self.is_free[op]:
                found.add(op)
                wanted += self.reads[op]
        return found

    def corners(self, most: int) -> list[frozenset[int]]:
        """The choices that are best at some price, about ``most`` of them at most."""
        total = sum(self.seconds) + 1e-12
        sizes = [nbytes for nbytes in self.nbytes if nbytes]
        if not sizes:
            return [self._at_price(0.0)]
        low, high = 1e-3 * min(self.seconds) / sum(sizes), 1e3 * total / min(sizes)
        small, quick = self._at_price(high), self._at_price(low)
        found = {small: self._costs(small), quick: self._costs(quick)}
        gaps = deque([(small, quick)])
        while gaps and len(found) < most:
            left, right = gaps.popleft()
            nbytes = found[right][0] - found[left][0]
            seconds = found[left][1] - found[right][1]
            if nbytes <= 0 or seconds <= 0:
                continue
            between = self._at_price(seconds / nbytes)
            if between not in found:
                found[between] = self._costs(between)
                gaps += [(left, between), (between, right)]
        return list(found)

    def _costs(self, kept: frozenset[int]) -> tuple[int, float]:
        again = self.reruns(kept)
        inputs = {number for op in again for number in self.outside[op]}
        nbytes = sum(self.nbytes[op] or 0 for op in kept) + sum(
            self.outside_bytes[n] for n in inputs
        )
        return nbytes, sum(self.seconds[op] for op in again)

    def _at_price(self, price: float) -> frozenset[int]:
        """The ops to keep if a byte costs ``price`` seconds."""
        ops = [op for op, is_free in enumerate(self.is_free) if not is_free]
        network = Network()
        # An op is needed if its first node is on the side of the source, recomputed if the second.
        needed = {op: network.node() for op in ops}
        again = {op: network.node() for op in ops}
        inputs = [network.node() for _ in self.outside_bytes]
        for op in ops:
            nbytes = self.nbytes[op]
            keeping = _NO_LIMIT if nbytes is None else _whole(price * nbytes)
            network.edge(needed[op], again[op], keeping)
            network.edge(again[op], 1, _whole(self.seconds[op]))
            for read in self.reads[op]:
                if read in needed:
                    network.edge(again[op], needed[read], _NO_LIMIT)
            for number in self.outside[op]:
                network.edge(again[op], inputs[number], _NO_LIMIT)
            if op in self.saved:
                network.edge(0, needed[op], _NO_LIMIT)
        for node, nbytes in zip(inputs, self.outside_bytes, strict=True):
            network.edge(node, 1, _whole(price * nbytes))
        network.fill()
        near = network.levels()
        return frozenset(op for op in ops if near[needed[op]] >= 0 > near[again[op]])


def _whole(seconds: float) -> int:
    return int(seconds * _UNIT) + 1
