"""What a snapshot visits; `tests/planning/test_leaves_no_trace.py` has what it puts back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recollect.state.restorers import UNSET
from recollect.state.snapshot import Snapshot, _variables_of

LIMIT = 3
TABLE = torch.zeros(3)


def uses(x: Any) -> Any:
    return x.shape, [LIMIT + n for n in x], lambda: missing  # noqa: F821 - a global to come


def test_variables_of_a_function() -> None:
    found = {name: value for _, name, value in _variables_of(uses)}
    assert (found["LIMIT"], found["missing"]) == (3, UNSET)


def uses_modules() -> Any:
    return functools.WRAPPER_ASSIGNMENTS, pytest.LineMatcher


def test_variables_of_modules_unless_closed() -> None:
    values = [value for _, _, value in _variables_of(uses_modules)]
    assert pytest.LineMatcher in values
    assert functools.WRAPPER_ASSIGNMENTS not in values


def writes() -> None:
    TABLE.add_(1)


@pytest.mark.parametrize(
    "wrapped",
    [
        staticmethod(writes),
        classmethod(writes),
        property(writes),
        functools.cached_property(writes),
    ],
    ids=lambda wrapped: type(wrapped).__name__,
)
def test_functions_of_members_of_a_class(wrapped: Any) -> None:
    cls = type("Own", (), {"called": wrapped})

    def function() -> Any:
        return cls.called

    assert any(tensor is TABLE for tensor in Snapshot({"function": function}).tensors)


@pytest.mark.parametrize("size", [None, 2])
def test_a_cache_and_its_results(size: int | None) -> None:
    @functools.lru_cache(size)
    def table(n: int) -> Tensor:
        return torch.zeros(n) + TABLE

    made = table(3)
    snapshot = Snapshot({"function": table})
    assert snapshot.caches == [table]
    assert {id(made), id(TABLE)} <= {id(tensor) for tensor in snapshot.tensors}


def test_an_array_is_put_back() -> None:
    table = np.zeros(200_000)
    with Snapshot({"table": [table]}):
        table[7] = 1
    assert not table.any()


# --- iterators: which are used up, what stands in for them, and where one is replaced -------------
