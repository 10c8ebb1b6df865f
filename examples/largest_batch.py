"""Which batch fits into 12 MiB, plain and under a plan, and how fast is it? On the CPU.

pip install recollect
python examples/largest_batch.py
"""

import torch
from torch import Tensor, nn

import recollect

_WIDTH, _TIME, _SYMBOLS = 48, 32, 64
_BUDGET = "12MiB"


class LanguageModel(nn.Module):
    """Predicts the successors of symbols; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_SYMBOLS, _WIDTH)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(_WIDTH, _SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        scores = self.head(self.blocks(self.embedding(symbols[:, :-1])))
        return nn.functional.cross_entropy(scores.flatten(0, 1), symbols[:, 1:].flatten())


def make_batch(size: int) -> Tensor:
    """So many texts."""
    return torch.randint(_SYMBOLS, (size, _TIME + 1))


def main() -> None:
    """Find the largest batch, and train a step with it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    found = recollect.largest_batch(model, make_batch, _BUDGET, optimizer=optimizer, multiple_of=8)
    print(found)

    found.plan.apply(model)
    loss = model(make_batch(found.size))
    loss.backward()
    optimizer.step()
    print(f"\nOne step with {found.size} texts under the plan: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
