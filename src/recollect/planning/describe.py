"""Describes a plan or a frontier in a `PlanReport`: ops, trade-offs, notes on the figures (P6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import Copy, Outcome, simulate, stacked, uses_under
from recollect.planning.plan import Origin
from recollect.planning.regions.module_regions import callable_paths
from recollect.planning.solving.modules import block_paths, module_schedule
from recollect.planning.solving.pool import Solution
from recollect.planning.trial import Candidate, Trials
from recollect.planning.ways import expensive_ops
from recollect.report.page_data import thinned
from recollect.report.plan_report import Band, Mark, PlanReport, Point, Stack, Traffic, bands_of
from recollect.report.rows import Row
from recollect.report.units import bytes_text

#: The parts of a peak, in the order of `Outcome.parts`.
PEAK_PARTS = (
    "parameters, optimizer state",
    "gradients, loss and workspace",
    "kept from forward",
    "recomputed or fetched for backward",
)
#: A part of the first, if there is any; and one that lies on top of what a step takes.
_GRADIENTS = "gradients that are there already"
HELD_GRADIENTS = "gradients that the loop holds in forward"
#: Why some of the step is not for a plan to decide.
OTHER_HOOKS = (
    "A part of forward runs inside of saved-tensor hooks such as those of torch.utils.checkpoint, "
    "and no plan decides about what it saves: leave checkpointing of parts of the model to the plan"
)
#: What else helps against a budget that is too small.
SMALLER_BATCH = ", or use a smaller batch"
CLEAR_GRADIENTS = (
    "The gradients that are there already stay for the whole step: if the loop clears them before "
    "it, call model.zero_grad(set_to_none=True) and plan again"
)
#: How many points of a curve are shown.
_POINTS = 1000
#: The same of memory by module.
_STACKED_POINTS = 720
#: The spread of times from which on a note says so.
_NOTABLE_SPREAD = 0.1


def make_report(
    trials: Trials, schedule: Schedule | None, outcome: Outcome, figures: dict[str, Any]
) -> PlanReport:
    """The report of a plan or a frontier, without rows and points. ``schedule``: None is plain."""
    device, plain = trials.step.device, trials.plain_outcome()
    after_stack, traffic = stack_of(trials.graph, schedule, outcome)
    return PlanReport(
        title=trials.title,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        **figures,
        gap=outcome.seconds / figures["bound_time"] - 1,
        before=curve_of(plain),
        after=curve_of(outcome),
        before_marks=marks_of(trials.graph, plain),
        after_marks=marks_of(trials.graph, outcome),
        before_stack=stack_of(trials.graph, trials.plain_schedule, plain)[0],
        after_stack=after_stack,
        traffic=traffic,
        origin=str(Origin.now()),
        rows=(),
        points=(),
    )


def curve_of(outcome: Outcome) -> tuple[tuple[float, int], ...]:
    """The curve of a report."""
    drawn = _drawn_time(outcome)
    return tuple(thinned([(drawn(time), nbytes) for time, nbytes in outcome.curve], _POINTS))


def _drawn_time(outcome: Outcome) -> Callable[[float], float]:
    """From simulated times to those of the picture, in seven digits.

    The simulator counts the overhead of the engine before the first event. The picture spreads it
    over the step, which takes as long as predicted.
    """
    start, end = outcome.starts[0] if outcome.starts else 0.0, outcome.curve[-1][0]
    factor = outcome.seconds / (end - start) if end > start else 1.0
    return lambda seconds: float(f"{max(0.0, seconds - start) * factor:.7g}")


def marks_of(graph: Graph, outcome: Outcome) -> tuple[Mark, ...]:
    """When which op runs, or goes backward: what a curve shows under the pointer."""
    marks: list[Mark] = []
    drawn = _drawn_time(outcome)
    last = max((n for n, event in enumerate(graph.events) if event.backward), default=None)
    for number, (event, start) in enumerate(zip(graph.events, outcome.starts, strict=True)):
        is_backward = number >= graph.turn and (last is None or number <= last)
        op = event.op
        if op < 0 and event.unpacks:
            op = graph.values[graph.saved[event.unpacks[0]].value].op
        if op < 0 and marks and marks[-1].is_backward == is_backward:
            continue
        path, name = ("", "") if op < 0 else (graph.ops[op].path, graph.ops[op].name)
        mark = Mark(drawn(start), path, name.replace("::", "."), is_backward)
        if not marks or marks[-1][1:] != mark[1:]:
            marks.append(mark)
    return tuple(marks)


def stack_of(
    graph: Graph, schedule: Schedule | None, outcome: Outcome
) -> tuple[Stack, Traffic | None]:
    """Memory by module over the step, and the copies to the host if there are any.

    ``outcome``: of ``schedule``, or of the plain step if that is None.
    """
    drawn = _drawn_time(outcome)
    made = [sum(graph.values[value].nbytes for value in each) for each in graph.results]
    names, bands = bands_of([op.path for op in graph.ops], made)
    step = stacked(graph, schedule, bands, _STACKED_POINTS)
    levels = zip(*(levels for _, _, levels in step.points), strict=True)
    stack = Stack(
        tuple(drawn(seconds) for seconds, _, _ in step.points),
        tuple(fixed for _, fixed, _ in step.points),
        tuple(Band(name, level) for name, level in zip(names, levels, strict=False)),
        _busy(step.out, drawn),
        _busy(step.back, drawn),
        graph.base,
    )
    if schedule is None or not step.out:
        return stack, None
    turn, end = outcome.starts[graph.turn] - outcome.starts[0], outcome.curve[-1][0]
    rest = end - outcome.starts[graph.turn]
    out, back = (sum(end - start for start, end, _ in way) for way in (step.out, step.back))
    sent = sum(copy.nbytes for copy in step.out)
    busy = out / turn if turn else 0.0, back / rest if rest > 0 else 0.0
    return stack, Traffic(sent, *busy, outcome.waits)


def _busy(
    copies: Iterable[Copy], drawn: Callable[[float], float]
) -> tuple[tuple[float, float], ...]:
    """When the link is busy: spans of seconds, those merged that follow each other."""
    spans: list[tuple[float, float]] = []
    for start, end, _ in copies:
        if spans and start - spans[-1][1] <= 0.01 * (end - start):
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    return tuple((drawn(a), drawn(b)) for a, b in spans)


def list_parts(outcome: Outcome, peak: int, gradients: int) -> tuple[tuple[str, int], ...]:
    """The parts of a peak, which add up to it. ``gradients``: bytes of those before the step.

    ``peak``: as it is expected. What the simulation does not have of it is workspace.
    """
    base, _, kept, made = outcome.parts
    # Even where steps were measured to take less than simulated, no part is negative.
    fixed = min(base, peak)
    gradients = min(gradients, fixed)
    made = min(made, peak - fixed)
    kept = min(kept, peak - fixed - made)
    sizes = (fixed - gradients, peak - fixed - kept - made, kept, made)
    parts = tuple(zip(PEAK_PARTS, sizes, strict=True))
    return parts if gradients <= 0 else (parts[0], (_GRADIENTS, gradients), *parts[1:])


def infeasible_text(
    title: str,
    budget: int,
    least: int,
    parts: Iterable[tuple[str, int]],
    hints: Iterable[str],
    *,
    is_plain: bool,
) -> str:
    """Say that no plan of the model ``title`` fits into a budget, and what helps.

    ``parts``: of the least peak. ``is_plain``: whether that is the peak of the plain step.
    """
    ordered = sorted(parts, key=lambda part: -part[1])
    listed = ", ".join(f"{bytes_text(size)} {name}" for name, size in ordered if size)
    useless = " A plan saves nothing: the plain step takes as much." if is_plain else ""
    return (
        f"budget: no plan brings the step of this {title} down to {bytes_text(budget)} "
        f"({budget:,} bytes); the least that works is {bytes_text(least)}: budget={least}. At its "
        f"peak that is {listed}.{useless} "
        f"Raise the budget to that{SMALLER_BATCH}{''.join(f'. {hint}' for hint in hints)}"
    )


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
        by_hand = {
            "checkpoint every block": every,
            "checkpoint, products kept": and_products,
        }
        for name, each in by_hand.items():
            outcome = simulate(graph, each)
            points.append(Point(name, outcome.peak, outcome.seconds, "baseline"))
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
            fate = "offloaded" if number in schedule.offloaded else "recomputed"
            if number in schedule.kept or op.forced:
                fate = "kept"
            reason = "must not run again" if op.forced else ""
            name = op.name.replace("::", ".")
            rows.append(Row(op.path, name, fate, nbytes, op.seconds, reason, source=op.source))
    return tuple(rows)


def assumptions(trials: Trials) -> list[str]:
    """Say what the figures take for granted."""
    notes = []
    if trials.step.device.type == "meta" and not torch.cuda.is_available():
        notes.append(
            "Times are those of this machine's CPU. On a GPU other choices may be faster: plan "
            "again where you train."
        )
    if not trials.step.holds_output:
        notes.append("The plan assumes that the loop frees the model's output before backward.")
    return notes


def list_notes(trials: Trials, candidate: Candidate, spread: float) -> tuple[str, ...]:
    """Say how the figures came about."""
    notes = [candidate.remark] if candidate.remark else []
    if not trials.profile.can_run:
        notes.append("The step was not run under this plan: all figures are predicted.")
    else:
        notes.append("The peak was measured: the step was run under this plan.")
        if trials.profile.timing is None:
            notes.append("There was no room for the plain step: its figures are predicted.")
    notes += assumptions(trials)
    if spread >= _NOTABLE_SPREAD:
        notes.append(
            f"Timings vary by {spread:.0%} between samples of the same work. So times, and "
            "choices based on them, are rough; plan on a quiet machine for better ones. Bytes "
            "are exact all the same."
        )
    return tuple(notes)
