"""Stages of a pipeline that are fitted: each has a plan for the microbatches under way.

The oracle is the same pipeline without plans.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.optim import SGD

import recollect
from recollect.modules import OPTIONS
from tests._support import assert_identical
from tests.distributed._ranks import WORLD, run_ranks
from tests.distributed._sharded import peak_of
from tests.distributed.test_fsdp2_plans import begin

pytestmark = pytest.mark.slow

SIZE, ROWS, MICRO, STEPS = 32, 16, 6, 6
#: Activations from another stage and to it are there beside those of the stages.
ROOM = 4 * MICRO * ROWS * SIZE * 4


def stage_of(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE), nn.Tanh()
            )
            for _ in range(3)
        )
    )


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


class Pipeline:
    """The stages of this rank, and what came of some steps."""

    def __init__(
        self, kind: Any, several: int, budget: int | None, engine: str | None = None
    ) -> None:
        rank = dist.get_rank()
        numbers = [rank + WORLD * n for n in range(several)]
        if kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
            numbers[1] = 2 * WORLD - 1 - rank
        self.is_last = WORLD * several - 1 in numbers
        self.models = [stage_of(number) for number in numbers]
        for block in (block for model in self.models for block in model if engine is not None):
            recollect.checkpointed(block, engine=engine)
        if budget is not None:
            for model in self.models:
                recollect.fit(model, budget=budget)
        stages = [
            PipelineStage(model, number, WORLD * several, torch.device("cpu"))
            for model, number in zip(self.models, numbers, strict=True)
        ]
        self.schedule = kind(stages if several > 1 else stages[0], MICRO, loss_fn=loss_of)
        self.gradients: list[Any] = []
        self.peaks: list[int] = []
        self.train()

    def train(self) -> None:
        parameters = [each for model in self.models for each in model.parameters()]
        optimizers = [SGD(model.parameters(), 0.1, momentum=0.9) for model in self.models]
        for step in range(STEPS):
            torch.manual_seed(step)
            x, target = torch.randn(MICRO * ROWS, SIZE), torch.randn(MICRO * ROWS, SIZE)
            self.base = (2 if step else 1) * sum(each.nbytes for each in parameters)
            self.peaks.append(self.base + peak_of(lambda x=x, t=target: self.step(x, t)))  # type: ignore[misc]
            self.gradients.append([each.grad.clone() for each in parameters])  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def step(self, x: Tensor, target: Tensor) -> None:
        inputs = (x,) if dist.get_rank() == 0 else ()
        self.schedule.step(*inputs, **({"target": target} if self.is_last else {}))


def check_one_stage() -> None:
    begin()
    for kind in (ScheduleGPipe, Schedule1F1B):
        plain = Pipeline(kind, 1, None)
        under_way = kind is ScheduleGPipe or dist.get_rank() == 0
        # With one microbatch under way there is little to recompute.
        budget = int((0.9 if under_way else 1.0) * plain.peaks[-1])
        found = Pipeline(kind, 1, budget)  # a warning would be an error
        assert_identical(found.gradients, plain.gradients)
        plan = vars(found.models[0])[OPTIONS].plan
        assert len(plan.forwards) == (MICRO if under_way else 1)
        assert max(found.peaks[3:]) <= plan.budget + ROOM, (kind, found.peaks, plan.budget)


def test_stages_are_planned_for_the_microbatches_under_way(tmp_path: Path) -> None:
    run_ranks(check_one_stage, tmp_path, deadline=400)


def check_several_stages() -> None:
    begin()
    for kind in (ScheduleInterleaved1F1B, ScheduleLoopedBFS):
        plain = Pipeline(kind, 2, None)
        budget = int(0.85 * plain.peaks[-1])
        with warnings.catch_warnings(record=True):  # until each knows the plan of the other
            warnings.simplefilter("always", recollect.PlanWarning)
            found = Pipeline(kind, 2, budget)
        assert_identical(found.gradients, plain.gradients)
        plans = [vars(model)[OPTIONS].plan for model in found.models]
        assert [plan.base for plan in plans] == [found.base] * 2  # of both stages
        assert found.peaks[-1] <= budget + ROOM < plain.peaks[-1], (kind, found.peaks, budget)


def test_several_stages_in_a_rank_share_its_budget(tmp_path: Path) -> None:
    run_ranks(check_several_stages, tmp_path, deadline=400)


def check_zero_bubble() -> None:
    begin()
    for kind in (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble):
        plain = Pipeline(kind, 2, None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", recollect.PlanWarning)
            found = Pipeline(kind, 2, plain.peaks[-1])
        assert_identical(found.gradients, plain.gradients)
        # No plan is made of the first half of a backward. Blocks are recomputed.
        assert {vars(model)[OPTIONS].plan for model in found.models} == {None}
        messages = [str(each.message) for each in caught]
        assert all("there is no" in each for each in messages), messages
        # The first stage runs its backward as a whole, only later.
        assert dist.get_rank() == 0 or any("a zero-bubble schedule" in each for each in messages)
        assert max(found.peaks[1:]) < min(plain.peaks[1:])
        for engine in ("rerun", "replay"):
            by_blocks = Pipeline(kind, 2, None, engine=engine)
            assert_identical(by_blocks.gradients, plain.gradients)
            assert max(by_blocks.peaks[1:]) < min(plain.peaks[1:])


def test_zero_bubble_schedules_have_no_plan(tmp_path: Path) -> None:
    run_ranks(check_zero_bubble, tmp_path, deadline=400)
