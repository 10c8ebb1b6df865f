"""Turns a budget, as users give it, into a number of bytes."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch

from recollect.report.units import parse_bytes
from recollect.store.pool import memory_of_machine

__all__ = ["capacity", "check_budget", "resolve_budget"]

#: The fraction of a device that ``"auto"`` leaves free: the allocator cannot use every gap.
_SPARE = 0.06


def check_budget(budget: Any) -> None:
    """Refuse an invalid budget, before anything runs."""
    if isinstance(budget, str):
        if budget != "auto" and not parse_bytes(budget):
            raise ValueError(f"budget should be more than 0, but is {budget!r}")
        return
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise TypeError(
            f"budget should be a number of bytes, a text such as '12GiB', a fraction of the plain "
            f"step's peak such as 0.5, or 'auto', but got {budget!r} of type "
            f"{type(budget).__name__}"
        )
    number = float(budget)
    if not number > 0:
        raise ValueError(f"budget should be more than 0, but is {budget!r}")
    if _is_fraction(budget) and number > 1 and not number.is_integer():
        raise ValueError(
            f"budget={budget!r} is neither a number of bytes nor a fraction of the plain step's "
            "peak, which is at most 1. Give a unit: budget='12GiB'"
        )


def resolve_budget(budget: Any, plain_peak: int, device: torch.device) -> int:
    """The bytes that ``budget`` stands for."""
    check_budget(budget)
    if budget == "auto":
        return int(capacity(device) * (1 - _SPARE))
    if isinstance(budget, str):
        return parse_bytes(budget)
    if _is_fraction(budget) and budget <= 1:
        return int(plain_peak * float(budget))
    return int(budget)


def _is_fraction(budget: Any) -> bool:
    """Whether a number is of a fractional type, Python's or numpy's."""
    return not isinstance(budget, Integral)


def capacity(device: torch.device) -> int:
    """Bytes of a device that this process can allocate."""
    if device.type != "cuda":
        return memory_of_machine()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)
