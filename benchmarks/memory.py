"""The bytes that a checkpointed step holds and needs, ours beside torch's.

Counted from the allocator's own events on a CPU: exact, and the same at every run.

    python benchmarks/memory.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from _decoder import decoder
from _measure import Memory, clear_gradients, held_and_peak
from _modes import MODES, Mode, run_blocks
from _table import table
from torch import Tensor, nn

DEPTH, WIDTH, HEADS, BATCH, TOKENS, DROPOUT = 6, 128, 4, 4, 128, 0.1


def check_by_hand() -> None:
    """Measure a step whose bytes can be counted by hand, and stop if the two disagree."""
    x = torch.randn(1000, requires_grad=True)

    def forward() -> Tensor:
        return x.exp().sin().sum()

    forward().backward()
    x.grad = None
    size = x.nbytes
    # Held: what exp returned, which exp and sin both keep for backward, and the sum. Peak, in the
    # backward of sin: what exp returned, its cosine, and that times the gradient that came in; the
    # sum, and its gradient.
    by_hand = Memory(held=size + 4, peak=3 * size + 4 + 4)
    measured = held_and_peak(forward, lambda loss: loss.backward())
    if measured != by_hand:
        raise SystemExit(f"The measuring is wrong: {by_hand} by hand, {measured} measured.")


def measure(mode: Mode, blocks: nn.ModuleList, x: Tensor) -> Memory:
    """Count the bytes of one step of `mode`."""
    grad = torch.ones_like(x)

    def forward() -> Tensor:
        return run_blocks(mode, blocks, x)

    def backward(y: Tensor) -> None:
        y.backward(grad)

    for _ in range(2):  # the first makes what is made only once
        clear_gradients(blocks, x)
        memory = held_and_peak(forward, backward)
    return memory


def report(measured: Mapping[str, Memory]) -> str:
    """Lay out one row per mode."""
    header = ["bytes", "held after forward", "less torch's", "peak of the step", "less torch's"]
    return table(header, [_row(name, measured) for name in measured])


def _row(name: str, measured: Mapping[str, Memory]) -> list[str]:
    ours, rival = measured[name], MODES[name].rival
    if rival is None:
        return [name, f"{ours.held:,}", "", f"{ours.peak:,}", ""]
    held, peak = ours.held - measured[rival].held, ours.peak - measured[rival].peak
    return [name, f"{ours.held:,}", f"{held:+,}", f"{ours.peak:,}", f"{peak:+,}"]


def main() -> None:
    """Measure every mode and print the table."""
    torch.set_num_threads(1)  # some kernels allocate scratch space for every thread
    check_by_hand()
    blocks = decoder(DEPTH, WIDTH, HEADS, DROPOUT)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    measured = {name: measure(mode, blocks, x) for name, mode in MODES.items()}
    print(f"{DEPTH} decoder blocks, width {WIDTH}, {BATCH} x {TOKENS} tokens, dropout {DROPOUT}")
    print(f"CPU, float32, torch {torch.__version__}; over parameters and input, with gradients\n")
    print(report(measured))


if __name__ == "__main__":
    main()
