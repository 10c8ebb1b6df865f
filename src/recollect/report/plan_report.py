"""The data of a plan or a frontier that the table and the page show, and its figures in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from recollect.report.rows import Row
from recollect.report.units import bytes_text, percent_text, seconds_text

#: At most so many bands: more cannot be told apart.
_BANDS = 16


@dataclass(frozen=True)
class Point:
    """A way to run the step."""

    name: str
    peak: int
    seconds: float
    kind: str = "plan"  #: ``plan`` (one of ours), ``chosen``, ``plain`` or ``baseline``


class Mark(NamedTuple):
    """The time at which an op begins to run."""

    seconds: float
    path: str  #: the module
    op: str  #: in backward, the op whose saved tensor is used
    is_backward: bool


class Traffic(NamedTuple):
    """Copies between device and host under a plan."""

    bytes: int  #: that are offloaded in one step
    busy_out: float  #: the fraction of forward during which the link copies to the host
    busy_back: float  #: the fraction of the rest of the step during which it copies back
    waits: float  #: seconds that the device waits for copies


class Band(NamedTuple):
    """Bytes of one module, or of several of equal rank, at each point of a stack."""

    name: str
    bytes: tuple[int, ...]


class Stack(NamedTuple):
    """The memory of a step over time, divided by module."""

    seconds: tuple[float, ...] = ()
    fixed: tuple[int, ...] = ()  #: gradients, the loss and workspace, at each time
    bands: tuple[Band, ...] = ()  #: in the order of forward
    #: When the link to the host is busy, each way: pairs of seconds.
    out: tuple[tuple[float, float], ...] = ()
    back: tuple[tuple[float, float], ...] = ()
    base: int = 0  #: parameters, buffers and optimizer state


#: Of a report that has none.
NO_STACK = Stack()


@dataclass(frozen=True, repr=False)
class PlanReport:
    """The data of a plan or a frontier, in bytes and seconds."""

    title: str  #: the class of the model
    device: str  #: such as ``NVIDIA H200`` or ``cpu``
    budget: int | None  #: None for a frontier
    predicted_peak: int  #: of a frontier, here and below, those of its least plan
    predicted_time: float
    plain_peak: int
    plain_time: float
    bound_time: float
    gap: float  #: how far ``predicted_time`` is above ``bound_time``, as a fraction of it
    before: tuple[tuple[float, int], ...]  #: memory over the plain step: time and bytes
    after: tuple[tuple[float, int], ...]  #: the same under the plan
    rows: tuple[Row, ...]  #: what becomes of each op that there was something to decide for
    points: tuple[Point, ...]  #: the frontier, plain, baselines and the chosen plan
    parts: tuple[tuple[str, int], ...] = ()  #: the parts of the peak: names and bytes
    notes: tuple[str, ...] = ()
    measured_peak: int | None = None  #: of steps under the plan; None if none was run
    measured_time: float | None = None
    measured_plain_time: float | None = None  #: of the plain steps that were timed with these
    spread: float = 0.0  #: by how much times may be off, as a fraction
    before_marks: tuple[Mark, ...] = ()  #: what runs over the plain step
    after_marks: tuple[Mark, ...] = ()  #: the same under the plan
    before_stack: Stack = NO_STACK  #: memory by module over the plain step
    after_stack: Stack = NO_STACK  #: the same under the plan
    traffic: Traffic | None = None  #: None if nothing is offloaded
    #: The versions it was made with, and when.
    origin: str = field(default="", compare=False)

    def __repr__(self) -> str:
        peaks = f"{bytes_text(self.predicted_peak)} of {bytes_text(self.plain_peak)}"
        return f"<PlanReport: {heading(self)}, {peaks}>"


class Figure(NamedTuple):
    """One figure of the head of the table, or one tile of the page."""

    label: str
    value: str
    remark: str = ""  #: what to compare it with
    share: float | None = None  #: how much of a bar it fills, where it is a part of something


def heading(report: PlanReport) -> str:
    """The first line of the table, and the title of the page."""
    what = "Frontier of" if report.budget is None else "Plan for"
    return f"{what} {report.title} on {report.device}"


def figures(report: PlanReport) -> list[Figure]:
    """The figures that are known, the most important first."""
    found = []
    if report.budget is not None:
        found.append(Figure("budget", bytes_text(report.budget)))
        found.append(_peak("predicted peak", report.predicted_peak, report.budget, "the budget"))
        if report.measured_peak is not None:
            found.append(_peak("measured peak", report.measured_peak, report.budget, "the budget"))
    else:
        found.append(_peak("least peak", report.predicted_peak, report.plain_peak, "plain"))
    found.append(_plain(report))
    if report.plain_time > 0:
        label = "time vs plain" if report.budget is None else "predicted time"
        found.append(_time(label, report.predicted_time, report.plain_time))
    if report.measured_time is not None:
        found.append(_time("measured time", report.measured_time, report.measured_plain_time))
    if report.traffic is not None:
        found.append(_offloaded(report.traffic))
    if _has_bound(report):
        remark = f"no plan that fits is below {seconds_text(report.bound_time)}"
        found.append(Figure("gap to the bound", percent_text(report.gap), remark))
    return found


def _peak(label: str, peak: int, whole: int, name: str) -> Figure:
    share = peak / whole if whole else 0.0
    return Figure(label, bytes_text(peak), f"{percent_text(share)} of {name}", share)


def _plain(report: PlanReport) -> Figure:
    saved = report.plain_peak - report.predicted_peak
    who = "the plan saves" if report.budget is not None else "plans save up to"
    remark = f"{who} {bytes_text(saved)}" if saved > 0 else "the step fits as it is"
    return Figure("plain peak", bytes_text(report.plain_peak), remark)


def _time(label: str, seconds: float, plain: float | None) -> Figure:
    if not plain:
        return Figure(label, seconds_text(seconds), "there was no plain step to compare with")
    remark = f"{seconds_text(seconds)}, plain {seconds_text(plain)}"
    return Figure(label, longer_text(seconds, plain), remark)


def _offloaded(traffic: Traffic) -> Figure:
    remark = (
        f"link busy for {percent_text(traffic.busy_out)} of forward, "
        f"{percent_text(traffic.busy_back)} of backward"
    )
    if traffic.waits > 0:
        remark += f"; waits {seconds_text(traffic.waits)}"
    return Figure("offloaded", bytes_text(traffic.bytes), remark)


def _has_bound(report: PlanReport) -> bool:
    return report.bound_time > 0 and math.isfinite(report.gap)


def longer_text(seconds: float, plain: float) -> str:
    """How much longer than plain, such as ``+8.1%``; empty if there is nothing to compare with."""
    if plain <= 0:
        return ""
    more = seconds / plain - 1
    return ("+" if more > 0 else "") + percent_text(more)


def point_cells(point: Point, report: PlanReport) -> tuple[str, str, str, str]:
    """Peak and time of ``point``, each with how it compares with plain."""
    share = percent_text(point.peak / report.plain_peak) if report.plain_peak else ""
    longer = longer_text(point.seconds, report.plain_time)
    return bytes_text(point.peak), share, seconds_text(point.seconds), longer


def summary(report: PlanReport) -> str:
    """One or two sentences for somebody who has never heard of a plan."""
    peak, plain = bytes_text(report.predicted_peak), bytes_text(report.plain_peak)
    ratio = report.predicted_peak / report.plain_peak if report.plain_peak else 0.0
    need = f"{peak}, {percent_text(ratio)} of the {plain} of the plain step"
    if report.budget is None:
        text = f"A step can run in as little as {need}"
    else:
        budget = bytes_text(report.budget)
        text = f"With a budget of {budget} the step is predicted to need at most {need}"
    if report.measured_time is not None and report.measured_plain_time:
        longer = _longer_words(report.measured_time, report.measured_plain_time)
        text += f", and was measured to take {longer}"
    elif report.plain_time > 0:
        then = "then takes" if report.budget is None else "takes"
        text += f", and {then} {_longer_words(report.predicted_time, report.plain_time)}"
    if not _has_bound(report):
        return f"{text}."
    if report.gap <= 0:
        return f"{text}. No plan that fits is faster."
    if report.gap < 0.0005:
        return f"{text}. No plan that fits is faster by more than 0.1%."
    return (
        f"{text}. No plan that fits can take less than {seconds_text(report.bound_time)}: "
        f"this one is predicted to be within {percent_text(report.gap)} of that."
    )


def _longer_words(seconds: float, plain: float) -> str:
    more = seconds / plain - 1
    if abs(more) < 0.0005:
        return "the same time"
    return f"{percent_text(abs(more))} {'longer' if more > 0 else 'less time'}"


# --- modules as the bands of a chart --------------------------------------------------------------


def bands_of(paths: Sequence[str], nbytes: Sequence[int]) -> tuple[list[str], list[int]]:
    """The names of the bands, and by op its band. By op: the path of its module, and its bytes.

    The largest band is divided into its children, again and again, down to numbered layers. Too
    many layers are put together in runs.
    """
    prefixes: set[tuple[str, ...]] = {()}
    split = [tuple(path.split(".")) if path else () for path in paths]
    while True:
        owners = [_longest(parts, prefixes) for parts in split]
        sums: dict[tuple[str, ...], int] = dict.fromkeys(prefixes, 0)
        for owner, size in zip(owners, nbytes, strict=True):
            sums[owner] += size
        divided = _divided(prefixes, sums, split)
        if divided is None:
            break
        prefixes = divided
    found = list(dict.fromkeys(owners))
    groups = _runs(found)
    names = list(dict.fromkeys(groups.values()))
    return names, [names.index(groups[owner]) for owner in owners]


def _longest(parts: tuple[str, ...], prefixes: set[tuple[str, ...]]) -> tuple[str, ...]:
    return next(parts[:n] for n in range(len(parts), -1, -1) if parts[:n] in prefixes)


def _divided(
    prefixes: set[tuple[str, ...]],
    sums: dict[tuple[str, ...], int],
    split: Sequence[tuple[str, ...]],
) -> set[tuple[str, ...]] | None:
    """``prefixes`` with the largest one divided further; None if that is enough."""
    several = sum(map(bool, sums.values())) > 1
    for prefix in sorted(prefixes, key=lambda each: -sums[each]):
        is_layer = bool(prefix) and prefix[-1].isdecimal()
        if not sums[prefix] or (is_layer and several):
            continue
        depth = len(prefix) + 1
        children = {p[:depth] for p in split if len(p) >= depth and p[: depth - 1] == prefix}
        new = children - prefixes
        numbered = any(child[-1].isdecimal() for child in new)
        if new and (numbered or len(prefixes) + len(new) <= _BANDS):
            return prefixes | new
    return None


def _runs(found: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """By prefix: the name of its band. Numbered siblings share one if there are too many."""
    layers: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for prefix in found:
        if prefix and prefix[-1].isdecimal():
            layers.setdefault(prefix[:-1], []).append(prefix)
    room = max(1, (_BANDS - len(found) + sum(map(len, layers.values()))) // max(1, len(layers)))
    names = {prefix: ".".join(prefix) or "the model itself" for prefix in found}
    for parent, children in layers.items():
        if len(found) <= _BANDS or len(children) <= 1:
            continue
        size = -(-len(children) // room)
        for start in range(0, len(children), size):
            run = children[start : start + size]
            ends = f"{run[0][-1]}-{run[-1][-1]}" if len(run) > 1 else run[0][-1]
            names.update(dict.fromkeys(run, ".".join((*parent, ends))))
    return names
