"""Fine-tune LoRA adapters in a loop of your own, within 60% of the memory it would take.

pip install recollect transformers peft
python examples/lora.py
"""

import logging

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import recollect


def main() -> None:
    """Train for a few steps."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-3)

    model = recollect.fit(model, budget=0.6)  # in bytes: budget="22GiB"
    for step in range(6):
        rows = torch.randint(0, 512, (8, 128))
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
