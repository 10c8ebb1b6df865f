"""A clock that is made up, for tests that must not depend on how fast the machine is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from recollect.modules import OPTIONS
from recollect.planning.recording.step import TrainingStep
from recollect.planning.regions.module_regions import ModuleRegion

TICK, MS = 1e-5, 1e-3


class Clock:
    """Goes on by the next of ``steps`` whenever it is looked at."""

    def __init__(self, steps: Iterator[float]) -> None:
        self.steps = steps
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += next(self.steps)
        return self.now


def outliers() -> Iterator[float]:
    """Two of three samples take a thousand times as long."""
    return itertools.cycle([TICK, 1000 * TICK, 1000 * TICK])


def noisy() -> Iterator[float]:
    draw = random.Random(0)
    while True:
        yield MS * (1 + 9 * draw.random())


def step_takes(
    monkeypatch: pytest.MonkeyPatch, *, plain: float, planned: float, modules: float = math.inf
) -> list[str]:
    """Have steps take as long as it says. Returns what was timed."""
    timed: list[str] = []

    def seconds(step: TrainingStep) -> float:
        step.run()
        if any(isinstance(vars(m).get(OPTIONS), ModuleRegion) for m in step.model.modules()):
            timed.append("modules")
            return modules
        timed.append("planned" if OPTIONS in vars(step.model) else "plain")
        return planned if timed[-1] == "planned" else plain

    monkeypatch.setattr(TrainingStep, "seconds", seconds)
    return timed
