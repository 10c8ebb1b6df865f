"""Training steps on a CUDA device: time, CPU time of forward, memory, and right gradients.

Small blocks leave the device waiting for the CPU, so that every microsecond of bookkeeping counts;
large ones keep it busy, so that only what is computed again counts. Both are here. Takes a minute
and a half on an H200.

    PYTHONPATH=src python3 benchmarks/gpu.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from _decoder import decoder
from _measure import (
    Spread,
    clear_gradients,
    deterministic,
    gradients,
    interleaved,
    largest_difference,
    steadied,
)
from _modes import MODES, PLAIN, Mode, run_blocks
from _table import Progress, table
from torch import Tensor

GIB = 2**30
TIME_COLUMNS = ["x plain", "step ms", "quartiles", "forward CPU ms"]
COLUMNS = ["", *TIME_COLUMNS, "held GiB", "peak GiB", "gradients off by"]

SHOWN = (
    PLAIN,
    "torch non-reentrant",
    "torch reentrant",
    "torch selective, function",
    "recollect.checkpoint",
    "compat reentrant",
    "selective, function",
    "replay, nothing kept",
    "replay, attention",
    "replay, ops",
)


@dataclass(frozen=True)
class Config:
    """A decoder, its input, and how often each mode is timed."""

    depth: int
    width: int
    heads: int
    batch: int
    tokens: int
    dropout: float
    rounds: int

    def __str__(self) -> str:
        shape = f"{self.depth} blocks, width {self.width}, {self.batch} x {self.tokens} tokens"
        return f"{shape}, dropout {self.dropout}, bfloat16"


CONFIGS = (
    Config(depth=24, width=1024, heads=16, batch=4, tokens=1024, dropout=0.1, rounds=25),
    Config(depth=24, width=1024, heads=16, batch=4, tokens=1024, dropout=0.0, rounds=25),
    Config(depth=12, width=4096, heads=32, batch=4, tokens=4096, dropout=0.0, rounds=6),
)


@dataclass(frozen=True)
class Step:
    """What one step took: seconds, and bytes over what was allocated before it."""

    seconds: float
    forward_cpu_seconds: float  # until forward has returned, whether or not the device is done
    held: int
    peak: int


class Bench:
    """A model on the device, and a training step of it in every mode."""

    def __init__(self, config: Config) -> None:
        width, dtype = config.width, torch.bfloat16
        self.blocks = decoder(
            config.depth, width, config.heads, config.dropout, device="cuda", dtype=dtype
        )
        shape = (config.batch, config.tokens, width)
        self.x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
        self.grad = torch.randn(shape, device="cuda", dtype=dtype)

    def gradients_of(self, mode: Mode) -> list[Tensor]:
        """Return what one step of `mode` gives, from the same seed at every call."""
        clear_gradients(self.blocks, self.x)
        torch.manual_seed(1)
        run_blocks(mode, self.blocks, self.x).backward(self.grad)
        found = gradients(self.blocks, self.x)
        clear_gradients(self.blocks, self.x)
        return found

    def step(self, mode: Mode) -> Step:
        """Go forward and backward once, from an idle device to an idle device."""
        clear_gradients(self.blocks, self.x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        y = run_blocks(mode, self.blocks, self.x)
        forward_end = time.perf_counter()
        held = torch.cuda.memory_allocated()  # the host's own count: there is nothing to wait for
        y.backward(self.grad)
        torch.cuda.synchronize()
        end = time.perf_counter()
        peak = torch.cuda.max_memory_allocated()
        return Step(end - start, forward_end - start, held - before, peak - before)

    def sampler(self, mode: Mode) -> Callable[[], Step]:
        """Return a function that measures one step of `mode`."""
        return lambda: self.step(mode)


def differences(bench: Bench) -> dict[str, float]:
    """Return how far each mode's gradients are from plain's; from a second run's, for plain."""
    with deterministic():
        plain = bench.gradients_of(MODES[PLAIN])
        return {name: largest_difference(bench.gradients_of(MODES[name]), plain) for name in SHOWN}


def report(steps: Mapping[str, Sequence[Step]], difference: Mapping[str, float]) -> str:
    """Lay out one row per mode."""
    seconds = steadied({name: [s.seconds for s in rounds] for name, rounds in steps.items()})
    plain = statistics.median(seconds[PLAIN])
    rows = []
    for name, rounds in steps.items():
        times = _time_cells(Spread.of(seconds[name]), plain, rounds)
        rows.append([name, *times, *_memory_cells(rounds), f"{difference[name]:.1e}"])
    return table(COLUMNS, rows)


def _time_cells(seconds: Spread, plain: float, steps: Sequence[Step]) -> list[str]:
    return [
        f"{seconds.median / plain:.3f}",
        f"{seconds.median * 1e3:.2f}",
        f"{seconds.low * 1e3:.2f}..{seconds.high * 1e3:.2f}",
        f"{statistics.median(step.forward_cpu_seconds for step in steps) * 1e3:.2f}",
    ]


def _memory_cells(steps: Sequence[Step]) -> list[str]:
    held = statistics.median(step.held for step in steps)
    peak = statistics.median(step.peak for step in steps)
    return [f"{held / GIB:.3f}", f"{peak / GIB:.3f}"]


def main() -> None:
    """Measure every configuration in turn and print its table."""
    if not torch.cuda.is_available():
        raise SystemExit("This needs a CUDA device, and torch.cuda.is_available() says: none.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; interleaved, medians")
    for config in CONFIGS:
        bench = Bench(config)
        difference = differences(bench)
        samplers = {name: bench.sampler(MODES[name]) for name in SHOWN}
        progress = Progress("round", config.rounds)
        steps = interleaved(samplers, config.rounds, warmup=2, progress=progress)
        print(f"\n{config}\n\n{report(steps, difference)}", flush=True)
        del bench, samplers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
