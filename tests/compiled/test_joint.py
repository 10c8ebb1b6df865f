"""Joint graphs: nodes, views, keys, and what Inductor puts into memory."""

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from recollect.compiled.joint import Joint, in_memory, is_dense, key_of, nbytes_of
from tests.compiled._steps import seen


def traced(width: int = 4) -> fx.GraphModule:
    """Forward of a small step, and backward by hand."""

    def joint(primals, tangents):
        x, w = primals
        a, b = (x @ w).split(2, 1)
        y = a.t().sin()
        gx = tangents[0] * a.t().cos() + w.sum() * b.t()
        return [y], [gx]

    shapes = [torch.randn(3, width), torch.randn(width, 4)]
    graph = make_fx(joint, tracing_mode="fake")(shapes, [torch.randn(2, 3)])
    for number, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        node.target = "tangents_1" if number == 2 else f"primals_{number + 1}"
    return graph


def named(joint: Joint) -> dict[str, fx.Node]:
    return {node.name: node for node in joint.nodes}


def test_views_stand_for_what_they_show():
    joint = Joint(traced(), 1)
    nodes = named(joint)
    product = nodes["mm"]
    assert joint.base(nodes["getitem"]) is joint.base(nodes["t"]) is product
    assert joint.is_view(nodes["t"])
    assert not joint.is_view(product)
    assert {node.name for node in joint.readers(product)} >= {"sin", "cos"}
    assert nbytes_of(product) == 3 * 4 * 4


def test_a_result_is_dense_if_its_numbers_fill_its_memory():
    for size, stride, dense in (
        ((3, 4), (4, 1), True),
        ((3, 4), (1, 3), True),
        ((1, 4), (99, 1), True),
        ((3, 4), (8, 1), False),
        ((3, 4), (0, 1), False),
    ):
        node = fx.Graph().placeholder("x")
        node.meta["val"] = torch.empty_strided(size, stride, device="meta")
        assert is_dense(node) is dense


def test_forward_is_what_its_outputs_need():
    joint = Joint(traced(), 1)
    assert {node.name for node in joint.makers if node in joint.forward} == {"mm", "sin"}
    backward = [node.name for node in joint.backward if node in joint.makers]
    assert set(backward) == {"cos", "mul", "sum_1", "mul_1", "add"}
    assert {node.name for node in joint.unclaimed} >= {"sum_1", "mul_1"}
    assert backward.index("cos") < backward.index("mul")


def test_a_graph_is_known_by_its_ops_and_by_the_forms_of_its_inputs():
    assert key_of(traced()) == key_of(traced())
    assert key_of(traced()) != key_of(traced(width=5))


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
