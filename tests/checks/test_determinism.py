"""``determinism_check``: what counts as a different recomputation, and how it is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect.checks.determinism import (
    count_mismatch,
    metadata_mismatch,
    resolve_check,
    values_check,
)
from recollect.checks.diagnosis import MismatchContext
from recollect.errors import RecomputeMismatch
from tests._support import Run, compat_rerun, leaf, rerun


def differing(
    forward: Callable[[Tensor], Tensor], again: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """A region that does one thing in forward and another in its recomputation."""

    def region(x: Tensor) -> Tensor:
        return again(x) if recollect.is_recomputing() else forward(x)

    return region


def go(function: Callable[[Tensor], Tensor], run: Run = rerun, **options: Any) -> Tensor:
    """The gradient of a region, and that its failure leaves everything in order."""
    x = torch.linspace(0.1, 1, 6, requires_grad=True)
    out = run(function, x, **options)
    try:
        out.float().sum().backward()
    except recollect.CheckpointError:
        assert not recollect.is_recomputing()
        y = leaf(6)
        rerun(torch.sin, y).sum().backward()
        assert torch.equal(y.grad, y.detach().cos())
        raise
    return x.grad


OTHER_SHAPE = differing(lambda x: x.sin().exp(), lambda x: x[:1].sin().exp())
OTHER_DTYPE = differing(lambda x: x.sin().exp(), lambda x: x.double().sin().exp())
OTHER_PRECISION = differing(lambda x: x.sin(), lambda x: x.double().sin())
OTHER_VALUES = differing(lambda x: x.sin().exp(), lambda x: x.sin().exp() * 2)
FEWER = differing(lambda x: x.sin().exp().cos(), lambda x: x.sin())
MORE = differing(lambda x: x.sin(), lambda x: x.sin().exp().cos())

RUNS = pytest.mark.parametrize("run", [rerun, compat_rerun], ids=["recollect", "compat"])


@RUNS
@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        (OTHER_SHAPE, "torch.Size([6])", "torch.Size([1])"),
        (OTHER_DTYPE, "torch.float32", "torch.float64"),
    ],
    ids=["shape", "dtype"],
)
def test_default_compares_metadata(
    run: Run, function: Callable[[Tensor], Tensor], before: str, after: str
) -> None:
    with pytest.raises(recollect.CheckpointError, match="have different metadata") as info:
        go(function, run)
    message = str(info.value)
    assert "tensor at position" in message
    saved = next(line for line in message.splitlines() if line.startswith("saved metadata"))
    again = next(line for line in message.splitlines() if line.startswith("recomputed metadata"))
    assert before in saved
    assert after in again
    assert "debug=True" in message


def test_every_position_that_differs_is_named() -> None:
    def one_wide_op(x: Tensor) -> Tensor:
        y = x.sin().exp()
        z = torch.ones(3 if recollect.is_recomputing() else 4, requires_grad=True).exp()
        return (y * z.sum()).tanh()

    with pytest.raises(recollect.CheckpointError) as info:
        go(one_wide_op)
    assert "tensor at position 2:" in str(info.value)
    for same in (0, 1):
        assert f"tensor at position {same}:" not in str(info.value)


@RUNS
def test_values_are_not_compared_by_default(run: Run) -> None:
    go(OTHER_VALUES, run)


@RUNS
def test_none_compares_nothing(run: Run) -> None:
    """The other precision goes unnoticed; only the count must still be right."""
    go(OTHER_PRECISION, run, determinism_check="none")
    with pytest.raises(recollect.CheckpointError, match="different number of tensors"):
        go(FEWER, run, determinism_check="none")


def test_callable_decides() -> None:
    by_value = {"determinism_check": lambda tensor: tensor.tolist()}
    go(lambda x: x.sin().exp(), **by_value)
    with pytest.raises(recollect.CheckpointError, match="have different metadata"):
        go(differing(lambda x: x.sin().exp(), lambda x: (x + 1).sin().exp()), **by_value)
    go(OTHER_PRECISION, determinism_check=lambda tensor: tensor.shape)


def test_callable_sees_every_saved_tensor_in_both_runs() -> None:
    seen: list[tuple[bool, list[int]]] = []

    def note(tensor: Tensor) -> None:
        seen.append((recollect.is_recomputing(), list(tensor.shape)))

    go(lambda x: x.sin().reshape(2, 3).exp(), determinism_check=note)
    assert [shape for _, shape in seen] == [[6], [2, 3]] * 2


@RUNS
def test_fewer_tensors(run: Run) -> None:
    with pytest.raises(recollect.CheckpointError, match="different number of tensors") as info:
        go(FEWER, run)
    assert "Number of tensors saved during forward: 3" in str(info.value)
    assert "Number of tensors saved during recomputation: 1" in str(info.value)


@RUNS
def test_more_tensors(run: Run) -> None:
    """Early stop hides the surplus, which is harmless: all that was needed had been saved."""
    go(MORE, run)
    with pytest.raises(recollect.CheckpointError, match="trying to save more tensors"):
        go(MORE, run, early_stop=False)


def test_more_tensors_cannot_be_swallowed() -> None:
    def swallow(x: Tensor) -> Tensor:
        try:
            return MORE(x)
        except BaseException:  # noqa: BLE001 - what this test is about
            return x

    with pytest.raises(recollect.CheckpointError, match="trying to save more tensors"):
        go(swallow, early_stop=False)


def test_error_is_a_runtime_error_and_torchs() -> None:
    for function in (OTHER_SHAPE, FEWER):
        with pytest.raises(torch.utils.checkpoint.CheckpointError) as info:
            go(function)
        assert isinstance(info.value, RuntimeError)
        assert isinstance(info.value, recollect.compat.CheckpointError)


def test_the_same_graph_can_be_tried_again_after_a_failure() -> None:
    calm: list[bool] = []  # not a variable: a rerun finds those as they were at the call
    x = leaf(6)

    def erratic(x: Tensor) -> Tensor:
        return x.sin() if recollect.is_recomputing() and not calm else x.sin().exp()

    out = rerun(erratic, x)
    with pytest.raises(recollect.CheckpointError):
        torch.autograd.grad(out.sum(), x, retain_graph=True)
    calm.append(True)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(slope, torch.autograd.grad(x.sin().exp().sum(), x)[0])


@pytest.mark.parametrize("check", ["vlaues", 3, None], ids=repr)
def test_unknown_check_is_refused(check: Any) -> None:
    with pytest.raises(ValueError, match=r"determinism_check should be one of .*default.*none"):
        rerun(torch.sin, leaf(5), determinism_check=check)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_default_compares_the_device() -> None:
    with pytest.raises(recollect.CheckpointError, match="have different metadata") as info:
        go(differing(lambda x: x.sin().exp(), lambda x: x.cuda().sin().exp()))
    assert "cuda" in str(info.value)


def test_what_nobody_can_ask_for_may_differ() -> None:
    """A branch whose result was dropped is not part of the graph any more."""
    lengths = iter((1, 2))

    def function(x: Tensor) -> Tensor:
        x[: next(lengths)].sin().sum()
        return x.exp().sin()

    x = leaf(5)
    rerun(function, x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_a_check_must_return_something_comparable() -> None:
    out = rerun(lambda x: x.sin().exp(), leaf(5), determinism_check=lambda t: t.clone())
    with pytest.raises(TypeError, match="determinism_check"):
        out.sum().backward()


# --- the errors -----------------------------------------------------------------------------------

HINTS = (
    "pass `debug=True` to `checkpoint(...)`",
    "Use torch._dynamo.mark_dynamic() to explicitly mark varying dimensions",
    "Call torch._C._dynamo.eval_frame._set_lru_cache(False) to disable LRU cache",
)


def look(*shape: int) -> tuple[Any, ...]:
    return torch.Size(shape), torch.float32


def scene(forward: int, recomputed: int) -> MismatchContext:
    """Forward saved tensors of shape [3], and the recomputation others of shape [4] after one."""
    tickets = [(number, *look(3)) for number in range(forward)]
    return MismatchContext(torch.sin, tickets, [torch.ones(3), *[torch.ones(4)] * (recomputed - 1)])


ERRORS: dict[str, tuple[Exception, str]] = {
    "fewer": (
        count_mismatch(scene(3, 2)),
        "A different number of tensors was saved during the original forward and recomputation.",
    ),
    "more": (
        count_mismatch(scene(2, 3)),
        "trying to save more tensors during recomputation than during the original forward pass, ",
    ),
    "other": (
        metadata_mismatch(scene(2, 2), [(1, look(3), look(4))]),
        "Recomputed values for the following tensors have different metadata than during the ",
    ),
}


@pytest.mark.parametrize(("error", "start"), ERRORS.values(), ids=ERRORS)
def test_what_an_error_says(error: Exception, start: str) -> None:
    assert type(error) is RecomputeMismatch
    first, *rest = str(error).splitlines()
    assert first.startswith(f"torch.utils.checkpoint: {start}")
    for hint in HINTS:
        assert hint in str(error)
    told = [
        "In region ",
        "First divergence, tensor 1: saved by forward: float32 [3]; recomputation: float32 [4].",
        "Likely cause: ",
        "Fix: ",
    ]
    position = rest.index(next(line for line in rest if line.startswith("In region")))
    found = rest[position : position + len(told)]
    assert all(line.startswith(text) for line, text in zip(found, told, strict=True))


def test_positions_are_listed_up_to_a_number() -> None:
    def listed(count: int) -> str:
        differences = [(n, look(3), look(4)) for n in range(count)]
        return str(metadata_mismatch(scene(count, count), differences))

    assert "tensor at position 19:\nsaved metadata: {'shape': torch.Size([3])" in listed(20)
    assert "more\n" not in listed(20)
    assert "tensor at position 20:" not in listed(23)
    assert "\n... and 3 more\n" in listed(23)


def test_values_is_known_by_name() -> None:
    assert resolve_check("values") is values_check
    assert values_check(torch.ones(2)) == resolve_check("default")(torch.ones(2))
    with pytest.raises(ValueError, match=r"'default', 'values', 'none'"):
        resolve_check("value")
