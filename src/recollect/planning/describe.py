"""What a plan or a frontier shows of a step: its ops, its trade-offs, remarks on the figures."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import Outcome, simulate, simulate_plain, uses_under
from recollect.planning.blocks import block_schedule
from recollect.planning.solving.solve import Solution
from recollect.planning.trial import Candidate, Trials
from recollect.planning.ways import expensive_ops
from recollect.report.plan_report import PlanReport, Point
from recollect.report.rows import Row
from recollect.report.script import thinned

__all__ = ["PARTS", "notes_on", "points_of", "rows_of", "sketch_of"]

#: What a peak consists of, in the order of `Outcome.parts`.
PARTS = (
    "parameters, optimizer state",
    "gradients, loss and workspace",
    "kept from forward",
    "recomputed or fetched for backward",
)
#: How many points of a curve are kept.
_POINTS = 1000
#: The spread from which on a reader is told.
_TOLD = 0.1


def sketch_of(
    trials: Trials, outcome: Outcome, bound: float, points: Iterable[Point]
) -> PlanReport:
    """What the pictures of a plan and of a frontier have in common."""
    device = trials.step.device
    return PlanReport(
        title=type(trials.step.model).__name__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        budget=None,
        predicted_peak=outcome.peak,
        predicted_time=outcome.seconds,
        plain_peak=trials.profile.plain_peak,
        plain_time=trials.profile.seconds,
        bound_time=bound,
        gap=outcome.seconds / bound - 1,
        before=tuple(thinned(simulate_plain(trials.graph, curve=True).curve, _POINTS)),
        after=tuple(thinned(outcome.curve, _POINTS)),
        rows=(),
        points=tuple(points),
    )


def points_of(trials: Trials, frontier: Iterable[Solution]) -> list[Point]:
    """All trade-offs, the plain step, and the usual ways of checkpointing."""
    plans = [Point("plan", each.outcome.peak, each.outcome.seconds) for each in frontier]
    profile, graph = trials.profile, trials.graph
    points = [*plans, Point("plain", profile.plain_peak, profile.seconds, "plain")]
    blocks = block_schedule(graph)
    if blocks is not None:
        for name, kept in (
            ("every block", blocks.kept),
            ("and products kept", blocks.kept | expensive_ops(graph)),
        ):
            outcome = simulate(graph, Schedule(kept))
            points.append(Point(f"{name} (simulated)", outcome.peak, outcome.seconds, "peer"))
    return points


def rows_of(graph: Graph, schedule: Schedule) -> tuple[Row, ...]:
    """The ops whose results backward reads, or that run again for others, in their order."""
    uses = uses_under(graph, schedule)
    asked = {saved.value for saved in graph.saved}
    rows = []
    for number, op in enumerate(graph.ops):
        wanted = [value for value in graph.results[number] if uses[value] or value in asked]
        if wanted:
            nbytes = sum(graph.values[value].nbytes for value in wanted)
            fate = "offloaded" if number in schedule.away else "recomputed"
            if number in schedule.kept or op.forced:
                fate = "kept"
            reason = "must not run again" if op.forced else ""
            rows.append(Row(op.path, op.name, fate, nbytes, op.seconds, reason))
    return tuple(rows)


def notes_on(trials: Trials, found: Candidate, spread: float) -> tuple[str, ...]:
    """What a reader should know of how the figures came about."""
    notes = [found.remark] if found.remark else []
    if not trials.profile.can_run:
        notes.append("The step was not run: all figures are predicted.")
    else:
        notes.append("The peak was measured: the step was run under this plan.")
        if trials.profile.timing is None:
            notes.append("There was no room for the plain step: its figures are predicted.")
    if not trials.step.holds_output:
        notes.append("The output of the model is taken to be gone when backward runs.")
    if spread >= _TOLD:
        notes.append(
            f"Timings vary by {spread:.0%}: samples of the same work differed by that much. "
            "Times, and what was chosen by them, are rough; plan on a quiet machine for better "
            "ones. Bytes do not depend on it."
        )
    return tuple(notes)
