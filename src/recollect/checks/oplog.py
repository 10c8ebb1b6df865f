"""Logs of the ops of a region in forward and in its rerun, for ``debug=True`` and ``"values"``.

An entry has a line about the op, the module that called it, and on demand the user's stack and
fingerprints of the op's results. The engine adds the tensors that autograd saved. A log holds no
other tensors. *Optional* ops may differ between correct runs, and are skipped in a comparison if
only one log has them.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from recollect._torch.modes import DispatchMode
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key
from recollect.checks.fingerprint import fingerprint
from recollect.checks.place import Names, Place, Stack
from recollect.policy.op_info import op_info

Strides = tuple[int | None, ...]


class Prints(NamedTuple):
    """Fingerprints and strides of tensors; none for memory that no op has written to."""

    fingerprints: tuple[torch.Tensor, ...] = ()
    #: For an op those of all its results, views among them.
    strides: tuple[Strides, ...] = ()


class LoggedOp(NamedTuple):
    """One op."""

    op: Any
    line: str
    #: The module that ran it, as ``Decoder: layers.3.mlp``; empty outside of modules.
    path: str
    optional: bool
    stack: Stack
    prints: Prints = Prints()


class OpLog(DispatchMode):
    """Logs every op that runs under it."""

    def __init__(self, *, stacks: bool = True, fingerprints: bool = False) -> None:
        super().__init__()
        self.entries: list[LoggedOp] = []
        #: In the order of saving, if there are fingerprints.
        self.saved: list[Prints] = []
        #: Off during a rerun inside forward (the function calls backward).
        self.recording = True
        self._stacks = stacks
        self._computed = ComputedTensors() if fingerprints else None
        self._names: Names = WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = op_info(func).call(*args, **kwargs)
        if not self.recording:
            return out
        inputs = [_brief(a) for a in args] + [f"{k}={_brief(v)}" for k, v in kwargs.items()]
        name = str(func).removeprefix("aten.")
        place = Place(sys._getframe(1))
        optional = place.in_library or name.startswith(_OPTIONAL)
        prints = Prints()
        if self._computed is not None:
            computed = self._computed.of(func, name, args, kwargs, out)
            if not optional:
                results = tree_leaves(out)
                prints = Prints(
                    tuple(fingerprint(tensor) for tensor in computed),
                    tuple(_strides(each) for each in results if isinstance(each, torch.Tensor)),
                )
        line = f"{name}({', '.join(inputs)}) -> {_brief(out)}"
        stack = place.stack if self._stacks else ()
        path = place.path(self._names)
        self.entries.append(LoggedOp(func, line, path, optional, stack, prints))
        return out

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Log a tensor that autograd saves. The hooks of the engine call this first."""
        if self._computed is None:
            return
        if self._computed.is_unwritten(tensor):
            self.saved.append(Prints())
        else:
            self.saved.append(Prints((fingerprint(tensor),), (_strides(tensor),)))

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        # Only the entries are of use now.
        self._names.clear()
        if self._computed is not None:
            self._computed = ComputedTensors()


#: Detach: the recomputation detaches saved tensors. Casts: autocast may have those of parameters in
#: its cache, and later ops show the dtype. Collectives: parameters may be gathered already.
_OPTIONAL = ("detach.", "_to_copy.", "c10d.", "_c10d_functional.", "fsdp.", "profiler.")


_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}

#: Values shown by their ``repr``; that of others may contain an address.
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


# --- the results of an op -------------------------------------------------------------------------

#: How many results of an op have defined values (the first ones), if not all. Kernels pad the
#: others, or use them internally.
_MEANINGFUL = {
    name: count
    for count, names in (
        (0, "resize_"),
        (1, "rrelu_with_noise nll_loss_forward nll_loss2d_forward _ctc_loss _cudnn_ctc_loss"),
        (1, "_embedding_bag _embedding_bag_forward_only _cudnn_attention_forward"),
        (1, "_efficient_attention_forward _flash_attention_forward"),
        (1, "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention"),
        (1, "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"),
        (1, "_scaled_dot_product_fused_attention_overrideable"),
        (3, "_cudnn_rnn miopen_rnn mkldnn_rnn_layer _batch_norm_with_update cudnn_batch_norm"),
    )
    for name in names.split()
}


class ComputedTensors:
    """Finds the tensors that each op of one run computed: new results, and those that it changed.

    Outside tensors that a region updates (a counter, running statistics) do not count: they differ
    in the second run anyway, and ops that read them show whether that matters.
    """

    def __init__(self) -> None:
        #: Storages made in this run, by key. Outside storages stay alive, so no key is theirs.
        self._made: set[int | None] = {None}
        #: Those of them that no op has written to.
        self._unwritten: set[int | None] = set()

    def of(
        self, op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> list[torch.Tensor]:
        """The meaningful tensors that ``op``, called ``name`` and just run, computed."""
        info = op_info(op)
        aliases = info.returned_aliases
        results, changed = out, []
        if aliases is not None:
            each = out if len(aliases) != 1 and isinstance(out, (tuple, list)) else (out,)
            results = [one for one, is_alias in zip(each, aliases, strict=False) if not is_alias]
            changed = info.written(args, kwargs)
        new = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        self._made.update(map(storage_key, new))
        computed = new + [tensor for tensor in changed if storage_key(tensor) in self._made]
        limit = 0 if info.leaves_uninitialized else _MEANINGFUL.get(name.partition(".")[0])
        if limit is not None:
            self._unwritten.update(map(storage_key, computed[limit:]))
            computed = computed[:limit]
        self._unwritten.difference_update(map(storage_key, computed))
        self._unwritten.discard(None)
        return computed

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._unwritten


def _strides(tensor: torch.Tensor) -> Strides:
    """The strides that matter: not those of dimensions of size one."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return ()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(step if size > 1 else None for size, step in sizes)
