"""The reentrant engine: the differences from rerun that the documentation lists, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from tests._support import Counted, Run, assert_transparent, leaf, reentrant


def wave(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


@pytest.mark.parametrize(
    "checkpoint",
    [
        lambda f, *args: recollect.checkpoint(f, *args, engine="reentrant"),
        lambda f, *args: recollect.checkpoint(f, *args, use_reentrant=True),
        lambda f, *args: recollect.compat.checkpoint(f, *args, use_reentrant=True),
        lambda f, *args: recollect.CheckpointFunction.apply(f, True, *args),
    ],
    ids=["engine", "use_reentrant", "compat", "CheckpointFunction"],
)
def test_the_ways_to_ask_for_it(checkpoint: Run) -> None:
    """No graph is recorded inside: the one node of the region is the output's."""

    def train(run: Run) -> Any:
        x = leaf(5)
        out = run(wave, x)
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, checkpoint)
    assert checkpoint(wave, leaf(5)).grad_fn.name() == "CheckpointFunctionBackward"


def test_forward_runs_without_grad_mode_and_backward_with_it() -> None:
    modes = []

    def note_mode(x: Tensor) -> Tensor:
        modes.append((torch.is_grad_enabled(), recollect.is_recomputing()))
        return x.sin()

    out = reentrant(note_mode, leaf(5))
    out.sum().backward()
    assert modes == [(False, False), (True, True)]


def test_whole_function_runs_again() -> None:
    function = Counted(wave)
    reentrant(function, leaf(5)).sum().backward()
    assert (function.started, function.finished) == (2, 2)


@pytest.mark.parametrize(
    "go_backward",
    [
        lambda out, x: torch.autograd.grad(out.sum(), x),
        lambda out, x: out.sum().backward(inputs=[x]),
    ],
    ids=["autograd.grad", "inputs="],
)
def test_only_plain_backward_is_possible(go_backward: Any) -> None:
    x = leaf(5)
    out = reentrant(wave, x)
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad\(\) or passing an `inputs`"):
        go_backward(out, x)


def test_second_backward_needs_retain_graph() -> None:
    def twice(run: Run) -> Any:
        x = leaf(5)
        out = run(wave, x).sum()
        out.backward(retain_graph=True)
        out.backward()
        return x.grad

    assert_transparent(twice, reentrant)


def test_no_input_that_requires_grad_is_warned_of() -> None:
    layer = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        out = reentrant(layer, torch.randn(2, 3))
    assert not out.requires_grad


def test_tensors_in_nested_structures_are_not_seen_going_in() -> None:
    x = leaf(5)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        out = reentrant(lambda items: items[0].sin(), [x])
    assert not out.requires_grad


def test_tensors_in_nested_structures_are_not_seen_coming_out() -> None:
    x = leaf(5)
    direct, nested = reentrant(lambda x: (x.sin(), [x.cos()]), x)
    assert direct.requires_grad
    assert not nested[0].requires_grad


def test_region_whose_outputs_are_all_detached_fails_in_backward() -> None:
    out = reentrant(lambda x: x.sin().detach(), leaf(5))
    assert out.requires_grad, "every output of the node does"
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        out.sum().backward()


def test_detached_output_beside_a_connected_one() -> None:
    def train(run: Run) -> Any:
        x = leaf(5)
        connected, _ = run(lambda x: (x.sin(), x.cos().detach()), x)
        connected.sum().backward()
        return x.grad

    assert_transparent(train, reentrant)


def test_arguments_and_results_other_than_tensors() -> None:
    def train(run: Run) -> Any:
        x, unused = leaf(5), leaf(5)
        out, text, nothing = run(lambda x, n, _: ((x * n).sin(), f"{n}", None), x, 3, unused)
        out.sum().backward()
        return out, text, nothing, x.grad, unused.grad

    assert_transparent(train, reentrant)


def test_outputs_backward_one_at_a_time() -> None:
    """Each backward reruns the whole region; the other output's gradient is zeros."""

    def train(run: Run) -> Any:
        x = leaf(5)
        first, second = run(lambda x: (x.sin(), x.exp()), x)
        first.sum().backward(retain_graph=True)
        between = x.grad.clone()
        second.sum().backward()
        return between, x.grad

    assert_transparent(train, reentrant)


def test_keyword_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        reentrant(lambda x, scale: x * scale, leaf(5), scale=2)


@pytest.mark.parametrize(
    "option",
    [
        {"context_fn": lambda: (None, None)},
        {"debug": True},
        {"determinism_check": lambda tensor: tensor.shape},
        {"policy": [torch.ops.aten.sin.default]},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_without_effect_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    function = Counted(wave)
    with pytest.raises(ValueError, match=f"{name}.* no effect with the reentrant engine"):
        reentrant(function, leaf(5), **option)
    assert function.started == 0


def test_input_changed_in_place_is_refused() -> None:
    x = leaf(5)
    middle = x * 1
    out = reentrant(wave, middle)
    with torch.no_grad():
        middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("fails_in", ["forward", "recomputation"])
def test_state_is_restored_after_an_exception(fails_in: str) -> None:
    def fail(x: Tensor) -> Tensor:
        torch.rand(1)
        if recollect.is_recomputing() == (fails_in == "recomputation"):
            raise KeyError("mine")
        return x.sin()

    x = leaf(5)
    with pytest.raises(KeyError, match="mine"):
        out = reentrant(fail, x)
        stream = torch.get_rng_state()
        out.sum().backward()
    assert not recollect.is_recomputing()
    assert torch.is_grad_enabled()
    if fails_in == "recomputation":
        assert torch.equal(torch.get_rng_state(), stream)
    reentrant(wave, x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(wave(x).sum(), x)[0])


def test_detach_variable() -> None:
    x, text = leaf(5), "text"
    alias, frozen, same = recollect.detach_variable((x * 2, x.detach(), text))
    assert alias.is_leaf
    assert alias.requires_grad
    assert not frozen.requires_grad
    assert same is text
    with pytest.raises(RuntimeError, match=r"Only tuple of tensors is supported.*list"):
        recollect.detach_variable([x])


def test_check_backward_validity() -> None:
    recollect.check_backward_validity([1, leaf(2), torch.ones(2)])
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        recollect.check_backward_validity([1, torch.ones(2)])


@pytest.mark.parametrize("extra", [False, True])
def test_a_parameter_among_the_results(extra: bool) -> None:
    """Its history would be the region, whose rerun would return it, and so on without end."""

    def scenario(run: Run) -> Any:
        weight, x = leaf(4), leaf(4)
        for _ in range(2):
            result = run(lambda x: ((weight * x).sin(), weight, x) if extra else weight, x)
            sum(each.square().sum() for each in (result if extra else [result])).backward()
            assert weight.is_leaf
        return weight.grad, x.grad

    assert_transparent(scenario, reentrant)
