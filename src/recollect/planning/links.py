"""How fast the way between a device and its host is, measured."""

from __future__ import annotations

import statistics
from functools import cache

import torch

from recollect.planning.graph import Link

__all__ = ["measured_link"]

_BYTES = 64 << 20
_TIMES = 5
#: What is left of the rate of a copy while kernels use the memory too.
_SHARE = 0.97


@cache
def measured_link(device: torch.device) -> Link | None:
    """The rates of copies to the host and back; None if there is no way beside the computation."""
    if device.type != "cuda":
        return None
    here = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    return Link(_rate(there, here, device) * _SHARE, _rate(here, there, device) * _SHARE)


def _rate(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    with torch.cuda.device(device):
        seconds = []
        for _ in range(_TIMES):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            to.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
    return float(_BYTES / statistics.median(seconds))
