"""``determinism_check="values"``: whether backward gets the values that forward had.

Only tensors that autograd saved count, since backward uses nothing else of a recomputation. The ops
of the two logs show where a difference came from. Different ops alone are no error: a region may
do more in its first run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from recollect.checks.causes import (
    FROM_OUTSIDE,
    OTHER_LAYOUT,
    OTHER_WAY,
    likely_cause_of_values,
)
from recollect.checks.diagnosis import MismatchContext, describe_saved
from recollect.checks.fingerprint import compare
from recollect.checks.names import region_name
from recollect.checks.oplog import LoggedOp, OpLog, SavedPrint, Strides, align
from recollect.checks.trace import both, op_number, whereabouts
from recollect.errors import RecomputeMismatch
from recollect.policy.op_info import op_info

__all__ = ["value_difference"]

#: An op or a saved tensor of each run.
Pair = tuple[LoggedOp | SavedPrint | None, LoggedOp | SavedPrint | None]
_SKIPPED = None, None

_DIFFERS = (
    "torch.utils.checkpoint: The recomputation differs from the original forward "
    '(determinism_check="values").'
)
_OTHER_VALUES = "values differ"
_NO_CONTEXT = MismatchContext()


def value_difference(
    forward: OpLog,
    recompute: OpLog,
    context: MismatchContext = _NO_CONTEXT,
    dead: frozenset[int] = frozenset(),
) -> RecomputeMismatch | None:
    """The error for a recomputation that gives backward other values, or None.

    The logs must have fingerprints and saved tensors. ``dead``: the numbers of saved tensors that
    the graph does not need any more.
    """
    saved = zip(forward.saved, recompute.saved, strict=False)
    pairs: list[Pair] = [
        (one, other) if number not in dead and one.fingerprints and other.fingerprints else _SKIPPED
        for number, (one, other) in enumerate(saved)
    ]
    values, layout = _first_differences(pairs)
    number = layout if values is None else values
    if number is None:
        return None
    lines = [_DIFFERS]
    if context.function is not None:
        lines.append(f"In {region_name(context.function)}.")
    verdict = _OTHER_VALUES if values is not None else _other_strides(pairs[number])
    lines.append(
        f"Tensor {number}, saved by forward: {describe_saved(context, number)}: {verdict}."
    )
    lines += _origin(forward.entries, recompute.entries)
    return RecomputeMismatch("\n".join(lines))


def _first_differences(pairs: Sequence[Pair]) -> tuple[int | None, int | None]:
    """The first pair with other values, and the first with another layout; `_SKIPPED` apart."""
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    owners: list[int] = []
    layout: int | None = None
    for number, (one, other) in enumerate(pairs):
        if one is None or other is None:
            continue
        prints = list(zip(one.fingerprints, other.fingerprints, strict=False))
        before += [pair[0] for pair in prints]
        after += [pair[1] for pair in prints]
        owners += [number] * len(prints)
        if layout is None and one.strides != other.strides:
            layout = number
    differing = compare(before, after)
    return None if differing is None else owners[differing], layout


def _other_strides(pair: Pair) -> str:
    shown = (", ".join(map(_shown, () if each is None else each.strides)) for each in pair)
    return f"same values, other strides (a view or memory layout): stride {' then '.join(shown)}"


def _shown(strides: Strides) -> str:
    """Strides, with ``-`` for a dimension of size one."""
    return f"({', '.join('-' if step is None else str(step) for step in strides)})"


def _origin(forward: list[LoggedOp], recompute: list[LoggedOp]) -> Iterator[str]:
    """The first op that differs: in what it is, in the values, or in the layout of its results."""
    rows, parted = align(forward, recompute)
    if parted is not None and None in rows[parted]:
        rows, parted = rows[:parted], None  # one run has ended
    values, layout = _first_differences(rows[:parted])
    first = min((row for row in (values, layout, parted) if row is not None), default=None)
    if first is None:
        yield "No operation of the region computed anything else before it."
        yield str(FROM_OUTSIDE)
        return
    heading = f"First difference, at operation {op_number(rows, first)}"
    entry = rows[first][0]
    assert entry is not None
    if first == values:
        yield f"{heading}: {_OTHER_VALUES}"
        yield from _described(entry)
        yield str(likely_cause_of_values(random=op_info(entry.op).is_random))
    elif first == layout:
        yield f"{heading}: {_other_strides(rows[first])}"
        yield from _described(entry)
        if values is not None:
            yield f"From operation {op_number(rows, values)} on values differ as well."
        yield str(OTHER_LAYOUT)
    else:
        yield f"{heading}: different operations"
        yield from both(rows, first)
        yield str(OTHER_WAY)


def _described(entry: LoggedOp) -> Iterator[str]:
    """An op that is the same in both runs."""
    yield f"  {entry.line}"
    yield from whereabouts(entry, entry.path)
    if not entry.stack:
        yield "      (debug=True shows the line of code)"
