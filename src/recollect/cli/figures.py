"""What ``--json`` prints: bytes and seconds, by the names of the Python interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import recollect
from recollect.report.compare import Comparison
from recollect.report.rows import Row, sums_of

_PLAN = (
    "model",
    "budget",
    "predicted_peak",
    "measured_peak",
    "plain_peak",
    "predicted_time",
    "measured_time",
    "plain_time",
    "measured_plain_time",
    "bound_time",
    "gap",
    "spread",
)
_LARGEST = (
    "size",
    "plain_size",
    "budget",
    "time",
    "time_per_sample",
    "plain_time_per_sample",
    "samples_per_second",
    "slowdown",
    "limited_by",
    "device",
)


def plan_figures(plan: recollect.Plan, rows: Sequence[Row] = ()) -> dict[str, Any]:
    """The figures of a plan, and the rows that are given."""
    sums = sums_of(plan.explain())
    return {
        **{name: getattr(plan, name) for name in _PLAN},
        "device": plan.report.device,
        "kept_bytes": sums["kept"].bytes,
        "recomputed_bytes": sums["recomputed"].bytes,
        "offloaded_bytes": sums["offloaded"].bytes,
        "peak_parts": dict(plan.report.parts),
        "notes": plan.report.notes,
        "origin": asdict(plan.origin),
        **({"rows": [*map(_row, rows)]} if rows else {}),
    }


def frontier_figures(frontier: recollect.Frontier) -> dict[str, Any]:
    """The points of a frontier."""
    report = frontier.report
    return {
        "model": report.title,
        "device": report.device,
        "least": frontier.least,
        "plain_peak": report.plain_peak,
        "plain_time": report.plain_time,
        "points": [asdict(point) for point in report.points],
    }


def largest_figures(found: recollect.LargestBatch) -> dict[str, Any]:
    """The largest batch, the sizes that were tried, and the plan."""
    return {
        **{name: getattr(found, name) for name in _LARGEST},
        "points": [asdict(point) for point in found.points],
        "plan": plan_figures(found.plan),
    }


def explanation_figures(found: recollect.Explanation) -> dict[str, Any]:
    """What a forward holds."""
    return {
        "held_bytes": found.held_bytes,
        "offloaded_bytes": found.offloaded_bytes,
        "recomputed_bytes": found.recomputed_bytes,
        "regions": found.regions,
        "remarks": found.remarks,
        "rows": [*map(_row, found.rows)],
    }


def comparison_figures(
    compared: Comparison, first: recollect.Plan, second: recollect.Plan
) -> dict[str, Any]:
    """Both plans, and what differs."""
    return {
        "first": plan_figures(first),
        "second": plan_figures(second),
        "changes": [asdict(change) for change in compared.changes],
    }


def _row(row: Row) -> dict[str, Any]:
    dtype = None if row.dtype is None else str(row.dtype).removeprefix("torch.")
    return {**asdict(row), "dtype": dtype}
