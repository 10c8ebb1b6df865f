"""torch.compile's own budget, and plans of recollect for the memory that each of its steps took.

A Llama of transformers and a convolutional net, forward and backward. For each fraction that
torch.compile is given as ``activation_memory_budget``, its step is measured; then a plan for the
compiled model is made whose budget is the peak of that step. Times are relative to the eager step,
measured in turn. Peaks are totals, parameters and gradients included.

    PYTHONPATH=src python3 benchmarks/compile_budgets.py [--models llama conv] [--budgets 0.5 0.2]
        [--layers N] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _measure import held_and_peak
from _table import table
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from transformers import LlamaConfig, LlamaForCausalLM

import recollect

GIB = 2**30
HEADER = ["", "x eager", "peak GiB", "budget GiB"]
ON_CUDA = torch.cuda.is_available()


class ConvBlock(nn.Module):
    """A residual block as in a ResNet: three convolutions, each with BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 4
        sizes = [(width, inner, 1), (inner, inner, 3), (inner, width, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, k, padding=k // 2, bias=False) for i, o, k in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to the same shape."""
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = torch.relu(norm(conv(y)))
        return x + y


def llama(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Layers as those of a Llama of 1.1 billion parameters, and a batch."""
    width, inner, vocabulary, shape = (2048, 5632, 32000, (8, 2048))
    if not ON_CUDA:
        width, inner, vocabulary, shape = (64, 176, 256, (2, 64))
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 16 if width < 2048 else 32,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=shape[1],
        use_cache=False,
    )
    tokens = torch.randint(0, vocabulary, shape)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def conv(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Blocks of convolutions and BatchNorm, and images."""
    width, side, batch = (512, 56, 64) if ON_CUDA else (32, 16, 4)
    model = nn.Sequential(*(ConvBlock(width) for _ in range(layers)))
    return model, {"input": torch.randn(batch, width, side, side)}


class Step:
    """Forward and backward of a model."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        device, dtype = ("cuda", torch.bfloat16) if ON_CUDA else ("cpu", torch.float32)
        self.model = model.to(device, dtype)
        self.batch = {
            name: each.to(device, dtype if each.is_floating_point() else None)
            for name, each in batch.items()
        }

    def loss(self, call: Callable[..., Any]) -> Tensor:
        """Of one forward."""
        output = call(**self.batch)
        return output.loss if hasattr(output, "loss") else output.float().square().mean()

    def run(self, call: Callable[..., Any]) -> None:
        """One step."""
        self.model.zero_grad()
        self.loss(call).backward()

    def seconds(self, call: Callable[..., Any]) -> float:
        """Of one step."""
        self._wait()
        start = time.perf_counter()
        self.run(call)
        self._wait()
        return time.perf_counter() - start

    def measured(self, call: Callable[..., Any], rounds: int) -> tuple[float, int]:
        """Its time as a multiple of the eager step's, and its peak."""
        for _ in range(2):
            self.run(call)
        pairs = [(self.seconds(self.model), self.seconds(call)) for _ in range(rounds)]
        ratio = statistics.median(after / before for before, after in pairs)
        return ratio, max(self._peak(call) for _ in range(2))

    def _peak(self, call: Callable[..., Any]) -> int:
        self.model.zero_grad()
        if not ON_CUDA:
            held = sum(each.nbytes for each in [*self.model.parameters(), *self.model.buffers()])
            return held + held_and_peak(lambda: self.loss(call), Tensor.backward).peak
        torch.cuda.reset_peak_memory_stats()
        self.run(call)
        return torch.cuda.max_memory_allocated()

    def _wait(self) -> None:
        if ON_CUDA:
            torch.cuda.synchronize()


def rows(name: str, step: Step, fractions: list[float], rounds: int) -> Iterator[list[str]]:
    """Eager, compiled, and for each fraction torch's split and ours."""

    def row(what: str, found: tuple[float, int], budget: int | None = None) -> list[str]:
        kept = "" if budget is None else f"{budget / GIB:.3f}{'' if found[1] <= budget else ' NO'}"
        return [f"{name}, {what}", f"{found[0]:.3f}", f"{found[1] / GIB:.3f}", kept]

    yield row("eager", step.measured(step.model, rounds))
    peaks = []
    for fraction in [1.0, *fractions]:
        torch.compiler.reset()
        with functorch_config.patch(activation_memory_budget=fraction):
            found = step.measured(torch.compile(step.model), rounds)
        peaks.append(found[1])
        yield row(f"torch.compile, {fraction}", found)
    step.model.zero_grad()
    torch.compiler.reset()
    model = torch.compile(step.model)
    frontier = recollect.frontier(
        model, step.batch, loss=lambda output: step.loss(lambda **_: output)
    )
    for peak in peaks[1:]:
        step.model.zero_grad()
        try:
            plan = frontier.plan_for(peak)
        except recollect.InfeasibleBudget as error:
            yield [f"{name}, plan", "", "", f"{peak / GIB:.3f}: least {error.least / GIB:.3f}"]
            continue
        with plan.applied(model):
            yield row("plan", step.measured(model, rounds), peak)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=("llama", "conv"), default=("llama", "conv"))
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.2])
    parser.add_argument("--layers", type=int, default=22 if ON_CUDA else 3)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    found = []
    for name in given.models:
        torch.manual_seed(0)
        step = Step(*(llama if name == "llama" else conv)(given.layers))
        for each in rows(f"{name}, {given.layers} layers", step, given.budgets, given.rounds):
            print(*each, sep="  ", flush=True)
            found.append(each)
    print(table(HEADER, found))


if __name__ == "__main__":
    main()
