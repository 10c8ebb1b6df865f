"""Tests of the arithmetic of an op, from its shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recollect.planning.recording.estimate import flops_of

aten = torch.ops.aten


def _of(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_a_product_takes_two_operations_for_each_pair() -> None:
    assert flops_of(aten.mm.default, (_of(3, 5), _of(5, 7)), {}) == 2 * 3 * 5 * 7
    bias = (_of(7), _of(3, 5), _of(5, 7))
    assert flops_of(aten.addmm.default, bias, {}) == 2 * 3 * 5 * 7


def test_attention_on_the_cpu_multiplies_all_queries_and_keys() -> None:
    query, key = _of(2, 4, 6, 8), _of(2, 4, 10, 8)
    pairs = 2 * 4 * 6 * 10 * 8
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flops_of(forward, (query, key, key), {}) == 2 * 2 * pairs
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert flops_of(backward, (query, query, key, key), {}) == 5 * 2 * pairs


def test_a_convolution_counts_its_results() -> None:
    args = (_of(2, 3, 8, 8), _of(5, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    results = 2 * 5 * 6 * 6
    assert flops_of(aten.convolution.default, args, {}) == 2 * results * 3 * 3 * 3


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor, torch.sin])
def test_other_ops_have_none(op: object) -> None:
    assert flops_of(op, (_of(4), _of(4)), {}) == 0
