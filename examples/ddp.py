"""Train with DistributedDataParallel, within 70% of the memory that the model would take.

The plan is for the model inside of the wrapper, and all ranks run by the same one. On GPUs, or on
two cores of a CPU:

    torchrun --nproc-per-node 2 examples/ddp.py
"""

import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import recollect

WIDTH, BATCH, STEPS = 128, 512, 5


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
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(6)
    ]
    model = DistributedDataParallel(nn.Sequential(*blocks).to(device))
    recollect.fit(model.module, budget=0.7)  # in bytes: budget="22GiB"; on every rank

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(STEPS):
        torch.manual_seed(1000 * step + rank)
        x = torch.randn(BATCH, WIDTH, device=device)
        loss = nn.functional.mse_loss(model(x), x.sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    torch.manual_seed(0)
    x = torch.randn(BATCH, WIDTH, device=device)  # the same on every rank
    with torch.no_grad():
        loss = nn.functional.mse_loss(model.module(x), x.sin())
    print(f"rank {rank}: loss {loss.item():.6f} in the end", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
