"""Train a small language model within three budgets of memory, and compare that with plain.

The text is this file's own, the model a decoder with dropout. recollect plans its training step for
each budget, and every plan is put to use: all models start from the same weights and take every
step on the same batch from the same seed, so losses and gradients must agree with those of the
plain model to the last bit. Bytes are exact: they come from the allocator's own events.

The exit code is 1 if a budget is exceeded or anything differs.

    python examples/demo.py [--steps N] [--html demo.html]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect

# The decoder block and the measuring are shared with the benchmarks, which are scripts as this is.
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from _decoder import DecoderBlock
from _measure import bitwise_equal, clear_gradients, gradients, held_and_peak
from _table import Progress, table

DEPTH, WIDTH, HEADS, DROPOUT = 4, 128, 4, 0.1
BATCH, CONTEXT = 16, 64

# As fractions of what the plain step takes. On a GPU one would rather say "12GiB".
BUDGETS = (0.75, 0.6, 0.45)

# The first steps are measured, as in them a plan writes down what the model does and checks it; the
# others are timed.
MEASURED = 3

LINES = """\
    import recollect
    plan = recollect.plan(model, batch, "12GiB", optimizer=optimizer)
    plan.apply(model)
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


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all runs use."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def make_plans(model: LanguageModel, batch: Tensor) -> list[recollect.Plan]:
    """Plan the training step for each budget: all in one go, as the step need be recorded once."""
    frontier = recollect.frontier(model, batch, optimizer=make_optimizer(model))
    return [frontier.plan_for(budget) for budget in BUDGETS]


class Run:
    """A copy of the model in training, under a plan if there is one."""

    def __init__(self, model: LanguageModel, plan: recollect.Plan | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make_optimizer(self.model)
        self.plan = plan
        if plan is not None:
            plan.apply(self.model)
        self.held = self.peak = 0
        self.seconds: list[float] = []
        self.losses: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.is_equal = True

    @property
    def is_within_budget(self) -> bool:
        """Whether the step has never taken more than it may."""
        return self.plan is None or self.peak <= self.plan.budget

    def step(self, batch: Tensor, number: int) -> None:
        """Take one optimizer step, measured or timed; keep its loss and its gradients."""
        torch.manual_seed(number)  # dropout's
        clear_gradients(self.model)
        if number < MEASURED:
            before = self._bytes_before_a_step()
            memory = held_and_peak(lambda: self._forward(batch), self._backward)
            self.held = memory.held
            self.peak = max(self.peak, before + memory.peak)
        else:
            start = time.perf_counter()
            self._backward(self._forward(batch))
            self.seconds.append(time.perf_counter() - start)
        self.gradients = gradients(self.model)

    def compare(self, plain: Run) -> None:
        """Compare the latest step with that of `plain`."""
        self.is_equal &= bitwise_equal(self.losses[-1:], plain.losses[-1:])
        self.is_equal &= bitwise_equal(self.gradients, plain.gradients)

    def _forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch)
        self.losses.append(loss.detach())
        return loss

    def _backward(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()

    def _bytes_before_a_step(self) -> int:
        state = [tensor for each in self.optimizer.state.values() for tensor in each.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *state))


def train(runs: Sequence[Run], text: Text, steps: int) -> None:
    """Train all side by side, comparing them after every step with the first, which is plain."""
    plain = runs[0]
    progress = Progress("step", steps)
    for number in range(steps):
        batch = text.batch(number)
        for run in runs:
            run.step(batch, number)
            run.compare(plain)
        progress(number + 1, f"of {len(runs)} runs, loss {plain.losses[-1]:.2f}")


def report(runs: Sequence[Run]) -> str:
    """Lay out one row per run."""
    header = ["", "budget", "predicted peak", "measured peak", "held after forward"]
    header += ["step ms", "vs plain", "results"]
    return table(header, [_row(run, runs[0]) for run in runs])


def _row(run: Run, plain: Run) -> list[str]:
    seconds = statistics.median(run.seconds)
    peak, held = f"{run.peak / 2**20:.2f} MiB", f"{run.held / 2**20:.2f} MiB"
    if run.plan is None:
        return ["plain", "", "", peak, held, f"{seconds * 1e3:.1f}", "", ""]
    return [
        f"plan for {run.plan.budget / run.plan.plain_peak:.0%}",
        f"{run.plan.budget / 2**20:.2f} MiB",
        f"{run.plan.predicted_peak / 2**20:.2f} MiB",
        peak if run.is_within_budget else f"{peak} EXCEEDED",
        held,
        f"{seconds * 1e3:.1f}",
        f"{seconds / statistics.median(plain.seconds) - 1:+.1%}",
        "bitwise equal" if run.is_equal else "DIFFERENT",
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small model within budgets of memory.")
    parser.add_argument("--steps", type=int, default=20, help="training steps (%(default)s)")
    parser.add_argument("--html", default="demo.html", help="page to write (%(default)s)")
    arguments = parser.parse_args()
    if arguments.steps <= MEASURED:
        parser.error(f"--steps must be more than {MEASURED}, which are measured and not timed")
    return arguments


def main() -> int:
    """Plan, train, print the table and the lines to paste; 1 if anything is not as it should be."""
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the same bytes, and the same order of additions, on every machine
    torch.manual_seed(0)
    text = Text()
    model = LanguageModel(text.vocabulary)

    print(f"planning for {len(BUDGETS)} budgets", file=sys.stderr, flush=True)
    plans = make_plans(model, text.batch(0))
    runs = [Run(model, plan) for plan in (None, *plans)]
    train(runs, text, arguments.steps)

    losses = runs[0].losses
    print(f"\n{DEPTH} blocks, width {WIDTH}, {BATCH} x {CONTEXT} characters, dropout {DROPOUT}")
    print(f"{arguments.steps} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print("peaks: of whole steps, with parameters, gradients and optimizer state")
    print("results: losses and gradients of all steps, compared with those of plain\n")
    print(report(runs))

    plans[-1].to_html(arguments.html)
    print(f"\nThe last plan, as a page for the browser: {Path(arguments.html).resolve()}")
    if not all(run.is_within_budget and run.is_equal for run in runs):
        print("\nA budget is exceeded, or a plan changes what is computed.", file=sys.stderr)
        return 1
    print(f"\nIn your own training script:\n\n{LINES}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
