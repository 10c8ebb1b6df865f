"""Kinds of steps: which schedule a forward gets by its place in the step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.checks.place import WarnOnce
from recollect.modules import OPTIONS
from recollect.planning.loop import kinds as kinds_module
from recollect.planning.loop.kinds import ForwardKind, Kinds
from tests._support import assert_identical, measure
from tests.planning._models import squares, static_bytes
from tests.planning.test_lazy import batch, net

pytestmark = pytest.mark.usefixtures("no_bound")


def of_two(model: nn.Module, number: int = 0) -> Tensor:
    return squares(model(batch(seed=number)) - model(batch(seed=number + 1)))


def trained(steps: int = 2) -> nn.Module:
    for number in range(steps + 1):  # else the first step makes them
        batch(seed=number)
    model = recollect.fit(net(), budget=0.7)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(steps):
        of_two(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def peak(model: nn.Module, step: Any) -> int:
    found = measure(lambda: step(model), Tensor.backward, warm_up=False).peak
    model.zero_grad()
    return found + static_bytes(model)


def kinds_of(model: nn.Module) -> Kinds:
    found = vars(model)[OPTIONS]._kinds
    assert isinstance(found, Kinds)
    return found


def test_a_plan_of_two_forwards_is_saved_loaded_and_applied(tmp_path: Path) -> None:
    model = trained()
    plan = vars(model)[OPTIONS].plan
    assert len(plan.others) == 1
    plan.save(tmp_path / "plan.json")
    loaded = recollect.Plan.load(tmp_path / "plan.json")
    assert loaded.others == plan.others
    other = loaded.apply(net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peaks = [peak(other, of_two) for _ in range(3)]
    assert max(peaks) <= plan.budget
    assert peaks[-1] == plan.predicted_peak  # to the byte


def test_a_step_of_one_forward_is_the_beginning_of_one_of_two() -> None:
    model = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = peak(model, lambda model: squares(model(batch())))
        together = peak(model, of_two)
    assert alone <= together <= vars(model)[OPTIONS].plan.budget
    assert [len(step) for step in kinds_of(model)._known] == [1, 2]


def test_smaller_batches_of_two_forwards_are_within_larger_ones() -> None:
    model, plain = trained(), trained()
    recollect.unwrap(plain)

    def small(model: nn.Module) -> Tensor:
        return squares(model(batch(96)) - model(batch(96, 2)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peaks = [peak(model, small) for _ in range(4)]  # the third is traced
    assert max(peaks) <= vars(model)[OPTIONS].plan.budget
    for each in (model, plain):
        small(each).backward()
    assert_identical([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_steps_that_begin_alike_and_go_on_otherwise() -> None:
    """The first forward has to suit both: neither is over the budget once both are known."""
    model = trained()
    plan = vars(model)[OPTIONS].plan

    def other(model: nn.Module) -> Tensor:
        return squares(model(batch())) + squares(model(batch(144)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recollect.PlanWarning)
        for _ in range(3):
            peak(model, other)
            peak(model, of_two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert max(peak(model, step) for step in (other, of_two, other)) <= plan.budget


def test_a_kind_is_within_a_larger_one_in_the_same_state() -> None:
    small, large = ForwardKind((((4, 8), "f"),)), ForwardKind((((5, 8), "f"),))
    assert small.is_within(large)
    assert not large.is_within(small)
    assert not small._replace(extra_bytes=1).is_within(large)
    grad = ForwardKind((((4, 8), "f", "requires grad"),))
    assert not grad.is_within(large)


def test_only_the_oldest_kinds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds_module, "_REMEMBERED", 3)
    plan = recollect.plan(net(), batch(), 0.7, loss=squares)
    kinds = Kinds(plan, WarnOnce())
    a, b, c, d = (ForwardKind((((n, 32), "torch.float32"),)) for n in (200, 300, 400, 500))
    for step in ((a,), (a, b), (b,)):
        kinds.find(step)
    first = kinds.find((c,))
    assert [*kinds._known] == [(b,), (c,)]  # no longer step without its beginning
    for step in ((c, c), (c, d)):
        assert kinds.find(step).first is first
    assert [*kinds._known] == [(c,), (c, c), (c, d)]
    kinds.find((c, d, d))
    assert [*kinds._known] == [(c,), (c, d), (c, d, d)]


def test_a_step_without_much_that_runs_out_of_memory_keeps_less_all_the_same() -> None:
    plan = recollect.plan(net(), batch(), 0.7, loss=squares)
    kinds, step = Kinds(plan, WarnOnce()), (ForwardKind((((500, 32), "torch.float32"),)),)
    variant = kinds.find(step)
    variant.schedule, variant.peak = plan.schedule, plan.base + 1
    assert kinds.tighten(step) == 1
