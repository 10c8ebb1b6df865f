"""Which modules change attributes of their own in a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recollect.planning.loop.attributes import AttributeWatch


def changed_by(change: Callable[[Any], Any]) -> set[str]:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4)))
    inner: Any = model[1]
    inner.calls, inner.seen, inner.cache = 0, [], {"length": 1}
    watch = AttributeWatch(model)
    model(torch.randn(3, 4))
    change(inner)
    return watch.changed()


def test_a_forward_that_only_computes_changes_nothing() -> None:
    assert changed_by(lambda inner: None) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda inner: setattr(inner, "calls", inner.calls + 1),
        lambda inner: setattr(inner, "loss", torch.zeros(())),
        lambda inner: delattr(inner, "calls"),
        lambda inner: inner.seen.append(torch.zeros(3)),
        lambda inner: inner.cache.update(length=2),
        lambda inner: inner.register_buffer("last", torch.zeros(3)),
        lambda inner: inner.eval(),
    ],
    ids=["number", "new", "gone", "list", "dict", "buffer", "mode"],
)
def test_changes_are_seen(change: Callable[[Any], Any]) -> None:
    assert "1" in changed_by(change)


def test_a_write_to_a_tensor_is_no_change() -> None:
    assert changed_by(lambda inner: inner[0].weight.data.add_(1)) == set()


def test_the_same_constant_again_is_no_change() -> None:
    assert changed_by(lambda inner: setattr(inner, "calls", int("0"))) == set()
