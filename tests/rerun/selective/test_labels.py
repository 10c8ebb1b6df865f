"""A kept result is handed out to the call it was kept for: swaps are found, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.two_tensor import TwoTensor

import recollect
from recollect import is_recomputing, policy
from recollect.errors import KeptTensorError
from tests._support import assert_identical
from tests.rerun.selective._helpers import (
    Attention,
    Block,
    Mlp,
    assert_right,
    leaves,
    seeded,
    selective,
    square,
    step,
    total,
)

aten = torch.ops.aten
POLICIES = {
    "matmuls": policy.matmuls(),
    "everything": policy.everything(),
    "mul": policy.save_ops(aten.mul, aten.add, aten.mm, aten.addmm),
}
policies = pytest.mark.parametrize("given", POLICIES.values(), ids=POLICIES)


SWAPPED = "gets other inputs now|asked for out of turn"


# --- swaps ----------------------------------------------------------------------------------------


def turned(first, second):
    """In the recomputation, the other way round."""
    return (second, first) if is_recomputing() else (first, second)


def weights(x, w1, w2):
    a, b = turned(w1, w2)
    return (x @ a).sin() * (x @ b).cos()


def activations(x, w, _):
    a, b = turned(x.sin(), x.cos())
    return (a @ w).sin() * (b @ w).cos()


def views_of_one_tensor(x, w, _):
    q, k = turned(*(x @ w).chunk(2, 0))
    return (q @ w).sin() * (k @ w).cos()


def results_of_one_op(x, w, _):
    values, indices = x.sort(-1)
    a, b = turned(values, indices.float())
    return (a @ w).sin() * (b @ w).cos()


def rows(x, w, _):
    a, b = turned(0, 1)
    return (x[a : a + 2] @ w).sin() * (x[b : b + 2] @ w).cos()


def sides(x, w, _):
    a, b = turned(x, w)
    return (a @ b).sin()


def numbers(x, w, _):
    a, b = turned(2.0, 3.0)
    return torch.add(x @ w, w, alpha=a).sin() * torch.add(x @ w, w, alpha=b).cos()


def other_constants(x, w, _):
    return torch.add(x @ w, w, alpha=3.0 if is_recomputing() else 2.0).sin()


def weights_in_a_list(x, w1, w2):
    a, b = turned(w1, w2)
    return torch.cat([x @ a, x @ b]).sin()


SWAPS = {
    f.__name__: f
    for f in (
        weights,
        activations,
        views_of_one_tensor,
        results_of_one_op,
        weights_in_a_list,
    )
}


@pytest.mark.parametrize("function", SWAPS.values(), ids=SWAPS)
@pytest.mark.parametrize("early_stop", [True, False])
def test_products_that_change_places_are_found(function, early_stop):
    given = policy.matmuls()
    out = recollect.checkpoint(function, *square(3), policy=given, early_stop=early_stop)
    with pytest.raises(KeptTensorError, match=SWAPPED) as info:
        out.sum().backward()
    assert f"in {function.__name__}" in str(info.value)


def halves(x, w, _):
    a, b = turned(x.sin(), x.cos())
    return (a.t() @ w).sin() * (b.t() @ w).cos()


def recomputed_ops(x, w, _):
    a, b = turned(x.sin(), x.cos())
    return (a.exp() @ w).sin() * (b.exp() @ w).cos()


@pytest.mark.parametrize("function", [rows, halves, recomputed_ops])
def test_what_was_changed_before_the_last_op_is_found_too(function):
    out = recollect.checkpoint(function, *square(3), policy=policy.matmuls())
    with pytest.raises(KeptTensorError, match=SWAPPED):
        out.sum().backward()


@pytest.mark.parametrize("function", [numbers, other_constants])
def test_other_numbers_are_found(function):
    out = recollect.checkpoint(function, *square(3), policy=policy.save_ops(aten.add))
    with pytest.raises(KeptTensorError, match=SWAPPED):
        out.sum().backward()


def test_sides_that_change_places_are_found():
    out = recollect.checkpoint(sides, *square(3), policy=policy.matmuls())
    with pytest.raises(KeptTensorError):
        out.sum().backward()


def test_arguments_of_the_region_that_change_places_are_found():
    def function(a, b, w):
        a, b = turned(a, b)
        return (a @ w).sin() * (b @ w).cos()

    a, b, w = square(3)
    out = recollect.checkpoint(function, a * 1, b * 1, w, policy=policy.matmuls())
    with pytest.raises(KeptTensorError, match=SWAPPED):
        out.sum().backward()


class Layers(nn.Module):
    def __init__(self, train=True, bias=True):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=bias).requires_grad_(train)
        self.b = nn.Linear(4, 4, bias=bias).requires_grad_(train)

    def forward(self, x):
        a, b = turned(self.a, self.b)
        return a(x).sin() * b(x).cos()


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_change_places_are_found(bias):
    out = recollect.checkpoint(Layers(bias=bias), *square(1), policy=policy.matmuls())
    with pytest.raises(KeptTensorError, match=SWAPPED):
        out.sum().backward()


def frozen_layers(x):
    return FROZEN(x)


FROZEN = seeded(lambda: Layers(train=False))
BUFFERS = [torch.full((4, 4), float(n)) for n in range(2)]


def constants(x):
    a, b = turned(*BUFFERS)
    return (x @ a).sin() * (x @ b).cos()


@pytest.mark.parametrize("function", [frozen_layers, constants])
def test_what_needs_no_gradient_is_told_apart_too(function):
    """With LoRA, all large weights are frozen."""
    out = recollect.checkpoint(function, *square(1), policy=policy.matmuls())
    with pytest.raises(KeptTensorError, match=SWAPPED):
        out.sum().backward()


def test_a_weight_that_forward_did_not_use_is_found():
    x, w, other = square(3)
    out = recollect.checkpoint(
        lambda x, w: (x @ (other if is_recomputing() else w)).sin(), x, w, policy=policy.matmuls()
    )
    with pytest.raises(KeptTensorError, match=SWAPPED):
        out.sum().backward()


# --- no false alarms ------------------------------------------------------------------------------


@policies
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_shared_weights(given, dtype):
    """The cast of a weight is cached by autocast, and runs in some regions only."""
    model = seeded(lambda: nn.Linear(4, 4))
    (x,) = square(1)

    def function(x):
        return model(model(x).sin()).cos()

    def run(region):
        with torch.autocast("cpu", dtype):
            out = region(function, region(function, x))
        return torch.autograd.grad(total(out.float()), [x, *model.parameters()])

    assert_identical(run(selective(given)), run(lambda f, *a: f(*a)))


@policies
def test_autocast_inside(given):
    model = seeded(Mlp)

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        return (y.float() + model(x)).sin()

    assert_right(function, leaves((3, 8)), given)


class Rope(nn.Module):
    """Fills its cache in the first call."""

    def __init__(self):
        super().__init__()
        self.cache = None

    def forward(self, x):
        if self.cache is None:
            self.cache = (torch.arange(4.0) * 0.5 + 1).cos()
        return (x * self.cache + 1).sin().exp()


GLOBAL_CACHE = {}


def cached_globally(x):
    if "rope" not in GLOBAL_CACHE:
        GLOBAL_CACHE["rope"] = (torch.arange(4.0) * 0.5 + 1).cos()
    return (x * GLOBAL_CACHE["rope"] + 1).sin().exp()


@pytest.mark.parametrize("kind", ["module", "global"])
@pytest.mark.parametrize(
    "given",
    [policy.save_ops(aten.sin), policy.save_ops(aten.mul), policy.everything()],
    ids=["sin", "mul", "everything"],
)
def test_a_cache_that_forward_fills(given, kind):
    (x,) = square(1)

    def run(region):
        GLOBAL_CACHE.clear()
        function = Rope() if kind == "module" else cached_globally
        out = function(x) if region is None else region(function, x)
        return torch.autograd.grad(total(out), x)

    assert_identical(run(selective(given)), run(None))


def data(x):
    return (x.data * 2 + x).sin() @ x.detach()


def dropout(x):
    return F.dropout(F.dropout(x, 0.5).sin() @ x, 0.3)


def einsum(x):
    return torch.einsum("ij,kj->ik", x, x.sin()).cos() + torch.einsum("ij,jk,kl->il", x, x, x)


def embedding(x):
    return F.embedding(torch.tensor([0, 3, 1]), x).sin() @ x


def in_place(x):
    y = x.sin()
    y += x
    y[0] = 3
    return y.mul_(2).cos() @ x


def lists(x):
    parts = [x * n for n in range(3)]
    return torch.cat([torch.stack(parts).sum(0), torch._foreach_mul(parts, 2.0)[1]]).sin()


def constants_made_inside(x):
    mask = torch.ones(4, 4).triu()
    return (x * mask).softmax(-1) @ torch.eye(4) @ x * torch.tensor(3.0)


def nan_constants(x):
    return torch.where(x > 0, x, float("nan")).nan_to_num(nan=0.5).sin() @ x


def masked(x):
    return x.masked_fill(x < 0, float("-inf")).softmax(-1).nan_to_num(0.0) @ x


def convolution(x):
    return F.conv2d(x.view(1, 1, 4, 4), x[:2, :2].reshape(1, 1, 2, 2)).sin()


def multi_outputs(x):
    q, r = torch.linalg.qr(x + 3 * torch.eye(4))
    return (q @ r).sin() * torch.var_mean(x, -1)[0]


def indices(x):
    return x[torch.tensor([2, 0]), :][:, x[0].argsort()].sin() @ x.gather(1, x.argsort(-1))


def vmapped(x):
    return torch.vmap(lambda row: (row @ x).sin())(x).exp()


def complex_numbers(x):
    return (torch.fft.fft(x) * torch.fft.fft(x.sin())).real @ x


def nested_region(x):
    return recollect.checkpoint(lambda y: (y @ x).sin(), x.cos()).exp() @ x


def nested_selective_region(x):
    inner = recollect.checkpoint(
        lambda y: (y @ x).sin() @ y, x.cos(), policy=policy.save_ops(aten.mm)
    )
    return inner.exp() @ x


def backward_inside(x):
    h = (x @ x).sin()
    (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return h * g @ x


class Checkpointing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x @ x).sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            out = recollect.checkpoint(lambda y: (y @ y).sin(), y, policy=policy.matmuls())
        return torch.autograd.grad(out, y, grad)


def region_inside_a_function(x):
    return Checkpointing.apply(x.cos()).exp() @ x


def without_grad(x):
    with torch.no_grad():
        scale = (x @ x).norm()
    return (x / scale) @ x


def in_inference_mode(x):
    with torch.inference_mode():
        scale = (x @ x).mean().item()
    return (x * scale) @ x


QUIET = {
    f.__name__: f
    for f in (
        data,
        dropout,
        einsum,
        embedding,
        in_place,
        lists,
        constants_made_inside,
        nan_constants,
        masked,
        convolution,
        multi_outputs,
        indices,
        vmapped,
        complex_numbers,
        nested_region,
        nested_selective_region,
        backward_inside,
        region_inside_a_function,
        without_grad,
        in_inference_mode,
    )
}


@policies
@pytest.mark.parametrize("function", QUIET.values(), ids=QUIET)
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"debug": True}], ids=str)
def test_no_false_alarm(request, function, given, options):
    if given == POLICIES["mul"] and function in (data, embedding, multi_outputs, vmapped):
        request.applymarker(pytest.mark.filterwarnings("ignore:the policy's"))
    assert_right(function, square(1), given, **options)


def make_attention():
    return SelfAttention()


MODULES = {
    "lstm": (lambda: Rnn(nn.LSTM(4, 4, 2, dropout=0.5)), (5, 2, 4)),
    "bidirectional lstm": (lambda: Rnn(nn.LSTM(4, 4, bidirectional=True)), (5, 2, 4)),
    "gru": (lambda: Rnn(nn.GRU(4, 4)), (5, 2, 4)),
    "lstm cell": (lambda: Rnn(nn.LSTMCell(4, 4)), (2, 4)),
    "attention": (make_attention, (2, 3, 4)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (2, 3, 4)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (6, 4)),
    "batch norm in eval": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(),
        (6, 4),
    ),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.GroupNorm(3, 3)), (2, 2, 4, 4)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (2, 3, 4)),
    "manual attention": (lambda: Attention(4), (2, 3, 4)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (2, 4)),
    "bilinear": (lambda: Pair(nn.Bilinear(4, 4, 3)), (2, 4)),
    "rrelu": (lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU()), (2, 4)),
}


class Rnn(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0].sin()


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        out, weights = self.attention(x, x, x)
        return out.sin(), weights


class Pair(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x.sin())


@pytest.mark.filterwarnings("ignore:the policy's")
@policies
@pytest.mark.parametrize("name", MODULES)
def test_no_false_alarm_of_modules(name, given):
    make, shape = MODULES[name]
    model, twin = seeded(make), seeded(make)
    for _ in range(2):
        expected = step(twin, leaves(shape))
        assert_identical(step(model, leaves(shape), selective(given)), expected)
        assert_identical([*model.buffers()], [*twin.buffers()])


@policies
def test_subclasses(given):
    x = TwoTensor(torch.rand(4, 4), torch.rand(4, 4)).requires_grad_()

    def run(region):
        out = region(lambda x: (x @ x).relu().sin() @ x * 2, x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        return grad.a, grad.b

    assert_identical(run(selective(given)), run(lambda f, *a: f(*a)))


def test_nested_tensors_are_right_with_kept_products():
    linear = seeded(lambda: nn.Linear(4, 4))
    parts = leaves((2, 4), (3, 4))
    jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def run(region):
        out = region(lambda x: linear(x).sin().values(), jagged)
        return torch.autograd.grad(total(out), [*parts, linear.weight], retain_graph=True)

    assert_identical(run(selective(policy.matmuls())), run(lambda f, *a: f(*a)))


# --- objects of TorchScript, which refuse to be compared ------------------------------------------


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def profiled(x, w):
    with record_function("first"):
        h = x @ w
    with record_function("second"):
        return (h.sin() @ w).cos()


def communicating(x, w):
    h = x @ w
    dist.all_reduce(h.detach())
    return (h.sin() @ w).cos()


@pytest.mark.filterwarnings("ignore:the policy's")
@policies
@pytest.mark.parametrize("function", [profiled, communicating])
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"debug": True}], ids=str)
def test_opaque_arguments(function, given, options, group):
    assert_right(function, square(), given, **options)


@policies
def test_products_that_change_places_among_opaque_arguments_are_found(given):
    def function(x, w1, w2):
        a, b = turned(w1, w2)
        with record_function("products"):
            return (x @ a).sin() * (x @ b).cos()

    with pytest.raises(KeptTensorError, match=SWAPPED):
        total(selective(given)(function, *square(3))).backward()


@policies
def test_ranges_of_a_profiler_run_again(given):
    def function(x, w):
        with record_function("range"):
            return (x @ w * 2 + x).sin().exp()

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        total(selective(given)(function, *square())).backward()
    assert [event.name for event in profiler.events()].count("range") == 2


def test_a_kept_result_is_copied_before_a_collective_writes_to_it(group):
    made = []

    def function(x, w):
        made.append(x @ w)
        dist.all_reduce(made[-1].detach())
        return made[-1].sin()

    contexts = recollect.create_selective_checkpoint_contexts(policy.matmuls())
    out = recollect.checkpoint(function, *square(), context_fn=lambda: contexts)
    (entry,) = contexts[0].ledger.entries.values()
    assert entry.results.val.data_ptr() != made[0].data_ptr()
    total(out).backward()


# --- how tensors get in ---------------------------------------------------------------------------


@policies
def test_tensors_in_containers_and_keywords(given):
    a, b, c = square(3)

    def function(pair, *, named, more):
        return (pair[0] @ pair[1]).sin() * (named["x"] @ more[0]).cos()

    def run(region):
        h = a * 2
        out = region(function, [h, b], named={"x": c + 1}, more=(a.sin(),))
        return torch.autograd.grad(total(out), [a, b, c])

    assert_identical(run(selective(given)), run(lambda f, *x, **k: f(*x, **k)))


@pytest.mark.parametrize("how", ["nested", "offloaded"])
def test_one_tensor_as_two_arguments(how):
    options = {"offload_inputs": True} if how == "offloaded" else {}

    def part(a, b):
        return (a @ b).sin() @ b

    def function(x, w, region):
        h = x @ w
        return region(part, h, h).cos()

    x, w = square()
    inner = selective(policy.matmuls(), **options)
    outer = selective(None) if how == "nested" else lambda f, *a: f(*a)
    out = outer(lambda x, w: function(x, w, inner), x, w)
    expected = function(x, w, lambda f, *a: f(*a))
    assert_identical(
        torch.autograd.grad(total(out), [x, w]), torch.autograd.grad(total(expected), [x, w])
    )


@pytest.mark.parametrize("engine", [recollect.checkpoint, None])
def test_one_tensor_as_two_arguments_of_a_region_by_itself(engine):
    (x,) = square(1)

    def part(a, b, *, c):
        return (a @ b).sin() @ c

    h = x * 2
    out = recollect.checkpoint(part, h, h, c=h, policy=policy.matmuls())
    assert_identical(
        torch.autograd.grad(total(out), x, retain_graph=True),
        torch.autograd.grad(total(part(h, h, c=h)), x),
    )


@policies
def test_second_backward_and_create_graph(given):
    x, w = square()

    def function(x, w):
        return ((x @ w).sin() @ w * x + 1).exp()

    def run(region):
        out = total(region(function, x, w))
        first = torch.autograd.grad(out, [x, w], create_graph=True)
        again = torch.autograd.grad(out, [x, w], retain_graph=True)
        second = torch.autograd.grad(first[0].square().sum() + out, [x, w])
        return first, again, second

    assert_identical(run(selective(given)), run(lambda f, *a: f(*a)))


@policies
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
# Dynamo reads `.grad` of what goes into compiled code, and torch warns about that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_inside(given, backend):
    torch._dynamo.reset()
    model = seeded(Block)
    expected = step(model, leaves((2, 3, 8)))
    compiled = copy.deepcopy(model)
    compiled.mlp = torch.compile(compiled.mlp, backend=backend)
    for _ in range(3):
        actual = step(compiled, leaves((2, 3, 8)), selective(given))
        assert_identical(actual, expected)


@policies
def test_weights_that_are_exchanged_between_steps(given):
    """An optimiser may give a module other parameters; what is known belongs to one call."""
    model = seeded(Mlp)
    for _ in range(3):
        assert_right(model, leaves((3, 8)), given)
        for module in (model.up, model.down):
            module.weight = nn.Parameter(module.weight.detach() * 0.9)


@policies
def test_functional_call(given):
    model = seeded(Mlp)
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    (x,) = leaves((3, 8))

    def run(region):
        out = region(lambda x: torch.func.functional_call(model, others, (x,)).sin(), x)
        return torch.autograd.grad(total(out), [x, *others.values()])

    assert_identical(run(selective(given)), run(lambda f, *a: f(*a)))
