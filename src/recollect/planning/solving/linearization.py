"""The ops that may be recomputed in a row, and the values that cross each place to cut the row at.

If all values that cross a place are kept, later ops are recomputed from there, and their backward
is over before that of earlier ops begins. So the row falls into segments that depend on each other
only by the bytes that they hold, and the dynamic program (`chain`) can solve them one by one.

Place n is the boundary before the n-th op of the row.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise

from recollect.graph.graph import Graph

#: With so few ops every place is tried.
_FEW = 24
#: The most ops that cannot be kept and would be recomputed on both sides of a place.
_MOST_UNKEEPABLE = 12
#: How much longer than the average a segment may be.
_UNEVEN = 8


@dataclass(frozen=True, slots=True)
class Crossing:
    """What crosses a place."""

    #: The values that are made before it, and read or saved by ops behind it.
    values: tuple[int, ...]
    saved: frozenset[int]  #: those of them that are saved behind it
    kept: frozenset[int]  #: the ops to keep for all of them to be available
    saved_kept: frozenset[int]  #: the same for those that are saved
    #: The ops before it that are recomputed behind it as well, as they cannot be kept.
    unkeepable: tuple[int, ...]


class Linearization:
    """The row of a graph, with ``pins`` always kept."""

    def __init__(self, graph: Graph, pins: frozenset[int] = frozenset()) -> None:
        self.graph = graph
        self.always_kept = graph.forced | pins
        self.ops = sorted(graph.needed)
        self.position = {op: n for n, op in enumerate(self.ops)}
        self._find_fixed()
        self._find_saved()
        self._find_reads()
        self._bytes_across = self._find_bytes_across()
        self._crossings: dict[int, Crossing] = {}

    def _find_fixed(self) -> None:
        """The bytes in backward that no schedule changes, with those that others hold."""
        graph = self.graph
        freed = [0] * (len(graph.events) + 1)
        for storage in graph.storages:
            if storage.dies >= graph.turn:
                freed[storage.dies] += storage.nbytes
        self.fixed_before, self.fixed_during = [], []
        left = sum(freed)
        for number, event in enumerate(graph.events):
            self.fixed_before.append(event.before + left)
            self.fixed_during.append(event.during + left)
            left -= freed[number]

    def _find_saved(self) -> None:
        graph, count = self.graph, len(self.graph.saved)
        end, unpacks = len(graph.events), graph.tables.unpacks
        ran_needed = [graph.tables.ran[op] for op in self.ops]
        #: By saved tensor: the position of the op that saved it. By position: the saved tensors.
        self.place = [0] * count
        self.saved_by: list[list[int]] = [[] for _ in self.ops]
        #: By value: the position of the last op that saved it.
        self.last_saved = [-1] * len(graph.values)
        first = [end] * (len(self.ops) + 1)
        for number, saved in enumerate(graph.saved):
            made = self.position[graph.values[saved.value].op]
            place = max(made, bisect_right(ran_needed, saved.event) - 1)
            self.place[number] = place
            self.saved_by[place].append(number)
            self.last_saved[saved.value] = max(self.last_saved[saved.value], place)
            first[place + 1] = min(first[place + 1], unpacks[number])
        #: By place: the last event that unpacks a tensor that was saved behind it.
        self.busy_until = [-1] * (len(self.ops) + 1)
        for number, place in enumerate(self.place):
            self.busy_until[place] = max(self.busy_until[place], unpacks[number])
        for place in reversed(range(len(self.ops))):
            self.busy_until[place] = max(self.busy_until[place : place + 2])
        #: By place: the event at which backward of the ops before it begins.
        self.backward_begins = first
        for place in range(len(self.ops)):
            first[place + 1] = min(first[place], first[place + 1])

    def _find_reads(self) -> None:
        graph = self.graph
        #: By value: the position of the last op that reads it if it is recomputed.
        self.last_read = [-1] * len(graph.values)
        for place, op in enumerate(self.ops):
            if op not in self.always_kept:
                for read in graph.ops[op].reads:
                    self.last_read[read] = place

    def _find_bytes_across(self) -> list[int]:
        """By place: the bytes that cross it."""
        changes = [0] * (len(self.ops) + 2)
        for place, op in enumerate(self.ops):
            for value in self.graph.results[op]:
                last = max(self.last_read[value], self.last_saved[value])
                if last > place:
                    changes[place + 1] += self.graph.values[value].nbytes
                    changes[last + 1] -= self.graph.values[value].nbytes
        return list(accumulate(changes[:-1]))

    def crossing(self, place: int) -> Crossing:
        """What crosses a place."""
        if place not in self._crossings:
            self.find_crossings([place])
        return self._crossings[place]

    def find_crossings(self, places: list[int]) -> None:
        """Find what crosses some places, in one pass along the row."""
        alive: dict[int, int] = {}
        wanted = set(places)
        for place in range(len(self.ops) + 1):
            if place:
                for value in self.graph.results[self.ops[place - 1]]:
                    last = max(self.last_read[value], self.last_saved[value])
                    if last >= place:
                        alive[value] = last
            if place in wanted:
                alive = {value: last for value, last in alive.items() if last >= place}
                values = tuple(sorted(alive))
                saved = frozenset(value for value in values if self.last_saved[value] >= place)
                kept, unkeepable = self._available(values)
                saved_kept, _ = self._available(tuple(sorted(saved)))
                crossing = Crossing(values, saved, kept, saved_kept, unkeepable)
                self._crossings[place] = crossing

    def _available(self, values: tuple[int, ...]) -> tuple[frozenset[int], tuple[int, ...]]:
        """The ops to keep for values to be available, and those to recompute for that."""
        graph = self.graph
        kept: set[int] = set()
        unkeepable: set[int] = set()
        wanted = list(values)
        while wanted and len(unkeepable) <= _MOST_UNKEEPABLE:  # with more, a place is not used
            op = graph.values[wanted.pop()].op
            if graph.ops[op].can_keep or op in self.always_kept:
                kept.add(op)
            elif op not in unkeepable:
                unkeepable.add(op)
                wanted += graph.ops[op].reads
        return frozenset(kept), tuple(sorted(unkeepable))

    def cuts(self, most: int) -> tuple[list[int], list[int]]:
        """Places to cut at, both ends included: at most ``most`` good ones, and all candidates."""
        count = len(self.ops)
        inner = list(range(1, count))
        fine = self._valleys(inner) if count > _FEW else inner
        self.find_crossings([0, *fine, count])
        fine = [
            place for place in fine if len(self._crossings[place].unkeepable) <= _MOST_UNKEEPABLE
        ]
        # Where backward of the ops behind is over before that of the ops before begins.
        orderly = [n for n in fine if self.busy_until[n] < self.backward_begins[n]]
        fine = orderly if 4 * len(orderly) >= len(fine) else fine
        good = self._valleys(fine) if count > _FEW else fine
        while len(good) > most:
            fewer = self._valleys(good)
            is_enough = len(fewer) < len(good) and self._is_even(fewer)
            good = fewer if is_enough else good[:: -(-len(good) // most)]
        return [0, *good, count], [0, *fine, count]

    def _is_even(self, places: list[int]) -> bool:
        """Whether no segment is much longer than others: it would take long to solve."""
        ends = [0, *places, len(self.ops)]
        longest = max(last - first for first, last in pairwise(ends))
        return longest * len(ends) <= _UNEVEN * len(self.ops)

    def _valleys(self, places: list[int]) -> list[int]:
        """The places that no more bytes cross than their neighbours."""
        load = [self._bytes_across[place] for place in places]
        ends = [1 << 80]
        around = zip(ends + load[:-1], load, load[1:] + ends, strict=True)
        return [
            place
            for place, (left, here, right) in zip(places, around, strict=True)
            if here <= left and here <= right
        ]


def far_readers(graph: Graph) -> frozenset[int]:
    """Ops such as a stack of results from the whole row: keeping them frees what they read."""
    line = Linearization(graph)
    window = 3 * max(16, round(len(line.ops) ** 0.5))
    far: dict[int, list[int]] = {}
    for place, op in enumerate(line.ops):
        for read in () if op in line.always_kept else graph.ops[op].reads:
            made = line.position[graph.values[read].op]
            if place - made > window and line.last_saved[read] <= made + window:
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
