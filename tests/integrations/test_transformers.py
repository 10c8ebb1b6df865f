"""The ``Trainer`` of transformers under a budget: bitwise the plain run, planned from its steps."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect
from recollect.compiled.registered import backend
from recollect.modules import OPTIONS
from tests._support import assert_identical

transformers = pytest.importorskip("transformers")
FitCallback = pytest.importorskip("recollect.integrations.transformers").FitCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("accelerate"),
]

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
LENGTH = 32


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


def data(count: int = 32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 128, (LENGTH,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


class Watch(transformers.TrainerCallback):
    """Keeps the plan, which is gone after training."""

    def __init__(self) -> None:
        self.plan: recollect.Plan | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.plan = vars(model)[OPTIONS].plan


def trained(
    model: Any, folder: Path, callbacks: list[Any], allowed: tuple[str, ...] = (), **options: Any
) -> Any:
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 4,
            "max_steps": 5,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "learning_rate": 1e-2,
            **options,
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", recollect.PlanWarning)
        for text in allowed:
            warnings.filterwarnings("ignore", text)
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=data(),
            eval_dataset=data(8),
            callbacks=callbacks,
        )
        trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=lambda options: next(iter(options), "usual"),
)
def test_it_trains_as_the_plain_trainer_does(options: Any, tmp_path: Path) -> None:
    plain, model = llama(), llama()
    trained(plain, tmp_path, [], **options)
    watch = Watch()
    trained(model, tmp_path, [FitCallback(0.7), watch], **options)
    assert_identical(dict(model.state_dict()), dict(plain.state_dict()))
    assert watch.plan is not None
    assert watch.plan.predicted_peak <= watch.plan.budget < watch.plan.plain_peak
    assert OPTIONS not in vars(model)
    assert model.is_gradient_checkpointing is plain.is_gradient_checkpointing


def test_a_model_that_is_compiled_in_place(tmp_path: Path) -> None:
    plain, model = llama(), llama()
    plain.compile(backend=backend)
    trained(plain, tmp_path, [], max_steps=8)
    watch = Watch()
    model.compile(backend=backend)
    corrected = ("a step under the plan took",)  # the first plan may take a little too much
    trained(model, tmp_path, [FitCallback(0.8), watch], corrected, max_steps=8)
    assert_identical(dict(model.state_dict()), dict(plain.state_dict()))
    assert watch.plan is not None
    assert watch.plan.compiled is not None
    assert watch.plan.measured_peak is not None
    assert watch.plan.measured_peak <= watch.plan.budget < watch.plan.plain_peak
    assert OPTIONS not in vars(model)


def test_gradient_checkpointing_is_as_it_was_afterwards(tmp_path: Path) -> None:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": True, "preserve_rng_state": False})
    trained(model, tmp_path, [FitCallback(0.7)], max_steps=2)
    assert model.is_gradient_checkpointing
    function = model.model.layers[0]._gradient_checkpointing_func
    assert function.keywords == {"use_reentrant": True, "preserve_rng_state": False}


def test_a_run_that_is_saved_and_resumed(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    plain = llama()
    trained(plain, tmp_path / "plain", [], **saving)
    trained(llama(), tmp_path / "ours", [FitCallback(0.7)], **saving, max_steps=3)
    last = tmp_path / "ours" / "checkpoint-3"
    loaded = transformers.LlamaForCausalLM.from_pretrained(last)  # without recollect
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    model = llama()
    trained(
        model, tmp_path / "ours", [FitCallback(0.7)], **saving, resume_from_checkpoint=str(last)
    )
    assert_identical(dict(model.state_dict()), dict(plain.state_dict()))


class Interrupt(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_a_training_that_was_interrupted_can_be_repeated(tmp_path: Path) -> None:
    model, fit = llama(), FitCallback(0.7)
    with pytest.raises(KeyboardInterrupt):
        trained(model, tmp_path, [fit, Interrupt()])
    model.load_state_dict(llama().state_dict())
    trained(model, tmp_path, [fit])
    plain = llama()
    trained(plain, tmp_path, [])
    assert_identical(dict(model.state_dict()), dict(plain.state_dict()))


def test_an_interrupted_training_is_undone_by_the_next_one(tmp_path: Path) -> None:
    model = llama()
    options = {"gradient_checkpointing": True}
    with pytest.raises(KeyboardInterrupt):
        trained(model, tmp_path, [FitCallback(0.7), Interrupt()], **options)
    assert not model.is_gradient_checkpointing
    trained(model, tmp_path, [FitCallback(0.8)], max_steps=2)
    assert OPTIONS not in vars(model)
    assert model.is_gradient_checkpointing  # as it would be without the callbacks


def test_two_budgets_for_one_model_are_refused_before_it_trains(tmp_path: Path) -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"FitCallback\(0\.7\) and FitCallback\(0\.8\) are both"):
        trained(model, tmp_path, [FitCallback(0.7), FitCallback(0.8)])
    assert OPTIONS not in vars(model)
    assert model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    recollect.fit(model, budget=0.5)
    runner = vars(model)[OPTIONS]
    with pytest.raises(ValueError, match=r"fitted before.*FitCallback\(0\.7\) would replace"):
        trained(model, tmp_path, [FitCallback(0.7)])
    assert vars(model)[OPTIONS] is runner
    plain = llama()
    trained(plain, tmp_path, [], max_steps=2)
    trained(model, tmp_path, [], max_steps=2)  # as its user has fitted it
    assert_identical(dict(model.state_dict()), dict(plain.state_dict()))


def test_an_error_when_training_begins_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    model.lm_head = recollect.checkpointed(model.lm_head)
    with pytest.raises(ValueError, match="checkpointed or has a plan already"):
        trained(model, tmp_path, [FitCallback(0.7)])
    assert model.is_gradient_checkpointing


class Unwrap(transformers.TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        recollect.unwrap(model)


def test_a_model_that_was_unwrapped_meanwhile(tmp_path: Path) -> None:
    model = llama()
    trained(model, tmp_path, [Unwrap(), FitCallback(0.7)], max_steps=2)
    assert OPTIONS not in vars(model)


def test_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    models = []
    for callbacks in ([], [FitCallback(0.8)]):
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1)
        torch.manual_seed(2)
        model = peft.get_peft_model(llama(), config)
        trained(model, tmp_path, callbacks)
        models.append(model)
    assert_identical(*(dict(model.state_dict()) for model in models))


def test_accelerate_before_and_after(accelerate: Any) -> None:
    results = []
    for when in ("never", "before", "after"):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if when == "before":
            recollect.fit(model, budget=0.7)
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        if when == "after":
            recollect.fit(model, budget=0.7)
        for row in data(5):
            ids = row["input_ids"].repeat(4, 1)
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if when != "never":
            assert vars(model)[OPTIONS].plan is not None
        results.append(copy.deepcopy(dict(model.state_dict())))
    assert_identical(results[1:], results[:1] * 2)


def test_bad_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="budget should be more than 0"):
        FitCallback(0)
    with pytest.raises(ValueError, match="offload should be True, False or 'auto'"):
        FitCallback(0.7, offload="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ofload"):
        FitCallback(0.7, ofload=False)  # type: ignore[call-arg]
