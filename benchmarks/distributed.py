"""The tables of docs/guide/distributed.md: peaks and collectives of steps on two ranks with gloo.

Each number is the peak of a step in KiB with the parameters, on the rank with the higher one: the
lowest of three steps, since threads of gloo free buffers late. Of two numbers, the first is
torch.utils.checkpoint. The models are those of the tests. The gradients of all steps are compared
with those of the plain run, bit for bit.

    PYTHONPATH=src python -m benchmarks.distributed [sharded] [parallel] [pipelines]
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.utils.checkpoint import CheckpointPolicy

import recollect
from tests.distributed import _parallel, _sharded, test_pipelines
from tests.distributed._ranks import run_ranks
from tests.distributed._sharded import SHARDINGS, Decoder, Trained, highest, trained

STEPS, MEASURED = 5, 3
#: The ways to shard, and their titles. Not those that call a block several times: the reentrant
#: engines, torch's too, add up its gradients in another order.
SHARDED = {
    "reshard": "FSDP2, `reshard_after_forward=True`",
    "keep gathered": "... `reshard_after_forward=False`",
    "part of the mesh": "... `reshard_after_forward=1`",
    "mixed precision": "... bf16 (`MixedPrecisionPolicy`)",
    "cpu offload": "... `CPUOffloadPolicy`",
    "hybrid, replicated": "... HSDP, a mesh of (2, 1)",
    "nested": "... units inside of units",
}
PARALLEL = {
    "tensor": "Tensor parallel",
    "tensor, sharded": "... with FSDP2",
    "sequence": "Sequence parallel",
    "sequence, sharded": "... with FSDP2",
}
aten = torch.ops.aten


def _keep_products(_ctx: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    is_product = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


Run = Callable[..., Any]
_contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, _keep_products)
_theirs = partial(torch_checkpoint.checkpoint, use_reentrant=False)
_products = recollect.policy.matmuls()
#: By the column: how torch and recollect call a block.
WAYS: dict[str, tuple[Run | None, Run]] = {
    "rerun": (_theirs, recollect.checkpoint),
    "reentrant": (
        partial(torch_checkpoint.checkpoint, use_reentrant=True),
        partial(recollect.checkpoint, engine="reentrant"),
    ),
    "selective": (
        partial(_theirs, context_fn=_contexts),
        partial(recollect.checkpoint, policy=_products),
    ),
    "replay": (None, partial(recollect.checkpoint, engine="replay")),
    "replay, selective": (None, partial(recollect.checkpoint, engine="replay", policy=_products)),
}


def checkpoint_blocks(blocks: Sequence[nn.Module], run: Run) -> None:
    """Have ``run`` call the forward of each block, inside of hooks."""
    for block in blocks:
        block.forward = partial(run, block.forward)  # type: ignore[method-assign]


def row(
    name: str,
    make: Callable[[Run | None], Any],
    plan: Callable[[Any], None],
    train: Callable[[Any], Trained],
) -> str:
    """The row of one way to distribute a model.

    ``make``: the model whose blocks are called so; ``plan``: fits it; ``train``: its steps.
    """
    plain = train(make(None))
    counts = {"plain": plain.collectives[-1]}

    def peak(label: str, found: Trained) -> str:
        if not _is_same(found.gradients, plain.gradients):
            raise SystemExit(f"{name}, {label}: the gradients are not those of the plain run")
        counts[label] = found.collectives[-1]
        return f"{highest(min(found.peaks[-MEASURED:])) / 1024:.0f}"

    cells = [peak("plain", plain)]
    for way, runs in WAYS.items():
        here = [(side, run) for side, run in zip(("torch's ", ""), runs, strict=True) if run]
        cells.append(" / ".join(peak(side + way, train(make(run))) for side, run in here))
    planned = make(None)
    plan(planned)
    cells.append(peak("plan", train(planned)))
    usual = counts.pop("plain")
    if counts.pop("plan") != usual:
        raise SystemExit(f"{name}: a step under the plan has other collectives than the plain one")
    others = "/".join(str(each) for each in sorted({*counts.values()} - {usual}))
    collectives = f"{usual}; {others} with a rerun" if others else f"{usual}"
    return f"| {name} | " + " | ".join([*cells, collectives]) + " |"


def _is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether the gradients of some steps are equal, bit for bit."""
    pairs = [pair for steps in zip(one, other, strict=True) for pair in zip(*steps, strict=True)]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _header(*columns: str) -> None:
    _tell("| | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))


# --- DDP and FSDP2 --------------------------------------------------------------------------------


def sharded() -> None:
    """Print the first table."""
    warnings.simplefilter("ignore")
    _header("plain", *WAYS, "plan", "collectives")

    def replicated(run: Run | None, **options: Any) -> Any:
        torch.manual_seed(0)
        model = DistributedDataParallel(Decoder(), **options)
        checkpoint_blocks([*model.module.blocks] if run else [], run or recollect.checkpoint)
        return model

    def of_sharding(name: str, run: Run | None) -> Any:
        model = SHARDINGS[name].model()
        checkpoint_blocks([*model.blocks] if run else [], run or recollect.checkpoint)
        return model

    def fit(model: Any) -> None:
        recollect.fit(getattr(model, "module", model), budget=0.8)

    steps = partial(trained, count=STEPS)
    _tell(row("DDP", replicated, fit, steps))
    _tell(row("... `static_graph`", partial(replicated, static_graph=True), fit, steps))
    for name, title in SHARDED.items():
        _tell(row(title, partial(of_sharding, name), fit, steps))


# --- tensor and sequence parallelism --------------------------------------------------------------


def parallel() -> None:
    """Print the second table."""
    warnings.simplefilter("ignore")
    _header("plain", *WAYS, "plan", "collectives")

    def make(name: str, run: Run | None) -> Any:
        return _parallel.PARALLEL[name].model(run) if run else _parallel.PARALLEL[name].model()

    def plan(model: Any) -> None:
        recollect.plan(model, _parallel.tokens(0), 0.85, loss=_sharded.loss_of).apply(model)

    for name, title in PARALLEL.items():
        steps = partial(trained, count=STEPS, batch=_parallel.tokens)
        _tell(row(title, partial(make, name), plan, steps))
        fitted = make(name, None)
        recollect.fit(fitted, budget=0.85)
        peaks = [highest(each) // 1024 for each in steps(fitted).peaks]
        _tell(f"<!-- {name}: fit without a batch: {peaks} -->")


# --- pipelines ------------------------------------------------------------------------------------


class _Counted(test_pipelines.Pipeline):
    """A pipeline whose blocks are called by ``run``, and the GELUs of its last step."""

    def __init__(self, kind: Any, run: Run | None) -> None:
        self._run = run
        super().__init__(kind, 2, None)

    def train(self) -> None:
        for model in self.models if self._run else ():
            checkpoint_blocks([*model], self._run or recollect.checkpoint)  # type: ignore[arg-type]
        super().train()
        rows = test_pipelines.MICRO * test_pipelines.ROWS
        x = torch.randn(rows, test_pipelines.SIZE)
        with profile() as found:
            self.step(x, x)
        self.gelus = sum(each.count for each in found.key_averages() if each.key == "aten::gelu")


def pipelines() -> None:
    """Print the third table."""
    warnings.simplefilter("ignore")
    columns = {"torch, rerun": WAYS["rerun"][0]}
    columns |= {way: WAYS[way][1] for way in ("rerun", "replay", "replay, selective")}
    _header("plain", *columns)
    kinds = {
        "Interleaved 1F1B": ScheduleInterleaved1F1B,
        "Interleaved zero bubble": ScheduleInterleavedZeroBubble,
        "ZBV zero bubble": ScheduleZBVZeroBubble,
        "DualPipeV": ScheduleDualPipeV,
    }
    for name, kind in kinds.items():
        plain = _Counted(kind, None)
        cells = [f"{highest(min(plain.peaks[-MEASURED:])) / 1024:.0f}"]
        for run in columns.values():
            found = _Counted(kind, run)
            if not _is_same(found.gradients, plain.gradients):
                raise SystemExit(f"{name}: the gradients are not those of the plain run")
            peak = highest(min(found.peaks[-MEASURED:])) / 1024
            cells.append(f"{peak:.0f} ({found.gelus})")
        _tell(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    tables = {"sharded": sharded, "parallel": parallel, "pipelines": pipelines}
    for table in sys.argv[1:] or tables:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(tables[table], Path(folder), deadline=3600)
