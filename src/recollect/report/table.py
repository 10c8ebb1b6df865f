"""Tables for a terminal: of rows, of modules, of a plan and of a frontier."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from recollect.report.plan_report import Figure, PlanReport, Point, figures, heading, point_cells
from recollect.report.rows import FATES, Row, Sum, common_text, grouped, sums_of
from recollect.report.units import bytes_text, percent_text, seconds_text

#: How wide the text and a column of names may be, and how many lines of modules there may be.
_WIDTH = 80
_NAME = 34
#: How wide a table of modules may be.
_TABLE = 100
_LINES = 40
#: How many plans of a frontier there may be.
_PLANS = 24

_NO_MODULE = "(no module)"
_TITLES = {"input": "inputs"}
_KINDS = {"plan": "", "chosen": "chosen", "plain": "no plan", "baseline": "baseline"}


def columns(header: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str]) -> str:
    """``lines`` under ``header``, right-aligned except the columns named in ``left``."""
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
    """A line for each list of equal rows; times and shapes only if there are any."""
    rows = [row for group in groups for row in group]
    lines = [_cells(group) for group in groups]
    header = ["module", "op", "shape", "memory", "time", "fate", "reason"]
    if all(row.shape is None for row in rows):
        header.remove("shape")
    if not any(row.seconds for row in rows):
        header.remove("time")
    left = ("module", "op", "shape", "fate", "reason")
    return columns(header, [[line[name] for name in header] for line in lines], left)


def _cells(group: Sequence[Row]) -> dict[str, str]:
    row, shape = group[0], ""
    if row.shape is not None:
        size = "x".join(map(str, row.shape)) or "scalar"
        shape = f"{size} {str(row.dtype).removeprefix('torch.')}"
    return {
        "module": counted([each.path for each in group]),
        "op": row.op,
        "shape": shape,
        "memory": _bytes_cell(sum(each.bytes for each in group)),
        "time": seconds_text(sum(each.seconds for each in group)),
        "fate": row.fate,
        "reason": common_text([each.reason for each in group]),
    }


def counted(paths: Sequence[str]) -> str:
    """One name for ``paths``, and how many there are."""
    count = f" x{len(paths)}" if len(paths) > 1 else ""
    return (common_text(paths) or _NO_MODULE) + count


def modules_table(rows: Sequence[Row], limit: int = _LINES) -> str:
    """Bytes by module and fate, equal modules on one line; empty without rows."""
    if not rows:
        return ""
    groups = grouped(rows)
    ranked = sorted(groups, key=lambda group: sum(row.bytes for row in group.rows), reverse=True)
    largest, left = {group.path for group in ranked[:limit]}, ranked[limit:]
    named = [(g.path or _NO_MODULE, g.rows) for g in groups if g.path in largest]
    if left:
        named.append((f"{len(left)} smaller lines", [row for g in left for row in g.rows]))
    whole = sums_of(rows)
    shown = [fate for fate in FATES[:-1] if fate in ("kept", "recomputed") or any(whole[fate])]
    is_timed = any(each.seconds for each in whole.values())
    header = ["module"]
    for fate in shown:
        header += [_TITLES.get(fate, fate), "time"] if is_timed else [_TITLES.get(fate, fate)]
    sums = [(name, sums_of(members)) for name, members in named] + [("in all", whole)]
    cells = [_sum_cells(each, shown, is_timed) for _, each in sums]
    widths = [max(map(len, column)) for column in zip(header[1:], *cells, strict=True)]
    room = max(_NAME, _TABLE - sum(widths) - 2 * len(widths))
    lines = [[_fitted(name, room), *each] for (name, _), each in zip(sums, cells, strict=True)]
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


# --- plans ----------------------------------------------------------------------------------------


def table(report: PlanReport) -> str:
    """A plan: its figures, the parts of its peak, and the fates of its modules."""
    notes = map(wrapped, report.notes)
    parts = [
        head_text(heading(report), figures(report)),
        _parts(report),
        modules_table(report.rows),
        *notes,
    ]
    return "\n\n".join(filter(None, parts))


def frontier_table(report: PlanReport) -> str:
    """The plans of a frontier and the baselines, the lowest peak first."""
    shown = _spread_out(sorted(report.points, key=lambda point: (point.peak, point.seconds)))
    lines = [
        (_short(point.name), *point_cells(point, report), _KINDS.get(point.kind, point.kind))
        for point in shown
    ]
    header = ("", "peak", "of plain", "step", "vs plain", "")
    text = columns(header, lines, left=("",)) if lines else "There is no plan."
    notes = list(report.notes)
    if left := len(report.points) - len(shown):
        notes.insert(0, f"{left} more plans lie between these. The page shows all.")
    return "\n\n".join([head_text(heading(report), figures(report)), text, *map(wrapped, notes)])


def _spread_out(points: Sequence[Point]) -> list[Point]:
    """The points, in the order of their peaks, without plans that are close to another one."""
    if not points:
        return []
    apart = (points[-1].peak - points[0].peak) / _PLANS
    shown: list[Point] = []
    last = -math.inf
    for point in points:
        if point.kind == "plan":
            if point.peak < last + apart:
                continue
            last = point.peak
        shown.append(point)
    return shown


def head_text(title: str, found: Sequence[Figure]) -> str:
    """A title, and figures below it."""
    label = max(len(figure.label) for figure in found)
    value = max(len(figure.value) for figure in found)
    lines = [
        f"  {figure.label:<{label}}  {figure.value:>{value}}  {figure.remark}".rstrip()
        for figure in found
    ]
    return "\n".join([title, "", *lines])


def _parts(report: PlanReport) -> str:
    whole = sum(nbytes for _, nbytes in report.parts)
    lines = [
        (_short(name), bytes_text(nbytes), percent_text(nbytes / whole) if whole else "")
        for name, nbytes in report.parts
    ]
    header = ("at the peak", "memory", "share")
    return columns(header, lines, left=header[:1]) if lines else ""


def wrapped(note: str) -> str:
    """A note in lines that fit a terminal."""
    return textwrap.fill(note, _WIDTH)


def _fitted(path: str, width: int) -> str:
    """A path with ranges of numbers, without the inner ones if it is too wide."""
    parts = [part.split(",") for part in path.split(".")]
    while len(shown := ".".join(map(",".join, parts))) > width:
        ranges = max(parts, key=len)
        if len(ranges) < 3 or (len(ranges) == 3 and ranges[1] == "..."):
            return _short(shown, width)
        ranges[-3 if ranges[-2] == "..." else -2 :] = ["...", ranges[-1]]
    return shown


def _short(name: str, width: int = _NAME) -> str:
    if len(name) <= width:
        return name
    half = (width - 3) // 2
    return f"{name[:half]}...{name[-half:]}"
