"""Every differentiable op that PyTorch describes, with all results kept and with none."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

from recollect import policy
from tests._support import assert_identical, plain, rerun

database = pytest.importorskip("tests.engines.test_op_database")

pytestmark = database.pytestmark

REGIONS = [
    partial(rerun, policy=policy.everything()),
    partial(rerun, policy=policy.nothing()),
]


@pytest.mark.parametrize("op", database.OPS)
def test_op(op: Any) -> None:
    samples = islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), database.SAMPLES)
    for sample in samples:
        expected = database.outcome(plain, op, sample)
        for region in REGIONS:
            assert_identical(database.outcome(region, op, sample), expected)
