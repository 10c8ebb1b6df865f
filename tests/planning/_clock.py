"""A clock that is made up, for tests that must not depend on how fast the machine is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

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
