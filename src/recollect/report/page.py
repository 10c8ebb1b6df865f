"""A plan, a frontier or a search for the largest batch as one HTML page, which needs nothing else.

Head, tiles, notes and small tables are written here and can be read without a script. The charts
and the tree of modules are drawn by the script of the page, from the data that stand in it. The
page allows itself that one script, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from string import Template
from typing import Any

from recollect.report.plan_report import (
    Figure,
    PlanReport,
    Point,
    figures,
    heading,
    point_cells,
    summary,
)
from recollect.report.rows import Row, sums_of
from recollect.report.sizes import (
    SIZES_HEADER,
    SizesReport,
    size_cells,
    sizes_figures,
    sizes_heading,
    sizes_summary,
    sizes_table,
)
from recollect.report.table import table
from recollect.report.units import bytes_text, percent_text

__all__ = ["page", "sizes_page", "thinned"]

_SCRIPTS = ("units.js", "charts.js", "tree.js", "page.js")
_COLOURS = 7

#: The fates that a plan chooses from, in the order in which the page shows them.
_PLANNED = ("kept", "recomputed", "offloaded")
#: As many as a wide screen has columns for a chart.
_BUCKETS = 1000

#: What is filled into a section; None if the section does not apply.
_Fields = dict[str, str] | None
_Curve = Sequence[tuple[float, int]]


def page(report: PlanReport) -> str:
    """The whole page; write it to a file as UTF-8."""
    fields: dict[str, _Fields] = {
        "head": _head(report),
        "tiles": {"tiles": "\n".join(map(_tile, figures(report)))},
        "memory": _memory(report),
        "frontier": _frontier(report),
        "parts": _parts(report),
        "modules": _modules(report),
        "notes": _notes(report),
        "noscript": {"table": escape(table(report))},
    }
    origin = "Figures are predictions from one recorded step."
    return _document(heading(report), fields, _plan_data(report), origin)


def sizes_page(report: SizesReport) -> str:
    """The page of a search for the largest batch."""
    fields: dict[str, _Fields] = {
        "head": {
            "what": "The largest batch within a budget",
            "title": escape(report.title),
            "device": escape(report.device),
            "summary": escape(sizes_summary(report)),
        },
        "tiles": {"tiles": "\n".join(map(_tile, sizes_figures(report)))},
        "sizes": _sizes(report),
        "noscript": {"table": escape(sizes_table(report))},
    }
    origin = "Figures are measured, where it does not say that they are predicted."
    return _document(sizes_heading(report), fields, _sizes_data(report), origin)


def _document(title: str, fields: dict[str, _Fields], data: dict[str, Any], origin: str) -> str:
    """A page of sections, and of the ``data`` that its script draws."""
    script = "\n".join(map(_asset, _SCRIPTS))
    _, *named = re.split(r"<!-- (\w+) -->\n", _asset("sections.html"))
    templates = dict(zip(named[::2], named[1::2], strict=True))
    sections = [Template(templates[n]).substitute(f) for n, f in fields.items() if f is not None]
    return Template(_asset("page.html")).substitute(
        heading=escape(title),
        hash=_hash(script),
        style=_asset("page.css"),
        body="".join(sections),
        data=_as_json(data),
        script=script,
        origin=origin,
    )


def _asset(name: str) -> str:
    return resources.files("recollect.report").joinpath("assets", name).read_text("utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


# --- sections -------------------------------------------------------------------------------------


def _head(report: PlanReport) -> _Fields:
    is_frontier = report.budget is None
    return {
        "what": "Frontier of the training step" if is_frontier else "Training step under a plan",
        "title": escape(report.title),
        "device": escape(report.device),
        "summary": escape(summary(report)),
    }


def _tile(figure: Figure) -> str:
    gauge = remark = ""
    if figure.share is not None:
        width = f"{min(figure.share, 1):.1%}"
        gauge = f'<div class="gauge" aria-hidden="true"><i style="width:{width}"></i></div>'
    if figure.remark:
        remark = f'<div class="remark">{escape(figure.remark)}</div>'
    return (
        f'<div class="tile"><dt>{escape(figure.label)}</dt>'
        f'<dd><div class="value">{escape(figure.value)}</div>{gauge}{remark}</dd></div>'
    )


def _memory(report: PlanReport) -> _Fields:
    if not (report.before or report.after):
        return None
    keys = [
        ("before", "line", "plain", bool(report.before)),
        ("after", "line", "with the plan", bool(report.after)),
        ("budget", "dash", "budget", report.budget is not None),
    ]
    return {"legend": _legend(keys)}


def _frontier(report: PlanReport) -> _Fields:
    points = _shown_points(report)
    if len(points) < 2:
        return None
    kinds = {point.kind for point in points}
    keys = [
        ("plan", "line", "plans of recollect", bool(kinds & {"plan", "chosen"})),
        ("peer", "diamond", "other ways", "peer" in kinds),
        ("plain", "box", "plain", "plain" in kinds),
    ]
    rows = "\n".join(_point_row(point, report) for point in points)
    return {"legend": _legend(keys), "rows": rows}


def _point_row(point: Point, report: PlanReport) -> str:
    data = "".join(f"<td>{escape(cell)}</td>" for cell in point_cells(point, report))
    return f'<tr class="{escape(point.kind)}"><th scope="row">{escape(point.name)}</th>{data}</tr>'


def _parts(report: PlanReport) -> _Fields:
    whole = sum(nbytes for _, nbytes in report.parts)
    if not whole:
        return None
    # flex-grow is the one measure that lets the parts fill the bar, whatever their sum.
    bar = "".join(
        f'<i class="c{n % _COLOURS}" style="flex-grow:{nbytes / whole:.6f}"></i>'
        for n, (_, nbytes) in enumerate(report.parts)
    )
    items = "\n".join(
        f'<li><span class="what"><i class="swatch c{n % _COLOURS}"></i>{escape(name)}</span>'
        f"{bytes_text(nbytes)}"
        f'<span class="share">{escape(percent_text(nbytes / whole))}</span></li>'
        for n, (name, nbytes) in enumerate(report.parts)
    )
    return {"bar": bar, "items": items}


def _modules(report: PlanReport) -> _Fields:
    if not report.rows:
        return None
    sums = sums_of(report.rows)
    keys = [(f, "", f"{f} <b>{bytes_text(sums[f].bytes)}</b>", True) for f in _PLANNED]
    return {"legend": _legend(keys)}


def _sizes(report: SizesReport) -> _Fields:
    kinds = {point.kind for point in report.points if point.fits}
    keys = [
        ("plain", "box", "without a plan", "plain" in kinds),
        ("plan", "", "under a plan", True),
        ("peer", "diamond", "predicted", "predicted" in kinds),
    ]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in SIZES_HEADER)
    rows = []
    for point in report.points:
        first, *others = size_cells(point, report)
        data = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        kind = "chosen" if point.size == report.size else point.kind
        rows.append(f'<tr class="{kind}"><th scope="row">{escape(first)}</th>{data}</tr>')
    return {"legend": _legend(keys), "header": head, "rows": "\n".join(rows)}


def _notes(report: PlanReport) -> _Fields:
    items = "\n".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return {"items": items} if items else None


def _legend(keys: Iterable[tuple[str, str, str, bool]]) -> str:
    """Of kind, shape and text; the text is ours and may be HTML."""
    items = "".join(
        f'<li class="{kind}"><i class="swatch {shape}"></i>{text}</li>'
        for kind, shape, text, is_shown in keys
        if is_shown
    )
    return f'<ul class="legend">{items}</ul>'


# --- what the script draws ------------------------------------------------------------------------


def _as_json(data: dict[str, Any]) -> str:
    """The data of the script, without any ``<`` that could end it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sizes_data(report: SizesReport) -> dict[str, Any]:
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


def _plan_data(report: PlanReport) -> dict[str, Any]:
    """The curves, the points and the rows."""
    texts: dict[str, int] = {}
    return {
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
        "points": [vars(point) for point in _shown_points(report)],
        "rows": [_row(row, texts) for row in report.rows],
        "texts": list(texts),
    }


def _shown_points(report: PlanReport) -> list[Point]:
    """The points whose time is known, from the least peak to the largest."""
    known = [point for point in report.points if math.isfinite(point.seconds)]
    return sorted(known, key=lambda point: (point.peak, point.seconds))


def _curve(name: str, kind: str, curve: _Curve) -> dict[str, Any]:
    points = thinned(curve, _BUCKETS)
    time, peak = max(points, key=lambda point: point[1])
    return {
        "name": name,
        "kind": kind,
        "times": [_short(time) for time, _ in points],
        "bytes": [nbytes for _, nbytes in points],
        "peak": [_short(time), peak],
    }


def _row(row: Row, texts: dict[str, int]) -> list[float]:
    """A row with indices into ``texts`` in place of its texts, most of which occur many times."""
    path, op, reason = (texts.setdefault(t, len(texts)) for t in (row.path, row.op, row.reason))
    return [path, op, _PLANNED.index(row.fate), row.bytes, _short(row.seconds), reason]


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
    return [point for _, span in spans for point in _telling(list(span))]


def _telling(points: _Curve) -> list[tuple[float, int]]:
    """The first, the last, the highest and the lowest, in their order."""
    order = range(len(points))
    highest = max(order, key=lambda n: points[n][1])
    lowest = min(order, key=lambda n: points[n][1])
    return [points[n] for n in sorted({0, lowest, highest, len(points) - 1})]
