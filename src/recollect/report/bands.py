"""Divides the modules of a model into a few bands, for a stacked chart of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: At most so many bands: more cannot be told apart.
_MOST = 16


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
        if new and (numbered or len(prefixes) + len(new) <= _MOST):
            return prefixes | new
    return None


def _runs(found: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """By prefix: the name of its band. Numbered siblings share one if there are too many."""
    layers: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for prefix in found:
        if prefix and prefix[-1].isdecimal():
            layers.setdefault(prefix[:-1], []).append(prefix)
    room = max(1, (_MOST - len(found) + sum(map(len, layers.values()))) // max(1, len(layers)))
    names = {prefix: ".".join(prefix) or "the model itself" for prefix in found}
    for parent, children in layers.items():
        if len(found) <= _MOST or len(children) <= 1:
            continue
        size = -(-len(children) // room)
        for start in range(0, len(children), size):
            run = children[start : start + size]
            ends = f"{run[0][-1]}-{run[-1][-1]}" if len(run) > 1 else run[0][-1]
            names.update(dict.fromkeys(run, ".".join((*parent, ends))))
    return names
