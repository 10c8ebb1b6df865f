"""Times work on a machine that others use too, and the link to the host (P3).

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
from typing import Any

import torch

from recollect.graph.graph import Link

#: The spread up to which samples agree.
_AGREE = 0.05
#: Seconds below which differences are those of the clock.
_TICK = 1e-6
#: Seconds for which a time stays valid: clock rates, caches and other processes change.
_FRESH = 300.0
#: The spread of a single sample.
_UNKNOWN = 1.0
#: On a device: how often work is issued before its times are read, and the quantile that counts.
#: The lowest sample may be of a clock rate that had just changed.
_ISSUED = 5
LOW = 0.25
#: Bytes that are copied to measure it, and the part of its rate that is left while kernels use the
#: memory too.
_COPIED = 64 << 20
_SHARE = 0.97


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


# --- on a device ----------------------------------------------------------------------------------


def timing_events() -> tuple[Any, Any]:
    """What to record on a device before and after its work, to time that."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def elapsed(events: list[tuple[Any, Any]]) -> list[float]:
    """The seconds between events that a device has passed."""
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def timing_on_cuda(run: Callable[[], Any], device: torch.device) -> Timing:
    """Time ``run`` on a device."""

    def issue() -> list[float]:
        """Run several times one after the other; read the times afterwards."""
        pairs = [timing_events() for _ in range(_ISSUED)]
        for begin, end in pairs:
            begin.record()
            run()
            end.record()
        torch.accelerator.synchronize(device)
        return elapsed(pairs)

    return sampled(issue, low=LOW, least=_ISSUED)


_known_links: dict[torch.device, tuple[Timing, Timing]] = {}


def measured_link(device: torch.device) -> Link | None:
    """The rates of copies to the host and back; None if they cannot run beside the computation."""
    if device.type != "cuda":
        return None
    known = _known_links.get(device)
    if known is None or not all(timing.is_good for timing in known):
        here = torch.empty(_COPIED, dtype=torch.uint8, device=device)
        there = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
        known = _copying(there, here, device), _copying(here, there, device)
        _known_links[device] = known
    return Link(*(_SHARE * _COPIED / timing.seconds for timing in known))


def _copying(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> Timing:
    with torch.cuda.device(device):
        return timing_on_cuda(lambda: to.copy_(source, non_blocking=True), device)
