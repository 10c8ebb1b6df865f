"""Steps under a plan that run out of memory: later ones take less, and forward runs once more."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.modules import OPTIONS
from recollect.planning.loop import watch
from tests._support import assert_identical, gradients, measure
from tests.planning._models import squares
from tests.planning.test_lazy import Net, batch

pytestmark = pytest.mark.usefixtures("no_bound")


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.PeakWatch, "read", lambda self, _: 0)
    monkeypatch.setattr(watch, "_peak_on", lambda _: 0)


class Full:
    """Raises, once, as a device does that has no memory left."""

    def __init__(self) -> None:
        self.is_full = False

    def __call__(self, *_: Any) -> None:
        if self.is_full:
            self.is_full = False
            raise torch.OutOfMemoryError("out of memory, on purpose")


class Quiet(Net):
    """Without a count of its calls."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fitted(norm: bool = False, kind: type[Net] = Quiet) -> tuple[nn.Module, nn.Module, Full]:
    torch.manual_seed(0)
    model = kind(dropout=0.1)
    if norm:
        model.blocks[1].norm = nn.BatchNorm1d(32)
    plain, full = copy.deepcopy(model), Full()
    model.blocks[3].register_forward_hook(full)
    recollect.fit(model, batch(), 0.8, loss=squares)
    vars(model)[OPTIONS]._peaks._device = torch.device("cuda", 0)
    return model, plain, full


def peak(model: nn.Module) -> int:
    found = measure(lambda: model(batch()), lambda out: squares(out).backward(), warm_up=False)
    model.zero_grad()
    return found.peak


def _gradients(model: nn.Module) -> list[Tensor | None]:
    torch.manual_seed(5)
    squares(model(batch())).backward()
    return gradients(model)


def test_forward_runs_once_more_with_less_and_draws_the_same_numbers() -> None:
    model, plain, full = fitted()
    for _ in range(2):
        assert peak(model) > 0
    before = peak(model)
    full.is_full = True
    assert_identical(_gradients(model), _gradients(plain))
    assert not full.is_full
    model.zero_grad()
    assert peak(model) < before


def test_what_batch_norm_has_counted_is_not_counted_twice() -> None:
    model, plain, full = fitted(norm=True)
    full.is_full = True
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _gradients(model)
    (note,) = getattr(caught.value, "__notes__", [""])
    assert not note or "less from now on" in note
    assert int(model.blocks[1].norm.num_batches_tracked) == 1  # of the attempt
    plain.load_state_dict(model.state_dict())
    assert_identical(_gradients(model), _gradients(plain))


def test_a_count_of_calls_is_not_counted_twice() -> None:
    model, _, full = fitted(kind=Net)
    before, full.is_full = model.calls, True
    with pytest.raises(torch.OutOfMemoryError):
        model(batch())
    assert model.calls == before + 1


def test_a_backward_that_runs_out_of_memory_tightens_the_plan() -> None:
    model, plain, full = fitted()
    before = [peak(model) for _ in range(2)][-1]
    out = squares(model(batch()))
    full.is_full = True
    handle = model.blocks[2].up.weight.register_hook(full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        out.backward()
    handle.remove()
    (note,) = getattr(caught.value, "__notes__", [""])
    assert not note or "less from now on" in note
    del out
    model.zero_grad()
    assert_identical(_gradients(model), _gradients(plain))
    model.zero_grad()
    assert peak(model) < before


def test_other_errors_are_as_they_were() -> None:
    model, _, _ = fitted()
    handle = model.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch())
    handle.remove()
    assert peak(model) > 0
