"""Train a GAN whose critic stays within 60% of the memory that its step would take.

The critic is called twice before its backward, of real and of generated samples, and once more on
the way to the generator. Both kinds of steps are planned, each as a whole.

pip install recollect
python examples/gan.py
"""

import logging
import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import recollect


class Block(nn.Module):
    """Normalized, widened, and added to what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def network(width: int, into: int, blocks: int) -> nn.Sequential:
    """Blocks, and a linear layer at the end."""
    return nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, into))


def main() -> None:
    """Train for a few rounds."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warnings.simplefilter("error", recollect.PlanWarning)  # every step fits
    torch.manual_seed(0)
    critic, generator = network(64, 1, 4), network(64, 64, 2)
    of_critic = torch.optim.AdamW(critic.parameters(), 1e-4)
    of_generator = torch.optim.AdamW(generator.parameters(), 1e-4)

    critic = recollect.fit(critic, budget=0.6)  # in bytes: budget="22GiB"
    for number in range(6):
        real = torch.randn(256, 64).cumsum(1) / 8
        fake = generator(torch.randn(256, 64))

        loss = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
        loss.backward()
        of_critic.step()
        of_critic.zero_grad()

        deceived = softplus(-critic(fake)).mean()
        deceived.backward()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
        print(f"round {number}: critic {loss.item():.3f}, generator {deceived.item():.3f}")


if __name__ == "__main__":
    main()
