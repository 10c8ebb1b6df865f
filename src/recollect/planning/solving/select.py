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
class Subproblem:
    """Ops to choose from, by their number here."""

    seconds: Sequence[float]  #: by op: the time to recompute it
    nbytes: Sequence[int | None]  #: by op: the bytes to keep it; None if it cannot be kept
    is_free: Sequence[bool]  #: by op: whether it is kept in any case
    reads: Sequence[Sequence[int]]  #: by op: the ops whose results it reads
    outside: Sequence[Sequence[int]]  #: by op: the inputs from outside that it reads
    outside_bytes: Sequence[int]  #: the bytes of each of these inputs
    saved: frozenset[int]  #: the ops whose results backward unpacks


def reruns(problem: Subproblem, kept: frozenset[int]) -> set[int]:
    """The ops that are recomputed if ``kept`` are kept."""
    found: set[int] = set()
    wanted = list(problem.saved)
    while wanted:
        op = wanted.pop()
        if op not in found and op not in kept and not problem.is_free[op]:
            found.add(op)
            wanted += problem.reads[op]
    return found


def corners(problem: Subproblem, most: int) -> list[frozenset[int]]:
    """The choices that are best at some price, about ``most`` of them at most."""
    total = sum(problem.seconds) + 1e-12
    sizes = [nbytes for nbytes in problem.nbytes if nbytes]
    if not sizes:
        return [_at_price(problem, 0.0)]
    low, high = 1e-3 * min(problem.seconds) / sum(sizes), 1e3 * total / min(sizes)
    small, quick = _at_price(problem, high), _at_price(problem, low)
    found = {small: _costs(problem, small), quick: _costs(problem, quick)}
    gaps = deque([(small, quick)])
    while gaps and len(found) < most:
        left, right = gaps.popleft()
        nbytes = found[right][0] - found[left][0]
        seconds = found[left][1] - found[right][1]
        if nbytes <= 0 or seconds <= 0:
            continue
        between = _at_price(problem, seconds / nbytes)
        if between not in found:
            found[between] = _costs(problem, between)
            gaps += [(left, between), (between, right)]
    return list(found)


def _costs(problem: Subproblem, kept: frozenset[int]) -> tuple[int, float]:
    again = reruns(problem, kept)
    inputs = {number for op in again for number in problem.outside[op]}
    nbytes = sum(problem.nbytes[op] or 0 for op in kept) + sum(
        problem.outside_bytes[n] for n in inputs
    )
    return nbytes, sum(problem.seconds[op] for op in again)


def _at_price(problem: Subproblem, price: float) -> frozenset[int]:
    """The ops to keep if a byte costs ``price`` seconds."""
    ops = [op for op, is_free in enumerate(problem.is_free) if not is_free]
    network = Network()
    # An op is needed if the first node is on the side of the source, recomputed if the second is.
    needed = {op: network.node() for op in ops}
    again = {op: network.node() for op in ops}
    inputs = [network.node() for _ in problem.outside_bytes]
    for op in ops:
        nbytes = problem.nbytes[op]
        network.edge(needed[op], again[op], _NO_LIMIT if nbytes is None else _whole(price * nbytes))
        network.edge(again[op], 1, _whole(problem.seconds[op]))
        for read in problem.reads[op]:
            if read in needed:
                network.edge(again[op], needed[read], _NO_LIMIT)
        for number in problem.outside[op]:
            network.edge(again[op], inputs[number], _NO_LIMIT)
        if op in problem.saved:
            network.edge(0, needed[op], _NO_LIMIT)
    for node, nbytes in zip(inputs, problem.outside_bytes, strict=True):
        network.edge(node, 1, _whole(price * nbytes))
    network.fill()
    near = network.levels()
    return frozenset(op for op in ops if near[needed[op]] >= 0 > near[again[op]])


def _whole(seconds: float) -> int:
    return int(seconds * _UNIT) + 1
