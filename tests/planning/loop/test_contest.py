"""Schedules that take turns in the user's loop, until the fastest is known."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import recollect
from recollect.modules import OPTIONS
from recollect.planning.loop import contest
from recollect.planning.loop.contest import Contest
from recollect.replay.named_schedule import NamedSchedule
from recollect.store.host import HostStore
from tests._support import assert_identical, gradients
from tests.planning._models import squares
from tests.planning.test_lazy import Net, batch

pytestmark = pytest.mark.usefixtures("no_bound")

A, B = NamedSchedule(kept=frozenset({"a"})), NamedSchedule(kept=frozenset({"b"}))


class Clock:
    """Steps take as long as their schedule says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 0.0
        monkeypatch.setattr(contest, "now", lambda: self.time)

    def step(self, held: Contest, seconds: dict[NamedSchedule, float]) -> NamedSchedule:
        schedule = held.next()
        x = torch.ones(2, requires_grad=True)
        out = x * 2
        held.watch(out)
        self.time += seconds[schedule]
        out.sum().backward()
        return schedule


@pytest.mark.parametrize(("seconds", "best"), [((2, 1), B), ((1, 2), A), ((1, 0.995), A)])
def test_the_fastest_stays(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], best: NamedSchedule
) -> None:
    clock, held = Clock(monkeypatch), Contest((A, B), on_device=False)
    times = dict(zip((A, B), seconds, strict=True))
    ran = []
    while (winner := held.winner()) is None:
        ran.append(clock.step(held, times))
    assert ran == [A] * 3 + [B] * 3
    assert winner == best


MODULES, AWAY = NamedSchedule(modules=(("0", "rerun"),)), NamedSchedule(offloaded=(("a", (0,)),))


@pytest.mark.parametrize(
    ("schedules", "text"),
    [
        ((A, B), "other ops recomputed"),  # as on a CPU, where nothing can be offloaded
        ((MODULES, B), "single ops recomputed"),
        ((A, MODULES), "1 modules checkpointed as a whole"),
        ((A, AWAY), "some results offloaded"),
        ((AWAY, A), "nothing offloaded"),
        ((AWAY, replace(AWAY, link_share=0.5)), "copies that have more time"),
    ],
)
def test_the_log_says_what_is_different(
    monkeypatch: pytest.MonkeyPatch,
    schedules: tuple[NamedSchedule, ...],
    text: str,
) -> None:
    clock, held = Clock(monkeypatch), Contest(schedules, on_device=False)
    lines: list[str] = []
    monkeypatch.setattr(contest._log, "info", lambda form, *given: lines.append(form % given))
    while held.winner() is None:
        clock.step(held, dict(zip(schedules, (2.0, 1.0), strict=True)))
    took = "1000 ms from forward to the end of backward"
    assert lines == [f"recollect: steps with {text} take 50% less time: {took}"]


def test_what_others_have_pinned_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, trimmed = Clock(monkeypatch), []

    def trim(store: HostStore) -> None:
        trimmed.append(store)

    monkeypatch.setattr(HostStore, "trim", trim)
    schedules = AWAY, replace(AWAY, limit=1), A
    held = Contest(schedules, on_device=False)
    while held.winner() is None:
        assert not trimmed
        clock.step(held, dict(zip(schedules, (2.0, 1.0, 3.0), strict=True)))
    assert trimmed == [AWAY.store]


def test_the_first_step_of_a_schedule_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, held = Clock(monkeypatch), Contest((A, B), on_device=False)
    for number in range(6):
        clock.step(held, {A: 1.0, B: 100.0 if number == 3 else 0.5})
    assert held.winner() == B


def test_without_a_backward_the_first_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    held = Contest((A, B), on_device=False)
    for _ in range(6):
        held.next()
        held.watch(torch.ones(2, requires_grad=True) * 2)
    assert held.winner() == A


def _trained(model: nn.Module, steps: int) -> list[object]:
    torch.manual_seed(3)
    ran = []
    for _ in range(steps):
        model.zero_grad()
        squares(model(batch())).backward()
        runner = vars(model).get(OPTIONS)
        if runner is not None:
            (variant,) = runner._kinds._known.values()
            ran.append(variant.schedule)
    return ran


def test_a_loop_ends_with_the_faster_one_and_its_gradients_are_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Net(dropout=0.1)
    plain = copy.deepcopy(model)
    plan = recollect.plan(model, batch(), 0.7, loss=squares)
    rival = plan.alternatives[-1]
    assert rival != plan.schedule
    replace(plan, rivals=(rival,)).apply(model)
    monkeypatch.setattr(Contest, "winner", _after(6, rival))
    ran = _trained(model, 8)
    assert ran == [plan.schedule] * 3 + [rival] * 5
    assert vars(model)[OPTIONS]._kinds._known  # the same kind all along
    _trained(plain, 8)
    assert_identical(gradients(model), gradients(plain))


def _after(steps: int, winner: NamedSchedule) -> object:
    def found(held: Contest) -> NamedSchedule | None:
        return winner if sum(each.steps for each in held._entries) >= steps else None

    return found


def test_rivals_are_not_saved(tmp_path: object) -> None:
    plan = recollect.plan(Net(), batch(), 0.7, loss=squares)
    path = f"{tmp_path}/plan.json"
    replace(plan, rivals=(A,)).save(path)
    assert recollect.Plan.load(path).rivals == ()
