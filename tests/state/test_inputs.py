"""Inputs changed in place before backward: an error that names the culprit, no wrong result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from tests._support import Run, assert_transparent, compat_rerun, leaf, rerun

RUNS = pytest.mark.parametrize("run", [rerun, compat_rerun], ids=["recollect", "compat"])
CHANGED = "modified by an inplace operation"


def combine(*args: Any, **kwargs: Any) -> Tensor:
    """The product of the sines of all tensors, wherever they are."""
    leaves = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)]
    out = torch.ones(3)
    for tensor in leaves:
        out = out * tensor.sin()
    return out.exp()


Culprit = Callable[[tuple[Any, ...], dict[str, Any]], Tensor]


@RUNS
@pytest.mark.parametrize(
    ("name", "culprit"),
    [
        ("args[0]", lambda args, kwargs: args[0]),
        ("args[1][0]", lambda args, kwargs: args[1][0]),
        ("args[2]['k']", lambda args, kwargs: args[2]["k"]),
        ("args[3][1][0]", lambda args, kwargs: args[3][1][0]),
        ("kwargs['mask']", lambda args, kwargs: kwargs["mask"]),
        ("kwargs['cache']['keys'][1]", lambda args, kwargs: kwargs["cache"]["keys"][1]),
    ],
)
def test_changed_after_forward(run: Run, name: str, culprit: Culprit) -> None:
    a, b, c, d, e, f, g, h = (torch.randn(3) for _ in range(8))
    args = (a, [b], {"k": c}, (d, [e]), leaf(3))
    kwargs = {"mask": f, "cache": {"keys": [g, h]}}
    out = run(combine, *args, **kwargs)
    culprit(args, kwargs).add_(1)
    with pytest.raises(recollect.CheckpointError, match=CHANGED) as info:
        out.sum().backward()
    assert f"{name} of" in str(info.value)
    assert ".clone()" in str(info.value), "the message shows the way out"


@RUNS
def test_unchanged_inputs_raise_no_alarm(run: Run) -> None:
    """Versions above zero and views are fine as long as they stay as they were."""

    def train(run: Run) -> Any:
        x = leaf(3)
        changed_before = torch.randn(3).add_(1).mul_(2)
        base = torch.randn(2, 3)
        out = run(combine, x, [changed_before], view=base[0])
        out.sum().backward(retain_graph=True)
        first = x.grad.clone()
        out.sum().backward()
        return out, first, x.grad

    assert_transparent(train, run)


@RUNS
def test_changed_after_backward_is_nobodys_business(run: Run) -> None:
    x, mask = leaf(3), torch.randn(3)
    run(combine, x, mask=mask).sum().backward()
    mask.add_(1)


@RUNS
def test_changed_between_two_backwards(run: Run) -> None:
    x, mask = leaf(3), torch.randn(3)
    out = run(combine, x, mask=mask).sum()
    out.backward(retain_graph=True)
    mask.add_(1)
    with pytest.raises(recollect.CheckpointError, match=CHANGED):
        out.backward()


@RUNS
def test_changed_through_a_view_or_its_base(run: Run) -> None:
    base = torch.randn(2, 3)
    out = run(combine, leaf(3), base[0])
    base.mul_(2)
    with pytest.raises(recollect.CheckpointError, match=CHANGED) as info:
        out.sum().backward()
    assert "args[1] of" in str(info.value)


@RUNS
def test_changed_inside_the_region(run: Run) -> None:
    def change(x: Tensor, counter: Tensor) -> Tensor:
        counter.add_(1)
        return (x * counter).sin()

    out = run(change, leaf(3), torch.zeros(3))
    with pytest.raises(recollect.CheckpointError, match=CHANGED) as info:
        out.sum().backward()
    assert "args[1] of" in str(info.value)
    assert "inside the region" in str(info.value)


@RUNS
def test_changed_inside_an_outer_region(run: Run) -> None:
    def outer(x: Tensor) -> Tensor:
        middle = x * 2
        out = run(torch.sin, middle)
        middle.add_(1)
        return out * middle.exp()

    out = run(outer, leaf(3))
    with pytest.raises(RuntimeError, match=CHANGED):
        out.sum().backward()


def change_after_saving(x: Tensor) -> Tensor:
    """Plain autograd refuses to go backward through this."""
    y = x.sin()
    out = y.exp() * y
    y.add_(1)
    return out


@pytest.mark.parametrize(
    "call",
    [
        change_after_saving,
        lambda x: rerun(change_after_saving, x, early_stop=False),
        lambda x: rerun(lambda x: change_after_saving(x).cos(), x),
        lambda x: compat_rerun(lambda x: change_after_saving(x).cos(), x),
    ],
    ids=["plain", "full", "early_stop", "compat"],
)
def test_tensor_of_the_region_changed_after_it_was_saved(call: Run) -> None:
    out = call(leaf(3))
    with pytest.raises(RuntimeError, match=CHANGED):
        out.sum().backward()


def test_change_that_the_recomputation_does_not_reach_is_harmless() -> None:
    """Early stop ends it before the change, with the value that forward used."""
    x = leaf(3)
    rerun(change_after_saving, x).sum().backward()
    (expected,) = torch.autograd.grad((x.sin().exp() * x.sin()).sum(), x)
    assert torch.equal(x.grad, expected)


@RUNS
def test_output_changed_after_forward_is_recomputed(run: Run) -> None:
    """Plain autograd refuses, for want of the value; here it is computed again, and right."""
    x = leaf(3)
    out = run(torch.exp, x)
    with torch.no_grad():
        out.add_(1)
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        frozen = torch.randn(3)
    x = leaf(3)
    rerun(lambda x, frozen: (x + frozen).sum(), x, frozen).backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_list_that_the_caller_extends_is_seen_as_it_is_in_backward() -> None:
    """Containers are held, not copied: what changes in them shows as a different recomputation."""
    items = [leaf(3)]
    out = rerun(lambda items: torch.stack(items).sin().exp(), items)
    items.append(leaf(3))
    with pytest.raises(recollect.CheckpointError):
        out.sum().backward()


@pytest.mark.parametrize("run", [rerun, compat_rerun])
def test_state_that_the_region_keeps_in_a_container_is_its_own(run: Run) -> None:
    """A counter or a cache in a dict or list: plain autograd does not mind, and neither do we."""

    def count(x: Tensor, state: dict[str, Tensor], cache: list[Tensor]) -> Tensor:
        state["calls"] += 1
        cache[0][0] = x.detach()[0]
        return (x.sin() * cache[0]).exp()

    def train(run: Run) -> Any:
        x = leaf(4)
        out = run(count, x, {"calls": torch.zeros(1)}, [torch.zeros(4)])
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, run)
