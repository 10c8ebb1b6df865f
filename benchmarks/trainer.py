"""The ``Trainer`` of transformers under budgets, on a CUDA device: time and peak of every step.

A Llama of 1.1 billion parameters in bfloat16 with AdamW, 8 sequences of 2048 tokens. Plain and
gradient checkpointing as transformers does it are measured in the same run, and then a process
that may take 24 GiB, in which plain does not fit.

    PYTHONPATH=src python3 benchmarks/trainer.py [--budgets 30GiB 20GiB 14GiB] [--steps N]
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from _table import table
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import recollect
from recollect.integrations.transformers import FitCallback

GIB = 2**30
HEADER = ["", "step ms", "first ms", "peak GiB", "first peak", "in budget", "warnings"]
#: What the process may take, and the budget for it, where plain does not fit.
CAP, BUDGET_UNDER_CAP = 24 * GIB, "22GiB"
TOKENS = 2048
#: The last steps count. Before them a plan is made, and its schedules take turns: three steps each.
SETTLED = 8


class Watch(TrainerCallback):
    """The seconds and the peak of every step, the optimizer's included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peaks: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)
        self.peaks.append(torch.cuda.max_memory_allocated())


def train(callbacks: list[TrainerCallback], steps: int, **options: Any) -> Watch:
    """Train a new model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    rows = torch.randint(0, config.vocab_size, (8 * steps, TOKENS))
    data = [{"input_ids": row, "labels": row} for row in rows]
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=steps,
            optim="adamw_torch_fused",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        callbacks = [*callbacks, watch]
        Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
    return watch


def row(name: str, watch: Watch, budget: int | None, warned: int) -> list[str]:
    """A line of the table. In the first two steps the plan is made, and the optimizer's state."""
    peak = max(watch.peaks)
    kept = "" if budget is None else ("yes" if peak <= budget else "NO")
    return [
        name,
        f"{1e3 * statistics.median(watch.seconds[-SETTLED:]):.1f}",
        " ".join(f"{1e3 * each:.0f}" for each in watch.seconds[:3]),
        f"{peak / GIB:.2f}",
        f"{watch.peaks[0] / GIB:.2f}",
        kept,
        str(warned or ""),
    ]


def measured(name: str, steps: int, budget: str | None = None, **options: Any) -> list[str]:
    """A line for one training."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", recollect.PlanWarning)
        try:
            watch = train([] if budget is None else [FitCallback(budget)], steps, **options)
        except torch.OutOfMemoryError:
            watch = None
    warned = [each for each in caught if issubclass(each.category, recollect.PlanWarning)]
    for each in warned:
        print(f"{name}: {each.message}")
    gc.collect()
    torch.cuda.empty_cache()
    if watch is None:
        return [name, "out of memory", *[""] * (len(HEADER) - 2)]
    limit = None if budget is None else int(float(budget.removesuffix("GiB")) * GIB)
    found = row(name, watch, limit, len(warned))
    print("  ".join(found), flush=True)
    return found


def main() -> None:
    """Train in each way, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budgets", nargs="+", default=["30GiB", "20GiB", "14GiB"])
    parser.add_argument("--steps", type=int, default=24)
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("recollect").setLevel(logging.INFO)  # the plan, and the schedule that won
    if not torch.cuda.is_available():
        raise SystemExit("This needs a CUDA device, and torch.cuda.is_available() says: none.")
    rows = [measured("plain", given.steps)]
    checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    rows.append(measured("transformers", given.steps, gradient_checkpointing=True, **checkpointing))
    rows += [measured(each, given.steps, each) for each in given.budgets]
    torch.cuda.set_per_process_memory_fraction(
        CAP / torch.cuda.get_device_properties(0).total_memory
    )
    cap = f"capped at {CAP // GIB} GiB"
    rows.append(measured(f"plain, {cap}", given.steps))
    rows.append(measured(f"{BUDGET_UNDER_CAP}, {cap}", given.steps, BUDGET_UNDER_CAP))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
