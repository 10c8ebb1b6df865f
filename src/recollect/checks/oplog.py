"""Logs of the ops that a region ran, in forward and again, for ``debug=True`` and ``"values"``.

An entry is a line about the op, the module that called it, and as asked for the user's stack and
fingerprints of what the op computed. Cheap to take, and read only if the region fails. The engine
adds what autograd saved. A log holds no tensor but fingerprints, and lives and dies with its
region.

Two logs are compared op by op. Some ops are *aside*: they come and go without any fault of the
user's, and where one stands in a single log it is passed over.
"""

from __future__ import annotations

import sys
from itertools import zip_longest
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from recollect._torch.modes import DispatchMode
from recollect.checks.effects import Effects, strides_of, tensors_in
from recollect.checks.fingerprint import fingerprint
from recollect.checks.place import Names, Place, Stack

__all__ = ["Entry", "OpLog", "Row", "Saved", "Strides", "align"]

Strides = tuple[int | None, ...]


class Entry(NamedTuple):
    """One op."""

    op: Any
    line: str
    #: The module that ran it, as ``Decoder: layers.3.mlp``; empty outside of modules.
    path: str
    aside: bool
    stack: Stack
    fingerprints: tuple[torch.Tensor, ...] = ()
    #: Of results, views among them.
    strides: tuple[Strides, ...] = ()


class Saved(NamedTuple):
    """A tensor that autograd saved; without a fingerprint if it is memory not written to."""

    fingerprint: torch.Tensor | None
    strides: Strides


class OpLog(DispatchMode):
    """Writes down every op that runs under it."""

    def __init__(self, *, stacks: bool = True, fingerprints: bool = False) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        #: In the order of saving, if there are fingerprints.
        self.saved: list[Saved] = []
        #: Off while a rerun goes on inside forward, where the function goes backward: its ops are
        #: none of forward's.
        self.recording = True
        self._stacks = stacks
        self._effects = Effects() if fingerprints else None
        self._names: Names = WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.recording:
            return out
        inputs = [_brief(a) for a in args] + [f"{k}={_brief(v)}" for k, v in kwargs.items()]
        name = _op_name(func)
        line = f"{name}({', '.join(inputs)}) -> {_brief(out)}"
        place = Place(sys._getframe(1))
        aside = place.in_library or name.startswith(_ASIDE)
        entry = Entry(
            func, line, place.path(self._names), aside, place.stack if self._stacks else ()
        )
        if self._effects is not None:
            computed = self._effects.of(func, name, args, kwargs, out)
            if not aside:
                prints = tuple(fingerprint(tensor) for tensor in computed)
                strides = tuple(strides_of(tensor) for tensor in tensors_in(out))
                entry = entry._replace(fingerprints=prints, strides=strides)
        self.entries.append(entry)
        return out

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Write down what autograd saves. For the hooks of the engine, before they do anything."""
        if self._effects is not None:
            unwritten = self._effects.is_unwritten(tensor)
            print_ = None if unwritten else fingerprint(tensor)
            self.saved.append(Saved(print_, strides_of(tensor)))

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        # Only what is written down is of use now.
        self._names.clear()
        if self._effects is not None:
            self._effects = Effects()


#: Detach: the recomputation does it to what it saves. Casts: autocast finds those of parameters in
#: its cache, or not; what is done with the result tells the dtype. Collectives and their gathering
#: and scattering: parameters may be there already.
_ASIDE = ("detach.", "_to_copy.", "c10d.", "_c10d_functional.", "fsdp.", "profiler.")


def _op_name(func: Any) -> str:
    return str(func).removeprefix("aten.")


_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}

#: What is shown by its ``repr``. Of others it may hold an address, and differ for no reason.
_SHOWN = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = _SHORT.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        where = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{dtype}{list(value.shape)}{where}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_brief(v) for v in value)}]"
    if value is None or isinstance(value, (*_SHOWN, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return repr(value)
    return f"<{type(value).__name__}>"


# --- two logs -------------------------------------------------------------------------------------

#: An op of forward and its counterpart; None where an op stands in one log only.
Row = tuple[Entry | None, Entry | None]


def align(forward: list[Entry], recompute: list[Entry]) -> tuple[list[Row], int | None]:
    """Which op of one run is which of the other, and the row of the first difference.

    From there on ops stand side by side as they come. A run that ends before the other differs
    from it.
    """
    rows: list[Row] = []
    here, there = 0, 0
    while here < len(forward) or there < len(recompute):
        before = forward[here] if here < len(forward) else None
        after = recompute[there] if there < len(recompute) else None
        if before is not None and after is not None and before.line == after.line:
            rows.append((before, after))
            here, there = here + 1, there + 1
        elif before is not None and before.aside:
            rows.append((before, None))
            here += 1
        elif after is not None and after.aside:
            rows.append((None, after))
            there += 1
        else:
            return rows + list(zip_longest(forward[here:], recompute[there:])), len(rows)
    return rows, None
