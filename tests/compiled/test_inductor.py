"""Plans with Inductor, which needs a C++ compiler."""

import shutil
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from tests._support import assert_identical
from tests.compiled._steps import Compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]


def test_gradients_are_the_same_bits_where_no_kernel_is_vectorized():
    def scalar(model: nn.Module) -> Any:
        return torch.compile(model, options={"cpp.simdlen": 1})

    compiled = Compiled("decoder", scalar)
    expected = compiled.outcome()
    plan = recollect.plan(compiled.model, compiled.batch, 0.8, loss=compiled.loss)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak
    with plan.applied(compiled.model):
        assert_identical(compiled.outcome(), expected)


@pytest.mark.parametrize("case", ["decoder_dropout", "encoder_decoder", "conv", "moe"])
def test_budgets_are_kept_and_gradients_are_those_of_compiled_code(case: str):
    compiled = Compiled(case, torch.compile)
    expected = compiled.outcome()
    frontier = recollect.frontier(compiled.model, compiled.batch, loss=compiled.loss)
    for fraction in (0.05, 0.25, 0.5, 0.75, 0.95):
        budget = int(frontier.least + fraction * (frontier.plain_peak - frontier.least))
        plan = frontier.plan_for(budget)
        with plan.applied(compiled.model):
            found = compiled.outcome()
            assert compiled.peak() <= budget
        assert_identical(found[-1], expected[-1])  # the random stream
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_cuda_graphs_that_the_cpu_has_not_do_not_cost_the_budget():
    block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    model = torch.compile(block, mode="reduce-overhead")
    plan = recollect.plan(model, torch.randn(128, 32), 0.8)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak
