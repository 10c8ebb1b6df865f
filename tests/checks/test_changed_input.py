"""Errors for tensors that were changed in place: whichever engine finds it, the words are alike."""

from __future__ import annotations

import pytest
import torch

from recollect.checks.changed_input import (
    argument_changed,
    saved_tensor_changed,
    source_changed,
    used_tensor_changed,
)
from recollect.errors import InputChanged

X = torch.ones(2, 3)
OP = torch.ops.aten.mm.default

ERRORS = {
    "argument": (argument_changed("args[0]", X, 7, "inside the region"), "args[0]", ".clone()"),
    "used": (used_tensor_changed(X, OP, "is at version 1"), "aten.mm", "optimizer.step()"),
    "source": (source_changed(X), "[2, 3]", "run it after backward"),
    "saved": (saved_tensor_changed(X), "[2, 3]", "Replace the in-place operation"),
    "saved, gone": (saved_tensor_changed(X.shape), "[2, 3]", "Replace the in-place operation"),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_cause_culprit_and_fix(case: tuple[InputChanged, str, str]) -> None:
    error, culprit, fix = case
    assert isinstance(error, InputChanged)
    text = str(error)
    assert text.startswith("one of the variables needed for gradient computation has been modified")
    assert culprit in text
    assert fix in text


def test_a_parameter_is_called_by_its_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert "`0.weight`" in str(source_changed(model[0].weight))
