"""A joint graph as ops, values and events."""

import torch
from torch import Tensor

from recollect.compiled.merge import merge_alone
from recollect.compiled.part import FOREVER, NodeCosts, Part, make_part
from tests.compiled._steps import seen

#: Bytes of the tensors of the step below.
SMALL, LARGE = 4 * 8 * 4, 4 * 16 * 4


def step(x: Tensor, w: Tensor) -> Tensor:
    return (x.sin() @ w).cos()


def part_of(function=step, *, fused: bool = False) -> Part:
    inputs = torch.randn(4, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    graph = seen(function, *inputs)
    return make_part(graph.key, graph.joint, NodeCosts(torch.device("cpu")), fused=fused)


def test_forward_is_an_op_for_each_kernel():
    part = part_of()
    assert [op.name for op in part.ops] == ["aten::sin", "aten::mm", "aten::cos"]
    assert [op.reads for op in part.ops] == [(), (0,), (1,)]
    assert [op.makes for op in part.ops] == [(0,), (1,), (2,)]
    assert [value.nbytes for value in part.values] == [SMALL, LARGE, LARGE]
    assert part.dies == [1, 2, FOREVER]
    assert part.outputs == {0: 2}
    assert part.returned == LARGE


def test_backward_reads_what_forward_made_and_its_inputs():
    part = part_of()
    # The gradients of cos, then of the two factors of mm, then of sin, which reads x alone.
    assert [value for value, _ in part.saved] == [0, 1]
    by_value = dict(part.saved)
    assert by_value[1] < by_value[0]
    of_forward, of_backward = part.inputs
    assert of_forward == [[0], [1], []]
    assert {place for places in of_backward for place in places} >= {0, 1}


def test_gradients_are_fixed_bytes_of_backward():
    part = part_of()
    last = part.backward[-1]
    # The gradient of w, and what the gradient of x is made of.
    assert part.backward[0].before == 0
    assert last.during >= 8 * 16 * 4 + SMALL
    events = merge_alone(part).graph.events
    assert {n for event in events for n in event.unpacks} == {*range(len(part.saved))}


def test_loops_without_memory_are_no_ops_if_they_are_fused():
    def chained(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin().cos() @ w).exp().cos()

    whole, fused = part_of(chained), part_of(chained, fused=True)
    assert [op.name for op in whole.ops] == [
        f"aten::{n}" for n in ("sin", "cos", "mm", "exp", "cos")
    ]
    assert [op.name for op in fused.ops] == [f"aten::{n}" for n in ("cos", "mm", "cos")]
    assert fused.inputs[0][0] == [0]  # x, through sin


def test_what_is_returned_is_not_offloaded():
    assert [op.can_offload for op in part_of().ops] == [True, True, False]


def test_loops_end_where_a_kernel_of_a_library_does():
    def chained(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin().cos() @ w).exp().cos()

    assert [*part_of(chained, fused=True).ends] == ["mm", "mm", ""]
    whole = part_of(chained)
    assert [*whole.ends] == [*whole.names]


def test_dropout_holds_a_state_if_it_is_to_run_again():
    def dropped(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x @ w, 0.5)

    states = {op.name: op.state for op in part_of(dropped).ops}
    assert states["aten::mm"] == 0
    assert max(states.values()) > 0


def test_attention_holds_a_state_without_dropout_too():
    def attended(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).view(1, 1, 4, 16)
        return torch.nn.functional.scaled_dot_product_attention(y, y, y)

    states = {op.name: op.state for op in part_of(attended).ops}
    assert states.pop("aten::_scaled_dot_product_flash_attention_for_cpu") == len(
        torch.get_rng_state()
    )
    assert {*states.values()} == {0}
