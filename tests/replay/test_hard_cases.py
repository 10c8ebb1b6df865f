"""Calls that look like the recorded one and are not; memory that changes behind torch's back."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.policy.op_info import op_info
from recollect.replay import record
from recollect.replay.recording_cache import _entries
from tests._support import assert_identical, collector_off
from tests.store._fake import make_store

replay = functools.partial(recollect.checkpoint, engine="replay")


def step(call: Callable[..., Any], seed: int, shape: Any, *others: Any) -> list[Tensor]:
    """The result and the gradient, with fresh arguments."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).requires_grad_()
    out = call(x, *[each.clone() if isinstance(each, Tensor) else each for each in others])
    return [out.detach(), *torch.autograd.grad(out.sum(), x)]


def compare(function: Callable[..., Tensor], *calls: tuple[Any, ...]) -> None:
    """Call the region once for each tuple: the shape of its first argument, and the others."""
    for seed, arguments in enumerate(calls):
        expected = step(function, seed, *arguments)
        assert_identical(step(functools.partial(replay, function), seed, *arguments), expected)


def test_the_looks_of_what_depends_on_a_number_in_a_tensor():
    def function(x: Tensor, n: Tensor) -> Tensor:
        return (x[None, :] * (torch.arange(n) + 1.0)[:, None]).sin().exp()

    compare(function, *[((4,), torch.tensor(n)) for n in (1, 1, 4, 4)])


def test_the_looks_of_what_is_made_of_an_array():
    def function(x: Tensor, values: Any) -> Tensor:
        return (x[None, :] * torch.tensor(values)[:, None]).sin().exp()

    arrays = [np.arange(1, n + 1, dtype=np.float32) for n in (1, 1, 4, 4)]
    compare(function, *[((4,), array) for array in arrays])


def test_memory_handed_out_and_taken_in_again():
    def function(x: Tensor) -> Tensor:
        h = x * 2
        torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(h.detach())).mul_(3)
        return h.sin()

    compare(function, *[((4,),)] * 3)


def test_a_constant_tensor_that_is_changed():
    def function(x: Tensor) -> Tensor:
        m = torch.tensor([1.0, 2.0, 3.0])
        h = (x + m).sin()
        m.mul_(2)
        return h * (x + m).sin()

    compare(function, *[((3,),)] * 3)


def test_sequences_of_other_lengths():
    lstm = nn.LSTM(3, 4)

    def function(x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = lstm(nn.utils.rnn.pack_padded_sequence(x, lengths))
        return packed.data.sin()

    lengths = [[4, 2, 2], [4, 2, 2], [4, 3, 1], [4, 3, 1]]
    compare(function, *[((4, 3, 3), torch.tensor(each)) for each in lengths])


def test_a_gradient_of_another_graph():
    w = torch.randn(4, requires_grad=True)

    def function(x: Tensor, w: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(x.sum(), w, create_graph=True)
        return (g * w).exp()

    for before in (torch.sin, torch.sin, torch.cos, torch.cos):
        expected = torch.autograd.grad(function(before(w), w).sum(), w)
        assert_identical(torch.autograd.grad(replay(function, before(w), w).sum(), w), expected)


@torch.overrides.wrap_torch_function(lambda x: (x,))
def scaled(x: Tensor) -> Tensor:
    return torch.sin(x * SCALE[0])


SCALE = [2.0]


@pytest.fixture(scope="module")
def library():
    library = torch.library.Library("recollect_hard_cases", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: torch.sin(x * SCALE[0]), "CompositeImplicitAutograd")
    yield library
    library._destroy()


@pytest.mark.parametrize("kind", ["function", "op"])
def test_functions_of_others_have_constants_of_their_own(kind, library):
    call = scaled if kind == "function" else torch.ops.recollect_hard_cases.scaled

    def function(x: Tensor) -> Tensor:
        return call(x).exp()

    for SCALE[0] in (2.0, 2.0, 5.0, 5.0):
        compare(function, ((4,),))


def flat_product(x: Tensor, weights: list[Tensor]) -> Tensor:
    whole = torch.empty(0).set_(weights[0].untyped_storage())
    return x.tanh() @ whole.narrow(0, 0, 16).view(4, 4)


def test_a_function_that_looks_at_all_weights_as_one_memory(monkeypatch):
    # As torch.lstm does on CUDA devices. No function that runs here does so.
    library = torch.library.Library("recollect_flat", "DEF")
    library.define("product(Tensor x, Tensor[] weights) -> Tensor")
    library.impl("product", flat_product, "CompositeImplicitAutograd")
    product = torch.ops.recollect_flat.product
    is_of_torch = record.is_of_torch
    monkeypatch.setattr(record, "is_of_torch", lambda f: f is product or is_of_torch(f))
    whole = torch.randn(32)
    weights = [nn.Parameter(whole[:16]), nn.Parameter(whole[16:])]

    def function(x: Tensor) -> Tensor:
        return product(product(x * 2, weights).cos(), weights).sin()

    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(function(x).sum(), x)
    run = recollect.checkpointed(function, engine="replay")
    for _ in range(3):
        out = run(x)
        assert_identical(torch.autograd.grad(out.sum(), x), expected)
    (entry,) = _entries[function.__code__].values()
    assert entry.recording is not None
    assert entry.recording.reason is None
    again = {str(op.op) for op in entry.recording.graph.ops if op.keep is None}
    assert "aten.tanh.default" in again


@pytest.mark.parametrize(("dropout", "train"), [(0.0, True), (0.1, False), (0.1, True)])
def test_dropout_of_a_library_is_known_by_its_arguments(dropout, train):
    op = torch.ops.aten._cudnn_rnn.default
    args = [None] * len(op._schema.arguments)
    for position, argument in enumerate(op._schema.arguments):
        args[position] = {"dropout": dropout, "train": train}.get(argument.name, argument.name)
    info, draws = op_info(op), bool(dropout) and train
    assert info.uses_library_rng(tuple(args)) == draws
    state = "dropout_state" if draws else None
    assert info.without_idle_state(tuple(args)) == (*args[:-1], state)


def test_a_write_through_a_view_of_unknown_place():
    def function(x: Tensor, place: Tensor) -> Tensor:
        h = x.exp() * 2
        h[place].mul_(3)
        return (h + 1).sin() * (h + 2).cos()

    compare(function, *[((4, 3), torch.tensor(n)) for n in (1, 1, 2, 0)])


class Number:
    def __init__(self, value: int) -> None:
        self.value = value

    def __int__(self) -> int:
        return self.value


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported)")
def test_a_write_through_an_alias_that_nobody_was_seen_to_make():
    @torch.jit.script
    def pick(a: Tensor, b: Tensor, i: int) -> Tensor:
        if i == 0:
            return a.view(-1)
        return b.view(-1)

    def function(x: Tensor, which: Number) -> Tensor:
        a, b = x.exp() * 2, x.exp() * 2
        with torch.no_grad():
            pick(a.detach(), b.detach(), int(which)).mul_(3)
        return (a + 1).sin() * (b + 2).cos() * (a + 3).sin() * (b + 4).cos()

    compare(function, *[((4,), Number(n)) for n in (0, 0, 1, 1)])


def test_writes_by_python_functions():
    def function(x: Tensor, m: Tensor) -> Tensor:
        h = (x + m).sin()
        m.apply_(lambda value: value + 1)
        return h * (x + m).sin()

    compare(function, *[((4,), torch.ones(4))] * 3)


def test_an_array_that_is_changed_while_a_tensor_shares_it():
    array = np.ones(3, dtype=np.float32)
    shared = torch.from_numpy(array)

    def outside(x: Tensor, value: float) -> Tensor:
        array[:] = value
        h = ((x + shared) * 1.0).sin()
        array[:] = 5.0
        return h * (x + shared).cos()

    def inside(x: Tensor) -> Tensor:
        own = np.ones(3, dtype=np.float32)
        t = torch.asarray(own)
        h = (x + t).sin()
        own[:] = 5.0
        return h * (x + t).cos()

    compare(outside, *[((3,), value) for value in (1.0, 2.0, 3.0)])
    compare(inside, *[((3,),)] * 3)


def test_a_default_dtype_that_the_function_sets():
    double = [False]

    def function(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64 if double[0] else torch.float32)
        try:
            return (x.double() * (torch.arange(1, 101) / 3)).sin()
        finally:
            torch.set_default_dtype(torch.float32)

    for double[0] in (False, False, True, True):
        compare(function, ((100,),))


def test_running_statistics_that_are_views_of_one_memory():
    norm = nn.BatchNorm1d(3)
    flat = torch.cat([norm.running_mean, norm.running_var])
    norm.running_mean, norm.running_var = flat[:3], flat[3:]
    compare(lambda x: norm(x * 2).sin(), *[((4, 3),)] * 3)


class Scaling(Tensor):
    factor = 2.0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.sin:
            return out.as_subclass(Tensor) * cls.factor
        return out


@pytest.mark.filterwarnings("ignore:engine='replay' does not support:UserWarning")
def test_a_subclass_that_does_something_else():
    x = torch.randn(4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return x.sin().exp()

    for Scaling.factor in (2.0, 2.0, 5.0):
        special = x.as_subclass(Scaling)
        expected = torch.autograd.grad(function(special).sum(), x)
        assert_identical(torch.autograd.grad(replay(function, special).sum(), x), expected)


def test_fake_quantization_with_an_observer():
    from torch.ao.quantization import default_fused_per_channel_wt_fake_quant as make

    for seed in range(3):
        found = []
        for run in (lambda f, x: f(x), replay):
            torch.manual_seed(0)
            fake = make()
            for _ in range(seed + 1):
                x = torch.randn(3, 4).requires_grad_()
                (grad,) = torch.autograd.grad(run(lambda x, f=fake: f(x * 2).sin(), x).sum(), x)
            found.append([grad, *fake.buffers()])
        assert_identical(found[0], found[1])


CONTAINERS = {
    "positional": lambda x, of: x.sin().sum(of).exp().sum() * x,
    "by keyword": lambda x, of: torch.std(x.sin(), dim=of).exp().sum() * x,
    "index": lambda x, of: x.sin()[slice(None) if of else None].exp().sum() * x,
    "nested": lambda x, of: x.sin()[(slice(of and 1), None)].exp().sum() * x,
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("first", [[0], None, (0,)], ids=str)
@pytest.mark.parametrize("then", [None, [0], (0,), [1], -1, [0, 1]], ids=str)
def test_another_container_or_none(name: str, first: Any, then: Any):
    holder = [first]

    def function(x: Tensor) -> Tensor:
        return CONTAINERS[name](x, holder[0])

    for seed, of in enumerate([first, first, then, then, first, then]):
        holder[0] = of
        expected = step(function, seed, (3, 4))
        assert_identical(step(functools.partial(replay, function), seed, (3, 4)), expected)


@pytest.mark.parametrize(
    ("first", "then"),
    [(0.0, -0.0), (1.0, True), (1, 1.0), (float("nan"), 0.0), (2.0, 2.0 + 0j), (0.0, 1e-30)],
)
def test_constants_that_are_nearly_the_same(first: Any, then: Any):
    holder = [first]

    def function(x: Tensor) -> Tensor:
        scaled = torch.copysign(x.sin(), x.new_tensor(1.0) * holder[0].real) * holder[0]
        return (x.new_ones(()) / (scaled * 0 + holder[0])).real.clamp(-9, 9).exp() * x.cos()

    for seed, constant in enumerate([first, first, then, then, first]):
        holder[0] = constant
        expected = step(function, seed, (3, 4))
        assert_identical(step(functools.partial(replay, function), seed, (3, 4)), expected)


def test_weights_that_autocast_has_converted_before():
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh())
    with torch.autocast("cpu", torch.bfloat16):
        for rows in (2, 4):
            for _ in range(2):
                replay(net, torch.randn(rows, 8, requires_grad=True))
    for entry in _entries[net].values():
        assert entry.recording is not None
        assert entry.recording.schedule.kept == frozenset()


def test_a_backward_inside_finds_what_another_one_made():
    def function(x: Tensor) -> Tensor:
        a = x.sin().exp()
        numbers = torch.arange(3, dtype=torch.int32).flip(0)[:, None]
        index = torch.cat([numbers, torch.zeros_like(numbers)], 1).view(torch.int64)
        y = a.gather(0, index) * a.exp().gather(0, index) * a.sin().gather(0, index)
        torch.autograd.backward([y.sum()], retain_graph=True)
        return (y * 2).sin().exp().sin()

    for _ in range(3):
        x = torch.randn(3, 1)
        ours, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        replay(function, ours).sum().backward()
        function(expected).sum().backward()
        assert_identical(ours.grad, expected.grad)
    (entry,) = _entries[function.__code__].values()
    assert entry.recording is not None
    assert entry.recording.reason is None


@pytest.mark.parametrize("engine", ["rerun", "replay"])
def test_a_policy_keeps_nothing_alive(engine: str):
    class Model:
        pass

    def train() -> Any:
        model = Model()

        def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            assert model
            return recollect.CheckpointPolicy.PREFER_RECOMPUTE

        x = torch.randn(2, 2, requires_grad=True)
        kept = recollect.policy.matmuls() | keep
        recollect.checkpoint(
            lambda x: (x @ x).sin(), x, policy=kept, engine=engine
        ).sum().backward()
        return weakref.ref(model)

    with collector_off():
        alive = train()
        _entries.clear()
        assert alive() is None


def test_the_collector_ends_a_generator_in_the_midst_of_a_region():
    @torch.no_grad()
    def numbers() -> Any:
        yield 1
        yield 2

    unfinished: list[Any] = []

    def function(x: Tensor) -> Tensor:
        hidden = x.sin()
        unfinished.clear()  # which switches gradients off and on again
        return hidden.exp()

    for call in range(4):
        if call % 2:
            unfinished.append(numbers())
            next(unfinished[0])
        step(functools.partial(replay, function), call, (3,))
    (entry,) = _entries[function.__code__].values()
    assert entry.recording is not None
    assert entry.difference is None


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_store_without_room_that_the_region_knows_how_to_do_without(failing: int):
    class Store:
        def __init__(self) -> None:
            self.count, self.tensors = 0, {}

        def put(self, tensor: Tensor) -> object:
            self.count += 1
            if self.count == failing:
                raise MemoryError("no room")
            self.tensors[self.count] = tensor.clone()
            return self.count

        def get(self, handle: int) -> Tensor:
            return self.tensors[handle].clone()

        def drop(self, handle: int) -> None:
            del self.tensors[handle]

    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]

    def function(x: Tensor) -> Tensor:
        for weight in weights:
            try:
                y = x @ weight
            except MemoryError:
                y = (x @ weight) * 1.0
            x = y.sin()
        return x

    x, store = torch.randn(8, 8, requires_grad=True), Store()
    expected = torch.autograd.grad(function(x).sum(), [x, *weights])
    run = recollect.checkpointed(
        function, engine="replay", policy=recollect.policy.matmuls(), store=store
    )
    for _ in range(3):
        out = run(x)
        assert_identical(torch.autograd.grad(out.sum(), [x, *weights]), expected)
        del out
        assert not store.tensors


class Holding:
    """A store that holds what it is given."""

    def put(self, tensor: Tensor) -> Tensor:
        return tensor

    def get(self, handle: Tensor) -> Tensor:
        return handle

    def drop(self, handle: Tensor) -> None:
        pass


STORES = pytest.mark.parametrize("store", [None, Holding(), make_store()[0]])


@STORES
def test_another_look_does_not_hide_a_write_that_nobody_saw(store: Any):
    weight, does = nn.Parameter(torch.randn(8, 8)), []

    def function(x: Tensor) -> Tensor:
        y = x @ weight
        out = (y + 1).sin() + (y + 2).sin()
        if does:
            with torch._C.DisableTorchFunction():
                y.detach().mul_(2)
            y.transpose_(0, 1)
        return out.cos()

    x = torch.randn(8, 8, requires_grad=True)
    run = recollect.checkpointed(
        function, engine="replay", policy=recollect.policy.matmuls(), store=store
    )
    for _ in range(2):
        run(x).sum().backward()
    does.append(1)
    with pytest.raises(recollect.CheckpointError):
        run(x).sum().backward()


@STORES
def test_looks_and_writes_to_what_was_kept(store: Any):
    weight = nn.Parameter(torch.randn(8, 8))

    def function(x: Tensor) -> Tensor:
        y, z = x @ weight, (x * 2) @ weight
        out = (y + 1).sin() + (y + 2).sin() + (z + 1).cos()
        with torch.no_grad():
            y.transpose_(0, 1)
            z.detach().view(torch.int32).add_(1 << 23)  # by a view of another type
        return out.cos()

    compare_with_store(function, weight, store)


class TwoParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x[0].mul_(2)
        x[1:].mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@STORES
def test_custom_functions_that_write_to_parts(store: Any):
    weight = nn.Parameter(torch.randn(8, 8))

    def function(x: Tensor) -> Tensor:
        y = TwoParts.apply(x @ weight)
        return ((y + 1).sin() + (y + 2).sin()).cos()

    compare_with_store(function, weight, store)


def test_a_custom_function_that_writes_to_a_view_in_another_call():
    # Asked there whether a view is a leaf, torch would wait for itself.
    weight, does = nn.Parameter(torch.randn(8, 8)), []

    def function(x: Tensor) -> Tensor:
        y = x @ weight
        view = y.view(64)
        out = (y + 1).sin()
        TwoParts.apply(y)
        return out + (TwoParts.apply(view).view(8, 8) if does else y @ weight)

    x = torch.randn(8, 8, requires_grad=True)
    run = recollect.checkpointed(function, engine="replay", policy=recollect.policy.matmuls())
    for number in range(4):
        if number == 2:
            does.append(1)
        assert_identical(
            torch.autograd.grad(run(x * 1).sum(), [x, weight]),
            torch.autograd.grad(function(x * 1).sum(), [x, weight]),
        )


def compare_with_store(function: Any, weight: nn.Parameter, store: Any) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    expected = torch.autograd.grad(function(x).sum(), [x, weight])
    run = recollect.checkpointed(
        function, engine="replay", policy=recollect.policy.matmuls(), store=store
    )
    for _ in range(3):
        assert_identical(torch.autograd.grad(run(x).sum(), [x, weight]), expected)
