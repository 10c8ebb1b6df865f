"""Translating sizes: what they become when the tensors of the batch take other shapes.

Code computes sizes from shapes, and only the result is seen: 192 was the batch times its length, or
the width of a layer. Where the shapes of an op's arguments determine a size, that is taken. Else it
becomes what other sizes of the same value have become, or a simple sum or product of those of the
batch: all of these, the likeliest first. The caller takes the next if one does not fit. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice, product
from typing import Any

__all__ = ["Dims", "Shape", "dense_strides", "is_dense"]

Shape = tuple[int, ...]

#: So many ways are tried for one list of sizes at most.
_MOST = 64
#: A size of the batch from which on a number near to it is taken to be made from it.
_TELLING = 8


class Dims:
    """What sizes have become, as far as it is known.

    Args:
        changes: The shapes of the tensors of the batch, before and now.
        numbers: Sizes that code read from the values of tensors, which cannot be known now.
    """

    def __init__(
        self, changes: Sequence[tuple[Shape, Shape]], numbers: Container[int] = ()
    ) -> None:
        self._numbers = numbers
        self._seen: dict[int, dict[int, int]] = {}
        #: By shape: what it has become, how often that was seen; the last one is last.
        self._shapes: dict[Shape, dict[Shape, int]] = {}
        #: The same for the first sizes of shapes, two or more, where one of them has changed.
        self._starts: dict[Shape, dict[Shape, int]] = {}
        #: The same for numbers of elements.
        self._totals: dict[int, dict[int, int]] = {}
        self._log: list[tuple[Shape, Shape]] = []
        pairs = {pair for old, new in changes for pair in zip(old, new, strict=True)}
        self._batch = sorted(pairs, reverse=True)
        for old, new in changes:
            self.note(old, new)

    # --- what is known ----------------------------------------------------------------------------

    def note(self, old: Shape, new: Shape) -> None:
        """A tensor of the shape ``old`` has the shape ``new``."""
        if len(old) == len(new):
            self._log.append((old, new))
            for counts, before, now in self._counts(old, new):
                found = counts.setdefault(before, {})
                found[now] = found.pop(now, 0) + 1  # as the last one

    @property
    def mark(self) -> int:
        """How much is known; to be passed to `undo`."""
        return len(self._log)

    def undo(self, mark: int) -> None:
        """Forget what was noted since."""
        while len(self._log) > mark:
            for counts, before, now in self._counts(*self._log.pop()):
                counts[before][now] -= 1
                if not counts[before][now]:
                    del counts[before][now]

    def _counts(self, old: Shape, new: Shape) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
        """The counts in which a pair of shapes is noted, each with what is counted there."""
        yield self._shapes, old, new
        yield self._totals, math.prod(old), math.prod(new)
        for end in range(2, len(old) + 1):
            if old[:end] != new[:end]:
                yield self._starts, old[:end], new[:end]
        for before, now in zip(old, new, strict=True):
            if before != now:
                yield self._seen, before, now

    # --- single sizes -----------------------------------------------------------------------------

    def of(self, size: int, *, is_first: bool = True) -> list[int]:
        """What a size may be now. A one that is not the first of several likely stays one."""
        if size <= 0:
            return [size]
        counts = self._seen.get(size) or self._totals.get(size) or {}
        seen = sorted(counts, key=lambda now: -counts[now])
        if seen:
            found = [size, *seen] if size == 1 and not is_first else [*seen, size]
        elif size in self._numbers:
            return []
        else:
            likely, unlikely = self._derived(size)
            found = [*likely, size, *unlikely]
        return list(dict.fromkeys(found))

    def _derived(self, size: int) -> tuple[list[int], list[int]]:
        """What a size may be that no tensor has: computed from those of the batch."""
        likely: list[int] = []
        unlikely: list[int] = []
        changed = [(old, new) for old, new in self._batch if old != new and old > 1]
        for old, new in changed:
            near = size - old
            if abs(near) <= 2:
                (likely if old >= _TELLING else unlikely).append(new + near)
            likely += [new * now for before, now in self._batch if 1 < before == size / old]
            if size % old == 0:
                unlikely.append(new * (size // old))
            if old % size == 0 and size > 1 and new % (old // size) == 0:
                unlikely.append(new // (old // size))
        return likely, unlikely

    # --- lists of sizes ---------------------------------------------------------------------------

    def of_shape(self, sizes: Shape) -> Iterator[Shape]:
        """What a list of sizes may be now."""
        same = list(reversed(self._shapes.get(sizes, {})))
        each = [self.of(size, is_first=not place) for place, size in enumerate(sizes)]
        yield from same
        yield from (found for found in islice(product(*each), _MOST) if found not in same)

    def of_view(self, old: Shape, new: Shape, sizes: Shape) -> Iterator[Shape]:
        """The same for a view of a tensor whose shape was ``old`` and is ``new``."""
        groups = [self._of_group(*group) for group in _groups(old, new, sizes)]
        for found in _products(groups):
            yield tuple(size for group in found for size in group)

    def _of_group(self, old: Shape, new: Shape, sizes: Shape) -> Iterator[Shape]:
        """What sizes may be whose product is that of ``new``, as it was that of ``old``."""
        total = math.prod(new)
        if old == new:
            yield sizes
        elif old == sizes:
            yield new
        changed = [n for n in range(len(old)) if old[n] != new[n]]
        for n, place in ((0, 0), (len(old) - 1, len(sizes) - 1)):
            # Which of two equal sizes has changed: what lies outside lies outside in the view too.
            is_alike = changed == [n] and old.count(old[n]) > 1
            size = sizes[place] * new[n] // old[n] if is_alike else 0
            if size and sizes[place] * total == size * math.prod(sizes):
                yield _with(sizes, {place: size})
        # Batch and length may be the same number: which of them has changed is seen elsewhere.
        for found in [*reversed(self._starts.get(sizes, {}))]:  # which grow meanwhile
            if math.prod(found) == total:
                yield found
        # A one may be any size of one that has changed.
        free = [n for n, size in enumerate(sizes) if size != 1 or self._seen.get(1)]

        def filling(options: Iterable[Sequence[int]]) -> Iterator[Shape]:
            for found in islice(product(*options), _MOST):
                if math.prod(found) == total:
                    yield _with(sizes, dict(zip(free, found, strict=True)))

        if len(free) > 1:
            yield from filling([*self._seen.get(sizes[n], {}), sizes[n]] for n in free)
        for n in free or range(1):
            # Or all but one are as they were; what is cut off at the end rather than at the front.
            rest = math.prod(sizes[:n]) * math.prod(sizes[n + 1 :])
            if rest and total % rest == 0:
                yield _with(sizes, {n: total // rest})
        if len(free) > 1:
            yield from filling(self.of(sizes[n], is_first=not n) for n in free)

    def of_expanded(self, old: Shape, new: Shape, sizes: Shape) -> Iterator[Shape]:
        """The same for a tensor that is expanded."""
        more = len(sizes) - len(old)
        each = [self.of(size, is_first=not place) for place, size in enumerate(sizes[:more])]
        for before, now, size in zip(old, new, sizes[more:], strict=True):
            is_as_given = before == size or now != 1
            each.append([now] if is_as_given else self.of(size, is_first=False))
        for found in [*reversed(self._shapes.get(sizes, {}))]:  # which grow meanwhile
            if all(size in options for size, options in zip(found, each, strict=True)):
                yield found
        yield from islice(product(*each), _MOST)

    def of_index(
        self, length: int, now: int, index: int | None, *, of_table: bool
    ) -> list[int | None]:
        """What the start or end of a slice may be, of a dimension that was ``length`` long.

        ``of_table``: of a tensor that is as before. Its first rows are taken, as many as the batch
        is long. Others are cut within a layer, if not along what has changed.
        """
        if index is None or index <= 0:
            return [index]
        if index >= length:
            return [max(index, now)]
        found: list[int | None] = [*self.of(index, is_first=False)]
        if now != length:
            from_end = now - (length - index)
            place = 0 if length - index <= 2 < index else len(found)
            found.insert(place, from_end)
        elif not of_table:
            found.insert(0, index)
        return list(dict.fromkeys(found))

    def of_parts(self, length: int, now: int, parts: Shape) -> Iterator[Shape]:
        """What the parts may be that a dimension is split into."""
        if now == length:
            yield parts
            return
        options = product(*(self.of(part) for part in parts))
        yield from (each for each in islice(options, _MOST) if sum(each) == now)
        for place in range(len(parts)):
            rest = now - (sum(parts) - parts[place])
            if rest >= 0:
                yield (*parts[:place], rest, *parts[place + 1 :])


def _with(sizes: Shape, others: dict[int, int]) -> Shape:
    return tuple(others.get(n, size) for n, size in enumerate(sizes))


def _products(options: Sequence[Iterator[Shape]]) -> Iterator[tuple[Shape, ...]]:
    """All combinations: the first of each first, which is mostly all that is asked for."""
    first = tuple(next(each, None) for each in options)
    likeliest = tuple(each for each in first if each is not None)
    if len(likeliest) < len(first):
        return
    yield likeliest
    each = [dict.fromkeys((one, *rest)) for one, rest in zip(likeliest, options, strict=True)]
    yield from islice(product(*each), 1, _MOST)


def _groups(old: Shape, new: Shape, sizes: Shape) -> Iterator[tuple[Shape, Shape, Shape]]:
    """The smallest runs of dimensions of a tensor and a view of it that have as many elements."""
    if not math.prod(old):
        yield old, new, sizes
        return
    i = j = 0
    while i < len(old) or j < len(sizes):
        first, start = i, j
        left = right = 1
        if i < len(old):
            left, i = left * old[i], i + 1
        if j < len(sizes):
            right, j = right * sizes[j], j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * sizes[j], j + 1
        if j == len(sizes):  # ones that the view does not have
            i = len(old)
        yield old[first:i], new[first:i], sizes[start:j]


def is_dense(size: Shape, stride: Shape) -> bool:
    """Whether a tensor fills its memory, in whatever order of dimensions."""
    return _fills(sorted(zip(stride, size, strict=True)))


def dense_strides(size: Shape, like: Shape, stride: Shape) -> Shape:
    """The strides of a dense tensor with the order of dimensions of another one."""
    order = list(range(len(like)))
    is_contiguous = _fills([*zip(stride, like, strict=True)][::-1])
    if not is_contiguous:
        order.sort(key=lambda dim: (-stride[dim], dim))
    found = [0] * len(size)
    step = 1
    for dim in reversed(order):
        found[dim] = step
        step *= max(size[dim], 1)
    return tuple(found)


def _fills(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether dimensions, each a stride and a length, fill memory from the innermost on."""
    expected = 1
    for step, length in dims:
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return True
