"""Reading a batch: what the model is called with, and what makes two batches differ."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.modules import OPTIONS
from recollect.planning.recording.batch import (
    describe_difference,
    is_smaller,
    signature_of_batch,
    split_batch,
    tensors_of_batch,
)

X = torch.arange(6.0).reshape(2, 3)
Named = namedtuple("Named", ["x"])  # noqa: PYI024 - as users have it


@dataclass
class Data:
    x: Tensor


class Model(nn.Module):
    """Takes names, and a count that may be there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: Tensor, count: Any = None, **_: Any) -> Tensor:
        out: Tensor = self.layers(x)
        return out if count is None else out / count


class One(Model):
    """Takes one object."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch["x"] if hasattr(batch, "keys") else batch.x)


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_a_mapping_is_keyword_arguments(kind: Any) -> None:
    args, kwargs = split_batch(kind(x=X), Model())
    assert args == ()
    assert [*kwargs] == ["x"]
    assert kwargs["x"] is X


def test_a_mapping_whose_names_the_model_does_not_have_is_one_argument() -> None:
    batch = UserDict(x=X)
    assert split_batch(batch, One()) == ((batch,), {})
    numbered: Any = UserDict({0: X})
    assert split_batch(numbered, Model()) == ((numbered,), {})
    assert split_batch({"x": X}, One()) == ((), {"x": X})  # a dict is what it always is


@pytest.mark.parametrize("batch", [X, [X], Named(X), Data(X)], ids=lambda b: type(b).__name__)
def test_anything_else_is_one_argument(batch: Any) -> None:
    (found,), kwargs = split_batch(batch, Model())
    assert found is batch
    assert kwargs == {}


def test_an_encoding_of_a_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"x": X})
    assert split_batch(encoding, Model()) == ((), {"x": X})
    model = recollect.fit(Model(), encoding, 1.0)
    model(**encoding).sum().backward()


@pytest.mark.parametrize(
    "batch", [UserDict(x=X), Named(X), Data(X)], ids=lambda b: type(b).__name__
)
def test_a_plan_for_one_object(batch: Any) -> None:
    model = recollect.fit(One(), batch, 1.0)
    model(batch).sum().backward()


def test_one_number_is_no_shape() -> None:
    plain = signature_of_batch((X,), {})
    for count in (torch.tensor(3), torch.tensor(2.5)):
        assert signature_of_batch((X,), {"count": count}) == plain
        assert signature_of_batch((X, count), {}) == plain
        assert tensors_of_batch((X,), {"count": count}) == [X]
    held = [signature_of_batch(({"x": X, "n": n},), {}) for n in (torch.tensor(1), torch.tensor(2))]
    assert held[0] == held[1] == signature_of_batch(({"x": X},), {})
    assert signature_of_batch((X,), {"count": torch.ones(1)}) != plain


def test_numbers_of_python_are_alike() -> None:
    one, other = (signature_of_batch((X,), {"count": count}) for count in (3, 2.5))
    assert one == other
    assert is_smaller(one, other)
    text = describe_difference(one, signature_of_batch((X,), {}))
    assert text == "there is count, and was nothing more"


def test_a_count_that_changes_in_every_step_changes_nothing() -> None:
    """As the trainer of transformers passes the number of tokens, which no batch has."""
    model = recollect.fit(Model(), X, 10_000)
    runner = vars(model)[OPTIONS]
    for number in range(1, 6):
        model(X[: 1 + number % 2], count=torch.tensor(number)).sum().backward()
        model.zero_grad()
    variants = [*runner._kinds._known.values()]
    assert len(variants) == 2  # one for each shape
