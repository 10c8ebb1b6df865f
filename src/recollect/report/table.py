"""A plan or a frontier as text for a terminal, in at most a hundred columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from recollect.report.columns import columns
from recollect.report.grouping import CHOICES, Group, Sum, grouped
from recollect.report.plan_report import Picture
from recollect.report.units import bytes_text, percent_text, seconds_text
from recollect.report.words import figures, heading, longer_text

__all__ = ["frontier_table", "table"]

#: How wide the text and a column of names may be, and how many lines of modules there may be.
_WIDTH = 100
_NAME = 34
_LINES = 40

_TITLES = {"keep": "kept", "recompute": "recomputed", "offload": "offloaded"}
_KINDS = {"plan": "", "chosen": "chosen", "plain": "no plan", "peer": "peer"}


def table(picture: Picture) -> str:
    """What a plan does: its figures, what its peak is made of, and what becomes of the modules."""
    parts = [_head(picture), _parts(picture), _modules(picture), *_notes(picture)]
    return "\n\n".join(filter(None, parts))


def frontier_table(picture: Picture) -> str:
    """The plans of a frontier and what they are compared with, the least peak first."""
    lines = [
        (
            _short(point.name),
            bytes_text(point.peak),
            percent_text(point.peak / picture.plain_peak) if picture.plain_peak else "",
            seconds_text(point.seconds),
            longer_text(point.seconds, picture.plain_time),
            _KINDS.get(point.kind, point.kind),
        )
        for point in sorted(picture.points, key=lambda point: (point.peak, point.seconds))
    ]
    header = ("", "peak", "of plain", "step", "vs plain", "")
    text = columns(header, lines, left=(0, 5)) if lines else "There is no plan."
    return "\n\n".join([_head(picture), text, *_notes(picture)])


# --- parts of the table ---------------------------------------------------------------------------


def _head(picture: Picture) -> str:
    found = figures(picture)
    label = max(len(figure.label) for figure in found)
    value = max(len(figure.value) for figure in found)
    lines = [
        f"  {figure.label:<{label}}  {figure.value:>{value}}  {figure.remark}".rstrip()
        for figure in found
    ]
    return "\n".join([heading(picture), "", *lines])


def _parts(picture: Picture) -> str:
    whole = sum(nbytes for _, nbytes in picture.parts)
    lines = [
        (_short(name), bytes_text(nbytes), percent_text(nbytes / whole) if whole else "")
        for name, nbytes in picture.parts
    ]
    return columns(("at the peak", "memory", "share"), lines, left=(0,)) if lines else ""


def _modules(picture: Picture) -> str:
    groups = grouped(picture.rows)
    if not groups:
        return ""
    whole = {c: sum((group.sums[c] for group in groups), Sum()) for c in CHOICES}
    shown = [c for c in CHOICES if c != "offload" or whole[c].nbytes or whole[c].seconds]
    ranked = sorted(groups, key=lambda group: group.nbytes, reverse=True)
    largest = {group.path for group in ranked[:_LINES]}
    named = [(_label(group), group.sums) for group in groups if group.path in largest]
    if left := ranked[_LINES:]:
        rest = {c: sum((group.sums[c] for group in left), Sum()) for c in CHOICES}
        named.append((f"{len(left)} smaller lines", rest))
    lines = [(name, *_cells(sums, shown)) for name, sums in [*named, ("in all", whole)]]
    header = ("module", *(title for c in shown for title in (_TITLES[c], "time")))
    return columns(header, lines, left=(0,))


def _notes(picture: Picture) -> list[str]:
    return [textwrap.fill(note, _WIDTH) for note in picture.notes]


def _label(group: Group) -> str:
    return _short(group.path or "(no module)")


def _cells(sums: dict[str, Sum], shown: Sequence[str]) -> list[str]:
    cells = []
    for choice in shown:
        each = sums[choice]
        cells.append(bytes_text(each.nbytes) if each.nbytes else "-")
        cells.append(seconds_text(each.seconds) if each.seconds else "-")
    return cells


# --- layout ---------------------------------------------------------------------------------------


def _short(name: str) -> str:
    """``name``, without its middle if it is long: its ends tell most."""
    if len(name) <= _NAME:
        return name
    half = (_NAME - 3) // 2
    return f"{name[:half]}...{name[-half:]}"
