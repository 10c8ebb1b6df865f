"""The ops that may run again in a row, and what crosses each place at which the row can be cut.

If all that crosses a place is kept, whatever is asked for of what is made behind the place is made
again from there, and backward of what is behind it is over before that of what is in front begins.
So the row falls into segments that have to do with each other by the bytes they hold alone.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from recollect.graph.graph import Graph

__all__ = ["Crossing", "Line", "far_readers"]

#: With so many ops any place is as good as another.
_FEW = 24
#: Ops that cannot be kept and would run again on both sides of a place.
_MOST_LEAKS = 12
#: How much longer than others a segment may be.
_UNEVEN = 8


@dataclass(frozen=True, slots=True)
class Crossing:
    """What crosses a place.

    Args:
        values: What is made in front of it and read or asked for behind.
        asked: Those of them that are asked for behind.
        kept: The ops to keep for all of them to be there.
        asked_kept: The same for those that are asked for.
        leaks: The ops in front that run again behind: they cannot be kept.
    """

    values: tuple[int, ...]
    asked: frozenset[int]
    kept: frozenset[int]
    asked_kept: frozenset[int]
    leaks: tuple[int, ...]


class Line:
    """The row of a graph, with ``pins`` kept in any case."""

    def __init__(self, graph: Graph, pins: frozenset[int] = frozenset()) -> None:
        self.graph = graph
        self.free = graph.forced | pins
        self.ops = sorted(graph.needed)
        self.position = {op: n for n, op in enumerate(self.ops)}
        self._find_bytes()
        self._find_asks()
        self._find_reads()
        self.load = self._loads()
        self._crossings: dict[int, Crossing] = {}

    def _find_bytes(self) -> None:
        """What is allocated in backward whatever the plan, with what others hold of the region."""
        graph = self.graph
        gone = [0] * (len(graph.events) + 1)
        for memory in graph.storages:
            if memory.dies >= graph.turn:
                gone[memory.dies] += memory.nbytes
        self.before, self.during = [], []
        left = sum(gone)
        for number, event in enumerate(graph.events):
            self.before.append(event.before + left)
            self.during.append(event.during + left)
            left -= gone[number]

    def _find_asks(self) -> None:
        graph, count = self.graph, len(self.graph.saved)
        end = len(graph.events)
        #: By ask: the moment in which it is made, and whose it is.
        self.asked_at = [end] * count
        for now, event in enumerate(graph.events):
            for number in event.unpacks:
                self.asked_at[number] = now
        ran = [0] * len(graph.ops)
        for now, event in enumerate(graph.events[: graph.turn]):
            if event.op >= 0:
                ran[event.op] = now
        self.ran = ran
        ran_needed = [ran[op] for op in self.ops]
        self.place = [0] * count
        self.asks_of: list[list[int]] = [[] for _ in self.ops]
        self.last_ask = [-1] * len(graph.values)
        first = [end] * (len(self.ops) + 1)
        for number, saved in enumerate(graph.saved):
            made = self.position[graph.values[saved.value].op]
            place = max(made, bisect_right(ran_needed, saved.event) - 1)
            self.place[number] = place
            self.asks_of[place].append(number)
            self.last_ask[saved.value] = max(self.last_ask[saved.value], place)
            first[place + 1] = min(first[place + 1], self.asked_at[number])
        #: By place: the last moment in which something is asked for by what is behind it.
        self.busy_until = [-1] * (len(self.ops) + 1)
        for number, place in enumerate(self.place):
            self.busy_until[place] = max(self.busy_until[place], self.asked_at[number])
        for place in reversed(range(len(self.ops))):
            self.busy_until[place] = max(self.busy_until[place : place + 2])
        #: By place: when backward of what is in front of it begins.
        self.begins = first
        for place in range(len(self.ops)):
            first[place + 1] = min(first[place], first[place + 1])

    def _find_reads(self) -> None:
        graph = self.graph
        #: By value: the last op of the row that would read it again.
        self.last_read = [-1] * len(graph.values)
        for place, op in enumerate(self.ops):
            if op not in self.free:
                for read in graph.ops[op].reads:
                    self.last_read[read] = place

    def _loads(self) -> list[int]:
        """By place: the bytes that cross it."""
        changes = [0] * (len(self.ops) + 2)
        for place, op in enumerate(self.ops):
            for value in self.graph.results[op]:
                last = max(self.last_read[value], self.last_ask[value])
                if last > place:
                    changes[place + 1] += self.graph.values[value].nbytes
                    changes[last + 1] -= self.graph.values[value].nbytes
        loads, total = [], 0
        for change in changes[:-1]:
            total += change
            loads.append(total)
        return loads

    def crossing(self, place: int) -> Crossing:
        """What crosses a place."""
        if place not in self._crossings:
            self.find_crossings([place])
        return self._crossings[place]

    def find_crossings(self, places: list[int]) -> None:
        """Find what crosses some places, in one go along the row."""
        alive: dict[int, int] = {}
        wanted = set(places)
        for place in range(len(self.ops) + 1):
            if place:
                for value in self.graph.results[self.ops[place - 1]]:
                    last = max(self.last_read[value], self.last_ask[value])
                    if last >= place:
                        alive[value] = last
            if place in wanted:
                alive = {value: last for value, last in alive.items() if last >= place}
                self._crossings[place] = self._crossing(place, tuple(sorted(alive)))

    def _crossing(self, place: int, values: tuple[int, ...]) -> Crossing:
        asked = frozenset(value for value in values if self.last_ask[value] >= place)
        kept, leaks = self._available(values)
        asked_kept, _ = self._available(tuple(sorted(asked)))
        return Crossing(values, asked, kept, asked_kept, leaks)

    def _available(self, values: tuple[int, ...]) -> tuple[frozenset[int], tuple[int, ...]]:
        """What to keep for values to be had, and which ops run again for that."""
        graph = self.graph
        kept: set[int] = set()
        leaks: set[int] = set()
        wanted = list(values)
        while wanted and len(leaks) <= _MOST_LEAKS:  # with more, a place is not used
            op = graph.values[wanted.pop()].op
            if graph.ops[op].can_keep or op in self.free:
                kept.add(op)
            elif op not in leaks:
                leaks.add(op)
                wanted += graph.ops[op].reads
        return frozenset(kept), tuple(sorted(leaks))

    def cuts(self, most: int) -> tuple[list[int], list[int]]:
        """Places to cut at, both ends included: good ones, and all that are worth a try."""
        count = len(self.ops)
        inner = list(range(1, count))
        fine = self._valleys(inner) if count > _FEW else inner
        self.find_crossings([0, *fine, count])
        fine = [place for place in fine if len(self._crossings[place].leaks) <= _MOST_LEAKS]
        orderly = [place for place in fine if self._is_orderly(place)]
        fine = orderly if 4 * len(orderly) >= len(fine) else fine
        good = self._valleys(fine) if count > _FEW else fine
        while len(good) > most:
            fewer = self._valleys(good)
            is_enough = len(fewer) < len(good) and self._is_even(fewer)
            good = fewer if is_enough else good[:: -(-len(good) // most)]
        return [0, *good, count], [0, *fine, count]

    def _is_orderly(self, place: int) -> bool:
        """Whether backward is done with what is behind before it comes to what is in front."""
        return self.busy_until[place] < self.begins[place]

    def _is_even(self, places: list[int]) -> bool:
        """Whether no segment is much longer than others: it would take long to look at."""
        ends = [0, *places, len(self.ops)]
        longest = max(last - first for first, last in pairwise(ends))
        return longest * len(ends) <= _UNEVEN * len(self.ops)

    def _valleys(self, places: list[int]) -> list[int]:
        """Those that less crosses than their neighbours, or as much."""
        load = [self.load[place] for place in places]
        ends = [1 << 80]
        around = zip(ends + load[:-1], load, load[1:] + ends, strict=True)
        return [
            place
            for place, (left, here, right) in zip(places, around, strict=True)
            if here <= left and here <= right
        ]


def far_readers(graph: Graph) -> frozenset[int]:
    """Ops such as a stack of all that was made: kept, they free what they read."""
    line = Line(graph)
    window = 3 * max(16, round(len(line.ops) ** 0.5))
    far: dict[int, list[int]] = {}
    for place, op in enumerate(line.ops):
        for read in () if op in line.free else graph.ops[op].reads:
            made = line.position[graph.values[read].op]
            if place - made > window and line.last_ask[read] <= made + window:
                far.setdefault(read, []).append(op)
    saved: dict[int, int] = {}
    for read, readers in far.items():
        if len(readers) == 1:
            saved[readers[0]] = saved.get(readers[0], 0) + graph.values[read].nbytes
    return frozenset(
        op
        for op, nbytes in saved.items()
        if graph.ops[op].can_keep
        and sum(graph.values[v].nbytes for v in graph.results[op]) <= 1.5 * nbytes
    )
