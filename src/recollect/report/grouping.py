"""Modules of which the same becomes, as one: ``layers.0-11.mlp``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recollect.report.plan_report import Row

__all__ = ["CHOICES", "Group", "Sum", "grouped"]

#: What may become of a value, in the order in which it is shown.
CHOICES = ("keep", "recompute", "offload")


@dataclass(frozen=True, slots=True)
class Sum:
    """Bytes of results, and the seconds that their ops take."""

    nbytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.nbytes + other.nbytes, self.seconds + other.seconds)


@dataclass(frozen=True)
class Group:
    """Modules that are alike.

    Args:
        path: Of all of them, with ranges in the place of numbers; empty for no module.
        modules: How many there are.
        sums: By choice, of all of them.
    """

    path: str
    modules: int
    sums: dict[str, Sum]

    @property
    def nbytes(self) -> int:
        """Of all choices."""
        return sum(each.nbytes for each in self.sums.values())


@dataclass(frozen=True)
class _Entry:
    """Modules on the way to a group: the numbers in ``parts`` become ranges one by one."""

    parts: tuple[str, ...]
    fates: tuple[tuple[str, str, int], ...]
    modules: int
    sums: dict[str, Sum]


def grouped(rows: Iterable[Row]) -> list[Group]:
    """The modules of ``rows``, alike ones together, in the order of the first of each.

    Alike are modules whose paths differ in a number, and whose ops are the same, with the same
    choices and bytes. Times do not count: they were measured.
    """
    entries = _entries(rows)
    # The innermost number first: the experts of a layer, then the layers.
    deepest = max((len(entry.parts) for entry in entries), default=0)
    for position in reversed(range(deepest)):
        entries = _merged(entries, position)
    return [Group(".".join(entry.parts), entry.modules, entry.sums) for entry in entries]


def _entries(rows: Iterable[Row]) -> list[_Entry]:
    modules: dict[str, list[Row]] = {}
    for row in rows:
        modules.setdefault(row.path, []).append(row)
    return [
        _Entry(
            tuple(path.split(".")),
            tuple((row.op, row.choice, row.nbytes) for row in members),
            1,
            _sums(members),
        )
        for path, members in modules.items()
    ]


def _sums(rows: Iterable[Row]) -> dict[str, Sum]:
    sums = dict.fromkeys(CHOICES, Sum())
    for row in rows:
        sums[row.choice] += Sum(row.nbytes, row.seconds)
    return sums


def _merged(entries: Sequence[_Entry], position: int) -> list[_Entry]:
    """Those that differ in the number at ``position`` only are one; the others as they were."""
    alike: dict[tuple[object, ...], list[_Entry]] = {}
    for n, entry in enumerate(entries):
        parts = entry.parts
        has_number = position < len(parts) and parts[position].isdecimal()
        others = (parts[:position], parts[position + 1 :], entry.fates)
        alike.setdefault(others if has_number else (n,), []).append(entry)
    return [_one(group, position) if len(group) > 1 else group[0] for group in alike.values()]


def _one(entries: Sequence[_Entry], position: int) -> _Entry:
    first = entries[0]
    numbers = [int(entry.parts[position]) for entry in entries]
    parts = (*first.parts[:position], _ranges(numbers), *first.parts[position + 1 :])
    sums = {choice: sum((e.sums[choice] for e in entries), Sum()) for choice in CHOICES}
    return _Entry(parts, first.fates, sum(entry.modules for entry in entries), sums)


def _ranges(numbers: Iterable[int]) -> str:
    """Such as ``0-3,7,9-11``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
