"""A decoder that ``parallelize_module`` makes tensor or sequence parallel, perhaps with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests._support import Run, plain
from tests.distributed._ranks import WORLD

SIZE, WORDS, LENGTH = 32, 64, 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        self.out = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = (each(x) for each in (self.q, self.k, self.v))
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(SIZE), Attention()
        self.after, self.mlp = nn.LayerNorm(SIZE), MLP()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.before(x)))
        return x + self.drop(self.mlp(self.after(x)))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Calls each of its blocks by ``run``."""

    def __init__(self, run: Run = plain) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def tensor_parallel(model: Any, mesh: Any) -> None:
    whole: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)
    for block in model.blocks:
        styles: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        styles |= {"attention.out": RowwiseParallel()}
        styles |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, mesh, styles)


def sequence_parallel(model: Any, mesh: Any) -> None:
    whole: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)
    gathered: dict[str, Any] = {
        "input_layouts": (Shard(1),),
        "desired_input_layouts": (Replicate(),),
    }
    for block in model.blocks:
        styles: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        styles |= {
            "before": SequenceParallel(),
            "attention": PrepareModuleInput(**gathered),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "after": SequenceParallel(),
            "mlp": PrepareModuleInput(**gathered),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, styles)


@dataclass(frozen=True)
class Parallel:
    """How a model is parallelized."""

    style: Callable[[Any, Any], None] = tensor_parallel
    shape: tuple[int, int] = (1, WORLD)  #: of the mesh: data, tensor
    options: dict[str, Any] | None = None  #: of ``fully_shard``, if that is applied

    def model(self, run: Run = plain) -> Any:
        """A model parallelized so."""
        model: Any = Decoder(run)
        mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=("data", "tensor"))
        self.style(model, mesh["tensor"])
        if self.options is None:
            return model
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"], **self.options)
        return fully_shard(model, mesh=mesh["data"], **self.options)


PARALLEL = {
    "tensor": Parallel(),
    "sequence": Parallel(sequence_parallel),
    "tensor, sharded": Parallel(options={}),
    "sequence, sharded": Parallel(sequence_parallel, options={}),
    "sharded, tensor of one": Parallel(shape=(WORLD, 1), options={}),
}


def tokens(step: int, length: int = LENGTH) -> Tensor:
    """A batch, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (4, length), generator=generator)
