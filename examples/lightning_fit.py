"""Train with Lightning, within 70% of the memory it would take.

pip install 'recollect[lightning]'
python examples/lightning_fit.py
"""

import logging

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from recollect.integrations.lightning import Fit


class Regression(pl.LightningModule):
    """A deep network of plain blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)
        ]
        self.model = nn.Sequential(*blocks)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer for everything."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main() -> None:
    """Train for an epoch of a few steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("recollect").setLevel(logging.INFO)  # prints the plan in a line
    pl.seed_everything(0, verbose=False)
    data = [(torch.randn(64), torch.randn(64)) for _ in range(4096)]
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        callbacks=[Fit(0.7)],  # in bytes: Fit("22GiB")
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=512))


if __name__ == "__main__":
    main()
