"""Regions inside regions: right gradients, and exactly as many runs as torch needs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import recollect
from recollect import policy
from recollect._torch.modes import function_mode_count
from tests._support import (
    Counted,
    Run,
    assert_transparent,
    leaf,
    plain,
    reentrant,
    rerun,
    torch_reentrant,
    torch_rerun,
)

pytestmark = pytest.mark.filterwarnings(
    # As with torch's: forward of the outer region runs without grad, and the inner one notices.
    "ignore:None of the inputs have requires_grad=True:UserWarning"
)

OURS: dict[str, Run] = {"rerun": rerun, "reentrant": reentrant}
TORCHS: dict[str, Run] = {"rerun": torch_rerun, "reentrant": torch_reentrant}


def noisy(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5) * x.exp()


def nest(runs: list[Run], innermost: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Regions one in another, outermost first, each with work before and after the inner one."""
    if not runs:
        return innermost
    run, inner = runs[0], nest(runs[1:], innermost)
    return lambda x: noisy(run(inner, noisy(x)))


@pytest.mark.parametrize(
    "engines",
    [*product(OURS, repeat=2), *product(OURS, repeat=3)],
    ids="-".join,
)
def test_gradients_are_those_of_plain_autograd(engines: tuple[str, ...]) -> None:
    def train(run: Run) -> Any:
        runs = [plain if run is plain else OURS[engine] for engine in engines]
        x = leaf(6)
        out = nest(runs, noisy)(x)
        out.sum().backward()
        return out, x.grad, torch.rand(2)

    assert_transparent(train, rerun)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_all_ways_of_going_backward_at_depth(depth: int) -> None:
    def go(run: Run) -> Any:
        x = leaf(6)
        out = nest([run] * depth, noisy)(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x, retain_graph=True)
        out.backward(retain_graph=True)
        out.backward()
        return slope, curvature, x.grad

    assert_transparent(go, rerun)


def runs_of_innermost(runs: list[Run], go_backward: Callable[[Tensor], object]) -> tuple[int, int]:
    innermost = Counted(lambda x: x.sin().exp())
    out = nest(runs, innermost)(leaf(6)).sum()
    forward_runs = innermost.started
    go_backward(out)
    return forward_runs, innermost.started - forward_runs


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (["rerun"], 1),
        (["rerun", "rerun"], 2),
        (["rerun", "rerun", "rerun"], 3),
        (["rerun", "rerun", "rerun", "rerun"], 4),
        (["reentrant", "rerun"], 2),
        (["rerun", "reentrant"], 2),
        (["reentrant", "reentrant"], 2),
        (["reentrant", "reentrant", "reentrant"], 3),
        (["rerun", "reentrant", "rerun"], 3),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_runs_of_the_innermost_function(engines: list[str], expected: int) -> None:
    """One for each region around it, not one for each path through them."""
    ours = runs_of_innermost([OURS[engine] for engine in engines], Tensor.backward)
    torchs = runs_of_innermost([TORCHS[engine] for engine in engines], Tensor.backward)
    assert ours == (1, expected)
    assert ours == torchs


def test_runs_of_the_innermost_function_over_two_backwards() -> None:
    def twice(out: Tensor) -> None:
        out.backward(retain_graph=True)
        out.backward()

    assert runs_of_innermost([rerun] * 3, twice) == (1, 6)
    assert runs_of_innermost([torch_rerun] * 3, twice) == (1, 6)


@pytest.mark.parametrize(("early_stop", "expected"), [(True, (3, 2)), (False, (3, 3))])
def test_runs_of_two_inner_regions(early_stop: bool, expected: tuple[int, int]) -> None:
    """Early stop spares a run of the last inner region: its input is the last thing needed."""

    def count(checkpoint: Run) -> tuple[int, int]:
        first, second = Counted(lambda x: x.sin().exp()), Counted(lambda x: x.cos().exp())

        def outer(x: Tensor) -> Tensor:
            middle = checkpoint(first, x, early_stop=early_stop)
            return checkpoint(second, middle, early_stop=early_stop)

        checkpoint(outer, leaf(5), early_stop=early_stop).sum().backward()
        return first.started, second.started

    assert count(rerun) == expected
    assert count(torch_rerun) == expected


def test_region_with_kwargs_and_structures_inside_a_region() -> None:
    def train(run: Run) -> Any:
        def inner(items: list[Tensor], *, scale: Tensor) -> dict[str, Tensor]:
            return {"out": (items[0] * scale).sin() * items[1]}

        def outer(x: Tensor, y: Tensor) -> Tensor:
            return run(inner, [x.exp(), y], scale=y.cos())["out"].tanh()

        x, y = leaf(5), leaf(5)
        run(outer, x, y).sum().backward()
        return x.grad, y.grad

    assert_transparent(train, rerun)


def test_inner_input_is_not_held_by_the_outer_region() -> None:
    """The inner region saves its inputs through the outer one's hooks: nothing is held twice."""
    x = leaf(5)
    alive = []

    def outer(x: Tensor) -> Tensor:
        middle = x.exp()
        alive.append(torch._C._WeakTensorRef(middle))
        return rerun(torch.sin, middle)

    out = rerun(outer, x)
    assert alive[0].expired()
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_mismatch_in_an_inner_region_is_reported() -> None:
    def inner(x: Tensor) -> Tensor:
        return x.sin().exp() if recollect.is_recomputing() else x.sin().exp().cos().exp()

    out = rerun(lambda x: rerun(inner, x * 2), leaf(5))
    with pytest.raises(recollect.CheckpointError, match="different number of tensors"):
        out.sum().backward()
    assert not recollect.is_recomputing()


@pytest.mark.parametrize("options", [{}, {"policy": policy.everything()}], ids=["", "policy"])
def test_a_rerun_after_a_replayed_call_is_not_recorded(options: dict[str, Any]) -> None:
    """The function mode that watched the outer region is over by then."""
    modes = []

    def inner(x: Tensor) -> Tensor:
        modes.append(function_mode_count())
        return x.sin().exp()

    x = leaf(3)
    for _ in range(3):
        out = rerun(lambda x: rerun(inner, x).cos(), x, engine="replay", **options)
        out.sum().backward()
    assert modes == [1, 0] * 3
