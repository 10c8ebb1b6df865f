"""The findings as data: one row for each piece of memory, and sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["AUTOGRAD", "Call", "ELSEWHERE", "FATES", "HELD", "OUTSIDE", "RESULT", "Row", "Totals"]

#: What may become of a result.
FATES = ("kept", "input", "offloaded", "recomputed", "not held")

#: Those by which memory stays where it is.
HELD = frozenset({"kept", "input"})

#: Why memory is held that no region holds.
AUTOGRAD = "autograd"
RESULT = "part of the result"
ELSEWHERE = "held by other code"
OUTSIDE = frozenset({AUTOGRAD, RESULT, ELSEWHERE})


@dataclass(frozen=True)
class Row:
    """What became of one result of one op."""

    path: str  #: the module that ran the op, by its name in the model
    op: str  #: as the dispatcher calls it, such as ``aten.mm``
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int  #: of memory that is held, or that is spared; 0 if nobody would hold the result
    fate: str  #: one of `FATES`
    reason: str  #: the rule, or whoever holds it
    region: str | None  #: the region that holds or recomputes it, if one does


@dataclass(frozen=True)
class Call:
    """One call of a checkpointed region."""

    region: str  #: by its module's name in the model, or by that of the function
    engine: str  #: ``rerun``, ``reentrant`` or ``replay``
    notes: tuple[str, ...]  #: why it was not run as usual


@dataclass(frozen=True)
class Totals:
    """Bytes by fate; and by path of the module, and fate."""

    by_fate: Mapping[str, int]
    by_module: Mapping[str, Mapping[str, int]]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Totals:
        """Add up ``rows``."""
        by_fate = dict.fromkeys(FATES, 0)
        by_module: dict[str, dict[str, int]] = {}
        for row in rows:
            by_fate[row.fate] += row.bytes
            module = by_module.setdefault(row.path, dict.fromkeys(FATES, 0))
            module[row.fate] += row.bytes
        return cls(by_fate, by_module)
