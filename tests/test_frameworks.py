"""Frameworks that look at a model from outside: transformers, its Trainer, accelerate, peft."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from tests._support import sampled

transformers = pytest.importorskip("transformers")


def gpt2() -> Any:
    """Has positions that are counted from the start: padding must not count."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=1.0,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    return transformers.T5ForConditionalGeneration(config)


def padded() -> dict[str, torch.Tensor]:
    """A batch of two, the first of them padded on the left."""
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [8, 9, 10, 11, 12, 13]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def planned(model: Any) -> Any:
    ids = padded()["input_ids"]
    batch = {"input_ids": ids, "labels": ids}
    return recollect.fit(model, batch, 1.0)


#: Ways to have a model run by recollect.
WAYS: dict[str, Callable[[Any], Any]] = {
    "checkpointed": recollect.checkpointed,
    "replay": recollect.checkpointed(engine="replay"),
    "planned": planned,
}


@pytest.mark.parametrize(
    ("make", "way"),
    [*((gpt2, way) for way in WAYS.values()), (t5, recollect.checkpointed)],
    ids=[*WAYS, "encoder and decoder"],
)
@pytest.mark.parametrize("with_mask", sampled([True, False], usual=[True]))
def test_generation_of_a_padded_batch(
    make: Callable[[], Any], way: Callable[[Any], Any], with_mask: bool
) -> None:
    batch = padded()
    if not with_mask:
        del batch["attention_mask"]

    def generate(model: Any) -> torch.Tensor:
        model.eval()
        return model.generate(**batch, max_new_tokens=6, do_sample=False)  # type: ignore[no-any-return]

    expected = generate(make())
    model = make()
    way(model)
    assert torch.equal(generate(model), expected)
    recollect.unwrap(model)
    assert torch.equal(generate(model), expected)


def test_padding_counts_without_the_signature() -> None:
    # What the test above would not see, if it were of no consequence.
    model = gpt2().eval()
    batch = padded()
    right = model(**batch, position_ids=(batch["attention_mask"].cumsum(-1) - 1).clamp(min=0))
    wrong = model(batch["input_ids"])
    assert not torch.equal(right.logits[0, -1].argmax(), wrong.logits[0, -1].argmax())


class Rows(torch.utils.data.Dataset[Any]):
    """Rows with one column that no model takes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, Any]:
        ids = torch.arange(1, 7) + number
        return {"input_ids": ids, "labels": ids, "comment": 1.0}


@pytest.mark.parametrize("way", [None, *WAYS.values()], ids=["plain", *WAYS])
def test_the_trainer_knows_the_columns_and_reports_the_loss(
    way: Callable[[Any], Any] | None, tmp_path: Any
) -> None:
    pytest.importorskip("accelerate")
    model = gpt2()
    if way is not None:
        way(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    metrics = trainer.evaluate()
    plain = gpt2()
    other = transformers.Trainer(plain, arguments, train_dataset=Rows(), eval_dataset=Rows())
    other.train()
    assert metrics["eval_loss"] == other.evaluate()["eval_loss"]
    assert trainer.label_names == other.label_names
    assert trainer.can_return_loss == other.can_return_loss
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_hooks_of_accelerate() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        for module in [*model.modules()][1:]:
            hooks.add_hook_to_module(module, hooks.ModelHook())
        return model

    def step(model: nn.Module) -> list[Any]:
        model(torch.ones(3, 4)).square().sum().backward()
        return [p.grad for p in model.parameters()] + [*model.buffers()]

    expected = step(make())
    for way in (recollect.checkpointed, recollect.checkpointed(engine="replay")):
        model = make()
        signatures = [inspect.signature(module.forward) for module in model.modules()]
        way(model)
        for child in model:
            recollect.checkpointed(child)
        assert [inspect.signature(m.forward) for m in model.modules()] == signatures
        for ours, theirs in zip(step(model), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_mixed_precision_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)

    def run(way: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        way(model)
        prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
        prepared(torch.ones(3, 4)).square().sum().backward()
        return [p.grad for p in model.parameters()], inspect.signature(prepared.forward)

    (expected, signature), (ours, same) = run(lambda model: model), run(recollect.checkpointed)
    assert same == signature
    state._reset_state(reset_partial_state=True)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")

    def run(way: Callable[[Any], Any]) -> Any:
        model = gpt2()
        way(model)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(model, config)
        model(**padded(), labels=padded()["input_ids"]).loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    for mine, theirs in zip(run(recollect.checkpointed), run(lambda model: model), strict=True):
        assert torch.equal(mine, theirs)
