"""The table of a search for the largest batch: the sizes that were tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recollect.report.plan_report import Figure, longer_text
from recollect.report.table import columns, head_text
from recollect.report.units import bytes_text, seconds_text

#: The columns of the table.
SIZES_HEADER = (
    *("size", "plain peak", "peak", "step", "per sample"),
    *("samples/s", "vs plain", "fits", "by"),
)
_REASONS = {
    "memory": "the next size does not fit",
    "time": "the next size takes longer than allowed",
    "most": "no larger size was to be considered",
}


#: Why there is no larger size.
Limit = Literal["memory", "time", "most"]


@dataclass(frozen=True)
class SizePoint:
    """A size that was tried, or predicted.

    Attributes:
        size: What ``make_batch`` is called with.
        fits: Whether it stays within the budget, and within the limit on time.
        plain_peak: The peak without a plan, in bytes.
        peak: The peak under the plan, or the least that any plan takes if none fits; None if it
            was run without a plan.
        seconds: The time of a step, under the plan if there is one; None if that is not known.
        kind: ``"plain"``: run without a plan; ``"plan"``: run under one; ``"predicted"``: not run.
    """

    size: int
    fits: bool
    plain_peak: int
    peak: int | None
    seconds: float | None
    kind: Literal["plain", "plan", "predicted"]

    @property
    def time_per_sample(self) -> float | None:
        """Seconds of a step for each sample."""
        return None if self.seconds is None else self.seconds / self.size

    @property
    def samples_per_second(self) -> float | None:
        """Samples in a second of training."""
        return self.size / self.seconds if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class SizesReport:
    """The data of the table and the page of a search, in bytes and seconds."""

    title: str  #: the class of the model
    device: str
    budget: int
    size: int
    plain_size: int
    time_per_sample: float
    plain_time_per_sample: float
    limited_by: Limit
    points: tuple[SizePoint, ...]
    time: float | None = None  #: the limit, as a multiple of plain's time per sample


def sizes_heading(report: SizesReport) -> str:
    """The first line of the table, and the title of the page."""
    return f"Largest batch of {report.title} on {report.device}"


def sizes_figures(report: SizesReport) -> list[Figure]:
    """The figures, the most important first."""
    plain = report.plain_time_per_sample
    ratio = f"{report.size / report.plain_size:.2f} times plain's; " if report.plain_size else ""
    speed = longer_text(report.time_per_sample, plain)
    limit = "" if report.time is None else f", at most {report.time:g} times plain"
    return [
        Figure("largest size", str(report.size), f"{ratio}{_REASONS[report.limited_by]}"),
        Figure("without a plan", str(report.plain_size), "the largest that fits plain"),
        Figure("budget", bytes_text(report.budget)),
        Figure(
            "time per sample",
            seconds_text(report.time_per_sample),
            f"{speed} vs plain's {seconds_text(plain)}{limit}",
        ),
        Figure("throughput", f"{_rate(1 / report.time_per_sample)}/s", "samples"),
    ]


def sizes_summary(report: SizesReport) -> str:
    """One or two sentences for somebody who has never heard of a plan."""
    budget = bytes_text(report.budget)
    text = f"Within {budget} a step takes a batch of size {report.size} under a plan"
    if not report.plain_size:
        return f"{text}. Without a plan no size fits."
    text += f", and of size {report.plain_size} without one"
    planned, plain = map(seconds_text, (report.time_per_sample, report.plain_time_per_sample))
    return f"{text}. A sample takes {planned} under the plan, and {plain} without."


def size_cells(point: SizePoint, report: SizesReport) -> tuple[str, ...]:
    """The cells of a size, as `SIZES_HEADER` names them."""
    per_sample, rate = point.time_per_sample, point.samples_per_second
    return (
        str(point.size),
        bytes_text(point.plain_peak),
        "-" if point.peak is None else bytes_text(point.peak),
        "-" if point.seconds is None else seconds_text(point.seconds),
        "-" if per_sample is None else seconds_text(per_sample),
        "-" if rate is None else _rate(rate),
        "-" if per_sample is None else longer_text(per_sample, report.plain_time_per_sample),
        "yes" if point.fits else "no",
        "chosen" if point.size == report.size else point.kind,
    )


def sizes_table(report: SizesReport) -> str:
    """The figures, and a line for each size."""
    lines = [size_cells(point, report) for point in report.points]
    head = head_text(sizes_heading(report), sizes_figures(report))
    return f"{head}\n\n{columns(SIZES_HEADER, lines, left=SIZES_HEADER[-2:])}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 99.95 else f"{rate:.3g}"
