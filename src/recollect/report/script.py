"""What the script of the page draws, as JSON that may stand inside a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from recollect.report.plan_report import PlanReport, Point
from recollect.report.rows import Row

__all__ = ["PLANNED", "script_data", "shown_points", "thinned"]

#: The fates that a plan chooses from, in the order in which the page shows them.
PLANNED = ("kept", "recomputed", "offloaded")

Curve = Sequence[tuple[float, int]]

#: As many as a wide screen has columns for a chart.
_BUCKETS = 1000


def script_data(report: PlanReport) -> str:
    """The curves, the points and the rows, without any ``<`` that could end the script."""
    texts: dict[str, int] = {}
    data = {
        "budget": report.budget,
        "plain_time": report.plain_time,
        "curves": [
            _curve(name, kind, curve)
            for name, kind, curve in (
                ("plain", "before", report.before),
                ("with the plan", "after", report.after),
            )
            if curve
        ],
        "points": [_point(point) for point in shown_points(report)],
        "rows": [_row(row, texts) for row in report.rows],
        "texts": list(texts),
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shown_points(report: PlanReport) -> list[Point]:
    """The points whose time is known, from the least peak to the largest."""
    known = [point for point in report.points if math.isfinite(point.seconds)]
    return sorted(known, key=lambda point: (point.peak, point.seconds))


def _curve(name: str, kind: str, curve: Curve) -> dict[str, Any]:
    points = thinned(curve, _BUCKETS)
    time, peak = max(points, key=lambda point: point[1])
    return {
        "name": name,
        "kind": kind,
        "times": [_short(time) for time, _ in points],
        "bytes": [nbytes for _, nbytes in points],
        "peak": [_short(time), peak],
    }


def _point(point: Point) -> dict[str, Any]:
    return {
        "name": point.name,
        "peak": point.peak,
        "seconds": point.seconds,
        "kind": point.kind,
    }


def _row(row: Row, texts: dict[str, int]) -> list[float]:
    """A row whose texts are numbers: most of them occur many times."""
    path, op, reason = (texts.setdefault(t, len(texts)) for t in (row.path, row.op, row.reason))
    return [path, op, PLANNED.index(row.fate), row.bytes, _short(row.seconds), reason]


def _short(seconds: float) -> float:
    """Seven digits: a tenth of a microsecond in a second, and half the page."""
    return float(f"{seconds:.7g}")


# --- curves with no more points than a screen can show -------------------------------------------


def thinned(curve: Curve, buckets: int) -> list[tuple[float, int]]:
    """``curve`` with at most four points in each of ``buckets`` equal spans of time.

    The first, the last, the highest and the lowest of each are those that can be seen, and the
    peak of the whole is among them, where it was.
    """
    if len(curve) <= 4 * buckets:
        return list(curve)
    start, end = curve[0][0], curve[-1][0]
    width = (end - start) / buckets or 1.0
    spans = groupby(curve, lambda point: min(int((point[0] - start) / width), buckets - 1))
    return [point for _, span in spans for point in _telling(list(span))]


def _telling(points: Curve) -> list[tuple[float, int]]:
    """The first, the last, the highest and the lowest, in their order."""
    order = range(len(points))
    highest = max(order, key=lambda n: points[n][1])
    lowest = min(order, key=lambda n: points[n][1])
    return [points[n] for n in sorted({0, lowest, highest, len(points) - 1})]
