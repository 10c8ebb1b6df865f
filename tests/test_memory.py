"""Bytes held after forward and at the peak of a step: exact, and never more than torch's.

The numbers come from the allocator's own events; see `tests._support.measure`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import recollect
from tests._support import (
    Memory,
    Run,
    compat_rerun,
    leaf,
    measure,
    plain,
    reentrant,
    rerun,
    torch_reentrant,
    torch_rerun,
)

SIZE = 1024
BYTES = 4 * SIZE


def chain(x: Tensor, length: int = 6) -> Tensor:
    """Each sine saves its input."""
    for _ in range(length):
        x = x.sin()
    return x


# --- exact numbers --------------------------------------------------------------------------------


def step_of_chain(run: Run, length: int) -> Memory:
    x = leaf(SIZE)
    seed = torch.ones(SIZE)

    def backward(out: Tensor) -> None:
        torch.autograd.grad(out, x, seed)

    return measure(lambda: run(lambda x: chain(x, length), x), backward)


@pytest.mark.parametrize("length", [2, 6, 12])
def test_bytes_of_a_chain(length: int) -> None:
    """Plain holds every sine; checkpointed, only the last is left, and it is the output."""
    assert step_of_chain(plain, length).held == length * BYTES
    ours = step_of_chain(functools.partial(rerun, preserve_rng_state=False), length)
    assert ours.held == BYTES
    # The output; the inputs of all sines but the first, whose input is the user's (the last sine is
    # not run again); and the cosine and the gradient of the sine that goes backward first.
    assert ours.peak == (1 + (length - 1) + 2) * BYTES
    assert ours.left == 0


def test_recomputed_tensors_are_freed_as_backward_proceeds() -> None:
    """What a later region recomputes is gone when an earlier one is rerun."""

    def step(run: Run, regions: int) -> Memory:
        x = leaf(SIZE)
        seed = torch.ones(SIZE)

        def forward() -> Tensor:
            out = x
            for _ in range(regions):
                out = run(chain, out, preserve_rng_state=False)
            return out

        return measure(forward, lambda out: torch.autograd.grad(out, x, seed))

    one, four = step(rerun, 1), step(rerun, 4)
    assert four.held == 4 * BYTES
    assert four.peak - one.peak == 3 * BYTES, "the outputs of the three further regions"


def test_tensors_inside_a_region_are_freed_one_by_one() -> None:
    """Gradients of many parameters pile up while recomputed activations go: the peak stays put."""

    def step(run: Run) -> Memory:
        weights = [leaf(SIZE) for _ in range(8)]
        x = leaf(SIZE)

        def product(x: Tensor) -> Tensor:
            for weight in weights:
                x = x * weight
            return x

        def backward(out: Tensor) -> None:
            out.backward(torch.ones(SIZE))
            for tensor in (x, *weights):
                tensor.grad = None

        return measure(lambda: run(product, x), backward)

    # Were they freed only at the end, the eight gradients of the weights would come on top.
    assert step(functools.partial(rerun, preserve_rng_state=False)).peak == (8 + 4) * BYTES


def test_preserving_the_random_state_costs_at_most_that_state() -> None:
    def step(**options: Any) -> Memory:
        x = leaf(SIZE)
        return measure(
            lambda: rerun(lambda x: torch.dropout(x.sin(), 0.5, True).sin(), x, **options),
            lambda out: torch.autograd.grad(out.sum(), x),
        )

    assert step().held - step(preserve_rng_state=False).held <= torch.get_rng_state().nbytes


# --- never more than torch ------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Case(NamedTuple):
    """A step: its forward given a way to run a region, and its backward."""

    forward: Callable[[Run], Any]
    backward: Callable[[Any], object]


def blocks_case(backward: Callable[[Tensor, Tensor], object]) -> Callable[[], Case]:
    def make() -> Case:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(3))
        x = leaf(8, 16, 32)

        def forward(run: Run) -> Tensor:
            out = x
            for block in blocks:
                out = run(block, out)
            return out.square().mean()

        def backward_and_clear(out: Tensor) -> None:
            backward(out, x)
            x.grad = None
            blocks.zero_grad()

        return Case(forward, backward_and_clear)

    return make


def twice(out: Tensor, x: Tensor) -> None:
    out.backward(retain_graph=True)
    out.backward()


def double(out: Tensor, x: Tensor) -> None:
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    slope.sum().backward()


def nested() -> Case:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(4))
    x = leaf(8, 16, 32)

    def forward(run: Run) -> Tensor:
        def pair(first: int, x: Tensor) -> Tensor:
            return run(blocks[first + 1], run(blocks[first], x))

        return run(pair, 2, run(pair, 0, x)).sum()

    def backward(out: Tensor) -> None:
        out.backward()
        x.grad = None
        blocks.zero_grad()

    return Case(forward, backward)


def two_outputs(*, first: int, retain: bool) -> Callable[[], Case]:
    """Backward of one output, then of the other; with ``retain`` they share a trunk."""

    def make() -> Case:
        x = leaf(SIZE)

        def heads(x: Tensor) -> tuple[Tensor, Tensor]:
            trunk = chain(x, 3) if retain else x + 1
            return chain(trunk, 3).sum(), chain(trunk.cos() if retain else x + 2, 3).sum()

        def backward(outputs: tuple[Tensor, Tensor]) -> None:
            outputs[first].backward(retain_graph=retain)
            outputs[1 - first].backward()
            x.grad = None

        return Case(lambda run: run(heads, x), backward)

    return make


def subset_of_inputs(wanted: int) -> Callable[[], Case]:
    def make() -> Case:
        inputs = [leaf(SIZE) for _ in range(3)]

        def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return (chain(a, 4) * chain(b, 4) * chain(c, 4)).sum()

        return Case(
            lambda run: run(function, *inputs),
            lambda out: torch.autograd.grad(out, inputs[wanted]),
        )

    return make


def unused_output() -> Case:
    x = leaf(SIZE)

    def backward(outputs: tuple[Tensor, Tensor]) -> None:
        outputs[0].backward()
        x.grad = None

    return Case(lambda run: run(lambda x: (chain(x, 3).sum(), chain(x + 1, 5)), x), backward)


def backward_inside() -> Case:
    x = leaf(SIZE)

    def function(x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(chain(x, 4).sum(), x, create_graph=True)
        return (slope * chain(x, 2)).sum()

    def backward(out: Tensor) -> None:
        out.backward()
        x.grad = None

    return Case(lambda run: run(function, x), backward)


def views_and_broadcasts() -> Case:
    x = leaf(SIZE)

    def backward(out: Tensor) -> None:
        out.backward()
        x.grad = None

    def function(x: Tensor) -> Tensor:
        matrix = x.sin().view(32, 32)
        return (matrix @ matrix.T).softmax(-1).expand(4, 32, 32).exp().sum()

    return Case(lambda run: run(function, x), backward)


def dead_branch(retain: bool) -> Callable[[], Case]:
    """A part of the graph that nobody can go backward through: a metric, computed and detached."""

    def function(x: Tensor) -> Tensor:
        metric = (x.sigmoid() * x.tanh()).softmax(0).detach().mean()
        return (x * metric).sin()

    def make() -> Case:
        x = leaf(4096)

        def forward(run: Run) -> Tensor:
            out = x
            for _ in range(4):
                out = run(function, out)
            return out.sum()

        def backward(out: Tensor) -> None:
            out.backward(retain_graph=retain)
            x.grad = None

        return Case(forward, backward)

    return make


class Hoarder(torch.autograd.Function):
    """Keeps a tensor on its context, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.big = x.sin()
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp().sin().cos()


def hoarding_nodes() -> Case:
    x = leaf(4096)

    def function(x: Tensor) -> Tensor:
        for _ in range(4):
            x = Hoarder.apply(x)
        return x.sin()

    def backward(out: Tensor) -> None:
        out.backward()
        x.grad = None

    return Case(lambda run: run(function, run(function, x)).sum(), backward)


CASES: dict[str, Callable[[], Case]] = {
    "backward": blocks_case(lambda out, x: out.backward()),
    "retain_graph_twice": blocks_case(twice),
    "double_backward": blocks_case(double),
    "autograd_grad": blocks_case(torch.autograd.grad),
    "nested": nested,
    "first_output_first": two_outputs(first=0, retain=False),
    "second_output_first": two_outputs(first=1, retain=False),
    "first_output_first_retained": two_outputs(first=0, retain=True),
    "second_output_first_retained": two_outputs(first=1, retain=True),
    "gradient_of_the_first_input": subset_of_inputs(0),
    "gradient_of_the_last_input": subset_of_inputs(2),
    "unused_output": unused_output,
    "backward_inside": backward_inside,
    "views_and_broadcasts": views_and_broadcasts,
    "dead_branch": dead_branch(retain=False),
    "dead_branch_retained": dead_branch(retain=True),
    "hoarding_nodes": hoarding_nodes,
}


def assert_no_more_than(make: Callable[[], Case], ours: Run, theirs: Run) -> None:
    def step(run: Run) -> Memory:
        case = make()
        return measure(lambda: case.forward(run), case.backward)

    actual, bound = step(ours), step(theirs)
    assert actual.held <= bound.held
    assert actual.peak <= bound.peak
    assert actual.left == 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", "full"])
def test_rerun_needs_no_more_than_torch(name: str, early_stop: bool) -> None:
    assert_no_more_than(
        CASES[name],
        functools.partial(rerun, early_stop=early_stop),
        functools.partial(torch_rerun, early_stop=early_stop),
    )


def test_compat_needs_no_more_than_torch() -> None:
    assert_no_more_than(CASES["backward"], compat_rerun, torch_rerun)


@pytest.mark.parametrize(
    "make", [CASES["backward"], CASES["retain_graph_twice"]], ids=["backward", "retain_graph_twice"]
)
def test_reentrant_needs_no_more_than_torch(make: Callable[[], Case]) -> None:
    assert_no_more_than(make, reentrant, torch_reentrant)


@pytest.mark.parametrize(
    "ops",
    [
        [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.sum.default],
        [torch.ops.aten.gelu.default, torch.ops.aten.sin.default],
        [],
    ],
    ids=["matmuls", "gelu", "nothing"],
)
@pytest.mark.parametrize("name", ["backward", "nested", "unused_output"])
def test_selective_needs_no_more_than_torch(name: str, ops: list[Any]) -> None:
    def contexts(module: Any) -> Any:
        return functools.partial(module.create_selective_checkpoint_contexts, ops)

    assert_no_more_than(
        CASES[name],
        functools.partial(rerun, context_fn=contexts(recollect)),
        functools.partial(torch_rerun, context_fn=contexts(torch.utils.checkpoint)),
    )


def test_group_needs_no_more_than_torch() -> None:
    def step(run: Run, group: Any) -> Memory:
        x = leaf(SIZE)

        def backward(outputs: tuple[Tensor, Tensor]) -> None:
            with group():
                for output in outputs:
                    output.backward()
            x.grad = None

        return measure(
            lambda: run(lambda x: (chain(x + 1, 4).sum(), chain(x + 2, 4).sum()), x), backward
        )

    actual = step(rerun, recollect.GraphExecGroup)
    bound = step(torch_rerun, torch.utils.checkpoint.GraphExecGroup)
    assert actual.held <= bound.held
    assert actual.peak <= bound.peak
    assert actual.left == 0


# --- many steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        (rerun, 1000),
        (reentrant, 1000),
        (functools.partial(rerun, debug=True), 200),
        (functools.partial(rerun, policy=[torch.ops.aten.sin]), 200),
    ],
    ids=["rerun", "reentrant", "debug", "selective"],
)
def test_many_steps_leave_nothing_behind(run: Run, steps: int) -> None:
    """Nor does one step find more in memory than the one before it."""
    x = leaf(SIZE)
    seed = torch.ones(SIZE)

    def train(steps: int) -> None:
        for _ in range(steps):
            run(chain, x, 3).backward(seed)
            x.grad = None

    train(1)
    one = measure(lambda: None, lambda _: train(1), warm_up=False)
    many = measure(lambda: None, lambda _: train(steps), warm_up=False)
    assert many.left == 0
    assert many.peak == one.peak
