"""How fast the way between a device and its host is, measured."""

from __future__ import annotations

from functools import partial

import torch

from recollect.graph.graph import Link
from recollect.planning.timing import Timing, sampled

__all__ = ["measured_link"]

_BYTES = 64 << 20
#: How often a copy is timed at least, and the quantile that counts.
_TIMES = 5
_LOW = 0.25
#: What is left of the rate of a copy while kernels use the memory too.
_SHARE = 0.97

#: What a copy takes, to the host and back. Measured again when it is stale, or was not steady.
_known: dict[torch.device, tuple[Timing, Timing]] = {}


def measured_link(device: torch.device) -> Link | None:
    """The rates of copies to the host and back; None if there is no way beside the computation."""
    if device.type != "cuda":
        return None
    known = _known.get(device)
    if known is None or not all(timing.is_good for timing in known):
        here = torch.empty(_BYTES, dtype=torch.uint8, device=device)
        there = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
        known = _known[device] = _timing(there, here, device), _timing(here, there, device)
    return Link(*(_SHARE * _BYTES / timing.seconds for timing in known))


def _timing(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> Timing:
    with torch.cuda.device(device):
        return sampled(partial(_copy, to, source), low=_LOW, least=_TIMES)


def _copy(to: torch.Tensor, source: torch.Tensor) -> list[float]:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    to.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return [start.elapsed_time(end) / 1e3]
