"""Calls that begin to differ in their middle: what follows is recorded, and not simply held."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

import recollect
from recollect import policy
from recollect._torch.autograd import saved_tensor_hooks_active
from recollect._torch.modes import dispatch_mode_count, function_mode_count
from recollect.errors import InputChanged
from tests._support import Doubled, assert_identical, collector_off, leaf, measure, plain, play
from tests.rerun.selective._helpers import Ops

replay = partial(recollect.checkpoint, engine="replay")
OPS = [None, policy.matmuls(), policy.everything()]
pytestmark = pytest.mark.filterwarnings("ignore:the policy's .* matched nothing:UserWarning")

WIDTH, LAYERS = 32, 6


class Net(nn.Module):
    """Layers; before one of them there is a factor."""

    def __init__(self, place: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.place = place
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.place:
                x = x * self.factor
            x = F.gelu(recollect.tag(layer(x), f"layer {number}"))
        return x


#: Of each call. The first records, the others are checked or, after a difference, recorded.
FACTORS = [1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 4.0]


def steps(function: Callable[..., Any], change: Callable[[float], None], run: Any) -> Any:
    """Some training steps, before each of which something changes."""
    seen = []
    for factor in FACTORS:
        change(factor)
        x = leaf(8, WIDTH)
        out = run(function, x)
        out.square().sum().backward()
        seen += [out, x.grad]
    return seen


def of_net(net: Net, run: Any) -> Any:
    net.zero_grad()
    seen = steps(net, partial(setattr, net, "factor"), run)
    return seen, [parameter.grad for parameter in net.parameters()]


@pytest.mark.parametrize("kept", [*OPS, policy.save_named("*")], ids=str)
@pytest.mark.parametrize("place", range(LAYERS))
def test_a_constant_that_changes(place: int, kept: Any) -> None:
    net = Net(place)
    ours = play(partial(of_net, net), partial(replay, policy=kept))
    assert_identical(ours, play(partial(of_net, net), plain))


def test_it_holds_no_more_than_where_it_goes_on_from() -> None:
    net, x = Net(), leaf(64, WIDTH)

    def held(run: Any) -> int:
        return measure(lambda: run(net, x), lambda out: out.sum().backward(), warm_up=False).held

    replay(net, x)
    settled = held(replay)
    net.factor = 2.0
    one = x.nbytes
    assert held(replay) <= settled + 2 * one
    net.factor = 3.0
    assert held(plain) > settled + 8 * one


def test_each_op_that_is_needed_runs_once_more() -> None:
    net, x = Net(), leaf(8, WIDTH)

    def products(run: Any) -> int:
        with Ops() as ops:
            run(net, x).sum().backward()
        return ops[torch.ops.aten.addmm] + ops[torch.ops.aten.mm]

    expected = products(plain) + LAYERS
    assert products(replay) <= expected
    net.factor = 2.0
    assert products(replay) <= expected


class Scaled(Function):
    """Saves what torch does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x.exp())
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return grad * saved, None


class Passing(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode of the user's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Cases:
    """Functions that do one thing up to ``factor``, and something of interest afterwards."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = leaf(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.factor = 1.0

    def dropout(self, x: Tensor) -> Tensor:
        hidden = F.dropout((x @ self.weight).sin(), 0.3) * self.factor
        return F.dropout(hidden.exp(), 0.3).sin()

    def branch(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight).sin()
        return hidden.exp().sin() if self.factor < 2 else (hidden @ self.weight).cos().exp()

    def shorter(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight).sin().exp()
        return hidden if self.factor == 2 else hidden.cos().sin()

    def longer(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight).sin().exp()
        return hidden.cos().sin().exp() if self.factor == 2 else hidden

    def writes_to_what_is_held(self, x: Tensor) -> Tensor:
        product = x @ self.weight
        hidden = (product + 1).exp() * (product - 1).exp()  # it takes less to hold the product
        hidden = hidden * self.factor
        if self.factor % 2 == 0:
            product.mul_(2)
        return hidden.sin() * product.cos()

    def writes_to_an_earlier_view(self, x: Tensor) -> Tensor:
        hidden = x.clone()
        first = hidden[:, ::2]
        other = (x * self.factor).exp()
        first.add_(other[:, ::2])
        return hidden.sin() * first.sum()

    def writes_to_lists(self, x: Tensor) -> Tensor:
        hidden = [x.sin() * 2, x.cos() * self.factor]
        torch._foreach_mul_(hidden, 3.0)
        return hidden[0].exp() * hidden[1].sin()

    def statistics(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x).sin() * self.factor).exp()

    def custom(self, x: Tensor) -> Tensor:
        return Scaled.apply(Scaled.apply(x.sin(), 2.0), self.factor).sin().exp()

    def saved_between(self, x: Tensor) -> Tensor:
        hidden = x.sin()
        return Scaled.apply(hidden * self.factor, self.factor) * hidden

    def a_backward_inside(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight).sin()
        scaled = (hidden * self.factor).exp().sin()
        (slope,) = torch.autograd.grad(scaled.sum(), hidden, create_graph=True)
        return scaled * slope

    def hooks_of_the_user(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            hidden = (x.sin() * self.factor).exp()
        return hidden.sin().exp()

    def hooks_around_the_difference(self, x: Tensor) -> Tensor:
        hidden = x.sin() * self.factor
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            hidden = hidden.exp()
        return hidden.sin().exp()

    def a_mode_of_the_user(self, x: Tensor) -> Tensor:
        with Passing():
            hidden = (x.sin() * self.factor).exp()
        return hidden.sin().exp()

    def a_mode_after_the_difference(self, x: Tensor) -> Tensor:
        hidden = x.sin() * self.factor
        with Passing() if self.factor > 1 else nullcontext():
            hidden = hidden.exp().sin()
        return hidden.exp()

    def no_gradient(self, x: Tensor) -> Tensor:
        hidden = x.sin() * self.factor
        with torch.no_grad():
            scale = hidden.exp().mean()
        return (hidden * scale).sin()

    def autocast(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = (x @ self.weight).sin() * self.factor
            hidden = (hidden @ self.weight).exp()
        return (hidden.float() @ self.weight).sin()

    def a_custom_function_in_place(self, x: Tensor) -> Tensor:
        narrow = Doubled.apply(x @ self.weight[:, :1])
        hidden = (narrow + self.weight[:8]).sin() * (narrow - self.weight[:8]).sin()
        return (hidden * self.factor).exp() * hidden

    def other_looks(self, x: Tensor) -> Tensor:
        narrow = x @ self.weight[:, :1]
        hidden = (narrow + self.weight[:8]).sin() * (narrow - self.weight[:8]).sin()
        narrow.transpose_(0, 1).unsqueeze_(0)
        hidden = hidden * self.factor
        narrow.squeeze_(0).t_()
        return hidden.exp() * hidden + narrow

    def a_backward_and_a_step_inside(self, x: Tensor) -> Tensor:
        point = (x.detach() * 2).requires_grad_()
        (point * point).sum().backward()
        with torch.no_grad():
            point.sub_(point.grad)
        return (x.sin() * self.factor).exp() * point.detach()

    def another_shape(self, x: Tensor) -> Tensor:
        rows = x.sin()[: int(self.factor) + 1]
        return (rows @ self.weight).exp().sin().sum() * x.cos()


NAMES = [name for name in vars(Cases) if name[0] != "_"]


@pytest.mark.parametrize("kept", OPS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_follows_a_difference(name: str, kept: Any) -> None:
    def scenario(run: Any) -> Any:
        cases = Cases()
        seen = steps(getattr(cases, name), partial(setattr, cases, "factor"), run)
        return seen, cases.weight.grad, [*cases.norm.buffers()]

    ours = play(scenario, partial(replay, policy=kept))
    assert_identical(ours, play(scenario, plain))
    assert not saved_tensor_hooks_active()
    assert function_mode_count() == dispatch_mode_count() == 0


def by_numpy(tensor: Tensor) -> None:
    tensor.numpy()[:] = 3


def by_dlpack(tensor: Tensor) -> None:
    torch.from_dlpack(tensor).fill_(3)


def by_another_storage(tensor: Tensor) -> None:
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)).fill_(3)


def by_address(tensor: Tensor) -> None:
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    memory[:] = [3.0] * tensor.numel()


def by_a_function_of_python(tensor: Tensor) -> None:
    tensor.apply_(lambda value: value * 3)


WAYS = [by_numpy, by_dlpack, by_another_storage, by_address, by_a_function_of_python]
PLANS = pytest.mark.parametrize(
    "kept", [*OPS, policy.offload_ops(torch.ops.aten.mm)], ids=["none", "mm", "all", "away"]
)


@PLANS
@pytest.mark.parametrize("write", WAYS)
def test_writes_that_torch_does_not_see(write: Any, kept: Any) -> None:
    """In the call that differs, to what the part before it holds."""
    cases = Cases()

    def function(x: Tensor) -> Tensor:
        narrow = x @ cases.weight[:, :1]  # it takes less to hold this than what is made of it
        hidden = (narrow + cases.weight[:8]).sin()
        if cases.factor % 2 == 0:
            write(narrow.detach())
        return hidden * 2 * hidden

    change = partial(setattr, cases, "factor")
    ours = play(lambda run: steps(function, change, run), partial(replay, policy=kept))
    assert_identical(ours, play(lambda run: steps(function, change, run), plain))


@pytest.mark.parametrize("kept", OPS, ids=str)
@pytest.mark.parametrize("write", [by_numpy, lambda tensor: tensor.mul_(2)], ids=["unseen", "seen"])
def test_writes_where_nothing_can_be_recorded_any_more(write: Any, kept: Any) -> None:
    cases = Cases()

    def function(x: Tensor) -> Tensor:
        narrow = x @ cases.weight[:, :1]
        hidden = (narrow + cases.weight[:8]).sin()
        conjugate = torch.complex(hidden, hidden).conj().imag  # from here on everything is held
        hidden = hidden * cases.factor
        write(narrow.detach())
        return hidden * 2 * hidden * conjugate

    change = partial(setattr, cases, "factor")
    ours = play(lambda run: steps(function, change, run), partial(replay, policy=kept))
    assert_identical(ours, play(lambda run: steps(function, change, run), plain))


def test_an_unseen_write_after_one_that_is_seen() -> None:
    """To a tensor that is held and that the one which is seen has only read."""
    weight, is_changed = leaf(WIDTH, WIDTH), [False]

    def function(x: Tensor) -> Tensor:
        narrow = x @ weight[:, :1]
        hidden = (narrow + weight[:8]).exp() * (narrow - weight[:8]).exp()
        total = torch.zeros_like(narrow)
        total.add_(narrow)
        if is_changed[0]:
            with torch._C.DisableTorchFunction():
                narrow.mul_(2)
        return hidden * total

    run = partial(replay, policy=policy.matmuls())
    for _ in range(2):
        run(function, leaf(8, WIDTH)).sum().backward()
    is_changed[0] = True
    out = run(function, leaf(8, WIDTH))
    with pytest.raises(InputChanged):
        out.sum().backward()


@pytest.mark.parametrize("kept", OPS, ids=str)
def test_the_user_changes_what_the_call_returns(kept: Any) -> None:
    def scenario(run: Any) -> Any:
        cases, seen = Cases(), []

        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            narrow = x @ cases.weight[:, :1]
            hidden = (narrow + cases.weight[:8]).sin() * cases.factor
            return hidden * hidden, (narrow if cases.factor % 2 == 0 else narrow + 1)

        for factor in FACTORS:
            cases.factor = factor
            x = leaf(8, WIDTH)
            out, other = run(function, x)
            other.detach().mul_(2)
            out.sum().backward()
            seen += [out, x.grad]
        return seen

    assert_identical(play(scenario, partial(replay, policy=kept)), play(scenario, plain))


def test_a_name_that_is_given_late() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        first = x.sin()
        second = recollect.tag((first * 2).sin(), "name")
        recollect.tag(first, "name")
        return second * y * first

    for _ in range(3):
        x, y = leaf(4), leaf(4)
        out = replay(function, x, y, policy=policy.save_named("name"))
        ours = torch.autograd.grad(out.sum(), [x, y])
        assert_identical(ours, torch.autograd.grad(function(x, y).sum(), [x, y]))


def test_writes_to_what_is_in_a_store() -> None:
    def scenario(run: Any) -> Any:
        cases = Cases()
        function = cases.writes_to_what_is_held
        seen = steps(function, partial(setattr, cases, "factor"), run)
        return seen, cases.weight.grad

    away = policy.offload_ops(torch.ops.aten.mm)
    assert_identical(play(scenario, partial(replay, policy=away)), play(scenario, plain))


@pytest.mark.parametrize("name", ["dropout", "branch", "writes_to_an_earlier_view", "custom"])
def test_two_backwards(name: str) -> None:
    def scenario(run: Any) -> Any:
        cases, seen = Cases(), []
        for factor in FACTORS:
            cases.factor = factor
            x = leaf(8, WIDTH)
            out = run(getattr(cases, name), x)
            for _ in range(2):
                seen += torch.autograd.grad(out.sum(), x, retain_graph=True)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            seen += torch.autograd.grad(slope.square().sum(), x, allow_unused=True)
        return seen

    assert_identical(play(scenario, replay), play(scenario, plain))


def test_modules_that_a_policy_knows_are_held() -> None:
    net = Net()
    kept = policy.save_modules("layers.*")
    ours = play(partial(of_net, net), partial(replay, policy=kept))
    assert_identical(ours, play(partial(of_net, net), plain))


def test_a_policy_that_is_heard_before_the_difference_only() -> None:
    class Once(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = recollect.tag(self.layers[0](x), "first")
            return (hidden.sin() * self.factor).exp()

    net = Once()
    ours = play(partial(of_net, net), partial(replay, policy=policy.save_named("first")))
    assert_identical(ours, play(partial(of_net, net), plain))


class Stop(Exception):
    pass


def test_an_exception_leaves_nothing_behind() -> None:
    net, fails = Net(), [False]

    def function(x: Tensor) -> Tensor:
        out = net(x).sin()
        if fails[0]:
            raise Stop
        return out.exp()

    for factor in FACTORS:
        net.factor, fails[0] = factor, True
        with pytest.raises(Stop):
            replay(function, leaf(8, WIDTH))
        assert not saved_tensor_hooks_active()
        assert function_mode_count() == dispatch_mode_count() == 0
        fails[0] = False
        x = leaf(8, WIDTH)
        (ours,) = torch.autograd.grad(replay(function, x).sum(), x)
        assert_identical(ours, *torch.autograd.grad(function(x).sum(), x))


def test_nothing_outlives_the_graph() -> None:
    net = Net()
    replay(net, leaf(8, WIDTH))
    net.factor = 2.0
    with collector_off():
        x = leaf(8, WIDTH).sin()
        out = replay(net, x)
        dead = weakref.ref(x), weakref.ref(out)
        out.sum().backward()
        del x, out
        assert [each() for each in dead] == [None, None]
    gc.collect()
