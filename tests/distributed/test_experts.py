"""Experts on several ranks, inside of units of FSDP: the model's own code communicates.

How many rows go to which rank depends on the data. The oracle is the same run without a plan.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import recollect
from recollect._torch.groups import shows_collectives
from recollect.planning import distributed
from tests.distributed._ranks import WORLD, run_ranks
from tests.distributed._sharded import SIZE, WORDS, loss_of, tokens, trained
from tests.distributed.test_fsdp2_plans import begin, check_within, plan_of, same_on_all_ranks

pytestmark = pytest.mark.slow


class Exchange(torch.autograd.Function):
    """Rows of all ranks: so many for each of them, and so many from each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: list[int], here: list[int]) -> Tensor:
        ctx.counts = here, there
        return exchanged(x, there, here)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return exchanged(grad, *ctx.counts), None, None


def exchanged(x: Tensor, there: list[int], here: list[int]) -> Tensor:
    out = x.new_empty(sum(here), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), here, there)
    return out


class Experts(nn.Module):
    """One expert on each rank. A router sends rows to them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(SIZE), nn.Linear(SIZE, WORLD)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        weights = self.router(h).softmax(-1)
        expert = weights.argmax(-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=WORLD)
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts)
        there, here = counts.tolist(), others.tolist()
        rows = F.gelu(self.up(Exchange.apply(h[order], there, here)))
        rows = Exchange.apply(self.down(rows), here, there)
        rows = torch.empty_like(rows).index_copy(0, order, rows)
        return x + self.drop((rows * weights.gather(-1, expert[:, None])).view_as(x))


def sharded_model() -> Any:
    torch.manual_seed(0)
    blocks = [Experts() for _ in range(3)]
    model: Any = nn.Sequential(nn.Embedding(WORDS, SIZE), *blocks, nn.Linear(SIZE, WORDS))
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_plans() -> None:
    begin()
    expected = trained(sharded_model(), 5)
    model = sharded_model()
    plan = recollect.plan(model, tokens(0), 0.85, loss=loss_of)
    plan.apply(model)
    found = trained(model, 5)
    found.check(expected)  # as many collectives, too
    check_within(found, plan, *range(5))
    assert plan.communicates
    assert same_on_all_ranks((plan.schedule, plan.budget, plan.predicted_peak))

    lazy = sharded_model()
    recollect.fit(lazy, budget=0.85)
    with warnings.catch_warnings(record=True):  # the first step may take more
        warnings.simplefilter("always", recollect.PlanWarning)
        found = trained(lazy, 5)
    found.check(expected)
    check_within(found, plan_of(lazy), 1, 2, 3, 4)


@pytest.mark.skipif(not shows_collectives(), reason="this torch hides collectives")
def test_units_that_communicate_are_planned(tmp_path: Path) -> None:
    run_ranks(check_plans, tmp_path)


def check_hidden() -> None:
    begin()
    patch = pytest.MonkeyPatch()
    patch.setattr(distributed, "shows_collectives", lambda: False)
    with pytest.raises(ValueError, match=r"communicates with other processes .*\(c10d::alltoall"):
        recollect.plan(sharded_model(), tokens(0), 0.85, loss=loss_of)
    patch.undo()


def test_units_whose_collectives_are_hidden_are_refused(tmp_path: Path) -> None:
    run_ranks(check_hidden, tmp_path)
