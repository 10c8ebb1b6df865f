"""The training step that is planned: which arguments its loss is called with."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from tests.planning._models import squares

X = torch.arange(24.0).reshape(8, 3)
TARGET = torch.ones(8, 3)


@dataclass
class Pair:
    x: Tensor
    target: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: Any, target: Any = None) -> Tensor:
        out: Tensor = self.layers(x.x if isinstance(x, Pair) else x)
        return out


BATCHES: dict[str, Any] = {
    "dataclass": Pair(X, TARGET),
    "dict": {"x": X, "target": TARGET},
    "mapping": UserDict(x=X, target=TARGET),
    "tuple": (X, TARGET),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_loss_of_the_output_and_the_batch(kind: str) -> None:
    seen = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        seen.append(batch)
        found = {"dataclass": lambda: batch.target, "tuple": lambda: batch[1]}
        return F.mse_loss(output, found.get(kind, lambda: batch["target"])())

    given = BATCHES[kind]
    plan = recollect.plan(Model(), given, 1.0, loss=loss)
    assert plan.plain_peak == recollect.plan(Model(), given, 1.0, loss=_of_target).plain_peak
    assert all(batch is given for batch in seen)


def _of_target(output: Tensor) -> Tensor:
    return F.mse_loss(output, TARGET)


def test_a_criterion_whose_target_is_the_batch() -> None:
    for loss in (nn.MSELoss(), F.mse_loss):
        recollect.plan(Model(), X, 1.0, loss=loss)


def test_what_can_be_called_with_the_output_alone_is() -> None:
    def loss(output: Tensor, batch: Any = None) -> Tensor:
        return squares(output) if batch is None else output  # which would be an error

    for each in (loss, partial(F.mse_loss, target=TARGET), lambda *all: squares(all[0])):
        recollect.plan(Model(), X, 1.0, loss=each)


@pytest.mark.parametrize("kind", ["dict", "mapping", "tuple"])
def test_a_batch_without_memory(kind: str) -> None:
    with torch.device("meta"):
        model = Model()
        x, target = torch.empty(64, 3), torch.empty(64, 3)
    batches = {"dict": dict, "mapping": UserDict}
    batch: Any = batches[kind](x=x, target=target) if kind in batches else (x, target)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(output, batch[1] if kind == "tuple" else batch["target"])

    assert recollect.plan(model, batch, 1.0, loss=loss).plain_peak > 0
