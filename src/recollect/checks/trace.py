"""Logs of the ops that a region ran, in forward and again, for ``debug=True``.

An entry is a line about the op and the user's stack as bare file, line and name: cheap to take,
and read only if the region fails. A log lives and dies with its region.
"""

from __future__ import annotations

import sys
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from recollect.errors import CheckpointError
from recollect.torch_private import DispatchMode

__all__ = ["OpLog", "explain"]

_HIDDEN = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))

Stack = tuple[tuple[str, int, str], ...]


class Entry(NamedTuple):
    """One op and where it was called."""

    line: str
    stack: Stack


class OpLog(DispatchMode):
    """Writes down every op that runs under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [_brief(a) for a in args] + [f"{k}={_brief(v)}" for k, v in kwargs.items()]
        line = f"{_op_name(func)}({', '.join(inputs)}) -> {_brief(out)}"
        self.entries.append(Entry(line, _user_stack()))
        return out


def _op_name(func: Any) -> str:
    return str(func).removeprefix("aten.") if "::" not in str(func) else str(func)


_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = _SHORT.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        where = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{dtype}{list(value.shape)}{where}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_brief(v) for v in value)}]"
    return repr(value)


def _user_stack() -> Stack:
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_HIDDEN):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(frames)


def explain(error: CheckpointError, forward: OpLog, recompute: OpLog) -> CheckpointError:
    """``error`` with both logs, starting where they part."""
    first = _first_difference(forward.entries, recompute.entries)
    lines = [
        str(error),
        "You are seeing this error because you passed `debug=True` to checkpoint, or set it",
        "with set_checkpoint_debug_enabled. The region did not run the same way twice.",
        "",
        *_verdict(first, forward.entries, recompute.entries),
        "",
        "Operations executed during the original forward:",
        *_listing(forward.entries, first),
        "",
        "Operations executed during recomputation (it ends once all that is needed is there):",
        *_listing(recompute.entries, first),
    ]
    return type(error)("\n".join(lines))


def _without_detach(entries: list[Entry]) -> list[Entry]:
    # The recomputation detaches what it saves; forward does not. That is our doing, not the user's.
    return [entry for entry in entries if not entry.line.startswith("detach.")]


def _first_difference(forward: list[Entry], recompute: list[Entry]) -> int | None:
    pairs = zip_longest(_without_detach(forward), _without_detach(recompute))
    for position, (before, after) in enumerate(pairs):
        if before is None or after is None or before.line != after.line:
            return position
    return None


def _verdict(first: int | None, forward: list[Entry], recompute: list[Entry]) -> list[str]:
    if first is None:
        return ["Both runs executed the same operations on the same shapes."]
    lines = [f"First difference, at operation {first + 1}:"]
    for label, entries in (("forward  ", forward), ("recompute", recompute)):
        ops = _without_detach(entries)
        if first >= len(ops):
            lines.append(f"  {label}: (no more operations)")
            continue
        lines.append(f"  {label}: {ops[first].line}")
        lines += [f"      {file}:{line} in {name}" for file, line, name in ops[first].stack]
    return lines


def _listing(entries: list[Entry], first: int | None) -> list[str]:
    return [
        f"  {'>' if position == first else ' '} {position + 1:4d}  {entry.line}"
        for position, entry in enumerate(_without_detach(entries))
    ]
