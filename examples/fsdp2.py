"""Train a model that is sharded by FSDP2, within 75% of the memory it would take.

All ranks run by one plan. On GPUs, or on two cores of a CPU:

    torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import logging
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import recollect

WIDTH, WORDS, LENGTH, BATCH, STEPS = 128, 256, 128, 8, 5


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Adds to the residual stream."""
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next tokens."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def main() -> None:
    """Train for a few steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    if rank == 0:  # prints the plan in a line
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("recollect").setLevel(logging.INFO)

    torch.manual_seed(0)
    model = Decoder().to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:  # each block is a unit, and a region of the plan
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    recollect.fit(model, budget=0.75)  # in bytes: budget="70GiB"; on every rank

    def loss_of(tokens: Tensor) -> Tensor:
        scores = model(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(STEPS):
        torch.manual_seed(1000 * step + rank)
        loss = loss_of(torch.randint(0, WORDS, (BATCH, LENGTH + 1), device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    torch.manual_seed(0)
    with torch.no_grad():  # of the same tokens on every rank
        loss = loss_of(torch.randint(0, WORDS, (BATCH, LENGTH + 1), device=device))
    print(f"rank {rank}: loss {loss.item():.6f} in the end", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
