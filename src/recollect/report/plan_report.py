"""What there is to show of a plan or a frontier, as plain data: no torch, no graph."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Picture", "Point", "Row"]


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of the results of an op.

    Args:
        path: The module that calls it, such as ``layers.3.mlp``.
        op: Such as ``aten::mm``.
        choice: ``keep``, ``recompute`` or ``offload``.
        nbytes: Of its results that backward needs.
        seconds: What the op takes.
        reason: Why, if there was no choice; else empty.
    """

    path: str
    op: str
    choice: str
    nbytes: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """A way to run the step.

    Args:
        name: What it is called.
        peak: Bytes.
        seconds: Of one step.
        kind: ``plan`` (one of ours), ``chosen``, ``plain`` or ``peer``.
    """

    name: str
    peak: int
    seconds: float
    kind: str = "plan"


@dataclass(frozen=True)
class Picture:
    """All that a page shows.

    Args:
        title: The class of the model.
        device: Such as ``NVIDIA H200`` or ``cpu``.
        budget: Bytes; None for a frontier.
        predicted_peak: Bytes, and so on; of a frontier those of its least plan.
        gap: How far ``predicted_time`` is above ``bound_time``, as a fraction of it.
        before: Memory over the plain step: seconds and bytes, at every change.
        after: The same under the plan.
        rows: What becomes of every op that there was something to decide for, in their order.
        points: The frontier, plain, peers and the chosen plan.
        parts: What the peak is made of: names and bytes.
        notes: Remarks for the reader.
        measured_peak: Bytes that steps under the plan took; None if none was run.
        measured_time: Seconds that one took.
        measured_plain_time: Seconds that plain ones took meanwhile.
        spread: By how much times may be off, as a fraction.
    """

    title: str
    device: str
    budget: int | None
    predicted_peak: int
    predicted_time: float
    plain_peak: int
    plain_time: float
    bound_time: float
    gap: float
    before: tuple[tuple[float, int], ...]
    after: tuple[tuple[float, int], ...]
    rows: tuple[Row, ...]
    points: tuple[Point, ...]
    parts: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    measured_peak: int | None = None
    measured_time: float | None = None
    measured_plain_time: float | None = None
    spread: float = 0.0
