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
    """The live ranges of values and storages."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        last = len(graph.events) - 1
        #: By value: the spans from unpacking a saved tensor of it to freeing or dropping that.
        self._unpacked: list[list[Span]] = [[] for _ in graph.values]
        #: By value: the last event until which a saved tensor holds it if it is kept; -1: none.
        self.saved_until = [-1] * len(graph.values)
        #: By op: whether backward unpacks any of its results, and when each is freed.
        self.is_unpacked = [False] * len(graph.ops)
        self._frees: list[list[int]] = [[] for _ in graph.ops]
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
            end, op = frees.get(number, last), graph.values[saved.value].op
            if number in unpacks:
                self.is_unpacked[op] = True
                self.saved_until[saved.value] = max(self.saved_until[saved.value], end)
                self._unpacked[saved.value].append((unpacks[number], drops.get(number, end)))
                self._frees[op].append(end)
            if end < unpacks.get(number, end + 1):
                freed_early.add(saved.value)
        # A tensor freed before it is unpacked is freed in place of another tensor of the value.
        for value in freed_early:
            self._unpacked[value] = []
        self._values_in: list[list[int]] = [[] for _ in graph.storages]
        for number, each in enumerate(graph.values):
            self._values_in[each.storage].append(number)

    @cached_property
    def inputs_until(self) -> list[int]:
        """By op: if it is recomputed, the event until which its inputs are held for that.

        A kept input is held until the first tensor that needs it is dead, and all that were saved
        after that. The results of the op are among those, or what leads to it.
        """
        graph = self.graph
        until = [-1] * len(graph.ops)
        users: list[list[int]] = [[] for _ in graph.ops]
        for number in sorted(graph.needed, reverse=True):
            of_users = (until[user] for user in users[number])
            until[number] = max(self._frees[number], default=min(of_users, default=-1))
            if not graph.ops[number].forced:
                for read in graph.ops[number].reads:
                    users[graph.values[read].op].append(number)
        return until

    @cached_property
    def _always(self) -> list[list[Span]]:
        """By storage: when it, or as much elsewhere, is allocated under every schedule."""
        result = []
        for storage, values in zip(self.graph.storages, self._values_in, strict=True):
            spans = [(storage.born, storage.dies)]
            for value in values:
                spans += self._unpacked[value]
                if self.graph.ops[self.graph.values[value].op].forced:
                    spans.append((storage.born, self.saved_until[value]))
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
        return [
            graph.base + event.during + held
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
            for numbers in self._values_in
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
