"""``recollect demo``: a small language model, trained plain and within three budgets, and compared.

All models start from the same weights, and take every step on the same batch from the same seed, so
losses and gradients must agree to the last bit. Bytes come from the allocator's own events.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.cli.screen import Status, UsageError, say
from recollect.planning.api import frontier
from recollect.planning.plan import Plan
from recollect.planning.recording.step import TrainingStep
from recollect.report.plan_report import longer_text
from recollect.report.table import columns
from recollect.report.units import bytes_text, percent_text, seconds_text

_DEPTH, _WIDTH, _HEADS, _DROPOUT = 3, 64, 4, 0.1
_BATCH, _CONTEXT, _SYMBOLS = 16, 64, 50
#: As fractions of the peak of the plain step.
_BUDGETS = (0.8, 0.65, 0.5)
#: The first steps are measured, as a plan records and checks in them; the others are timed.
_STEPS, _MEASURED = 10, 3

_HEADER = ("", "budget", "predicted", "measured peak", "of plain", "step", "vs plain", "results")
_CODE = """\
    import recollect
    model = recollect.fit(model, budget="12GiB")"""


def demo(html: Path | None = None, steps: int | None = None) -> int:
    """Plan, train, compare. Returns the exit code: 1 if something is not as it should be."""
    steps = _STEPS if steps is None else steps
    if steps <= _MEASURED:
        raise UsageError(f"--steps must be more than {_MEASURED}: those are measured and not timed")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same bytes, and the same order of additions, on every machine
    try:
        with Status() as status:
            plans = _plans(status)
            trainings = [_Training(plan) for plan in (None, *plans)]
            _train(trainings, steps, status)
    finally:
        torch.set_num_threads(threads)
    say(
        f"{_DEPTH} blocks of width {_WIDTH}, {_BATCH} x {_CONTEXT} symbols, dropout, AdamW, on the "
        f"CPU:\n{steps} training steps, plain and under the plans for three budgets\n"
    )
    lines = [_line(each, trainings[0]) for each in trainings]
    say(columns(_HEADER, lines, left=("", "results")))
    if html is not None:
        plans[-1].to_html(html)
        say(f"\nThe page of the last plan is in {html.resolve()}")
    if not all(each.is_equal and each.peak <= each.limit for each in trainings):
        say("\nA plan exceeds its budget, or changes what is computed. Please report it")
        return 1
    say(f"\nIn your own training script:\n\n{_CODE}")
    return 0


class TransformerLanguageModel(nn.Module):
    """Predicts the successors of symbols; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.TransformerEncoderLayer(
                _WIDTH, _HEADS, 4 * _WIDTH, _DROPOUT, batch_first=True, norm_first=True
            )
            for _ in range(_DEPTH)
        ]
        self.embedding = nn.Embedding(_SYMBOLS, _WIDTH)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(_WIDTH, _SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        scores = self.head(self.blocks(self.embedding(symbols[:, :-1])))
        return F.cross_entropy(scores.flatten(0, 1), symbols[:, 1:].flatten())


class _Training:
    """The model in training, plain or under a plan; the same weights and the same batch each."""

    def __init__(self, plan: Plan | None = None) -> None:
        torch.manual_seed(0)
        self.plan = plan
        self.limit = math.inf if plan is None else plan.budget
        self.model = TransformerLanguageModel()
        self.batch = torch.randint(_SYMBOLS, (_BATCH, _CONTEXT + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.peak = 0
        self.seconds: list[float] = []
        self.results: list[Tensor] = []
        self.is_equal = True
        if plan is not None:
            plan.apply(self.model)

    def step(self, *, is_measured: bool) -> None:
        """Take a step: count its bytes, or note its time, its loss and its gradients."""
        if is_measured:
            step = TrainingStep(self.model, (self.batch,), {}, optimizer=self.optimizer)
            self.peak = max(self.peak, step.measured_peak())
            return
        start = time.perf_counter()
        loss = self.model(self.batch)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.results = [loss.detach(), *gradients]
        self.optimizer.zero_grad()


def _plans(status: Status) -> list[Plan]:
    plain = _Training()
    found = frontier(plain.model, plain.batch, optimizer=plain.optimizer, progress=status)
    return [found.plan_for(fraction) for fraction in _BUDGETS]


def _train(trainings: Sequence[_Training], steps: int, status: Status) -> None:
    """Train all side by side, and compare them with the first, which is plain."""
    for number in range(steps):
        status("training", number / steps)
        for training in trainings:
            torch.manual_seed(number)  # dropout's
            training.step(is_measured=number < _MEASURED)
            training.is_equal &= bitwise_equal(training.results, trainings[0].results)


def bitwise_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether the tensors are the same, bit for bit."""
    # As bytes: torch.equal takes 0.0 for -0.0, and NaN for different from itself.
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(_as_bytes(mine), _as_bytes(other)) for mine, other in pairs)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _line(training: _Training, plain: _Training) -> tuple[str, ...]:
    seconds = statistics.median(training.seconds)
    share = percent_text(training.peak / plain.peak)
    figures = bytes_text(training.peak), share, seconds_text(seconds)
    plan = training.plan
    if plan is None:
        return ("plain", "", "", *figures, "", "")
    return (
        f"plan for {plan.budget / plan.plain_peak:.0%}",
        bytes_text(plan.budget),
        bytes_text(plan.predicted_peak),
        *figures,
        longer_text(seconds, statistics.median(plain.seconds)),
        "bitwise equal" if training.is_equal else "DIFFERENT",
    )
