"""Deciding op by op, as far as a lower bound gains by it.

Prices let an op be kept by half. Where little fits, that is far from what a schedule can do. So one
such op is decided both ways, each of which has a bound of its own, and the lesser of the two holds
for all schedules; and again for the one with the least bound, as often as there is time for.

To decide on an op makes it certain what is there and when (`Lives`), and so may leave no choice on
others: what is too large to be kept is made again, and what cannot be made again is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Protocol, TypeVar

from recollect.graph.graph import Graph
from recollect.planning.solving.liveness import Lives, Span, without

__all__ = ["Bounded", "decided", "least_of_all"]


class Bounded(Protocol):
    """A graph some ops of which are decided, and what no schedule of it can be below."""

    lives: Lives
    seconds: float

    def undecided(self) -> Sequence[int]:
        """The ops of which it may be best to decide on one next."""
        ...


T = TypeVar("T", bound=Bounded)


def least_of_all(
    root: T, bound: Callable[[T, Graph], T | None], most: Callable[[float], int]
) -> float:
    """The bound after deciding on some ops; infinite if nothing fits.

    Args:
        root: Where nothing is decided.
        bound: From one in which less is decided, and a graph in which more is; None if that cannot
            be.
        most: From the least so far: how many bounds to work out.
    """
    found = [(root.seconds, 0, root)]
    count = 0
    while found:
        seconds, _, node = found[0]
        ops = node.undecided()
        if not ops or count + 2 * len(ops) > most(seconds):
            return seconds
        heappop(found)
        pairs = []
        for op in ops:
            graphs = [_with(node.lives.graph, {op: is_kept}) for is_kept in (True, False)]
            pairs.append([bound(node, graph) for graph in graphs])
        count += 2 * len(ops)
        for child in max(pairs, key=lambda pair: _gain(pair, seconds)):
            if child is not None:
                count += 1
                heappush(found, (max(seconds, child.seconds), count, child))
    return float("inf")


def _gain(pair: Sequence[Bounded | None], seconds: float) -> tuple[float, float]:
    """What it is worth to decide on an op: by how much the bound is higher, either way."""
    gains = [float("inf") if each is None else each.seconds - seconds for each in pair]
    return min(gains), max(gains)


def _with(graph: Graph, decisions: dict[int, bool]) -> Graph:
    """The same with some ops that must be kept, and some that cannot be."""
    ops = list(graph.ops)
    for number, is_kept in decisions.items():
        op = ops[number]
        ops[number] = replace(op, forced=True) if is_kept else replace(op, can_keep=False)
    return replace(graph, ops=ops)


def decided(graph: Graph, budget: int) -> Lives | None:
    """Decide on all ops on which there is no choice; None if nothing fits."""
    while True:
        lives = Lives(graph)
        if max(lives.least, default=graph.base) > budget:
            return None
        decisions: dict[int, bool] = {}
        for number in graph.choices:
            can_keep, can_drop = _can_keep(lives, number, budget), _can_drop(lives, number, budget)
            if not can_keep and not can_drop:
                return None
            if not can_keep or not can_drop:
                decisions[number] = can_keep
        if not decisions:
            return lives
        graph = _with(graph, decisions)


def _fits(lives: Lives, value: int, span: Span, budget: int) -> bool:
    """Whether there is room for a value, where it is not counted already."""
    each = lives.graph.values[value]
    room = budget - each.nbytes
    spans = without(span, lives.free[each.memory])
    return all(max(lives.least[low : high + 1]) <= room for low, high in spans)


def _can_keep(lives: Lives, number: int, budget: int) -> bool:
    graph = lives.graph
    for value in graph.results[number]:
        memory = graph.values[value].memory
        span = (graph.memories[memory].born, lives.held_until(value))
        if not _fits(lives, value, span, budget):
            return False
    return True


def _can_drop(lives: Lives, number: int, budget: int) -> bool:
    """Whether there is room for an op to be made again, and for what it reads."""
    if not lives.is_wanted[number]:
        return True
    graph, op = lives.graph, lives.graph.ops[number]
    if max(lives.least) + op.state > budget:
        return False
    first = lives.first[number]
    for value in graph.results[number]:
        if not _fits(lives, value, (first, lives.made_until(value)), budget):
            return False
    for read in op.reads:
        maker = graph.values[read].op
        # It is kept, until that which reads it is no more needed, or made, until that has run.
        kept = max(lives.held_until(read), lives.horizon[number])
        made = max(lives.made_until(read), lives.early[number] - 1)
        if graph.ops[maker].forced:
            span = (graph.memories[graph.values[read].memory].born, kept)
        else:
            until = min(kept, made) if graph.ops[maker].can_keep else made
            is_there = lives.is_wanted[maker]
            span = (min(first, lives.first[maker]) if is_there else first, until)
        if not _fits(lives, read, span, budget):
            return False
    return True
