"""The figures of a plan in words: the table and the page say the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

from recollect.report.plan_report import Picture
from recollect.report.units import bytes_text, percent_text, seconds_text

__all__ = ["Figure", "figures", "heading", "longer_text", "summary"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that matters.

    Args:
        label: What it is.
        value: The number, as text.
        remark: What to compare it with; may be empty.
        share: How much of a bar it fills, where it is a part of something.
    """

    label: str
    value: str
    remark: str = ""
    share: float | None = None


def heading(picture: Picture) -> str:
    """What is shown."""
    what = "Frontier of" if picture.budget is None else "Plan for"
    return f"{what} {picture.title} on {picture.device}"


def figures(picture: Picture) -> list[Figure]:
    """Those that are known, in the order in which they are asked for."""
    found = [
        _peak(picture),
        _measured_peak(picture),
        _plain(picture),
        _time(picture),
        _measured_time(picture),
        _gap(picture),
    ]
    if picture.budget is not None:
        found.insert(0, Figure("budget", bytes_text(picture.budget)))
    return [figure for figure in found if figure is not None]


def summary(picture: Picture) -> str:
    """One or two sentences for somebody who has never heard of a plan."""
    peak, plain = bytes_text(picture.predicted_peak), bytes_text(picture.plain_peak)
    share = percent_text(_ratio(picture.predicted_peak, picture.plain_peak))
    if picture.budget is None:
        text = f"A step can run in as little as {peak}, {share} of the {plain} of the plain step"
    else:
        budget = bytes_text(picture.budget)
        text = (
            f"With a budget of {budget} the step is predicted to need at most {peak}, "
            f"{share} of the {plain} of the plain step"
        )
    if picture.measured_time is not None and picture.measured_plain_time:
        longer = _longer_words(picture.measured_time, picture.measured_plain_time)
        text += f", and was measured to take {longer}"
    elif picture.plain_time > 0:
        then = "then takes" if picture.budget is None else "takes"
        text += f", and {then} {_longer_words(picture.predicted_time, picture.plain_time)}"
    return f"{text}. {_bound_words(picture)}".rstrip()


def longer_text(seconds: float, plain: float) -> str:
    """How much longer than plain, such as ``+8.1%``; empty if there is nothing to compare with."""
    if plain <= 0:
        return ""
    more = seconds / plain - 1
    sign = "+" if more > 0 else ""
    return sign + percent_text(more)


def _peak(picture: Picture) -> Figure:
    value = bytes_text(picture.predicted_peak)
    if picture.budget is None:
        share = _ratio(picture.predicted_peak, picture.plain_peak)
        return Figure("least peak", value, f"{percent_text(share)} of plain", share)
    share = _ratio(picture.predicted_peak, picture.budget)
    return Figure("predicted peak", value, f"{percent_text(share)} of the budget", share)


def _measured_peak(picture: Picture) -> Figure | None:
    if picture.measured_peak is None or picture.budget is None:
        return None
    share = _ratio(picture.measured_peak, picture.budget)
    value = bytes_text(picture.measured_peak)
    return Figure("measured peak", value, f"{percent_text(share)} of the budget", share)


def _plain(picture: Picture) -> Figure:
    saved = picture.plain_peak - picture.predicted_peak
    who = "the plan saves" if picture.budget is not None else "plans save up to"
    remark = f"{who} {bytes_text(saved)}" if saved > 0 else "the step fits as it is"
    return Figure("plain peak", bytes_text(picture.plain_peak), remark)


def _time(picture: Picture) -> Figure | None:
    if picture.plain_time <= 0:
        return None
    remark = f"{seconds_text(picture.predicted_time)}, plain {seconds_text(picture.plain_time)}"
    value = longer_text(picture.predicted_time, picture.plain_time)
    label = "time vs plain" if picture.budget is None else "predicted time"
    return Figure(label, value, remark)


def _measured_time(picture: Picture) -> Figure | None:
    if picture.measured_time is None:
        return None
    seconds, plain = seconds_text(picture.measured_time), picture.measured_plain_time
    if not plain:
        return Figure("measured time", seconds, "there was no plain step to compare with")
    remark = f"{seconds}, plain {seconds_text(plain)}"
    return Figure("measured time", longer_text(picture.measured_time, plain), remark)


def _gap(picture: Picture) -> Figure | None:
    if not _has_bound(picture):
        return None
    remark = f"no plan that fits is below {seconds_text(picture.bound_time)}"
    return Figure("gap to the bound", percent_text(picture.gap), remark)


def _longer_words(seconds: float, plain: float) -> str:
    more = seconds / plain - 1
    if abs(more) < 0.0005:
        return "the same time"
    return f"{percent_text(abs(more))} {'longer' if more > 0 else 'less time'}"


def _bound_words(picture: Picture) -> str:
    if not _has_bound(picture):
        return ""
    if picture.gap <= 0:
        return "No plan that fits is faster."
    return (
        f"No plan that fits can take less than {seconds_text(picture.bound_time)}: "
        f"this one is within {percent_text(picture.gap)} of that."
    )


def _has_bound(picture: Picture) -> bool:
    return picture.bound_time > 0 and math.isfinite(picture.gap)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
