"""The replay engine on a CUDA device: its generators, kernels, streams, autocast and memory.

Every region is called several times: the first call records, the others are checked against that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function

import recollect
from recollect.replay import recording_cache as library
from tests._support import Run, assert_identical, assert_transparent, play

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:the policy's .* matched nothing:UserWarning"),
]
replay = partial(recollect.checkpoint, engine="replay")
DEAR = recollect.policy.matmuls() | recollect.policy.attention()
POLICIES = pytest.mark.parametrize("policy", [None, DEAR], ids=["nothing kept", "ops kept"])
CALLS = 4


@pytest.fixture(autouse=True)
def _deterministic_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have cuDNN add up gradients in one order: its usual kernels take any."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def on_cuda(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True, **options)


def slot_of(function: Any) -> library.CacheEntry:
    """What the engine knows of ``function``, which has been called in one way."""
    owner = function if isinstance(function, nn.Module) else function.__code__
    (entry,) = library._entries[owner].values()
    return entry


def train(function: Callable[..., Any], x: Callable[[], Tensor], run: Run) -> Any:
    """Some steps: what came out, the gradients, and where both generators stand."""
    seen = []
    for _ in range(CALLS):
        leaf = x()
        out = run(function, leaf)
        out.float().square().sum().backward()
        seen += [out, leaf.grad, torch.cuda.get_rng_state(), torch.get_rng_state()]
    return seen


class Regions:
    """Functions of one tensor, 64 x 64."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = on_cuda(64, 64)
        self.net = nn.Sequential(nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64)).cuda()

    def dropout(self, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(x @ self.weight), 0.3).exp()

    def attention(self, x: Tensor) -> Tensor:
        q = x.view(2, 4, 8, 64)
        mixed = F.scaled_dot_product_attention(q, q * 2, q + 1, dropout_p=0.2)
        return mixed.sin().reshape(-1, 64)

    def half_attention(self, x: Tensor) -> Tensor:
        q = (x @ self.weight).bfloat16().view(2, 4, 8, 64)
        return F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True).sin().reshape(-1, 64)

    def autocast(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return ((x @ self.weight).sin() @ self.weight).float()

    def in_place(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight).add_(1)
        hidden[:, ::2] *= 2
        return hidden.sin().add_(1)

    def norm(self, x: Tensor) -> Tensor:
        return F.relu(self.net(x[None]), inplace=True)[0] * x

    def two_generators(self, x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5) * torch.rand(64).cuda() * torch.rand(64, device="cuda")

    def gather(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return x[order].sin().index_add(0, order, x.exp())


@POLICIES
@pytest.mark.parametrize("name", [name for name in vars(Regions) if name[0] != "_"])
def test_a_region_is_plain(name: str, policy: Any) -> None:
    def scenario(run: Run) -> Any:
        regions = Regions()
        seen = train(getattr(regions, name), lambda: on_cuda(64, 64), run)
        return seen, regions.weight.grad, [*regions.net.buffers()]

    assert_transparent(scenario, partial(replay, policy=policy))


triton = pytest.importorskip("triton") if torch.cuda.is_available() else None
if triton is not None:
    import triton.language as tl

    @triton.jit
    def _scale(x, out, count, factor, block: tl.constexpr):  # its annotations mean something else
        place = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(out + place, tl.load(x + place, mask=place < count) * factor, mask=place < count)


def _launch(x: Tensor, out: Tensor, factor: float) -> None:
    assert triton is not None
    _scale[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), factor, block=256)


class Scaled(Function):
    """A kernel of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        out = torch.empty_like(x)
        _launch(x, out, factor)
        ctx.save_for_backward(x, out)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, out = ctx.saved_tensors
        return grad * ctx.factor + 0.5 * x + 0.25 * out, None


@POLICIES
def test_a_triton_kernel_in_a_custom_function(policy: Any) -> None:
    def scaled(x: Tensor) -> Tensor:
        return Scaled.apply(x.sin(), 3.0).exp()

    assert_transparent(
        partial(train, scaled, lambda: on_cuda(64, 64)), partial(replay, policy=policy)
    )


@POLICIES
def test_a_triton_kernel_that_writes_in_place(policy: Any) -> None:
    def doubled(x: Tensor) -> Tensor:
        hidden, count = x.sin() + 1, torch.zeros_like(x)
        _launch(count + 1, count, 2.0)
        with torch.no_grad():
            _launch(hidden, hidden, 2.0)
        return (hidden + count).tanh()

    assert_transparent(
        partial(train, doubled, lambda: on_cuda(16, 16)), partial(replay, policy=policy)
    )


def test_a_region_of_several_streams_is_held() -> None:
    side = torch.cuda.Stream()

    def forked(x: Tensor) -> Tensor:
        hidden = x.sin()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other = hidden.cos() * 2
        torch.cuda.current_stream().wait_stream(side)
        return (hidden * other).exp()

    assert_transparent(partial(train, forked, lambda: on_cuda(64, 64)), replay)
    recording = slot_of(forked).recording
    assert recording is not None
    assert recording.reason == "several streams"


def test_another_stream_than_that_of_the_recording() -> None:
    side = torch.cuda.Stream()

    def scenario(run: Run) -> Any:
        is_forked = False

        def forked(x: Tensor) -> Tensor:
            hidden = x.sin()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side if is_forked else torch.cuda.current_stream()):
                other = hidden.cos() * 2
            torch.cuda.current_stream().wait_stream(side)
            return (hidden * other).exp()

        seen = train(forked, lambda: on_cuda(64, 64), run)
        is_forked = True
        return seen, train(forked, lambda: on_cuda(64, 64), run)

    assert_transparent(scenario, replay)


@POLICIES
def test_a_region_on_a_side_stream(policy: Any) -> None:
    def scenario(run: Run) -> Any:
        regions, side, seen = Regions(), torch.cuda.Stream(), []
        for _ in range(CALLS):
            x = on_cuda(64, 64)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out = run(regions.dropout, x)
            torch.cuda.current_stream().wait_stream(side)
            out.square().sum().backward()
            torch.cuda.synchronize()
            seen += [out, x.grad]
        return seen, regions.weight.grad

    assert_transparent(scenario, partial(replay, policy=policy))


def test_what_is_kept_goes_to_the_host() -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()).cuda()

    def scenario(run: Run) -> Any:
        net.zero_grad()
        seen = train(net, lambda: on_cuda(512, 256), run)
        return seen, [parameter.grad for parameter in net.parameters()]

    away = recollect.policy.offload_ops(torch.ops.aten.addmm)
    assert_transparent(scenario, partial(replay, policy=away))
    assert_transparent(scenario, partial(replay, policy=away, offload_inputs=True))


def test_a_captured_graph_is_that_of_the_rerun_engine() -> None:
    layer, x = nn.Linear(64, 64, device="cuda"), on_cuda(8, 64)

    def step() -> None:
        layer.zero_grad(set_to_none=False)
        replay(lambda x: layer(x).sin(), x).sum().backward()

    layer.weight.grad, layer.bias.grad = (torch.zeros_like(p) for p in layer.parameters())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    expected = layer.weight.grad.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    layer.weight.grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_identical(layer.weight.grad, expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(256), nn.Linear(256, 768, bias=False)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(4, 128, 3, 4, 64).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(4, 128, 256)
        return x + self.down(F.silu(self.up(x)))


def _bytes_of(blocks: nn.ModuleList, run: Run) -> tuple[int, int]:
    """What is held after forward, and the peak, of a step after the recording ones."""

    def step() -> tuple[int, int]:
        blocks.zero_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        x = on_cuda(4, 128, 256, dtype=torch.bfloat16)
        out = x
        for block in blocks:
            out = run(block, out)
        held = torch.cuda.memory_allocated() - before
        out.sum().backward()
        return held, torch.cuda.max_memory_allocated() - before

    return [step() for _ in range(3)][-1]


def test_memory_is_at_most_that_of_torch() -> None:
    blocks = nn.ModuleList(Block() for _ in range(4)).cuda().bfloat16()
    torch_checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    aten = torch.ops.aten
    kinds = ("flash", "efficient", "cudnn")
    attention = [getattr(aten, f"_scaled_dot_product_{kind}_attention").default for kind in kinds]
    contexts = partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts,
        [aten.mm.default, aten.addmm.default, *attention],
    )
    theirs = _bytes_of(blocks, torch_checkpoint)
    ours = _bytes_of(blocks, replay)
    assert ours[0] <= theirs[0]
    assert ours[1] <= theirs[1]
    theirs = _bytes_of(blocks, partial(torch_checkpoint, context_fn=contexts))
    ours = _bytes_of(blocks, partial(replay, policy=DEAR))
    assert ours[0] <= 0.95 * theirs[0]
    assert ours[1] < theirs[1]


def test_a_backward_of_several_threads() -> None:
    """Devices have threads of their own: the CPU's part and the other ask for the same values."""

    def scenario(run: Run) -> Any:
        seen = []
        for _ in range(CALLS):
            x, y = on_cuda(64), torch.randn(64, requires_grad=True)

            def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                return (x.sin() * y.cuda()).exp(), (y.exp() * x.cpu()).tanh()

            first, second = run(both, x, y)
            torch.autograd.backward([first.sum(), second.sum()])
            seen += [first, second, x.grad, y.grad]
        return seen

    assert_identical(play(scenario, replay), play(scenario, lambda f, *args: f(*args)))


@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_recurrent_networks(dropout: float) -> None:
    # cuDNN draws from a state of its own, so what it drops out is kept.
    def train(run: Run) -> Any:
        torch.manual_seed(3)
        nets = [nn.LSTM(32, 32, 3, dropout=dropout, device="cuda") for _ in range(3)]
        x = on_cuda(16, 8, 32)

        def forward(x: Tensor) -> Tensor:
            for net in nets:
                x = x + net(x.tanh())[0].sin()
            return x

        seen = []
        for _ in range(CALLS):
            torch.manual_seed(3)
            out = run(forward, x)
            out.square().sum().backward()
            seen.append(out)
        if run is replay:
            recording = slot_of(forward).recording
            assert recording is not None
            assert recording.reason is None
            kept = {op.keep for op in recording.graph.ops if "_cudnn_rnn" in str(op.op)}
            assert (kept == {None}) == (dropout == 0)
        return [*seen, x.grad, *(p.grad for net in nets for p in net.parameters())]

    plain = train(lambda f, *args: f(*args))
    for ours, theirs in zip(train(replay), plain, strict=True):
        torch.testing.assert_close(ours, theirs)
