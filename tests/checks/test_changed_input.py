"""Errors for tensors that were changed in place: whichever engine finds it, the words are alike."""

from __future__ import annotations

import pytest
import torch

import recollect
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


def test_a_view_is_called_by_the_name_of_its_parameter() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert "`0.weight`" in str(saved_tensor_changed(model[0].weight.detach().t()))


def test_the_tensor_and_what_needs_it_are_named() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    x = X.clone()
    for changed, named in ((model[1].weight, "`1.weight`"), (x, r"\[2, 3\] \(no parameter")):
        loss = recollect.checkpoint(model, x, engine="replay").square().mean()
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(InputChanged, match=rf"{named}.* \(AddmmBackward0\), was changed"):
            loss.backward()
