"""The data that the script of a page draws: curves, points and rows, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from recollect.report.plan_report import Mark, PlanReport, Point, Stack
from recollect.report.rows import Row
from recollect.report.sizes import SizesReport

#: The fates that a plan chooses from, and those that a forward ends in, as the page shows them.
PLANNED = ("kept", "recomputed", "offloaded")
HELD = ("kept", "input", "recomputed", "offloaded")
#: As many as a wide screen has columns for a chart.
_BUCKETS = 1000

_Curve = Sequence[tuple[float, int]]
_Step = tuple[str, str, _Curve, Sequence[Mark], Stack]


def as_json(data: dict[str, Any]) -> str:
    """The data of the script, without any ``<`` that could end it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def sizes_data(report: SizesReport) -> dict[str, Any]:
    """The sizes whose throughput is known."""
    return {
        "chosen": report.size,
        "plain_size": report.plain_size,
        "sizes": [
            {
                "size": point.size,
                "rate": _short(point.samples_per_second),
                "peak": point.plain_peak if point.peak is None else point.peak,
                "kind": "chosen" if point.size == report.size else point.kind,
            }
            for point in report.points
            if point.samples_per_second is not None and point.fits
        ],
    }


def plan_data(report: PlanReport) -> dict[str, Any]:
    """The curves, the points and the rows."""
    return {
        "budget": report.budget,
        "plain_time": report.plain_time,
        "curves": [
            _curve(name, kind, curve, marks)
            for name, kind, curve, marks, _ in steps_of(report)
            if curve
        ],
        "stacks": [
            _stack(name, stack, marks)
            for name, _, _, marks, stack in steps_of(report)
            if stack.bands
        ],
        "points": [vars(point) for point in shown_points(report)],
        **rows_data(report.rows, PLANNED),
    }


def steps_of(report: PlanReport) -> tuple[_Step, ...]:
    """The plain step and the planned one: name, kind, curve, marks and stack."""
    name = "plan of the least peak" if report.budget is None else "with the plan"
    return (
        ("plain", "before", report.before, report.before_marks, report.before_stack),
        (name, "after", report.after, report.after_marks, report.after_stack),
    )


def rows_data(rows: Sequence[Row], fates: Sequence[str]) -> dict[str, Any]:
    """Rows, with indices in place of texts, since most texts occur many times."""
    texts: dict[str, int] = {}
    found = [_row(row, texts, fates) for row in rows]
    return {"fates": fates, "rows": found, "texts": list(texts)}


def shown_points(report: PlanReport) -> list[Point]:
    """The points whose time is known, from the least peak to the largest.

    Plans that another one beats are left out: the chosen one may have been measured to be faster
    than predicted.
    """
    known = [point for point in report.points if math.isfinite(point.seconds)]
    known.sort(key=lambda point: (point.peak, point.seconds))
    best, shown = math.inf, []
    for point in known:
        if point.kind in ("plan", "chosen"):
            if point.kind == "plan" and point.seconds > best:
                continue
            best = min(best, point.seconds)
        shown.append(point)
    return shown


def comparison_data(
    first: PlanReport, second: PlanReport, names: tuple[str, str]
) -> dict[str, Any]:
    """The curves of two plans."""
    return {
        "budget": None,
        "curves": [
            _curve(name, kind, report.after, report.after_marks)
            for name, kind, report in zip(names, ("first", "second"), (first, second), strict=True)
            if report.after
        ],
    }


def _stack(name: str, stack: Stack, marks: Sequence[Mark]) -> dict[str, Any]:
    """Memory by module: the fixed parts first, then modules in the order of forward."""
    return {
        "name": name,
        "times": stack.seconds,
        **_phases(marks),
        "bands": [
            ["parameters, optimizer state", "c0", [stack.base] * len(stack.seconds)],
            ["gradients, loss, workspace", "c1", stack.fixed],
            *([band.name, "", band.bytes] for band in stack.bands),
        ],
        "out": stack.out,
        "back": stack.back,
    }


def _phases(marks: Sequence[Mark]) -> dict[str, float | None]:
    """When backward begins, and when it is over, if the step goes on."""
    turn = next((mark.seconds for mark in marks if mark.is_backward), None)
    after = [mark for mark in marks if turn is not None and mark.seconds >= turn]
    over = next((mark.seconds for mark in after if not mark.is_backward), None)
    return {"turn": turn, "over": over}


def _curve(name: str, kind: str, curve: _Curve, marks: Sequence[Mark]) -> dict[str, Any]:
    points = thinned(curve, _BUCKETS)
    time, peak = max(points, key=lambda point: point[1])
    texts: dict[str, int] = {}
    return {
        "name": name,
        "kind": kind,
        **_phases(marks),
        "marks": [
            [mark.seconds, *(texts.setdefault(text, len(texts)) for text in (mark.path, mark.op))]
            for mark in marks
        ],
        "texts": list(texts),
        "times": [_short(time) for time, _ in points],
        "bytes": [nbytes for _, nbytes in points],
        "peak": [_short(time), peak],
    }


def _row(row: Row, texts: dict[str, int], fates: Sequence[str]) -> list[float]:
    path, op, reason = (texts.setdefault(t, len(texts)) for t in (row.path, row.op, row.reason))
    return [path, op, fates.index(row.fate), row.bytes, _short(row.seconds), reason]


def _short(seconds: float) -> float:
    """Seven digits: a tenth of a microsecond in a second, and half the page."""
    return float(f"{seconds:.7g}")


# --- curves with no more points than a screen can show -------------------------------------------


def thinned(curve: _Curve, buckets: int) -> list[tuple[float, int]]:
    """``curve`` with at most four points in each of ``buckets`` equal spans of time.

    The first, the last, the highest and the lowest of each are those that can be seen, and the
    peak of the whole is among them, where it was.
    """
    if len(curve) <= 4 * buckets:
        return list(curve)
    start, end = curve[0][0], curve[-1][0]
    width = (end - start) / buckets or 1.0
    spans = groupby(curve, lambda point: min(int((point[0] - start) / width), buckets - 1))
    return [point for _, span in spans for point in _extremes(list(span))]


def _extremes(points: _Curve) -> list[tuple[float, int]]:
    order = range(len(points))
    highest = max(order, key=lambda n: points[n][1])
    lowest = min(order, key=lambda n: points[n][1])
    return [points[n] for n in sorted({0, lowest, highest, len(points) - 1})]
