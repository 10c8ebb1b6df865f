"""What becomes of each op under a schedule, to be read."""

from __future__ import annotations

from recollect.graph.graph import Graph
from recollect.graph.simulate import Schedule, uses_under
from recollect.report.rows import Row

__all__ = ["rows_of"]


def rows_of(graph: Graph, schedule: Schedule) -> tuple[Row, ...]:
    """The ops whose results backward asks for, or that run again for others, in their order."""
    uses = uses_under(graph, schedule)
    asked = {ask.value for ask in graph.asks}
    rows = []
    for number, op in enumerate(graph.ops):
        wanted = [value for value in graph.results[number] if uses[value] or value in asked]
        if not wanted:
            continue
        nbytes = sum(graph.values[value].nbytes for value in wanted)
        reason = "must not run again" if op.forced else ""
        rows.append(
            Row(op.path, op.name, _fate(graph, schedule, number), nbytes, op.seconds, reason)
        )
    return tuple(rows)


def _fate(graph: Graph, schedule: Schedule, number: int) -> str:
    if number in schedule.kept or graph.ops[number].forced:
        return "kept"
    return "offloaded" if number in schedule.away else "recomputed"
