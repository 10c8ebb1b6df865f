"""What a function's ops depend on beside its arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from recollect.state.flags import read_flags
from recollect.state.rng import HAS_ACCELERATOR
from recollect.torch_private import any_autocast_enabled

__all__ = ["casts", "mood"]

_is_grad_enabled = torch.is_grad_enabled
_DEVICES = ["cpu"]
if HAS_ACCELERATOR:
    _DEVICES.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]

_CHOOSES_A_KERNEL = {F.scaled_dot_product_attention, F.multi_head_attention_forward}


def casts() -> Any:
    """For each type of device, whether autocast is on and to which dtype; None if it is off."""
    if not any_autocast_enabled():
        return None
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)


def mood(function: Any) -> Any:
    """Grad mode and autocast; for some functions, the switches too."""
    base: Any = _is_grad_enabled()
    if any_autocast_enabled():
        base = base, casts()
    return (base, read_flags()) if function in _CHOOSES_A_KERNEL else base
