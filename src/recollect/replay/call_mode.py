"""The modes, besides its arguments, that decide which ops a function runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.backends import opt_einsum

from recollect._torch.modes import any_autocast_enabled
from recollect.state.rng import HAS_ACCELERATOR

__all__ = ["DEVICES", "call_mode", "casts"]

_is_grad_enabled = torch.is_grad_enabled
#: The types of devices whose autocast is compared.
DEVICES = ["cpu"]
if HAS_ACCELERATOR:
    DEVICES.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]


def casts() -> Any:
    """By type of device: whether autocast is on, and its dtype; None if it is off everywhere."""
    if not any_autocast_enabled():
        return None
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES)


def call_mode(function: Any) -> Any:
    """Grad mode and autocast; for einsum, also how it orders products."""
    base: Any = _is_grad_enabled()
    if any_autocast_enabled():
        base = base, casts()
    if function is torch.einsum and opt_einsum.is_available():
        base = base, (opt_einsum.enabled, opt_einsum.strategy)
    return base
