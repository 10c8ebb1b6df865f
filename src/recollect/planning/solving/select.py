"""Keep or recompute, at one price per byte: the cheapest choice, exactly.

This gives the candidates of a segment. An op whose result is needed is kept, at its bytes times the
price, or recomputed, which takes its seconds and needs its inputs. At a given price that is a
minimum cut. The choices that are best at some price are the corners of the convex hull of all
choices; `corners` finds them by solving at the price at which two known ones cost the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from recollect.graph.flow import Network

#: Capacities are integers, so that rounding cannot leave residual capacity.
_UNIT = 1e13
_NO_LIMIT = 1 << 100


@dataclass(frozen=True, slots=True)
class Piece:
    """Ops to choose from, by their number here.

    Args:
        seconds: By op: the time to recompute it.
        nbytes: By op: the bytes to keep it; None if it cannot be kept.
        is_free: By op: whether it is kept in any case.
        reads: By op: the ops whose results it reads.
        outside: By op: the inputs from outside that it reads.
        prices: The bytes of the inputs from outside.
        saved: The ops whose results backward unpacks.
    """

    seconds: Sequence[float]
    nbytes: Sequence[int | None]
    is_free: Sequence[bool]
    reads: Sequence[Sequence[int]]
    outside: Sequence[Sequence[int]]
    prices: Sequence[int]
    saved: frozenset[int]


def reruns(piece: Piece, kept: frozenset[int]) -> set[int]:
    """The ops that are recomputed if ``kept`` are kept."""
    found: set[int] = set()
    wanted = list(piece.saved)
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
    inputs = {number for op in again for number in piece.outside[op]}
    nbytes = sum(piece.nbytes[op] or 0 for op in kept) + sum(piece.prices[n] for n in inputs)
    return nbytes, sum(piece.seconds[op] for op in again)


def _at_price(piece: Piece, price: float) -> frozenset[int]:
    """The ops to keep if a byte costs ``price`` seconds."""
    ops = [op for op, is_free in enumerate(piece.is_free) if not is_free]
    network = Network()
    # An op is needed if the first node is on the side of the source, recomputed if the second is.
    needed = {op: network.node() for op in ops}
    again = {op: network.node() for op in ops}
    inputs = [network.node() for _ in piece.prices]
    for op in ops:
        nbytes = piece.nbytes[op]
        network.edge(needed[op], again[op], _NO_LIMIT if nbytes is None else _whole(price * nbytes))
        network.edge(again[op], 1, _whole(piece.seconds[op]))
        for read in piece.reads[op]:
            if read in needed:
                network.edge(again[op], needed[read], _NO_LIMIT)
        for number in piece.outside[op]:
            network.edge(again[op], inputs[number], _NO_LIMIT)
        if op in piece.saved:
            network.edge(0, needed[op], _NO_LIMIT)
    for node, nbytes in zip(inputs, piece.prices, strict=True):
        network.edge(node, 1, _whole(price * nbytes))
    network.fill()
    near = network.levels()
    return frozenset(op for op in ops if near[needed[op]] >= 0 > near[again[op]])


def _whole(seconds: float) -> int:
    return int(seconds * _UNIT) + 1
