"""``fit`` under DistributedDataParallel: all ranks run by one plan."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect._torch.groups import shows_collectives
from recollect.modules import OPTIONS
from recollect.planning import distributed as distributed_models
from tests._support import assert_identical
from tests.distributed._ranks import run_ranks
from tests.distributed._sharded import Trained, collectives, peak_of
from tests.distributed.test_collectives import Copy, Reduce
from tests.distributed.test_fsdp2_plans import begin


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


class Talking(nn.Module):
    """Column-parallel and row-parallel layers by hand, whose results are summed in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(TalkingBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TalkingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.up(Copy.apply(x)))
        return x + self.drop(Reduce.apply(self.down(h)).tanh())


def _train_what_communicates(model: nn.Module) -> Trained:
    found = Trained()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state = 0
    for step, rows in enumerate((128, 128, 128, 192, 128)):
        torch.manual_seed(step)
        x, before = torch.randn(rows, 32), collectives()
        weights = sum(each.nbytes for each in model.parameters())
        peak = peak_of(lambda x=x: model(x).square().mean().backward())  # type: ignore[misc]
        found.peaks.append(weights + state + peak)
        found.collectives.append(collectives() - before)
        found.gradients.append([each.grad.clone() for each in model.parameters()])  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        state = sum(each.nbytes for of in optimizer.state.values() for each in of.values())
    return found


def _fit_what_communicates() -> None:
    begin()
    expected = _train_what_communicates(Talking())
    model = recollect.fit(Talking(), budget=0.8)
    with warnings.catch_warnings(record=True):  # the larger batch may not fit
        warnings.simplefilter("always", recollect.PlanWarning)
        found = _train_what_communicates(model)
    found.check(expected)
    plan = vars(model)[OPTIONS].plan
    assert plan.communicates  # so no forward is tried again after it ran out of memory
    assert _same_on_all_ranks((plan.schedule, plan.budget, plan.predicted_peak))
    assert max(found.peaks[n] for n in (1, 2, 4)) <= plan.budget < min(expected.peaks[1:])


@pytest.mark.skipif(not shows_collectives(), reason="this torch hides collectives")
def test_a_forward_that_communicates_is_planned_from_the_loop(tmp_path: Path) -> None:
    run_ranks(_fit_what_communicates, tmp_path)


def _fit_what_hides_its_collectives() -> None:
    begin()
    patch = pytest.MonkeyPatch()
    patch.setattr(distributed_models, "shows_collectives", lambda: False)
    expected = _train_what_communicates(Talking())
    model = recollect.fit(Talking(), budget=0.8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", recollect.PlanWarning)
        _train_what_communicates(model).check(expected)
    patch.undo()
    (message,) = [str(w.message) for w in caught if w.category is recollect.PlanWarning]
    assert "its forward communicates with other processes (c10d::" in message


def test_a_forward_that_communicates_runs_without_a_plan(tmp_path: Path) -> None:
    run_ranks(_fit_what_hides_its_collectives, tmp_path)


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
