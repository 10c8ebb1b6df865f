"""A transformers model of many small kernels: eager, checkpointed, compiled op by op, and planned.

Times are of the CPU on a CPU, from an idle device to an idle device on CUDA. Memory is the peak of
forward and backward, without parameters.

    PYTHONPATH=src python3 benchmarks/small_kernels.py [--layers N] [--width N] [--batch N]
        [--tokens N] [--part 0.6] [--backends recollect aot_eager]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from _measure import bitwise_equal, deterministic, gradients, held_and_peak, interleaved, steadied
from _table import Progress, table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import recollect
from recollect.compiled.registered import backend as ours

MIB = 2**20
ROUNDS = 25
ON_CUDA = torch.cuda.is_available()


@dataclass
class Row:
    """One way to run the step."""

    name: str
    model: nn.Module  #: its parameters
    call: Callable[..., Any]
    batch: dict[str, Tensor]
    plan: recollect.Plan | None = None

    def step(self) -> None:
        """Forward and backward."""
        self.call(**self.batch).loss.backward()

    def seconds(self) -> float:
        """The time of a step."""
        now = time.perf_counter if ON_CUDA else time.process_time
        self.model.zero_grad(set_to_none=True)
        _synchronize()
        start = now()
        self.step()
        _synchronize()
        return now() - start

    def peak(self) -> int:
        """The peak of a step, without parameters."""
        self.model.zero_grad(set_to_none=True)
        if not ON_CUDA:
            return held_and_peak(lambda: self.call(**self.batch).loss, Tensor.backward).peak
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return torch.cuda.max_memory_allocated() - before

    def gradients(self) -> list[Tensor]:
        """The gradients, with deterministic kernels."""
        self.model.zero_grad(set_to_none=True)
        with deterministic():
            self.step()
        return gradients(self.model)


def _synchronize() -> None:
    if ON_CUDA:
        torch.cuda.synchronize()


def rows_of(model: nn.Module, batch: dict[str, Tensor], given: argparse.Namespace) -> list[Row]:
    """All ways to run the step, each with a model of its own."""
    theirs = copy.deepcopy(model)
    theirs.gradient_checkpointing_enable({"use_reentrant": False})
    rows = [
        Row("eager", model, model, batch),
        Row("transformers, every layer checkpointed", theirs, theirs, batch),
        _planned(f"plan for {given.part}", model, lambda own: own, batch, given.part),
    ]
    for backend in given.backends:
        own = copy.deepcopy(model)
        rows.append(Row(backend, own, torch.compile(own, backend=backend), batch))
        name = f"{backend}, plan for {given.part}"
        compiled = lambda own, backend=backend: torch.compile(own, backend=backend)  # noqa: E731 - a line
        rows.append(_planned(name, model, compiled, batch, given.part))
    return rows


def _planned(
    name: str,
    model: nn.Module,
    compiled: Callable[[nn.Module], Any],
    batch: dict[str, Tensor],
    part: float,
) -> Row:
    own = copy.deepcopy(model)
    call = compiled(own)
    plan = recollect.plan(call, batch, part)
    plan.apply(call)
    return Row(name, own, call, batch, plan)


def main() -> None:
    """Measure all rows in turn, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("layers", 12), ("width", 64), ("batch", 2), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--part", type=float, default=0.6)
    parser.add_argument("--backends", nargs="+", default=["recollect", "aot_eager"])
    given = parser.parse_args()
    if "recollect" not in torch._dynamo.list_backends():  # it runs from source, not installed
        torch._dynamo.register_backend(ours, name="recollect")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=given.width,
        intermediate_size=given.width * 11 // 4,
        num_hidden_layers=given.layers,
        num_attention_heads=max(1, given.width // 64),
        num_key_value_heads=max(1, given.width // 64),
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    if ON_CUDA:
        model = model.to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 256, (given.batch, given.tokens), device=model.device)
    rows = rows_of(model, {"input_ids": tokens, "labels": tokens}, given)
    samplers = {row.name: row.seconds for row in rows}
    seconds = steadied(interleaved(samplers, ROUNDS, progress=Progress("round", ROUNDS)))
    base = statistics.median(seconds["eager"])
    expected = rows[0].gradients()
    found = []
    for row in rows:
        peak = row.peak()
        assert row.plan is None or row.plan.measured_peak <= row.plan.budget
        same = "yes" if bitwise_equal(row.gradients(), expected) else "NO"
        time_ = statistics.median(seconds[row.name])
        found.append([row.name, f"{time_ / base:.2f}", f"{peak / MIB:.2f}", same])
    shape = f"{given.layers} layers of width {given.width}, {given.batch} x {given.tokens} tokens"
    device = torch.cuda.get_device_name() if ON_CUDA else "one CPU thread"
    print(f"\nLlama, {shape}; {device}, torch {torch.__version__}; interleaved, medians\n")
    print(table(["", "x eager", "peak MiB", "bitwise eager"], found))


if __name__ == "__main__":
    main()
