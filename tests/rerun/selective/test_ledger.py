"""Kept results (R28): exact bytes and FLOPs, never more than torch holds, right for all readers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import recollect
from recollect import policy
from tests._support import assert_identical, measure
from tests.rerun.selective._helpers import (
    Attention,
    Block,
    again,
    assert_right,
    flops,
    held,
    leaves,
    memory,
    seeded,
    selective,
    square,
    step,
    total,
)

aten = torch.ops.aten
everything = policy.everything()
FLOAT = 4
N = 64
ONE = N * N * FLOAT  #: bytes of a matrix


def matrices(count=2):
    return leaves(*[(N, N)] * count)


# --- chains ---------------------------------------------------------------------------------------


def relu(x, w):
    return (x @ w).relu() @ w


def sigmoids(x, w):
    return (x @ w).sigmoid().tanh() @ w


def squares(x, w):
    return (x @ w).square() @ w


def unread_product(x, w):
    return (x @ w).sin() @ w


def views(x, w):
    return (x @ w).t().relu().t().view(2, -1).reshape(N, N) @ w


def manual_attention(x, w):
    return ((x @ w) @ x.t()).softmax(-1) @ w


def layer_norm(x, w):
    return F.layer_norm(x @ w, (N,)) @ w


def residual(x, w):
    h = x + (x @ w).relu()
    return h + (h @ w).relu() @ w


CHAINS = {
    f.__name__: f
    for f in (
        relu,
        sigmoids,
        squares,
        unread_product,
        views,
        manual_attention,
        layer_norm,
        residual,
    )
}


def by_torch(kept):
    """A region by torch, that keeps the results of some ops, or of all."""

    def decide(_ctx, op, *_args, **_kwargs):
        is_kept = kept is None or op in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, decide)
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


PRODUCTS = [aten.mm.default, aten.addmm.default, aten.bmm.default]
#: What is kept, for us and for torch.
ALIKE = {"everything": (everything, None), "matmuls": (policy.matmuls(), PRODUCTS)}


def assert_no_more_than_torch(function, inputs, given, kept, **options):
    ours = memory(function, inputs, selective(given, preserve_rng_state=False, **options))
    torchs = memory(function, inputs, partial(by_torch(kept), **options))
    assert ours.held <= torchs.held
    assert ours.peak <= torchs.peak


@pytest.mark.parametrize("function", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize(("given", "kept"), ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("early_stop", [True, False])
def test_no_more_is_held_than_by_torch(function, given, kept, early_stop):
    assert_right(function, matrices(), given)
    assert_no_more_than_torch(function, matrices(), given, kept, early_stop=early_stop)


@pytest.mark.parametrize("function", CHAINS.values(), ids=CHAINS)
def test_everything_costs_what_plain_autograd_costs(function):
    region = selective(everything)
    assert flops(function, matrices(), region) == flops(function, matrices())


@pytest.mark.parametrize("function", CHAINS.values(), ids=CHAINS)
def test_nothing_is_left_after_the_step(function):
    assert (
        memory(function, matrices(), selective(everything)).left
        == memory(function, matrices()).left
    )


def test_what_is_kept_is_held():
    out = ONE
    assert held(relu, matrices(), policy.save_ops(aten.mm, aten.relu)) == 2 * ONE + out
    assert held(relu, matrices(), policy.matmuls()) == ONE + out
    assert held(relu, matrices(), policy.save_ops(aten.relu)) == ONE + out
    assert held(relu, matrices(), policy.nothing()) == out


def test_what_is_read_twice_is_held_once():
    def function(x, w):
        h = x @ w
        return h.relu() @ h.sigmoid()

    both = policy.save_ops(aten.mm, aten.relu, aten.sigmoid)
    one = policy.save_ops(aten.mm, aten.relu)
    assert held(function, matrices(), both) == 4 * ONE
    assert held(function, matrices(), one) == 3 * ONE
    assert again(function, matrices(), one)[aten.mm.default] == 0


@pytest.mark.parametrize("early_stop", [True, False])
def test_the_last_result_is_not_held(early_stop):
    """The recomputation stops before it; without early stop it is handed out."""
    x, w = matrices()

    def forward():
        out = recollect.checkpoint(
            unread_product,
            x,
            w,
            policy=policy.matmuls(),
            preserve_rng_state=False,
            early_stop=early_stop,
        )
        return out.sum()

    step = measure(forward, lambda loss: torch.autograd.grad(loss, [x, w]))
    # x @ w, the sum, and the last product if the recomputation gets there.
    assert step.held == ONE + FLOAT + (0 if early_stop else ONE)


@pytest.mark.parametrize("early_stop", [True, False])
def test_flops_without_early_stop(early_stop):
    region = selective(policy.matmuls(), early_stop=early_stop)
    assert flops(unread_product, matrices(), region) == flops(unread_product, matrices())


# --- models ---------------------------------------------------------------------------------------


MODELS = {"attention": lambda: Attention(32), "block": lambda: Block(32)}


@pytest.mark.parametrize("name", MODELS)
def test_everything_on_a_model(name):
    model, inputs = seeded(MODELS[name]), leaves((2, 16, 32))
    assert_right(model, inputs, everything)
    assert flops(model, inputs, selective(everything)) == flops(model, inputs)
    for given, kept in ALIKE.values():
        assert_no_more_than_torch(model, inputs, given, kept)


def test_products_of_a_model_cost_no_flops():
    model, inputs = seeded(lambda: Block(32)), leaves((2, 16, 32))
    plain = flops(model, inputs)
    assert flops(model, inputs, selective(policy.matmuls())) == plain
    assert flops(model, inputs, recollect.checkpoint) > plain
    products = held(model, inputs, policy.matmuls())
    assert held(model, inputs, policy.nothing()) < products <= held(model, inputs)


def test_attention_in_one_kernel():
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).sin()

    inputs = leaves(*[(1, 2, 16, 32)] * 3)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert again(function, inputs, policy.attention(), early_stop=False)[kernel] == 0
    assert again(function, inputs, policy.nothing(), early_stop=False)[kernel] == 1


# --- readers that nobody sees ---------------------------------------------------------------------


class Numpy(torch.autograd.Function):
    """Reads a tensor and writes another without any op."""

    @staticmethod
    def forward(ctx, h):
        out = torch.empty_like(h)
        np.sin(h.detach().numpy(), out=out.numpy())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class NumpyResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return torch.from_numpy(np.sin(h.detach().numpy()))

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class NumpyScalar(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, y):
        return y * float(h.detach().numpy().sum())

    @staticmethod
    def backward(ctx, grad):
        return None, grad * 2


def fills_empty_memory(x, w):
    return Numpy.apply(x @ w).exp().square()


def returns_its_own_memory(x, w):
    return NumpyResult.apply(x @ w).exp().square()


def returns_a_number(x, w):
    return NumpyScalar.apply(x @ w, x.sin()).exp().square()


def reads_an_item(x, w):
    return (x.cos() * (x @ w)[0, 0].item()).exp().square()


def reads_a_list(x, w):
    return (x.cos() * (x @ w).tolist()[0][0]).exp().square()


def reads_by_numpy(x, w):
    return (x.cos() * float((x @ w).detach().numpy().sum())).exp().square()


def decides_by_a_list(x, w):
    return (x.cos() if min((x @ w).tolist()[0]) > -100 else x.sin()).exp().square()


def decides_by_a_bool(x, w):
    return (x.cos() if (x @ w).sum() > -100 else x.sin()).exp().square()


def prints(x, w):
    return x.exp() * len(repr((x @ w).detach()))


BUFFER = torch.zeros(4, 4)


def fills_a_buffer(x, w):
    BUFFER.numpy()[...] = np.sin((x @ w).detach().numpy())
    return (x * BUFFER).exp().square()


def by_dlpack(x, w):
    return (x.cos() * torch.from_dlpack((x @ w).detach()).sum()).exp().square()


def by_memoryview(x, w):
    return (x.cos() * float(np.asarray((x @ w).detach())[0, 0])).exp().square()


SEEN = [
    fills_empty_memory,
    returns_its_own_memory,
    returns_a_number,
    reads_an_item,
    decides_by_a_bool,
    prints,
    by_dlpack,
    reads_by_numpy,
    fills_a_buffer,
    by_memoryview,
]
UNSEEN = [reads_a_list, decides_by_a_list]


@pytest.mark.parametrize("function", SEEN)
@pytest.mark.parametrize("given", [everything, policy.matmuls()], ids=repr)
def test_a_reader_that_nobody_sees_gets_what_it_read(function, given):
    assert_right(function, square(), given)


@pytest.mark.parametrize("function", UNSEEN)
def test_a_reader_without_any_op_gets_what_it_read(function):
    assert_right(function, square(), policy.matmuls())


class SavesBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * b, grad * a


@pytest.mark.parametrize("given", [everything, policy.matmuls()], ids=repr)
def test_what_a_function_of_the_users_saves_is_held(given):
    def function(x, w):
        return SavesBoth.apply(x @ w, (w @ x).t()).exp()

    assert_right(function, square(), given)


class Unchanged(torch.autograd.Function):
    """Hands its input through, as gradient-scaling layers do."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


@pytest.mark.parametrize("given", [everything, policy.matmuls()], ids=repr)
def test_a_function_that_hands_its_input_through(given):
    assert_right(lambda x, w: Unchanged.apply(x @ w).exp().square(), square(), given)


@pytest.mark.parametrize("pack", [lambda t: t, lambda t: t.clone(), lambda t: t.numpy().copy()])
def test_hooks_of_the_user_inside_the_region(pack):
    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed)

    def function(x, w):
        h = x @ w
        with torch.autograd.graph.saved_tensors_hooks(lambda t: pack(t.detach()), unpack):
            y = h.sin()
        return y.exp().cos()

    assert_right(function, square(), everything)


# Dynamo reads `.grad` of what goes into compiled code, and torch warns about that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("given", [everything, policy.matmuls(), policy.nothing()], ids=repr)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_inside(given, backend):
    torch._dynamo.reset()
    inner = torch.compile(lambda h, w: (h.relu() @ w).sin(), backend=backend)

    def function(x, w):
        return inner(x @ w, w).exp()

    assert_right(function, square(), given)


# --- with the checks ------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [*CHAINS.values(), *SEEN])
@pytest.mark.parametrize(
    "options",
    [
        {"determinism_check": "values"},
        {"debug": True},
        {"determinism_check": "values", "debug": True, "early_stop": False},
        {"determinism_check": "none"},
        {"early_stop": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [everything, policy.matmuls()], ids=repr)
def test_together_with_the_checks(function, options, given):
    shapes = matrices() if function in CHAINS.values() else square()
    assert_right(function, shapes, given, **options)


def test_reading_what_forward_did_not_read_is_an_error():
    def function(x, w):
        h = x @ w
        y = h.relu()
        if recollect.is_recomputing():
            y = y + h.cos() * 0
        return (y @ w).sin()

    out = recollect.checkpoint(function, *square(), policy=policy.save_ops(aten.mm, aten.relu))
    with pytest.raises(recollect.CheckpointError):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_kept_results_have_their_layout(dtype):
    seen = []

    def function(x, w):
        h = (x.to(dtype) @ w.to(dtype)).t()
        seen.append((h.shape, h.stride(), h.dtype, h.device))
        return (h + 1).abs().float() @ w

    assert_right(function, square(), everything)
    assert len(set(seen)) == 1


def test_integers_that_nobody_reads():
    def function(x):
        order = x.argsort(-1)
        mask = order > 1
        return torch.where(mask, x, x.sin()).exp()

    assert_right(function, square(1), everything)


def test_sparse_results_that_nobody_reads():
    def function(x, w):
        return torch.sparse.mm((x.to_sparse() * 2).coalesce(), w).sin().exp()

    assert_right(function, square(), everything)


def test_two_threads_recompute_one_region_at_once():
    weight = torch.linspace(-1, 1, 16).reshape(4, 4)
    halfway = threading.Barrier(2, timeout=30)

    def two_outputs(x):
        h = (x @ weight).sin()
        if recollect.is_recomputing():
            halfway.wait()
        return h.exp(), (h @ weight).cos().exp()

    (x,) = square(1)
    expected = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in two_outputs(x)]
    outs = recollect.checkpoint(two_outputs, x, policy=everything)
    with ThreadPoolExecutor(2) as pool:
        actual = pool.map(lambda out: torch.autograd.grad(out.sum(), x, retain_graph=True)[0], outs)
        assert_identical(list(actual), expected)


def test_a_recomputation_that_fails_can_be_repeated():
    """What the first attempt has taken out is computed again."""
    fail = [True]

    def function(x, w):
        h = (x @ w).relu()
        if recollect.is_recomputing() and fail.pop():
            raise ArithmeticError
        return (h @ w).sin().exp()

    x, w = square()
    out = recollect.checkpoint(function, x, w, policy=everything)
    fail.append(True)
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(total(out), [x, w], retain_graph=True)
    fail[:] = [False]
    plain = (x @ w).relu()
    expected = torch.autograd.grad(total((plain @ w).sin().exp()), [x, w])
    assert_identical(torch.autograd.grad(total(out), [x, w]), expected)


def test_parts_of_a_region_in_several_backwards():
    def function(x, w):
        h = (x @ w).relu()
        return (h @ w).sin(), (w @ h).relu().exp()

    inputs = square()
    plain = [
        torch.autograd.grad(total(out), inputs, retain_graph=True) for out in function(*inputs)
    ]
    outs = recollect.checkpoint(function, *inputs, policy=everything)
    for out, expected in zip(outs, plain, strict=True):
        grads = torch.autograd.grad(total(out), inputs, retain_graph=True)
        assert_identical(grads, expected)


def test_a_rerun_that_may_not_stop_early_still_works():
    """A parameter that is not used has changed since: the rerun goes on to the end."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.unused = nn.Linear(4, 4)

        def forward(self, x):
            order = self.linear(x).argsort(-1)
            return x.sin() + F.embedding(order, x).sum(-1)

    model = seeded(Part)
    (x,) = square(1)
    expected = step(model, [x])[:-1]
    out = recollect.checkpoint(model, x, policy=everything)
    with torch.no_grad():
        model.unused.weight.mul_(2)
    grads = torch.autograd.grad(total(out), [x, *model.parameters()], allow_unused=True)
    assert_identical([out.detach(), *grads], expected)
