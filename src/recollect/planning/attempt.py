"""A forward under a plan that may run out of memory: whether it can be run once more (P7)."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import nn

from recollect._torch.fsdp import shards_of
from recollect.state.rng import read_streams, settle_streams, write_streams

__all__ = ["Attempt"]


class Attempt:
    """What a forward of ``model`` finds, to be read before it begins. Copies no tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = _state_of(model)
        self._streams = read_streams(())

    def undo(self) -> bool:
        """Put random streams back. Whether the forward that failed has changed nothing else.

        Batch norm, which counts the batches that it has seen, must not see one twice. And other
        processes do not gather a second time what a sharded model would.
        """
        if shards_of(self._model) is not None:
            return False
        now = _state_of(self._model)
        if len(now) != len(self._before):
            return False
        pairs = zip(now, self._before, strict=True)
        if not all(a is b and size == other for (a, size), (b, other) in pairs):
            return False
        write_streams(settle_streams(self._streams))
        return True


def _state_of(model: nn.Module) -> list[tuple[Any, int]]:
    """Tensors and other attributes of modules, each with its version, or its length."""
    tensors = (*model.parameters(), *model.buffers())
    found: list[tuple[Any, int]] = [(tensor, tensor._version) for tensor in tensors]
    for module in model.modules():
        for value in vars(module).values():
            has_length = isinstance(value, Sized) and not isinstance(value, torch.Tensor)
            found.append((value, len(value) if has_length else 0))
    return found
