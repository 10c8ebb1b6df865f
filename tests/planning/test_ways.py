"""Steps that are run under a plan, to be measured."""

from __future__ import annotations

from weakref import ref

import pytest
import torch
from torch import nn

import recollect
from recollect.planning import ways
from recollect.planning.recording.step import TrainingStep
from recollect.replay.engine import CallReport

pytestmark = pytest.mark.usefixtures("no_bound")


def test_a_step_holds_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [each for _ in range(4) for each in (nn.Linear(32, 32), nn.GELU())]
    model, batch = nn.Sequential(*layers), torch.randn(64, 32)
    by = recollect.plan(model, batch, 0.8).schedule
    held: list[ref] = []
    run_planned = ways.run_planned

    def run(*args, **kwargs):
        assert [each() for each in held if each() is not None] == []
        out = run_planned(*args, **kwargs)
        held.append(ref(args[-1].remat))
        return out

    monkeypatch.setattr(ways, "run_planned", run)
    reports: list[CallReport] = []
    monkeypatch.setattr(ways.Bench, "_differs", lambda _, report: reports.append(report))
    ways.Bench(TrainingStep(model, (batch,), {}), {}).peaks(ways.Way(by))
    assert len(held) == len(reports) > 1
