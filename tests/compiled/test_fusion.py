"""Which results Inductor puts into memory, by rules of thumb."""

import torch
from torch import Tensor

from recollect.compiled.fusion import in_memory
from tests.compiled._steps import seen


def in_forward(function, *inputs: Tensor) -> tuple[list[str], list[str]]:
    """The names of the ops of forward whose results have memory, and of those in libraries."""
    joint = seen(function, *inputs).joint
    found, kernels = in_memory(joint)
    ours = [node for node in joint.makers if node in joint.forward]
    named = [[str(n.target) for n in ours if n in which] for which in (found, kernels)]
    return named[0], named[1]


def test_a_chain_of_loops_has_memory_at_its_end():
    x = torch.randn(4, 8, requires_grad=True)
    found, kernels = in_forward(lambda x: x.sin().cos().exp(), x)
    assert found == ["aten.exp.default"]
    assert kernels == []


def test_what_a_library_reads_or_makes_has_memory():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    found, kernels = in_forward(lambda x, w: (x.sin().cos() @ w).exp(), x, w)
    assert found == ["aten.cos.default", "aten.mm.default", "aten.exp.default"]
    assert kernels == ["aten.mm.default"]


def test_what_is_read_after_a_library_has_memory():
    def residual(x: Tensor, w: Tensor) -> Tensor:
        first = x.sin()
        return first + (first.cos() @ w)

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    found, _ = in_forward(residual, x, w)
    assert "aten.sin.default" in found


def test_a_reduction_has_memory():
    def scaled(x: Tensor) -> Tensor:
        made = x.sin().cumsum(0)  # an input of the graph does not count
        return made * made.sum(1, keepdim=True)

    found, _ = in_forward(scaled, torch.randn(4, 8, requires_grad=True))
    assert "aten.sum.dim_IntList" in found
