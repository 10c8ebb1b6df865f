"""Calls of torch functions in a region, which later calls are compared with.

Tensors among the arguments of a `FunctionCall` have numbers, in the order in which they are first
seen. All other arguments are constants. If every function so far got the same constants and the
same tensors, and outside tensors have the same metadata, then the ops that ran and the tensors that
autograd saved are those of the recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, EllipsisType, MethodDescriptorType
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch.backends import opt_einsum

from recollect._torch.dtensors import USUAL_TENSORS, is_wrapper, local_tensor, spec_of
from recollect._torch.modes import (
    any_autocast_enabled,
    autocast_of,
    dispatch_mode_count,
    set_grad_enabled,
)
from recollect._torch.tensors import is_plain_tensor, metadata_test, version_of
from recollect.policy.op_info import tensors_in
from recollect.replay.recorded_graph import RecordedOp, RecordedValue, View
from recollect.state.rng import HAS_ACCELERATOR

_Tensor = torch.Tensor


#: The types of devices whose autocast is compared.
DEVICES = ["cpu"]
if HAS_ACCELERATOR:
    DEVICES.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]


def casts() -> Any:
    """`autocast_of` of the devices; None if it is off everywhere."""
    return autocast_of(DEVICES) if any_autocast_enabled() else None


def call_mode(function: Any) -> Any:
    """Grad mode and autocast, which decide what ops a function runs; for einsum, also its path."""
    mode: Any = torch.is_grad_enabled()
    if any_autocast_enabled():
        mode = mode, casts()
    if function is torch.einsum and opt_einsum.is_available():
        mode = mode, (opt_einsum.enabled, opt_einsum.strategy)
    return mode


_MODE = (torch.is_grad_enabled, any_autocast_enabled, dispatch_mode_count)
_CASTS = tuple(
    partial(get, device)
    for device in DEVICES
    for get in (torch.is_autocast_enabled, torch.get_autocast_dtype)
)


def mode_getters(mode: Any) -> tuple[Callable[[], Any], ...]:
    """What reads a `call_mode` like ``mode``, and how many dispatch modes are active."""
    return _MODE if type(mode) is bool else (*_MODE, *_CASTS)


class Leaves(list[Any]):
    """The tensors and constants among the arguments of a function.

    Instead of a ``DTensor`` there is its local tensor; ``wrappers`` has the former, by place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wrappers: dict[int, _Tensor] = {}


def locals_in(value: Any) -> list[_Tensor]:
    """The tensors in ``value``, in lists and tuples too; instead of a ``DTensor`` the local one."""
    if type(value) is _Tensor:
        return [value]
    if type(value) in (tuple, list) and USUAL_TENSORS.issuperset(map(type, value)):
        return [*value]
    return [local_tensor(tensor) for tensor in tensors_in(value)]


def flatten(value: Any, leaves: Leaves) -> Any:
    """Append the tensors and constants in ``value`` to ``leaves``.

    Returns the containers around them, in a form that can be compared; None if there are none. A
    tuple of constants is one constant: most are the same object in every call.
    """
    kind = type(value)
    if isinstance(value, _Tensor):
        if is_wrapper(kind):
            leaves.wrappers[len(leaves)] = value
            leaves.append(local_tensor(value))
            return "wrapped", spec_of(value), value.requires_grad
    elif kind not in _USUAL:
        if isinstance(value, (tuple, list)) and kind is not torch.Size:
            if kind is not tuple or not all(map(is_comparable, value)):
                return kind, *[flatten(each, leaves) for each in value]
        elif isinstance(value, dict):
            return kind, tuple(value), *[flatten(each, leaves) for each in value.values()]
        elif kind is slice:
            return kind, *[flatten(each, leaves) for each in (value.start, value.stop, value.step)]
    leaves.append(value)
    return None


def flatten_all(values: tuple[Any, ...]) -> tuple[Sequence[Any], list[Any] | None]:
    """The leaves of all ``values``, and what `flatten` returns for each; None if all are leaves."""
    if _LEAVES.issuperset(map(type, values)):
        return values, None
    leaves = Leaves()
    form = [flatten(value, leaves) for value in values]
    return leaves, form if any(each is not None for each in form) else None


#: The metadata by which outside tensors are compared.
Metadata = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]


def metadata_of(tensor: _Tensor) -> Metadata:
    """The metadata of ``tensor``."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


@dataclass(eq=False, slots=True)
class OutsideTensor:
    """A tensor that the region did not make: an argument, a parameter, one in a closure."""

    number: int
    metadata: Metadata
    #: None if it shares the storage of an earlier outside tensor.
    value: RecordedValue | None = None
    #: The number of a returned tensor whose storage it shares, by unseen code.
    host: int | None = None
    #: The number of an earlier outside tensor on the same storage, and the offset from it in bytes.
    twin: tuple[int, int] | None = None
    #: A fast test, which may reject a matching tensor. Made from the first that matches.
    quick_test: Callable[[Any], bool] = lambda _: False

    def is_like(self, tensor: Any) -> bool:
        """Whether ``tensor`` has the metadata of the recorded one."""
        if (
            not isinstance(tensor, _Tensor)
            or not is_plain_tensor(tensor)
            or metadata_of(tensor) != self.metadata
        ):
            return False
        self.quick_test = metadata_test(tensor)
        return True


class FunctionCall:
    """One call of a function of torch. A plain class for the same reason as `RecordedOp`.

    Args:
        function: None if a custom function saved a tensor outside of all functions of torch. That
            tensor is then its only argument.
        call_mode: Grad mode and autocast.
        ops: The range of ops that it ran.
        flags: The flags that it ran under.
    """

    def __init__(
        self, function: Any, call_mode: Any, ops: tuple[int, int], flags: Any = None
    ) -> None:
        self.function = function
        self.call_mode = call_mode
        self.ops = ops
        self.flags = flags
        #: The names of keyword arguments, how many arguments there are with these, and the
        #: containers among them, if there are any (see `flatten`).
        self.keys: list[str] | None = None
        self.arity = 0
        self.form: list[Any] | None = None
        #: Of each tensor among them: its place, its number, and how often it was written to since
        #: it was first seen; None if torch does not count.
        self.tensors: list[tuple[int, int, int | None]] = []
        #: Of each constant among them that can be compared: its place and its value.
        self.constants: list[tuple[int, Any]] = []
        #: The number of the first value that it makes.
        self.first_value = 0
        #: The function, if it is not torch's own. A custom op should run no op but itself.
        self.custom_function: Any = None
        #: Whether another call may run other ops although everything compared is the same.
        self.is_opaque = False
        #: For each tensor that autograd saved, how to recompute it; None if autograd holds it.
        self.packed: list[View | None] = []
        #: The returned tensors: their numbers and views.
        self.outs: list[int] = []
        self.returns: list[View | None] = []
        #: The arguments that it writes to: their numbers, and their views afterwards.
        self.changed: list[tuple[int, View]] = []
        #: Whether it changes the metadata of a tensor in place, which counts as a write.
        self.changes_metadata = False
        #: Whether the shapes that it returns depend on data; the metadata, if they may differ.
        self.depends_on_data = False
        self.metadata: list[Metadata] | None = None
        #: Whether there is a ``DTensor`` among the arguments.
        self.has_dtensors = False
        #: The ops that draw random numbers.
        self.draws: list[RecordedOp] = []
        #: The returned tensors that a collective still writes to, and the tensors whose collective
        #: it waits for, by number.
        self.in_flight: list[int] = []
        self.arrived: list[int] = []

    def is_like(self, other: FunctionCall) -> bool:
        """Whether both are the same call."""
        compared = ("function", "call_mode", "flags", "outs", "metadata", "keys", "arity", "form")
        return (
            all(getattr(self, name) == getattr(other, name) for name in compared)
            and self.tensors == other.tensors
            and same_constant((*self.constants,), (*other.constants,))
        )


class TensorNumbers:
    """The tensors of one call of a region, by number. Does not keep them alive."""

    __slots__ = ("by_id", "tensors", "versions")

    def __init__(self) -> None:
        #: By number: the tensor, and its version when it was first seen.
        self.tensors: list[ReferenceType[_Tensor]] = []
        self.versions: list[int | None] = []
        #: The number by id, which is valid as long as the tensor is alive.
        self.by_id: dict[int, int] = {}

    def number_of(self, tensor: Any) -> int | None:
        number = self.by_id.get(id(tensor))
        return number if number is not None and self.tensors[number]() is tensor else None

    def add(self, tensor: _Tensor) -> bool:
        """Give ``tensor`` the next number, unless it has one; returns whether it had none."""
        known, tensors, key = self.by_id, self.tensors, id(tensor)
        if key in known and tensors[known[key]]() is tensor:
            return False
        known[key] = len(tensors)
        tensors.append(ref(tensor))
        try:
            self.versions.append(tensor._version)
        except RuntimeError:  # an inference tensor
            self.versions.append(None)
        return True

    def forget(self) -> None:
        """The call is over. Its graph keeps this object until backward.

        A tensor with a weak reference cannot be exchanged by ``torch.utils.swap_tensors``, as
        ``module.to`` does with parameters of a subclass.
        """
        self.tensors.clear()
        self.versions.clear()
        self.by_id.clear()

    def follow_collectives(self, call: FunctionCall) -> None:
        """After ``call``: count writes to the results of a collective from the wait for it on.

        Until then a thread of the backend writes to them. It counts that at any time, or never if
        the collective began under a dispatch mode.
        """
        for number in call.in_flight:
            self.versions[number] = None
        for number in call.arrived:
            tensor = self.tensors[number]()
            self.versions[number] = None if tensor is None else version_of(tensor)

    def writes_to(self, tensor: _Tensor, number: int) -> int | None:
        """How often ``tensor`` was written to since it got this number; None if not counted."""
        before, now = self.versions[number], version_of(tensor)
        return None if before is None or now is None else now - before


_IDENTICAL = (
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    type,
    BuiltinFunctionType,
    MethodDescriptorType,
    EllipsisType,
    Enum,
)
#: The types of most constants.
_USUAL = frozenset({int, bool, float, str, type(None)})
#: And those of arguments that are no containers, nearly always.
_LEAVES = _USUAL | USUAL_TENSORS
_EQUAL = (type(None), bool, int, str, bytes, torch.device, torch.Size, range)


def is_comparable(value: Any) -> bool:
    """Whether ``value``, neither tensor nor container, can be compared between calls."""
    kind = type(value)
    return kind in _EQUAL or kind in (float, complex) or isinstance(value, _IDENTICAL)


def same_constant(a: Any, b: Any) -> bool:
    """Whether two constants that can be compared are the same."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is float:
        is_same = a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
        return is_same or (math.isnan(a) and math.isnan(b))
    if type(a) is complex:
        return same_constant(a.real, b.real) and same_constant(a.imag, b.imag)
    if type(a) is tuple:
        return len(a) == len(b) and all(map(same_constant, a, b))
    return type(a) in _EQUAL and bool(a == b)


def same_constants(values: Sequence[Any], constants: Iterable[tuple[int, Any]]) -> bool:
    """Whether each of the ``constants``, given with its place, is that among ``values``."""
    for place, constant in constants:
        value = values[place]
        if value is not constant and not same_constant(value, constant):
            return False
    return True


def has_equality(value: Any) -> bool:
    """Whether ``==`` and the same type imply the same constant as ``value``."""
    if type(value) is float:
        return value != 0.0 and not math.isnan(value)  # there are two zeros
    return type(value) in _EQUAL


def _getters(*names: str) -> set[Any]:
    return {getattr(_Tensor, name).__get__ for name in names if hasattr(_Tensor, name)}


def _methods(*names: str) -> set[Any]:
    return {getattr(_Tensor, name) for name in names if hasattr(_Tensor, name)}


#: Functions that are not recorded: they read metadata, which is the same if all earlier functions
#: were. Grad mode is compared at every function instead: the garbage collector may close a
#: generator, and with it a `torch.no_grad`, at any time.
METADATA: frozenset[Any] = frozenset(
    _getters(
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized", "is_mkldnn"),
        *("is_mps", "is_xpu", "is_sparse_csr", "itemsize", "nbytes", "name", "names", "_version"),
        *("output_nr", "retains_grad", "_backward_hooks"),
    )
    | _methods(
        *("size", "dim", "stride", "numel", "nelement", "element_size", "storage_offset"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference"),
        *("get_device", "ndimension", "__len__", "is_conj", "is_neg", "is_pinned", "is_shared"),
        *("has_names", "dense_dim", "sparse_dim", "register_hook", "__hash__", "_is_view"),
    )
    | {torch.is_floating_point, torch.is_complex, torch.numel, set_grad_enabled}
)

#: Functions that give unseen code access to the storage of a tensor.
EXPOSING: frozenset[Any] = frozenset(
    _methods(
        *("data_ptr", "numpy", "__array__", "__dlpack__", "untyped_storage", "storage"),
        *("_typed_storage", "share_memory_", "apply_", "map_", "map2_"),
    )
    | {_Tensor.__cuda_array_interface__.__get__}
)

#: Functions that give a tensor another storage.
UNSUPPORTED: frozenset[Any] = frozenset(
    _methods("set_", "resize_", "resize_as_", "_resize_output_") | {_Tensor.data.__set__}  # type: ignore[attr-defined]
)

#: Functions that read data in Python, or run other ops under a mode.
UNREADABLE: frozenset[Any] = frozenset(
    {torch.tensor_split, _Tensor.tensor_split, torch.ctc_loss, F.ctc_loss}
    # The base of a view does not follow from the view.
    | _getters("_base")
    # The ops that these run depend on the autograd graph outside.
    | {torch.autograd.grad, torch.autograd.backward, _Tensor.backward}
    | {getattr(torch, name) for name in ("_pack_padded_sequence", "_pad_packed_sequence")}
)

#: The same, if they are given the lengths of sequences.
UNREADABLE_IF_PACKED: frozenset[Any] = frozenset(
    {getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
)

#: Functions that depend on the usual flags only (see ``state.flags``).
USUAL: frozenset[Any] = frozenset(
    {
        getattr(namespace, name)
        for namespace in (torch, F, _Tensor)
        for name in (
            *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__"),
            *("layer_norm", "rms_norm", "softmax", "log_softmax", "gelu", "embedding"),
            *("sum", "mean", "amax", "argmax", "var", "cumsum", "dropout", "cross_entropy"),
            *("topk", "sort", "gather", "scatter_add", "index_select", "index_add", "where"),
        )
        if hasattr(namespace, name)
    }
)

#: Functions with kernels whose own ops autocast casts, but not under a dispatch mode.
_CASTING_INSIDE: frozenset[Any] = frozenset(
    {torch.bilinear, torch.linalg.pinv, torch.pinverse, torch.Tensor.pinverse}
)

#: Functions that compute no vectors if no gradient is needed, but do under a dispatch mode.
_WITHOUT_VECTORS: frozenset[Any] = frozenset(
    getattr(namespace, name)
    for namespace in (torch, torch.linalg, torch.Tensor)
    for name in ("svdvals", "eigvalsh", "cond", "matrix_norm", "norm", "nuclear_norm")
    if hasattr(namespace, name)
)


def runs_other_kernels_under_modes(function: Any, values: tuple[Any, ...]) -> bool:
    """Whether torch runs other kernels for this call under a dispatch mode."""
    if function in _CASTING_INSIDE:
        return any_autocast_enabled()
    if function not in _WITHOUT_VECTORS:
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(values)))
