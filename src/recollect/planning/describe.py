"""Describes a plan or a frontier in a `PlanReport`: ops, trade-offs, notes on the figures (P6)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import Outcome, simulate, simulate_plain, uses_under
from recollect.planning.origin import Origin
from recollect.planning.regions.module_regions import callable_paths
from recollect.planning.solving.modules import block_paths, module_schedule
from recollect.planning.solving.solve import Solution
from recollect.planning.trial import Candidate, Trials
from recollect.planning.ways import expensive_ops
from recollect.report.page_data import thinned
from recollect.report.plan_report import Mark, PlanReport, Point
from recollect.report.rows import Row

__all__ = [
    "PEAK_PARTS",
    "curve_of",
    "list_notes",
    "list_points",
    "list_rows",
    "make_report",
    "marks_of",
]

#: The parts of a peak, in the order of `Outcome.parts`.
PEAK_PARTS = (
    "parameters, optimizer state",
    "gradients, loss and workspace",
    "kept from forward",
    "recomputed or fetched for backward",
)
#: How many points of a curve are shown.
_POINTS = 1000
#: The spread of times from which on a note says so.
_NOTABLE_SPREAD = 0.1


def make_report(trials: Trials, outcome: Outcome, figures: dict[str, Any]) -> PlanReport:
    """The report of a plan or a frontier, without rows and points."""
    device, plain = trials.step.device, simulate_plain(trials.graph, curve=True)
    return PlanReport(
        title=type(trials.step.model).__name__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        **figures,
        gap=outcome.seconds / figures["bound_time"] - 1,
        before=curve_of(plain),
        after=curve_of(outcome),
        before_marks=marks_of(trials.graph, plain),
        after_marks=marks_of(trials.graph, outcome),
        origin=str(Origin.now()),
        rows=(),
        points=(),
    )


def curve_of(outcome: Outcome) -> tuple[tuple[float, int], ...]:
    """The curve of a report."""
    return tuple(thinned(outcome.curve, _POINTS))


def marks_of(graph: Graph, outcome: Outcome) -> tuple[Mark, ...]:
    """When which op runs, or goes backward: what a curve shows under the pointer."""
    marks: list[Mark] = []
    for number, (event, start) in enumerate(zip(graph.events, outcome.starts, strict=True)):
        is_backward = number >= graph.turn
        op = event.op
        if op < 0 and event.unpacks:
            op = graph.values[graph.saved[event.unpacks[0]].value].op
        if op < 0 and marks and marks[-1].is_backward == is_backward:
            continue
        path, name = ("", "") if op < 0 else (graph.ops[op].path, graph.ops[op].name)
        mark = Mark(float(f"{start:.7g}"), path, name, is_backward)
        if not marks or marks[-1][1:] != mark[1:]:
            marks.append(mark)
    return tuple(marks)


def list_points(trials: Trials, frontier: Iterable[Solution]) -> list[Point]:
    """The points of the frontier, the plain step, and every block checkpointed."""
    plans = [Point("plan", each.outcome.peak, each.outcome.seconds) for each in frontier]
    profile, graph = trials.profile, trials.graph
    points = [*plans, Point("plain", profile.plain_peak, profile.seconds, "plain")]
    blocks = block_paths(graph, callable_paths(trials.step.model))
    if len(blocks) > 1:
        schedule = module_schedule(graph, [(path, "rerun") for path in blocks])
        is_priced = all(each in graph.module_costs for each in schedule.modules)
        every = schedule if is_priced else Schedule(schedule.kept)
        and_products = Schedule(schedule.kept | expensive_ops(graph))
        for name, each in (("every block", every), ("and products kept", and_products)):
            outcome = simulate(graph, each)
            points.append(Point(f"{name} (simulated)", outcome.peak, outcome.seconds, "peer"))
    return points


def list_rows(graph: Graph, schedule: Schedule) -> tuple[Row, ...]:
    """The ops whose results backward reads or recomputes, in their order."""
    uses = uses_under(graph, schedule)
    saved = {each.value for each in graph.saved}
    rows = []
    for number, op in enumerate(graph.ops):
        needed = [value for value in graph.results[number] if uses[value] or value in saved]
        if needed:
            nbytes = sum(graph.values[value].nbytes for value in needed)
            fate = "offloaded" if number in schedule.away else "recomputed"
            if number in schedule.kept or op.forced:
                fate = "kept"
            reason = "must not run again" if op.forced else ""
            rows.append(Row(op.path, op.name, fate, nbytes, op.seconds, reason))
    return tuple(rows)


def list_notes(trials: Trials, candidate: Candidate, spread: float) -> tuple[str, ...]:
    """Say how the figures came about."""
    notes = [candidate.remark] if candidate.remark else []
    if not trials.profile.can_run:
        notes.append("The step was not run under this plan: all figures are predicted.")
    else:
        notes.append("The peak was measured: the step was run under this plan.")
        if trials.profile.timing is None:
            notes.append("There was no room for the plain step: its figures are predicted.")
    if not trials.step.holds_output:
        notes.append("The output of the model is taken to be gone when backward runs.")
    if spread >= _NOTABLE_SPREAD:
        notes.append(
            f"Timings vary by {spread:.0%}: samples of the same work differed by that much. "
            "Times, and what was chosen by them, are rough; plan on a quiet machine for better "
            "ones. Bytes do not depend on it."
        )
    return tuple(notes)
