"""Which tensors are copied and put back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recollect.state.tensors import (
    LARGE,
    are_statistics,
    is_copyable,
    is_small,
    nbytes,
    same_values,
)


@pytest.mark.parametrize(
    ("tensor", "small"),
    [
        (torch.zeros(3), True),
        (torch.zeros(1024), True),
        (torch.zeros(1025), False),
        (torch.zeros(2, dtype=torch.complex64).conj(), False),
        (torch.zeros(3, requires_grad=True), False),
        (nn.Parameter(torch.zeros(3), requires_grad=False), False),
        (torch.zeros(3).to_sparse(), False),
    ],
    ids=["small", "just", "large", "conjugate", "grad", "parameter", "sparse"],
)
def test_which_tensors_are_small(tensor: Tensor, small: bool) -> None:
    assert is_small(tensor) is small


@pytest.mark.parametrize(
    ("tensor", "statistics"),
    [
        (torch.zeros(3), True),
        (torch.zeros(LARGE // 4), True),
        (torch.zeros(LARGE // 4 + 1), False),
        (torch.zeros(3, 1), False),
        (torch.zeros(3, dtype=torch.long), False),
        (torch.zeros(3, requires_grad=True), False),
    ],
    ids=["vector", "just", "large", "matrix", "integers", "grad"],
)
def test_which_may_be_statistics(tensor: Tensor, statistics: bool) -> None:
    assert are_statistics(tensor) is statistics


def test_memory_that_several_places_share_is_not_plain() -> None:
    assert is_copyable(torch.zeros(2, 3).t())
    assert not is_copyable(torch.zeros(1, 3).expand(2, 3))
    assert not is_copyable(torch.zeros(3, device="meta"))
    assert not is_copyable(None)


def test_values_are_compared_whatever_the_layout() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert nbytes(matrix) == 24
    assert same_values(matrix, matrix.clone())
    assert same_values(matrix.t(), matrix.t().clone())
    assert same_values(matrix.t(), matrix.t().contiguous())
    assert not same_values(matrix, matrix + 1)
    assert not same_values(matrix.t(), matrix.t() + 1)
    assert not same_values(matrix, matrix.t())
    assert not same_values(torch.tensor(0.0), torch.tensor(-0.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_values_are_compared_on_a_device() -> None:
    tensor = torch.arange(6.0, device="cuda")
    assert same_values(tensor, tensor.clone())
    assert not same_values(tensor, tensor + 1)
