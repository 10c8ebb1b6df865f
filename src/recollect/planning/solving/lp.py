"""A small linear program: the cheapest mixture of given columns that stays within limits.

The lower bound needs its dual prices (`prices`).
"""

from __future__ import annotations

from collections.abc import Sequence

_NOTHING = 1e-12
_MOST_PIVOTS = 500


def best_mixture(
    costs: Sequence[float], rows: Sequence[Sequence[float]], limits: Sequence[float]
) -> tuple[float, list[float], list[float]]:
    """The least cost of a mixture, its weights, which add up to one, and the price of each limit.

    Args:
        costs: By column.
        rows: By limit, the amount of each column. The first column is within all limits.
        limits: The most of each amount.
    """
    first = costs[0]
    table = [[each - row[0] for each in row[1:]] for row in rows]
    table.append([1.0] * (len(costs) - 1))
    room = [limit - row[0] for limit, row in zip(limits, rows, strict=True)] + [1.0]
    for number, row in enumerate(table):
        row += [float(number == other) for other in range(len(table))]
        row.append(max(0.0, room[number]))
    gains = [cost - first for cost in costs[1:]] + [0.0] * (len(table) + 1)
    basis = [len(costs) - 1 + number for number in range(len(table))]
    _improve(table, gains, basis)
    weights = [0.0] * len(costs)
    for row, column in zip(table, basis, strict=True):
        if column < len(costs) - 1:
            weights[column + 1] = row[-1]
    weights[0] = max(0.0, 1.0 - sum(weights))
    prices = [max(0.0, gain) for gain in gains[len(costs) - 1 : -2]]
    return first - gains[-1], weights, prices


def _improve(table: list[list[float]], gains: list[float], basis: list[int]) -> None:
    """The simplex method, on a table whose last column is the rest of each limit."""
    for pivot in range(_MOST_PIVOTS):
        column = _entering(gains, careful=pivot > _MOST_PIVOTS // 2)
        if column < 0:
            return
        leaving = min(
            (row[-1] / row[column], basis[number], number)
            for number, row in enumerate(table)
            if row[column] > _NOTHING
        )[2]
        chosen = table[leaving]
        factor = chosen[column]
        chosen[:] = [each / factor for each in chosen]
        for row in (*table, gains):
            if row is not chosen and (factor := row[column]):
                row[:] = [a - factor * b for a, b in zip(row, chosen, strict=True)]
        basis[leaving] = column


def _entering(gains: list[float], *, careful: bool) -> int:
    """The column that gains most; or the first that gains anything, which avoids cycles."""
    scale = max(abs(gain) for gain in gains) or 1.0
    best, found = -_NOTHING * scale, -1
    for column, gain in enumerate(gains[:-1]):
        if gain < best:
            best, found = gain, column
            if careful:
                break
    return found
