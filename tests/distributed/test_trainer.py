"""``FitCallback`` in a ``Trainer`` of transformers that runs on several ranks, with DDP.

The oracle is the same training without it.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recollect.modules import OPTIONS
from tests._support import assert_identical
from tests.distributed._ranks import WORLD, run_ranks
from tests.distributed._sharded import Trained, collectives
from tests.distributed.test_fsdp2_plans import begin, same_on_all_ranks

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
FitCallback = pytest.importorskip("recollect.integrations.transformers").FitCallback

pytestmark = pytest.mark.slow

STEPS = 5


class Watch(transformers.TrainerCallback):
    """Takes the gradients and collectives of each step, and the plan."""

    def __init__(self) -> None:
        self.found = Trained()
        self.plan: Any = None
        self._before = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._before = collectives()

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.found.collectives.append(collectives() - self._before)
        self.found.gradients.append([each.grad.clone() for each in model.parameters()])

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        runners = [vars(each)[OPTIONS] for each in model.modules() if OPTIONS in vars(each)]
        self.plan = runners[0].plan if runners else None


def train(folder: Path, accumulate: int, *callbacks: Any) -> Watch:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **sizes, **heads, attn_implementation="eager", attention_dropout=0.1
        )
    )
    tokens = torch.randint(0, 64, (64, 24), generator=torch.Generator().manual_seed(0))
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        max_steps=STEPS,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    watch = Watch()
    data = [{"input_ids": each, "labels": each} for each in tokens]
    transformers.Trainer(
        model, arguments, train_dataset=data, callbacks=[watch, *callbacks]
    ).train()
    return watch


def check_trainer(folder: Path) -> None:
    begin()
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # the group is there already
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for accumulate in (1, 2):
        plain = train(folder, accumulate)
        fitted = train(folder, accumulate, FitCallback(0.85))
        assert len(plain.found.gradients) == STEPS
        assert_identical(fitted.found.gradients, plain.found.gradients)
        assert fitted.found.collectives == plain.found.collectives
        plan = fitted.plan
        assert plan.predicted_peak <= plan.budget < plan.plain_peak
        assert same_on_all_ranks((plan.schedule, plan.budget, plan.predicted_peak))


def test_a_trainer_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(check_trainer, tmp_path, tmp_path, deadline=400)
