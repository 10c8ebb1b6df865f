"""Plans that send results to the host, without a device: copies run late, from and to CPU memory.

What the schedules keep, send and make again is drawn by chance: more of them, and worse ones, than
any solver would come up with.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect.graph.graph import Link, Schedule
from recollect.graph.simulate import simulate
from recollect.modules import unwrap_module, wrap_module
from recollect.planning import prepare
from recollect.planning.loop.play import run_planned
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request
from recollect.planning.solving.pool import Solution
from recollect.planning.solving.solve import Solver
from recollect.replay import named_schedule
from recollect.replay.named_schedule import trimmed
from tests._support import assert_identical, sampled
from tests.planning._models import CASES, Case, Made
from tests.store._fake import FakeLink, make_store

_SCHEDULES = 5


class Doubled(torch.autograd.Function):
    """Writes in place, which is counted when all of it is over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Odd(nn.Module):
    """Products, and something odd done to each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.odd(layer(x)).sin()
        return x


class WrittenByFunction(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


class TurnedInPlace(Odd):
    def odd(self, x: Tensor) -> Tensor:
        x.transpose_(0, 1)
        return x.t()


class Looked(Odd):
    """Takes a number out, by an op that a plan has no name for."""

    def odd(self, x: Tensor) -> Tensor:
        x = x.tanh()
        return x * 2 if float(x.detach()[0, 0]) < 5 else x


def _rows() -> Tensor:
    return torch.randn(64, 48)


STUDIED = CASES | {
    "written_by_function": Case(WrittenByFunction, _rows),
    "turned_in_place": Case(TurnedInPlace, _rows),
    "looked": Case(Looked, _rows),
}


#: Those that are always studied.
_USUAL = (
    *("decoder_dropout", "conv", "moe", "lstm", "cast", "custom"),
    *("written_by_function", "turned_in_place", "looked"),
)


class Study:
    """A model, and a device that is not there."""

    def __init__(self, case: Case, links: list[FakeLink]) -> None:
        torch.manual_seed(0)
        self.made = Made(case.make(), case.batch(), case.loss)
        self.links = links
        self.planner = Planner.of(Request(self.made.model, self.made.batch, self.made.loss))

    def schedules(self) -> Iterator[Schedule]:
        for seed in range(_SCHEDULES):
            yield self._schedule(random.Random(seed))

    def _schedule(self, draw: random.Random) -> Schedule:
        graph = self.planner.graph
        sends, keeps = draw.uniform(0.1, 1), draw.random()
        away = {n for n in graph.choices if draw.random() < sends}
        kept = {n for n in graph.choices if n not in away and draw.random() < keeps}
        total = sum(graph.values[value].nbytes for op in away for value in graph.results[op])
        limit = int(total * draw.choice([0, 0.1, 0.3, 1]))
        ahead, begin = draw.choice([None, 0, total // 5]), draw.choice([None, 3, 20])
        return trimmed(graph, Schedule(frozenset(kept), frozenset(away), limit, ahead, begin))

    @contextmanager
    def under(self, schedule: Schedule) -> Iterator[None]:
        decisions = self.planner.trials.named(schedule)
        told: set[str] = set()
        model = self.made.model
        wrap_module(model, lambda fn, args, kwargs: run_planned(fn, args, kwargs, decisions, told))
        try:
            yield
        finally:
            unwrap_module(model)
        assert not told


@pytest.fixture(scope="module", params=sampled(STUDIED, usual=_USUAL))
def study(request: pytest.FixtureRequest) -> Iterator[Study]:
    links: list[FakeLink] = []

    def store(**options: Any) -> Any:
        found, link = make_store(**options)
        links.append(link)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "measured_link", lambda device: Link(5e9, 5e9))
        patch.setattr(named_schedule, "HostStore", store)
        yield Study(STUDIED[request.param], links)


def state_after(done: Made, seed: int) -> tuple[Any, Any]:
    """Gradients and buffers, after a step."""
    done.model.zero_grad()
    done.step(seed)
    gradients = {n: p.grad for n, p in done.model.named_parameters() if p.grad is not None}
    return gradients, {n: b.clone() for n, b in done.model.named_buffers()}


def test_gradients_and_buffers_are_those_of_the_plain_step(study: Study) -> None:
    twin = replace(study.made, model=copy.deepcopy(study.made.model))
    sent = 0
    for schedule in study.schedules():
        with study.under(schedule):
            for seed in range(3):
                assert_identical(state_after(study.made, seed), state_after(twin, seed))
    for link in study.links:
        sent += len(link.copied_out)
        assert link.violations == []
    assert sent


def test_the_simulated_peak_is_the_one_of_every_step(study: Study) -> None:
    step = study.planner.step
    exact = 0
    for schedule in study.schedules():
        simulated = simulate(study.planner.graph, schedule).peak
        with study.under(schedule), step.undone():
            # In the first two, memory of the host is allocated, which is the same on the CPU.
            peaks = [step.measured_peak() for _ in range(5)][2:]
        assert len(set(peaks)) == 1
        assert peaks[0] == pytest.approx(simulated, rel=0.05)
        exact += peaks[0] == pytest.approx(simulated, rel=1e-3)
    # In which order the several results of one op are fetched is not known to the simulator.
    assert exact > _SCHEDULES / 2


def test_a_schedule_with_slack_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    planner = Planner.of(Request(model, torch.randn(64, 32)))

    def with_slack(solver: Solver, budget: int) -> Solution | None:
        found = solver.solve(budget)
        return found and replace(found, schedule=replace(found.schedule, link_share=0.5))

    monkeypatch.setattr(Solver, "solve_with_slack", with_slack)
    schedules = planner._schedules_for(planner.least_budget() + 2000)
    assert sorted(each.link_share for each in schedules) == [0.5, 1.0]
