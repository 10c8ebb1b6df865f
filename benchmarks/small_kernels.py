"""A transformers model of many small kernels: eager, checkpointed, compiled op by op, and planned.

Times are of the CPU on a CPU, from an idle device to an idle device on CUDA. Memory is the peak of
forward and backward, without parameters. transformers makes an explicit attention mask where it is
compiled, so the gradients of compiled rows are compared with those of eager with that mask.

    PYTHONPATH=src python3 benchmarks/small_kernels.py [--layers N] [--width N] [--batch N]
        [--tokens N] [--part 0.6] [--backends recollect aot_eager]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

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
    model: nn.Module  #: its parameters, which are those of all rows
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

    def gradients(self, *, as_compiled: bool = False) -> list[Tensor]:
        """The gradients, with deterministic kernels, perhaps with the mask of compiled code."""
        self.model.zero_grad(set_to_none=True)
        is_tracing = "transformers.masking_utils.is_tracing"
        mask = mock.patch(is_tracing, return_value=True) if as_compiled else nullcontext()
        with deterministic(), mask:
            self.step()
        # Not on the device, where they would count in the peak of a plan.
        return [each.cpu() for each in gradients(self.model)]

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile runs it."""
        return isinstance(self.call, torch._dynamo.eval_frame.OptimizedModule)

    @property
    def predicted(self) -> str:
        """The predicted time of a plan, x plain."""
        return f"{self.plan.predicted_time / self.plan.plain_time:.2f}" if self.plan else ""


def _synchronize() -> None:
    if ON_CUDA:
        torch.cuda.synchronize()


def rows_of(model: nn.Module, batch: dict[str, Tensor], given: argparse.Namespace) -> list[Row]:
    """All ways to run the step, each with a model of its own around the same parameters."""
    theirs = _alike(model)
    theirs.gradient_checkpointing_enable({"use_reentrant": False})
    rows = [
        Row("eager", model, model, batch),
        Row("transformers, every layer checkpointed", theirs, theirs, batch),
        _planned(f"plan for {given.part}", model, lambda own: own, batch, given.part),
    ]
    for backend in given.backends:
        own = _alike(model)
        rows.append(Row(backend, own, torch.compile(own, backend=backend), batch))
        name = f"{backend}, plan for {given.part}"
        compiled = lambda own, backend=backend: torch.compile(own, backend=backend)  # noqa: E731 - a line
        rows.append(_planned(name, model, compiled, batch, given.part))
    return rows


def _alike(model: nn.Module) -> nn.Module:
    """A copy around the same parameters: those of others would count in the peak of a plan."""
    return copy.deepcopy(model, {id(each): each for each in model.parameters()})


def _planned(
    name: str,
    model: nn.Module,
    compiled: Callable[[nn.Module], Any],
    batch: dict[str, Tensor],
    part: float,
) -> Row:
    own = _alike(model)
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
    # Other rows' steps reach the same parameters.
    warnings.filterwarnings("ignore", "a backward went through", recollect.PlanWarning)
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
    expected = {which: rows[0].gradients(as_compiled=which) for which in (False, True)}
    found = []
    for row in rows:
        peak = row.peak()
        assert row.plan is None or row.plan.measured_peak <= row.plan.budget
        same = "yes" if bitwise_equal(row.gradients(), expected[row.is_compiled]) else "NO"
        time_ = statistics.median(seconds[row.name])
        found.append([row.name, f"{time_ / base:.2f}", row.predicted, f"{peak / MIB:.2f}", same])
    shape = f"{given.layers} layers of width {given.width}, {given.batch} x {given.tokens} tokens"
    device = torch.cuda.get_device_name() if ON_CUDA else "one CPU thread"
    print(f"\nLlama, {shape}; {device}, torch {torch.__version__}; interleaved, medians\n")
    print(table(["", "x eager", "predicted", "peak MiB", "bitwise eager"], found))


if __name__ == "__main__":
    main()
