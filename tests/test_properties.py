"""Random programs give the same results, gradients and random streams as plain autograd.

A program is data: steps on a pool of tensors, with blocks and regions inside. It is interpreted
once plainly and once with its regions checkpointed. What plain autograd refuses must be refused, or
be right all the same: the values that backward needs may be recomputed, where plain autograd has
only the overwritten ones.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from tests._support import assert_identical

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
example, given, settings = hypothesis.example, hypothesis.given, hypothesis.settings

aten = torch.ops.aten

# --- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One operation. ``a`` and ``b`` are tensors of the pool, counted from its end."""

    op: str
    a: int = 0
    b: int = 0


@dataclass(frozen=True)
class Block:
    """Steps under ``no_grad``, an ``if`` on the value of a tensor, or a switch that they set."""

    kind: Literal["no_grad", "if", "switch"]
    body: Body
    a: int = 0


@dataclass(frozen=True)
class Region:
    """Steps on a pool of their own, which begins with ``inputs``."""

    body: Body
    inputs: tuple[int, ...] = (0,)
    outputs: tuple[int, ...] = (0,)
    given_by: Literal["args", "kwargs", "list", "closure"] = "args"
    options: dict[str, Any] = field(default_factory=dict)


Instruction = Step | Block | Region
Body = tuple[Instruction, ...]


@dataclass(frozen=True)
class Program:
    """Steps, the tensors that make the loss, and a way to go backward."""

    body: Body
    loss: tuple[int, ...] = (0,)
    backward: str = "backward"


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[1] * grad


LIBRARY = torch.library.Library("recollect_random_programs", "DEF")
LIBRARY.define("noise(Tensor x) -> Tensor")
LIBRARY.impl("noise", lambda x: x + torch.rand_like(x), "CompositeExplicitAutograd")


def noise_by_op(a: Tensor) -> Tensor:
    """An op of a library that draws, and does not say so."""
    return a * torch.ops.recollect_random_programs.noise(a.detach())


def write_elsewhere(a: Tensor) -> None:
    """Another thread writes, which no mode of this one sees."""

    errors = []

    def write() -> None:
        try:
            with torch.no_grad():
                a.mul_(0.5)
        except RuntimeError as error:
            errors.append(error.with_traceback(None))

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


@contextmanager
def switched() -> Iterator[None]:
    """Without the library that computes ``gelu``, by which its last bits are others."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "relu": torch.relu,
    "square": torch.square,
    "clone": torch.clone,
    "sum": lambda a: a.sum(-1, keepdim=True),
    "softmax": lambda a: a.softmax(-1),
    "largest": lambda a: a.max(-1).values,
    "sorted": lambda a: a.sort(-1).values,
    "layer_norm": lambda a: F.layer_norm(a, a.shape[-1:]),
    "cube": Cube.apply,
    "linear": lambda a: a * 0.5 + 1,
    "gelu": F.gelu,
}
RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda a: F.dropout(a, 0.5),
    "noise": lambda a: a * torch.rand_like(a),
    "draw": lambda a: torch.randn(3) + a.detach().mean(),
    "noise_by_op": noise_by_op,
    "poisson": lambda a: a * torch.poisson(a.detach().float().abs(), None),
    "python": lambda a: a * random.random(),
    "gauss": lambda a: a * random.gauss(0, 1),
    "numpy": lambda a: a * float(np.random.rand()),
    "numpy_gauss": lambda a: a * float(np.random.randn()),
}


def elements(a: Tensor) -> int:
    """How many the memory of ``a`` has room for."""
    last = sum(step * (n - 1) for n, step in zip(a.shape, a.stride(), strict=True))
    return a.storage_offset() + last + 1


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda a: a.reshape(-1),
    "transposed": lambda a: a.transpose(0, -1),
    "front": lambda a: a[..., :2],
    "first": lambda a: a[0],
    "row": lambda a: a.unsqueeze(0),
    "chunk": lambda a: a.chunk(2, -1)[0],
    "repeat": lambda a: a.unsqueeze(0).expand(2, *a.shape),
    "detach": torch.detach,
    "placed": lambda a: a.as_strided((2,), (1,), 1) if elements(a) > 2 else a,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > 0, a, b),
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": torch.matmul,
    "product": F.linear,
}
IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "sin_": torch.sin_,
    "relu_": torch.relu_,
    "double_": lambda a: a.mul_(2),
    "zero_": torch.zero_,
    "first_": lambda a: a[..., :1].mul_(0.5),
    "elsewhere_": write_elsewhere,
}
IN_PLACE_BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(b),
    "copy_": lambda a, b: a.copy_(b),
}
#: The numbers of dimensions that an operation takes; a step on any other does nothing.
DIMS = {"first": (2, 4), "largest": (2, 4), "row": (1, 3), "repeat": (1, 3)}
ANY = (1, 4)


class Ema(nn.Module):
    """Scales by a moving average, and then updates it in one of two ways."""

    def __init__(self, assign: bool) -> None:
        super().__init__()
        self.assign = assign
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = (x * (1 + self.mean)).sin()
        if self.assign:
            self.mean = 0.5 * self.mean + x.detach().mean()
        else:
            self.mean.mul_(0.5).add_(x.detach().mean())
        return out


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls.clone()


def stateful_modules() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "ema": Ema(assign=False),
            "assigned_ema": Ema(assign=True),
            "count": Count(),
            "norm": nn.BatchNorm1d(3, affine=False),
        }
    )


STATEFUL = list(stateful_modules())
#: In-place ones thrice: it takes several of them at the right places to be of interest.
WRITING = [*IN_PLACE, *IN_PLACE_BINARY]
OPS = [*UNARY, *RANDOM, *VIEWS, *BINARY, *PRODUCTS, *STATEFUL, *WRITING * 3]
PACKETS = [
    aten.sin,
    aten.tanh,
    aten.mm,
    aten.mul,
    aten.add,
    aten.relu,
    aten.exp,
    aten._softmax,
    aten.native_layer_norm,
    aten.rand_like,
    aten.bernoulli_,
    aten.sort,
    aten.view,
    aten.clone,
]


# --- the interpreter ------------------------------------------------------------------------------


class Interpreter:
    """Runs a program plainly, and takes notes for the checkpointed run to come."""

    def __init__(self) -> None:
        self.wrote_to_input = False
        self.fit_for_reentrant: set[int] = set()
        self._entered: set[int] = set()  # memory of what went into regions
        self._alive: list[Tensor] = []  # so that no memory is used twice

    def execute(self, body: Body, pool: list[Tensor], state: nn.ModuleDict) -> None:
        for instruction in body:
            if isinstance(instruction, Step):
                self._step(instruction, pool, state)
            elif isinstance(instruction, Block):
                self._block(instruction, pool, state)
            else:
                out = self._region(instruction, pool, state)
                pool.extend(out if isinstance(out, tuple) else [out])

    def _step(self, step: Step, pool: list[Tensor], state: nn.ModuleDict) -> None:
        a, b, op = pick(pool, step.a), pick(pool, step.b), step.op
        if not DIMS.get(op, ANY)[0] <= a.dim() <= DIMS.get(op, ANY)[1]:
            return
        if op in UNARY:
            pool.append(UNARY[op](a))
        elif op in RANDOM:
            pool.append(RANDOM[op](a))
        elif op in VIEWS:
            pool.append(VIEWS[op](a))
        elif op in BINARY:
            if broadcast(a, b) is not None:
                pool.append(BINARY[op](a, b))
        elif op in PRODUCTS:
            if a.dim() == b.dim() == 2 and a.shape[-1] == b.shape[0] == b.shape[1]:
                pool.append(PRODUCTS[op](a, b))
        elif op in STATEFUL:
            if op != "norm" or (a.dim() == 2 and a.shape[0] > 1 and a.shape[1] == 3):
                pool.append(state[op](a))
        elif op in IN_PLACE:
            self.note_write(a)
            IN_PLACE[op](a)
        elif broadcast(a, b) == a.shape:
            self.note_write(a)
            IN_PLACE_BINARY[op](a, b)

    def _block(self, block: Block, pool: list[Tensor], state: nn.ModuleDict) -> None:
        if block.kind == "no_grad":
            with torch.no_grad():
                self.execute(block.body, pool, state)
        elif block.kind == "switch":
            with switched():
                self.execute(block.body, pool, state)
        elif pick(pool, block.a).detach().sum() > 0:
            self.execute(block.body, pool, state)

    def _region(self, region: Region, pool: list[Tensor], state: nn.ModuleDict) -> Any:
        inputs = [pick(pool, index) for index in region.inputs]
        closure = inputs if region.given_by == "closure" else []

        def function(*args: Any, **kwargs: Tensor) -> Any:
            given = args[0] if region.given_by == "list" else [*args, *kwargs.values()]
            own = [*closure, *given]
            self.execute(region.body, own, state)
            outputs = tuple(pick(own, index) for index in region.outputs)
            self.note_outputs(region, given, outputs, own)
            return outputs if len(outputs) > 1 else outputs[0]

        self.note_inputs(inputs)
        if region.given_by == "args":
            return self.run(region, function, *inputs)
        if region.given_by == "list":
            return self.run(region, function, inputs)
        named = {f"t{n}": t for n, t in enumerate(inputs)} if region.given_by == "kwargs" else {}
        return self.run(region, function, **named)

    def run(self, region: Region, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def note_inputs(self, inputs: list[Tensor]) -> None:
        self._entered.update(map(memory_of, inputs))

    def note_write(self, tensor: Tensor) -> None:
        self.wrote_to_input |= memory_of(tensor) in self._entered

    def note_outputs(
        self, region: Region, inputs: list[Tensor], outputs: tuple[Tensor, ...], own: list[Tensor]
    ) -> None:
        self._alive += own
        before, after = {memory_of(t) for t in inputs}, {memory_of(t) for t in outputs}
        if (
            region.given_by == "args"
            and any(t.requires_grad for t in inputs)
            and all(map(has_history, outputs))
            and len(after) == len(outputs)
            and not before & after
        ):
            self.fit_for_reentrant.add(id(region))


class Checkpointing(Interpreter):
    """Checkpoints the regions of a program. Has nothing that a region could reach and change."""

    def __init__(self, reentrant: set[int] | None = None) -> None:
        self._reentrant = frozenset(reentrant or ())

    def run(self, region: Region, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if id(region) in self._reentrant:
            return recollect.checkpoint(function, *args, engine="reentrant")
        return recollect.checkpoint(function, *args, **kwargs, **region.options)

    def note_inputs(self, inputs: list[Tensor]) -> None:
        pass

    def note_write(self, tensor: Tensor) -> None:
        pass

    def note_outputs(self, *args: Any) -> None:
        pass


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def has_history(tensor: Tensor) -> bool:
    """Not the same as ``requires_grad``, which is true for a view made under ``no_grad``."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view whose base has been changed in a way that autograd forbids
        return False


def pick(pool: list[Tensor], index: int) -> Tensor:
    return pool[-1 - index % len(pool)]


def broadcast(a: Tensor, b: Tensor) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return None


# --- playing a program ----------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came out of a program, or the error and when it came."""

    results: Any = None
    error: BaseException | None = None
    in_forward: bool = False

    def __post_init__(self) -> None:
        # Neither the frames that it came through nor those of an error handled on the way: they
        # hold tensors, and these the graph.
        if self.error is not None:
            self.error.__traceback__ = self.error.__cause__ = self.error.__context__ = None


def play(program: Program, interpreter: Interpreter) -> Outcome:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    np.random.randn()  # one of a pair: the other is waiting in the state
    leaves = [torch.randn(3, 3).requires_grad_(), torch.rand(2, 3).requires_grad_()]
    constants, state = [torch.randn(3), torch.rand(3, 3)], stateful_modules()
    pool = [*leaves, *constants, leaves[0] * 1.0]
    try:
        interpreter.execute(program.body, pool, state)
    except RuntimeError as error:
        return Outcome(error=error, in_forward=True)
    after_forward = snapshot(pool, state)
    np.random.randn()
    torch.rand(1)
    random.gauss(0, 1)
    trainable = [t for t in pool if t.requires_grad]
    used = [pick(trainable, index) for index in program.loss]
    try:
        gradients = BACKWARDS[program.backward](used, leaves)
    except RuntimeError as error:
        return Outcome(error=error)
    return Outcome([after_forward, snapshot(pool, state), gradients])


def snapshot(pool: list[Tensor], state: nn.ModuleDict) -> Any:
    """All that a user could look at: tensors, buffers, and where the random streams stand."""
    name, keys, *rest = np.random.get_state()
    streams = torch.get_rng_state(), repr(random.getstate()), name, keys.tobytes(), rest
    return [t.detach().clone() for t in (*pool, *state.buffers())], streams


def weighted(tensor: Tensor) -> Tensor:
    """A scalar in which every element counts differently."""
    return (tensor * torch.linspace(0.5, 1.5, tensor.numel()).reshape(tensor.shape)).sum()


def gradients_of(leaves: list[Tensor]) -> list[Tensor | None]:
    return [leaf.grad for leaf in leaves]


def backward(used: list[Tensor], leaves: list[Tensor]) -> Any:
    sum(map(weighted, used)).backward()
    return gradients_of(leaves)


def backward_twice(used: list[Tensor], leaves: list[Tensor]) -> Any:
    loss = sum(map(weighted, used))
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients_of(leaves)


def one_by_one(used: list[Tensor], leaves: list[Tensor]) -> Any:
    for tensor in used:
        weighted(tensor).backward(retain_graph=True)
    return gradients_of(leaves)


def one_by_one_and_free(used: list[Tensor], leaves: list[Tensor]) -> Any:
    for tensor in used:
        weighted(tensor).backward()
    return gradients_of(leaves)


def grad(used: list[Tensor], leaves: list[Tensor]) -> Any:
    return torch.autograd.grad(sum(map(weighted, used)), leaves[:1], allow_unused=True)


def double(used: list[Tensor], leaves: list[Tensor]) -> Any:
    slopes = torch.autograd.grad(
        sum(map(weighted, used)), leaves, create_graph=True, allow_unused=True
    )
    squares = [s.square().sum() for s in slopes if s is not None and s.requires_grad]
    if squares:
        sum(squares).backward()
    return slopes, gradients_of(leaves)


BACKWARDS = {
    function.__name__: function
    for function in (backward, backward_twice, one_by_one, one_by_one_and_free, grad, double)
}


# --- drawing programs -----------------------------------------------------------------------------

#: Mostly the newest tensors. Not integers(0, 5): those have a liking for numbers in the source.
indices = st.sampled_from([0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5])


def tuples(elements: Any, minimum: int, maximum: int) -> Any:
    return st.lists(elements, min_size=minimum, max_size=maximum).map(tuple)


def instructions(depth: int, ops: list[str], checks: list[Any]) -> Any:
    steps = st.builds(Step, st.sampled_from(ops), indices, indices)
    if depth == 0:
        return steps
    body = tuples(instructions(depth - 1, ops, checks), 1, 4)
    options = st.fixed_dictionaries(
        {},
        optional={
            "early_stop": st.just(False),
            "debug": st.just(True),
            "determinism_check": st.sampled_from(checks),
            "policy": st.lists(st.sampled_from(PACKETS), min_size=1, max_size=4, unique=True),
        },
    )
    region = st.builds(
        Region,
        body,
        tuples(indices, 1, 3),
        tuples(indices, 1, 2),
        st.sampled_from(["args", "kwargs", "list", "closure"]),
        st.one_of(st.just({}), options),
    )
    block = st.builds(Block, st.sampled_from(["no_grad", "if", "switch"]), body, indices)
    return st.one_of(steps, region, region, region, block)


def programs(
    ops: list[str] = OPS, backwards: list[str] | None = None, checks: list[Any] | None = None
) -> Any:
    checks = ["values", "none", lambda t: t.shape] if checks is None else checks
    return st.builds(
        Program,
        tuples(instructions(2, ops, checks), 1, 5),
        tuples(indices, 1, 3),
        st.sampled_from(backwards or list(BACKWARDS)),
    )


#: How many programs each property is tried with, if not as many as it says: others every time.
CASES = int(os.environ.get("RECOLLECT_CASES", "0"))


def with_examples(number: int, at_most: int = 1 << 30) -> settings:
    """The same programs every time, unless more are asked for."""
    return settings(
        derandomize=not CASES,
        max_examples=min(CASES or number, at_most),
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
        ],
    )


# --- the properties -------------------------------------------------------------------------------


#: What we say where plain autograd need not: a region cannot run again from overwritten tensors.
CHANGED = ("modified by an inplace operation", "has been mutated")


def writes_elsewhere(program: Program) -> bool:
    """Whether another thread writes, where nobody is to say what backward should have had."""
    return "elsewhere_" in repr(program)


def region(*body: Instruction, **facts: Any) -> Region:
    return Region(body, **facts)


#: Programs that have failed before.
GAINS_A_HISTORY = region(Step("mul_", 1), Step("sin", 1), inputs=(1, 0), given_by="list")
FORBIDDEN_VIEW = region(
    Step("chunk"),
    region(Step("sin_"), inputs=(1,), outputs=(0, 0)),
    region(Step("sin"), inputs=(2, 0)),
)

#: A random region often has none of the ops that its policy keeps.
QUIET = pytest.mark.filterwarnings("ignore:the policy's .* matched nothing:UserWarning")


@QUIET
@with_examples(120)
@example(Program((GAINS_A_HISTORY,)))
@example(Program((FORBIDDEN_VIEW,)))
@given(programs())
def test_random_programs(program: Program) -> None:
    plainly = Interpreter()
    expected = play(program, plainly)
    actual = play(program, Checkpointing())
    if expected.error is None and actual.error is None:
        assert_identical(actual.results, expected.results)
    elif expected.error is None:
        assert isinstance(actual.error, recollect.CheckpointError), actual.error
        assert any(reason in str(actual.error) for reason in CHANGED), actual.error
        assert plainly.wrote_to_input or CHANGED[1] in str(actual.error)
    elif expected.in_forward:
        assert actual.in_forward
        assert type(actual.error) is type(expected.error)
    elif actual.error is None and not writes_elsewhere(program):
        # Quiet where plain autograd is loud: with the values that backward should have had.
        assert CHANGED[0] in str(expected.error)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            right = play(program, Interpreter())
        assert right.error is None
        assert_identical(actual.results, right.results)


NOT_IN_PLACE = [op for op in OPS if op not in WRITING]


@QUIET
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@with_examples(50)
@given(programs(NOT_IN_PLACE, ["backward", "backward_twice", "one_by_one"]))
def test_random_programs_with_the_reentrant_engine(program: Program) -> None:
    """Within its limits, and but for the order in which shares of a gradient are added."""
    plainly = Interpreter()
    expected = play(program, plainly)
    actual = play(program, Checkpointing(plainly.fit_for_reentrant))
    assert expected.error is None
    assert actual.error is None, actual.error
    (*seen, gradients), (*right_seen, right_gradients) = actual.results, expected.results
    assert_identical(seen, right_seen)
    for gradient, right in zip(gradients, right_gradients, strict=True):
        if right is None:  # a region is one node, and gives all its inputs a gradient
            assert gradient is None or not gradient.any()
        else:
            torch.testing.assert_close(gradient, right, equal_nan=True)
