"""Modes around a region in forward are around its recomputation too, whatever backward is under."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from tests._support import Run, assert_transparent, leaf, reentrant, rerun

ENGINES = pytest.mark.parametrize("run", [rerun, reentrant], ids=["rerun", "reentrant"])


def autocast(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


@ENGINES
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("in_forward", [False, True])
def test_autocast_of_forward_counts(run: Run, in_forward: bool, in_backward: bool) -> None:
    dtypes = []

    def note_dtype(x: Tensor, weight: Tensor) -> Tensor:
        product = x @ weight
        dtypes.append((product.dtype, torch.is_autocast_enabled("cpu")))
        return product.float().sin() @ weight

    x, weight = leaf(3, 3), leaf(3, 3)
    with autocast(in_forward):
        out = run(note_dtype, x, weight)
    with autocast(in_backward):
        out.float().sum().backward()
        assert torch.is_autocast_enabled("cpu") is in_backward
    expected = (torch.bfloat16 if in_forward else torch.float32, in_forward)
    assert dtypes == [expected, expected]


@ENGINES
def test_gradients_under_autocast_with_backward_inside(run: Run) -> None:
    def train(run: Run) -> Any:
        layer, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), leaf(3, 4)
        with autocast(True):
            out = run(layer, x)
            out.float().square().sum().backward()
        return out, x.grad, [p.grad for p in layer.parameters()]

    assert_transparent(train, run)


@ENGINES
def test_autocast_dtype_and_cache_are_restored(run: Run) -> None:
    states = []

    def note_state(x: Tensor) -> Tensor:
        states.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()))
        return x.sin()

    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        out = run(note_state, leaf(3))
    out.sum().backward()
    assert states == [(torch.float16, False)] * 2
    assert torch.is_autocast_cache_enabled()


def test_autocast_switched_off_inside_autocast() -> None:
    def train(run: Run) -> Any:
        layer, x = nn.Linear(4, 4), leaf(3, 4)
        with autocast(True), autocast(False):
            out = run(layer, x)
        with autocast(True):
            out.sum().backward()
        return out, x.grad, layer.weight.grad

    assert_transparent(train, rerun)


def test_shared_weight_in_two_regions_under_autocast() -> None:
    """autocast caches the cast weight in forward: the recomputation must save the same tensors."""

    def train(run: Run) -> Any:
        layer, x = nn.Linear(4, 4), leaf(3, 4)
        with autocast(True):
            out = run(layer, run(layer, x).tanh())
        out.sum().backward()
        return out, x.grad, layer.weight.grad

    assert_transparent(train, rerun)


# --- the default device ---------------------------------------------------------------------------


@ENGINES
def test_device_context_of_forward_counts(run: Run) -> None:
    devices = []

    def note_device(x: Tensor) -> Tensor:
        devices.append(torch.empty(1).device.type)
        return x.sin()

    with torch.device("meta"):
        out = run(note_device, leaf(3).to("meta"))
    out.sum().backward()
    assert devices == ["meta", "meta"]
    assert torch.empty(1).device.type == "cpu"


@ENGINES
def test_innermost_device_context_counts(run: Run) -> None:
    devices = []

    def note_device(x: Tensor) -> Tensor:
        devices.append(torch.empty(1).device.type)
        return x.sin()

    x = leaf(3)
    with torch.device("meta"), torch.device("cpu"):
        out = run(note_device, x)
    with torch.device("meta"):
        out.backward(torch.ones(3, device="cpu"))
    assert devices == ["cpu", "cpu"]


@ENGINES
def test_region_outside_of_a_device_context_recomputed_inside_one(run: Run) -> None:
    def ones(x: Tensor) -> Tensor:
        return (x * torch.ones(3)).sin()

    x = leaf(3)
    out = run(ones, x)
    with torch.device("meta"):
        out.backward(torch.ones(3, device="cpu"))
    assert torch.equal(x.grad, x.detach().cos())


@ENGINES
def test_grad_mode_of_backward_does_not_count(run: Run) -> None:
    def train(run: Run) -> Any:
        x = leaf(3)
        out = run(lambda x: x.sin().exp(), x).sum()
        with torch.no_grad():
            out.backward()
        return x.grad

    assert_transparent(train, run)


# --- is_recomputing -------------------------------------------------------------------------------


@ENGINES
def test_is_recomputing(run: Run) -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(recollect.is_recomputing())
        return x.sin()

    out = run(look, leaf(3))
    out.register_hook(lambda grad: seen.append(recollect.is_recomputing()))
    out.sum().backward()
    seen.append(recollect.is_recomputing())
    assert seen == [False, False, True, False]


def test_is_recomputing_when_nested() -> None:
    seen = []

    def note(place: str, x: Tensor) -> Tensor:
        seen.append((place, recollect.is_recomputing()))
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        x = note("before", x)
        x = rerun(lambda x: note("inside", x), x)
        return note("after", x)

    rerun(outer, leaf(3)).sum().backward()
    forward, again = seen[:3], seen[3:]
    assert forward == [("before", False), ("inside", False), ("after", False)]
    assert all(flag for _, flag in again)
    assert [place for place, _ in again] == ["before", "inside", "after", "inside"]
    assert not recollect.is_recomputing()


def test_is_recomputing_after_a_failed_recomputation() -> None:
    def fail_again(x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            raise KeyError
        return rerun(torch.sin, x).exp()

    with pytest.raises(KeyError):
        rerun(fail_again, leaf(3)).sum().backward()
    assert not recollect.is_recomputing()
