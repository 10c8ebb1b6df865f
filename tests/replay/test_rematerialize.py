"""What the replay engine does and holds: operations, FLOPs and bytes, exactly.

In every test the call that records and the calls that are checked against it must both be right:
they are numbered 0, 1, 2.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect.policy.op_info import op_info
from tests._support import (
    Counted,
    Memory,
    collector_off,
    leaf,
    measure,
    plain,
    torch_rerun,
)
from tests.rerun.selective._helpers import Ops, total

aten = torch.ops.aten
replay = partial(recollect.checkpoint, engine="replay")
products = recollect.policy.matmuls() | recollect.policy.attention()

CALLS = pytest.mark.parametrize("call", [0, 1, 2], ids=["recording", "second", "third"])


class Decoder(nn.Module):
    """A block of a language model: one product for queries, keys and values, gated MLP."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


SHAPE = (2, 16, 32)
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
#: What is run again if nothing is kept: all but the last product and the last sum.
AGAIN = {
    aten.mm.default: 4,
    ATTENTION: 1,
    aten.native_layer_norm.default: 2,
    aten.add.Tensor: 1,
    aten.silu.default: 1,
    aten.mul.Tensor: 1,
}


def after_calls(run: Any, function: Any, inputs: Any, call: int) -> Any:
    """The outcome of the call of that number."""
    for _ in range(call):
        total(run(function, *inputs)).backward()
    forget(function, inputs)
    return run(function, *inputs)


def forget(function: Any, inputs: Any) -> None:
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    for tensor in (*inputs, *weights):
        tensor.grad = None


def backward_ops(run: Any, function: Any, inputs: Any, call: int = 0) -> Counter[Any]:
    """The ops of backward, without views."""
    loss = total(after_calls(run, function, inputs, call))
    with Ops() as ops:
        loss.backward()
    forget(function, inputs)
    return Counter({o: n for o, n in ops.count.items() if not op_info(o).is_view})


def again(function: Any, inputs: Any, call: int, **options: Any) -> Counter[Any]:
    """How often each op is run again."""
    found = backward_ops(partial(replay, **options), function, inputs, call)
    found.subtract(backward_ops(plain, function, inputs))
    return Counter({op: count for op, count in found.items() if count})


def flops(run: Any, function: Any, inputs: Any, call: int = 0) -> int:
    """Of forward and backward. (The counter hooks modules, so it is there in all calls.)"""
    for _ in range(call + 1):
        with FlopCounterMode(display=False) as counter:
            total(run(function, *inputs)).backward()
    forget(function, inputs)
    return counter.get_total_flops()


# --- operations -----------------------------------------------------------------------------------


@CALLS
def test_with_nothing_kept_each_needed_op_runs_once_more(call: int) -> None:
    assert again(Decoder(), [leaf(*SHAPE)], call) == AGAIN


@CALLS
def test_with_products_kept_none_of_them_runs_again(call: int) -> None:
    left = Counter(AGAIN)
    del left[aten.mm.default], left[ATTENTION]
    # The residual sum is kept instead of the product in it, so it is not run again either.
    found = again(Decoder(), [leaf(*SHAPE)], call, policy=products)
    assert not found - left
    assert found[aten.native_layer_norm.default] == 2
    assert found[aten.silu.default] == 1


@CALLS
def test_with_everything_kept_nothing_runs_again(call: int) -> None:
    policy = recollect.policy.everything()
    assert not again(Decoder(), [leaf(*SHAPE)], call, policy=policy)


@CALLS
def test_flops(call: int) -> None:
    decoder, x = Decoder(), leaf(*SHAPE)
    bare = flops(plain, decoder, [x])
    assert flops(partial(replay, policy=products), decoder, [x], call) == bare
    with FlopCounterMode(display=False) as forward:
        decoder(x)
    tokens, width = x.shape[0] * x.shape[1], x.shape[2]
    last = 2 * tokens * 4 * width * width
    everything_again = bare + forward.get_total_flops() - last
    assert flops(replay, decoder, [x], call) == everything_again


@CALLS
def test_flops_are_never_more_than_torchs(call: int) -> None:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )
    x = leaf(5, 8)
    assert flops(replay, model, [x], call) <= flops(torch_rerun, model, [x])


@CALLS
def test_only_what_a_partial_backward_asks_for_is_run_again(call: int) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x.sin() @ w).exp().sin(), (x.cos() @ w).tanh().sin()

    x, w = leaf(4, 4), leaf(4, 4)
    outs = after_calls(replay, function, [x, w], call)
    with Ops() as ops:
        torch.autograd.grad(outs[0].sum(), x)
    assert ops[aten.sin] == 1
    assert ops[aten.tanh] == 0


@CALLS
def test_a_second_backward_runs_everything_once_more_and_no_more(call: int) -> None:
    decoder, x = Decoder(), leaf(*SHAPE)
    loss = total(after_calls(replay, decoder, [x], call))
    for _ in range(3):
        with Ops() as ops:
            loss.backward(retain_graph=True)
        assert ops[aten.native_layer_norm] == 2
        assert ops[aten.silu] == 1


def test_a_checked_call_runs_the_ops_of_plain_forward() -> None:
    """Nothing is copied, nothing is computed for the sake of the check."""
    decoder, x = Decoder(), leaf(*SHAPE)
    for _ in range(3):
        replay(decoder, x).sum().backward()

    def ops(run: Any) -> Counter[str]:
        # Not by a mode, which would be noticed.
        with torch.profiler.profile() as profiler:
            run(decoder, x)
        names = Counter(event.name for event in profiler.events())
        return Counter({n: c for n, c in names.items() if n.startswith("aten::")})

    extra = ops(replay) - ops(plain)
    assert set(extra) <= {"aten::detach", "aten::alias"}


def test_writes_in_place_are_copied_only_where_the_old_value_is_needed() -> None:
    def without_need(x: Tensor) -> Tensor:
        h = x.sin()
        for _ in range(4):
            h = h.mul_(2.0).add_(1.0)
        return h.exp()

    for call in range(3):
        found = again(without_need, [leaf(8)], call)
        # The result of exp is what backward needs: it is made from one sine.
        assert found == {
            aten.sin.default: 1,
            aten.mul_.Tensor: 4,
            aten.add_.Tensor: 4,
            aten.exp.default: 1,
        }


def test_the_function_is_run_once_per_step() -> None:
    counted = Counted(lambda x, w: (x.sin() @ w).exp().sin())
    for step in range(5):
        total(replay(counted, leaf(4, 4), leaf(4, 4))).backward()
        assert (counted.started, counted.finished) == (step + 1, step + 1)


def test_routing_does_not_repeat_what_chooses() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        value, index = (x @ w).softmax(-1).topk(2)
        order = index.flatten().argsort()
        return (value.flatten()[order].sin() * x.flatten()[order]).exp()

    for call in range(3):
        found = backward_ops(replay, function, [leaf(4, 4), leaf(4, 4)], call)
        assert found[aten.topk.default] == 0
        assert not [op for op in found if "sort" in str(op)]


# --- bytes ----------------------------------------------------------------------------------------

SIZE = 1024
BYTES = 4 * SIZE


def memory(run: Any, make: Callable[[], Any], shape: tuple[int, ...], call: int) -> Memory:
    """Bytes of the call of that number, of regions one after the other."""
    x = leaf(*shape)

    def forward(regions: Any, run: Any = run) -> Tensor:
        out = x
        for region in regions:
            out = run(region, out)
        return out

    def backward(regions: Any, out: Tensor) -> None:
        out.backward(seed)
        for region in regions:
            forget(region, [x])

    # Others of the kind, for what is made once in a process; they share no recording.
    others = _listed(make())
    seed = torch.ones_like(forward(others, plain))
    backward(others, forward(others))
    regions = _listed(make())
    for _ in range(call):
        backward(regions, forward(regions))
    return measure(partial(forward, regions), partial(backward, regions), warm_up=False)


def _listed(regions: Any) -> Any:
    return regions if isinstance(regions, (list, nn.ModuleList)) else [regions]


def chain() -> Any:
    """Each sine saves its input."""

    def function(x: Tensor) -> Tensor:
        for _ in range(6):
            x = x.sin()
        return x

    return Counted(function)


@CALLS
def test_bytes_of_a_chain(call: int) -> None:
    """Only the output is held; the inputs of the sines come back, and go one by one."""
    found = memory(replay, chain, (SIZE,), call)
    assert found.held == BYTES
    assert found.peak == (1 + 5 + 2) * BYTES
    assert found.left == 0


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(SIZE) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x


@CALLS
def test_values_are_released_one_by_one(call: int) -> None:
    """Gradients of weights pile up while recomputed values go: the peak stays put."""

    assert memory(replay, Product, (SIZE,), call).peak <= (8 + 4) * BYTES


@CALLS
def test_kept_values_are_released_one_by_one(call: int) -> None:
    """So a step with everything kept has the peak of plain autograd."""

    bare = memory(plain, Product, (SIZE,), 1)
    ours = memory(partial(replay, policy=recollect.policy.everything()), Product, (SIZE,), call)
    assert ours.held == bare.held
    assert ours.peak == bare.peak


@CALLS
def test_a_later_region_is_over_before_an_earlier_one_begins(call: int) -> None:
    one = memory(replay, lambda: [chain()], (SIZE,), call)
    four = memory(replay, lambda: [chain() for _ in range(4)], (SIZE,), call)
    assert four.held == 4 * BYTES
    assert four.peak - one.peak == 3 * BYTES, "the outputs of the three further regions"


@CALLS
def test_in_a_recording_too_what_can_be_had_again_is_dropped_as_forward_goes(call: int) -> None:
    """The peak of forward alone is a few values, not all."""
    x = leaf(SIZE)
    region = chain()
    for _ in range(call):
        replay(region, x)
    found = measure(lambda: replay(region, x), lambda out: None, warm_up=False)
    assert found.peak == 2 * BYTES


class Recurrent(nn.Module):
    """Two layers of what torch has; ``lengths``: those of the sequences, if they are told."""

    def __init__(self, kind: type[nn.Module], lengths: list[int] | None = None) -> None:
        super().__init__()
        self.layers = kind(16, 16, 2, dropout=0.1)
        self.lengths = lengths

    def forward(self, x: Tensor) -> Tensor:
        if self.lengths is None:
            return self.layers(x.sin())[0].sin()
        packed = nn.utils.rnn.pack_padded_sequence(x.sin(), self.lengths)
        return nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0])[0].sin()


@CALLS
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_hold_their_output(kind: type[nn.Module], call: int) -> None:
    found = memory(replay, lambda: Recurrent(kind), (12, 4, 16), call)
    states = 2 * torch.get_rng_state().nbytes
    assert found.held <= 4 * 12 * 4 * 16 + states


@CALLS
def test_what_an_opaque_function_does_not_return_is_not_held(call: int) -> None:
    """It cannot be run again, so autograd holds what it saved, and nobody more than that."""
    bare = memory(plain, lambda: Recurrent(nn.GRU, [12, 9, 7, 3]), (12, 4, 16), 1)
    ours = memory(replay, lambda: Recurrent(nn.GRU, [12, 9, 7, 3]), (12, 4, 16), call)
    assert ours.held <= bare.held
    assert ours.peak <= 1.02 * bare.peak


OPS = [aten.mm.default, aten.addmm.default, aten.bmm.default, ATTENTION]


def _decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in OPS else CheckpointPolicy.PREFER_RECOMPUTE


torch_full = partial(torch_rerun, preserve_rng_state=False)
torch_selective = partial(
    torch_full, context_fn=partial(create_selective_checkpoint_contexts, _decide)
)


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)
    )


PRODUCTS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "decoder": (Decoder, SHAPE),
    "three decoders": (lambda: nn.ModuleList(Decoder() for _ in range(3)), SHAPE),
    "mlp": (mlp, (8, 16, 32)),
}
MODELS = {**PRODUCTS, "convolutions": (convolutions, (2, 2, 16, 16))}


@CALLS
@pytest.mark.parametrize("name", MODELS)
def test_never_more_bytes_than_torch(name: str, call: int) -> None:
    make, shape = MODELS[name]
    theirs = memory(torch_full, make, shape, 1)
    ours = memory(replay, make, shape, call)
    assert ours.held <= theirs.held
    assert ours.peak <= theirs.peak
    assert ours.left == 0


@CALLS
@pytest.mark.parametrize("name", PRODUCTS)
def test_never_more_bytes_than_torchs_selective(name: str, call: int) -> None:
    make, shape = PRODUCTS[name]
    theirs = memory(torch_selective, make, shape, 1)
    ours = memory(partial(replay, policy=OPS), make, shape, call)
    assert ours.held <= theirs.held
    assert ours.peak <= theirs.peak
    assert ours.left == 0


@CALLS
def test_a_decoder_holds_five_percent_less_than_torchs_selective(call: int) -> None:
    """The residual sum, which backward needs, is held in place of the product in it."""
    theirs = memory(torch_selective, Decoder, SHAPE, 1)
    ours = memory(partial(replay, policy=OPS), Decoder, SHAPE, call)
    assert ours.held <= 0.95 * theirs.held


@CALLS
def test_a_kept_view_keeps_its_base_once(call: int) -> None:
    """Queries, keys and values are parts of one product."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return q.sin() * k.sin() * v.sin()

    ours = memory(partial(replay, policy=OPS), Parts, (64, 32), call)
    assert ours.held == (64 * 96 + 64 * 32) * 4


@CALLS
def test_a_random_mask_is_not_held(call: int) -> None:
    """But where the generator stood is."""

    def make() -> Any:
        return nn.Sequential(nn.Tanh(), nn.Dropout(0.5), nn.Tanh())

    held = memory(replay, make, (SIZE,), call).held
    assert held <= BYTES + torch.get_rng_state().nbytes


@CALLS
def test_weights_and_inputs_cost_nothing(call: int) -> None:
    found = memory(replay, lambda: nn.Linear(32, 32), (SIZE, 32), call)
    assert found.held == SIZE * 32 * 4, "the output"


@CALLS
def test_an_output_that_is_dropped_takes_its_values_along(call: int) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sin(), x.topk(SIZE).values.exp().topk(SIZE).values

    x = leaf(SIZE)
    for _ in range(call):
        replay(function, x)
    with collector_off():
        first, second = replay(function, x)
        reference = weakref.ref(second)
        del second
        assert reference() is None
        first.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().sin().sum(), x)[0])


@CALLS
def test_offloaded_values_leave_nothing_here(call: int) -> None:
    """With a store that keeps nothing on the device, held is what a region without policy holds."""
    kept: dict[int, Any] = {}

    class Elsewhere:
        def put(self, tensor: Tensor) -> int:
            kept[len(kept)] = tensor.numpy().copy()
            return len(kept) - 1

        def get(self, handle: int) -> Tensor:
            return torch.from_numpy(kept[handle].copy())

        def drop(self, handle: int) -> None:
            kept[handle] = None

    run = partial(replay, policy=recollect.policy.offload_ops(aten.mm), store=Elsewhere())
    ours = memory(run, Decoder, SHAPE, call)
    assert ours.held == memory(replay, Decoder, SHAPE, call).held
    assert all(array is None for array in kept.values())
    assert len(kept) >= 4
