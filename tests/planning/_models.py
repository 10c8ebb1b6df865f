"""Small models of every kind that is trained, each with a batch and a loss."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from recollect.graph.graph import Schedule
from recollect.planning.plan import Plan
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request
from recollect.planning.recording.record import Profile
from recollect.planning.trial import Candidate
from recollect.replay.named_schedule import trimmed

#: Tokens that there are.
VOCABULARY = 96


def squares(out: Tensor) -> Tensor:
    """A loss whose gradients are no constants."""
    return out.float().square().mean()


def never(out: Any) -> Tensor:
    """The loss of a call that is refused before a step runs."""
    raise AssertionError("the step was run")


# --- decoders -------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a gated product, each on what was normed."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        looks = (batch, time, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(looks).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        x = x + F.dropout(mixed, self.dropout, self.training)
        h = self.norm2(x)
        h = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + F.dropout(h, self.dropout, self.training)


class Decoder(nn.Module):
    """Tokens to scores of tokens."""

    def __init__(self, layers: int = 3, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


class Tied(Decoder):
    """One matrix reads and writes tokens."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.head.weight = self.embed.weight


@dataclass
class Output:
    """As libraries of models return."""

    loss: Tensor | None
    scores: Tensor
    hidden: tuple[Tensor, ...] = ()


class WithLoss(Decoder):
    """Computes its loss, and calls it so."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, tokens: Tensor, *, labels: Tensor) -> Output:
        scores = super().forward(tokens)
        return Output(F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores)


class WithLossInDict(WithLoss):
    """The same, in a dict."""

    def forward(self, tokens: Tensor, *, labels: Tensor) -> dict[str, Tensor]:
        out = super().forward(tokens, labels=labels)
        return {"loss": out.loss, "scores": out.scores}


class Hidden(Decoder):
    """Returns what every layer made, in a list."""

    def forward(self, tokens: Tensor) -> list[Tensor]:
        states = [self.embed(tokens)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return states


class Cast(Decoder):
    """Computes products in bfloat16."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens)


class LowRank(nn.Module):
    """A frozen product, and a small one beside it that is trained."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Adapted(Decoder):
    """Trained in a few small matrices alone."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.requires_grad_(False)
        for layer in self.layers:
            layer.qkv = LowRank(layer.qkv)
            layer.down = LowRank(layer.down)


# --- others ---------------------------------------------------------------------------------------


class EncoderDecoder(nn.Module):
    """What torch has, with dropout."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            width, 4, layers, layers // 2, 2 * width, dropout=0.1, batch_first=True
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.transformer(source, target)


class Residual(nn.Module):
    """Convolutions with a skip, and activations in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.act(y)


class ConvNet(nn.Module):
    """Images to scores."""

    def __init__(self, blocks: int = 3, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """What goes down is kept for the way up."""

    def __init__(self, channels: int = 8, depth: int = 2) -> None:
        super().__init__()
        widths = [channels * 2**n for n in range(depth + 1)]
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(self._twice(w, w) for w in widths[:-1])
        self.pools = nn.ModuleList(nn.Conv2d(w, 2 * w, 3, stride=2, padding=1) for w in widths[:-1])
        self.middle = self._twice(widths[-1], widths[-1])
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])
        )
        self.joins = nn.ModuleList(self._twice(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(channels, 3, 1)

    @staticmethod
    def _twice(given: int, made: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(4, made), nn.SiLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for block, pool in zip(self.down, self.pools, strict=True):
            x = block(x)
            skips.append(x)
            x = pool(x)
        x = self.middle(x)
        for up, join in zip(self.ups, self.joins, strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


class Mixture(nn.Module):
    """Each token goes to the two experts that its gate chooses."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).reshape(-1, x.shape[-1])
        weights, chosen = self.gate(h).softmax(-1).topk(2)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel():
                out = out.index_add(0, token, expert(h[token]) * weights[token, slot, None])
        return x + out.view_as(x)


class MoE(nn.Module):
    """Mixtures, one after the other."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Mixture(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Lstm(nn.Module):
    """What torch has."""

    def __init__(self, width: int = 24, hidden: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class Packed(nn.Module):
    """Sequences that are not all of one length, between layers of products."""

    def __init__(self, width: int = 24, hidden: int = 32) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.gru = nn.GRU(hidden, hidden, 2, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        lengths = [x.shape[1] - row for row in range(len(x))]
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True)
        return self.head(pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0])


class Unrolled(nn.Module):
    """Cell by cell."""

    def __init__(self, width: int = 24, hidden: int = 32) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, hidden)
        self.head = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        made = []
        for now in x.unbind(1):
            state = self.cell(now, state)
            made.append(state[0])
        return self.head(torch.stack(made, 1))


class Swish(torch.autograd.Function):
    """Saves what it is given alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate + x * gate * (1 - gate))


class Custom(nn.Module):
    """Products with a function of one's own between them."""

    def __init__(self, layers: int = 5, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + Swish.apply(layer(norm(x)))
        return x


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and the loss of what it returns."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any], Tensor] | None = squares


def tokens(batch: int = 4, time: int = 48) -> Tensor:
    """A batch of text."""
    return torch.randint(0, VOCABULARY, (batch, time))


def _labelled() -> dict[str, Tensor]:
    return {"tokens": tokens(), "labels": tokens()}


CASES: dict[str, Case] = {
    "decoder": Case(Decoder, tokens),
    "decoder_dropout": Case(lambda: Decoder(2, dropout=0.1), tokens),
    "encoder_decoder": Case(
        EncoderDecoder, lambda: (torch.randn(4, 24, 32), torch.randn(4, 20, 32))
    ),
    "conv": Case(ConvNet, lambda: (torch.randn(4, 3, 16, 16),)),
    "moe": Case(MoE, lambda: (torch.randn(4, 32, 32),)),
    "lstm": Case(Lstm, lambda: (torch.randn(8, 24, 24),)),
    "packed": Case(Packed, lambda: torch.randn(8, 16, 24)),
    "unrolled": Case(Unrolled, lambda: (torch.randn(16, 12, 24),)),
    "with_loss": Case(WithLoss, _labelled, None),
    "loss_in_dict": Case(WithLossInDict, _labelled, None),
    "tied": Case(Tied, tokens),
    "adapted": Case(Adapted, tokens),
    "custom": Case(Custom, lambda: torch.randn(64, 48)),
    "hidden": Case(Hidden, tokens, lambda states: sum(map(squares, states))),
    "cast": Case(Cast, tokens),
    "unet": Case(UNet, lambda: torch.randn(2, 3, 32, 32)),
}


@dataclass
class Made:
    """A case that can be run."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None

    def forward(self) -> Any:
        """What the model makes of the batch."""
        return call(self.model, self.batch)

    def loss_of(self, out: Any) -> Tensor:
        """The loss, by the function or as the model has it."""
        if self.loss is not None:
            return self.loss(out)
        return out["loss"] if isinstance(out, dict) else out.loss

    def step(self, seed: int | None = None) -> None:
        """Forward and backward."""
        if seed is not None:
            torch.manual_seed(seed)
        out = self.forward()
        self.loss_of(out).backward()


def call(model: nn.Module, batch: Any) -> Any:
    """A tuple is the arguments, a dict those with names, and anything else is the argument."""
    if isinstance(batch, tuple):
        return model(*batch)
    return model(**batch) if isinstance(batch, dict) else model(batch)


def made(name: str, seed: int = 0) -> Made:
    """A case, always the same."""
    torch.manual_seed(seed)
    case = CASES[name]
    return Made(case.make(), case.batch(), case.loss)


# --- bytes ----------------------------------------------------------------------------------------


def static_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """The bytes of parameters, buffers and the optimizer's state, each memory once."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        for state in optimizer.state.values():
            tensors += [each for each in state.values() if isinstance(each, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
    return sum(storage.nbytes() for storage in storages.values())


# --- times ----------------------------------------------------------------------------------------

_PRODUCTS = ("mm", "conv", "attention", "lstm", "gru", "rnn")


def with_fixed_times(profile: Profile) -> Profile:
    """The same step, with times that are those of no machine: a launch, and the bytes that move."""
    graph = profile.graph

    def seconds(number: int) -> float:
        op = graph.ops[number]
        moved = sum(graph.values[value].nbytes for value in (*op.reads, *graph.results[number]))
        return 4e-6 + moved / (1e9 if any(name in op.name for name in _PRODUCTS) else 1e10)

    ops = [replace(op, seconds=seconds(number)) for number, op in enumerate(graph.ops)]
    events = [replace(m, seconds=2e-5 if m.op < 0 else ops[m.op].seconds) for m in graph.events]
    fixed = replace(graph, ops=ops, events=events, rerun_cost=6e-6)
    return replace(profile, graph=fixed, seconds=fixed.plain_seconds)


# --- plans of one's own ---------------------------------------------------------------------------


class _NoSolver:
    """Takes no time."""

    def frontier(self) -> list[Any]:
        return []


def plan_that_keeps(
    part: float, model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = squares
) -> Plan:
    """A plan that nothing was solved for: it keeps a part of all results, by chance.

    Its budget is one that every batch fits, and still it is said to be less than plain.
    """
    planner = Planner.of(Request(model, batch, loss))
    planner.solver = _NoSolver()
    vars(planner)["_alternatives"] = ()
    planner.trials.graph = planner.trials.profile.graph  # what the engine costs is not measured
    draw = random.Random(0)
    kept = frozenset(n for n in planner.graph.choices if draw.random() < part)
    schedule = trimmed(planner.graph, Schedule(kept))
    plan = planner.make_plan(1 << 50, Candidate(schedule, planner.plain_peak))
    return replace(plan, plain_peak=1 << 51)
