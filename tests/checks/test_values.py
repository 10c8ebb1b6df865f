"""``determinism_check="values"``: it finds what differs, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect.checks import differences
from recollect.checks.diagnosis import MismatchContext
from recollect.checks.differences import value_difference
from recollect.checks.oplog import OpLog
from recollect.errors import RecomputeMismatch
from tests._support import Run, assert_transparent, compat_rerun, leaf, rerun

CHECKED = [
    functools.partial(rerun, determinism_check="values"),
    functools.partial(compat_rerun, determinism_check="values"),
    functools.partial(rerun, determinism_check="values", early_stop=False, debug=True),
]
RUNS = pytest.mark.parametrize("run", CHECKED, ids=["recollect", "compat", "full"])
checked = CHECKED[0]


def error_of(function: Callable[..., Any], *args: Any, run: Run = checked, **options: Any) -> str:
    out = run(function, *args, **options)
    with pytest.raises(recollect.CheckpointError) as info:
        out.sum().backward()
    assert not recollect.is_recomputing()
    return str(info.value)


# --- two logs -------------------------------------------------------------------------------------


def record(function: Callable[..., Any], *args: Any, stacks: bool = False) -> OpLog:
    """A log as the engine takes it."""
    log = OpLog(stacks=stacks, fingerprints=True)

    def pack(tensor: Tensor) -> Tensor:
        log.note_saved(tensor)
        return tensor

    with log, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*args)
    return log


def chain(*names: str) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for name in names:
            x = getattr(x, name)()
        return x

    return function


def noise_then(*names: str) -> Callable[[Tensor], Any]:
    return lambda x: chain(*names)(x.tan() * torch.rand_like(x))


def difference(
    forward: Callable[[Tensor], Any],
    again: Callable[[Tensor], Any],
    x: Tensor | None = None,
    other: Tensor | None = None,
    *,
    stacks: bool = False,
    region: Callable[..., Any] = torch.sin,
    dead: frozenset[int] = frozenset(),
) -> str | None:
    x = torch.ones(2, 3) if x is None else x
    logs = [
        record(function, each.detach().requires_grad_(), stacks=stacks)
        for function, each in ((forward, x), (again, x if other is None else other))
    ]
    error = value_difference(*logs, MismatchContext(region, [], []), dead)
    assert error is None or type(error) is RecomputeMismatch
    return error and str(error)


def test_the_same_twice() -> None:
    assert difference(chain("sin", "exp"), chain("sin", "exp")) is None
    assert difference(chain(), chain()) is None


def test_the_first_op_with_other_values_is_named() -> None:
    message = difference(noise_then("exp"), noise_then("exp"))
    assert "Tensor 1, saved by forward: a tensor: values differ." in message
    assert "First difference, at operation 2: values differ\n  rand_like.default(" in message
    assert "preserve_rng_state" in message
    x = torch.ones(2, 3)
    message = difference(chain("neg", "exp"), chain("neg", "exp"), x, x + 1)
    assert "First difference, at operation 1: values differ\n  neg.default(f32[2, 3])" in message
    assert "use_deterministic_algorithms" in message


def test_the_earliest_difference_counts() -> None:
    message = difference(noise_then("exp", "sin"), noise_then("cos", "sin"))
    assert "at operation 2: values differ\n  rand_like.default" in message


def test_other_operations() -> None:
    message = difference(chain("sin", "exp", "sin"), chain("sin", "cos", "sin"))
    assert "First difference, at operation 2: different operations" in message
    assert "forward  : exp.default(f32[2, 3]) -> f32[2, 3]" in message
    assert "recompute: cos.default(f32[2, 3]) -> f32[2, 3]" in message
    assert "is_recomputing" in message


def test_other_arguments_are_other_operations() -> None:
    message = difference(lambda x: (x * 2).sin(), lambda x: (x * 3).sin())
    assert "different operations" in message
    assert "mul.Tensor(f32[2, 3], 3)" in message


def test_values_that_no_op_of_the_region_computed() -> None:
    one, other = torch.ones(3), torch.zeros(3)
    message = difference(lambda x: x * one, lambda x: x * other)
    assert "First difference, at operation 1: values differ" in message

    before, after = record(lambda x: x * one, leaf(3)), record(lambda x: x * other, leaf(3))
    after.entries.clear()  # it ended as the last tensor was saved, before the op
    message = str(value_difference(before, after, MismatchContext(torch.sin, [], []), frozenset()))
    assert "All operations of the region before it computed the same values." in message
    assert "pass it as an argument" in message


def test_what_is_not_saved_may_differ() -> None:
    def region(noted: bool) -> Callable[[Tensor], Any]:
        def function(x: Tensor) -> Tensor:
            y = x.sin()
            if noted:
                y.detach().square().mean()
            torch.rand(3).exp()
            return y.exp()

        return function

    assert difference(region(False), region(False)) is None
    assert difference(region(True), region(False)) is None


def test_what_nobody_can_ask_for_may_differ() -> None:
    message = difference(noise_then("abs"), noise_then("abs"))
    assert "Tensor 1," in message
    assert difference(noise_then("abs"), noise_then("abs"), dead=frozenset({1, 2})) is None


def test_memory_not_written_to_may_differ() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return x.clone()

    def function(fill: float, write: bool) -> Callable[[Tensor], Any]:
        def region(x: Tensor) -> None:
            y = torch.empty(3)
            y.numpy()[:] = fill  # behind torch's back: what memory may hold
            if write:
                y.mul_(1)
            Keeps.apply(x, y)

        return region

    assert difference(function(1, False), function(2, False)) is None
    assert "values differ" in difference(function(1, True), function(2, True))


def test_another_layout_is_told_from_other_values() -> None:
    x = torch.ones(2, 3)
    other = x.t().contiguous().t()
    message = difference(chain("sin", "exp"), chain("sin", "exp"), x, other)
    assert "at operation 1: same values, other strides (a view or memory layout)" in message
    assert "stride (3, 1) then (1, 2)" in message
    assert "values differ" not in message
    assert "x.contiguous()" in message


def test_values_that_differ_after_the_layout_did_are_mentioned() -> None:
    x = torch.ones(2, 3)
    other = x.t().contiguous().t()
    message = difference(noise_then("exp"), noise_then("exp"), x, other)
    assert "at operation 1: same values, other strides" in message
    assert "From operation 2 on, values differ too." in message


def test_strides_of_single_places_do_not_count() -> None:
    x = torch.ones(1, 3)
    assert difference(chain("sin"), chain("sin"), x, x.as_strided((1, 3), (7, 1))) is None


def test_module_and_line_of_an_op_with_other_values() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + torch.rand(3)).sin()

    model = nn.Sequential(nn.Identity(), Noise())
    message = difference(model, model, stacks=True, region=model[1])
    assert "In region `1` (Noise)." in message
    assert "\n      in Sequential: 1\n" in message
    assert "in forward: return (x + torch.rand(3)).sin()" in message
    assert "debug=True" not in message
    assert "(debug=True shows the line of code)" in difference(model, model)


def test_values_are_fetched_once_if_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compare = differences.compare
    monkeypatch.setattr(
        differences, "compare", lambda one, other: calls.append(len(one)) or compare(one, other)
    )
    assert difference(chain(*["sin"] * 20), chain(*["sin"] * 20)) is None
    assert calls == [20]


# --- from end to end: what differs is found -------------------------------------------------------


def erratic() -> Tensor:
    """Another number in the recomputation, by an op that looks the same."""
    return torch.tensor(2.0 if recollect.is_recomputing() else 1.0)


@RUNS
def test_values_that_nothing_else_would_notice(run: Run) -> None:
    message = error_of(lambda x: (x.sin() * erratic()).exp(), leaf(3), run=run)
    assert "values differ" in message
    assert "mul.Tensor(f32[3], f32[]) -> f32[3]" in message
    rerun(lambda x: (x.sin() * erratic()).exp(), leaf(3)).sum().backward()


def test_random_numbers_of_a_stream_that_is_not_put_back() -> None:
    message = error_of(lambda x: F.dropout(x, 0.5).sin(), leaf(50), preserve_rng_state=False)
    assert "values differ\n  bernoulli_" in message
    assert "preserve_rng_state=True" in message


def test_the_op_is_named_by_module_and_line() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            noisy = x + erratic()
            return noisy.exp()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), Noisy())])

        def forward(self, x: Tensor) -> Tensor:
            return checked(self.blocks[0], x, debug=True)

    message = error_of(Model(), leaf(2, 3), run=lambda model, x: model(x))
    assert "In region `blocks.0` (Sequential)." in message
    assert "values differ\n  add.Tensor(f32[2, 3], f32[]) -> f32[2, 3]\n" in message
    assert "\n      in Model: blocks.0.1\n" in message
    assert "in forward: noisy = x + erratic()\n" in message


def test_other_operations_that_save_the_same() -> None:
    message = error_of(
        lambda x: (x.sin() * (3 if recollect.is_recomputing() else 2)).exp(), leaf(3)
    )
    assert "different operations" in message


def test_a_layout_that_differs() -> None:
    outside = [torch.ones(2, 3)]
    out = checked(lambda x: (x * outside[0].neg()).exp(), leaf(2, 3))
    outside[0] = torch.ones(3, 2).t()
    with pytest.raises(recollect.CheckpointError, match="same values, other strides"):
        out.sum().backward()


def test_metadata_is_compared_as_well() -> None:
    message = error_of(
        lambda x: x.sin().exp() if not recollect.is_recomputing() else x[:1].sin().exp(), leaf(3)
    )
    assert "have different metadata" in message
    assert "In region `" in message


# --- from end to end: what does not is left alone -------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.bag = nn.EmbeddingBag(10, 8, mode="max")

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.conv(x)), 0.2)
        x = x + self.attention(x, x, x)[0]
        x = (self.rnn(x)[0] + 1).relu_() + self.bag(torch.arange(4)[:, None] % 10)
        buffer = torch.empty(5, 4, 8)
        buffer[:3] = x
        buffer[3:] = x[:2]
        return F.rrelu(F.hardtanh_(buffer), training=self.training)


@RUNS
@pytest.mark.parametrize("training", [True, False])
def test_a_model_with_a_bit_of_everything(run: Run, training: bool) -> None:
    def train(run: Run) -> Any:
        torch.manual_seed(3)
        net = Net().train(training)
        x = leaf(3, 4, 8)
        out = run(net, x)
        out.square().sum().backward()
        return out, x.grad, [p.grad for p in net.parameters() if p.grad is not None]

    assert_transparent(train, run)


@RUNS
def test_autocast_whose_casts_are_cached(run: Run) -> None:
    layer = nn.Linear(4, 4)
    x = leaf(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(layer, run(layer, x))
    out.float().sum().backward()
    assert layer.weight.grad is not None


@RUNS
def test_a_gradient_inside_of_the_region(run: Run) -> None:
    def penalty(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * slope.square().sum()

    def train(run: Run) -> Any:
        x = leaf(4)
        out = run(penalty, x)
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, run)


@RUNS
def test_regions_inside_of_regions_and_two_backwards(run: Run) -> None:
    def train(run: Run) -> Any:
        x = leaf(4)
        out = run(lambda x: run(lambda y: F.dropout(y.sin()).exp(), x).tanh(), x).sum()
        out.backward(retain_graph=True)
        out.backward()
        return x.grad

    assert_transparent(train, run)


@RUNS
def test_selective(run: Run) -> None:
    if run is CHECKED[1]:
        pytest.skip("torch's interface has no policy")

    def train(run: Run) -> Any:
        x = leaf(4, 4)
        out = run(lambda x: F.dropout(x @ x.sin()).exp() @ x, x)
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, functools.partial(run, policy=[torch.ops.aten.mm]))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_a_tensor_of_another_kind() -> None:
    def train(run: Run) -> Any:
        x = leaf(4, 3)
        index = torch.tensor([[0, 1, 1], [2, 0, 2]])

        def region(x: Tensor) -> Tensor:
            sparse = torch.sparse_coo_tensor(index, torch.ones(3), (4, 4), check_invariants=True)
            return torch.sparse.mm(sparse, x.sin()).exp()

        out = run(region, x)
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, checked)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_kernels_that_leave_memory_unwritten(dtype: torch.dtype) -> None:
    """Attention of each kind, recurrent cells, batch norm: their scratch space must not count."""
    where: Any = {"device": "cuda", "dtype": dtype}
    net = [
        nn.LSTM(16, 16, batch_first=True, **where),
        nn.BatchNorm1d(24, **where),
        nn.GRU(16, 16, batch_first=True, **where),
    ]

    def region(x: Tensor) -> Tensor:
        # 24 is no multiple of 32, to which kernels pad.
        x = net[1](net[0](x)[0])
        x = net[2](x)[0]
        heads = x.reshape(3, 24, 2, 8).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        out = out + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return F.dropout(out, 0.2)

    for _ in range(3):
        x = torch.randn(3, 24, 16, device="cuda", dtype=dtype, requires_grad=True)
        out = checked(region, x).float().square().sum()
        for size in (2**8, 2**12, 2**16, 2**20):
            torch.rand(size, device="cuda")  # memory is not as it was
        out.backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_difference_is_found() -> None:
    message = error_of(
        lambda x: F.dropout(x, 0.5).sin(),
        torch.randn(50, device="cuda", requires_grad=True),
        preserve_rng_state=False,
    )
    assert "values differ\n  native_dropout" in message


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_graphs_are_captured_unchecked() -> None:
    x = torch.randn(8, device="cuda", requires_grad=True)

    def step() -> Tensor:
        return torch.autograd.grad(checked(lambda x: x.sin().exp(), x).sum(), x)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slope = step()
    graph.replay()
    assert torch.equal(slope, step())
