"""What a function's ops depend on beside its arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from recollect.state.flags import Flags, read_flags
from recollect.state.rng import HAS_ACCELERATOR
from recollect.torch_private import any_autocast_enabled

__all__ = ["hashable", "is_mood", "mood"]

_is_grad_enabled = torch.is_grad_enabled
_DEVICES = ["cpu"]
if HAS_ACCELERATOR:
    _DEVICES.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]

_CHOOSES_A_KERNEL = {F.scaled_dot_product_attention, F.multi_head_attention_forward}


def hashable(flags: Flags) -> tuple[Any, ...]:
    """``flags``, in a form that can be looked up."""
    # Where there is an accelerator, one of them is a list: the order of attention kernels.
    return tuple(map(_plain, flags)) if HAS_ACCELERATOR else flags


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def mood(function: Any) -> Any:
    """Grad mode and autocast; for some functions, the switches too."""
    base: Any = _is_grad_enabled()
    if any_autocast_enabled():
        casts = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
        base = base, *casts
    return (base, read_flags()) if function in _CHOOSES_A_KERNEL else base


def is_mood(known: Any, function: Any) -> bool:
    """Whether ``known`` is the mood now. Quick where there is no autocast."""
    if known is True or known is False:
        return _is_grad_enabled() is known and not any_autocast_enabled()
    return bool(mood(function) == known)
