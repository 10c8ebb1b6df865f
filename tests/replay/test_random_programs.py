"""Random programs, several calls each: the results, gradients and random streams of plain autograd.

The programs are those of `tests.test_properties`, with more of what a recording could get wrong:
custom functions, memory that several tensors share, constants and branches of Python, numpy, ops of
libraries, other threads, compiled code. Every region is called with other numbers each time; in
some calls a constant, a branch, a switch, the memory that arguments share or where they begin in it
is another one as well.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect import policy
from recollect.replay import engine
from recollect.replay import recording_cache as library
from tests._support import Doubled, assert_identical, collector_off
from tests.rerun.selective.test_random_programs import Store, policies
from tests.test_properties import (
    BACKWARDS,
    BINARY,
    CHANGED,
    DIMS,
    IN_PLACE,
    IN_PLACE_BINARY,
    LIBRARY,
    PRODUCTS,
    RANDOM,
    STATEFUL,
    UNARY,
    VIEWS,
    Block,
    Interpreter,
    Outcome,
    Program,
    Region,
    Step,
    elements,
    indices,
    pick,
    region,
    snapshot,
    stateful_modules,
    tuples,
    weighted,
    with_examples,
    writes_elsewhere,
)

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
example, given = hypothesis.example, hypothesis.given

pytestmark = [
    # A rule that finds nothing in a random program says so.
    pytest.mark.filterwarnings("ignore:the policy's .* matched nothing"),
    # Torch frowns on some of the writing, and does it.
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
]


# --- more ops -------------------------------------------------------------------------------------


class SineAndCosine(torch.autograd.Function):
    """Two outputs, which it saves, and a tensor that it holds on its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        sine, cosine = x.sin(), x.cos()
        ctx.save_for_backward(sine, cosine)
        ctx.sign = x.sign()
        return sine, cosine

    @staticmethod
    def backward(ctx: Any, of_sine: Tensor, of_cosine: Tensor) -> Tensor:
        sine, cosine = ctx.saved_tensors
        return (of_sine * cosine - of_cosine * sine) * ctx.sign * ctx.sign


class SquareByNumpy(torch.autograd.Function):
    """Computes where torch does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.from_numpy(np.square(x.detach().float().numpy()))
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        return grad * 2 * x + 0 * out


class SetUpApart(torch.autograd.Function):
    """Written the newer way."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, out = ctx.saved_tensors
        return grad * out * y, grad * out * x


def filled_by_numpy(a: Tensor) -> Tensor:
    filled = torch.empty(a.shape)
    filled.numpy()[...] = a.detach().float().numpy() * 3
    return a * filled


def peeked(a: Tensor) -> Tensor:
    b = a.sin()
    assert b.untyped_storage().data_ptr() > 0
    return b.exp() * b


def slope_inside(a: Tensor) -> Tensor:
    """A backward of its own inside the region."""
    with torch.enable_grad():
        point = a.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad((point.sin() * point.exp()).sum(), point)
    return a * slope


def penalty(a: Tensor) -> Tensor:
    """A backward inside the region that goes through its ops, and that is gone through again."""
    if not a.requires_grad or not torch.is_grad_enabled():
        return a * 2
    b = a * a.sin()
    (slope,) = torch.autograd.grad(b.sum(), a, create_graph=True)
    return slope * b


def recovered(a: Tensor) -> Tensor:
    try:
        return torch.mm(a.reshape(1, -1), a.reshape(1, -1, 1))
    except RuntimeError:
        return a.cos()


def into(a: Tensor) -> Tensor:
    result = torch.zeros(a.shape, dtype=a.dtype)
    torch.sin(a.detach(), out=result)
    return a * result


def hooked(a: Tensor) -> Tensor:
    b = a.sin()
    if b.requires_grad:
        b.register_hook(lambda slope: slope * 2)
    return b * b


def own_stream(a: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    torch.rand(2, generator=generator)
    return a * torch.rand(a.shape, generator=generator)


#: A generator of the user's, that goes on from call to call.
OWN = torch.Generator()
#: What an op of a library remembers.
STATE = torch.zeros(())


def moving(x: Tensor) -> Tensor:
    STATE.mul_(0.5).add_(1)
    return x * STATE


LIBRARY.define("moving(Tensor x) -> Tensor")
LIBRARY.impl("moving", moving, "CompositeExplicitAutograd")
LIBRARY.define("scribble(Tensor(a!) x) -> ()")


def scribble(x: Tensor) -> None:
    x.mul_(torch.rand_like(x))


LIBRARY.impl("scribble", scribble, "CompositeExplicitAutograd")


def scribbled(a: Tensor) -> Tensor:
    b = a.detach() * 2
    torch.ops.recollect_random_programs.scribble(b)
    return a * b


def poured(a: Tensor) -> Tensor:
    """A memory of the region that another thread fills."""
    b = torch.zeros(a.shape)
    worker = threading.Thread(target=b.copy_, args=(a.detach(),))
    worker.start()
    worker.join()
    return a * b.exp()


def of_base(a: Tensor) -> Tensor:
    base = a._base
    return a * 1 if base is None else base.detach().reshape(-1)[:2] * 2


def cut_and_joined(a: Tensor) -> Tensor:
    first, *rest = a.unbind(-1)
    return torch.stack([first.exp(), *[each * first for each in rest]], -1)


MORE: dict[str, Callable[[Tensor], Tensor]] = {
    "sine": lambda a: SineAndCosine.apply(a)[0],
    "sine_and_cosine": lambda a: torch.mul(*SineAndCosine.apply(a)),
    "apart": lambda a: SetUpApart.apply(a, a.detach().cos()),
    "cut": cut_and_joined,
    "ordered": lambda a: a.gather(-1, a.argsort(-1)) * a,
    "top": lambda a: a.topk(1, -1).values * a,
    "swapped": lambda a: a[..., [0, -1]],
    "halves": lambda a: torch.cat([each.sin() for each in a.split(2, -1)], -1),
    "into": into,
    "slope": slope_inside,
    "penalty": penalty,
    "hooked": hooked,
    "twice": lambda a: F.dropout(F.dropout(a, 0.2), 0.3),
    "attended": lambda a: F.scaled_dot_product_attention(*[a.reshape(1, -1, 1)] * 3),
    "own_stream": own_stream,
    "widened": lambda a: (a.double() * a).float(),
    "diagonal": lambda a: a.diagonal(0, 0, -1).clone() * 2,
    "foreach": lambda a: torch._foreach_mul([a, a.sin()], [0.5, 2.0])[1] * a,
    "normal": lambda a: torch.normal(a.detach(), 1.0) * a,
    "own_poisson": lambda a: torch.poisson(a.detach().float().abs(), OWN) * a,
    "own_binomial": lambda a: (
        torch.binomial(torch.full(a.shape, 5.0), torch.rand(a.shape), OWN) * a
    ),
    "moving": lambda a: a * torch.ops.recollect_random_programs.moving(a.detach()),
    "scribbled": scribbled,
    "poured": poured,
    "of_base": of_base,
}
#: With these a region is held from some point on, or recorded every time.
UNSTEADY: dict[str, Callable[[Tensor], Tensor]] = {
    "squared_by_numpy": SquareByNumpy.apply,
    "filled_by_numpy": filled_by_numpy,
    "peeked": peeked,
    "recovered": recovered,
    "positive": lambda a: a[a > 0] * 2,
    "item": lambda a: a * a.detach().float().mean().item(),
}
MORE_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "back": lambda a: a[..., 1:],
    "bits": lambda a: a.detach().view(torch.int32).view(torch.float32),
    "strided": lambda a: a.as_strided((2,), (1,), a.storage_offset()),
    "unbound": lambda a: a.unbind(-1)[-1],
    "placed_": lambda a: a.detach().as_strided_((2,), (1,), 1) if elements(a) > 2 else a,
}
MORE_IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "doubled_": Doubled.apply,
    "dropout_": lambda a: F.dropout(a, 0.5, inplace=True),
    "uniform_": lambda a: a.detach().uniform_(),
    "transpose_": lambda a: a.transpose_(0, -1),
    "masked_": lambda a: a.masked_fill_(a > 0, 0.25),
}
#: What depends on a number of Python's, which is another one in some calls.
WITH_NUMBER: dict[str, Callable[[Tensor, float], Any]] = {
    "scaled": lambda a, k: a * k,
    "leaky": lambda a, k: F.leaky_relu(a, k).sin(),
    "rolled": lambda a, k: a.roll(int(4 * k), -1) * a,
    "table": lambda a, k: (a[..., :1] * torch.tensor([k, 1.0])).exp(),
    "asked": lambda a, k: a.sin() * a if k > 0 else a.sin() * 2,
}
WITH_NUMBER_UNSTEADY: dict[str, Callable[[Tensor, float], Any]] = {
    "from_numpy": lambda a, k: (a[..., :1] * torch.from_numpy(np.float32([k, 1.0]))).exp(),
}
WITH_NUMBER_IN_PLACE: dict[str, Callable[[Tensor, float], Any]] = {
    "scaled_": lambda a, k: a.mul_(k),
    "set_": lambda a, k: a[..., 0].fill_(k),
    "item_": lambda a, k: a.__setitem__((..., 0), k),
}

TORCH_RANDOM = ["dropout", "noise", "draw", "noise_by_op", "poisson"]
WRITING = [*IN_PLACE, *IN_PLACE_BINARY, *MORE_IN_PLACE, *WITH_NUMBER_IN_PLACE]
STEADY = [
    *(*UNARY, *MORE, *[*VIEWS, *MORE_VIEWS] * 2, *BINARY, *PRODUCTS),
    *(*WITH_NUMBER, *TORCH_RANDOM, *STATEFUL, "cube", "sine"),
]
OPS = [*STEADY, *RANDOM, *UNSTEADY, *WITH_NUMBER_UNSTEADY, *WRITING * 3]
DIMS_OF = DIMS | {"diagonal": (2, 4)}


# --- the interpreter ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What is the program's and not a tensor's: it may be another one in a later call."""

    number: float = 1.5
    branch: bool = True
    shared: bool = False  #: whether two of the constants are on the same memory
    start: int = 0  #: where tensors from outside begin in their memory
    switch: bool = True  #: whether switches are set


#: The settings of one call after the other.
CALLS: dict[str, tuple[Setting, ...]] = {
    "same": (Setting(),) * 3,
    "number": (Setting(), Setting(), Setting(-0.5), Setting()),
    "number_at_once": (Setting(), Setting(0.25), Setting(0.25), Setting(0.25)),
    "branch": (Setting(), Setting(), Setting(branch=False)),
    "branch_at_once": (Setting(branch=False), Setting(), Setting()),
    "shared": (Setting(), Setting(shared=True), Setting(shared=True), Setting()),
    "shared_later": (Setting(), Setting(), Setting(shared=True), Setting(shared=True), Setting()),
    "no_longer_shared": (Setting(shared=True), Setting(shared=True), Setting()),
    "moved": (Setting(), Setting(), Setting(start=3), Setting(start=3), Setting(start=1)),
    "switch": (Setting(), Setting(), Setting(switch=False), Setting(switch=False)),
    "switch_at_once": (Setting(switch=False), Setting(), Setting()),
    "to_and_fro": tuple(Setting(number) for number in (1.5, -0.5) * 3),
}


class Caller(Interpreter):
    """Runs a program plainly. ``setting`` is changed from call to call."""

    setting = Setting()

    def _step(self, step: Step, pool: list[Tensor], state: nn.ModuleDict) -> None:
        a, op, number = pick(pool, step.a), step.op, self.setting.number
        low, high = DIMS_OF.get(op, (1, 4))
        if not (low <= a.dim() <= high and a.shape[-1] >= 2 and a.numel() <= 1000):
            return
        if op in WRITING:
            self.note_write(a)
        if op in MORE or op in UNSTEADY or op in MORE_VIEWS:
            pool.append((MORE | UNSTEADY | MORE_VIEWS)[op](a))
        elif op in WITH_NUMBER or op in WITH_NUMBER_UNSTEADY:
            pool.append((WITH_NUMBER | WITH_NUMBER_UNSTEADY)[op](a, number))
        elif op in MORE_IN_PLACE:
            MORE_IN_PLACE[op](a)
        elif op in WITH_NUMBER_IN_PLACE:
            WITH_NUMBER_IN_PLACE[op](a, number)
        else:
            super()._step(step, pool, state)

    def _block(self, block: Any, pool: list[Tensor], state: nn.ModuleDict) -> None:
        if block.kind == "branch":
            if self.setting.branch:
                self.execute(block.body, pool, state)
        elif block.kind == "switch" and not self.setting.switch:
            self.execute(block.body, pool, state)
        elif block.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                self.execute(block.body, pool, state)
        else:
            super()._block(block, pool, state)


class Called:
    """The function of one region, the same object in every call, by which recordings are found."""

    def __init__(self) -> None:
        self.function: Callable[..., Any] | None = None
        #: Whether a call did not come to its end, so that there is no recording of it.
        self.has_raised = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.function is not None
        return self.function(*args, **kwargs)


class Replaying(Caller):
    """Runs the regions of a program by the replay engine."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.called: dict[int, Called] = {}

    def run(self, region: Region, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        called = self.called.setdefault(id(region), Called())
        called.function = function
        try:
            return recollect.checkpoint(called, *args, **kwargs, engine="replay", **self.options)
        except RuntimeError:
            called.has_raised = True
            raise
        finally:
            called.function = None

    # Notes are taken by the plain run. To look at a memory's address is to be taken for a writer.

    def note_inputs(self, inputs: list[Tensor]) -> None:
        pass

    def note_write(self, tensor: Tensor) -> None:
        pass

    def note_outputs(self, *args: Any) -> None:
        pass


# --- playing a program ----------------------------------------------------------------------------


def partly_and_the_rest(used: list[Tensor], leaves: list[Tensor]) -> Any:
    loss = sum(map(weighted, used))
    first = torch.autograd.grad(loss, leaves[:1], retain_graph=True, allow_unused=True)
    return first, torch.autograd.grad(loss, leaves[1:], allow_unused=True)


WAYS = BACKWARDS | {"partly_and_the_rest": partly_and_the_rest}
#: All but the one that plain autograd may refuse.
ALLOWED = [name for name in WAYS if name != "one_by_one_and_free"]


def play(program: Program, caller: Caller, call: int, state: nn.ModuleDict) -> Outcome:
    """One call of the whole program: forward, and backward if it gets there."""
    torch.manual_seed(call)
    random.seed(call)
    np.random.seed(call)
    OWN.manual_seed(call)
    STATE.fill_(call)
    start = caller.setting.start
    leaves = [
        placed(torch.randn(3, 3), start).requires_grad_(),
        placed(torch.rand(2, 3), start).requires_grad_(),
    ]
    pool = [*leaves, *constants(caller.setting), leaves[0] * 1.0]
    try:
        caller.execute(program.body, pool, state)
    except RuntimeError as error:
        return Outcome(error=error, in_forward=True)
    after_forward = snapshot(pool, state), OWN.get_state(), STATE.clone()
    torch.rand(1)
    used = [pick([t for t in pool if t.requires_grad], index) for index in program.loss]
    try:
        gradients = WAYS[program.backward](used, leaves)
    except RuntimeError as error:
        return Outcome(error=error)
    after_backward = snapshot(pool, state), OWN.get_state(), STATE.clone()
    return Outcome([after_forward, after_backward, gradients])


def placed(tensor: Tensor, start: int) -> Tensor:
    """``tensor``, after ``start`` other elements of its memory."""
    whole = torch.linspace(-1, 1, start + tensor.numel() + 4)
    piece = whole[start : start + tensor.numel()].view(tensor.shape)
    return piece.copy_(tensor).detach()


def constants(setting: Setting) -> list[Tensor]:
    row, matrix = placed(torch.randn(3), setting.start), placed(torch.rand(3, 3), setting.start)
    return [row, matrix, matrix[1] if setting.shared else torch.rand(3)]


def compare(program: Program, settings: tuple[Setting, ...], **options: Any) -> Replaying:
    """Every call of the program, replayed, against the same plainly."""
    plainly, replaying = Caller(), Replaying(**options)
    state, own_state = stateful_modules(), stateful_modules()
    for call, setting in enumerate(settings):
        plainly.setting = replaying.setting = setting
        before = copy.deepcopy(state)
        expected = play(program, plainly, call, state)
        # An input that has been changed may stay: see the test at the end.
        # Nor need be let go what plain autograd refuses: y.mul_(y) holds itself until backward.
        is_refused = expected.error is not None and not expected.in_forward
        stays = partial(stays_plainly, program, setting, call, before)
        with nullcontext() if is_refused else nothing_is_left_behind(stays):
            actual = play(program, replaying, call, own_state)
        again = None if writes_elsewhere(program) else partial(play, program, plainly, call, before)
        assert_agree(actual, expected, again, wrote_to_input=plainly.wrote_to_input)
    replaying.wrote_to_input = plainly.wrote_to_input
    return replaying


#: What plain autograd does not look into, and we may have no need to: one of several views, whose
#: memory was written to, was saved.
REFUSED = "is a view and its base or another view of its base has been modified inplace"


def assert_agree(
    actual: Outcome, expected: Outcome, again: Callable[[], Outcome] | None, *, wrote_to_input: bool
) -> None:
    if expected.error is None and actual.error is None:
        assert_identical(actual.results, expected.results)
    elif expected.error is None:
        assert isinstance(actual.error, recollect.CheckpointError), actual.error
        assert CHANGED[0] in str(actual.error)
        assert wrote_to_input
    elif expected.in_forward:
        assert actual.in_forward
        assert type(actual.error) is type(expected.error)
    elif actual.error is None and again is not None and REFUSED not in str(expected.error):
        # Quiet where plain autograd is loud: with the values that backward should have had.
        assert CHANGED[0] in str(expected.error)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            right = again()
        assert right.error is None
        assert_identical(actual.results, right.results)


def run_another_backward() -> None:
    """The nodes that a backward that raised had yet to run stay in torch's queue until the next."""
    torch.zeros(1, requires_grad=True).sum().backward()


class Leaving(Caller):
    """Runs a program plainly, and knows which tensors there were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ref[Tensor]] = []

    def execute(self, body: Any, pool: list[Tensor], state: nn.ModuleDict) -> None:
        super().execute(body, pool, state)
        self.seen += map(ref, pool)

    def note_outputs(self, *args: Any) -> None:
        pass  # which holds them


def stays_plainly(program: Program, setting: Setting, call: int, state: nn.ModuleDict) -> bool:
    """Whether plain autograd leaves tensors behind: a graph can hold itself in it, for good."""
    plainly = Leaving()
    plainly.setting = setting
    play(program, plainly, call, copy.deepcopy(state))
    run_another_backward()
    return any(each() is not None for each in plainly.seen)


@contextmanager
def nothing_is_left_behind(stays: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """What a call of a region holds is let go with the graph, without the garbage collector.

    Unless it ``stays`` without checkpointing too.
    """
    held: list[Any] = []
    kind = engine.Rematerializer

    def remat(*args: Any, **kwargs: Any) -> Any:
        made = kind(*args, **kwargs)
        held.append(ref(made))
        return made

    with collector_off(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Rematerializer", remat)
        yield
        run_another_backward()
        assert [each() for each in held if each() is not None] == [] or stays()


# --- drawing programs -----------------------------------------------------------------------------

WAYS_IN = ["args", "args", "kwargs", "list", "closure", "closure"]


def regions(body: Any) -> Any:
    return st.builds(
        Region, body, tuples(indices, 1, 3), tuples(indices, 1, 3), st.sampled_from(WAYS_IN)
    )


def instructions(depth: int, ops: list[str], kinds: list[str]) -> Any:
    steps = st.builds(Step, st.sampled_from(ops), indices, indices)
    if depth == 0:
        return steps
    body = tuples(instructions(depth - 1, ops, kinds), 1, 4)
    block = st.builds(Block, st.sampled_from(kinds), body, indices)
    return st.one_of(steps, steps, steps, regions(body), block)


KINDS = ["no_grad", "no_grad", "branch", "branch", "if", "autocast", "switch"]


def programs(
    ops: list[str] = OPS, backwards: list[str] | None = None, kinds: list[str] = KINDS
) -> Any:
    """A region, with something before and something after."""
    each = instructions(1, ops, kinds)
    main = regions(tuples(instructions(2, ops, kinds), 2, 6))
    body = st.tuples(tuples(each, 0, 2), main, tuples(each, 0, 3))
    return st.builds(
        Program,
        body.map(lambda parts: (*parts[0], parts[1], *parts[2])),
        tuples(indices, 1, 3),
        st.sampled_from(backwards or list(WAYS)),
    )


calls = st.sampled_from([*["same"] * 3, *CALLS]).map(CALLS.__getitem__)


# --- the properties -------------------------------------------------------------------------------

#: Programs that have failed before.
NEVER_ASKED_FOR = Program((region(Step("sin"), Step("tanh")),), (1,))
SAVED_AND_CHANGED = Program((region(Step("sin"), Step("sin_", 1)),))
SAVED_AND_CHANGED_BY_ITSELF = Program((region(Step("sin"), Step("mul_", 1, 1)),), (0, 1))
DIFFERS_AND_SAVES = Program((region(Step("python"), Step("tanh")),), (1,))
KEPT_AND_OVERWRITTEN = Program(
    (region(Step("sorted"), Step("norm"), Step("relu_", 1), Step("zero_", 1)),)
)
#: A graph that holds itself, and that backward does not free.
HOLDS_ITSELF = Program(
    (
        Step("detach"),
        region(Step("linear"), Step("item_", 5), inputs=(1, 0), outputs=(2,)),
        region(
            *(Step("into"), Step("copy_", 5), region(Step("copy_"), outputs=(0, 0))),
            Step("leaky"),
            outputs=(0, 0, 3),
        ),
        *(Step("mul_", 3, 5), Step("flat"), Step("sin")),
        region(Step("sin"), outputs=(0, 0, 0)),
    ),
    (5,),
    "double",
)
KEPT_AND_EXPOSED = Program((region(Step("tanh"), Step("squared_by_numpy")),))
#: Plain autograd refuses the view in forward, after an error that the program catches.
REFUSED_AFTER_ANOTHER = Program(
    (
        Block("no_grad", (Step("sin"), Step("flat", 1))),
        region(Step("sin_"), Step("sin"), inputs=(2,)),
        Step("recovered", 1),
    )
)
#: The same, in the region.
REFUSED_INSIDE = Program(
    (
        Block("no_grad", (Step("placed"),)),
        region(Step("sin"), Step("flat", 1), Step("placed_"), Step("sin", 1)),
    )
)
#: Another thread writes to an input from which something is computed again. Then the region returns
#: it, or writes to it, or goes on otherwise than it was recorded.
WRITTEN_AND_RETURNED = Program(
    (region(Step("tanh"), Step("sin"), Step("elsewhere_", 2), outputs=(0, 2)),), (1,)
)
WRITTEN_TWICE = Program(
    (region(Step("tanh"), Step("sin"), Step("elsewhere_", 2), Step("first_", 2)),)
)
WRITTEN_AND_DIFFERS = Program(
    (
        region(
            *(Step("tanh"), Step("sin")),
            Block("branch", (Step("elsewhere_", 2), Step("exp"), Step("sin_", 3))),
        ),
    )
)


@with_examples(50)
@example(DIFFERS_AND_SAVES, CALLS["same"])
@example(KEPT_AND_OVERWRITTEN, CALLS["same"])
@example(HOLDS_ITSELF, CALLS["same"])
@example(WRITTEN_AND_RETURNED, CALLS["same"])
@example(WRITTEN_TWICE, CALLS["same"])
@example(WRITTEN_AND_DIFFERS, CALLS["branch_at_once"])
@given(programs(), calls)
def test_random_programs(program: Program, settings: tuple[Setting, ...]) -> None:
    compare(program, settings)


@with_examples(45)
@example(SAVED_AND_CHANGED, CALLS["same"], policy.save_ops(torch.ops.aten.sin))
@example(SAVED_AND_CHANGED_BY_ITSELF, CALLS["same"], policy.save_ops(torch.ops.aten.sin))
@example(REFUSED_AFTER_ANOTHER, CALLS["same"], policy.every_nth(torch.ops.aten.sin, 1))
@given(programs(), calls, policies)
def test_random_programs_with_random_policies(
    program: Program, settings: tuple[Setting, ...], chosen: Any
) -> None:
    compare(program, settings, policy=chosen)


@with_examples(30)
@example(NEVER_ASKED_FOR, CALLS["same"])
@example(KEPT_AND_EXPOSED, CALLS["same"])
@given(programs(), calls)
def test_random_programs_with_everything_kept(
    program: Program, settings: tuple[Setting, ...]
) -> None:
    compare(program, settings, policy=policy.everything())


#: Another thread writes to an input that has been sent away.
WRITTEN_ELSEWHERE = Program(
    (region(Step("sin"), Step("elsewhere_", 1), Step("sin", 1), inputs=(0,)),), (0,), "backward"
)


#: Backward is refused, with another region yet to go through.
REFUSED_IN_BACKWARD = Program(
    (
        region(Step("sin"), inputs=(4,)),
        Block("no_grad", (Step("sin"), Step("sin"), Step("sin"))),
        region(
            *(Step("sin"), Block("no_grad", (Step("transpose_"),)), Step("sin"), Step("sin")),
            inputs=(3,),
            outputs=(2,),
        ),
    ),
    (0, 0),
)


@with_examples(30)
@example(REFUSED_IN_BACKWARD, policy.save_ops(torch.ops.aten.sin), False)
@example(WRITTEN_ELSEWHERE, policy.everything(), True)
@example(SAVED_AND_CHANGED, policy.save_ops(torch.ops.aten.sin), True)
@given(programs(), policies, st.booleans())
def test_random_programs_with_a_store(program: Program, chosen: Any, inputs: bool) -> None:
    store = Store()
    options = {"policy": chosen, "store": store, "offload_inputs": inputs}
    compare(program, CALLS["same"], **options)
    run_another_backward()
    assert store.kept == {}


@with_examples(30)
@example(REFUSED_INSIDE, None)
@given(programs(STEADY, ALLOWED, ["no_grad", "branch"]), st.none() | policies)
def test_random_programs_that_do_not_change_are_recorded_once(
    program: Program, chosen: Any
) -> None:
    """No false alarm: every call is found to be like the first.

    But for a region that raises, as it does plainly: a call is recorded when it is over.
    """
    replaying = compare(program, CALLS["same"], policy=chosen)
    for called in replaying.called.values():
        for entry in library._entries.get(called, {}).values():
            assert entry.fallback is entry.unsettled is None
            assert entry.recording is not None or called.has_raised
            assert entry.recording is None or entry.recording.reason is None


# --- compiled parts -------------------------------------------------------------------------------


def doubled(a: Tensor, b: Tensor) -> Tensor:
    return (a.sin() * 2 + b).exp()


def scaled_(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        a.mul_(0.5)
    return a * b


def filled(a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty(a.shape)
    c.copy_(a.detach())
    return c.mul_(2) * b


PARTS = [doubled, scaled_, filled]


class PartlyCompiled:
    """Takes the place of some ops by code that was compiled."""

    def __init__(self, backend: str) -> None:
        torch._dynamo.reset()
        self.parts = {part.__name__: torch.compile(part, backend=backend) for part in PARTS}

    def __call__(self, names: tuple[str, ...], x: Tensor, w: Tensor) -> Tensor:
        h = x.detach() * 2
        y = x
        for number, name in enumerate(names):
            y = self.parts[name](h if number % 2 else h * 2, y.sin() * w)
        return (y * h).sin() * h.exp()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@with_examples(6, at_most=100)
@given(
    tuples(st.sampled_from([part.__name__ for part in PARTS]), 1, 3),
    st.sampled_from(["eager", "aot_eager"]),
    st.sampled_from([None, policy.everything(), policy.save_ops(torch.ops.aten.sin)]),
)
def test_random_parts_that_are_compiled(names: tuple[str, ...], backend: str, chosen: Any) -> None:
    region = PartlyCompiled(backend)
    run = partial(recollect.checkpoint, region, names, engine="replay", policy=chosen)
    for call in range(3):
        torch.manual_seed(call)
        x, w = torch.rand(3, 3).requires_grad_(), torch.rand(3, 3).requires_grad_()
        expected = torch.autograd.grad(region(names, x, w).sum(), [x, w], allow_unused=True)
        actual = torch.autograd.grad(run(x, w).sum(), [x, w], allow_unused=True)
        assert_identical(actual, expected)


# --- what torch gets wrong itself -----------------------------------------------------------------


def test_foreach_in_place_on_a_view() -> None:
    """Under any dispatch mode, torch forgets that a view was changed by one of these."""

    def function(x: Tensor) -> Tensor:
        part = (x * 1.0)[..., 1:]
        torch._foreach_mul_([part, x * 2.0], 0.5)
        return part * part

    for call in range(3):
        x = torch.full((2, 3), call + 1.0, requires_grad=True)
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        out = recollect.checkpoint(function, x, engine="replay")
        assert_identical(torch.autograd.grad(out.sum(), x), (expected,))


def test_an_input_that_gains_a_history_is_let_go() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        x.mul_(w)
        return y

    for _ in range(3):
        with nothing_is_left_behind():
            w = torch.randn(3, requires_grad=True)
            recollect.checkpoint(function, torch.randn(3), w, engine="replay")
