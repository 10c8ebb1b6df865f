"""What is measured around compiled graphs, and the gradients that backward makes for itself."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import recollect
from recollect.compiled.backend import Call, Notes
from recollect.compiled.timeline import measured_timeline
from tests.compiled._steps import Compiled, as_it_is, observing

CPU = torch.device("cpu")
BYTES = 64 * 64 * 4


def test_a_step_of_two_graphs_is_measured_between_them():
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.exp()  # which saves its result

    function = torch.compile(broken, backend="aot_eager")
    x = torch.randn(64, 64, requires_grad=True)

    def run() -> None:
        out = function(x)
        _work = torch.empty(64, 64)  # beside the graphs, and held from here
        out.backward(torch.ones(1).expand(64, 64))
        x.grad = None

    run()
    timeline = measured_timeline(run, CPU)
    assert timeline is not None
    stretches = timeline.stretches
    assert [each.call for each in stretches] == [
        (False, 0),
        (False, 1),
        (True, 1),
        (True, 0),
        None,
    ]
    before, between, turn, *_ = [each.end for each in stretches]
    assert before == 0
    assert between == BYTES  # the result of sin
    assert turn == 2 * BYTES + 4  # the result of exp, which is saved, and what is beside
    assert all(each.most >= each.end for each in stretches)
    assert timeline.peak >= max(each.most for each in stretches)


def test_a_step_without_compiled_graphs_is_one_stretch():
    timeline = measured_timeline(lambda: torch.empty(64, 64), CPU)
    assert timeline is not None
    (only,) = timeline.stretches
    assert (only.most, only.end, only.call) == (BYTES, 0, None)
    assert timeline.peak == BYTES


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
