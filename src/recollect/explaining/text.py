"""The findings as a table: rows that say the same are one line, the largest sums come last."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from recollect.explaining.rows import HELD, Call, Row, Totals
from recollect.report.columns import columns
from recollect.report.units import bytes_text

_T = TypeVar("_T")

__all__ = ["render", "share_of"]

#: How many lines there are at most of each sort.
_LINES = 40
_MODULES = 8

_HEADER = ("path", "op", "shape", "memory", "fate", "reason")
_NO_MODULE = "(no module)"
_NUMBER = re.compile(r"\d+")

#: How the sums are called.
_SUMS = (
    ("kept", "kept on the device"),
    ("input", "inputs of regions"),
    ("offloaded", "offloaded"),
    ("recomputed", "recomputed, and hence not held"),
)


def share_of(part: int, whole: int) -> str:
    """``part`` of ``whole`` in percent."""
    return f"{part / whole:.0%}" if whole else "0%"


def render(
    rows: Sequence[Row],
    calls: Sequence[Call],
    totals: Totals,
    held: int,
    remarks: Iterable[str],
) -> str:
    """All of it as text."""
    tables = [_rows_table(rows), _calls_table(calls), _modules_table(rows), _sums(totals, held)]
    parts = [*tables, *remarks]
    return "\n\n".join(filter(None, parts))


# --- tables ---------------------------------------------------------------------------------------


def _rows_table(rows: Sequence[Row]) -> str:
    groups = _grouped(rows, _what_a_line_says)
    shown, left = _largest(groups, _LINES)
    lines = [_line(group) for group in shown]
    text = columns(_HEADER, lines, left=(0, 1, 2, 4, 5))
    if left:
        text += f"\n... and {len(left)} smaller lines, {bytes_text(sum(map(_bytes, left)))}"
    return text if rows else "Nothing is held, and nothing is recomputed."


def _line(group: list[Row]) -> tuple[str, ...]:
    row = group[0]
    path = _path(group)
    count = f" x{len(group)}" if len(group) > 1 else ""
    reason = _common([each.reason for each in group])
    memory = _bytes(group)
    shape = "x".join(map(str, row.shape)) or "scalar"
    dtype = str(row.dtype).removeprefix("torch.")
    return (
        path + count,
        row.op,
        f"{shape} {dtype}",
        bytes_text(memory) if memory else "-",
        row.fate,
        reason,
    )


def _modules_table(rows: Sequence[Row]) -> str:
    held = [row for row in rows if row.fate in HELD and row.bytes]
    groups = _grouped(held, lambda row: _pattern(row.path))
    shown, left = _largest(groups, _MODULES)
    shown.sort(key=_bytes, reverse=True)
    lines = [(_path(group), bytes_text(_bytes(group))) for group in shown]
    if left:
        lines.append((f"{len(left)} others", bytes_text(sum(map(_bytes, left)))))
    return columns(("held by module", "memory"), lines, left=(0,)) if lines else ""


def _calls_table(calls: Sequence[Call]) -> str:
    """The regions, if there is something to say of one."""
    groups = _grouped(calls, lambda call: (_pattern(call.region), call.engine, call.notes))
    lines = [_call_line(group) for group in groups]
    is_usual = all(call.engine == "rerun" and not call.notes for call in calls)
    return "" if is_usual else columns(("region", "engine", "note"), lines, left=(0, 1, 2))


def _call_line(group: list[Call]) -> tuple[str, ...]:
    call = group[0]
    count = f" x{len(group)}" if len(group) > 1 else ""
    return _common([each.region for each in group]) + count, call.engine, "; ".join(call.notes)


def _sums(totals: Totals, held: int) -> str:
    lines = [(name, bytes_text(totals.by_fate[fate])) for fate, name in _SUMS]
    lines.insert(2, ("held after forward", bytes_text(held)))
    return columns(("in all", "memory"), lines, left=(0,))


# --- rows that say the same -----------------------------------------------------------------------


def _pattern(text: str) -> str:
    return _NUMBER.sub("*", text)


def _grouped(rows: Iterable[_T], key: Callable[[_T], Any]) -> list[list[_T]]:
    """The rows that have the same key, in the order of the first of each."""
    groups: dict[Any, list[_T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _what_a_line_says(row: Row) -> tuple[Any, ...]:
    return row.op, row.shape, row.dtype, row.fate, _pattern(row.path), _pattern(row.reason)


def _path(group: list[Row]) -> str:
    return _common([row.path for row in group]) or _NO_MODULE


def _common(texts: list[str]) -> str:
    """One text for several that differ in numbers, with a star in the place of each of those."""
    first = texts[0]
    numbers = [_NUMBER.findall(text) for text in texts]
    differ = iter([len(set(column)) > 1 for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda match: "*" if next(differ) else match[0], first)


def _bytes(group: Iterable[Row]) -> int:
    return sum(row.bytes for row in group)


def _largest(groups: list[list[Row]], count: int) -> tuple[list[list[Row]], list[list[Row]]]:
    """The ``count`` heaviest of ``groups`` in their order, and the others."""
    ranked = sorted(range(len(groups)), key=lambda n: _bytes(groups[n]), reverse=True)
    chosen = set(ranked[:count])
    shown = [group for n, group in enumerate(groups) if n in chosen]
    return shown, [group for n, group in enumerate(groups) if n not in chosen]
