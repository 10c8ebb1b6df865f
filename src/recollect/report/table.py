"""Tables for a terminal: of rows, of modules, of a plan and of a frontier."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from recollect.report.grouping import Group, Sum, add_sums, common_text, grouped
from recollect.report.plan_report import PlanReport
from recollect.report.rows import FATES, Row, TensorRow
from recollect.report.units import bytes_text, percent_text, seconds_text
from recollect.report.words import figures, heading, longer_text

__all__ = ["columns", "frontier_table", "modules_table", "rows_table", "table"]

#: How wide the text and a column of names may be, and how many lines of modules there may be.
_WIDTH = 100
_NAME = 34
_LINES = 40

NO_MODULE = "(no module)"
_TITLES = {"input": "inputs"}
_KINDS = {"plan": "", "chosen": "chosen", "plain": "no plan", "peer": "peer"}


def columns(header: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str]) -> str:
    """``lines`` under ``header``, flush right but for the columns named in ``left``."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]

    def laid_out(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = ["-" * width for width in widths]
    return "\n".join(map(laid_out, (header, rule, *lines)))


# --- who holds what -------------------------------------------------------------------------------


def rows_table(groups: Sequence[Sequence[Row]]) -> str:
    """A line for each list of rows that say the same; times and shapes where there are any."""
    header = ["module", "op", "shape", "memory", "time", "fate", "reason"]
    if not any(isinstance(row, TensorRow) for group in groups for row in group):
        header.remove("shape")
    if not any(row.seconds for group in groups for row in group):
        header.remove("time")
    lines = [[_cell(name, group) for name in header] for group in groups]
    return columns(header, lines, left=("module", "op", "shape", "fate", "reason"))


def _cell(name: str, group: Sequence[Row]) -> str:
    row = group[0]
    if name == "module":
        count = f" x{len(group)}" if len(group) > 1 else ""
        return (common_text([each.path for each in group]) or NO_MODULE) + count
    if name == "reason":
        return common_text([each.reason for each in group])
    if name == "shape" and isinstance(row, TensorRow):
        shape = "x".join(map(str, row.shape)) or "scalar"
        return f"{shape} {str(row.dtype).removeprefix('torch.')}"
    if name == "memory":
        return _bytes_cell(sum(each.bytes for each in group))
    if name == "time":
        return seconds_text(sum(each.seconds for each in group))
    return row.op if name == "op" else row.fate


def modules_table(rows: Sequence[Row], limit: int = _LINES) -> str:
    """What becomes of the modules, equal ones together; empty if there are none."""
    groups = grouped(rows)
    if not groups:
        return ""
    whole = add_sums(group.sums for group in groups)
    shown = [fate for fate in FATES[:-1] if fate in ("kept", "recomputed") or whole[fate] != Sum()]
    ranked = sorted(groups, key=lambda group: group.bytes, reverse=True)
    largest = {group.path for group in ranked[:limit]}
    named = [(_label(group), group.sums) for group in groups if group.path in largest]
    if left := ranked[limit:]:
        named.append((f"{len(left)} smaller lines", add_sums(group.sums for group in left)))
    named.append(("in all", whole))
    is_timed = any(each.seconds for each in whole.values())
    header = ["module"]
    for fate in shown:
        header += [_TITLES.get(fate, fate), "time"] if is_timed else [_TITLES.get(fate, fate)]
    lines = [[name, *_sum_cells(sums, shown, is_timed)] for name, sums in named]
    return columns(header, lines, left=("module",))


def _sum_cells(sums: dict[str, Sum], shown: Sequence[str], is_timed: bool) -> list[str]:
    cells = []
    for fate in shown:
        cells.append(_bytes_cell(sums[fate].bytes))
        if is_timed:
            cells.append(seconds_text(sums[fate].seconds) if sums[fate].seconds else "-")
    return cells


def _bytes_cell(count: int) -> str:
    return bytes_text(count) if count else "-"


def _label(group: Group) -> str:
    return _short(group.path or NO_MODULE)


# --- plans ----------------------------------------------------------------------------------------


def table(report: PlanReport) -> str:
    """What a plan does: its figures, the parts of its peak, and what becomes of the modules."""
    parts = [_head(report), _parts(report), modules_table(report.rows), *_notes(report)]
    return "\n\n".join(filter(None, parts))


def frontier_table(report: PlanReport) -> str:
    """The plans of a frontier and what they are compared with, the least peak first."""
    lines = [
        (
            _short(point.name),
            bytes_text(point.peak),
            percent_text(point.peak / report.plain_peak) if report.plain_peak else "",
            seconds_text(point.seconds),
            longer_text(point.seconds, report.plain_time),
            _KINDS.get(point.kind, point.kind),
        )
        for point in sorted(report.points, key=lambda point: (point.peak, point.seconds))
    ]
    header = ("", "peak", "of plain", "step", "vs plain", "")
    text = columns(header, lines, left=("",)) if lines else "There is no plan."
    return "\n\n".join([_head(report), text, *_notes(report)])


def _head(report: PlanReport) -> str:
    found = figures(report)
    label = max(len(figure.label) for figure in found)
    value = max(len(figure.value) for figure in found)
    lines = [
        f"  {figure.label:<{label}}  {figure.value:>{value}}  {figure.remark}".rstrip()
        for figure in found
    ]
    return "\n".join([heading(report), "", *lines])


def _parts(report: PlanReport) -> str:
    whole = sum(nbytes for _, nbytes in report.parts)
    lines = [
        (_short(name), bytes_text(nbytes), percent_text(nbytes / whole) if whole else "")
        for name, nbytes in report.parts
    ]
    header = ("at the peak", "memory", "share")
    return columns(header, lines, left=header[:1]) if lines else ""


def _notes(report: PlanReport) -> list[str]:
    return [textwrap.fill(note, _WIDTH) for note in report.notes]


def _short(name: str) -> str:
    """``name``, without its middle if it is long: its ends tell most."""
    if len(name) <= _NAME:
        return name
    half = (_NAME - 3) // 2
    return f"{name[:half]}...{name[-half:]}"
