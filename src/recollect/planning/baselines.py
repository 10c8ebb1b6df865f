"""What the usual ways of checkpointing come to on the same step, by the same simulator."""

from __future__ import annotations

import re
from collections import defaultdict

from torch import nn

from recollect.graph.graph import Graph
from recollect.graph.simulate import Schedule, simulate
from recollect.policy.op_sets import ATTENTION, MATMULS
from recollect.report.plan_report import Point

__all__ = ["block_paths", "block_schedule", "peers_of"]

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


def block_paths(graph: Graph, model: nn.Module) -> tuple[str, ...]:
    """The blocks of ``model``: its outermost modules with a number for a name that are called."""
    lists = {n for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict))}
    found: dict[str, None] = {}
    for op in graph.ops:
        parts = op.path.split(".")
        prefixes = [".".join(parts[: n + 1]) for n, part in enumerate(parts) if part.isdecimal()]
        found |= dict.fromkeys([each for each in prefixes if each not in lists][:1])
    return tuple(found)


def block_schedule(graph: Graph) -> Schedule | None:
    """What blocks come to that are checkpointed each as a whole; None if there are none."""
    boundaries = _boundaries(graph)
    return Schedule(frozenset(boundaries)) if boundaries else None


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
