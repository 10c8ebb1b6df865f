"""Compiled models to plan for, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests._support import measure
from tests.planning._models import Made, made, static_bytes


class Compiled(Made):
    """A case whose model is compiled.

    ``bare``: the model that was compiled.
    """

    def __init__(self, case: str, how: Callable[[nn.Module], nn.Module]) -> None:
        plain = made(case)
        self.bare = plain.model
        super().__init__(how(plain.model), plain.batch, plain.loss)

    def outcome(self, seed: int = 1) -> list[Tensor]:
        """The gradients and buffers after a step, and the next random number."""
        with self._undone():
            self.step(seed)
            found = [p.grad.clone() for p in self.bare.parameters() if p.grad is not None]
            found += [buffer.clone() for buffer in self.bare.buffers()]
            return [*found, torch.rand(1)]

    def peak(self) -> int:
        """The peak of a step, in bytes."""
        with self._undone():
            memory = measure(self.forward, lambda out: self.loss_of(out).backward())
            return static_bytes(self.bare) + memory.peak

    @contextmanager
    def _undone(self) -> Iterator[None]:
        buffers = [buffer.clone() for buffer in self.bare.buffers()]
        self.bare.zero_grad()
        yield
        for buffer, before in zip(self.bare.buffers(), buffers, strict=True):
            buffer.copy_(before)
        self.bare.zero_grad()


def as_it_is(model: nn.Module) -> Any:
    """Compiled for ops to run as they are."""
    return torch.compile(model, backend="aot_eager")


def in_blocks(model: nn.Module) -> nn.Module:
    """With each block compiled by itself."""
    for block in model.layers:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    return model
