"""What a step holds around its compiled graphs."""

import torch
from torch import Tensor

from recollect.compiled.timeline import measured_timeline

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
