"""The rerun engine: every way of going backward that plain autograd has, and the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import recollect
from tests._support import (
    Counted,
    Run,
    Scenario,
    assert_transparent,
    compat_rerun,
    leaf,
    rerun,
)

SCENARIOS: list[Scenario] = []


def scenario(play: Scenario) -> Scenario:
    SCENARIOS.append(play)
    return play


@pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", "full"])
@pytest.mark.parametrize("checkpoint", [rerun, compat_rerun], ids=["recollect", "compat"])
def _run_scenario(play: Scenario, checkpoint: Run, early_stop: bool) -> None:
    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, early_stop=early_stop, **kwargs)

    assert_transparent(play, run)


def wave(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


def two_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs with a common trunk."""
    trunk = x.sin().exp()
    return trunk.cos() * trunk, trunk.tanh().exp()


def separate_heads(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs that share no saved tensor."""
    return x.sin().exp(), y.cos().exp()


# --- ways of going backward -----------------------------------------------------------------------


@scenario
def backward(run: Run) -> Any:
    x = leaf(5)
    out = run(wave, x)
    out.sum().backward()
    return out, x.grad


@scenario
def backward_with_inputs(run: Run) -> Any:
    x, y = leaf(5), leaf(5)
    out = run(lambda x, y: (x * y).sin() * y, x, y)
    out.sum().backward(inputs=[y])
    return x.grad, y.grad


@scenario
def autograd_grad(run: Run) -> Any:
    x, y = leaf(5), leaf(5)
    return torch.autograd.grad(run(lambda x, y: (x * y).sin() * y, x, y).sum(), (x, y))


@scenario
def autograd_grad_of_one_input_after_another(run: Run) -> Any:
    x, y = leaf(5), leaf(5)
    out = run(lambda x, y: (x.sin() * y.exp()).tanh(), x, y).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, y)
    return first, second


@scenario
def backward_twice_with_retain_graph(run: Run) -> Any:
    x = leaf(5)
    out = run(wave, x).sum()
    out.backward(retain_graph=True)
    first = x.grad.clone()
    out.backward(retain_graph=True)
    out.backward()
    return first, x.grad


@scenario
def one_output_after_the_other_with_retain_graph(run: Run) -> Any:
    x = leaf(5)
    first, second = run(two_heads, x)
    first.sum().backward(retain_graph=True)
    between = x.grad.clone()
    second.sum().backward()
    return between, x.grad


@scenario
def one_output_after_the_other_without_retain_graph(run: Run) -> Any:
    x, y = leaf(5), leaf(5)
    first, second = run(separate_heads, x, y)
    first.sum().backward()
    between = x.grad.clone(), y.grad
    second.sum().backward()
    return between, x.grad, y.grad


@scenario
def the_later_output_first(run: Run) -> Any:
    x, y = leaf(5), leaf(5)
    first, second = run(separate_heads, x, y)
    second.sum().backward()
    first.sum().backward()
    return x.grad, y.grad


@scenario
def an_output_that_is_never_used(run: Run) -> Any:
    x = leaf(5)
    first, _ = run(two_heads, x)
    first.sum().backward()
    return x.grad


@scenario
def double_backward(run: Run) -> Any:
    x = leaf(5)
    (slope,) = torch.autograd.grad(run(wave, x).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.square().sum(), x)
    return slope, curvature


@scenario
def gradient_penalty(run: Run) -> Any:
    """Loss and the gradient's norm trained at once, as in a Wasserstein GAN."""
    layer, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), leaf(3, 4)
    score = run(layer, x).sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    (score + slope.norm()).backward()
    return x.grad, [p.grad for p in layer.parameters()]


@scenario
def third_derivative(run: Run) -> Any:
    x = leaf(5)
    result = run(wave, x).sum()
    for _ in range(3):
        (slope,) = torch.autograd.grad(result, x, create_graph=True)
        result = slope.sum()
    return slope


@scenario
def double_backward_through_two_regions(run: Run) -> Any:
    x = leaf(5)
    out = run(wave, run(wave, x))
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    slope.sum().backward()
    return x.grad


@scenario
def backward_in_reverse_order_of_two_calls(run: Run) -> Any:
    x = leaf(5)
    first, second = run(wave, x), run(wave, x * 2)
    first.sum().backward()
    second.sum().backward()
    return x.grad


@scenario
def several_regions_in_one_backward(run: Run) -> Any:
    x = leaf(5)
    torch.autograd.backward([run(wave, x), run(torch.tanh, x)], [torch.ones(5), torch.rand(5)])
    return x.grad


@scenario
def backward_from_a_tensor_inside(run: Run) -> Any:
    x, inside = leaf(5), []

    def stash(x: Tensor) -> Tensor:
        middle = x.sin().exp()
        if not recollect.is_recomputing():
            inside.append(middle)
        return middle.cos()

    run(stash, x)
    inside[0].sum().backward()
    return x.grad


# --- backward inside the region, and inside backward ----------------------------------------------


@scenario
def gradient_inside_the_region(run: Run) -> Any:
    def with_slope(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (slope,) = torch.autograd.grad(y.sum(), x)
        return x.cos() * slope

    x = leaf(5)
    out = run(with_slope, x)
    out.sum().backward()
    return out, x.grad


@scenario
def gradient_inside_the_region_with_retain_graph(run: Run) -> Any:
    def with_slope(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y.cos() * slope

    x = leaf(5)
    out = run(with_slope, x)
    out.sum().backward()
    return out, x.grad


@scenario
def gradient_inside_the_region_with_create_graph(run: Run) -> Any:
    def with_slope(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.cos() * slope

    x = leaf(5)
    out = run(with_slope, x)
    out.sum().backward()
    return out, x.grad


@scenario
def two_gradients_inside_the_region(run: Run) -> Any:
    def with_slopes(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(y.cos().sum(), x)
        return x.tanh() * first * second

    x = leaf(5)
    out = run(with_slopes, x)
    out.sum().backward()
    return out, x.grad


@scenario
def gradient_inside_of_an_unrelated_graph(run: Run) -> Any:
    def descend(x: Tensor) -> Tensor:
        """One step of an inner optimisation, as in meta-learning."""
        inner = torch.linspace(0, 1, 5, requires_grad=True)
        inner.sin().exp().sum().backward()
        return (x * inner.grad).exp()

    x = leaf(5)
    run(descend, x).sum().backward()
    return x.grad


@scenario
def backward_of_another_region_in_a_hook(run: Run) -> Any:
    x, y = leaf(5), leaf(5)
    other = run(wave, y).sum()
    out = run(wave, x)
    out.register_hook(lambda grad: other.backward())
    out.sum().backward()
    return x.grad, y.grad


@scenario
def backward_of_the_same_region_in_a_hook(run: Run) -> Any:
    """The hook runs while the region's own pass is half consumed."""
    x, slopes = leaf(5), []
    first, second = run(two_heads, x)
    total = first.sum()

    def hook(grad: Tensor) -> None:
        if not slopes:
            slopes.append(None)  # the gradient taken here comes by this hook again
            slopes[0] = torch.autograd.grad(total, x, retain_graph=True)

    first.register_hook(hook)
    (total + second.sum()).backward()
    return x.grad, slopes


@scenario
def hooks_on_tensors_inside(run: Run) -> Any:
    def hooked(x: Tensor) -> Tensor:
        middle = x.sin()
        middle.register_hook(lambda grad: grad * 2)
        return middle.exp().cos()

    x = leaf(5)
    run(hooked, x).sum().backward()
    return x.grad


# --- what goes in and comes out -------------------------------------------------------------------


@scenario
def no_input_requires_grad(run: Run) -> Any:
    layer = nn.Linear(4, 4)
    out = run(layer, torch.randn(2, 4))
    out.sum().backward()
    return out, [p.grad for p in layer.parameters()]


@scenario
def no_input_at_all(run: Run) -> Any:
    weight = leaf(5)
    run(lambda: weight.sin().exp()).sum().backward()
    return weight.grad


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@scenario
def tensors_in_nested_structures(run: Run) -> Any:
    a, b, c = leaf(5), leaf(5), leaf(5)

    def nested(items: list[Any], *, pair: Pair) -> dict[str, Any]:
        product = items[0] * items[1]["b"]
        return {"pair": Pair(product.sin(), pair.left.exp()), "rest": [product, "text", None]}

    out = run(nested, [a, {"b": b}], pair=Pair(c, a))
    (out["pair"].left + out["pair"].right + out["rest"][0].cos()).sum().backward()
    return out, a.grad, b.grad, c.grad


@scenario
def keyword_arguments(run: Run) -> Any:
    x, scale = leaf(5), leaf(5)
    out = run(lambda x, *, scale, power=1: (x * scale).sin() ** power, x, scale=scale, power=3)
    out.sum().backward()
    return out, x.grad, scale.grad


@scenario
def arguments_and_results_other_than_tensors(run: Run) -> Any:
    def describe(x: Tensor, n: int, name: str, nothing: None) -> tuple[Any, ...]:
        return (x * n).sin(), f"{name} {n}", nothing, x.shape

    x = leaf(5)
    out = run(describe, x, 3, "times", None)
    out[0].sum().backward()
    return out[0], out[1], out[2], tuple(out[3]), x.grad


@scenario
def no_result(run: Run) -> Any:
    return run(lambda x: None, leaf(5))


@scenario
def detached_tensors_inside(run: Run) -> Any:
    x = leaf(5)
    out = run(lambda x: (x.sin() * x.exp().detach(), x.cos().detach()), x)
    out[0].sum().backward()
    return out, out[1].requires_grad, x.grad


@scenario
def no_grad_inside(run: Run) -> Any:
    def partly(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.sin().exp()
        return (scale * x).cos()

    x = leaf(5)
    run(partly, x).sum().backward()
    return x.grad


@scenario
def an_input_without_influence(run: Run) -> Any:
    x, unused = leaf(5), leaf(5)
    out = run(lambda x, unused: wave(x), x, unused)
    return torch.autograd.grad(out.sum(), (x, unused), allow_unused=True)


@scenario
def the_input_itself_is_returned(run: Run) -> Any:
    x = leaf(5)
    same, out = run(lambda x: (x, x.sin()), x)
    (same * out).sum().backward()
    return same is x, x.grad


@scenario
def a_view_of_the_input_is_returned(run: Run) -> Any:
    x = leaf(6)
    view, out = run(lambda x: (x.view(2, 3), x.sin()), x)
    (view.sum() * out).sum().backward()
    return view, x.grad


@scenario
def nothing_is_saved(run: Run) -> Any:
    x = leaf(5)
    run(lambda x: x + 1, x).sum().backward()
    return x.grad


@scenario
def nothing_requires_grad(run: Run) -> Any:
    out = run(wave, torch.randn(5))
    return out, out.requires_grad


@scenario
def in_place_operations_on_tensors_of_the_region(run: Run) -> Any:
    x = leaf(5)
    run(lambda x: (x * 2).relu_().exp().mul(2).add_(1).cos(), x).sum().backward()
    return x.grad


@scenario
def complex_numbers(run: Run) -> Any:
    x = leaf(5, dtype=torch.complex64)
    run(lambda x: (x.sin() * x.conj()).abs(), x).sum().backward()
    return x.grad


@scenario
def gradients_without_bits_of_input(run: Run) -> Any:
    """Integer and boolean tensors are saved and recomputed as well."""
    x = leaf(4, 6)

    def select(x: Tensor) -> Tensor:
        values, indices = x.exp().topk(3, dim=1)
        return values.masked_fill(values > 1, 0.5).gather(1, indices.argsort())

    run(select, x).sum().backward()
    return x.grad


@scenario
def shared_weights_in_two_regions(run: Run) -> Any:
    layer, x = nn.Linear(4, 4), leaf(2, 4)
    run(layer, run(layer, x).tanh()).sum().backward()
    return x.grad, [p.grad for p in layer.parameters()]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.square())
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _, square = ctx.saved_tensors
        return 3 * square * grad


@scenario
def custom_function_inside(run: Run) -> Any:
    x = leaf(5)
    run(lambda x: Cube.apply(x.sin()).exp(), x).sum().backward()
    return x.grad


@scenario
def saved_tensor_hooks_of_the_user_inside(run: Run) -> Any:
    """A user's hooks around part of the region take precedence there."""

    def hooked(x: Tensor) -> Tensor:
        y = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            y = y.exp().cos()
        return y.tanh()

    x = leaf(5)
    run(hooked, x).sum().backward()
    return x.grad


@scenario
def saved_tensor_hooks_of_the_user_outside(run: Run) -> Any:
    x = leaf(5)
    with torch.autograd.graph.save_on_cpu():
        out = run(wave, x.exp())
    out.sum().backward()
    return x.grad


# Applied here, below the scenarios that the decorator collects.
test_same_as_plain = pytest.mark.parametrize(
    "play", [pytest.param(play, id=play.__name__) for play in SCENARIOS]
)(_run_scenario)


# --- numerical derivatives ------------------------------------------------------------------------


def test_derivatives_agree_with_finite_differences() -> None:
    torch.manual_seed(0)
    inputs = (leaf(4, dtype=torch.float64), leaf(4, dtype=torch.float64))

    def product(x: Tensor, y: Tensor) -> Tensor:
        return rerun(lambda x, y: (x.sin() * y.exp()).tanh(), x, y)

    assert torch.autograd.gradcheck(product, inputs)
    assert torch.autograd.gradgradcheck(product, inputs)


# --- errors that plain autograd has ---------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [rerun, compat_rerun], ids=["recollect", "compat"])
def test_second_backward_without_retain_graph_is_refused(checkpoint: Run) -> None:
    x = leaf(5)
    out = checkpoint(wave, x).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_second_output_that_shares_a_freed_trunk_is_refused() -> None:
    x = leaf(5)
    first, second = rerun(two_heads, x)
    first.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        second.sum().backward()


def test_exception_of_the_function_passes_through() -> None:
    def fail(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rerun(fail, leaf(5))


def test_exception_in_recomputation_passes_through() -> None:
    def fail_again(x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            raise KeyError("mine")
        return wave(x)

    out = rerun(fail_again, leaf(5))
    with pytest.raises(KeyError, match="mine"):
        out.sum().backward()


# --- how often the function runs ------------------------------------------------------------------


def test_one_rerun_for_each_backward() -> None:
    function, x = Counted(wave), leaf(5)
    out = rerun(function, x).sum()
    assert function.started == 1
    for backwards in (1, 2, 3):
        out.backward(retain_graph=True)
        assert function.started == 1 + backwards


def test_no_rerun_when_backward_does_not_reach_the_region() -> None:
    function, x, y = Counted(wave), leaf(5), leaf(5)
    (rerun(function, x) + y).sum().backward(inputs=[y])
    assert function.started == 1


def test_no_rerun_when_nothing_was_saved() -> None:
    function, x = Counted(lambda x: x + 1), leaf(5)
    rerun(function, x).sum().backward()
    assert function.started == 1


# --- reading saved tensors ------------------------------------------------------------------------


def test_saved_tensor_is_readable_outside_of_backward() -> None:
    x = leaf(5)
    out = rerun(lambda x: x.sin().exp(), x)
    expected = x.detach().sin().exp()
    for _ in range(2):
        assert torch.equal(out.grad_fn._saved_result, expected)
    out.sum().backward()
    assert torch.equal(x.grad, expected * x.detach().cos())


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        return grad * (first + second)


def test_saved_tensors_may_be_read_twice() -> None:
    def read_twice(run: Run) -> Any:
        x = leaf(5)
        run(lambda x: ReadsTwice.apply(x.sin()), x).sum().backward()
        return x.grad

    assert_transparent(read_twice, rerun)


def test_saved_tensors_are_read_once_in_compat() -> None:
    x = leaf(5)
    out = compat_rerun(lambda x: ReadsTwice.apply(x.sin()), x)
    with pytest.raises(recollect.CheckpointError, match="already unpacked once"):
        out.sum().backward()


@pytest.mark.parametrize("run", [rerun, compat_rerun])
def test_backward_through_what_the_second_run_stored(run: Run) -> None:
    """An auxiliary loss on the module is overwritten by the recomputation, and used afterwards."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x).sin()
            self.auxiliary = (hidden**2).mean()
            return hidden.exp()

    def train(run: Run) -> Any:
        model, x = Model(), leaf(2, 4)
        out = run(model, x)
        out.sum().backward(retain_graph=True)
        model.auxiliary.backward()
        return out, x.grad, [p.grad for p in model.parameters()]

    assert_transparent(train, run)
