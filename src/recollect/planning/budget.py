"""Turns a budget, as users give it, into a number of bytes."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch

from recollect.report.units import parse_bytes
from recollect.store.pool import memory_of_machine

#: The fraction of a device that ``"auto"`` leaves free: the allocator cannot use every gap.
_SPARE = 0.06
#: Where shapes depend on data: the fraction of a budget that is used until more is known.
IF_SHAPES_VARY = 0.97
#: A number below is no number of bytes: 24 means 24 GiB, which has to be written.
_LEAST = 193
_FORMS = 'Give bytes, as "12GiB", a fraction of the plain step, as "50%", or "auto"'


def check_budget(budget: Any) -> None:
    """Refuse an invalid budget, before anything runs."""
    if isinstance(budget, str):
        if budget != "auto" and not _amount(budget):
            raise ValueError(f"budget should be more than 0, but is {budget!r}. {_FORMS}")
        return
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise TypeError(
            f"budget should be a number of bytes, a text such as '12GiB', a fraction of the plain "
            f"step's peak such as 0.5 or '50%', or 'auto', but got a value of type "
            f"{type(budget).__name__}. Give it by its name: budget='12GiB'"
        )
    _check_number(budget, repr(budget))


def _check_number(budget: Any, shown: str) -> None:
    """Refuse what is neither a fraction up to 1 nor a number of bytes that somebody can mean."""
    number = float(budget)
    if not number > 0:
        raise ValueError(f"budget should be more than 0, but is {shown}. {_FORMS}")
    if _is_fraction(budget) and number > 1 and not number.is_integer():
        raise ValueError(
            f"budget={shown} is neither a number of bytes nor a fraction of the plain step's "
            f"peak, which is at most 1. {_instead(number)}"
        )
    if number < _LEAST and not (_is_fraction(budget) and number <= 1):
        raise ValueError(
            f"budget={shown} would be {number:.0f} byte{'s' * (number != 1)}. {_instead(number)}"
        )


def _instead(number: float) -> str:
    """What else a number could mean."""
    if not math.isfinite(number):
        return _FORMS
    share = f' Or "{number:g}%" of the plain step?' if 1 < number <= 100 else ""
    return f'Did you mean "{number:g}GiB"?{share}'


def is_fraction(budget: Any) -> bool:
    """Whether a valid budget is a fraction of the plain step's peak."""
    amount = _amount(budget) if isinstance(budget, str) and budget != "auto" else budget
    return isinstance(amount, Real) and _is_fraction(amount) and float(amount) <= 1


def resolve_budget(budget: Any, plain_peak: int, device: torch.device) -> int:
    """The bytes that ``budget`` stands for."""
    check_budget(budget)
    if budget == "auto":
        return int(capacity(device) * (1 - _SPARE))
    amount = _amount(budget) if isinstance(budget, str) else budget
    if _is_fraction(amount) and amount <= 1:
        return int(plain_peak * float(amount))
    return int(amount)


def _amount(text: str) -> float:
    """What a text says: a fraction as a float (``50%``, ``0.5``), bytes as an int."""
    number = text.strip().removesuffix("%")
    try:
        amount = float(number)
    except ValueError:
        return _bytes(text)
    if number != text.strip():
        if not 0 < amount <= 100:
            raise ValueError(
                f"budget={text!r} should be more than 0% and at most 100% of the plain step's "
                f"peak. {_FORMS}"
            )
        return amount / 100
    is_whole = number.isdecimal()
    _check_number(int(number) if is_whole else amount, repr(text))
    return int(number) if is_whole else amount


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(
            f'budget={error} A part of the plain step is "50%"; "auto" is what the device has'
        ) from None


def _is_fraction(budget: Any) -> bool:
    """Whether a number is of a fractional type, Python's or numpy's."""
    return not isinstance(budget, Integral)


def capacity(device: torch.device) -> int:
    """Bytes of a device that this process can allocate."""
    if device.type != "cuda":
        return memory_of_machine()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)
