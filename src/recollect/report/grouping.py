"""Rows that say the same as one line: equal modules (``layers.0-11.mlp``), equal rows (``x12``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from recollect.report.rows import FATES, Row

__all__ = ["Group", "Sum", "add_sums", "common_text", "grouped", "lists_by", "pattern"]

_T = TypeVar("_T")
_NUMBER = re.compile(r"\d+")


def lists_by(key: Callable[[_T], Hashable], items: Iterable[_T]) -> list[list[_T]]:
    """Lists of the items that have the same key, in the order of the first item of each."""
    lists: dict[Hashable, list[_T]] = {}
    for item in items:
        lists.setdefault(key(item), []).append(item)
    return list(lists.values())


# --- modules --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    """Bytes of results, and the seconds that their ops take."""

    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.bytes + other.bytes, self.seconds + other.seconds)


def add_sums(sums: Iterable[dict[str, Sum]]) -> dict[str, Sum]:
    """The sums of several groups, by fate."""
    total = dict.fromkeys(FATES, Sum())
    for each in sums:
        total = {fate: total[fate] + each[fate] for fate in FATES}
    return total


@dataclass(frozen=True)
class Group:
    """Modules whose paths differ in numbers, and whose ops have the same fates and bytes."""

    path: str  #: with ranges in the place of numbers; empty for no module
    modules: int
    sums: dict[str, Sum]  #: by fate
    ops: tuple[tuple[str, str, int], ...]  #: of each module: op, fate and bytes

    @property
    def bytes(self) -> int:
        """Of all fates."""
        return sum(each.bytes for each in self.sums.values())


def grouped(rows: Iterable[Row]) -> list[Group]:
    """The modules of ``rows``, equal ones together. Times may differ: they were measured."""
    groups = [_of_module(members) for members in lists_by(lambda row: row.path, rows)]
    deepest = max((group.path.count(".") for group in groups), default=-1)
    # The innermost number first: the experts of a layer, then the layers.
    for position in reversed(range(deepest + 1)):
        groups = _merged(groups, position)
    return groups


def _of_module(rows: Sequence[Row]) -> Group:
    ops = tuple((row.op, row.fate, row.bytes) for row in rows)
    sums = dict.fromkeys(FATES, Sum())
    for row in rows:
        sums[row.fate] += Sum(row.bytes, row.seconds)
    return Group(rows[0].path, 1, sums, ops)


def _merged(groups: Sequence[Group], position: int) -> list[Group]:
    """Merge the groups that only differ in the number at ``position`` of their paths."""

    def key(numbered: tuple[int, Group]) -> Hashable:
        n, group = numbered
        parts = group.path.split(".")
        if position >= len(parts) or not parts[position].isdecimal():
            return n
        return (*parts[:position], None, *parts[position + 1 :]), group.ops

    lists = lists_by(key, enumerate(groups))
    return [_merge([group for _, group in each], position) for each in lists]


def _merge(groups: Sequence[Group], position: int) -> Group:
    if len(groups) == 1:
        return groups[0]
    parts = groups[0].path.split(".")
    parts[position] = _ranges(int(group.path.split(".")[position]) for group in groups)
    modules = sum(group.modules for group in groups)
    return Group(".".join(parts), modules, add_sums(g.sums for g in groups), groups[0].ops)


def _ranges(numbers: Iterable[int]) -> str:
    """Such as ``0-3,7,9-11``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# --- texts ----------------------------------------------------------------------------------------


def pattern(text: str) -> str:
    """``text`` with a star in the place of each number."""
    return _NUMBER.sub("*", text)


def common_text(texts: Sequence[str]) -> str:
    """One text for several of the same `pattern`: a star where their numbers differ."""
    numbers = zip(*map(_NUMBER.findall, texts), strict=True)
    differ = iter([len(set(column)) > 1 for column in numbers])
    return _NUMBER.sub(lambda match: "*" if next(differ) else match[0], texts[0])
