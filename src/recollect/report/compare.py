"""Two plans side by side: their figures, and the ops that they treat differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from recollect.report.page import HasPage, comparison_page
from recollect.report.plan_report import PlanReport, longer_text
from recollect.report.rows import Row, lists_by, pattern, sums_of
from recollect.report.table import columns, counted
from recollect.report.units import bytes_text, percent_text, seconds_text

#: How many lines of changes are printed.
_LINES = 30
_NOT_NEEDED = "not needed"


@dataclass(frozen=True)
class Change:
    """An op whose results have another fate in the other plan."""

    path: str  #: the module that runs the op
    op: str
    first: str  #: the fate in the first plan; ``not needed`` if there is nothing to decide
    second: str
    bytes: int


class Comparison(HasPage):
    """Two plans side by side. ``str()`` of it is a table."""

    def __init__(self, first: PlanReport, second: PlanReport, names: tuple[str, str]) -> None:
        self.first, self.second, self.names = first, second, names
        #: The ops that the plans treat differently, in the order of forward.
        self.changes = _changes(first.rows, second.rows)

    def __repr__(self) -> str:
        peaks = " and ".join(bytes_text(each.predicted_peak) for each in (self.first, self.second))
        return f"<Comparison of plans for {peaks}: {len(self.changes)} ops differ>"

    def __str__(self) -> str:
        figures = columns(("", *self.names), self.figures(), left=("",))
        lines = self.change_lines()
        if not lines:
            return f"{self.title}\n\n{figures}\n\nBoth keep, recompute and offload the same."
        header = ("module", "op", "memory", *self.names)
        text = columns(header, lines[:_LINES], left=("module", "op", *self.names))
        left = f"\n... and {len(lines) - _LINES} smaller lines" if len(lines) > _LINES else ""
        return f"{self.title}\n\n{figures}\n\n{text}{left}"

    @property
    def title(self) -> str:
        """The first line of the table."""
        one, other = (f"{each.title} on {each.device}" for each in (self.first, self.second))
        return f"Two plans for {one}" if one == other else f"Plans for {one}, and for {other}"

    def figures(self) -> list[tuple[str, str, str]]:
        """Name, and the figure of each plan."""
        pairs = zip(_figures(self.first), _figures(self.second), strict=True)
        return [(name, a, b) for (name, a), (_, b) in pairs if (a, b) != ("-", "-")]

    def change_lines(self) -> list[tuple[str, str, str, str, str]]:
        """The changes with equal ones on one line, the largest first."""
        groups = lists_by(
            lambda each: (pattern(each.path), each.op, each.first, each.second), self.changes
        )
        groups.sort(key=lambda group: -sum(each.bytes for each in group))
        return [
            (
                counted([each.path for each in group]),
                group[0].op,
                bytes_text(sum(each.bytes for each in group)),
                group[0].first,
                group[0].second,
            )
            for group in groups
        ]

    def _page(self) -> str:
        return comparison_page(
            self.first, self.second, self.names, self.figures(), self.change_lines(), str(self)
        )


def _figures(report: PlanReport) -> list[tuple[str, str]]:
    sums = sums_of(report.rows)
    peak, time, plain = report.measured_peak, report.measured_time, report.measured_plain_time
    measured = "-"
    if time is not None:
        measured = _with_share(seconds_text(time), longer_text(time, plain or 0.0))
    longer = longer_text(report.predicted_time, report.plain_time)
    return [
        ("budget", "-" if report.budget is None else bytes_text(report.budget)),
        ("predicted peak", bytes_text(report.predicted_peak)),
        ("measured peak", "-" if peak is None else bytes_text(peak)),
        ("plain peak", bytes_text(report.plain_peak)),
        ("predicted time", _with_share(seconds_text(report.predicted_time), longer)),
        ("measured time", measured),
        ("gap to the bound", percent_text(report.gap)),
        *((fate, bytes_text(sums[fate].bytes)) for fate in ("kept", "recomputed", "offloaded")),
    ]


def _with_share(text: str, share: str) -> str:
    return f"{text} ({share})" if share else text


def _changes(first: Sequence[Row], second: Sequence[Row]) -> tuple[Change, ...]:
    """The ops of two plans are the same if path, name, and which of that name it is agree."""
    ones, others = _numbered(first), _numbered(second)
    found = []
    for key in dict.fromkeys([*ones, *others]):
        one, other = ones.get(key), others.get(key)
        fates = [_NOT_NEEDED if each is None else each.fate for each in (one, other)]
        if fates[0] != fates[1]:
            nbytes = max(0 if each is None else each.bytes for each in (one, other))
            found.append(Change(key[0], key[1], fates[0], fates[1], nbytes))
    return tuple(found)


def _numbered(rows: Sequence[Row]) -> dict[tuple[str, str, int], Row]:
    seen: Counter[tuple[str, str]] = Counter()
    numbered = {}
    for row in rows:
        numbered[row.path, row.op, seen[row.path, row.op]] = row
        seen[row.path, row.op] += 1
    return numbered
