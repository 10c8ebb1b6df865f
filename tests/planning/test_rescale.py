"""The graph of a step for another batch is the one that is recorded with that batch."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.graph.graph import Graph
from recollect.graph.simulate import simulate_plain
from recollect.planning.batch import split_batch, tensors_of_batch
from recollect.planning.prices import Prices
from recollect.planning.record import trace_step
from recollect.planning.rescale import CannotPredict, Rescaled, rescaled
from recollect.planning.sizes import Dims, dense_strides, is_dense
from recollect.planning.step import TrainingStep
from recollect.planning.trace import StepTrace, layout_of
from tests._support import sampled
from tests.planning._models import VOCABULARY, Decoder, made, squares, tokens

Loss = Callable[[Any], Tensor]


def traced(model: nn.Module, batch: Any, loss: Loss | None = squares) -> tuple[Graph, StepTrace]:
    step = TrainingStep(model, *split_batch(batch), loss)
    with step.undone():
        step.run()
        return trace_step(step, Prices(step.device))


def rescaled_for(model: nn.Module, batch: Any, other: Any, loss: Loss | None = squares) -> Rescaled:
    graph, trace = traced(model, batch, loss)
    return rescaled(graph, trace, [layout_of(t) for t in tensors_of_batch(*split_batch(other))])


def without_workspace(graph: Graph) -> Graph:
    """What the kernels of this machine allocate and take is not known for other shapes."""
    pairs = zip(graph.events, graph.origins.workspaces, strict=True)
    events = [replace(event, seconds=0, during=event.during - work) for event, work in pairs]
    ops = [replace(op, seconds=0, workspace=0, can_send=False) for op in graph.ops]
    return replace(graph, ops=ops, events=events, rerun_cost=0, engine_cost=0, spread=0)


def assert_the_same(
    model: nn.Module,
    batch: Any,
    other: Any,
    loss: Loss | None = squares,
    loss_then: Loss | None = None,
) -> None:
    found = rescaled_for(model, batch, other, loss).graph
    recorded, _ = traced(model, other, loss_then or loss)
    assert without_workspace(found) == without_workspace(recorded)
    peaks = [simulate_plain(graph).peak for graph in (found, recorded)]
    assert 0.95 < peaks[0] / peaks[1] < 1.05


# --- models ---------------------------------------------------------------------------------------

CASES: dict[str, list[Callable[[], Any]]] = {
    "decoder": [
        lambda: tokens(6, 48),
        lambda: tokens(4, 64),
        lambda: tokens(7, 53),
        lambda: tokens(9, 4),
    ],
    "decoder_dropout": [lambda: tokens(6, 50)],
    "encoder_decoder": [
        lambda: (torch.randn(6, 24, 32), torch.randn(6, 20, 32)),
        lambda: (torch.randn(4, 30, 32), torch.randn(4, 22, 32)),
        lambda: (torch.randn(5, 24, 32), torch.randn(5, 27, 32)),
    ],
    "conv": [lambda: (torch.randn(6, 3, 16, 16),), lambda: (torch.randn(4, 3, 24, 20),)],
    "unet": [lambda: torch.randn(3, 3, 32, 32), lambda: torch.randn(2, 3, 48, 64)],
    "unrolled": [lambda: (torch.randn(20, 12, 24),)],
    "with_loss": [lambda: {"tokens": tokens(6, 50), "labels": tokens(6, 50)}],
    "loss_in_dict": [lambda: {"tokens": tokens(2, 96), "labels": tokens(2, 96)}],
    "tied": [lambda: tokens(6, 50)],
    "adapted": [lambda: tokens(6, 50)],
    "custom": [lambda: torch.randn(96, 48)],
    "hidden": [lambda: tokens(6, 50)],
    "cast": [lambda: tokens(6, 50)],
}


@pytest.mark.parametrize(
    ("name", "other"),
    [(name, other) for name, others in CASES.items() for other in others],
    ids=[f"{name}-{n}" for name, others in CASES.items() for n in range(len(others))],
)
def test_the_graph_is_the_recorded_one(name: str, other: Callable[[], Any]) -> None:
    case = made(name)
    assert_the_same(case.model, case.batch, other(), case.loss)


def test_with_a_batch_of_the_same_shape_it_is_the_same() -> None:
    case = made("decoder")
    graph, trace = traced(case.model, case.batch, case.loss)
    assert rescaled(graph, trace, [layout_of(case.batch)]) == Rescaled(graph, 0)


def test_with_an_optimizer() -> None:
    graphs = []
    for batch in (tokens(), tokens(6, 50)):
        model = Decoder(2)
        optimizer = torch.optim.AdamW(model.parameters())
        step = TrainingStep(model, (batch,), {}, squares, optimizer)
        with step.undone():
            step.run()
            graphs.append(trace_step(step, Prices(step.device)))
    (graph, trace), (recorded, _) = graphs
    found = rescaled(graph, trace, [layout_of(tokens(6, 50))]).graph
    assert without_workspace(found) == without_workspace(recorded)


SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def _of_transformers(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    llama = {**SMALL, "num_key_value_heads": 2}
    gpt = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    gpt |= {"bos_token_id": 1, "eos_token_id": 2}
    t5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    t5 |= {"num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0}
    configs = {"GPT2": gpt, "Llama": llama, "Bert": SMALL, "T5": t5}
    config = next(config for name, config in configs.items() if kind.startswith(name))
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**config))


@pytest.mark.parametrize(("count", "length"), [(6, 24), (3, 31)])
@pytest.mark.parametrize(
    "kind",
    sampled(
        ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"],
        usual=["LlamaForCausalLM"],
    ),
)
def test_models_of_transformers(kind: str, count: int, length: int) -> None:
    def batch(count: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 96, (count, length))
        labels = ids[:, : length - 4].clone() if kind.startswith("T5") else ids
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

    assert_the_same(_of_transformers(kind), batch(5, 24), batch(count, length), None)


def test_a_vision_transformer() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)

    def batch(count: int) -> dict[str, Tensor]:
        labels = torch.randint(0, 5, (count,))
        return {"pixel_values": torch.randn(count, 3, 32, 32), "labels": labels}

    assert_the_same(transformers.ViTForImageClassification(config), batch(4), batch(7), None)


# --- what code computes from shapes ---------------------------------------------------------------


class Causal(nn.Module):
    """Attention by hand, with a mask, a table of positions, and whatever else is made by length."""

    def __init__(self, positions: Callable[[int, int], Tensor], width: int = 32) -> None:
        super().__init__()
        self.positions = positions
        self.embed = nn.Embedding(VOCABULARY, width)
        self.register_buffer("mask", torch.ones(256, 256).tril().bool(), persistent=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, VOCABULARY)
        self.first = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, ids: Tensor) -> Tensor:
        batch, time = ids.shape
        x = self.embed(ids) + self.positions(time, 32)
        x = torch.cat([self.first.expand(batch, -1, -1), x[:, :-1]], 1)
        q, k, v = self.qkv(x).view(batch, time, 3, 4, 8).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / 8**0.5
        scores = scores.masked_fill(~self.mask[:time, :time], -math.inf)
        mixed = scores.softmax(-1) @ v
        x = x + mixed.transpose(1, 2).reshape(batch * time, 32).view(batch, time, 32)
        return self.out(x.flip(1).roll(1, 1))


@functools.lru_cache(maxsize=8)
def _cached(time: int, width: int) -> Tensor:
    return torch.arange(time)[:, None] * torch.ones(width)


_GLOBAL: dict[int, Tensor] = {}
_ORDERED: collections.OrderedDict[int, Tensor] = collections.OrderedDict()
_NESTED: dict[str, dict[int, Tensor]] = {"tables": {}}


def _memoized(memo: dict[int, Tensor], time: int, width: int) -> Tensor:
    if time not in memo:
        memo[time] = torch.arange(time)[:, None] * torch.ones(width)
    return memo[time]


def _enclosed() -> Callable[[int, int], Tensor]:
    memo: dict[int, Tensor] = {}
    return lambda time, width: _memoized(memo, time, width)


TABLES: dict[str, Callable[[int, int], Tensor]] = {
    "lru_cache": _cached,
    "global": lambda time, width: _memoized(_GLOBAL, time, width),
    "ordered": lambda time, width: _memoized(_ORDERED, time, width),
    "nested": lambda time, width: _memoized(_NESTED["tables"], time, width),
    "closure": _enclosed(),
    "made": lambda time, width: torch.arange(time)[:, None] * torch.ones(width),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("count", "time"), [(6, 48), (4, 64), (5, 37)])
def test_tables_and_masks(table: str, count: int, time: int) -> None:
    model = Causal(TABLES[table])
    found = rescaled_for(model, tokens(), tokens(count, time))
    recorded, _ = traced(model, tokens(count, time))
    assert without_workspace(found.graph) == without_workspace(recorded)
    is_other = time != 48 and table != "made"
    assert found.more == (time * 32 * 4 if is_other else 0)  # the table that code has to make


def test_targets_in_a_loss_grow_with_the_batch() -> None:
    def loss_of(count: int, time: int) -> Loss:
        targets = tokens(count, time)
        weights = torch.rand(VOCABULARY)
        return lambda out: F.cross_entropy(out.flatten(0, 1), targets.flatten(), weights)

    assert_the_same(Decoder(2), tokens(), tokens(9, 60), loss_of(4, 48), loss_of(9, 60))


@pytest.mark.parametrize(("count", "time"), [(64, 32), (32, 64), (48, 40)])
def test_sizes_that_mean_two_things(count: int, time: int) -> None:
    # Of the batch, the length, the width and the number of classes, all are 32.
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            batch, time, _ = x.shape
            x = x + torch.arange(time)[:, None]
            h = F.gelu(self.up(x)).view(batch, time, 2, 32).transpose(1, 2).flatten(2)
            return self.out(h.view(batch, 2, time, 32).transpose(1, 2).reshape(batch, time, 64))

    model = Net()
    assert_the_same(model, torch.randn(32, 32, 32), torch.randn(count, time, 32))


class Attending(nn.Module):
    """Attention by hand between products, which take batch and length as one."""

    def __init__(self, *, is_time_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.is_time_first = is_time_first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.is_time_first:
            x = x.transpose(0, 1)
        first, second = x.shape[:2]
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.is_time_first:
            heads = [h.reshape(first, second * 4, 8).transpose(0, 1) for h in (q, k, v)]
        else:
            heads = [h.view(first, second, 4, 8).transpose(1, 2) for h in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(-2, -1)
        time = scores.shape[-1]
        mixed = (scores + torch.full((time, time), -math.inf).triu(1)).softmax(-1) @ heads[2]
        if self.is_time_first:
            return x + self.out(mixed.transpose(0, 1).reshape(first, second, 32))
        return x + self.out(mixed.transpose(1, 2).reshape(first, second, 32))


@pytest.mark.parametrize("is_time_first", [False, True])
@pytest.mark.parametrize(("count", "time"), [(32, 48), (48, 32), (40, 48)])
def test_a_batch_that_is_as_long_as_there_are_sequences(
    count: int, time: int, is_time_first: bool
) -> None:
    assert_the_same(Attending(is_time_first=is_time_first), tokens(32, 32), tokens(count, time))


@pytest.mark.parametrize("count", [2, 7])
def test_a_batch_of_one(count: int) -> None:
    case = made("decoder")
    assert_the_same(case.model, tokens(1, 48), tokens(count, 48), case.loss)


class Shapes(nn.Module):
    """Ops that are given sizes, each in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, time = x.shape
        x = self.norm(self.conv(x)) + self.bias[:, None].repeat(batch, 1, time)
        a, b = x.chunk(2, -1)
        x = torch.cat([a, b.contiguous()], -1)
        first, rest = x.split([1, time - 1], -1)
        x = F.pad(torch.cat([first, rest], -1), (2, 2))[..., 2:-2]
        x = F.interpolate(x, scale_factor=2.0) + F.interpolate(x, size=2 * time)
        x = x.unfold(-1, 2, 2).mean(-1)
        x = x + x.new_zeros(batch, channels, time) + torch.zeros(time).expand(batch, 1, time)
        x = x[:, :, 1:] + x[:, :, : time - 1]
        x = x.as_strided((batch, channels, time - 1), x.stride())
        return x + torch.linspace(0, 1, time - 1) + torch.eye(time - 1).sum(0)


@pytest.mark.parametrize(("count", "time"), [(6, 20), (3, 26), (5, 30)])
def test_ops_that_are_given_sizes(count: int, time: int) -> None:
    assert_the_same(Shapes(), torch.randn(3, 8, 20), torch.randn(count, 8, time))


class Windows(nn.Module):
    """Attention in windows of an image, as of Swin."""

    def __init__(self, window: int = 4) -> None:
        super().__init__()
        self.window = window
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1).roll((-2, -2), (1, 2))
        batch, high, wide, width = x.shape
        size = self.window
        y = x.view(batch, high // size, size, wide // size, size, width)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, width)
        q, k, v = self.qkv(y).reshape(-1, size * size, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).reshape(-1, size * size, width))
        y = y.view(batch, high // size, wide // size, size, size, width)
        return x + y.permute(0, 1, 3, 2, 4, 5).reshape(batch, high, wide, width)


class Rotary(nn.Module):
    """Positions by angles, fewer keys than queries, numbers that are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q = self.q(x).view(batch, time, 4, 8).transpose(1, 2)
        k = self.k(x).view(batch, time, 2, 8).transpose(1, 2)
        angles = torch.outer(torch.arange(time).float(), 1e4 ** -(torch.arange(0, 8, 2) / 8))
        twice = torch.cat([angles, angles], -1)
        k = k * twice.cos() + torch.cat([-k[..., 4:], k[..., :4]], -1) * twice.sin()
        k = k[:, :, None].expand(batch, 2, 2, time, 8).reshape(batch, 4, time, 8)
        turned = torch.view_as_complex(q.reshape(batch, 4, time, 4, 2))
        turned = turned * torch.polar(torch.ones(time, 4), angles)
        q = torch.view_as_real(turned).flatten(3)
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)


class Sums(nn.Module):
    """A token before all others, sums over several indices, bags of embeddings, one-hot targets."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.embed = nn.EmbeddingBag(50, 32, mode="sum"), nn.Embedding(50, 32)
        self.heads = nn.Parameter(torch.randn(4, 32, 8))
        self.positions = nn.Parameter(torch.randn(1, 128, 32))
        self.first = nn.Parameter(torch.zeros(1, 1, 32))
        self.out = nn.Linear(8, 50)

    def forward(self, ids: Tensor) -> Tensor:
        batch, time = ids.shape
        bags = self.bags(ids.flatten(), torch.arange(0, batch * time, time))
        x = torch.cat([self.first.expand(batch, -1, -1), self.embed(ids)], 1)
        x = (x + self.positions[:, : time + 1] + bags[:, None])[:, 1:]
        h = torch.einsum("btd,hdk->bhtk", x, self.heads)
        near = (torch.arange(time)[None] - torch.arange(time)[:, None]).abs()
        mixed = torch.einsum("bhtk,bhsk,ts->bsk", h, h, 1.0 / (1 + near))
        scores = self.out(mixed).log_softmax(-1)
        return scores.gather(-1, ids[..., None]) - (scores * F.one_hot(ids, 50)).sum(-1, True)


@pytest.mark.parametrize(
    ("make", "batch", "others"),
    [
        (Windows, (2, 3, 64, 64), [(3, 3, 64, 64), (2, 3, 96, 64), (2, 3, 128, 96)]),
        (Rotary, (6, 20, 32), [(9, 20, 32), (6, 41, 32), (4, 7, 32)]),
        (Rotary, (4, 8, 32), [(9, 8, 32), (4, 16, 32), (8, 24, 32)]),
        (Sums, (6, 20), [(9, 20), (6, 33), (7, 29)]),
    ],
    ids=["windows", "rotary", "rotary that means two things", "sums"],
)
def test_other_architectures(make: Any, batch: Any, others: list[Any]) -> None:
    def of(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 50, shape) if make is Sums else torch.randn(shape)

    model = make()
    for other in others:
        assert_the_same(model, of(batch), of(other))


# --- what cannot be told --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "other", "culprit"),
    [
        ("moe", lambda: (torch.randn(6, 32, 32),), "aten::nonzero"),
        ("lstm", lambda: (torch.randn(10, 24, 24),), "aten::mkldnn_rnn_layer"),
        ("packed", lambda: torch.randn(10, 16, 24), "aten::_pack_padded_sequence"),
        ("unrolled", lambda: (torch.randn(16, 14, 24),), "aten::unbind"),
    ],
)
def test_what_depends_on_data_or_code_names_the_op(
    name: str, other: Callable[[], Any], culprit: str
) -> None:
    case = made(name)
    with pytest.raises(CannotPredict, match=f"what {culprit} makes of it is not known"):
        rescaled_for(case.model, case.batch, other(), case.loss)


def test_a_size_that_was_read_from_a_tensor() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            return self.layer(x) + torch.zeros(length.item(), 8).sum(0)

    batch = torch.randn(4, 8), torch.tensor(13)
    with pytest.raises(CannotPredict, match="aten::zeros"):
        rescaled_for(Net(), batch, (torch.randn(5, 8), torch.tensor(13)))


def test_a_batch_of_other_kinds() -> None:
    case = made("decoder")
    graph, trace = traced(case.model, case.batch, case.loss)
    with pytest.raises(CannotPredict, match="tensors of another kind"):
        rescaled(graph, trace, [layout_of(torch.randn(4, 48))])
    with pytest.raises(CannotPredict, match="tensors of another kind"):
        rescaled(graph, trace, [layout_of(tokens(4, 48)[0])])


# --- what it leaves alone -------------------------------------------------------------------------


def test_nothing_is_drawn_and_no_tensor_held() -> None:
    case = made("decoder_dropout")
    graph, trace = traced(case.model, case.batch, case.loss)
    look = layout_of(tokens(6, 50))
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), torch.device("cpu"):
        rescaled(graph, trace, [look])
    assert torch.equal(torch.get_rng_state(), before)
    assert not _tensors_in(trace)


def _tensors_in(thing: Any, depth: int = 8) -> list[Tensor]:
    if isinstance(thing, Tensor):
        return [thing]
    if depth and isinstance(thing, (list, tuple, set)):
        return [found for each in thing for found in _tensors_in(each, depth - 1)]
    if depth and isinstance(thing, dict):
        return _tensors_in([*thing.values()], depth - 1)
    slots = [getattr(thing, name) for name in getattr(type(thing), "__slots__", ())]
    return (
        _tensors_in([*getattr(thing, "__dict__", {}).values(), *slots], depth - 1) if depth else []
    )


# --- sizes ----------------------------------------------------------------------------------------


def test_views_are_found_by_their_number_of_elements() -> None:
    dims = Dims([((4, 48), (6, 50))])

    def view(old: tuple[int, ...], new: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        return next(dims.of_view(old, new, sizes))

    assert view((4, 48, 32), (6, 50, 32), (192, 32)) == (300, 32)
    assert view((192, 32), (300, 32), (4, 48, 32)) == (6, 50, 32)
    assert view((192, 32), (300, 32), (4, 48, 4, 8)) == (6, 50, 4, 8)
    assert view((4, 48, 32), (6, 50, 32), (1, 192, 1, 32)) == (1, 300, 1, 32)
    assert view((16, 48, 8), (24, 50, 8), (4, 4, 48, 8)) == (6, 4, 50, 8)
    assert view((4, 1, 48), (6, 1, 50), (4, 48)) == (6, 50)
    assert view((48, 4, 1), (50, 6, 1), (48, 4)) == (50, 6)
    assert view((), (), (1, 1)) == (1, 1)


def test_sizes_of_the_batch_are_put_together() -> None:
    dims = Dims([((4, 48), (6, 50))])
    assert dims.of(48)[0] == 50
    assert dims.of(47)[0] == 49  # one less
    assert dims.of(192)[0] == 300  # the product
    assert dims.of(96)[:2] == [96, 100]  # twice, or something else
    assert dims.of(7) == [7]


def test_what_is_noted_can_be_forgotten() -> None:
    dims = Dims([((4,), (6,))])
    mark = dims.mark
    dims.note((9, 4), (11, 6))
    assert (dims.of(9)[0], next(dims.of_shape((9, 4)))) == (11, (11, 6))
    dims.undo(mark)
    assert (dims.of(9), next(dims.of_shape((9, 4)))) == ([9], (9, 6))


def test_strides_keep_their_order() -> None:
    last = torch.empty(4, 8, 6, 6).to(memory_format=torch.channels_last)
    assert is_dense(tuple(last.shape), last.stride())
    larger = torch.empty(5, 8, 7, 9).to(memory_format=torch.channels_last)
    shape = tuple(larger.shape)
    assert dense_strides(shape, tuple(last.shape), last.stride()) == larger.stride()
    assert not is_dense((4, 4), (8, 1))
