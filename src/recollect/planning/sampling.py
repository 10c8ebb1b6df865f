"""Timing work on a machine that others use too.

What disturbs a sample makes it longer, so the lowest counts. Sampling goes on until others agree
with it, or until it has taken long enough. How far apart they are is the *spread* of a figure: what
it may be off by.

A short sample is either disturbed or not, and if the two lowest agree they were not. A long one is
always disturbed on a busy machine, by more or less, and may be the lowest by chance: there half of
the samples have to agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Timing", "now", "sampled", "timing_of"]

#: The spread up to which samples agree.
_AGREE = 0.05
#: Seconds below which differences are those of the clock.
_TICK = 1e-6
#: Seconds for which a figure is good: clocks, caches and other processes change.
_FRESH = 300.0
#: The spread of a single sample.
_UNKNOWN = 1.0


def now() -> float:
    """Seconds, on a clock that never goes back."""
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Timing:
    """What something takes."""

    seconds: float  #: the lowest sample; of a device a low quantile
    #: How far the next sample, or that in the middle, is above it, as a fraction of it.
    spread: float
    at: float  #: when it was measured

    @property
    def is_steady(self) -> bool:
        """Whether samples agreed."""
        return self.spread <= _AGREE

    @property
    def is_good(self) -> bool:
        """Whether it need not be measured again: it is steady, and not stale."""
        return self.is_steady and now() - self.at <= _FRESH


def timing_of(samples: Iterable[float], low: float = 0.0, *, long: bool = False) -> Timing:
    """The figure that ``samples`` make: their quantile ``low``, and its spread."""
    ordered = sorted(samples)
    first = int(low * len(ordered))
    seconds = ordered[first]
    if first + 1 == len(ordered):
        return Timing(seconds, _UNKNOWN, now())
    other = max(first + 1, len(ordered) // 2) if long else first + 1
    more = max(0.0, ordered[other] - seconds - _TICK)
    return Timing(seconds, more / max(seconds, _TICK), now())


def sampled(
    sample: Callable[[], Sequence[float]],
    *,
    low: float = 0.0,
    long: bool = False,
    least: int = 3,
    most: int = 15,
    seconds: float = 0.25,
) -> Timing:
    """Call ``sample`` until what it returns agrees.

    Args:
        sample: Measures once or several times.
        low: The quantile that counts.
        long: Whether half of the samples have to agree.
        least: Samples that are taken in any case.
        most: Samples after which it is given up.
        seconds: Seconds after which it is given up, once there are ``least``.
    """
    samples: list[float] = []
    while True:
        samples += sample()
        if len(samples) < least:
            continue
        timing = timing_of(samples, low, long=long)
        if timing.is_steady or len(samples) >= most or sum(samples) >= seconds:
            return timing
