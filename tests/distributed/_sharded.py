"""Models that ``fully_shard`` shards in several ways, and steps of them that are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from recollect.planning.recording.memory_events import allocated_by
from tests._support import assert_identical, collector_off
from tests.distributed._ranks import local

SIZE, WORDS = 32, 61
LENGTH = 24


class Block(nn.Module):
    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.attention = nn.Linear(SIZE, 3 * SIZE, bias=False)
        self.out = nn.Linear(SIZE, SIZE, bias=False)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.after(x)))


class Decoder(nn.Module):
    """``calls``: the number of the block that is called, for each call in a forward."""

    def __init__(self, calls: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(max(calls) + 1))
        self.norm = nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.calls = calls

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for number in self.calls:
            x = self.blocks[number](x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def tokens(step: int, batch: int = 4, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, WORDS, (batch, length), generator=generator)


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded."""

    options: dict[str, Any] = field(default_factory=dict)
    calls: tuple[int, ...] = (0, 1, 2)
    mesh: tuple[int, ...] = ()  #: by default all ranks in one dimension
    nested: bool = False  #: whether parts of the blocks are units too
    root: bool = True  #: whether the model itself is a unit
    blocks: bool = True  #: whether the blocks are

    def model(self) -> Any:
        """A model sharded so."""
        torch.manual_seed(0)
        model: Any = Decoder(self.calls)
        shape = self.mesh or (dist.get_world_size(),)
        names = ("replicate", "shard")[-len(shape) :]
        options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names), **self.options}
        for block in model.blocks if self.blocks else ():
            if self.nested:
                fully_shard(block.mlp, **options)
            fully_shard(block, **options)
        return fully_shard(model, **options) if self.root else model


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHARDINGS = {
    "reshard": Sharding({"reshard_after_forward": True}),
    "keep gathered": Sharding({"reshard_after_forward": False}),
    "mixed precision": Sharding({"mp_policy": BF16}),
    "cpu offload": Sharding({"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "shared blocks": Sharding(calls=(0, 1, 0, 1, 0)),
    "nested": Sharding(nested=True),
    "hybrid, replicated": Sharding(mesh=(2, 1)),
    "hybrid, sharded": Sharding(mesh=(1, 2)),
    "no root": Sharding(root=False),
    "only the root": Sharding(blocks=False),
    "part of the mesh": Sharding({"reshard_after_forward": 1}),
}


def base_of(model: nn.Module) -> int:
    """The bytes of the parts of parameters that are here."""
    parts = [local(each) for each in model.parameters()]
    return sum(each.untyped_storage().nbytes() for each in parts)


def collectives() -> int:
    """How many collectives all groups have begun."""
    groups: Any = dist.distributed_c10d._world.pg_map
    return sum(int(each._get_sequence_number_for_group()) for each in groups)


@dataclass
class Trained:
    """What came of some steps."""

    gradients: list[Any] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  #: with the parameters

    def check(self, expected: Trained) -> None:
        """Compare with the same steps without a plan."""
        assert_identical(self.gradients, expected.gradients)
        assert self.collectives == expected.collectives


def trained(
    model: Any,
    count: int = 4,
    batch: Callable[[int], Tensor] = tokens,
    accumulate: int = 1,
    forwards: int = 1,
) -> Trained:
    """Steps of ``model``, each of ``accumulate`` times some forwards and one backward."""
    found = Trained()
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    for step in range(count):
        torch.manual_seed(10 * step + dist.get_rank())
        each, first = range(forwards), accumulate * forwards * step
        micro = [[batch(first + forwards * n + m) for m in each] for n in range(accumulate)]
        before, base = collectives(), base_of(model)
        peak = peak_of(lambda micro=micro: _run(model, micro))  # type: ignore[misc]
        found.collectives.append(collectives() - before)
        found.peaks.append(base + peak)
        gradients = [None if p.grad is None else local(p.grad).clone() for p in parameters]
        found.gradients.append(gradients)
        optimizer.step()
        optimizer.zero_grad()
    return found


def _run(model: Any, micro: list[list[Tensor]]) -> None:
    for number, batches in enumerate(micro):
        if len(micro) > 1:
            model.set_requires_gradient_sync(number == len(micro) - 1)
        outs = [model(each) for each in batches]
        loss = sum(loss_of(out) for out in outs)
        assert isinstance(loss, Tensor)
        loss.backward()
        del outs, loss


def peak_of(run: Callable[[], None]) -> int:
    """The most bytes that are allocated at once, beyond those before."""
    with collector_off():
        return allocated_by(run, torch.device("cpu"))[0]


def highest(number: int) -> int:
    """The highest of all ranks."""
    box = torch.tensor([number])
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box)
