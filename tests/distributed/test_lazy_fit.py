"""``fit`` under DistributedDataParallel: all ranks run by one plan."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect.modules import OPTIONS
from tests._support import assert_identical
from tests.distributed._ranks import run_ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    return nn.Sequential(*blocks)


def _same_on_all_ranks(value: Any) -> bool:
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return all(each == value for each in found)


def _trained(rank: int, when: str, static: bool) -> dict[str, Tensor]:
    model = _model()
    if when == "before":
        recollect.fit(model, budget=0.8)
    wrapped = DistributedDataParallel(model, static_graph=static)
    if when == "after":
        recollect.fit(wrapped.module, budget=0.8)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
    for step, length in enumerate((128, 128, 128, 160, 160)):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(length, 32, generator=generator)
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if when != "never":
        plan = vars(model)[OPTIONS].plan
        assert _same_on_all_ranks((plan.schedule, plan.budget, plan.predicted_peak))
    return dict(model.state_dict())


def _fit_and_compare() -> None:
    rank = distributed.get_rank()
    for static in (False, True):
        plain = _trained(rank, "never", static)
        for when in ("before", "after"):
            assert_identical(_trained(rank, when, static), plain)


def test_weights_are_those_of_the_plain_run(tmp_path: Path) -> None:
    run_ranks(_fit_and_compare, tmp_path)


def _fit_what_communicates() -> None:
    class Talking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _model()

        def forward(self, x: Tensor) -> Tensor:
            out = self.layers(x)
            total = out.detach().sum()
            distributed.all_reduce(total)
            return out * total

    model, plain = Talking(), Talking()
    recollect.fit(model, budget=0.8)
    messages: list[Any] = []
    for _step in range(3):
        for each in (model, plain):
            each.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                each(torch.ones(64, 32)).sum().backward()
            torch.optim.SGD(each.parameters(), 0.0).step()
            messages += [str(w.message) for w in caught if w.category is recollect.PlanWarning]
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    (message,) = messages
    assert "its forward communicates with other processes (c10d::" in message


def test_a_forward_that_communicates_runs_without_a_plan(tmp_path: Path) -> None:
    run_ranks(_fit_what_communicates, tmp_path)


def _plan_for_batches_of_different_shapes() -> None:
    rank = distributed.get_rank()
    wrapped = DistributedDataParallel(_model())
    batch = torch.randn(64 + 64 * rank, 32)
    plan = recollect.plan(wrapped.module, batch, 0.8)
    assert _same_on_all_ranks((plan.schedule, plan.budget, plan.plain_peak, plan.measured_peak))
    # The larger batch is that of the other rank for one of them.
    alone = recollect.frontier(wrapped.module, batch)
    assert (alone.plain_peak == plan.plain_peak) is (rank == 1)
    plan.apply(wrapped.module)
    assert plan.signature == alone.plan_for(1.0).signature
    with warnings.catch_warnings():
        warnings.simplefilter("error", recollect.PlanWarning)
        for _ in range(3):
            wrapped(batch).sum().backward()
            wrapped.zero_grad()


def test_one_plan_for_batches_of_different_shapes(tmp_path: Path) -> None:
    run_ranks(_plan_for_batches_of_different_shapes, tmp_path)
