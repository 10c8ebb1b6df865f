"""The usual way of checkpointing as a plan: every block of a model, as a whole.

A planned model may meet batches for which its blocks are not to be checkpointed. So a block is
wrapped for as long as the plan is applied, and checkpointed while the plan says so.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.options import DEFAULTS
from recollect.region import run_region

__all__ = ["run_blocks", "block_paths", "block_schedule", "unwrap_blocks", "wrap_blocks"]

_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


class _Active(threading.local):
    #: Whether blocks are checkpointed that this thread calls.
    is_on = False


_active = _Active()


class _Block:
    """Called in the place of the forward of a block."""

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not _active.is_on or torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        _active.is_on = False  # what is inside runs again with it, and by then nothing is on
        try:
            return run_region(function, args, kwargs, DEFAULTS)
        finally:
            _active.is_on = True


def run_blocks(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the forward of a model, with the blocks checkpointed that are wrapped."""
    before, _active.is_on = _active.is_on, True
    try:
        return function(*args, **kwargs)
    finally:
        _active.is_on = before


def wrap_blocks(model: nn.Module, paths: Iterable[str]) -> None:
    """Make the modules at ``paths`` blocks."""
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks = {id(modules[path]): (path, modules[path]) for path in paths if path in modules}
    for path, block in blocks.values():
        if OPTIONS in vars(block):
            raise ValueError(
                f"model: its {path} is checkpointed already, and the plan checkpoints it too: "
                "recollect.unwrap it first"
            )
    for _, block in blocks.values():
        wrap_module(block, _Block())


def unwrap_blocks(model: nn.Module) -> None:
    """Undo `wrap_blocks`."""
    for module in [*model.modules()]:
        if isinstance(vars(module).get(OPTIONS), _Block):
            unwrap_module(module)


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
    """What is kept if every block is checkpointed: what goes from one to another; None: no blocks.

    Blocks are told apart by the first number in their path: ``layers.3`` of ``layers.3.mlp.0``.
    """
    found = [_NUMBER.search(op.path) for op in graph.ops]
    blocks = ["" if each is None else each.string[: each.end()].rstrip(".") for each in found]
    if len(set(blocks)) <= 2:
        return None
    makers = {
        graph.values[value].op
        for number, op in enumerate(graph.ops)
        for value in op.reads
        if blocks[graph.values[value].op] != blocks[number]
    }
    crossing = makers.intersection(graph.choices)
    return Schedule(frozenset(crossing)) if crossing else None
