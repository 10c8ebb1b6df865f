"""A plan or a frontier as one HTML page, which needs nothing but itself.

Head, tiles, notes and small tables are written here and can be read without a script. The charts
and the tree of modules are drawn by the script of the page, from the data that stand in it. The
page allows itself that one script, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from html import escape
from importlib import resources
from string import Template

from recollect.report.plan_report import PlanReport, Point
from recollect.report.script import PLANNED, script_data, shown_points
from recollect.report.table import table
from recollect.report.units import bytes_text, percent_text, seconds_text
from recollect.report.words import Figure, figures, heading, longer_text, summary

__all__ = ["page"]

_SCRIPTS = ("units.js", "charts.js", "tree.js", "page.js")
_COLOURS = 7

#: What is filled into a section; None if the section does not apply.
_Fields = dict[str, str] | None


def page(report: PlanReport) -> str:
    """The whole page; write it to a file as UTF-8."""
    script = "\n".join(map(_asset, _SCRIPTS))
    _, *named = re.split(r"<!-- (\w+) -->\n", _asset("sections.html"))
    templates = dict(zip(named[::2], named[1::2], strict=True))
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
    sections = [Template(templates[n]).substitute(f) for n, f in fields.items() if f is not None]
    return Template(_asset("page.html")).substitute(
        heading=escape(heading(report)),
        hash=_hash(script),
        style=_asset("page.css"),
        body="".join(sections),
        data=script_data(report),
        script=script,
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
    points = shown_points(report)
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
    share = percent_text(point.peak / report.plain_peak) if report.plain_peak else ""
    longer = longer_text(point.seconds, report.plain_time)
    cells = (bytes_text(point.peak), share, seconds_text(point.seconds), longer)
    data = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
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
    sums = {fate: sum(row.bytes for row in report.rows if row.fate == fate) for fate in PLANNED}
    keys = [(f, "", f"{f} <b>{bytes_text(nbytes)}</b>", True) for f, nbytes in sums.items()]
    return {"legend": _legend(keys)}


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
