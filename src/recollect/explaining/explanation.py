"""What ``explain`` returns: the rows, what they add up to, and what that says."""

from __future__ import annotations

from functools import cached_property

from recollect.explaining.rows import HELD, OUTSIDE, Call, Row, Totals
from recollect.explaining.text import render, share_of
from recollect.report.units import bytes_text

__all__ = ["Explanation"]

#: The share of what is held from which on something is worth a remark.
_MUCH = 0.5


class Explanation:
    """What one forward left in memory. ``str()`` of it is a table.

    Memory counts once, however many tensors share it. Parameters, buffers and whatever else was
    there before forward do not count.
    """

    def __init__(self, rows: tuple[Row, ...], calls: tuple[Call, ...]) -> None:
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
        """Bytes that stay where they are from the end of forward until backward."""
        return sum(self.totals.by_fate[fate] for fate in HELD)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that stores hold."""
        return self.totals.by_fate["offloaded"]

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that autograd would hold, and that regions compute again instead."""
        return self.totals.by_fate["recomputed"]

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """Why there is not less to hold, where one cause stands out."""
        if not self.regions:
            return ("No checkpointed region ran: autograd keeps all that backward needs.",)
        return tuple(filter(None, (self._about_inputs(), self._about_outside())))

    def _about_inputs(self) -> str | None:
        inputs = self.totals.by_fate["input"]
        if inputs <= _MUCH * self.held_bytes:
            return None
        return (
            f"Inputs of regions are {bytes_text(inputs)}, {share_of(inputs, self.held_bytes)} of "
            "what is held. Fewer and larger regions have fewer inputs; offload_inputs=True moves "
            "them to the host."
        )

    def _about_outside(self) -> str | None:
        rows = [row for row in self.rows if row.fate == "kept" and row.reason in OUTSIDE]
        outside = sum(row.bytes for row in rows)
        if outside <= _MUCH * self.held_bytes:
            return None
        largest = max(rows, key=lambda row: row.bytes)
        return (
            f"{bytes_text(outside)}, {share_of(outside, self.held_bytes)} of what is held, is kept "
            "outside of any region, where no policy reaches it. The largest part is "
            f"{bytes_text(largest.bytes)} of {largest.op} in {largest.path or 'the function'}."
        )

    def __str__(self) -> str:
        return render(self.rows, self.calls, self.totals, self.held_bytes, self.remarks)

    def __repr__(self) -> str:
        return f"<Explanation: {bytes_text(self.held_bytes)} held, {len(self.rows)} rows>"
