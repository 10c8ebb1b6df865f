"""Compiled models to plan for, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recollect._torch.inductor import backend_in, compiler_context
from recollect.compiled.backend import Backend, Call, Compiler, Notes
from recollect.compiled.split import ObservingSplit, SeenGraph
from tests._support import measure
from tests.planning._models import Made, Mixture, made, static_bytes


class Compiled(Made):
    """A case whose model is compiled.

    ``bare``: the model that was compiled.
    """

    def __init__(self, case: str, how: Callable[[nn.Module], nn.Module]) -> None:
        plain = dense_mixture() if case == "moe" else made(case)
        self.bare = plain.model
        super().__init__(how(plain.model), plain.batch, plain.loss)

    def step(self, seed: int | None = None) -> None:
        """Forward and backward, with no gradients from before."""
        self.bare.zero_grad()
        super().step(seed)

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
            self.step()
            self.bare.zero_grad()
            memory = measure(self.forward, lambda out: self.loss_of(out).backward(), warm_up=False)
            return static_bytes(self.bare) + memory.peak

    @contextmanager
    def _undone(self) -> Iterator[None]:
        buffers = [buffer.clone() for buffer in self.bare.buffers()]
        self.bare.zero_grad()
        yield
        for buffer, before in zip(self.bare.buffers(), buffers, strict=True):
            buffer.copy_(before)
        self.bare.zero_grad()


class DenseMixture(Mixture):
    """Every expert computes every token: dynamo cannot compile a loop that breaks its graph."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).reshape(-1, x.shape[-1])
        scores = self.gate(h).softmax(-1)
        top, chosen = scores.topk(2)
        weights = torch.zeros_like(scores).scatter(-1, chosen, top)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            out = out + expert(h) * weights[:, number, None]
        return x + out.view_as(x)


def dense_mixture() -> Made:
    """The case "moe" with layers that can be compiled."""
    plain = made("moe")
    plain.model.layers = nn.ModuleList(DenseMixture() for _ in range(2))
    return plain


def as_it_is(model: nn.Module) -> Any:
    """Compiled for ops to run as they are."""
    return torch.compile(model, backend="aot_eager")


def in_blocks(model: nn.Module) -> nn.Module:
    """With each block compiled by itself."""
    for block in model.layers:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    return model


def observing(notes: Notes | None = None) -> Backend:
    """A backend that runs ops as they are, and keeps the joint graphs that it has seen."""
    module = torch.compile(nn.Linear(1, 1), backend="aot_eager")
    compiler = Compiler.of(backend_in(compiler_context(module)))
    assert compiler is not None
    return Backend(compiler, ObservingSplit(), notes or Notes())


def seen(function: Callable[..., Tensor], *inputs: Tensor) -> SeenGraph:
    """The joint graph of a function of which all is in one graph."""
    backend = observing()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs).sum().backward()
    (graph,) = backend.split.seen  # type: ignore[union-attr]
    return graph


def calls_of(function: Callable[..., Tensor], *inputs: Tensor) -> list[Call]:
    """The calls of compiled graphs in a step; the function may break its graph."""
    notes = Notes(calls=[])
    torch.compile(function, backend=observing(notes))(*inputs).sum().backward()
    return notes.calls or []
