"""Curves with no more points than a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

__all__ = ["thinned"]

Curve = Sequence[tuple[float, int]]


def thinned(curve: Curve, buckets: int) -> list[tuple[float, int]]:
    """``curve`` with at most four points in each of ``buckets`` equal spans of time.

    The first, the last, the highest and the lowest of each are those that can be seen, and the
    peak of the whole is among them, where it was.
    """
    if len(curve) <= 4 * buckets:
        return list(curve)
    start, end = curve[0][0], curve[-1][0]
    width = (end - start) / buckets or 1.0
    spans = groupby(curve, lambda point: min(int((point[0] - start) / width), buckets - 1))
    return [point for _, span in spans for point in _telling(list(span))]


def _telling(points: Curve) -> list[tuple[float, int]]:
    """The first, the last, the highest and the lowest, in their order."""
    order = range(len(points))
    highest = max(order, key=lambda n: points[n][1])
    lowest = min(order, key=lambda n: points[n][1])
    return [points[n] for n in sorted({0, lowest, highest, len(points) - 1})]
