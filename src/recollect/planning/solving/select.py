"""Keep or recompute, at a price for memory: the cheapest choice, exactly.

An op whose result is wanted is kept, which costs its bytes times the price, or recomputed, which
costs its seconds and wants what it reads. With a given price that is a minimum cut. The choices
that are best at some price are the corners of the convex hull of all choices; `corners` finds them
by solving at the price at which two known ones draw level.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from recollect.graph.flow import Network

__all__ = ["Piece", "corners", "reruns"]

#: Capacities are whole numbers, so that what is full is full.
_UNIT = 1e13
_NO_LIMIT = 1 << 100


@dataclass(frozen=True, slots=True)
class Piece:
    """Ops among which to choose, by their number here.

    Args:
        seconds: What each takes to run again.
        nbytes: What each costs to keep; None if it cannot be.
        is_free: Whether each is there in any case.
        reads: The ops whose results each reads.
        outside: The things outside that each reads.
        prices: The bytes of the things outside.
        asked: The ops whose results are wanted.
    """

    seconds: Sequence[float]
    nbytes: Sequence[int | None]
    is_free: Sequence[bool]
    reads: Sequence[Sequence[int]]
    outside: Sequence[Sequence[int]]
    prices: Sequence[int]
    asked: frozenset[int]


def reruns(piece: Piece, kept: frozenset[int]) -> set[int]:
    """The ops that run again if ``kept`` are kept."""
    found: set[int] = set()
    wanted = list(piece.asked)
    while wanted:
        op = wanted.pop()
        if op not in found and op not in kept and not piece.is_free[op]:
            found.add(op)
            wanted += piece.reads[op]
    return found


def corners(piece: Piece, most: int) -> list[frozenset[int]]:
    """The choices that are best at some price, about ``most`` of them at most."""
    total = sum(piece.seconds) + 1e-12
    sizes = [nbytes for nbytes in piece.nbytes if nbytes]
    if not sizes:
        return [_at_price(piece, 0.0)]
    low, high = 1e-3 * min(piece.seconds) / sum(sizes), 1e3 * total / min(sizes)
    small, quick = _at_price(piece, high), _at_price(piece, low)
    found = {small: _costs(piece, small), quick: _costs(piece, quick)}
    gaps = deque([(small, quick)])
    while gaps and len(found) < most:
        left, right = gaps.popleft()
        nbytes = found[right][0] - found[left][0]
        seconds = found[left][1] - found[right][1]
        if nbytes <= 0 or seconds <= 0:
            continue
        between = _at_price(piece, seconds / nbytes)
        if between not in found:
            found[between] = _costs(piece, between)
            gaps += [(left, between), (between, right)]
    return list(found)


def _costs(piece: Piece, kept: frozenset[int]) -> tuple[int, float]:
    again = reruns(piece, kept)
    things = {thing for op in again for thing in piece.outside[op]}
    nbytes = sum(piece.nbytes[op] or 0 for op in kept) + sum(piece.prices[t] for t in things)
    return nbytes, sum(piece.seconds[op] for op in again)


def _at_price(piece: Piece, price: float) -> frozenset[int]:
    """What to keep, where a byte costs so many seconds."""
    ops = [op for op, is_free in enumerate(piece.is_free) if not is_free]
    network = Network()
    # An op is wanted on the source's side of the first, and runs again on that of the second.
    wanted = {op: network.node() for op in ops}
    again = {op: network.node() for op in ops}
    things = [network.node() for _ in piece.prices]
    for op in ops:
        nbytes = piece.nbytes[op]
        network.edge(wanted[op], again[op], _NO_LIMIT if nbytes is None else _whole(price * nbytes))
        network.edge(again[op], 1, _whole(piece.seconds[op]))
        for read in piece.reads[op]:
            if read in wanted:
                network.edge(again[op], wanted[read], _NO_LIMIT)
        for thing in piece.outside[op]:
            network.edge(again[op], things[thing], _NO_LIMIT)
        if op in piece.asked:
            network.edge(0, wanted[op], _NO_LIMIT)
    for thing, nbytes in zip(things, piece.prices, strict=True):
        network.edge(thing, 1, _whole(price * nbytes))
    network.fill()
    near = network.levels()
    return frozenset(op for op in ops if near[wanted[op]] >= 0 > near[again[op]])


def _whole(seconds: float) -> int:
    return int(seconds * _UNIT) + 1
