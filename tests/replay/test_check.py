"""Every call is checked against the recording: what differs is right in that very call.

A story is a list of settings, one for each step. The function runs once per step; after a change
it is recorded anew, and if nothing changes any more it is not.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import recollect
from recollect._torch.modes import dispatch_modes_active
from tests._support import assert_identical, assert_transparent, leaf, plain
from tests.rerun.selective._helpers import Ops, total

replay = partial(recollect.checkpoint, engine="replay")


class Watched:
    """A function that counts its runs, and how many of these were recorded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.runs = 0
        self.recorded: list[bool] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        # Only a recording looks at ops.
        self.recorded.append(dispatch_modes_active())
        return self.function(*args, **kwargs)


class Region(nn.Module):
    """Does with ``x`` and a weight what ``self.setting`` says."""

    def __init__(self, forward: Callable[..., Any], setting: Any = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.function = forward
        self.setting = setting

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def tell(
    function: Callable[[Any, Tensor], Any],
    story: list[Any],
    *,
    around: Callable[[Any], Any] = lambda setting: nullcontext(),
    **options: Any,
) -> list[bool]:
    """Go through a story, comparing with plain autograd. Which steps were recorded."""
    region = Region(function)
    watched = Watched(region)
    for number, setting in enumerate(story):
        region.setting = setting
        x = leaf(4, 4)
        expected = outcome(region, x, plain, number, around(setting))
        run = partial(replay, **options)
        assert_identical(outcome(watched, x, run, number, around(setting)), expected)
        weight_grad = region.w.grad
        region.w.grad = None
        assert weight_grad is None
    assert watched.runs == len(story), "the function is run once per step"
    return watched.recorded


def outcome(function: Any, x: Tensor, run: Any, seed: int, context: Any) -> Any:
    """Outputs, gradients, and where the random stream stands."""
    torch.manual_seed(seed)
    module = function.function if isinstance(function, Watched) else function
    with context:
        out = run(function, x)
    outs = [o.float() for o in (out if isinstance(out, (tuple, list)) else [out])]
    grads = torch.autograd.grad(total(outs), [x, module.w], allow_unused=True)
    return [[o.detach() for o in outs], grads, torch.get_rng_state()]


#: Two settings, so that each follows itself and the other.
STORY = [0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0]


def test_a_story_without_changes_is_recorded_once() -> None:
    recorded = tell(lambda m, x: (x @ m.w).sin().exp(), [0] * 6)
    assert recorded == [True] + [False] * 5


def test_a_constant_that_is_not_a_number_is_the_same_in_every_call() -> None:
    recorded = tell(lambda m, x: (x @ m.w).sin().nan_to_num(float("nan")).exp(), [0] * 4)
    assert recorded == [True] + [False] * 3


@pytest.mark.parametrize("kind", ["a parameter", "a tensor"])
def test_a_weight_of_another_type_is_the_same_tensor(kind: str) -> None:
    """The fast test of a function is learned from the types of a call: others fit as well."""

    def pick(m: Any, x: Tensor) -> Tensor:
        w = m.w.detach().requires_grad_() if m.setting == (kind == "a tensor") else m.w
        return (x @ w).sin() * m.w

    assert tell(pick, STORY)[1:3] == [False, False]


# --- the function does something else -------------------------------------------------------------


def _pick(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, x: (second if m.setting else first)(m, x)


OTHERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a constant": lambda m, x: (x.sin() * (2.0 + m.setting)).exp(),
    "a constant of another type": lambda m, x: (x.sin() + (1 if m.setting else 1.5)).exp(),
    "the sign of zero": lambda m, x: (torch.full((4, 4), -0.0 if m.setting else 0.0) * x).atan(),
    "a keyword": lambda m, x: x.sin().sum(dim=m.setting, keepdim=True).exp().sin() * m.w,
    "a string": lambda m, x: F.gelu(x.sin(), approximate="tanh" if m.setting else "none").sin(),
    "a dtype": lambda m, x: x.sin().to(torch.float64 if m.setting else torch.float16).exp(),
    "another branch": _pick(lambda m, x: x.sin().exp(), lambda m, x: x.cos().exp()),
    "another branch, late": lambda m, x: _late(x.sin().exp() * m.w, m.setting),
    "another order of operands": lambda m, x: _ordered(x.sin(), x.exp() @ m.w, m.setting),
    "one tensor twice": lambda m, x: _twice(x.sin(), x.exp(), m.setting),
    "the weight in place of a value": lambda m, x: ((m.w if m.setting else x.sin()) * x).exp(),
    "another index": lambda m, x: (x.sin()[m.setting] * x.exp()[m.setting :].sum(0)).exp(),
    "a list of indices": lambda m, x: x.sin()[[m.setting, 2]].exp(),
    "an ellipsis": _pick(lambda m, x: x.sin()[..., 1].exp(), lambda m, x: x.sin()[1].exp()),
    "another view": _pick(lambda m, x: x.sin().t().exp(), lambda m, x: x.sin()[:, :].exp()),
    "a longer function": lambda m, x: _longer(x.sin().exp(), m.setting),
    "an op in place": lambda m, x: _changed(x.sin(), m.setting).exp(),
    "a detached part": lambda m, x: (x.sin().detach() if m.setting else x.sin()) * x.exp() * m.w,
    "fewer outputs": lambda m, x: [x.sin().exp(), (x @ m.w).sin()][: 2 - m.setting],
    "another output": lambda m, x: [x.sin().exp(), (x @ m.w).sin()][m.setting],
    "a tensor of numbers": lambda m, x: (x.sin() * torch.tensor([1.0, 2.0, m.setting, 4.0])).exp(),
    "a tensor of an array": lambda m, x: (x.sin() * torch.from_numpy(np.full(4, m.setting))).exp(),
    "a dropout": lambda m, x: F.dropout(x.sin(), 0.5, training=bool(m.setting)).exp(),
    "a probability": lambda m, x: F.dropout(x.sin(), 0.2 + 0.3 * m.setting).exp(),
    "grad mode inside": lambda m, x: _without_grad(x.sin() * m.w, m.setting).exp() * m.w,
    "autocast inside": lambda m, x: _in_autocast(m, x.sin(), m.setting).exp(),
    "attention inside": lambda m, x: _attention(x.sin(), bool(m.setting), SDPBackend.MATH),
    "default dtype inside": lambda m, x: x.sin() * _ones(torch.float64 if m.setting else None),
    "an exception caught": lambda m, x: _caught(x.sin(), m.setting).exp(),
    "a reshape of the same size": lambda m, x: _reshaped(x.sin(), m.setting).exp(),
    "a slice with the same size": lambda m, x: x.sin()[m.setting : m.setting + 2].exp(),
    "strides": lambda m, x: (x.t() if m.setting else x).contiguous().sin().exp(),
    "a concatenation": lambda m, x: torch.cat([x.sin(), m.w][:: -1 if m.setting else 1]).exp(),
    "a parameter more": lambda m, x: (x.sin() * (m.w if m.setting else 1.0)).exp(),
}


def _late(h: Tensor, setting: int) -> Tensor:
    h = h.sin() @ h
    return h.sin().exp() if setting else h.cos().exp()


def _ordered(a: Tensor, b: Tensor, setting: int) -> Tensor:
    return torch.sub(b, a).exp() if setting else torch.sub(a, b).exp()


def _twice(a: Tensor, b: Tensor, setting: int) -> Tensor:
    return (a * (a if setting else b)).exp()


def _longer(h: Tensor, setting: int) -> Tensor:
    return h.sin() if setting else h


def _changed(h: Tensor, setting: int) -> Tensor:
    return h.mul_(2.0) if setting else h.mul(2.0)


def _without_grad(h: Tensor, setting: int) -> Tensor:
    with torch.set_grad_enabled(not setting):
        return h.sin()


def _in_autocast(m: Any, h: Tensor, setting: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(setting)):
        return (h @ m.w).sin()


def _attention(h: Tensor, use_other: bool, other: SDPBackend) -> Tensor:
    q = h.view(1, 1, 4, 4)
    with sdpa_kernel(other) if use_other else nullcontext():
        return F.scaled_dot_product_attention(q, q * 2, q.exp(), is_causal=True).sin()


def _ones(dtype: Any) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        return torch.ones(4, 4)
    finally:
        torch.set_default_dtype(before)


def _caught(h: Tensor, setting: int) -> Tensor:
    try:
        return h @ torch.ones(7 if setting else 4)
    except RuntimeError:
        return h.sum(1)


def _reshaped(h: Tensor, setting: int) -> Tensor:
    h = h.view(2, 8) if setting else h.view(8, 2)
    return h.sin().sum(0).sum() * h.view(4, 4)


@pytest.mark.filterwarnings("ignore:engine='replay' does not support:UserWarning")
@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("policy", [None, recollect.policy.everything()], ids=str)
def test_another_thing_is_done_at_another_call(what: str, policy: Any) -> None:
    tell(OTHERS[what], STORY, policy=policy)


SETTLES = [
    "a constant",
    "another branch, late",
    "one tensor twice",
    "another index",
    "a longer function",
    "grad mode inside",
    "autocast inside",
    "attention inside",
    "a dropout",
]


@pytest.mark.parametrize("what", SETTLES)
def test_after_a_change_it_is_recorded_once_and_then_settles(what: str) -> None:
    recorded = tell(OTHERS[what], [0, 0, 0, 1, 1, 1, 1])
    # The call that differs is held from the difference on, and the next is recorded.
    assert recorded == [True, False, False, False, True, False, False]


@pytest.mark.parametrize("what", [what for what in SETTLES if what != "grad mode inside"])
def test_what_was_dropped_before_the_difference_is_replayed(what: str) -> None:
    """The prefix is as recorded: it is run again also in the call that differs."""
    region = Region(lambda m, x: OTHERS[what](m, x.tan().tan().tan()), 0)
    for setting in (0, 0, 1):
        region.setting = setting
        x = leaf(4, 4)
        out = replay(region, x)
        with Ops() as ops:
            total(out if isinstance(out, tuple) else [out]).backward()
        assert ops[torch.ops.aten.tan] == 3


# --- the difference is a write --------------------------------------------------------------------


def _refreshes(m: Any, x: Tensor) -> Tensor:
    """Statistics that are renewed now and then, after they have been read."""
    y = (x + m.state).sin()
    if m.setting:
        m.state.copy_(x.detach()[0])
    return y.exp() * m.w


def _changes_its_input(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    own = recollect.checkpoint(_changes_its_argument, m, x, engine="replay")
    return own * x


def _changes_its_argument(m: Any, x: Tensor) -> Tensor:
    y = (x + m.w).sin()
    if m.setting:
        x.mul_(2)
    return y.exp()


def _changes_what_was_kept(m: Any, x: Tensor) -> Tensor:
    h = x.topk(4).values
    y = (h + m.w).sin() + (x @ m.w + 1).sin()
    if m.setting:
        h.mul_(2)
    return y.exp() * h.sum()


def _changes_what_was_dropped(m: Any, x: Tensor) -> Tensor:
    h = (x * m.w).exp()
    y = (h + 1).sin() * m.w
    h = h + 0
    if m.setting:
        h.mul_(2)
    return y.exp() * h.sin()


def _changes_what_it_does_not_use(m: Any, x: Tensor) -> Tensor:
    h = x.sin()
    y = h @ m.w
    if m.setting:
        h.add_(1)
        return h * m.w
    return y.sin()


def _changes_what_was_saved_for_nothing(m: Any, x: Tensor) -> Tensor:
    h = x + m.w
    y = h * m.w
    if m.setting:
        return h.add_(3)
    return y


WRITERS = [
    _refreshes,
    _changes_its_argument,
    _changes_its_input,
    _changes_what_was_kept,
    _changes_what_was_dropped,
    _changes_what_it_does_not_use,
    _changes_what_was_saved_for_nothing,
]


@pytest.mark.parametrize("story", [STORY, [1 - setting for setting in STORY]], ids=["0", "1"])
@pytest.mark.parametrize("function", WRITERS, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("policy", [None, recollect.policy.everything()], ids=str)
@pytest.mark.filterwarnings("ignore:the policy's .* matched nothing:UserWarning")
def test_something_is_written_after_the_difference(function: Any, story: Any, policy: Any) -> None:
    def scenario(run: Any) -> Any:
        region, found = Region(function), []
        region.state = torch.ones(4)
        for setting in story:
            region.setting = setting
            x = leaf(4, 4)
            out = run(region, x * 1)
            found.append([*torch.autograd.grad(out.sum(), [x, region.w]), region.state.clone()])
        return found

    assert_transparent(scenario, partial(replay, policy=policy))


# --- a function that is never the same ------------------------------------------------------------


def _counts(m: Any, x: Tensor) -> Tensor:
    m.count = getattr(m, "count", 0) + 1
    return (x.sin() * m.count).exp() * m.w


def _drops_layers(m: Any, x: Tensor) -> Tensor:
    x = x @ m.w
    for _ in range(4):
        if m.random.random() < 0.5:
            x = x.sin() @ m.w
    return x.exp()


class Stateful(nn.Module):
    """Its forward depends on a state that every run moves on."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4) / 2)
        self.function = function
        self.random = random.Random(3)
        self.recorded = 0

    def forward(self, x: Tensor) -> Tensor:
        self.recorded += dispatch_modes_active()
        return self.function(self, x)


@pytest.mark.parametrize("function", [_counts, _drops_layers], ids=["counter", "layer drop"])
def test_another_function_at_every_call(function: Any) -> None:
    modules = []

    def scenario(run: Any) -> Any:
        module = Stateful(function)
        modules.append(module)
        found = []
        for _ in range(25):
            x = leaf(4, 4)
            out = run(module, x)
            found.append(torch.autograd.grad(out.sum(), [x, module.w]))
        return found

    assert_transparent(scenario, replay)
    assert modules[0].recorded > 15, "soon there is no use in checking"


def test_a_function_that_settles_after_a_long_time_is_checked_again() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        m.calls = getattr(m, "calls", 0) + 1
        return (x.sin() * min(m.calls, 20)).exp()

    module = Stateful(function)
    for _ in range(140):
        replay(module, leaf(4, 4)).sum().backward()
    module.recorded = 0
    for _ in range(10):
        replay(module, leaf(4, 4)).sum().backward()
    assert module.recorded == 0


def test_routing_that_differs_at_every_call_is_recorded_and_not_run_again() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        rows = (x.detach()[:, 0] > 0).nonzero().flatten()
        return x.index_add(0, rows, (x[rows] @ m.w).sin()).exp()

    def scenario(run: Any) -> Any:
        module = Stateful(function)
        found = []
        for _ in range(12):
            x = leaf(4, 4)
            out = run(module, x)
            with Ops() as ops:
                found.append(torch.autograd.grad(out.sum(), [x, module.w]))
            if run is not plain:
                assert ops[torch.ops.aten.nonzero] == 0
        return found

    assert_transparent(scenario, replay)


# --- what is outside is another one ---------------------------------------------------------------


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.closed = torch.randn(4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x).sin()).exp() * self.closed).sin()


def _freeze(m: Holder) -> None:
    m.a.weight.requires_grad_(requires_grad=not m.a.weight.requires_grad)


def _replace_data(m: Holder) -> None:
    m.a.weight.data = torch.randn(4, 4)


def _replace_by_transposed_data(m: Holder) -> None:
    m.a.weight.data = torch.randn(4, 4).t()


def _replace(m: Holder) -> None:
    m.a.weight = nn.Parameter(torch.randn(4, 4))


def _tie(m: Holder) -> None:
    m.b.weight = m.a.weight


def _other_closure(m: Holder) -> None:
    m.closed = torch.randn(4)


def _closure_with_gradient(m: Holder) -> None:
    m.closed = torch.randn(4, requires_grad=True)


def _closure_of_another_shape(m: Holder) -> None:
    m.closed = torch.randn(1)


def _swap(m: Holder) -> None:
    m.a, m.b = m.b, m.a


def _change_in_place(m: Holder) -> None:
    with torch.no_grad():
        m.a.weight.add_(1)


def _load(m: Holder) -> None:
    m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()})


def _drop_bias(m: Holder) -> None:
    m.a.bias = None


def _add_hook(m: Holder) -> None:
    m.a.register_forward_hook(lambda module, args, out: out.exp())


def _cast(m: Holder) -> None:
    m.double()
    m.a.register_forward_pre_hook(lambda module, args: (args[0].double(),))


CHANGES = [
    (_freeze, False),
    (_replace_data, True),
    (_replace_by_transposed_data, False),
    (_replace, True),
    (_tie, False),
    (_other_closure, True),
    (_closure_with_gradient, False),
    (_closure_of_another_shape, False),
    (_swap, True),
    (_change_in_place, True),
    (_load, True),
    (_drop_bias, False),
    (_add_hook, False),
    (_cast, False),
]


@pytest.mark.parametrize(("change", "fits"), CHANGES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_other_tensors_in_the_place_of_those_of_the_recording(change: Any, fits: bool) -> None:
    """Such as look the same fit the recording; the gradients are right in any case."""
    holder = Holder()
    watched = Watched(holder)
    for step in range(9):
        if step in (3, 6):
            change(holder)
        x = leaf(4)
        wanted = [x, holder.closed, *holder.parameters()]
        wanted = [tensor for tensor in wanted if tensor.requires_grad]
        expected = torch.autograd.grad(holder(x).sum(), wanted)
        assert_identical(torch.autograd.grad(replay(watched, x).sum(), wanted), expected)
    assert watched.recorded[:3] == [True, False, False]
    if fits:
        assert watched.recorded[3:] == [False] * 6


def test_a_function_returns_another_tensor_than_one_that_was_known() -> None:
    """The tensors after it would have each other's numbers."""
    a, b, gradient = torch.randn(4), torch.randn(4), torch.randn(4)

    def function(holder: Tensor, x: Tensor, c: Tensor) -> Tensor:
        h = (x * gradient + a + b).sin()
        found = holder.grad
        product = a * b
        taken = product if found is gradient else found
        return (taken * c).sin() + h

    for step in range(6):
        holder, x, c = leaf(4), leaf(4), leaf(4)
        holder.grad = gradient if step < 3 else torch.randn(4)
        expected = torch.autograd.grad(function(holder, x, c).sum(), [x, c])
        actual = torch.autograd.grad(replay(function, holder, x, c).sum(), [x, c])
        assert_identical(actual, expected)


def test_the_whole_holder_in_training_and_evaluation() -> None:
    def scenario(run: Any) -> Any:
        module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Tanh())
        found = []
        for step in range(12):
            module.train(step in (0, 1, 2, 5, 6, 9))
            module[1].train(step != 2)
            x = leaf(5, 4)
            found.append(torch.autograd.grad(run(module, x).sum(), [x, *module.parameters()]))
            found.append([buffer.clone() for buffer in module.buffers()])
        return found

    assert_transparent(scenario, replay)


def test_one_recording_each_for_training_and_evaluation() -> None:
    recorded = []
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    module.register_forward_pre_hook(lambda *_: recorded.append(dispatch_modes_active()))
    for step in range(8):
        module.train(step % 2 == 0)
        replay(module, leaf(5, 4)).sum().backward()
    assert recorded == [True, True] + [False] * 6


# --- other arguments ------------------------------------------------------------------------------


def test_other_shapes_have_recordings_of_their_own() -> None:
    watched = Watched(lambda x: x.sin().exp().sin())
    for step in range(12):
        x = leaf(3 + step % 3, 2)
        (expected,) = torch.autograd.grad(x.sin().exp().sin().sum(), x)
        assert_identical(torch.autograd.grad(replay(watched, x).sum(), x), (expected,))
    assert watched.recorded == [True] * 3 + [False] * 9


def test_the_number_of_recordings_is_bounded() -> None:
    watched = Watched(lambda x: x.sin().exp().sin())
    for size in range(1, 60):
        replay(watched, leaf(size)).sum().backward()
    assert all(watched.recorded)
    replay(watched, leaf(59))
    assert not watched.recorded[-1], "the last ones are remembered"
    replay(watched, leaf(1))
    assert watched.recorded[-1], "the first ones are not"


LOOKS: dict[str, Callable[[], Tensor]] = {
    "another dtype": lambda: leaf(4, 4, dtype=torch.float64),
    "other strides": lambda: leaf(4, 4).t(),
    "a part": lambda: leaf(8, 4)[2:6],
    "expanded": lambda: leaf(4, 1).expand(4, 4),
    "no gradient": lambda: torch.randn(4, 4),
    "no leaf": lambda: leaf(4, 4) * 1,
    "another shape": lambda: leaf(4, 1),
    "no dimension": leaf,
    "an empty row": lambda: leaf(0, 1, 4),
}


@pytest.mark.parametrize("what", LOOKS)
def test_arguments_of_other_looks(what: str) -> None:
    w = leaf(4, 4)

    def function(x: Tensor) -> Tensor:
        return (x.sin() * w).exp().sin()

    for step in range(8):
        x = LOOKS[what]() if step % 4 > 1 else leaf(4, 4)
        wanted = [x, w] if x.requires_grad else [w]
        expected = torch.autograd.grad(function(x).sum(), wanted)
        assert_identical(torch.autograd.grad(replay(function, x).sum(), wanted), expected)


@dataclass
class Batch:
    x: Tensor
    mask: Tensor | None
    scale: float


ARGUMENTS: dict[str, tuple[Callable[..., Any], Callable[[Tensor, int], tuple[Any, dict[Any, Any]]]]]
ARGUMENTS = {
    "keywords": (
        lambda *, a, b=None: (a.sin() * (2.0 if b is None else b)).exp(),
        lambda x, s: ((), {"a": x, "b": [None, 3.0, x.detach()][s]}),
    ),
    "the order of keywords": (
        lambda **kwargs: torch.sub(*[v.sin() for v in kwargs.values()]).exp(),
        lambda x, s: ((), {"a": x, "b": x.exp()} if s else {"b": x.exp(), "a": x}),
    ),
    "nested": (
        lambda tree: (tree["a"][0].sin() * tree["b"]["c"][1]).exp(),
        lambda x, s: (({"a": [x], "b": {"c": (None, 2.0 + s)}},), {}),
    ),
    "a list of tensors": (
        lambda tensors: torch.stack([t.sin() for t in tensors]).exp(),
        lambda x, s: (([x, x.exp(), x * 2][: 1 + s],), {}),
    ),
    "None": (
        lambda x, y: x.sin().exp() if y is None else (x.sin() * y).exp(),
        lambda x, s: ((x, None if s else x.exp()), {}),
    ),
    "a dataclass": (
        lambda b: (b.x.sin() * b.scale * (1 if b.mask is None else b.mask)).exp(),
        lambda x, s: ((Batch(x, [None, x > 0, None][s], 1.0 + s),), {}),
    ),
    "one tensor twice": (
        lambda a, b: (a.sin() * b.exp()).exp(),
        lambda x, s: ((x, x if s else x.detach().clone()), {}),
    ),
    "a function": (
        lambda f, x: f(x.sin()).exp(),
        lambda x, s: (([torch.cos, torch.tan, Tensor.exp][s], x), {}),
    ),
    "a module": (
        lambda module, x: module(x.sin()).exp(),
        lambda x, s: (([nn.Tanh(), nn.Softmax(-1), nn.GELU()][s], x), {}),
    ),
    "a flag": (
        lambda x, flag: x.sin().exp() if flag else x.cos().exp(),
        lambda x, s: ((x,), {"flag": s > 0}),
    ),
    "a torch.Size": (
        lambda x, size: x.sin().view(size).softmax(0).exp(),
        lambda x, s: ((x, torch.Size([[16], [8, 2], [2, 8]][s])), {}),
    ),
    "a set": (
        lambda x, names: (x.sin() * len(names)).exp(),
        lambda x, s: ((x, set(range(s + 1))), {}),
    ),
    "a generator": (
        lambda x, generator: (x.sin() * torch.rand(4, 4, generator=generator)).exp(),
        lambda x, s: ((x, torch.Generator().manual_seed(s)), {}),
    ),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_other_arguments(what: str) -> None:
    function, make = ARGUMENTS[what]
    for setting in (0, 0, 0, 1, 1, 1, 2, 2, 0, 1, 2, 0):
        x = leaf(4, 4)
        args, kwargs = make(x, setting)
        (expected,) = torch.autograd.grad(function(*args, **kwargs).sum(), x)
        args, kwargs = make(x, setting)
        out = replay(function, *args, **kwargs)
        assert_identical(torch.autograd.grad(out.sum(), x), (expected,))


def test_iterators_are_consumed_once() -> None:
    def function(x: Tensor, factors: Iterator[float]) -> Tensor:
        for factor in factors:
            x = (x * factor).sin()
        return x.exp()

    for step in range(4):
        x = leaf(4)
        (expected,) = torch.autograd.grad(function(x, iter([1.0, 2.0, step])).sum(), x)
        out = replay(function, x, iter([1.0, 2.0, step]))
        assert_identical(torch.autograd.grad(out.sum(), x), (expected,))


# --- surroundings ---------------------------------------------------------------------------------


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _attends(m: Any, x: Tensor) -> Tensor:
    q = (x @ m.w).view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(q, q * 2, q.sin()).exp().sin()


def _makes(m: Any, x: Tensor) -> Tensor:
    return (x.sin() * torch.linspace(0, 1, 4) * m.w * torch.tensor(0.1)).exp()


SURROUNDINGS: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "attention by its parts": (
        _attends,
        lambda s: sdpa_kernel(SDPBackend.MATH) if s else nullcontext(),
    ),
    "default dtype": (_makes, lambda s: _default_dtype(torch.float64 if s else torch.float32)),
    "autocast": (
        lambda m, x: (x @ m.w).sin() @ m.w,
        lambda s: torch.autocast("cpu", torch.bfloat16, enabled=bool(s)),
    ),
    "another autocast": (
        lambda m, x: (x @ m.w).sin() @ m.w,
        lambda s: torch.autocast("cpu", torch.float16 if s else torch.bfloat16),
    ),
    "a device": (_makes, lambda s: torch.device("cpu") if s else nullcontext()),
    "anomaly detection": (
        lambda m, x: (x @ m.w).sin().exp(),
        lambda s: torch.autograd.detect_anomaly() if s else nullcontext(),
    ),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("what", SURROUNDINGS)
def test_other_surroundings(what: str) -> None:
    function, around = SURROUNDINGS[what]
    tell(function, STORY, around=around)


def test_surroundings_that_are_gone_in_backward() -> None:
    """What is replayed does not depend on them."""

    def scenario(run: Any) -> Any:
        region, found = Region(_makes), []
        other = Region(_attends)
        for step in range(6):
            x = leaf(4, 4)
            with _default_dtype(torch.float64 if step > 2 else torch.float32):
                out = run(region, x)
            with sdpa_kernel(SDPBackend.MATH):
                out = out + run(other, x)
            with _default_dtype(torch.float16), torch.autocast("cpu", torch.bfloat16):
                found.append(torch.autograd.grad(out.sum(), [x, region.w, other.w]))
        return found

    assert_transparent(scenario, replay)


THE_FLAG = False


def test_a_global_flag() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return ((x.sin() if THE_FLAG else x.cos()) * m.w).exp()

    def around(setting: int) -> Any:
        global THE_FLAG  # noqa: PLW0603
        THE_FLAG = bool(setting)
        return nullcontext()

    tell(function, STORY, around=around)


def test_a_function_of_torch_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Tensor, inplace: bool = False) -> Tensor:
        return x.tanh()

    relu = F.relu

    def around(setting: int) -> Any:
        monkeypatch.setattr(F, "relu", other if setting else relu)
        return nullcontext()

    tell(lambda m, x: (F.relu(x @ m.w) * m.w).sin(), STORY, around=around)


# --- which recording a function finds -------------------------------------------------------------


def test_a_new_lambda_finds_the_recording_of_the_old_one() -> None:
    w, recorded = leaf(4), []

    def note() -> None:
        recorded.append(dispatch_modes_active())

    for _ in range(4):
        x = leaf(4)
        replay(lambda x: (note(), (x.sin() * w).exp())[1], x).sum().backward()
    assert recorded == [True, False, False, False]


def test_functions_of_one_code_that_do_different_things() -> None:
    def make(inner: Callable[[Tensor], Tensor], factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: (inner(x.sin()) * factor).exp()

    for step in range(12):
        function = make([torch.sin, torch.cos, torch.tanh][step % 3], 1.0 + step % 2)
        x = leaf(4)
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        assert_identical(torch.autograd.grad(replay(function, x).sum(), x), (expected,))


def test_methods_and_partial_functions_and_callable_objects() -> None:
    class Several(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def one(self, x: Tensor) -> Tensor:
            return (x.sin() * self.factor).exp()

        def two(self, x: Tensor) -> Tensor:
            return (x.cos() * self.factor).exp()

        def __call__(self, x: Tensor) -> Tensor:
            return (x.tan() * self.factor).exp()

    def scaled(factor: float, x: Tensor) -> Tensor:
        return (x.sin() * factor).exp()

    a, b = Several(1.0), Several(2.0)
    functions = [a.one, b.one, a.two, b.two, a, b, partial(scaled, 2.0), partial(scaled, 3.0)]
    for step in range(5 * len(functions)):
        function: Any = functions[step % len(functions)]
        x = leaf(4)
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        assert_identical(torch.autograd.grad(replay(function, x).sum(), x), (expected,))


def test_copies_of_a_module_have_recordings_of_their_own() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for step in range(6):
        other = copy.deepcopy(module) if step % 2 else module
        x = leaf(3, 4)
        wanted = [x, *other.parameters()]
        expected = torch.autograd.grad(other(x).sum(), wanted)
        assert_identical(torch.autograd.grad(replay(other, x).sum(), wanted), expected)


def test_the_wrapped_module() -> None:
    """``recollect.checkpointed(module, engine="replay")``: once per step, with keywords."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.runs = 0

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            self.runs += 1
            return (self.linear(x).sin() * scale).exp()

    block = Block()
    bare = copy.deepcopy(block)
    names = list(block.state_dict())
    wrapped = recollect.checkpointed(block, engine="replay")
    assert list(wrapped.state_dict()) == names
    for step in range(6):
        x, scale = leaf(4), 1.0 + step // 3
        expected = torch.autograd.grad(bare(x, scale=scale).sum(), [x, *bare.parameters()])
        out = wrapped(x, scale=scale)
        found = torch.autograd.grad(out.sum(), [x, *wrapped.parameters()])
        assert_identical(found, expected)
    assert block.runs == 6


def test_side_effects_happen_once_and_nobody_is_recomputing() -> None:
    log: list[Any] = []

    def function(x: Tensor) -> Tensor:
        log.append(recollect.is_recomputing())
        h = x.sin()
        h.register_hook(lambda grad: log.append("hook") or grad * 2)
        return h.exp().sin()

    for step in range(4):
        replay(function, leaf(4)).sum().backward()
        assert log == [False, "hook"] * (step + 1)


def test_without_gradient_nothing_is_recorded() -> None:
    watched = Watched(lambda x: x.sin().exp())
    with torch.no_grad():
        for _ in range(3):
            assert not replay(watched, leaf(4)).requires_grad
    with torch.inference_mode():
        replay(watched, torch.randn(4))
    assert watched.recorded == [False] * 4


def test_a_recording_without_gradient_is_not_taken_for_one_with_it() -> None:
    watched = Watched(lambda x, w: (x.sin() * w).exp().sin())
    for step in range(6):
        x, w = torch.randn(4), leaf(4)
        if step % 2:
            assert not replay(watched, x, w.detach()).requires_grad
        else:
            (expected,) = torch.autograd.grad(watched.function(x, w).sum(), w)
            assert_identical(torch.autograd.grad(replay(watched, x, w).sum(), w), (expected,))
