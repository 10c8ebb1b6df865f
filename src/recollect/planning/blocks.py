"""The usual way of checkpointing as a plan: every block of a model, as a whole.

A planned model may meet batches for which its blocks are not to be checkpointed. So a block is
wrapped for as long as the plan is applied, and checkpointed while the plan says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.options import DEFAULTS
from recollect.region import run_region
from recollect.replay.planned_ops import Decisions

__all__ = ["Blocks", "unwrap_blocks", "wrap_blocks"]


class _Active(threading.local):
    #: Whether blocks are checkpointed that this thread calls.
    is_on = False


_active = _Active()


class _Block:
    """What is called in the place of the forward of a block."""

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


class Blocks(Decisions):
    """The decision to checkpoint the blocks that are wrapped, and nothing else."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__({})

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the forward of the model, with its blocks checkpointed."""
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
