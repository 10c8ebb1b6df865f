"""Training steps made up for the planner: what a model looks like, without the model.

`Maker` takes ops in the order of forward and derives backward from them: in reverse, each op asks
for what it saved, makes the gradients of what it read, and lets go of those of its results.
Gradients of parameters stay. Times are those of a fast accelerator, more or less.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from recollect.graph.graph import Event, Graph, Link, Op, SavedTensor, Storage, Value
from recollect.planning.solving.solve import Solver

__all__ = [
    "GRAPHS",
    "Maker",
    "conv_net",
    "decoder",
    "encoder_decoder",
    "graph_of",
    "random_dag",
    "recurrent",
    "solver_of",
    "unet",
]

#: Bytes a second of an elementwise op, and operations a second of a matrix product.
_RATE = 2e12
_FLOPS = 4e14
_LAUNCH = 3e-6
#: Backward of an op takes so many times as long.
_BACKWARD = 2.0


@dataclass
class _Made:
    """What `Maker` knows of an op besides."""

    op: Op
    saves: tuple[int, ...]
    weight: int


class Maker:
    """Builds a graph op by op."""

    def __init__(self, link: Link | None = None) -> None:
        self._made: list[_Made] = []
        self._values: list[Value] = []
        self._memories: list[int] = []
        self._link = link
        self.path = ""

    def op(
        self,
        name: str,
        reads: Sequence[int],
        nbytes: int | Sequence[int],
        *,
        seconds: float | None = None,
        saves: Sequence[int] = (),
        saves_result: bool = False,
        weight: int = 0,
        workspace: int = 0,
        can_keep: bool = True,
        forced: bool = False,
    ) -> int:
        """An op on new memory; the number of its first result, the others follow."""
        sizes = [nbytes] if isinstance(nbytes, int) else list(nbytes)
        number = len(self._made)
        makes = []
        for size in sizes:
            makes.append(len(self._values))
            self._values.append(Value(size, number, len(self._memories)))
            self._memories.append(size)
        if seconds is None:
            moved = sum(sizes) + sum(self._values[v].nbytes for v in set(reads))
            seconds = _LAUNCH + moved / _RATE
        op = Op(
            f"aten::{name}",
            self.path,
            f"{self.path}.{name}#{number}",
            seconds,
            tuple(dict.fromkeys(reads)),
            tuple(makes),
            workspace=workspace,
            can_keep=can_keep,
            can_offload=can_keep,
            forced=forced,
        )
        kept = (*saves, *makes) if saves_result else tuple(saves)
        self._made.append(_Made(op, tuple(dict.fromkeys(kept)), weight))
        return makes[0]

    def mm(self, name: str, read: int, nbytes: int, flops: float, weight: int) -> int:
        """A product with a parameter: saves what it reads."""
        seconds = _LAUNCH + flops / _FLOPS
        return self.op(name, [read], nbytes, seconds=seconds, saves=[read], weight=weight)

    def in_place(self, name: str, old: int, others: Sequence[int] = ()) -> int:
        """An op that writes over a value and saves what is there then."""
        number, before = len(self._made), self._values[old]
        new = len(self._values)
        self._values.append(Value(before.nbytes, number, before.storage))
        seconds = _LAUNCH + 2 * before.nbytes / _RATE
        op = Op(
            f"aten::{name}",
            self.path,
            f"{self.path}.{name}#{number}",
            seconds,
            (old, *others),
            (),
            writes=((old, new),),
        )
        # What was there cannot be kept, as it is no more.
        maker = self._made[before.op]
        maker.op = replace(maker.op, can_keep=False)
        self._made.append(_Made(op, (new,), 0))
        return new

    def graph(self, *, loss: int = 0, base: int = 0) -> Graph:
        """The step, with a loss that needs so many bytes."""
        count = len(self._made)
        events = [Event(each.op.seconds, 0, 0, op=n) for n, each in enumerate(self._made)]
        events.append(Event(_LAUNCH + loss / _RATE, 0, loss))
        turn = len(events)
        asks, numbers = self._asks()
        events += self._backward(numbers, loss)
        return Graph(
            ops=[each.op for each in self._made],
            values=self._values,
            storages=self._lives(count),
            saved=asks,
            events=events,
            turn=turn,
            base=base,
            rerun_cost=1e-6,
            link=self._link,
        )

    def _asks(self) -> tuple[list[SavedTensor], list[tuple[int, ...]]]:
        asks: list[SavedTensor] = []
        numbers: list[tuple[int, ...]] = []
        for number, each in enumerate(self._made):
            first = len(asks)
            asks += [SavedTensor(value, number) for value in each.saves]
            numbers.append(tuple(range(first, len(asks))))
        return asks, numbers

    def _lives(self, end: int) -> list[Storage]:
        """Each memory of forward goes with its last reader; the last result with the loss."""
        born = [-1] * len(self._memories)
        dies = [0] * len(self._memories)
        for number, each in enumerate(self._made):
            made = (*each.op.makes, *(new for _, new in each.op.writes))
            for value in (*made, *each.op.reads):
                memory = self._values[value].storage
                born[memory] = number if born[memory] < 0 else born[memory]
                dies[memory] = number
        dies[self._values[-1].storage] = end
        sizes = self._memories
        return [Storage(size, born[n], dies[n]) for n, size in enumerate(sizes)]

    def _backward(self, asks: list[tuple[int, ...]], loss: int) -> list[Event]:
        events = [Event(_LAUNCH + loss / _RATE, loss, loss)]
        live: dict[int, int] = {len(self._values) - 1: self._values[-1].nbytes}
        weights = 0
        for number in reversed(range(len(self._made))):
            each = self._made[number]
            made = (*each.op.makes, *(new for _, new in each.op.writes))
            before = weights + sum(live.values())
            for read in each.op.reads:
                live.setdefault(read, self._values[read].nbytes)
            weights += each.weight
            during = weights + sum(live.values()) + each.op.workspace
            for value in made:
                live.pop(value, None)
            seconds = _BACKWARD * each.op.seconds
            events.append(Event(seconds, before, during, unpacks=asks[number], frees=asks[number]))
        events.append(Event(_LAUNCH, weights, weights))
        return events


# --- models -----------------------------------------------------------------------------------


def decoder(
    layers: int, *, tokens: int = 4096, width: int = 2048, link: Link | None = None
) -> Graph:
    """A language model: norm, attention with rotary positions, norm, gated MLP."""
    make = Maker(link)
    size = tokens * width * 2
    make.path = "embed"
    state = make.op("embedding", [], size)
    turns = [make.op(name, [], tokens * 256) for name in ("cos", "sin")]
    for layer in range(layers):
        make.path = f"layers.{layer}"
        state = _attention(make, state, _norm(make, state, size), tokens, width, turns)
        state = _mlp(make, state, _norm(make, state, size), tokens, width)
    make.path = "head"
    last = _norm(make, state, size)
    make.mm("mm", last, tokens * 32000 * 2, 2.0 * tokens * width * 32000, width * 32000 * 2)
    return make.graph(loss=tokens * 32000 * 4, base=layers * 12 * width * width * 8)


def _norm(make: Maker, state: int, size: int) -> int:
    wide = make.op("_to_copy", [state], 2 * size)
    square = make.op("pow", [wide], 2 * size, saves=[wide])
    mean = make.op("mean", [square], size // 1024)
    scale = make.op("rsqrt", [mean], size // 1024, saves_result=True)
    product = make.op("mul", [wide, scale], 2 * size, saves=[wide, scale])
    narrow = make.op("_to_copy", [product], size)
    return make.op("mul", [narrow], size, saves=[narrow], weight=8192)


def _rotate(make: Maker, state: int, turns: Sequence[int], size: int) -> int:
    left = make.op("mul", [state, turns[0]], size, saves=[turns[0]])
    turned = make.op("cat", [state], size)
    right = make.op("mul", [turned, turns[1]], size, saves=[turns[1]])
    return make.op("add", [left, right], size)


def _attention(
    make: Maker, state: int, read: int, tokens: int, width: int, turns: Sequence[int]
) -> int:
    size = tokens * width * 2
    flops, weight = 2.0 * tokens * width * width, width * width * 2
    query, key, value = (make.mm("mm", read, size, flops, weight) for _ in range(3))
    query, key = _rotate(make, query, turns, size), _rotate(make, key, turns, size)
    seen = make.op(
        "_flash_attention",
        [query, key, value],
        [size, tokens * 128],
        seconds=_LAUNCH + 3.0 * tokens * tokens * width / _FLOPS,
        saves=[query, key, value],
        saves_result=True,
    )
    out = make.mm("mm", seen, size, flops, weight)
    return make.op("add", [state, out], size)


def _mlp(make: Maker, state: int, read: int, tokens: int, width: int) -> int:
    size, inner = tokens * width * 2, tokens * width * 8
    flops, weight = 8.0 * tokens * width * width, width * width * 8
    gate = make.mm("mm", read, inner, flops, weight)
    up = make.mm("mm", read, inner, flops, weight)
    active = make.op("silu", [gate], inner, saves=[gate])
    product = make.op("mul", [active, up], inner, saves=[active, up])
    out = make.mm("mm", product, size, flops, weight)
    return make.op("add", [state, out], size)


def encoder_decoder(layers: int, *, tokens: int = 2048, width: int = 1024) -> Graph:
    """All layers of the decoder read the result of the encoder."""
    make = Maker()
    size = tokens * width * 2
    turns = [make.op(name, [], tokens * 256) for name in ("cos", "sin")]
    state = make.op("embedding", [], size)
    for layer in range(layers):
        make.path = f"encoder.{layer}"
        state = _attention(make, state, _norm(make, state, size), tokens, width, turns)
        state = _mlp(make, state, _norm(make, state, size), tokens, width)
    memory = _norm(make, state, size)
    state = make.op("embedding", [], size)
    flops, weight = 2.0 * tokens * width * width, width * width * 2
    for layer in range(layers):
        make.path = f"decoder.{layer}"
        state = _attention(make, state, _norm(make, state, size), tokens, width, turns)
        query = make.mm("mm", _norm(make, state, size), size, flops, weight)
        key, value = (make.mm("mm", memory, size, flops, weight) for _ in range(2))
        seen = make.op(
            "_flash_attention",
            [query, key, value],
            [size, tokens * 64],
            seconds=_LAUNCH + 4.0 * tokens * tokens * width / _FLOPS,
            saves=[query, key, value],
            saves_result=True,
        )
        state = make.op("add", [state, make.mm("mm", seen, size, flops, weight)], size)
        state = _mlp(make, state, _norm(make, state, size), tokens, width)
    make.path = "head"
    make.mm("mm", state, size * 4, 8.0 * tokens * width * width, width * width * 8)
    return make.graph(loss=size * 4)


def _conv(make: Maker, read: int, nbytes: int, flops: float) -> int:
    """A convolution, a norm over the batch, and an activation in place."""
    out = make.op(
        "convolution",
        [read],
        nbytes,
        seconds=_LAUNCH + flops / _FLOPS,
        saves=[read],
        weight=1 << 20,
        workspace=1 << 24,
    )
    scaled = make.op("native_batch_norm", [out], [nbytes, 4096, 4096], saves=[out])
    return make.in_place("relu_", scaled)


def conv_net(blocks: int, *, nbytes: int = 1 << 26) -> Graph:
    """A residual net: the images shrink and the time per byte grows."""
    make = Maker()
    state = _conv(make, make.op("images", [], nbytes), nbytes, 1e11)
    for block in range(blocks):
        make.path = f"blocks.{block}"
        shrink = block and block % 4 == 0
        size = make._values[state].nbytes // (2 if shrink else 1)
        inner = _conv(make, state, size // 4, 2e10)
        inner = _conv(make, inner, size // 4, 4e10)
        out = make.op("convolution", [inner], size, seconds=6e-5, saves=[inner], weight=1 << 20)
        out = make.op("native_batch_norm", [out], size, saves=[out])
        if shrink:
            state = make.op("convolution", [state], size, seconds=6e-5, saves=[state])
        state = make.in_place("relu_", make.op("add", [state, out], size))
    make.mm("addmm", make.op("mean", [state], 1 << 20), 1 << 20, 1e9, 1 << 22)
    return make.graph(loss=1 << 20)


def unet(depth: int, *, nbytes: int = 1 << 26) -> Graph:
    """Down and up again; each level of the way up reads that of the way down."""
    make = Maker()
    state = _conv(make, make.op("images", [], nbytes), nbytes, 1e11)
    skips = []
    for level in range(depth):
        make.path = f"down.{level}"
        state = _conv(make, state, nbytes >> level, 1e11)
        skips.append(state)
        state = make.op("max_pool2d", [state], nbytes >> (level + 1), saves=[state])
    for level in reversed(range(depth)):
        make.path = f"up.{level}"
        grown = make.op("upsample", [state], nbytes >> level)
        both = make.op("cat", [grown, skips[level]], 2 * (nbytes >> level))
        state = _conv(make, both, nbytes >> level, 2e11)
        state = _conv(make, state, nbytes >> level, 1e11)
    return make.graph(loss=nbytes)


def recurrent(steps: int, *, nbytes: int = 1 << 22) -> Graph:
    """A gated recurrent net, unrolled."""
    make = Maker()
    read = make.op("embedding", [], nbytes)
    state = make.op("zeros", [], nbytes)
    outs = []
    for step in range(steps):
        make.path = f"steps.{step}"
        both = make.op("cat", [read, state], 2 * nbytes)
        gates = make.mm("addmm", both, 2 * nbytes, 2e9, 1 << 20 if step == 0 else 0)
        gate = make.op("sigmoid", [gates], nbytes, saves_result=True)
        new = make.op("tanh", [gates], nbytes, saves_result=True)
        mixed = make.op("mul", [gate, new], nbytes, saves=[gate, new])
        state = make.op("lerp", [state, mixed, gate], nbytes, saves=[state, mixed, gate])
        outs.append(state)
    whole = make.op("stack", outs, steps * nbytes)
    make.mm("mm", whole, steps * nbytes, 1e9 * steps, 1 << 22)
    return make.graph(loss=nbytes)


def random_dag(seed: int, count: int = 12) -> Graph:
    """Anything: some in place, some with several results, some that cannot be kept or must be."""
    draw = random.Random(seed)
    make = Maker()
    fresh = [make.op("input", [], draw.randint(1, 40) << 10, can_keep=draw.random() < 0.8)]
    while len(make._made) < count:
        near = fresh[-4:] if draw.random() < 0.85 else fresh
        reads = draw.sample(near, min(len(near), draw.choice((1, 1, 2, 2, 3))))
        chance = draw.random()
        if chance < 0.08 and not any(reads[0] in each.saves for each in make._made):
            fresh.remove(reads[0])
            fresh.append(make.in_place("relu_", reads[0], reads[1:]))
            continue
        sizes = [draw.randint(1, 60) << 10 for _ in range(draw.choice((1, 1, 1, 2)))]
        first = make.op(
            draw.choice(("mm", "mul", "add", "exp")),
            reads,
            sizes,
            seconds=draw.choice((1e-6, 1e-5, 5e-5, 2e-4)) * draw.uniform(0.5, 2),
            saves=[read for read in reads if draw.random() < 0.6],
            saves_result=draw.random() < 0.4,
            weight=draw.choice((0, 0, 1 << 12)),
            workspace=draw.choice((0, 0, 1 << 14)),
            can_keep=draw.random() < 0.92,
            forced=draw.random() < 0.04,
        )
        fresh += range(first, first + len(sizes))
    return make.graph(loss=draw.randint(0, 20) << 10)


#: By name, what the tests go through.
GRAPHS: dict[str, Callable[[], Graph]] = {
    "decoder": lambda: decoder(3),
    "encoder_decoder": lambda: encoder_decoder(2),
    "conv_net": lambda: conv_net(6),
    "unet": lambda: unet(4),
    "recurrent": lambda: recurrent(8),
    "random": lambda: random_dag(0, 40),
}


@cache
def graph_of(name: str) -> Graph:
    """One of them, made once."""
    return GRAPHS[name]()


@cache
def solver_of(name: str) -> Solver:
    """What has solved it, once."""
    return Solver(graph_of(name))
