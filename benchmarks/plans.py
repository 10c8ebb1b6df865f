"""Plans for a transformers model on a CUDA device: time and peak, predicted and measured.

LlamaForCausalLM with AdamW at a small batch: many small kernels, so that Python decides how long a
step takes. Checkpointing as transformers does it is measured in the same run.

    PYTHONPATH=src python3 benchmarks/plans.py [--layers N] [--width N] [--batch N] [--tokens N]
        [--parts 0.9 0.8 ...]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _measure import deterministic, interleaved, steadied
from _table import Progress, table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import recollect

GIB = 2**30
HEADER = ["", "x plain", "step ms", "predicted", "peak GiB", "budget GiB", "how"]
ROUNDS = 15


@dataclass
class Training:
    """A model, its optimizer and its batch."""

    model: nn.Module
    tokens: Tensor
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: nn.Module, tokens: Tensor) -> Training:
        """Train all parameters of `model`."""
        return cls(model, tokens, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))

    def forward(self) -> Tensor:
        """The loss."""
        return self.model(input_ids=self.tokens, labels=self.tokens).loss

    def step(self) -> None:
        """One step of training."""
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> list[Tensor]:
        """What backward gives, with deterministic kernels."""
        with deterministic():
            self.forward().backward()
        found = [each.grad.clone() for each in self.model.parameters() if each.grad is not None]
        self.optimizer.zero_grad()
        return found


@dataclass(frozen=True)
class Took:
    """What one step took."""

    seconds: float
    peak: int


def measured(training: Training) -> Took:
    """One step, from an idle device to an idle device."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    training.step()
    torch.cuda.synchronize()
    return Took(time.perf_counter() - start, torch.cuda.max_memory_allocated())


def planned(training: Training, plan: recollect.Plan) -> Callable[[], Took]:
    """Measures a step under `plan`."""

    def sample() -> Took:
        with plan.applied(training.model):
            training.step()  # the first one compares the model with the planned one
            return measured(training)

    return sample


def how(plan: recollect.Plan) -> str:
    """In a few words, what a plan does."""
    modules = plan.schedule.modules
    return f"{len(modules)} modules" if modules else "op by op"


def main() -> None:
    """Make plans, run them in turn with the others, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("layers", 24), ("width", 1024), ("batch", 4), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--parts", type=float, nargs="+", default=[0.9, 0.8, 0.7, 0.6, 0.5])
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This needs a CUDA device, and torch.cuda.is_available() says: none.")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=given.width,
        intermediate_size=given.width * 11 // 4,
        num_hidden_layers=given.layers,
        num_attention_heads=given.width // 64,
        num_key_value_heads=given.width // 64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    tokens = torch.randint(0, config.vocab_size, (given.batch, given.tokens), device="cuda")
    ours = Training.of(model, tokens)
    ours.step()
    before = torch.cuda.memory_allocated()
    # A model of its own: transformers leaves a hook behind where checkpointing was switched off.
    theirs = copy.deepcopy(model)
    theirs.gradient_checkpointing_enable({"use_reentrant": False})
    peer = Training.of(theirs, tokens)
    peer.step()
    alone = torch.cuda.memory_allocated() - before  # which counts in every peak from here on
    plain = measured(ours).peak - alone
    batch = {"input_ids": tokens, "labels": tokens}
    frontier = recollect.frontier(
        model, batch, loss=lambda out: out.loss, optimizer=ours.optimizer, holds_output=False
    )
    plans = {part: frontier.plan_for(int(plain * part) + alone) for part in given.parts}
    expected = ours.gradients()
    for part, plan in plans.items():
        with plan.applied(model):
            ours.gradients()
            same = all(map(torch.equal, ours.gradients(), expected))
        print(f"{part}: {plan!r}, gradients {'bitwise equal' if same else 'DIFFER'}", flush=True)
    del expected
    samplers = {"plain": lambda: measured(ours), "transformers": lambda: measured(peer)}
    samplers |= {str(part): planned(ours, plan) for part, plan in plans.items()}
    took = interleaved(samplers, ROUNDS, warmup=3, progress=Progress("round", ROUNDS))
    seconds = steadied({name: [each.seconds for each in rounds] for name, rounds in took.items()})
    base = statistics.median(seconds["plain"])
    rows = []
    for name, rounds in took.items():
        median = statistics.median(seconds[name])
        row = [name, f"{median / base:.3f}", f"{median * 1e3:.1f}"]
        peak = max(each.peak for each in rounds) - alone
        if name in samplers and name not in ("plain", "transformers"):
            plan = plans[float(name)]
            predicted = f"{plan.predicted_time / plan.plain_time:.3f}"
            budget = (plan.budget - alone) / GIB
            row += [predicted, f"{peak / GIB:.2f}", f"{budget:.2f}", how(plan)]
        else:
            row += ["", f"{peak / GIB:.2f}", "", ""]
        rows.append(row)
    shape = f"{given.layers} layers of width {given.width}, {given.batch} x {given.tokens} tokens"
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; interleaved, medians")
    print(f"Llama, {shape}, bfloat16, AdamW\n\n{table(HEADER, rows)}")


if __name__ == "__main__":
    main()
