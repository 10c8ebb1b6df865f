"""Plans, frontiers, searches for the largest batch and explanations as HTML pages.

A page is one file, and requests nothing. Head, tiles, notes and small tables are HTML. The charts
and the tree of modules are drawn by the script of the page from its data. Its policy allows that
one script, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from recollect.report.page_data import (
    HELD,
    PLANNED,
    as_json,
    comparison_data,
    plan_data,
    rows_data,
    shown_points,
    sizes_data,
    steps_of,
)
from recollect.report.plan_report import Figure, PlanReport, figures, heading, point_cells, summary
from recollect.report.rows import Row, common_text, lists_by, pattern, sums_of
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

_SCRIPTS = ("units.js", "charts.js", "stack.js", "tree.js", "page.js")
_COLOURS = 7
#: How many of the largest tensors are listed.
_LARGEST = 5

_PLAN_MODULES = """\
Bytes of the results that backward needs, and the time of their ops; recomputed ops spend it once
more. Equal layers are one row. A bar compares a module with its siblings."""
_TRIED = "Sizes that are marked as predicted were not run."
_PREDICTED = "Figures that are not marked as measured are predicted from one recorded step."
_HELD_MODULES = (
    "Bytes held on the device (inputs of regions included), recomputed in backward, and held by "
    "stores."
)

#: The fields of a section; None to leave it out.
_Fields = dict[str, str] | None


def page(report: PlanReport) -> str:
    """The whole page; write it to a file as UTF-8."""
    is_frontier = report.budget is None
    what = "Frontier of the training step" if is_frontier else "Training step under a plan"
    fields: dict[str, _Fields] = {
        "head": _head(what, report.title, report.device, summary(report)),
        "tiles": _tiles(figures(report)),
        "memory": _memory(report),
        "stack": _stack(report),
        "frontier": _frontier(report),
        "parts": _parts(report),
        "largest": _largest(report.rows),
        "modules": _modules(report.rows, PLANNED, _PLAN_MODULES),
        "notes": _notes(report.notes),
        "noscript": {"table": escape(table(report))},
    }
    return _document(heading(report), fields, plan_data(report), _made_with(report))


def explanation_page(
    tiles: Sequence[Figure], rows: Sequence[Row], remarks: Sequence[str], regions: int, text: str
) -> str:
    """The page of what one forward holds."""
    held = [row for row in rows if row.fate in HELD and row.bytes]
    calls = "One checkpointed region ran" if regions == 1 else f"{regions} checkpointed regions ran"
    fields: dict[str, _Fields] = {
        "head": {
            "what": "What one forward holds until backward",
            "title": tiles[0].value,
            "device": "held after forward",
            "summary": f"{calls}. Parameters, buffers and other memory from before forward do not "
            "count.",
        },
        "tiles": _tiles(tiles),
        "largest": _largest(held),
        "modules": _modules(held, HELD, _HELD_MODULES),
        "notes": _notes(remarks),
        "noscript": {"table": escape(text)},
    }
    title = f"{tiles[0].value} held after forward"
    return _document(title, fields, rows_data(held, HELD), "Measured in one forward.")


def comparison_page(
    first: PlanReport,
    second: PlanReport,
    names: tuple[str, str],
    compared: Sequence[tuple[str, str, str]],
    changes: Sequence[tuple[str, str, str, str, str]],
    text: str,
) -> str:
    """The page of two plans side by side."""
    same = first.title == second.title and first.device == second.device
    keys = [("first", "line", escape(names[0]), True), ("second", "line", escape(names[1]), True)]
    title, *_ = text.splitlines()
    models = first.title if same else f"{first.title} and {second.title}"
    about = f"The training step under two plans: {names[0]} and {names[1]}."
    fields: dict[str, _Fields] = {
        "head": _head("Two plans side by side", models, first.device, about),
        "compared": {"header": _header(("", *names)), "rows": _body(compared)},
        "memory": {"legend": _legend(keys)} if first.after and second.after else None,
        "changes": {
            "header": _header(("module", "op", "memory", *names)),
            "rows": _body(changes)
            or '<tr><td colspan="5">Nothing: both plans treat every op alike.</td></tr>',
        },
        "noscript": {"table": escape(text)},
    }
    return _document(title, fields, comparison_data(first, second, names), _made_with(second))


def sizes_page(report: SizesReport) -> str:
    """The page of a search for the largest batch."""
    what = "The largest batch within a budget"
    fields: dict[str, _Fields] = {
        "head": _head(what, report.title, report.device, sizes_summary(report)),
        "tiles": _tiles(sizes_figures(report)),
        "sizes": _sizes(report),
        "noscript": {"table": escape(sizes_table(report))},
    }
    return _document(sizes_heading(report), fields, sizes_data(report), _TRIED)


class HasPage:
    """A result that a page shows."""

    def to_html(self, path: str | Path) -> None:
        """Write a page that shows this, for any browser, in one file."""
        Path(path).write_text(self._page(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """The page for a notebook, in a frame: neither can change the looks of the other."""
        return (
            f'<iframe srcdoc="{escape(self._page())}" sandbox="allow-scripts" title="recollect" '
            'style="width:100%;height:640px;border:1px solid #8884;border-radius:6px"></iframe>'
        )

    def _page(self) -> str:
        raise NotImplementedError


def _document(title: str, fields: dict[str, _Fields], data: dict[str, Any], remark: str) -> str:
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
        data=as_json(data),
        script=script,
        remark=escape(remark),
    )


def _made_with(report: PlanReport) -> str:
    return f"Made with {report.origin}. {_PREDICTED}" if report.origin else _PREDICTED


def _asset(name: str) -> str:
    return resources.files("recollect.report").joinpath("assets", name).read_text("utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


# --- sections -------------------------------------------------------------------------------------


def _head(what: str, title: str, device: str, text: str) -> _Fields:
    return {
        "what": what,
        "title": escape(title),
        "device": escape(f"on {device}"),
        "summary": escape(text),
    }


def _tiles(shown: Iterable[Figure]) -> _Fields:
    return {"tiles": "\n".join(map(_tile, shown))}


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
    keys = [(kind, "line", name, bool(curve)) for name, kind, curve, *_ in steps_of(report)]
    if not any(is_shown for *_, is_shown in keys):
        return None
    return {"legend": _legend([*keys, ("budget", "dash", "budget", report.budget is not None)])}


def _stack(report: PlanReport) -> _Fields:
    names = [name for name, *_, stack in steps_of(report) if stack.bands]
    buttons = "".join(
        f'<button type="button" aria-pressed="{"true" if name == names[-1] else "false"}">'
        f"{name}</button>"
        for name in names
    )
    return {"buttons": buttons} if names else None


def _frontier(report: PlanReport) -> _Fields:
    points = shown_points(report)
    if len(points) < 2:
        return None
    kinds = {point.kind for point in points}
    keys = [
        ("plan", "line", "plans of recollect", bool(kinds & {"plan", "chosen"})),
        ("baseline", "diamond", "baselines", "baseline" in kinds),
        ("plain", "box", "plain", "plain" in kinds),
    ]
    lines = [(point.name, *point_cells(point, report)) for point in points]
    return {"legend": _legend(keys), "rows": _body(lines, [point.kind for point in points])}


def _parts(report: PlanReport) -> _Fields:
    whole = sum(nbytes for _, nbytes in report.parts)
    if not whole:
        return None
    # flex-grow is the one measure that lets the parts fill the bar, whatever their sum.
    kinds = [_part_kind(n, name) for n, (name, _) in enumerate(report.parts)]
    bar, items = "", []
    for kind, (name, nbytes) in zip(kinds, report.parts, strict=True):
        bar += f'<i class="{kind}" style="flex-grow:{nbytes / whole:.6f}"></i>'
        items.append(
            f'<li><span class="what"><i class="swatch {kind}"></i>{escape(name)}</span>'
            f'{bytes_text(nbytes)}<span class="share">{escape(percent_text(nbytes / whole))}'
            "</span></li>"
        )
    return {"bar": bar, "items": "\n".join(items)}


def _part_kind(number: int, name: str) -> str:
    """The class for a colour: kept and recomputed memory have that of their fate everywhere."""
    fate = name.partition(" ")[0]
    return fate if fate in PLANNED else f"c{number % _COLOURS}"


def _largest(rows: Sequence[Row]) -> _Fields:
    """The largest results, equal ones of several layers on one line."""
    groups = lists_by(
        lambda row: (pattern(row.path), row.op, row.fate, row.bytes),
        [row for row in rows if row.bytes],
    )
    groups.sort(key=lambda group: (-group[0].bytes, -len(group)))
    lines, has_lines = [], any(row.source for group in groups[:_LARGEST] for row in group)
    for group in groups[:_LARGEST]:
        row = group[0]
        name, count = common_text([each.path for each in group]) or "the model itself", len(group)
        times = f"{count} times, {bytes_text(count * row.bytes)} in all" if count > 1 else ""
        lines.append(
            f'<tr><th scope="row"><span class="name">{escape(name)}</span> '
            f'<span class="op">{escape(row.op)}</span></th>'
            f"<td>{bytes_text(row.bytes)}</td><td>{times}</td>"
            f"{_source_cell(group) if has_lines else ''}"
            f'<td class="{row.fate}"><i class="swatch"></i>{escape(row.fate)}</td></tr>'
        )
    line = '<th scope="col">line</th>' if has_lines else ""
    return {"rows": "\n".join(lines), "line": line} if lines else None


def _source_cell(group: Sequence[Row]) -> str:
    """The line of code, with the whole path where a pointer rests on it."""
    sources = {row.source for row in group}
    if len(sources) > 1 or not (source := sources.pop()):
        return '<td class="source"></td>'
    short = source.replace("\\", "/").rpartition("/")[2]
    return f'<td class="source" title="{escape(source)}"><code>{escape(short)}</code></td>'


def _modules(rows: Sequence[Row], fates: Sequence[str], text: str) -> _Fields:
    if not rows:
        return None
    sums = sums_of(rows)
    keys = [(f, "", f"{f} <b>{bytes_text(sums[f].bytes)}</b>", True) for f in fates]
    heads = "\n".join(
        f'<th scope="col" data-by="{fate}"><button type="button">{fate}</button></th>'
        for fate in fates
    )
    return {"legend": _legend(keys), "text": text, "fates": heads, "cols": "<col>" * len(fates)}


def _sizes(report: SizesReport) -> _Fields:
    kinds = {point.kind for point in report.points if point.fits}
    keys = [
        ("plain", "box", "without a plan", "plain" in kinds),
        ("plan", "", "under a plan", True),
        ("baseline", "diamond", "predicted", "predicted" in kinds),
    ]
    lines = [size_cells(point, report) for point in report.points]
    classes = ["chosen" if p.size == report.size else p.kind for p in report.points]
    header, rows = _header(SIZES_HEADER), _body(lines, classes)
    return {"legend": _legend(keys), "header": header, "rows": rows}


def _header(names: Iterable[str]) -> str:
    return "".join(f'<th scope="col">{escape(name)}</th>' for name in names)


def _body(lines: Sequence[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """Rows of a table, each with its name first, and of its kind if these are given."""
    starts = [f'<tr class="{escape(kind)}">' for kind in kinds] or ["<tr>"] * len(lines)
    return "\n".join(
        f'{start}<th scope="row">{escape(name)}</th>'
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for start, (name, *cells) in zip(starts, lines, strict=True)
    )


def _notes(notes: Sequence[str]) -> _Fields:
    items = "\n".join(f"<li>{escape(note)}</li>" for note in notes)
    return {"items": items} if items else None


def _legend(keys: Iterable[tuple[str, str, str, bool]]) -> str:
    """Of kind, shape and text; the text is ours and may be HTML."""
    items = "".join(
        f'<li class="{kind}"><i class="swatch {shape}"></i>{text}</li>'
        for kind, shape, text, is_shown in keys
        if is_shown
    )
    return f'<ul class="legend">{items}</ul>'
