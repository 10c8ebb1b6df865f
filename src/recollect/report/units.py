"""Text of bytes, seconds and wrong arguments; parses budgets such as ``12GiB`` into bytes."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_FACTORS = {"b": 1}
_FACTORS |= {f"{prefix}b": 1000**n for n, prefix in enumerate("kmgtp", start=1)}
_FACTORS |= {f"{prefix}ib": 1024**n for n, prefix in enumerate("kmgtp", start=1)}

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_EXAMPLES = 'write for example "12GiB", "8GB", "512 MiB" or "4096B"'


def parse_bytes(text: str) -> int:
    """The number of bytes that ``text`` means, such as ``12GiB`` (binary) or ``8GB`` (decimal).

    Raises:
        ValueError: It is not an amount, or its unit is ambiguous.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number and a unit of bytes: {_EXAMPLES}.")
    number, unit = match.groups()
    if fault := _fault(unit):
        raise ValueError(f"{text!r}: {fault}: {_EXAMPLES}.")
    # Decimal: 0.1 is not exact as a float, and a budget is compared to the byte.
    return int(Decimal(number) * _FACTORS[unit.lower()])


def _fault(unit: str) -> str:
    """What is wrong with ``unit``, if anything."""
    if not unit:
        return "there is no unit"
    if f"{unit.lower()}b" in _FACTORS:
        return f"{unit!r} may mean {unit.upper()}B or {unit.upper()}iB"
    if unit.lower() not in _FACTORS:
        return f"there is no unit {unit!r}"
    # All in lower case nobody means bits. After a capital letter, a small b is deliberate.
    if unit.endswith("b") and not unit.islower():
        return f"{unit!r} with a small b means bits"
    return ""


def argument_text(value: Any) -> str:
    """A wrong argument, for a message: by its type if its repr may be long."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def bytes_text(count: int) -> str:
    """A number of bytes, such as ``11.92 GiB``."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        # As it will be printed: 1023.999 KiB is 1.00 MiB, not 1024.00 KiB.
        if round(abs(amount), 2) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"


def seconds_text(seconds: float) -> str:
    """A time, such as ``412 ms``: three digits."""
    amount, unit = seconds, "s"
    for smaller in ("ms", "\N{MICRO SIGN}s", "ns"):
        if abs(amount) >= 0.9995 or amount == 0:
            break
        amount, unit = amount * 1000, smaller
    whole = abs(amount)
    digits = 0 if whole >= 99.95 or whole == 0 else 1 if whole >= 9.995 else 2
    return f"{amount:.{digits}f} {unit}"


def percent_text(fraction: float) -> str:
    """A fraction in percent; ``<0.1%`` if it would be rounded to zero."""
    if 0 < abs(fraction) < 0.0005:
        return "<0.1%"
    return "0%" if fraction == 0 else f"{fraction:.1%}"
