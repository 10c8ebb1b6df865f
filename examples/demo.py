"""Train a small language model plain and with each engine of recollect, and compare them.

The text is this file's own, the model a decoder with dropout. All variants start from the same
weights and take every step on the same batch from the same seed, so that losses and gradients must
agree to the last bit; if any do not, the exit code is 1. The bytes are exact: they come from the
allocator's own events.

    python examples/demo.py [--steps N]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect

# The decoder block and the measuring are shared with the benchmarks, which are scripts as this is.
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from _decoder import DecoderBlock
from _measure import Memory, bitwise_equal, clear_gradients, gradients, held_and_peak
from _table import Progress, table

DEPTH, WIDTH, HEADS, DROPOUT = 4, 128, 4, 0.1
BATCH, CONTEXT = 8, 64

aten = torch.ops.aten

PRODUCTS = [aten.mm, aten._scaled_dot_product_flash_attention_for_cpu]

# The options of each variant for `recollect.checkpointed`; None leaves the model as it is.
PLAIN = "plain"
VARIANTS: Mapping[str, dict[str, object] | None] = {
    PLAIN: None,
    "rerun (the default)": {},
    "reentrant": {"engine": "reentrant"},
    "selective: keep products": {"policy": PRODUCTS},
    "replay": {"engine": "replay"},
    "replay: keep products": {"engine": "replay", "policy": PRODUCTS},
}

LINES = """\
    import recollect
    for block in model.blocks:
        recollect.checkpointed(block)
"""


class LanguageModel(nn.Module):
    """A decoder over characters, which returns the loss of predicting each one's successor."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(DecoderBlock(WIDTH, HEADS, DROPOUT) for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the mean loss over batch x (context + 1) characters."""
        seen, successors = characters[:, :-1], characters[:, 1:]
        x = self.embedding(seen) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), successors.flatten())


class Text:
    """This file as a sequence of character numbers, and batches cut out of it."""

    def __init__(self) -> None:
        text = Path(__file__).read_text(encoding="utf-8")
        alphabet = sorted(set(text))
        self.vocabulary = len(alphabet)
        self._characters = torch.tensor([alphabet.index(character) for character in text])

    def batch(self, number: int) -> Tensor:
        """Return batch x (context + 1) characters, the same ones at every call."""
        generator = torch.Generator().manual_seed(number)
        latest = len(self._characters) - CONTEXT - 1
        starts = torch.randint(latest, (BATCH, 1), generator=generator)
        return self._characters[starts + torch.arange(CONTEXT + 1)]


class Run:
    """One variant in training."""

    def __init__(self, model: LanguageModel, options: dict[str, object] | None) -> None:
        self.model = copy.deepcopy(model)
        if options is not None:
            for block in self.model.blocks:
                recollect.checkpointed(block, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.seconds: list[float] = []
        self.losses: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.equal_losses = self.equal_gradients = True

    def step(self, batch: Tensor, seed: int) -> None:
        """Take one optimizer step, and note its time, its loss and its gradients."""
        torch.manual_seed(seed)  # dropout's
        clear_gradients(self.model)
        start = time.perf_counter()
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.detach())
        self.gradients = gradients(self.model)

    def compare(self, plain: Run) -> None:
        """Compare the latest step with that of `plain`."""
        self.equal_losses &= bitwise_equal(self.losses[-1:], plain.losses[-1:])
        self.equal_gradients &= bitwise_equal(self.gradients, plain.gradients)

    def memory(self, batch: Tensor) -> Memory:
        """Count the bytes of one more forward and backward."""
        clear_gradients(self.model)
        return held_and_peak(lambda: self.model(batch), lambda loss: loss.backward())


def train(text: Text, steps: int) -> dict[str, Run]:
    """Train all variants side by side, comparing them after every step."""
    torch.manual_seed(0)
    model = LanguageModel(text.vocabulary)
    runs = {name: Run(model, options) for name, options in VARIANTS.items()}
    progress = Progress("step", steps)
    for number in range(steps):
        batch = text.batch(number)
        for run in runs.values():
            run.step(batch, seed=number)
            run.compare(runs[PLAIN])
        progress(number + 1, f"of {len(runs)} variants, loss {runs[PLAIN].losses[-1]:.2f}")
    return runs


def report(runs: Mapping[str, Run], batch: Tensor) -> str:
    """Lay out one row per variant."""
    memory = {name: run.memory(batch) for name, run in runs.items()}
    header = ["", "step ms", "bytes held after forward", "peak bytes", "losses", "gradients"]
    return table(header, [_row(name, runs[name], memory[name], memory[PLAIN]) for name in runs])


def _row(name: str, run: Run, memory: Memory, plain: Memory) -> list[str]:
    return [
        name,
        f"{statistics.median(run.seconds) * 1e3:.1f}",
        f"{memory.held:,} ({memory.held / plain.held:4.0%})",
        f"{memory.peak:,} ({memory.peak / plain.peak:4.0%})",
        "bitwise equal" if run.equal_losses else "DIFFERENT",
        "bitwise equal" if run.equal_gradients else "DIFFERENT",
    ]


def main() -> int:
    """Train, print the table and the lines to paste; 1 if anything differs from plain."""
    parser = argparse.ArgumentParser(description="Train a small model plain and with each engine.")
    parser.add_argument("--steps", type=int, default=30, help="training steps (%(default)s)")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error("--steps must be at least 1")

    torch.set_num_threads(1)  # the same bytes, and the same order of additions, on every machine
    text = Text()
    runs = train(text, steps)
    losses = runs[PLAIN].losses
    print(f"\n{DEPTH} blocks, width {WIDTH}, {BATCH} x {CONTEXT} characters, dropout {DROPOUT}")
    print(f"{steps} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print("bytes of forward and backward, over parameters and optimizer state\n")
    print(report(runs, text.batch(steps)))
    if not all(run.equal_losses and run.equal_gradients for run in runs.values()):
        print("\nSome variant does not compute what plain computes.", file=sys.stderr)
        return 1
    print(f"\nIn your own model:\n\n{LINES}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
