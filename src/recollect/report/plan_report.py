"""What there is to show of a plan or a frontier, as plain data: no torch, no graph."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.report.rows import Row

__all__ = ["PlanReport", "Point"]


@dataclass(frozen=True)
class Point:
    """A way to run the step."""

    name: str
    peak: int
    seconds: float
    kind: str = "plan"  #: ``plan`` (one of ours), ``chosen``, ``plain`` or ``peer``


@dataclass(frozen=True)
class PlanReport:
    """All that the table and the page of a plan or a frontier show. Sizes in bytes, times in s."""

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
