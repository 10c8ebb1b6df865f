"""A plan or a frontier as one HTML page, which needs nothing but itself.

Head, tiles, notes and small tables are written here and can be read without a script. The charts
and the tree of modules are drawn by the script of the page, from the data that stand in it. The
page allows itself that one script, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from importlib import resources
from string import Template

from recollect.report.grouping import CHOICES
from recollect.report.plan_report import Picture, Point
from recollect.report.script import script_data, shown_points
from recollect.report.table import table
from recollect.report.units import bytes_text, percent_text, seconds_text
from recollect.report.words import Figure, figures, heading, longer_text, summary

__all__ = ["page"]

_SCRIPTS = ("units.js", "charts.js", "tree.js", "page.js")
_COLOURS = 7


def page(picture: Picture) -> str:
    """The whole page; write it to a file as UTF-8."""
    script = "\n".join(map(_asset, _SCRIPTS))
    sections = (_head, _tiles, _memory, _frontier, _parts, _modules, _notes, _without_script)
    return Template(_asset("page.html")).substitute(
        heading=escape(heading(picture)),
        hash=_hash(script),
        style=_asset("page.css"),
        body="\n".join(filter(None, (section(picture) for section in sections))),
        data=script_data(picture),
        script=script,
    )


def _asset(name: str) -> str:
    return resources.files("recollect.report").joinpath("assets", name).read_text("utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


# --- sections: each is empty if it does not apply -------------------------------------------------


def _head(picture: Picture) -> str:
    what = (
        "Frontier of the training step" if picture.budget is None else "Training step under a plan"
    )
    return f"""<header>
<p class="eyebrow">{what}</p>
<h1>{escape(picture.title)} <span class="device">on {escape(picture.device)}</span></h1>
<p class="lede">{escape(summary(picture))}</p>
</header>"""


def _tiles(picture: Picture) -> str:
    tiles = "\n".join(map(_tile, figures(picture)))
    return f'<dl class="tiles" aria-label="Figures">\n{tiles}\n</dl>'


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


def _memory(picture: Picture) -> str:
    if not (picture.before or picture.after):
        return ""
    keys = [
        ("before", "line", "plain", bool(picture.before)),
        ("after", "line", "with the plan", bool(picture.after)),
        ("budget", "dash", "budget", picture.budget is not None),
    ]
    return f"""<section class="card" aria-labelledby="memory-title">
<div class="head"><h2 id="memory-title">Memory over the step</h2>{_legend(keys)}</div>
<p>Bytes allocated on the device, from the start of forward to the end of backward.</p>
{_chart("memory", "Memory over the step: arrow keys move through time")}
</section>"""


def _frontier(picture: Picture) -> str:
    points = shown_points(picture)
    if len(points) < 2:
        return ""
    kinds = {point.kind for point in points}
    keys = [
        ("plan", "line", "plans of recollect", bool(kinds & {"plan", "chosen"})),
        ("peer", "diamond", "other ways", "peer" in kinds),
        ("plain", "box", "plain", "plain" in kinds),
    ]
    rows = "\n".join(_point_row(point, picture) for point in points)
    return f"""<section class="card" aria-labelledby="frontier-title">
<div class="head"><h2 id="frontier-title">Memory against time</h2>{_legend(keys)}</div>
<p>Every point is a way to run the step. Further left needs less memory, further down less time.</p>
{_chart("frontier", "Memory against time: arrow keys move from point to point")}
<ul class="legend key" id="frontier-key" hidden></ul>
<details><summary>The same as a table</summary>
<table><thead><tr><th scope="col">way</th><th scope="col">peak</th><th scope="col">of plain</th>
<th scope="col">step</th><th scope="col">vs plain</th></tr></thead>
<tbody>
{rows}
</tbody></table></details>
</section>"""


def _point_row(point: Point, picture: Picture) -> str:
    share = percent_text(point.peak / picture.plain_peak) if picture.plain_peak else ""
    longer = longer_text(point.seconds, picture.plain_time)
    cells = (bytes_text(point.peak), share, seconds_text(point.seconds), longer)
    data = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr class="{escape(point.kind)}"><th scope="row">{escape(point.name)}</th>{data}</tr>'


def _parts(picture: Picture) -> str:
    whole = sum(nbytes for _, nbytes in picture.parts)
    if not whole:
        return ""
    # flex-grow is the one measure that lets the parts fill the bar, whatever their sum.
    bar = "".join(
        f'<i class="c{n % _COLOURS}" style="flex-grow:{nbytes / whole:.6f}"></i>'
        for n, (_, nbytes) in enumerate(picture.parts)
    )
    items = "\n".join(
        f'<li><span class="what"><i class="swatch c{n % _COLOURS}"></i>{escape(name)}</span>'
        f"{bytes_text(nbytes)}"
        f'<span class="share">{escape(percent_text(nbytes / whole))}</span></li>'
        for n, (name, nbytes) in enumerate(picture.parts)
    )
    return f"""<section class="card" aria-labelledby="parts-title">
<h2 id="parts-title">What the peak is made of</h2>
<div class="stack" aria-hidden="true">{bar}</div>
<ul class="parts">
{items}
</ul>
</section>"""


def _modules(picture: Picture) -> str:
    if not picture.rows:
        return ""
    titles = [("order", "module"), ("total", "in all")]
    titles += zip(CHOICES, ("kept", "recomputed", "offloaded"), strict=True)
    head = "".join(
        f'<th scope="col" data-by="{by}"><button type="button">{title}</button></th>'
        for by, title in titles
    )
    sums = [sum(row.nbytes for row in picture.rows if row.choice == c) for c in CHOICES]
    keys = [
        (choice, "", f"{title} <b>{bytes_text(nbytes)}</b>", True)
        for (choice, title), nbytes in zip(titles[2:], sums, strict=True)
    ]
    return f"""<section class="card" aria-labelledby="modules-title">
<div class="head"><h2 id="modules-title">What becomes of every module</h2>{_legend(keys)}</div>
<p>Bytes of the results that backward needs, and the time that their ops take; that of recomputed
ones is spent once more. A bar compares a module with its siblings.</p>
<div class="tools">
<input id="filter" type="search" placeholder="Filter by module, op, choice or reason"
 aria-label="Filter by module, op, choice or reason" autocomplete="off" spellcheck="false">
<button type="button" id="expand">Expand all</button>
<button type="button" id="collapse">Collapse all</button>
<output id="matches" for="filter"></output>
</div>
<table class="tree" id="modules" role="table" aria-labelledby="modules-title">
<colgroup><col class="c-name"><col class="c-bar"><col><col><col></colgroup>
<thead role="rowgroup"><tr role="row">{head}</tr></thead>
<tbody role="rowgroup"></tbody>
</table>
</section>"""


def _notes(picture: Picture) -> str:
    if not picture.notes:
        return ""
    items = "\n".join(f"<li>{escape(note)}</li>" for note in picture.notes)
    return f"""<section class="card notes" aria-labelledby="notes-title">
<h2 id="notes-title">Notes</h2>
<ul>
{items}
</ul>
</section>"""


def _without_script(picture: Picture) -> str:
    return f"<noscript><pre>{escape(table(picture))}</pre></noscript>"


# --- pieces ---------------------------------------------------------------------------------------


def _legend(keys: Iterable[tuple[str, str, str, bool]]) -> str:
    """Of kind, shape and text; the text is ours and may be HTML."""
    items = "".join(
        f'<li class="{kind}"><i class="swatch {shape}"></i>{text}</li>'
        for kind, shape, text, is_shown in keys
        if is_shown
    )
    return f'<ul class="legend">{items}</ul>'


def _chart(name: str, label: str) -> str:
    """A place for a chart: to a screen reader a slider that says what it stands at."""
    return (
        f'<div class="chart" id="{name}" tabindex="0" role="slider" aria-label="{label}" '
        'aria-valuemin="0" aria-valuemax="0" aria-valuenow="0"></div>'
    )
