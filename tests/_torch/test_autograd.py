"""Autograd: nodes, saved tensors and their hooks, backward, versions."""

import pytest
import torch

from recollect._torch.autograd import (
    _save_by_node,
    after_each_backward,
    at_end_of_backward,
    backward_allows_reentrant,
    backward_keeps_graph,
    current_graph_task,
    current_node,
    get_graph_exec_group,
    graph_nodes,
    is_in_custom_function,
    packed_by,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    save_tensor,
    saved_tensor_hooks_active,
    set_graph_exec_group,
    set_version,
)


class Probe(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


def in_backward(function, **options):
    """What ``function`` returns when called in a backward."""
    seen = []
    x = torch.ones(1, requires_grad=True)
    Probe.apply(x, lambda: seen.append(function())).backward(**options)
    (result,) = seen
    return result


def test_graph_tasks_are_numbered():
    assert current_graph_task() == -1
    first, second = (in_backward(current_graph_task) for _ in range(2))
    assert first >= 0
    assert second != first


@pytest.mark.parametrize("keeps", [False, True])
def test_whether_backward_keeps_its_graph(keeps):
    assert in_backward(backward_keeps_graph, retain_graph=keeps) is keeps


def test_whether_a_nested_backward_is_allowed():
    assert in_backward(backward_allows_reentrant) is True
    seen = []
    x = torch.ones(1, requires_grad=True)
    out = Probe.apply(x, lambda: seen.append(backward_allows_reentrant()))
    torch.autograd.grad(out, x)
    assert seen == [False]


def test_callbacks_run_at_the_end_of_backward():
    order = []

    def queue():
        at_end_of_backward(lambda: order.append("end"))
        order.append("queued")

    in_backward(queue)
    assert order == ["queued", "end"]


def test_saved_tensor_hooks_nest_as_the_public_ones_do():
    assert not saved_tensor_hooks_active()
    push_saved_tensor_hooks(lambda t: t * 2, lambda t: t + 1)
    try:
        assert saved_tensor_hooks_active()
        saved = torch.ones(1, requires_grad=True).exp().grad_fn
    finally:
        pop_saved_tensor_hooks()
    assert not saved_tensor_hooks_active()
    assert torch.equal(saved._saved_result, torch.ones(1).exp() * 2 + 1)


@pytest.mark.parametrize("make", [save_tensor, _save_by_node])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_is_saved_through_hooks(make, requires_grad):
    x = torch.ones(2, requires_grad=requires_grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t + 1):
        unpack = make(x)
    assert torch.equal(unpack(), torch.full((2,), 3.0))
    assert torch.equal(make(x)(), x)


def test_the_node_that_is_run_is_known():
    assert current_node() is None
    assert in_backward(lambda: current_node().name()) == "ProbeBackward"


def test_the_nodes_of_a_graph_are_found_once_each():
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    names = [node.name() for node in graph_nodes([(y * y.cos()).grad_fn, None])]
    assert names == [
        "MulBackward0",
        "SinBackward0",
        "CosBackward0",
        "torch::autograd::AccumulateGrad",
    ]


def test_what_a_node_saved_is_found_as_it_was_packed():
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t), lambda p: p[1]):
        sin, custom = x.sin(), Custom.apply(x, x)
    for out, count in ((sin, 1), (custom, 2), (x + 1, 0)):
        packed = packed_by(out.grad_fn)
        assert [each[0] for each in packed] == ["packed"] * count
    sin.sum().backward()
    assert packed_by(sin.grad_fn) == []


def test_the_group_of_backwards_is_put_down_and_found():
    assert get_graph_exec_group() is None
    group = object()
    set_graph_exec_group(group)
    try:
        assert get_graph_exec_group() is group
    finally:
        set_graph_exec_group(None)


def test_a_version_is_set():
    tensor = torch.ones(2)
    tensor.add_(1)
    set_version(tensor, 0)
    assert tensor._version == 0


def test_a_custom_function_that_is_applied_is_seen():
    found = []

    def look():
        found.append(is_in_custom_function())

    class WithContext(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            look()
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            look()
            return grad

    class WithSetup(torch.autograd.Function):
        @staticmethod
        def forward(x):
            with torch.enable_grad():
                look()
            return WithContext.apply(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            look()

        @staticmethod
        def backward(ctx, grad):
            look()
            return grad

    out = WithSetup.apply(torch.ones(1, requires_grad=True))
    assert found == [True, True, True]
    out.backward()
    assert found[3:] == [False]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_no_mode_of_autograd_is_taken_for_a_custom_function(mode):
    with mode():
        assert not is_in_custom_function()


def test_what_is_to_happen_after_each_backward():
    calls = []
    run = torch.autograd._engine_run_backward
    first, second = (after_each_backward(lambda n=n: calls.append(n)) for n in (1, 2))
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    first()
    torch.autograd.grad(x.sum(), x)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()
    second()
    second()
    x.sum().backward()
    assert calls == [1, 2, 2, 2]
    assert torch.autograd._engine_run_backward is run
