"""What the script of the page draws, as JSON that may stand inside a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from recollect.report.curves import thinned
from recollect.report.grouping import CHOICES
from recollect.report.plan_report import Picture, Point, Row

__all__ = ["script_data", "shown_points"]

#: As many as a wide screen has columns for a chart.
_BUCKETS = 1000


def script_data(picture: Picture) -> str:
    """The curves, the points and the rows, without any ``<`` that could end the script."""
    texts: dict[str, int] = {}
    data = {
        "budget": picture.budget,
        "plain_time": picture.plain_time,
        "curves": [
            _curve(name, kind, curve)
            for name, kind, curve in (
                ("plain", "before", picture.before),
                ("with the plan", "after", picture.after),
            )
            if curve
        ],
        "points": [_point(point) for point in shown_points(picture)],
        "rows": [_row(row, texts) for row in picture.rows],
        "texts": list(texts),
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shown_points(picture: Picture) -> list[Point]:
    """The points whose time is known, from the least peak to the largest."""
    known = [point for point in picture.points if math.isfinite(point.seconds)]
    return sorted(known, key=lambda point: (point.peak, point.seconds))


def _curve(name: str, kind: str, curve: Sequence[tuple[float, int]]) -> dict[str, Any]:
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
    return [path, op, CHOICES.index(row.choice), row.nbytes, _short(row.seconds), reason]


def _short(seconds: float) -> float:
    """Seven digits: a tenth of a microsecond in a second, and half the page."""
    return float(f"{seconds:.7g}")
