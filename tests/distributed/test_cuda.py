"""Plans for models that ``fully_shard`` has sharded, on a CUDA device, with NCCL and one rank.

The budget is what `torch.cuda.max_memory_allocated` says. The oracle is the same run without a
plan, with kernels that add up in one order.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import recollect
from recollect.modules import OPTIONS
from tests._support import assert_identical
from tests.distributed._ranks import local, run_ranks
from tests.distributed._sharded import collectives
from tests.planning._models import Decoder, squares, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

#: By name: the options of ``fully_shard``.
SHARDINGS: dict[str, dict[str, Any]] = {
    "reshard": {"reshard_after_forward": True},
    "keep gathered": {"reshard_after_forward": False},
    "mixed precision": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "cpu offload": {"offload_policy": CPUOffloadPolicy()},
}
BATCHES = (16, 16, 16, 12, 16)


@dataclass
class Trained:
    """What came of some steps."""

    gradients: list[list[Tensor]] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def sharded(name: str) -> Any:
    torch.manual_seed(0)
    model: Any = Decoder(8, 512, dropout=0.1)
    options = SHARDINGS[name]
    if "offload_policy" not in options:
        model.cuda()
    options = {"mesh": init_device_mesh("cuda", (1,)), **options}
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(rows: int) -> Tensor:
    return tokens(rows, 512).cuda()


def trained(model: Any, fit: Callable[[Any, torch.optim.Optimizer], Any] | None = None) -> Trained:
    found = Trained()
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-3)
    if fit is not None:
        fit(model, optimizer)
    for step, rows in enumerate(BATCHES):
        torch.manual_seed(step)
        inputs, before = batch(rows), collectives()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        squares(model(inputs)).backward()
        optimizer.step()
        torch.cuda.synchronize()
        found.peaks.append(torch.cuda.max_memory_allocated())
        found.collectives.append(collectives() - before)
        found.gradients.append([local(each.grad).clone().cpu() for each in parameters])
        optimizer.zero_grad()
    return found


def check_budgets(name: str, part: float) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("error", category=recollect.PlanWarning)
    expected = trained(sharded(name))

    def with_batch(model: Any, optimizer: torch.optim.Optimizer) -> None:
        recollect.fit(model, batch(16), part, loss=squares, optimizer=optimizer)

    def lazily(model: Any, _: torch.optim.Optimizer) -> None:
        recollect.fit(model, budget=part)

    for fit in (with_batch, lazily):
        model = sharded(name)
        found = trained(model, fit)
        plan = vars(model)[OPTIONS].plan
        assert_identical(found.gradients, expected.gradients)
        assert found.collectives == expected.collectives
        assert max(found.peaks) <= plan.budget < max(expected.peaks)
        del model


@pytest.mark.parametrize("part", [0.8, 0.6])
@pytest.mark.parametrize("name", SHARDINGS)
def test_budgets_are_kept_on_one_rank(name: str, part: float, tmp_path: Path) -> None:
    run_ranks(check_budgets, tmp_path, name, part, world=1, backend="nccl")
