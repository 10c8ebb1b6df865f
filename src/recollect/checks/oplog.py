"""Logs of the ops that a region ran, in forward and again, for ``debug=True`` and ``"values"``.

An entry is a line about the op, the module that called it and, if wanted, the user's stack and
fingerprints of what the op computed. The engine adds the tensors that autograd saved. A log holds
no tensor but fingerprints, and is read only if the region fails.

Two logs are compared op by op. Some ops are *optional*: they come and go without any fault of the
user's, and are skipped where they are in one log only.
"""

from __future__ import annotations

import sys
from itertools import zip_longest
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from recollect._torch.modes import DispatchMode
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key
from recollect.checks.fingerprint import fingerprint
from recollect.checks.place import Names, Place, Stack
from recollect.policy.op_info import op_info

__all__ = ["LoggedOp", "OpLog", "Row", "SavedPrint", "Strides", "align"]

Strides = tuple[int | None, ...]


class LoggedOp(NamedTuple):
    """One op."""

    op: Any
    line: str
    #: The module that ran it, as ``Decoder: layers.3.mlp``; empty outside of modules.
    path: str
    optional: bool
    stack: Stack
    fingerprints: tuple[torch.Tensor, ...] = ()
    #: Of results, views among them.
    strides: tuple[Strides, ...] = ()


class SavedPrint(NamedTuple):
    """A tensor that autograd saved; empty if nobody has written to its memory."""

    fingerprints: tuple[torch.Tensor, ...] = ()
    strides: tuple[Strides, ...] = ()


class OpLog(DispatchMode):
    """Logs every op that runs under it."""

    def __init__(self, *, stacks: bool = True, fingerprints: bool = False) -> None:
        super().__init__()
        self.entries: list[LoggedOp] = []
        #: In the order of saving, if there are fingerprints.
        self.saved: list[SavedPrint] = []
        #: Off during a rerun inside forward, where the function goes backward: its ops are not
        #: forward's.
        self.recording = True
        self._stacks = stacks
        self._computed = ComputedTensors() if fingerprints else None
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
        optional = place.in_library or name.startswith(_OPTIONAL)
        entry = LoggedOp(
            func, line, place.path(self._names), optional, place.stack if self._stacks else ()
        )
        if self._computed is not None:
            computed = self._computed.of(func, name, args, kwargs, out)
            if not optional:
                prints = tuple(fingerprint(tensor) for tensor in computed)
                strides = tuple(strides_of(tensor) for tensor in tensors_in(out))
                entry = entry._replace(fingerprints=prints, strides=strides)
        self.entries.append(entry)
        return out

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Log a tensor that autograd saves. The hooks of the engine call this first."""
        if self._computed is not None:
            if self._computed.is_unwritten(tensor):
                self.saved.append(SavedPrint())
            else:
                self.saved.append(SavedPrint((fingerprint(tensor),), (strides_of(tensor),)))

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        # Only the entries are of use now.
        self._names.clear()
        if self._computed is not None:
            self._computed = ComputedTensors()


#: Detach: the recomputation detaches what it saves. Casts: autocast has those of parameters in its
#: cache, or not, and the ops that follow show the dtype. Collectives with their gathering and
#: scattering: parameters may be there already.
_OPTIONAL = ("detach.", "_to_copy.", "c10d.", "_c10d_functional.", "fsdp.", "profiler.")


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

#: Values shown by their ``repr``; that of others may hold an address, and differ for no reason.
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


# --- what an op computed --------------------------------------------------------------------------

#: How many results of an op have a meaning, the first ones. The others are memory that nobody has
#: written to: of ``empty``, of kernels with padded results, or with results for their own use.
_MEANINGFUL = {
    "empty": 0,
    "empty_like": 0,
    "empty_permuted": 0,
    "empty_strided": 0,
    "new_empty": 0,
    "new_empty_strided": 0,
    "resize_": 0,
    "rrelu_with_noise": 1,
    "nll_loss_forward": 1,
    "nll_loss2d_forward": 1,
    "_cudnn_attention_forward": 1,
    "_efficient_attention_forward": 1,
    "_flash_attention_forward": 1,
    "_scaled_dot_product_cudnn_attention": 1,
    "_scaled_dot_product_efficient_attention": 1,
    "_scaled_dot_product_flash_attention": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_fused_attention_overrideable": 1,
    "_embedding_bag": 1,
    "_embedding_bag_forward_only": 1,
    "_ctc_loss": 1,
    "_cudnn_ctc_loss": 1,
    "_cudnn_rnn": 3,
    "miopen_rnn": 3,
    "mkldnn_rnn_layer": 3,
    "_batch_norm_with_update": 3,
    "cudnn_batch_norm": 3,
}


class ComputedTensors:
    """Tells for each op of one run which tensors it computed.

    They are its new results, and the tensors made in the same run that it changed; a view computes
    nothing. A tensor from outside that a region updates (a counter, running statistics) has another
    value in the second run by nature; the ops that read it show whether that matters.
    """

    def __init__(self) -> None:
        #: Storages made in this run. A key may be used again, but only for another one of this run:
        #: those from outside are alive all the time.
        self._made: set[int | None] = {None}
        #: Those of them that nobody has written to.
        self._unwritten: set[int | None] = set()

    def of(
        self, op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> list[torch.Tensor]:
        """The meaningful tensors that ``op``, called ``name`` and just run, computed."""
        new, changed = _results(op, args, kwargs, out)
        self._made.update(map(storage_key, new))
        computed = new + [tensor for tensor in changed if storage_key(tensor) in self._made]
        limit = _MEANINGFUL.get(name.partition(".")[0])
        if limit is not None:
            self._unwritten.update(map(storage_key, computed[limit:]))
            computed = computed[:limit]
        self._unwritten.difference_update(map(storage_key, computed))
        self._unwritten.discard(None)
        return computed

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is memory that nobody has written to."""
        return storage_key(tensor) in self._unwritten


def _results(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """New tensors, and those that were changed."""
    info = op_info(op)
    aliases = info.returned_aliases
    if aliases is None:
        return tensors_in(out), []
    results = out if len(aliases) != 1 and isinstance(out, (tuple, list)) else (out,)
    new = [result for result, is_alias in zip(results, aliases, strict=False) if not is_alias]
    return tensors_in(new), info.written(args, kwargs)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested structure."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def strides_of(tensor: torch.Tensor) -> tuple[int | None, ...]:
    """The strides that matter: not those of dimensions of size one."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return ()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(step if size > 1 else None for size, step in sizes)


# --- two logs -------------------------------------------------------------------------------------

#: An op of forward and its counterpart; None where an op is in one log only.
Row = tuple[LoggedOp | None, LoggedOp | None]


def align(forward: list[LoggedOp], recompute: list[LoggedOp]) -> tuple[list[Row], int | None]:
    """Pairs the ops of two runs, and finds the row of their first difference.

    From there on ops are paired as they come. A run that ends before the other differs from it.
    """
    rows: list[Row] = []
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
