"""What ``explain`` returns: rows, totals and remarks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from recollect.report.page import HasPage, explanation_page
from recollect.report.plan_report import Figure
from recollect.report.rows import RegionCall, Row, Totals, lists_by, pattern
from recollect.report.table import columns, counted, modules_table, rows_table, wrapped
from recollect.report.units import bytes_text

#: Reasons for memory that no region holds.
AUTOGRAD = "autograd"
RESULT = "part of the result"
ELSEWHERE = "held by other code"

#: The maximum number of lines of rows, and of modules.
_LINES = 40
_MODULES = 8
#: The share of held memory from which on a cause is worth a remark.
_MUCH = 0.5


class Explanation(HasPage):
    """What one forward left in memory. ``str()`` of it is a table.

    A storage counts once, however many tensors share it. Parameters, buffers and other memory from
    before forward do not count.
    """

    def __init__(self, rows: tuple[Row, ...], calls: tuple[RegionCall, ...]) -> None:
        #: In the order in which the ops ran.
        self.rows = rows
        #: The calls of checkpointed regions, in their order.
        self.calls = calls

    @property
    def regions(self) -> int:
        """How many calls of checkpointed regions there were."""
        return len(self.calls)

    @cached_property
    def totals(self) -> Totals:
        """Bytes by fate, and by module."""
        return Totals.of(self.rows)

    @property
    def held_bytes(self) -> int:
        """Bytes that stay on the device from the end of forward until backward."""
        return self.totals.by_fate["kept"] + self.totals.by_fate["input"]

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that stores hold."""
        return self.totals.by_fate["offloaded"]

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that autograd would hold, and that regions recompute instead."""
        return self.totals.by_fate["recomputed"]

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """The main cause of held memory, if one stands out."""
        if not self.regions:
            return ("No checkpointed region ran: autograd keeps everything that backward needs.",)
        remarks = []
        inputs = self.totals.by_fate["input"]
        if inputs > _MUCH * self.held_bytes:
            remarks.append(
                f"Inputs of regions are {bytes_text(inputs)}, {inputs / self.held_bytes:.0%} of "
                "the held memory. Fewer and larger regions have fewer inputs; offload_inputs=True "
                "moves them to the host."
            )
        outside = [row for row in self.rows if row.reason in (AUTOGRAD, RESULT, ELSEWHERE)]
        count = sum(row.bytes for row in outside)
        if count > _MUCH * self.held_bytes:
            largest = max(outside, key=lambda row: row.bytes)
            remarks.append(
                f"{bytes_text(count)}, {count / self.held_bytes:.0%} of the held memory, is "
                "kept outside of any region, where no policy applies. The largest part is "
                f"{bytes_text(largest.bytes)} of {largest.op} in {largest.path or 'the function'}."
            )
        return tuple(remarks)

    def __str__(self) -> str:
        needed = [row for row in self.rows if row.bytes and row.fate != "not held"]
        tables = (_rows(self.rows), _calls(self.calls), modules_table(needed, _MODULES))
        held, inputs = self.held_bytes, self.totals.by_fate["input"]
        total = f"held after forward: {bytes_text(held)}, inputs of regions: {bytes_text(inputs)}"
        return "\n\n".join(filter(None, (*tables, total, *map(wrapped, self.remarks))))

    def _page(self) -> str:
        sums = self.totals.by_fate
        figures = [
            Figure("held after forward", bytes_text(self.held_bytes), "on the device"),
            Figure("inputs of regions", bytes_text(sums["input"]), "a part of that"),
            Figure("recomputed", bytes_text(self.recomputed_bytes), "in backward, not held"),
        ]
        if self.offloaded_bytes:
            figures.append(Figure("offloaded", bytes_text(self.offloaded_bytes), "held by stores"))
        return explanation_page(figures, self.rows, self.remarks, self.regions, str(self))

    def __repr__(self) -> str:
        return f"<Explanation: {bytes_text(self.held_bytes)} held, {len(self.rows)} rows>"


def _rows(rows: Sequence[Row]) -> str:
    if not rows:
        return "Nothing is held, and nothing is recomputed."

    def line(row: Row) -> tuple[object, ...]:
        return row.op, row.shape, row.dtype, row.fate, pattern(row.path), pattern(row.reason)

    groups = lists_by(line, rows)
    sizes = [sum(row.bytes for row in group) for group in groups]
    ranked = sorted(range(len(groups)), key=sizes.__getitem__, reverse=True)
    text = rows_table([groups[n] for n in sorted(ranked[:_LINES])])
    if left := ranked[_LINES:]:
        count = sum(sizes[n] for n in left)
        text += f"\n... and {len(left)} smaller lines, {bytes_text(count)}"
    return text


def _calls(calls: Sequence[RegionCall]) -> str:
    """The regions, if one has a note or another engine than rerun."""
    if all(call.engine == "rerun" and not call.notes for call in calls):
        return ""
    header = ("region", "engine", "note")
    groups = lists_by(lambda call: (pattern(call.region), call.engine, call.notes), calls)
    lines = [
        (counted([call.region for call in each]), each[0].engine, "; ".join(each[0].notes))
        for each in groups
    ]
    return columns(header, lines, left=header)
