"""Train a small Llama with the Trainer of transformers, within 70% of the memory it would take.

The model is made from a configuration, and its data at random: nothing is downloaded.

    pip install 'recollect[transformers]'
    python examples/transformers_trainer.py
"""

import logging
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from recollect.integrations.transformers import FitCallback


def main() -> None:
    """Train for a few steps."""
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("recollect").setLevel(logging.INFO)  # prints the plan in a line
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    rows = torch.randint(0, 512, (64, 128))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            max_steps=6,
            logging_steps=2,
            save_strategy="no",
            report_to=[],
        )
        trainer = Trainer(
            LlamaForCausalLM(config),
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[FitCallback(0.7)],  # in bytes: FitCallback("22GiB")
        )
        trainer.train()


if __name__ == "__main__":
    main()
