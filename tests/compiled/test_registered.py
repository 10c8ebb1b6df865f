"""The backend "recollect": ATen ops as they are, by straight-line code."""

import operator
import re
import traceback
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import recollect
from recollect._torch.bindings import quickest_call
from recollect._torch.inductor import min_cut
from recollect.compiled.registered import backend, straight_line
from recollect.compiled.rewrites import fold_views
from tests._support import assert_identical, measure
from tests.compiled._steps import Compiled, as_it_is

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]


def straight(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=backend)


def test_torch_finds_the_backend_by_name():
    _, _, entries = (ROOT / "pyproject.toml").read_text().partition(".torch_dynamo_backends]\n")
    entry = re.match(r'recollect = "(.*):(.*)"', entries)
    assert entry is not None
    assert getattr(import_module(entry[1]), entry[2]) is backend
    assert backend.__name__ == "recollect"


@pytest.mark.parametrize("case", ["decoder_dropout", "conv", "adapted", "hidden"])
def test_steps_are_those_of_aot_eager(case: str):
    expected = Compiled(case, as_it_is).outcome()
    torch.compiler.reset()
    compiled = Compiled(case, straight)
    assert_identical(compiled.outcome(), expected)
    plan = recollect.plan(compiled.model, compiled.batch, 0.9, loss=compiled.loss)
    with plan.applied(compiled.model):
        assert_identical(compiled.outcome(), expected)
        assert compiled.peak() <= plan.budget < plan.plain_peak


def test_a_plan_names_the_backend_that_it_is_for():
    compiled = Compiled("decoder", straight)
    plan = recollect.plan(compiled.model, compiled.batch, 0.8, loss=compiled.loss)
    assert plan.plain_peak == compiled.peak()
    with pytest.raises(ValueError, match="this plan is for backend='recollect'"):
        plan.apply(as_it_is(compiled.bare))


def test_dynamic_sizes():
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).reshape(-1, 2).tanh().view(x.shape[0], -1) * x.shape[0]

    w = torch.randn(6, 4, requires_grad=True)
    compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    for size in (3, 5):
        x = torch.randn(size, 6)
        expected, found = function(x, w), compiled(x, w)
        assert_identical([found], [expected])
        assert_identical(
            torch.autograd.grad(found.sum(), w), torch.autograd.grad(expected.sum(), w)
        )


# --- code -----------------------------------------------------------------------------------------


def traced(function, *inputs) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*inputs)


def test_values_are_freed_after_their_last_use():
    def function(x: Tensor) -> tuple[Tensor]:
        for _ in range(6):
            x = x.sin().cos()
        return (x,)

    x = torch.randn(1000)
    graph = traced(function, x)
    run = straight_line(graph)
    memory = measure(lambda: run([x]), lambda _: None)
    assert memory.peak == 2 * x.nbytes
    given = [x]
    (found,) = run(given)
    assert given == []
    assert_identical(found, *function(x))


def test_all_kinds_of_constants():
    def function(x: Tensor) -> tuple[Tensor, Tensor, None, int]:
        y = torch.full((2, 3), float("-inf"), dtype=torch.float64)
        low, high = torch.aminmax(x)
        z = torch.where(x > low, x, torch.tensor([1.0, 2.0, 3.0])) + y.to(torch.float32)
        return z.nan_to_num(nan=0.5) + high, x[:, 1:].clone(memory_format=torch.preserve_format)

    x = torch.randn(2, 3)
    graph = traced(lambda x: (*function(x), None, 3), x)
    found = straight_line(graph)([x])
    assert_identical(found[:2], function(x))
    assert found[2:] == (None, 3)


def test_an_error_shows_the_line_of_the_graph():
    graph = traced(lambda x: (x @ x,), torch.randn(2, 2))
    run = straight_line(graph)
    with pytest.raises(RuntimeError) as caught:
        run([torch.randn(2, 3)])
    assert "mm = " in traceback.format_tb(caught.value.__traceback__)[-1]


# --- bindings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.mm.default, (torch.randn(2, 2), torch.randn(2, 2)), {}),
        (aten.mul.Tensor, (torch.randn(2), 2.0), {}),
        (aten.add.Tensor, (torch.randn(2), torch.randn(2)), {"alpha": 2}),
        (aten.sum.dim_IntList, (torch.randn(2, 3), [0], True), {}),
        (aten.silu.default, (torch.randn(2),), {}),
        (aten.view.default, (torch.randn(2, 3), [3, 2]), {}),
        (aten.full.default, ([2], 1.5), {"device": torch.device("cpu"), "pin_memory": False}),
    ],
)
def test_an_op_with_a_binding_is_called_by_it(op, args, kwargs):
    function = quickest_call(op, args, kwargs)
    assert function is not op._op
    assert_identical([function(*args, **kwargs)], [op(*args, **kwargs)])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Scalar, (torch.randn(2), 2.0)),  # torch.mul calls mul.Tensor
        (aten._unsafe_view.default, (torch.randn(2, 3), [3, 2])),  # there is none
        (aten.sum.default, (torch.randn(2, 3).to_sparse(),)),
    ],
)
def test_an_op_is_not_replaced_by_another(op, args):
    function = quickest_call(op, args, {})
    assert function is op._op or op is aten.sum.default
    assert_identical([function(*args).to_dense()], [op(*args).to_dense()])


def test_what_is_no_op_is_called_as_it_is():
    assert quickest_call(operator.add, (1, 2), {}) is operator.add


# --- views ----------------------------------------------------------------------------------------


def views_of(function, *inputs: Tensor) -> tuple[int, int]:
    """The views in the joint graph of a function, before and after folding."""
    counts: list[tuple[int, int]] = []

    def split(graph: fx.GraphModule, given, **kwargs):
        before = _views(graph)
        fold_views(graph, kwargs["num_fwd_outputs"])
        counts.append((before, _views(graph)))
        return min_cut(graph, given, **kwargs)

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=straight_line, partition_fn=split)
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    ((before, after),) = counts
    return before, after


def _views(graph: fx.GraphModule) -> int:
    names = ("view", "t.default", "detach")
    return sum(any(name in str(node.target) for name in names) for node in graph.graph.nodes)


def test_views_that_cancel_out_are_folded():
    x = torch.randn(6, 4)
    w, v = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    before, after = views_of(lambda: F.linear(F.linear(x, w).tanh(), v).exp().sum())
    # Left are each weight transposed for its product, and each gradient for that of its weight.
    assert (before, after) == (13, 4)


def test_a_write_to_an_output_is_still_noticed():
    w, v = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x @ w  # `_unsafe_view` of a product, which the backward of the next one needs
        return hidden, (hidden @ v).sum()

    hidden, loss = torch.compile(function, backend=backend, fullgraph=True)(torch.randn(2, 3, 4))
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_view_of_another_type_is_no_reshape():
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        bits = (x * 2).view(2, 6).view(torch.int16).view(4, 6)
        return bits.float().sum(), (x * 3).view(6, 2).view(12).view(3, 4).sum()

    x = torch.randn(3, 4, requires_grad=True)
    found = torch.compile(function, backend=backend, fullgraph=True)(x)
    assert_identical(found, function(x))
