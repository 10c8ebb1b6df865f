"""Ops that cannot all be made again, or not while something else is kept.

What is made again for the first of a row of ops that backward asks for stays until the others have
been asked for. A cut counts that for two ops at a time; how many bytes come together along a row is
found here, for solutions that would exceed a budget by it. With R of the ops made again, each of

    R <= all of them - 1                                    (it is too much whatever else is there)
    memory + bytes * (R - all of them + 1) <= limit         (at a moment)

holds of every schedule: if not all are made again, the second is weaker than the limit alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from recollect.planning.solving.liveness import Lives, Span, union, without

__all__ = ["Window", "Windows"]

#: How many windows to look for at a time.
_MOST = 8
#: The part of a budget that counts as nothing.
_NOTHING = 1e-6


@dataclass(frozen=True, slots=True)
class Window:
    """Ops that have to be there together if all of them are made again.

    Args:
        ops: Which.
        moment: When; -1 if that is too much whatever else is there.
        nbytes: How many bytes that is, beside what is counted anyway.
    """

    ops: frozenset[int]
    moment: int = -1
    nbytes: int = 1


class Windows:
    """Finds windows in what a solution makes again.

    Args:
        lives: When what is allocated.
        limits: By moment, the bytes that may be.
        paired: By value, when it is counted if it is made again and something that reads it too.
        budget: The bytes that may ever be allocated.
        tries: How often to see what comes together.
    """

    def __init__(
        self,
        lives: Lives,
        limits: Sequence[int],
        paired: Mapping[int, list[Span]],
        budget: int,
        tries: int,
    ) -> None:
        self._lives = lives
        self._limits = limits
        self._paired = paired
        self._budget = budget
        self._choices = frozenset(lives.graph.choices)
        self.tries = tries

    def find(
        self, again: frozenset[int], memory: Sequence[float], parts: Mapping[int, float]
    ) -> Iterator[Window]:
        """Those because of which a solution does not fit.

        Args:
            again: What it makes again.
            memory: By moment, the bytes that are allocated in the mixture of which it is one.
            parts: By op, in how much of that mixture it is made again.
        """
        ops = sorted(again & self._choices)
        lives = self._without(ops)
        if max(lives.least) > self._budget:
            yield from self._absolute(ops, parts)
        more = self._made(lives, ops)
        pairs = zip(memory, more, self._limits, strict=True)
        over = [held + each - limit if each else 0 for held, each, limit in pairs]
        done: list[Span] = []
        for now in sorted(range(len(over)), key=lambda n: -over[n]):
            if over[now] <= self._budget * _NOTHING or self.tries <= 0 or len(done) >= _MOST:
                return
            if not any(low <= now <= high for low, high in done):
                window, span = self._at(now, ops, memory[now], parts)
                done.append(span)
                yield window

    def _without(self, ops: Sequence[int]) -> Lives:
        self.tries -= 1
        return self._lives.dropping(ops)

    def _made(self, lives: Lives, ops: Sequence[int]) -> list[int]:
        """By moment: the bytes of what ops make again, where they are not counted already."""
        graph = lives.graph
        change = [0] * (len(self._limits) + 1)
        for value in [v for op in ops if op in lives.again for v in graph.results[op]]:
            each = graph.values[value]
            # Of values made in place only one is sure to be there.
            if len(lives.of_memory[each.memory]) == 1 or lives.counts[each.memory] == value:
                counted = self._lives.free[each.memory]
                if value in self._paired:
                    counted = union([*counted, *self._paired[value]])
                for low, high in without(lives.there(value), counted):
                    change[low] += each.nbytes
                    change[high + 1] -= each.nbytes
        return list(accumulate(change))[:-1]

    def _absolute(self, ops: Sequence[int], parts: Mapping[int, float]) -> Iterator[Window]:
        def is_bad(some: Sequence[int]) -> bool:
            return max(self._without(some).least) > self._budget

        count = 0
        while ops and self.tries > 0 and count < _MOST and is_bad(ops):
            some = self._fewest(ops, is_bad, parts)
            yield Window(frozenset(some))
            ops = [op for op in ops if op > some[0]]
            count += 1

    def _at(
        self, now: int, ops: Sequence[int], memory: float, parts: Mapping[int, float]
    ) -> tuple[Window, Span]:
        """A window at a moment, and when what it makes again is there."""
        limit = self._limits[now] + self._budget * _NOTHING

        def is_bad(some: Sequence[int]) -> bool:
            more = self._made(self._without(some), some)[now]
            return more > 0 and memory + more > limit

        some = self._fewest(ops, is_bad, parts)
        lives = self._without(some)
        more = self._made(lives, some)
        there = [n for n, each in enumerate(more) if each]
        is_absolute = lives.least[now] > self._budget
        is_absolute |= self._lives.least[now] + more[now] > self._limits[now]
        window = Window(frozenset(some)) if is_absolute else Window(frozenset(some), now, more[now])
        return window, (there[0], there[-1])

    def _fewest(
        self,
        ops: Sequence[int],
        is_bad: Callable[[Sequence[int]], bool],
        parts: Mapping[int, float],
    ) -> list[int]:
        """Few of some ops that are still bad, close to each other, and mostly made again."""
        high = _first(lambda n: is_bad(ops[:n]), 1, len(ops))
        low = _first(lambda n: not is_bad(ops[n:high]), 1, high) - 1
        some = list(ops[low:high])
        for op in sorted(some, key=lambda n: parts.get(n, 0.0)):
            fewer = [each for each in some if each != op]
            if self.tries > 0 and fewer and is_bad(fewer):
                some = fewer
        return some


def _first(is_true: Callable[[int], bool], low: int, high: int) -> int:
    """The first number from ``low`` on of which something is true, if it is true of ``high``."""
    while low < high:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle + 1
    return low
