"""The step that is planned: how its loss is called; which losses and optimizers are refused."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from tests.planning._models import Custom, never, squares

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


pytestmark = pytest.mark.usefixtures("no_bound")


def _model() -> Custom:
    torch.manual_seed(0)
    return Custom(3)


WIDE = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.AdamW, 3])
def test_an_optimizer_that_is_none(optimizer: Any) -> None:
    with pytest.raises(
        TypeError, match=r"optimizer should be a torch.optim.Optimizer, but got"
    ) as e:
        recollect.plan(_model(), WIDE, 0.5, loss=never, optimizer=optimizer)
    assert "torch.optim.AdamW(model.parameters())" in str(e.value)


def test_an_optimizer_that_calls_the_model_itself() -> None:
    model = _model()
    with pytest.raises(ValueError, match=r"optimizer: LBFGS needs a closure.* Leave it out"):
        recollect.plan(model, WIDE, 0.5, optimizer=torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_of_another_model() -> None:
    model, other = _model(), _model()
    optimizer = torch.optim.AdamW(other.parameters())
    message = r"optimizer: this AdamW has none of the parameters of this Custom that are trained"
    with pytest.raises(ValueError, match=message):
        recollect.plan(model, WIDE, 0.5, loss=never, optimizer=optimizer)


def test_an_optimizer_of_a_part_and_of_others_too() -> None:
    model, other = _model(), _model()
    given = [*model.layers[0].parameters(), *other.parameters()]
    optimizer = torch.optim.AdamW(given)
    plan = recollect.plan(model, WIDE, 1.0, loss=squares, optimizer=optimizer)
    assert plan.budget == plan.plain_peak


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), torch.nn.functional.mse_loss])
def test_a_loss_that_takes_more_than_the_output(criterion: Any) -> None:
    message = r"loss: .* has two parameters.* is a tuple.*lambda output: criterion\("
    with pytest.raises(TypeError, match=message):
        recollect.plan(_model(), (WIDE, WIDE), 0.5, loss=criterion)


@pytest.mark.parametrize(
    "loss", [lambda: 0, lambda a, b, c: a, lambda a, *, b: a], ids=["none", "three", "named"]
)
def test_a_loss_that_takes_neither_the_output_nor_both(loss: Any) -> None:
    message = r"loss is called with .*: loss=lambda output: \.\.\. or loss=lambda output, batch:"
    with pytest.raises(TypeError, match=message):
        recollect.plan(_model(), WIDE, 0.5, loss=loss)


@pytest.mark.parametrize("loss", [nn.Flatten(), torch.relu, torch.nn.functional.dropout])
def test_a_loss_that_takes_the_output_alone_is_called(loss: Any) -> None:
    with pytest.raises(ValueError, match="loss should give one number"):
        recollect.plan(_model(), WIDE, 0.5, loss=loss)


def test_a_loss_that_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="loss should be a function of the model's output"):
        recollect.plan(_model(), WIDE, 0.5, loss="mse")


def test_a_loss_that_was_called_already() -> None:
    with pytest.raises(TypeError, match=r"lambda output, batch: \.\.\., but got Tensor$"):
        recollect.plan(_model(), WIDE, 0.5, loss=WIDE.sum())


def test_a_model_whose_result_needs_no_gradient() -> None:
    class Cut(Custom):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    with pytest.raises(ValueError, match="loss of this Cut depends on nothing that requires a"):
        recollect.plan(Cut(), WIDE, 0.5, loss=squares)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out, r"loss should give one number .* gave a tensor of shape \[32, 48\]"),
        (lambda out: out.sum().item(), "loss should give one number .* but gave"),
        (lambda out: None, "loss should give one number .* but gave None"),
        (lambda out: torch.zeros(()), "depends on nothing that requires a gradient"),
    ],
)
def test_a_loss_that_backward_cannot_start_from(loss: Any, message: str) -> None:
    model = _model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        recollect.plan(model, WIDE, 0.5, loss=loss)
    assert type(model) is Custom
    assert all(p.grad is None for p in model.parameters())
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
