"""``determinism_check="values"``: whether backward gets the values that forward had.

Only tensors that autograd saved count, since backward uses nothing else of a recomputation. The ops
of the two logs show where a difference came from. Different ops alone are no error: a region may
do more in its first run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recollect._torch.ops import is_random
from recollect.checks.causes import (
    FROM_OUTSIDE,
    OTHER_LAYOUT,
    OTHER_WAY,
    likely_cause_of_values,
)
from recollect.checks.diagnosis import MismatchContext, describe_saved
from recollect.checks.fingerprint import compare
from recollect.checks.names import region_name
from recollect.checks.oplog import LoggedOp, OpLog, Row, SavedPrint, Strides, align
from recollect.checks.trace import both, op_number, whereabouts
from recollect.errors import RecomputeMismatch

__all__ = ["value_difference"]

_DIFFERS = (
    "torch.utils.checkpoint: The recomputation differs from the original forward "
    '(determinism_check="values").'
)
_OTHER_STRIDES = "same values, other strides (a view or memory layout): stride"
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
    affected = _first_affected(forward.saved, recompute.saved, dead)
    if affected is None:
        return None
    number, verdict = affected
    lines = [_DIFFERS]
    if context.function is not None:
        lines.append(f"In {region_name(context.function)}.")
    lines.append(
        f"Tensor {number}, saved by forward: {describe_saved(context, number)}: {verdict}."
    )
    lines += _origin(forward.entries, recompute.entries)
    return RecomputeMismatch("\n".join(lines))


def _first_affected(
    before: list[SavedPrint], after: list[SavedPrint], dead: frozenset[int]
) -> tuple[int, str] | None:
    """The first saved tensor that differs, by value or else by layout, and how."""
    ones: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    numbers: list[int] = []
    layout: tuple[int, str] | None = None
    for number, (one, other) in enumerate(zip(before, after, strict=False)):
        if number in dead or one.fingerprint is None or other.fingerprint is None:
            continue
        numbers.append(number)
        ones.append(one.fingerprint)
        others.append(other.fingerprint)
        if layout is None and one.strides != other.strides:
            layout = number, f"{_OTHER_STRIDES} {_shown(one.strides)} then {_shown(other.strides)}"
    differing = compare(ones, others)
    return layout if differing is None else (numbers[differing], "values differ")


def _shown(strides: Strides) -> str:
    """Strides, with ``-`` for a dimension of size one."""
    return f"({', '.join('-' if step is None else str(step) for step in strides)})"


# --- where it came from ---------------------------------------------------------------------------


def _origin(forward: list[LoggedOp], recompute: list[LoggedOp]) -> Iterator[str]:
    """The first op that differs: in what it is, in the values, or in the layout of its results."""
    rows, parted = align(forward, recompute)
    if parted is not None and None in rows[parted]:
        rows, parted = rows[:parted], None  # one run has ended
    values = _first_other_values(rows[:parted])
    layout = _first_other_layout(rows[:parted])
    if values is not None and (layout is None or values <= layout):
        return _other_values(rows, values)
    if layout is not None:
        return _other_layout(rows, layout, values)
    if parted is not None:
        return _other_operations(rows, parted)
    return iter(("No operation of the region computed anything else before it.", str(FROM_OUTSIDE)))


def _first_other_values(rows: list[Row]) -> int | None:
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    owners: list[int] = []
    for number, (one, other) in enumerate(rows):
        if one is not None and other is not None:
            pairs = list(zip(one.fingerprints, other.fingerprints, strict=False))
            before += [pair[0] for pair in pairs]
            after += [pair[1] for pair in pairs]
            owners += [number] * len(pairs)
    differing = compare(before, after)
    return None if differing is None else owners[differing]


def _first_other_layout(rows: list[Row]) -> int | None:
    for number, (one, other) in enumerate(rows):
        if one is not None and other is not None and one.strides != other.strides:
            return number
    return None


def _other_values(rows: list[Row], row: int) -> Iterator[str]:
    yield f"First difference, at operation {op_number(rows, row)}: values differ"
    yield from _one(rows[row])
    before = rows[row][0]
    yield str(likely_cause_of_values(random=before is not None and is_random(before.op)))


def _other_layout(rows: list[Row], row: int, values: int | None) -> Iterator[str]:
    strides = (() if entry is None else entry.strides for entry in rows[row])
    shown = " then ".join(", ".join(map(_shown, each)) for each in strides)
    yield f"First difference, at operation {op_number(rows, row)}: {_OTHER_STRIDES} {shown}"
    yield from _one(rows[row])
    if values is not None:
        yield f"From operation {op_number(rows, values)} on values differ as well."
    yield str(OTHER_LAYOUT)


def _other_operations(rows: list[Row], row: int) -> Iterator[str]:
    yield f"First difference, at operation {op_number(rows, row)}: different operations"
    yield from both(rows, row)
    yield str(OTHER_WAY)


def _one(row: Row) -> Iterator[str]:
    """The op of a row whose op is the same in both runs."""
    entry = row[0]
    if entry is not None:
        yield f"  {entry.line}"
        yield from whereabouts(entry, entry.path)
        if not entry.stack:
            yield "      (debug=True shows the line of code)"
