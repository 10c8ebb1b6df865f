"""Times work on a machine that others use too (P3).

Disturbances make a sample longer, so the lowest counts. Samples are taken until others agree with
it, or until they have taken long enough. How far apart they are is the *spread*: the error of a
time.

A short sample is either disturbed or not: if the two lowest agree, they were not. A long one, as of
a whole step, is always disturbed, and may be the lowest by chance: the median counts, and half of
the samples have to agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: The spread up to which samples agree.
_AGREE = 0.05
#: Seconds below which differences are those of the clock.
_TICK = 1e-6
#: Seconds for which a time stays valid: clock rates, caches and other processes change.
_FRESH = 300.0
#: The spread of a single sample.
_UNKNOWN = 1.0


def now() -> float:
    """Seconds, on a clock that never goes back."""
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured time."""

    seconds: float  #: the lowest sample; on a device a low quantile; of long ones the median
    spread: float  #: by what fraction the next sample, or the median, is above the lowest
    at: float  #: when it was measured

    @property
    def is_steady(self) -> bool:
        """Whether its samples agreed."""
        return self.spread <= _AGREE

    @property
    def is_good(self) -> bool:
        """Whether it is steady and recent, and need not be measured again."""
        return self.is_steady and now() - self.at <= _FRESH


def timing_of(samples: Iterable[float], low: float = 0.0, *, long: bool = False) -> Timing:
    """The quantile ``low`` of ``samples``, or their median if they are long, and its spread."""
    ordered = sorted(samples)
    first = int(low * len(ordered))
    seconds = ordered[first]
    if first + 1 == len(ordered):
        return Timing(seconds, _UNKNOWN, now())
    other = max(first + 1, len(ordered) // 2) if long else first + 1
    more = max(0.0, ordered[other] - seconds - _TICK)
    return Timing(ordered[other] if long else seconds, more / max(seconds, _TICK), now())


def sampled(
    sample: Callable[[], Sequence[float]],
    *,
    low: float = 0.0,
    long: bool = False,
    least: int = 3,
    most: int = 15,
    seconds: float = 0.25,
) -> Timing:
    """Call ``sample``, which measures once or several times, until the samples agree.

    After ``most`` samples it gives up, or after so many seconds, once there are ``least`` samples.
    ``low`` and ``long``: as in `timing_of`.
    """
    samples: list[float] = []
    while True:
        samples += sample()
        if len(samples) < least:
            continue
        timing = timing_of(samples, low, long=long)
        if timing.is_steady or len(samples) >= most or sum(samples) >= seconds:
            return timing
