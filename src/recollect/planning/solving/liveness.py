"""When what is allocated in a step, as far as that is certain: no more than `simulate` counts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate

from recollect.graph.graph import Graph

__all__ = ["Lives", "Span", "union", "without"]

#: From one moment to another, both included.
Span = tuple[int, int]


class Lives:
    """When what is allocated, by moment.

    Args:
        graph: The step.
        offload: Whether values may go to the host: then of none is it certain that it is here.
    """

    def __init__(self, graph: Graph, *, offload: bool = False) -> None:
        self.graph = graph
        self._offload = offload
        self.last = len(graph.events) - 1
        asked: dict[int, int] = {}
        ends: dict[int, int] = {}
        early: set[int] = set()
        for now, event in enumerate(graph.events):
            for number in event.unpacks:
                asked.setdefault(number, now)
            for number in event.frees:
                ends.setdefault(number, now)
        #: By value: the moments from which and until which autograd has been given it.
        self.given: list[list[Span]] = [[] for _ in graph.values]
        #: By value: until when it is held, if kept, because backward will ask for it.
        self.end = [-1] * len(graph.values)
        #: By op: whether it is kept or made again in any schedule, and by when.
        self.is_asked = [False] * len(graph.ops)
        self._asked = [self.last] * len(graph.ops)
        #: By op: when its results that were unpacked are freed.
        self.ends: list[list[int]] = [[] for _ in graph.ops]
        for number, saved in enumerate(graph.saved):
            end = ends.get(number, self.last)
            if number in asked:
                op = graph.values[saved.value].op
                self.is_asked[op] = True
                self._asked[op] = min(self._asked[op], asked[number])
                self.end[saved.value] = max(self.end[saved.value], end)
                self.given[saved.value].append((asked[number], end))
                self.ends[op].append(end)
            if end < asked.get(number, end + 1):
                early.add(saved.value)
        # A tensor freed before it is unpacked is freed in place of another tensor of the value.
        for value in early:
            self.given[value] = []
        self.of_memory: list[list[int]] = [[] for _ in graph.storages]
        for number, each in enumerate(graph.values):
            self.of_memory[each.storage].append(number)

    @cached_property
    def _backwards(self) -> list[int]:
        return sorted(self.graph.needed, reverse=True)

    @cached_property
    def free(self) -> list[list[Span]]:
        """By memory: when it is allocated whatever is kept, or as much elsewhere."""
        result = []
        for memory, values in zip(self.graph.storages, self.of_memory, strict=True):
            spans = [(memory.born, memory.dies)]
            for value in values:
                spans += self.given[value]
                number = self.graph.values[value].op
                # What an op makes need not come from the host together.
                is_certain = self.graph.ops[number].forced or not self._offload
                if is_certain and self.is_wanted[number]:
                    spans.append(self.there(value))
            result.append(union(spans))
        return result

    def there(self, value: int) -> Span:
        """When a value is there that is kept or made again in any schedule."""
        number = self.graph.values[value].op
        born = self.graph.storages[self.graph.values[value].storage].born
        if self.graph.ops[number].forced:
            return (born, self.held_until(value))
        if number in self.again:
            return (self.first[number], self.made_until(value))
        return (self.first[number], min(self.held_until(value), self.made_until(value)))

    def held_until(self, value: int) -> int:
        """Until when a value is there, if it is kept."""
        readers = self.readers.get(value, ())
        return max([self.end[value], *(self.horizon[user] for user in readers)])

    def made_until(self, value: int) -> int:
        """Until when a value is there once it is made again: until all that read it have run."""
        end = self.end[value] if self.given[value] else -1
        return max([end, *(self.early[user] - 1 for user in self.readers.get(value, ()))])

    @cached_property
    def is_wanted(self) -> list[bool]:
        """By op: whether it is kept or made again in any schedule."""
        is_wanted = self.is_asked[:]
        for number in self.again:
            for read in self.graph.ops[number].reads:
                is_wanted[self.graph.values[read].op] = True
        return is_wanted

    @cached_property
    def again(self) -> frozenset[int]:
        """The ops that are made again in any schedule."""
        ops = self.graph.ops
        found: set[int] = set()
        if self._offload:
            return frozenset()
        for number in self._backwards:
            is_wanted = self.is_asked[number] or not found.isdisjoint(self.users[number])
            if is_wanted and not ops[number].can_keep and not ops[number].forced:
                found.add(number)
        return frozenset(found)

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """By value: the ops that read it and are made again in any schedule."""
        found: dict[int, list[int]] = {}
        for number in sorted(self.again):
            for read in self.graph.ops[number].reads:
                found.setdefault(read, []).append(number)
        return found

    @cached_property
    def least(self) -> list[int]:
        """By moment: the bytes that are allocated whatever is kept."""
        graph = self.graph
        change = [0] * (len(graph.events) + 1)
        for memory, spans in zip(graph.storages, self.free, strict=True):
            for low, high in spans:
                change[low] += memory.nbytes
                change[high + 1] -= memory.nbytes
        states = sum(graph.ops[number].state for number in self.again)
        events = graph.events
        return [
            graph.base + states + event.during + held
            for event, held in zip(events, accumulate(change), strict=False)
        ]

    def held(self, value: int, end: int) -> list[Span]:
        """When it costs memory to keep a value until ``end``.

        Values made in place share their memory, so only one of them counts.
        """
        memory = self.graph.values[value].storage
        if self.counts[memory] != value:
            return []
        return without((self.graph.storages[memory].born, end), self.free[memory])

    @cached_property
    def counts(self) -> list[int]:
        """By memory: the value in it that counts if it is kept; -1 if none can be."""
        ops, values = self.graph.ops, self.graph.values
        result = []
        for numbers in self.of_memory:
            can_keep = [n for n in numbers if ops[values[n].op].can_keep]
            result.append(max(can_keep, default=-1))
        return result

    @cached_property
    def horizon(self) -> list[int]:
        """By op: if it is made again, the moment until which what it reads is held for that.

        What is kept to be read is held until the first tensor that needs it is dead, and all that
        were saved after that. The results of the op are among those, or what leads to it.
        """
        horizon = [-1] * len(self.graph.ops)
        for number in self._backwards:
            users = self.users[number]
            certain = [horizon[user] for user in users if user in self.again]
            certain += self.ends[number]
            if certain:
                horizon[number] = max(certain)
            else:
                horizon[number] = min((horizon[user] for user in users), default=-1)
        return horizon

    @cached_property
    def first(self) -> list[int]:
        """By op: the moment by which it has run again, if it does."""
        first = self._asked[:]
        for number in self._backwards:
            users = self.users[number]
            certain = [first[user] for user in users if user in self.again]
            if self.is_asked[number] or certain:
                first[number] = min([first[number], *certain])
            else:
                first[number] = max((first[user] for user in users), default=self.last)
        return first

    @cached_property
    def early(self) -> list[int]:
        """By op: the moment before which it does not run again."""
        early = self._asked[:]
        for number in self._backwards:
            users = self.users[number]
            early[number] = min([early[number], *(early[user] for user in users)])
        return early

    @cached_property
    def users(self) -> list[list[int]]:
        """By op: those that may be made again and read what it makes."""
        graph = self.graph
        users: list[list[int]] = [[] for _ in graph.ops]
        for number in sorted(graph.needed):
            if not graph.ops[number].forced:
                for op in {graph.values[read].op for read in graph.ops[number].reads}:
                    users[op].append(number)
        return users


def union(spans: list[Span]) -> list[Span]:
    """The same moments, in order, none of them twice."""
    result: list[Span] = []
    for low, high in sorted(spans):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        elif low <= high:
            result.append((low, high))
    return result


def without(span: Span, others: Iterable[Span]) -> list[Span]:
    """What of a span is in none of the others, which are in order."""
    result = []
    low, high = span
    for other_low, other_high in others:
        if low < other_low:
            result.append((low, min(high, other_low - 1)))
        low = max(low, other_high + 1)
    result.append((low, high))
    return [(low, high) for low, high in result if low <= high]
