"""The first difference in the logs of two runs of a region, for ``debug=True`` and ``"values"``.

``debug=True`` adds the ops of both runs to an error. ``determinism_check="values"`` raises if
backward would get other values than forward had. Only saved tensors count; the ops show where a
difference came from. Different ops alone are no error: a region may do more in its first run.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest

from recollect.checks.diagnosis import (
    FROM_OUTSIDE,
    OTHER_BRANCH,
    OTHER_LAYOUT,
    RANDOM_OP,
    UNSTABLE_OP,
    MismatchContext,
    describe_saved,
)
from recollect.checks.fingerprint import compare
from recollect.checks.names import region_name
from recollect.checks.oplog import LoggedOp, OpLog, Prints, Strides
from recollect.errors import CheckpointError, RecomputeMismatch
from recollect.policy.op_info import op_info

#: An op of forward and its counterpart; None where an op is in one log only.
LogRow = tuple[LoggedOp | None, LoggedOp | None]


def align(forward: list[LoggedOp], recompute: list[LoggedOp]) -> tuple[list[LogRow], int | None]:
    """Pairs the ops of two runs, and finds the row of their first difference.

    After it, ops are paired in order. If one run ends first, that is a difference.
    """
    rows: list[LogRow] = []
    here, there = 0, 0
    while here < len(forward) or there < len(recompute):
        before = forward[here] if here < len(forward) else None
        after = recompute[there] if there < len(recompute) else None
        if before is not None and after is not None and before.line == after.line:
            rows.append((before, after))
            here, there = here + 1, there + 1
        elif before is not None and before.optional:
            rows.append((before, None))
            here += 1
        elif after is not None and after.optional:
            rows.append((None, after))
            there += 1
        else:
            return rows + list(zip_longest(forward[here:], recompute[there:])), len(rows)
    return rows, None


# --- the ops of both runs: debug=True -------------------------------------------------------------


def explain(
    error: CheckpointError, forward: OpLog, recompute: OpLog, *, stopped: bool = False
) -> CheckpointError:
    """``error`` with the first difference, and both logs around it.

    ``stopped``: the recomputation stopped early, so its end is no difference.
    """
    rows, first = align(forward.entries, recompute.entries)
    if stopped and first is not None and rows[first][1] is None:
        first = None
    found = ["Both runs executed the same operations on the same shapes, as far as both went."]
    if first is not None:
        found = [f"First difference, at operation {_op_number(rows, first)}:", *_both(rows, first)]
    why = (
        "You are seeing this error because you passed `debug=True` to checkpoint, or set it\n"
        "with set_checkpoint_debug_enabled."
    )
    return type(error)("\n".join([str(error), why, "", *found, "", *_side_by_side(rows, first)]))


def _op_number(rows: list[LogRow], row: int) -> int:
    """The number in forward, counted from one, of the op in a row."""
    return 1 + sum(before is not None for before, _ in rows[:row])


def _both(rows: list[LogRow], row: int) -> Iterator[str]:
    """The op of each run, and where it was called."""
    for run, entry in zip(("forward  ", "recompute"), rows[row], strict=True):
        if entry is None:
            yield f"  {run}: (no more operations)"
        else:
            yield f"  {run}: {entry.line}"
            yield from _whereabouts(entry)


def _whereabouts(entry: LoggedOp) -> Iterator[str]:
    """The module and the lines of code that led to an op."""
    if entry.path:
        yield f"      in {entry.path}"
    for file, line, function in entry.stack:
        code = linecache.getline(file, line).strip()
        yield f"      {file}:{line} in {function}{code and ': '}{code}"


#: Rows shown before and after the first difference, and how much of a line.
_BEFORE, _AFTER, _WIDTH = 4, 12, 90

_FORWARD = "Operations executed during the original forward"
_RECOMPUTE = "Operations executed during recomputation"


def _side_by_side(rows: list[LogRow], first: int | None) -> Iterator[str]:
    in_both = (position for position, row in enumerate(rows) if None not in row)
    middle = max(in_both, default=0) if first is None else first
    start, end = max(0, middle - _BEFORE), min(middle + 1 + _AFTER, len(rows))
    forward, recompute = (_column([row[side] for row in rows]) for side in (0, 1))
    width = max(len(_FORWARD), *map(len, forward[start:end]), 0)
    yield f"  {_FORWARD:{width}} | {_RECOMPUTE}"
    if start:
        yield f"  ({start} before these, which agree, left out)"
    path: str | None = None
    for position in range(start, end):
        before = rows[position][0]
        if before is not None and before.path != path:
            path = before.path
            yield f"  {path or '(outside of modules)'}"
        marker = ">" if position == first else " "
        yield f"{marker} {forward[position]:{width}} | {recompute[position]}".rstrip()
    if end < len(rows):
        yield f"  ({len(rows) - end} after these left out)"
    yield "  (a recomputation stops once it has all tensors that backward needs)"


def _column(entries: list[LoggedOp | None]) -> list[str]:
    """The ops of one run, numbered; empty where the other run has one more."""
    numbers = accumulate(entry is not None for entry in entries)
    lines = [
        "" if entry is None else f"{number:5d}  {entry.line}"
        for entry, number in zip(entries, numbers, strict=True)
    ]
    return [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in lines]


# --- their values: determinism_check="values" -----------------------------------------------------

#: Of an op or a saved tensor, in each run; None if they are not to be compared.
Pair = tuple[Prints, Prints] | None

_DIFFERS = (
    "torch.utils.checkpoint: The recomputation differs from the original forward "
    '(determinism_check="values").'
)
_OTHER_VALUES = "values differ"


def value_difference(
    forward: OpLog, recompute: OpLog, context: MismatchContext, dead: frozenset[int]
) -> RecomputeMismatch | None:
    """The error for a recomputation that gives backward other values, or None.

    The logs must have fingerprints and saved tensors. ``dead``: the numbers of saved tensors that
    the graph does not need any more.
    """
    saved = zip(forward.saved, recompute.saved, strict=False)
    pairs: list[Pair] = [
        None if number in dead or not all(each.fingerprints for each in pair) else pair
        for number, pair in enumerate(saved)
    ]
    values, layout = _first_differences(pairs)
    number = layout if values is None else values
    if number is None:
        return None
    verdict = _OTHER_VALUES if values is not None else _other_strides(pairs[number])
    lines = [
        _DIFFERS,
        f"In {region_name(context.function)}.",
        f"Tensor {number}, saved by forward: {describe_saved(context, number)}: {verdict}.",
        *_origin(forward.entries, recompute.entries),
    ]
    return RecomputeMismatch("\n".join(lines))


def _first_differences(pairs: Sequence[Pair]) -> tuple[int | None, int | None]:
    """The first pair with other values, and the first with another layout."""
    known = [(number, *pair) for number, pair in enumerate(pairs) if pair is not None]
    compared = [
        (number, *prints)
        for number, before, after in known
        for prints in zip(before.fingerprints, after.fingerprints, strict=False)
    ]
    differing = compare([before for _, before, _ in compared], [after for *_, after in compared])
    layouts = (number for number, before, after in known if before.strides != after.strides)
    return None if differing is None else compared[differing][0], next(layouts, None)


def _other_strides(pair: Pair) -> str:
    shown = (", ".join(map(_shown, each.strides)) for each in pair or ())
    return f"same values, other strides (a view or memory layout): stride {' then '.join(shown)}"


def _shown(strides: Strides) -> str:
    """Strides, with ``-`` for a dimension of size one."""
    return f"({', '.join('-' if step is None else str(step) for step in strides)})"


def _origin(forward: list[LoggedOp], recompute: list[LoggedOp]) -> Iterator[str]:
    """The first op that differs: another op, other values, or another layout of its results."""
    rows, parted = align(forward, recompute)
    if parted is not None and None in rows[parted]:
        rows, parted = rows[:parted], None  # one run has ended
    pairs: list[Pair] = [
        None if before is None or after is None else (before.prints, after.prints)
        for before, after in rows[:parted]
    ]
    values, layout = _first_differences(pairs)
    first = min((row for row in (values, layout, parted) if row is not None), default=None)
    if first is None:
        yield "All operations of the region before it computed the same values."
        yield str(FROM_OUTSIDE)
        return
    heading = f"First difference, at operation {_op_number(rows, first)}"
    entry = rows[first][0]
    assert entry is not None
    if first == values:
        yield f"{heading}: {_OTHER_VALUES}"
        yield from _described(entry)
        yield str(RANDOM_OP if op_info(entry.op).is_random else UNSTABLE_OP)
    elif first == layout:
        yield f"{heading}: {_other_strides(pairs[first])}"
        yield from _described(entry)
        if values is not None:
            yield f"From operation {_op_number(rows, values)} on, values differ too."
        yield str(OTHER_LAYOUT)
    else:
        yield f"{heading}: different operations"
        yield from _both(rows, first)
        yield str(OTHER_BRANCH)


def _described(entry: LoggedOp) -> Iterator[str]:
    """An op that is the same in both runs."""
    yield f"  {entry.line}"
    yield from _whereabouts(entry)
    if not entry.stack:
        yield "      (debug=True shows the line of code)"
