"""No reference cycles: with the garbage collector off, what the user drops dies at once.

Tensors are watched by weak references; nodes of the graph by a token in their ``metadata``, which
lives exactly as long as the node (a node's Python object is only a passing view of it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import recollect
from tests._support import Run, collector_off, compat_rerun, leaf, reentrant, rerun


class Token:
    """Something that a node can hold and a weak reference can watch."""


class Watch:
    """Weak references to what must die."""

    def __init__(self) -> None:
        self._references: dict[str, Callable[[], object]] = {}
        self._count = 0

    def __call__(self, tensor: Tensor, name: str = "activation") -> Tensor:
        self._count += 1
        self._references[f"{name} {self._count}"] = ref(tensor)
        if tensor.grad_fn is not None:
            token = tensor.grad_fn.metadata["token"] = Token()
            self._references[f"node of {name} {self._count}"] = ref(token)
        return tensor

    def alive(self) -> list[str]:
        return [name for name, reference in self._references.items() if reference() is not None]


@pytest.fixture
def watch() -> Iterator[Watch]:
    with collector_off():
        yield Watch()


def selective() -> Any:
    return recollect.create_selective_checkpoint_contexts(
        [torch.ops.aten.exp.default, torch.ops.aten.mul.Tensor]
    )


RERUNS: dict[str, Run] = {
    "rerun": rerun,
    "compat": compat_rerun,
    "full": partial(rerun, early_stop=False),
    "debug": partial(rerun, debug=True),
    "selective": partial(rerun, context_fn=selective),
    "policy": partial(rerun, policy=[torch.ops.aten.sin]),
    "check": partial(rerun, determinism_check=lambda tensor: tensor.shape),
}
CHECKPOINTS = pytest.mark.parametrize(
    "run", [*RERUNS.values(), reentrant], ids=[*RERUNS, "reentrant"]
)
RERUNS_ONLY = pytest.mark.parametrize("run", RERUNS.values(), ids=RERUNS)


def block(watch: Watch, x: Tensor) -> Tensor:
    return watch(watch(watch(x.sin()).exp()).cos())


def region(run: Run, watch: Watch) -> tuple[Tensor, Tensor]:
    """An input that is no leaf, and the region's output: both watched."""
    x = watch(leaf(5) * 2, "input")
    return x, watch(run(partial(block, watch), x), "output")


def test_watch_sees_what_lives(watch: Watch) -> None:
    x, out = region(lambda function, x: function(x), watch)
    del x
    assert len(watch.alive()) == 8, "all but the sine, which nobody saves"
    del out
    assert watch.alive() == []


@CHECKPOINTS
def test_dropped_before_backward(run: Run, watch: Watch) -> None:
    x, out = region(run, watch)
    del x, out
    assert watch.alive() == []


@CHECKPOINTS
def test_dropped_after_backward(run: Run, watch: Watch) -> None:
    x, out = region(run, watch)
    out.sum().backward()
    del x, out
    assert watch.alive() == []


@CHECKPOINTS
def test_input_dies_in_backward_while_the_output_lives(run: Run, watch: Watch) -> None:
    x, out = region(run, watch)
    out.sum().backward()
    held = ref(x)
    del x
    assert held() is None
    assert out.requires_grad


@CHECKPOINTS
def test_dropped_after_backward_with_retain_graph(run: Run, watch: Watch) -> None:
    x, out = region(run, watch)
    out.sum().backward(retain_graph=True)
    del x, out
    assert watch.alive() == []


@RERUNS_ONLY
def test_recomputed_tensors_die_with_a_backward_that_retains_the_graph(
    run: Run, watch: Watch
) -> None:
    x = leaf(5)
    again = Watch()
    out = run(lambda x: block(again if recollect.is_recomputing() else watch, x), x)
    out.sum().backward(retain_graph=True)
    assert again.alive() == []
    assert out.requires_grad


@RERUNS_ONLY
def test_dropped_after_a_partial_backward(run: Run, watch: Watch) -> None:
    def two_heads(x: Tensor) -> tuple[Tensor, Tensor]:
        return block(watch, x), watch(watch((x + 1).tanh()).exp())

    x = watch(leaf(5) * 2, "input")
    first, second = run(two_heads, x)
    first.sum().backward()
    del first
    del x, second
    assert watch.alive() == []


@RERUNS_ONLY
def test_dropped_after_double_backward(run: Run, watch: Watch) -> None:
    x = leaf(5)
    out = watch(run(partial(block, watch), x), "output")
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    watch(slope, "slope").sum().backward()
    del x, out, slope
    assert watch.alive() == []


@RERUNS_ONLY
def test_dropped_after_autograd_grad(run: Run, watch: Watch) -> None:
    x, out = region(run, watch)
    torch.autograd.grad(out.sum(), x)
    del x, out
    assert watch.alive() == []


@CHECKPOINTS
def test_dropped_after_an_error_in_forward(run: Run, watch: Watch) -> None:
    def fail(x: Tensor) -> Tensor:
        block(watch, x)
        raise KeyError

    x = watch(leaf(5) * 2, "input")
    with pytest.raises(KeyError) as info:
        run(fail, x)
    del info, x
    assert watch.alive() == []


@CHECKPOINTS
def test_dropped_after_an_error_in_recomputation(run: Run, watch: Watch) -> None:
    def fail_again(x: Tensor) -> Tensor:
        out = watch(x.sin())
        if recollect.is_recomputing():
            raise KeyError
        return watch(out.exp())

    x = watch(leaf(5) * 2, "input")
    out = run(fail_again, x)
    with pytest.raises(KeyError) as info:
        out.sum().backward()
    del info, x, out
    assert watch.alive() == []


@RERUNS_ONLY
def test_dropped_after_a_mismatch(run: Run, watch: Watch) -> None:
    x = watch(leaf(5) * 2, "input")
    out = run(lambda x: x.sin() if recollect.is_recomputing() else block(watch, x), x)
    with pytest.raises(recollect.CheckpointError) as info:
        out.sum().backward()
    del info, x, out
    assert watch.alive() == []


@RERUNS_ONLY
def test_dropped_after_an_input_was_changed_inside(run: Run, watch: Watch) -> None:
    def change(x: Tensor) -> Tensor:
        x.mul_(2)
        return block(watch, x)

    x = leaf(5) * 2
    held = ref(x)
    out = run(change, x)
    del x, out
    assert held() is None
    assert watch.alive() == []


@RERUNS_ONLY
@pytest.mark.parametrize("go_backward", [False, True], ids=["before_backward", "after_backward"])
def test_dropped_when_nested(run: Run, go_backward: bool, watch: Watch) -> None:
    def middle(x: Tensor) -> Tensor:
        return watch(rerun(partial(block, watch), watch(x.tanh())).exp())

    x = watch(leaf(5) * 2, "input")
    out = watch(run(middle, x), "output")
    if go_backward:
        out.sum().backward()
    del x, out
    assert watch.alive() == []


@CHECKPOINTS
def test_activations_die_when_forward_returns(run: Run, watch: Watch) -> None:
    """All but those that a policy keeps: this is what checkpointing is for."""
    inside = Watch()

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.sin()
            inside._references[f"{len(inside._references)}"] = ref(x)
        return x * 2

    out = run(function, leaf(5))
    assert inside.alive() == []
    assert out.requires_grad


@pytest.mark.parametrize("run", [rerun, reentrant], ids=["rerun", "reentrant"])
def test_function_and_arguments_are_let_go_after_backward(run: Run, watch: Watch) -> None:
    token = Token()

    def function(x: Tensor, _: Any) -> Tensor:
        return x.sin()

    held = ref(token), ref(function)
    out = run(function, leaf(5), token)
    out.sum().backward()
    del token, function, out
    assert [reference() for reference in held] == [None, None]


def test_saved_tensor_read_outside_of_backward_leaves_nothing_behind(watch: Watch) -> None:
    x, out = region(rerun, watch)
    assert torch.equal(out.grad_fn._saved_self, x.detach().sin().exp())
    del x, out
    assert watch.alive() == []


#: Ways to run a module whose tensors may be exchanged once a step is over.
EXCHANGED = RERUNS | {
    "reentrant": reentrant,
    "replay": partial(rerun, engine="replay"),
    "replay, policy": partial(rerun, engine="replay", policy=[torch.ops.aten.sin]),
}


class Tables(torch.nn.Module):
    """A module with large buffers, one of which changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(200, 200))
        self.register_buffer("count", torch.zeros(200, 200))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return (self.linear(x).sin() * self.table[0, 0]).exp() + self.count[1, 1]


@pytest.mark.parametrize("run", EXCHANGED.values(), ids=EXCHANGED)
def test_tensors_can_be_swapped_after_a_step(run: Run) -> None:
    """`torch.utils.swap_tensors` refuses a tensor that somebody has a weak reference to.

    ``module.to`` calls it for parameters that are ``DTensor``s or quantized.
    """
    module = Tables()
    x = leaf(2, 4)
    for _ in range(3):
        run(module, x).sum().backward()
    for tensor in [x, *module.parameters(), *module.buffers()]:
        torch.utils.swap_tensors(tensor, tensor.detach().clone().requires_grad_(tensor.is_leaf))


@pytest.mark.parametrize("calls", [1, 2])
def test_a_tensor_that_backward_does_not_need_can_be_swapped_before(calls: int) -> None:
    """As without checkpointing: autograd has not saved it."""
    x = leaf(4)
    for _ in range(calls):
        offset = torch.randn(4)
        expected = torch.autograd.grad(((x + offset).sin() + offset).sum(), x)
        out = rerun(lambda x: (x + offset).sin() + offset, x, engine="replay")  # noqa: B023
        torch.utils.swap_tensors(offset, torch.randn(4))
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected[0])
