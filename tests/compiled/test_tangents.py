"""The gradients that a compiled backward makes before it begins."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import recollect
from recollect.compiled.backend import Call, Notes
from tests.compiled._steps import Compiled, as_it_is, observing


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ x).sin(), x.exp()


def call_of(loss: Callable[..., Tensor], *, dynamic: bool = False) -> Call:
    notes = Notes(calls=[])
    compiled = torch.compile(two, backend=observing(notes), dynamic=dynamic)
    loss(*compiled(torch.randn(8, 8, requires_grad=True))).backward()
    assert notes.calls is not None
    (call,) = notes.calls
    return call


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("loss", "made"),
    [
        (lambda a, b: (a * b).sum(), []),
        (lambda a, b: a.sum() + (b * b).sum(), [0]),  # one number, expanded
        (lambda a, _: (a * a).sum(), [1]),  # it is not used
        (lambda a, b: (a * a).sum() + (b.t().contiguous() ** 2).sum(), [1]),  # transposed
        (lambda a, b: (a[:4] * a[:4]).sum() + (b.view(-1) ** 2).sum(), []),  # through views
    ],
)
def test_it_is_known_which_are_made(loss: Callable[..., Tensor], made: list[int], *, dynamic: bool):
    assert call_of(loss, dynamic=dynamic).made == made


def test_outputs_without_gradient_are_left_out():
    def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.detach() + 1, x.sin(), x.exp()

    notes = Notes(calls=[])
    compiled = torch.compile(three, backend=observing(notes))
    found = compiled(torch.randn(8, 8, requires_grad=True))
    (found[2] ** 2).sum().backward()
    assert notes.calls is not None
    assert [call.made for call in notes.calls] == [[0]]


def test_a_step_whose_loss_is_a_sum_is_simulated_to_the_byte():
    compiled = Compiled("decoder", as_it_is)
    frontier = recollect.frontier(compiled.model, compiled.batch, loss=torch.sum)
    plan = frontier.plan_for(0.75)
    assert plan.compiled is not None
    assert plan.compiled.made == (0,)
    assert plan.excess == 0
