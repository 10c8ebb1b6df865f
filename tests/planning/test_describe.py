"""The parts of a peak, as a report lists them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from recollect.graph.simulate import Outcome
from recollect.planning.describe import list_parts
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request


def _parts(parts: tuple[int, int, int, int], peak: int, gradients: int = 0) -> dict[str, int]:
    return dict(list_parts(Outcome(sum(parts), 1.0, 0.0, 0.0, 0, parts), peak, gradients))


@pytest.mark.parametrize("peak", [0, 3, 50, 60, 75, 80, 81, 400])
@pytest.mark.parametrize("parts", [(10, -26, 40, 30), (10, 5, 40, 30), (0, 0, 0, 0)])
def test_they_add_up_and_none_is_negative(parts: tuple[int, int, int, int], peak: int) -> None:
    for gradients in (0, 4, 1000):
        found = _parts(parts, peak, gradients).values()
        assert sum(found) == peak
        assert all(each >= 0 for each in found)


def test_what_was_not_simulated_is_workspace() -> None:
    found = _parts((10, -26, 40, 30), 100)
    assert [*found.values()] == [10, 20, 40, 30]
    assert "gradients, loss and workspace" in found


def test_gradients_that_are_there() -> None:
    found = _parts((10, 5, 40, 30), 85, gradients=4)
    assert found["parameters, optimizer state"] == 6
    assert found["gradients that are there already"] == 4


def test_a_frontier_has_the_figures_of_its_least_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    planner = Planner.of(Request(model, torch.randn(32, 8)))
    # As where whole modules reach the same peak in less time than ops.
    slow = planner.solver.least_solution()
    fast = replace(slow, outcome=replace(slow.outcome, seconds=slow.outcome.seconds / 2))
    monkeypatch.setattr(planner, "_frontier", lambda: [fast])
    report = planner.frontier_report()
    (point,) = [each for each in report.points if each.kind == "plan"]
    assert (point.peak, point.seconds) == (report.predicted_peak, report.predicted_time)
