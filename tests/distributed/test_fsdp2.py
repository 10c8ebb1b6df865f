"""Models that ``fully_shard`` has sharded, with every engine, and with a plan made before.

The oracle is the same model without checkpointing, sharded in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect import policy
from recollect._torch.ops import op_name
from tests._support import assert_identical
from tests.distributed._ranks import WORLD, outcomes, run_ranks, steps_of

pytestmark = pytest.mark.slow

SIZE = 16
MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
Change = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE))
        self.out = nn.Linear(SIZE, SIZE)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mlp(self.norm(x)))
        return x + self.drop(torch.tanh(self.out(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return self.head(x)


def made() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def sharded(model: Any, *, nested: bool = False, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        inner = getattr(block, "_checkpoint_wrapped_module", block)
        if nested:
            fully_shard(inner.mlp, mesh=mesh, **options)
            fully_shard(inner.out, mesh=mesh, **options)
        fully_shard(inner, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model  # type: ignore[no-any-return]


def batches(*lengths: int) -> Callable[[int], Tensor]:
    def batch(number: int) -> Tensor:
        return torch.randn(lengths[number % len(lengths)], SIZE, requires_grad=True)

    return batch


def each_block(**options: Any) -> Change:
    def change(model: Any) -> nn.Module:
        for block in model.blocks:
            recollect.checkpointed(block, **options)
        return model  # type: ignore[no-any-return]

    return change


def wrapped(model: nn.Module) -> nn.Module:
    with recollect.installed():
        apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, Block))
    return model


ENGINES: dict[str, Change] = {
    "rerun": each_block(),
    "matmuls": each_block(policy=policy.matmuls()),
    "reentrant": each_block(engine="reentrant"),
    "replay": each_block(engine="replay"),
    "replay, matmuls": each_block(engine="replay", policy=policy.matmuls()),
    "wrapper": wrapped,
}


def check_engines(options: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    batch = batches(8)
    expected, counts = outcomes(steps_of(sharded(made(), **options), batch))
    for name, change in ENGINES.items():
        for model in (sharded(change(made()), **options), change(sharded(made(), **options))):
            found, ran = outcomes(steps_of(model, batch))
            assert_identical(found, expected)
            # As torch's checkpoint: parameters are gathered for backward anyway.
            assert ran == counts, name


@pytest.mark.parametrize(
    "options",
    [{}, MIXED, {"nested": True}, {"nested": True, **MIXED}],
    ids=["whole blocks", "mixed precision", "nested units", "nested units, mixed precision"],
)
def test_engines(options: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(check_engines, tmp_path, options)


class Products(TorchDispatchMode):
    """Counts the products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op_name(func) in policy.MATMULS
        return func(*args, **(kwargs or {}))


def check_kept_products(options: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    counts = []
    for change in (lambda model: model, ENGINES["matmuls"], ENGINES["rerun"]):
        model = sharded(change(made()), **options)
        # Parameters are gathered for the first time in another way.
        steps_of(model, batches(8))(0)[0].backward()
        with Products() as products:
            steps_of(model, batches(8))(1)[0].backward()
        counts.append(products.count)
    plain, kept, rerun = counts
    assert plain == kept < rerun


@pytest.mark.parametrize("options", [{}, MIXED], ids=["whole precision", "mixed precision"])
def test_kept_products_of_nested_units_do_not_run_again(
    options: dict[str, Any], tmp_path: Path
) -> None:
    # The ops by which FSDP gathers parameters, other ones in a rerun, are not counted as the
    # region's.
    run_ranks(check_kept_products, tmp_path, {"nested": True, **options})


def check_plan(options: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    # Larger and smaller ones than planned for.
    batch = batches(16, 16, 40, 40, 8, 16)
    expected, counts = outcomes(steps_of(sharded(made(), **options), batch), 6)
    model = made()
    frontier = recollect.frontier(model, batch(0), loss=lambda out: out.square().mean())
    plan = frontier.plan_for((frontier.least + frontier.plain_peak) // 2)
    planned = sharded(plan.apply(model), **options)
    assert_identical(outcomes(steps_of(planned, batch), 6), (expected, counts))


@pytest.mark.parametrize("options", [{}, MIXED], ids=["whole precision", "mixed precision"])
def test_a_plan_made_before_and_other_batches(options: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(check_plan, tmp_path, options)
