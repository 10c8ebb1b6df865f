"""Plans for models that are tensor or sequence parallel, with FSDP2 or without."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import recollect
from recollect import PlanWarning
from tests._support import assert_identical
from tests.distributed._parallel import PARALLEL, tokens
from tests.distributed._ranks import run_ranks
from tests.distributed._sharded import highest, loss_of, trained

pytestmark = pytest.mark.slow


def check_plan(kind: str, budget: float) -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("error", category=PlanWarning)
    expected = trained(PARALLEL[kind].model(), 4, tokens)
    model = PARALLEL[kind].model()
    plan = recollect.plan(model, tokens(0), budget, loss=loss_of)
    found = trained(plan.apply(model), 4, tokens)
    found.check(expected)  # as many collectives, too
    most = max(map(highest, found.peaks))
    assert most <= plan.budget
    assert most < min(map(highest, expected.peaks))
    box = torch.tensor([plan.budget, plan.predicted_peak])
    other = box.clone()
    dist.broadcast(other, 0)
    assert box.tolist() == other.tolist()


@pytest.mark.parametrize("kind", PARALLEL)
def test_a_plan_is_bitwise_and_within_its_budget(kind: str, tmp_path: Path) -> None:
    run_ranks(check_plan, tmp_path, kind, 0.85, deadline=300.0)


def test_a_fit_without_a_batch_is_refused(tmp_path: Path) -> None:
    run_ranks(check_refused, tmp_path, deadline=300.0)


def check_refused() -> None:
    with pytest.raises(ValueError, match=r"it has DTensor parameters.* Pass the batch"):
        recollect.fit(PARALLEL["sequence"].model(), budget=0.85)


def check_changed_parameter() -> None:
    """A parameter that is changed between forward and backward is an error, as in autograd."""
    warnings.filterwarnings("ignore", category=UserWarning)
    model: Any = PARALLEL["tensor"].model()
    plan = recollect.plan(model, tokens(0), 0.85, loss=loss_of)
    plan.apply(model)
    for _ in range(2):
        loss: Tensor = loss_of(model(tokens(0)))
        with torch.no_grad():
            model.blocks[0].mlp.up.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"changed|modified by an inplace operation"):
            loss.backward()


def test_a_changed_parameter_is_noticed(tmp_path: Path) -> None:
    run_ranks(check_changed_parameter, tmp_path, deadline=300.0)


def check_shapes() -> None:
    """Batches of other shapes get schedules of their own."""
    warnings.filterwarnings("ignore", category=UserWarning)

    def batch(step: int) -> Tensor:
        return tokens(step, 24 if step % 2 else 16)

    expected = trained(PARALLEL["sequence"].model(), 6, batch)
    model: Any = PARALLEL["sequence"].model()
    recollect.fit(model, tokens(1), 0.9, loss=loss_of)
    assert_identical(trained(model, 6, batch).gradients, expected.gradients)


def test_batches_of_other_shapes(tmp_path: Path) -> None:
    run_ranks(check_shapes, tmp_path, deadline=300.0)
