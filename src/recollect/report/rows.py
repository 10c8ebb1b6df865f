"""Rows about the results of ops: what happens to them in a forward, or under a plan.

Tables show equal rows as one line (``x12``), and equal modules as one (``layers.0-11.mlp``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

#: What can happen to a result. A plan only keeps, recomputes or offloads.
FATES = ("kept", "input", "recomputed", "offloaded", "not held")

_T = TypeVar("_T")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, repr=False)
class Row:
    """What happens to a result of an op, or to all of its results."""

    path: str  #: the module that runs the op, by its name in the model
    op: str  #: such as ``aten.mm``
    fate: str  #: one of `FATES`
    bytes: int  #: that are held or saved; 0 if autograd would not hold the result either
    seconds: float = 0.0  #: that the op takes, if that was measured
    reason: str = ""  #: the rule, or whoever holds it; empty if the planner was free to choose
    shape: tuple[int, ...] | None = None  #: None if the row is about several results
    dtype: Any = None  #: likewise
    region: str | None = None  #: the region that holds or recomputes it, if one does
    source: str = ""  #: the line that called the op, as ``file:line``, if that is known

    def __repr__(self) -> str:
        size = "" if self.shape is None else f" {'x'.join(map(str, self.shape)) or 'scalar'}"
        where = f" in {self.path}" if self.path else ""
        return f"<Row: {self.op}{size}{where}, {self.fate}, {self.bytes:,} bytes>"


@dataclass(frozen=True)
class RegionCall:
    """One call of a checkpointed region."""

    region: str  #: by its module's name in the model, or by that of the function
    engine: str  #: ``rerun``, ``reentrant`` or ``replay``
    notes: tuple[str, ...]  #: why it holds or does more than usual


# --- sums -----------------------------------------------------------------------------------------


class Sum(NamedTuple):
    """Bytes of results, and seconds of their ops."""

    bytes: int = 0
    seconds: float = 0.0


def sums_of(rows: Iterable[Row]) -> dict[str, Sum]:
    """The sums of ``rows`` by fate."""
    sums = dict.fromkeys(FATES, Sum())
    for row in rows:
        nbytes, seconds = sums[row.fate]
        sums[row.fate] = Sum(nbytes + row.bytes, seconds + row.seconds)
    return sums


@dataclass(frozen=True)
class Totals:
    """Bytes by fate; and by path of the module, and fate."""

    by_fate: Mapping[str, int]
    by_module: Mapping[str, Mapping[str, int]] = field(repr=False)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Totals:
        modules = lists_by(lambda row: row.path, rows)
        return cls(_bytes_of(rows), {each[0].path: _bytes_of(each) for each in modules})


def _bytes_of(rows: Iterable[Row]) -> dict[str, int]:
    return {fate: each.bytes for fate, each in sums_of(rows).items()}


# --- equal rows and modules -----------------------------------------------------------------------


def lists_by(key: Callable[[_T], Hashable], items: Iterable[_T]) -> list[list[_T]]:
    """Lists of the items that have the same key, in the order of the first item of each."""
    lists: dict[Hashable, list[_T]] = {}
    for item in items:
        lists.setdefault(key(item), []).append(item)
    return list(lists.values())


class Group(NamedTuple):
    """Modules whose paths differ in numbers, and whose ops have the same fates and bytes."""

    path: str  #: with ranges in the place of numbers; empty for no module
    ops: tuple[tuple[str, str, int], ...]  #: of each module: op, fate and bytes
    rows: list[Row]  #: of all modules


def grouped(rows: Iterable[Row]) -> list[Group]:
    """The modules of ``rows``, equal ones merged. Their measured times may differ."""
    groups = [
        Group(each[0].path, tuple((row.op, row.fate, row.bytes) for row in each), each)
        for each in lists_by(lambda row: row.path, rows)
    ]
    deepest = max((group.path.count(".") for group in groups), default=-1)
    # The innermost number first: the experts of a layer, then the layers.
    for position in reversed(range(deepest + 1)):
        lists = lists_by(partial(_all_but_number, position), groups)
        groups = [_merged(each, position) for each in lists]
    return groups


def _all_but_number(position: int, group: Group) -> Hashable:
    """The key of groups that differ only in the number at ``position`` of their paths."""
    parts = group.path.split(".")
    if position >= len(parts) or not parts[position].isdecimal():
        return id(group)
    return *parts[:position], None, *parts[position + 1 :], group.ops


def _merged(groups: Sequence[Group], position: int) -> Group:
    if len(groups) == 1:
        return groups[0]
    parts = groups[0].path.split(".")
    parts[position] = _ranges(int(group.path.split(".")[position]) for group in groups)
    return Group(".".join(parts), groups[0].ops, [row for group in groups for row in group.rows])


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def pattern(text: str) -> str:
    """``text`` with a star in the place of each number."""
    return _NUMBER.sub("*", text)


def common_text(texts: Sequence[str]) -> str:
    """One text for several of the same `pattern`: a star where their numbers differ."""
    numbers = zip(*map(_NUMBER.findall, texts), strict=True)
    differ = iter([len(set(column)) > 1 for column in numbers])
    return _NUMBER.sub(lambda match: "*" if next(differ) else match[0], texts[0])
