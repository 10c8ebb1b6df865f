"""The account of who holds what: one row for the results of each op, of a forward or of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FATES", "RegionCall", "Row", "TensorRow", "Totals"]

#: What may become of a result. A plan only has results kept, recomputed or offloaded.
FATES = ("kept", "input", "recomputed", "offloaded", "not held")


@dataclass(frozen=True)
class Row:
    """What becomes of the results of one op."""

    path: str  #: the module that runs the op, by its name in the model
    op: str  #: such as ``aten.mm``
    fate: str  #: one of `FATES`
    bytes: int  #: that are held or saved; 0 if autograd would not hold the result either
    seconds: float = 0.0  #: that the op takes, if that was measured
    reason: str = ""  #: the rule, or whoever holds it; empty if the planner was free to choose


@dataclass(frozen=True)
class TensorRow(Row):
    """What became of one result of one op in a forward."""

    shape: tuple[int, ...] = ()
    dtype: Any = None
    region: str | None = None  #: the region that holds or recomputes it, if one does


@dataclass(frozen=True)
class RegionCall:
    """One call of a checkpointed region."""

    region: str  #: by its module's name in the model, or by that of the function
    engine: str  #: ``rerun``, ``reentrant`` or ``replay``
    notes: tuple[str, ...]  #: why it holds or does more than usual


@dataclass(frozen=True)
class Totals:
    """Bytes by fate; and by path of the module, and fate."""

    by_fate: Mapping[str, int]
    by_module: Mapping[str, Mapping[str, int]] = field(repr=False)

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
