"""Live ranges: at which events a value is allocated, as far as every schedule agrees on it.

The lower bound may count only memory that `simulate` counts too. So for each storage this finds the
events at which it is allocated whatever the schedule, and what keeping a value adds to that.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate

from recollect.graph.graph import Graph

#: From one event to another, both included.
Span = tuple[int, int]


class Liveness:
    """The live ranges of values and storages.

    Args:
        graph: The step.
        offload: Whether values may be offloaded: then none is certain to be on the device.
    """

    def __init__(self, graph: Graph, *, offload: bool = False) -> None:
        self.graph = graph
        self._offload = offload
        self.last = len(graph.events) - 1
        #: By value: the spans from unpacking a saved tensor of it to freeing that.
        self.unpacked: list[list[Span]] = [[] for _ in graph.values]
        #: The values that backward unpacks of a graph that is retained, and drops in between.
        self._dropped: set[int] = set()
        #: By value: the last event until which a saved tensor holds it if it is kept; -1: none.
        self.saved_until = [-1] * len(graph.values)
        #: By op: whether backward unpacks any of its results, when first, and when each is freed.
        self.is_unpacked = [False] * len(graph.ops)
        self._first_unpack = [self.last] * len(graph.ops)
        self.frees: list[list[int]] = [[] for _ in graph.ops]
        self._find_unpacks()
        self.values_in: list[list[int]] = [[] for _ in graph.storages]
        for number, each in enumerate(graph.values):
            self.values_in[each.storage].append(number)

    def _find_unpacks(self) -> None:
        graph = self.graph
        unpacks: dict[int, int] = {}
        frees: dict[int, int] = {}
        drops: dict[int, int] = {}
        for now, event in enumerate(graph.events):
            for number in event.unpacks:
                unpacks.setdefault(number, now)
            for number in event.frees:
                frees.setdefault(number, now)
            for number in event.drops:
                drops.setdefault(number, now)
        freed_early: set[int] = set()
        for number, saved in enumerate(graph.saved):
            end = frees.get(number, self.last)
            if number in unpacks:
                start, op = unpacks[number], graph.values[saved.value].op
                self.is_unpacked[op] = True
                self._first_unpack[op] = min(self._first_unpack[op], start)
                self.saved_until[saved.value] = max(self.saved_until[saved.value], end)
                if number in drops:
                    self._dropped.add(saved.value)
                self.unpacked[saved.value].append((start, drops.get(number, end)))
                self.frees[op].append(end)
            if end < unpacks.get(number, end + 1):
                freed_early.add(saved.value)
        # A tensor freed before it is unpacked is freed in place of another tensor of the value.
        for value in freed_early:
            self.unpacked[value] = []

    # --- what every schedule has in common --------------------------------------------------------

    @cached_property
    def users(self) -> list[list[int]]:
        """By op: the ops that read its results and may be recomputed."""
        graph = self.graph
        users: list[list[int]] = [[] for _ in graph.ops]
        for number in sorted(graph.needed):
            if not graph.ops[number].forced:
                for op in {graph.values[read].op for read in graph.ops[number].reads}:
                    users[op].append(number)
        return users

    @cached_property
    def _backwards(self) -> list[int]:
        return sorted(self.graph.needed, reverse=True)

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """The ops that every schedule recomputes."""
        ops = self.graph.ops
        found: set[int] = set()
        if self._offload:
            return frozenset()
        for number in self._backwards:
            is_needed = self.is_unpacked[number] or not found.isdisjoint(self.users[number])
            if is_needed and not ops[number].can_keep and not ops[number].forced:
                found.add(number)
        return frozenset(found)

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """By value: the ops that read it and that every schedule recomputes."""
        found: dict[int, list[int]] = {}
        for number in sorted(self.recomputed):
            for read in self.graph.ops[number].reads:
                found.setdefault(read, []).append(number)
        return found

    @cached_property
    def _is_needed(self) -> list[bool]:
        """By op: whether every schedule keeps or recomputes it."""
        is_needed = self.is_unpacked[:]
        for number in self.recomputed:
            for read in self.graph.ops[number].reads:
                is_needed[self.graph.values[read].op] = True
        return is_needed

    # --- when an op is recomputed -----------------------------------------------------------------

    @cached_property
    def inputs_until(self) -> list[int]:
        """By op: if it is recomputed, the event until which its inputs are held for that.

        A kept input is held until the first tensor that needs it is dead, and all that were saved
        after that. The results of the op are among those, or what leads to it.
        """
        until = [-1] * len(self.graph.ops)
        for number in self._backwards:
            users = self.users[number]
            certain = [until[user] for user in users if user in self.recomputed]
            certain += self.frees[number]
            if certain:
                until[number] = max(certain)
            else:
                until[number] = min((until[user] for user in users), default=-1)
        return until

    @cached_property
    def _recomputed_by(self) -> list[int]:
        """By op: the event by which it is recomputed, if it is."""
        by = self._first_unpack[:]
        for number in self._backwards:
            users = self.users[number]
            certain = [by[user] for user in users if user in self.recomputed]
            if self.is_unpacked[number] or certain:
                by[number] = min([by[number], *certain])
            else:
                by[number] = max((by[user] for user in users), default=self.last)
        return by

    @cached_property
    def _not_before(self) -> list[int]:
        """By op: the event before which it is not recomputed."""
        first = self._first_unpack[:]
        for number in self._backwards:
            first[number] = min([first[number], *(first[user] for user in self.users[number])])
        return first

    # --- when memory is allocated -----------------------------------------------------------------

    def _kept_until(self, value: int) -> int:
        readers = self.readers.get(value, ())
        return max([self.saved_until[value], *(self.inputs_until[user] for user in readers)])

    def _recomputed_until(self, value: int) -> int:
        """The last event at which a value is certain to be there if it was recomputed."""
        if value in self._dropped:
            return min((end for _, end in self.unpacked[value]), default=-1)
        end = self.saved_until[value] if self.unpacked[value] else -1
        return max([end, *(self._not_before[user] - 1 for user in self.readers.get(value, ()))])

    def _live(self, value: int) -> Span:
        """When a value is allocated that every schedule keeps or recomputes."""
        number = self.graph.values[value].op
        if self.graph.ops[number].forced:
            born = self.graph.storages[self.graph.values[value].storage].born
            return (born, self._kept_until(value))
        end = self._recomputed_until(value)
        if number not in self.recomputed:
            end = min(end, self._kept_until(value))
        return (self._recomputed_by[number], end)

    @cached_property
    def _always(self) -> list[list[Span]]:
        """By storage: when it, or as much elsewhere, is allocated under every schedule."""
        result = []
        for storage, values in zip(self.graph.storages, self.values_in, strict=True):
            spans = [(storage.born, storage.dies)]
            for value in values:
                spans += self.unpacked[value]
                number = self.graph.values[value].op
                # The results of an op need not be fetched together.
                is_certain = self.graph.ops[number].forced or not self._offload
                if is_certain and self._is_needed[number]:
                    spans.append(self._live(value))
            result.append(union(spans))
        return result

    @cached_property
    def least(self) -> list[int]:
        """By event: the bytes that are allocated under every schedule."""
        graph = self.graph
        change = [0] * (len(graph.events) + 1)
        for storage, spans in zip(graph.storages, self._always, strict=True):
            for low, high in spans:
                change[low] += storage.nbytes
                change[high + 1] -= storage.nbytes
        states = sum(graph.ops[number].state for number in self.recomputed)
        return [
            graph.base + states + event.during + held
            for event, held in zip(graph.events, accumulate(change), strict=False)
        ]

    def added_by(self, value: int, end: int) -> list[Span]:
        """When it takes memory in addition to keep a value until ``end``.

        Values made in place share their storage, so only one of them counts.
        """
        storage = self.graph.values[value].storage
        if self.counted[storage] != value:
            return []
        return subtract((self.graph.storages[storage].born, end), self._always[storage])

    @cached_property
    def counted(self) -> list[int]:
        """By storage: the value in it that counts if it is kept; -1 if none can be."""
        ops, values = self.graph.ops, self.graph.values
        return [
            max((n for n in numbers if ops[values[n].op].can_keep), default=-1)
            for numbers in self.values_in
        ]


def union(spans: list[Span]) -> list[Span]:
    """The same events in disjoint spans, in order."""
    result: list[Span] = []
    for low, high in sorted(spans):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        elif low <= high:
            result.append((low, high))
    return result


def subtract(span: Span, others: Iterable[Span]) -> list[Span]:
    """The part of a span that is in none of the others, which are in order."""
    result = []
    low, high = span
    for other_low, other_high in others:
        if low < other_low:
            result.append((low, min(high, other_low - 1)))
        low = max(low, other_high + 1)
    result.append((low, high))
    return [(low, high) for low, high in result if low <= high]
