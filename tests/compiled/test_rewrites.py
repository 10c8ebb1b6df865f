"""Gradients of parameters have memory of their own, where those of eager code may share it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.compiled.registered import backend
from tests._support import assert_identical

Function = Callable[..., Tensor]


def stacked(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (torch.stack([a.view(4, 6), b.view(4, 6)]).sum(0) * x) ** 2


def reshaped(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x + a.view(4, 6) + b.view(4, 6)) ** 2


def passed_on(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The gradient of each is a view of the one that backward is called with."""
    return x + a.view(4, 6) + b.view(4, 6)


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first = nn.Linear(6, 6)
        self.a, self.b = (nn.Parameter(torch.randn(24)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.first(x).sin()
        return self.function(x, self.a, self.b)


def trained(model: nn.Module, compiled: nn.Module, *, apart: bool = False) -> list[Tensor]:
    """The gradients after two backwards and a clip. ``apart``: none of them share memory."""
    parameters = [*model.parameters()]
    for number in range(2):
        torch.manual_seed(number)
        compiled(torch.randn(4, 6)).sum().backward()
        if apart:
            for each in parameters:
                assert each.grad is not None
                each.grad = each.grad.clone()
    nn.utils.clip_grad_norm_(parameters, 0.1)
    return [each.grad for each in parameters if each.grad is not None]


@pytest.mark.parametrize("function", [stacked, reshaped, passed_on])
def test_what_accumulates_in_one_gradient_is_in_no_other(function: Function):
    expected = trained(*[Model(function)] * 2, apart=True)
    if function is not passed_on:  # autograd does not do so itself
        found = trained(*[Model(function)] * 2)
        assert not torch.equal(found[0], expected[0])
    model = Model(function)
    assert_identical(trained(model, torch.compile(model, backend=backend)), expected)


def test_a_plan_counts_the_copies():
    expected = trained(*[Model(stacked)] * 2, apart=True)
    model = Model(stacked)
    compiled = torch.compile(model, backend=backend)
    plan = recollect.plan(compiled, torch.randn(4, 6), 0.99)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    with plan.applied(compiled), pytest.warns(recollect.PlanWarning, match="gradients are there"):
        assert_identical(trained(model, compiled), expected)


def test_a_gradient_that_the_caller_holds_is_not_taken():
    model, given = Model(passed_on), torch.ones(4, 6)
    torch.compile(model, backend=backend)(torch.randn(4, 6)).backward(given)
    for parameter in (model.a, model.b):
        assert parameter.grad is not None
        parameter.grad.zero_()
    assert given.all()


def test_parts_of_one_tensor_that_do_not_overlap_are_not_copied():
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(2, 6)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ torch.cat([self.a, self.b])) ** 2

    model = Joined()
    torch.compile(model, backend=backend)(torch.randn(3, 4)).sum().backward()
    assert model.a.grad is not None
    assert model.b.grad is not None
    assert model.a.grad.untyped_storage().data_ptr() == model.b.grad.untyped_storage().data_ptr()


def test_dynamic_sizes():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(24)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x.sum(0) + self.a.view(4, 6) + self.b.view(4, 6)) * x

    model = Scaled()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for size in (3, 5):
        compiled(torch.randn(size, 4, 6)).sum().backward()
    assert model.a.grad is not None
    assert model.b.grad is not None
    assert_identical(model.a.grad, model.b.grad)
    with torch.no_grad():
        before = model.b.grad.clone()
        model.a.grad.zero_()
    assert_identical(model.b.grad, before)


def test_strides_of_dimensions_of_size_one_do_not_matter():
    """Autograd takes gradients that differ from their parameters in these alone."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(1, 1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * (self.a.t() + self.b.permute(2, 0, 1).squeeze(-1))).sin()

    model = Turned()
    torch.compile(model, backend=backend)(torch.randn(3, 4, 1)).sum().backward()
    assert model.a.grad is not None
    assert model.b.grad is not None
    before = model.b.grad.clone()
    model.a.grad.zero_()
    assert_identical(model.b.grad, before)
