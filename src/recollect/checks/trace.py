"""What ``debug=True`` shows: the first difference in the logs of two runs of a region.

Modules have the names that forward saw: a recomputation does not see the modules around its region.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator

from recollect.checks.oplog import LoggedOp, OpLog, Row, align
from recollect.errors import CheckpointError

__all__ = ["OpLog", "both", "explain", "op_number", "whereabouts"]


def explain(
    error: CheckpointError, forward: OpLog, recompute: OpLog, *, stopped: bool = False
) -> CheckpointError:
    """``error`` with the first difference, and both logs around it.

    ``stopped``: the recomputation stopped early, so that its end is no difference.
    """
    rows, first = align(forward.entries, recompute.entries)
    if stopped and first is not None and rows[first][1] is None:
        first = None
    lines = [
        str(error),
        "You are seeing this error because you passed `debug=True` to checkpoint, or set it",
        "with set_checkpoint_debug_enabled.",
        "",
    ]
    if first is None:
        lines.append(
            "Both runs executed the same operations on the same shapes, as far as both went."
        )
    else:
        lines.append(f"First difference, at operation {op_number(rows, first)}:")
        lines += both(rows, first)
    return type(error)("\n".join([*lines, "", *_side_by_side(rows, first)]))


def op_number(rows: list[Row], row: int) -> int:
    """The number in forward, counted from one, of the op in a row."""
    return 1 + sum(before is not None for before, _ in rows[:row])


def both(rows: list[Row], row: int) -> Iterator[str]:
    """The op of each run, and where it was called."""
    for run, entry in zip(("forward  ", "recompute"), rows[row], strict=True):
        if entry is None:
            yield f"  {run}: (no more operations)"
        else:
            yield f"  {run}: {entry.line}"
            is_recomputed = entry is rows[row][1]
            path = _path_in_forward(rows[:row], entry.path) if is_recomputed else entry.path
            yield from whereabouts(entry, path)


def _path_in_forward(rows: list[Row], path: str) -> str:
    """The module at ``path`` in a recomputation, as forward would name it, if earlier ops tell."""
    region, _, inside = path.partition(": ")
    for before, after in rows:
        if before is None or after is None:
            continue
        start, _, rest = after.path.partition(": ")
        if start == region and before.path.endswith(rest):
            outside = before.path.removesuffix(rest).rstrip(": .")
            joint = "." if ": " in outside else ": "
            return f"{outside}{joint}{inside}" if inside else outside
    return path


def whereabouts(entry: LoggedOp, path: str) -> Iterator[str]:
    """The module and the lines of code that led to an op."""
    if path:
        yield f"      in {path}"
    for file, line, function in entry.stack:
        code = linecache.getline(file, line).strip()
        yield f"      {file}:{line} in {function}{code and ': '}{code}"


#: Rows shown before and after the first difference, and how much of a line.
_BEFORE, _AFTER, _WIDTH = 4, 12, 90

_FORWARD = "Operations executed during the original forward"
_RECOMPUTE = "Operations executed during recomputation"


def _side_by_side(rows: list[Row], first: int | None) -> Iterator[str]:
    cells = _cells(rows)
    in_both = (number for number, row in enumerate(rows) if None not in row)
    middle = max(in_both, default=0) if first is None else first
    start, end = max(0, middle - _BEFORE), middle + 1 + _AFTER
    width = max(len(_FORWARD), *(len(left) for left, _ in cells[start:end]), 0)
    yield f"  {_FORWARD:{width}} | {_RECOMPUTE}"
    if start:
        yield f"  ({start} before these, which agree, left out)"
    path: str | None = None
    for position in range(start, min(end, len(rows))):
        before = rows[position][0]
        if before is not None and before.path != path:
            path = before.path
            yield f"  {path or '(outside of modules)'}"
        left, right = cells[position]
        yield f"{'>' if position == first else ' '} {left:{width}} | {right}".rstrip()
    if end < len(rows):
        yield f"  ({len(rows) - end} after these left out)"
    yield "  (a recomputation ends once all that is needed is there)"


def _cells(rows: list[Row]) -> list[tuple[str, str]]:
    """Each op with its number in its run."""
    cells, counts = [], [0, 0]
    for row in rows:
        pair = ["", ""]
        for side, entry in enumerate(row):
            if entry is not None:
                counts[side] += 1
                line = f"{counts[side]:5d}  {entry.line}"
                pair[side] = line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."
        cells.append((pair[0], pair[1]))
    return cells
