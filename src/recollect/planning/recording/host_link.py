"""The rates of copies to the host and back (P3)."""

from __future__ import annotations

import torch

from recollect.graph.graph import Link
from recollect.planning.recording.prices import timing_on_cuda
from recollect.planning.recording.sampling import Timing

_Tensor = torch.Tensor
#: Bytes that are copied to measure it, and the part of its rate that is left while kernels use the
#: memory too.
_COPIED = 64 << 20
_SHARE = 0.97
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


def _copying(to: _Tensor, source: _Tensor, device: torch.device) -> Timing:
    with torch.cuda.device(device):
        return timing_on_cuda(lambda: to.copy_(source, non_blocking=True), device)
