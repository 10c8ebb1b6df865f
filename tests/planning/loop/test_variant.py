"""What is said of steps that are not the planned one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import recollect
from recollect.checks.place import WarnOnce
from recollect.planning.loop.variant import Variant

MIB = 1 << 20


class Said(WarnOnce):
    def warn(self, cause: str, message: str) -> None:
        self.text = message


@pytest.fixture(scope="module")
def plan() -> recollect.Plan:
    found = recollect.plan(nn.Linear(8, 8), torch.ones(4, 8), "1GiB")
    return replace(found, budget=4 * MIB)


def said(plan: recollect.Plan, peak: int, made: int, later: int) -> str:
    said = Said()
    Variant(plan, said, plan.least, {"": MIB}).warn(peak, {"": made}, later)
    return said.text


def test_what_a_step_and_later_ones_take_is_no_contradiction(plan: recollect.Plan) -> None:
    text = said(plan, 5 * MIB, 2 * MIB, 3 * MIB)
    assert "It takes about 5.00 MiB" in text
    assert "keep less and recompute more. To have" in text
    text = said(plan, 6 * MIB, 2 * MIB, 5 * MIB)
    assert "takes about 6.00 MiB" in text
    assert "but still take about 5.00 MiB. To have" in text
    text = said(plan, 3 * MIB, 2 * MIB, 5 * MIB)
    assert "3.00 MiB" not in text
    assert "Steps like it may take about 5.00 MiB" in text


def test_a_plan_from_the_loop_always_has_advice(plan: recollect.Plan) -> None:
    text = said(replace(plan, from_loop=True), 5 * MIB, 2 * MIB, 3 * MIB)
    assert text.endswith(f"fit(model, budget={5 * MIB})")


def test_growth_that_does_not_show_is_not_told(plan: recollect.Plan) -> None:
    assert "forward makes 2.00 MiB in the model, and made 1.00 MiB" in said(plan, 1, 2 * MIB, 0)
    text = said(plan, 5 * MIB, MIB + 1, 0)
    assert "forward makes" not in text
    assert "it keeps other tensors in memory" in text
