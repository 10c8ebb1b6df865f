"""What the usual ways of checkpointing come to on the same step, by the same simulator."""

from __future__ import annotations

import re
from collections import defaultdict

from recollect.planning.graph import Graph
from recollect.planning.simulate import Schedule, simulate
from recollect.policy.op_sets import ATTENTION, MATMULS
from recollect.report.picture import Point

__all__ = ["peers_of"]

_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


def peers_of(graph: Graph) -> list[Point]:
    """Every block checkpointed, and that with products and attention kept."""
    boundaries = _boundaries(graph)
    if not boundaries:
        return []
    dear = {n for n in graph.choices if graph.ops[n].name in MATMULS | ATTENTION}
    return [
        _point(graph, "every block", boundaries),
        _point(graph, "and products kept", boundaries | dear),
    ]


def _point(graph: Graph, name: str, kept: set[int]) -> Point:
    outcome = simulate(graph, Schedule(frozenset(kept)))
    return Point(f"{name} (simulated)", outcome.peak, outcome.seconds, "peer")


def _boundaries(graph: Graph) -> set[int]:
    """The ops whose results go from one block to another; blocks are told by their numbers."""
    blocks = [_block(op.path) for op in graph.ops]
    if len(set(blocks)) <= 2:
        return set()
    crossing: dict[int, bool] = defaultdict(bool)
    for number, op in enumerate(graph.ops):
        for value in op.reads:
            maker = graph.values[value].op
            crossing[maker] |= blocks[maker] != blocks[number]
    return {n for n in graph.choices if crossing[n]}


def _block(path: str) -> str:
    """The outermost module with a number for a name: ``layers.3`` of ``layers.3.mlp.0``."""
    found = _NUMBER.search(path)
    return path[: found.end()].rstrip(".") if found else ""
