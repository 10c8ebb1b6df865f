"""The functions of torch that a region calls: what is compared, call by call, with the recording.

A `Step` is one call. Tensors among its arguments are known by number: in the order in which they
are first seen, whether a step made them or they come from outside. All else is a constant. If every
step so far was called with the same constants and the same wiring, and tensors from outside look
the same, then the ops that ran, and what autograd saved, are those of the recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from types import BuiltinFunctionType, EllipsisType, MethodDescriptorType
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F

from recollect._torch.modes import set_grad_enabled
from recollect._torch.tensors import is_plain_tensor, same_looks, version_of
from recollect.replay.tape import Buffer, Op, View

__all__ = [
    "EXPOSING",
    "METADATA",
    "UNREADABLE",
    "UNREADABLE_IF_PACKED",
    "UNSUPPORTED",
    "WRONG_IN_MODES",
    "Constant",
    "Items",
    "Looks",
    "Number",
    "Objects",
    "Outside",
    "Pack",
    "Step",
    "equal_type",
    "is_comparable",
    "looks_of",
    "same_constant",
    "tensors_in",
]

_Tensor = torch.Tensor


class Number:
    """Stands for a tensor. ``writes``: how often it was written to since it was first seen."""

    __slots__ = ("number", "writes")

    def __init__(self, number: int, writes: int | None) -> None:
        self.number = number
        self.writes = writes


#: No argument of any function.
_NOTHING = object()


class Items:
    """Stands for a container."""

    __slots__ = ("items", "keys", "kind", "same")

    def __init__(
        self, kind: type, items: list[Any], keys: list[Any] | None = None, same: Any = _NOTHING
    ) -> None:
        self.kind = kind
        self.items = items
        self.keys = keys
        #: The container itself, if neither it nor what is in it can change; else what nothing is.
        self.same = same

    @property
    def has_tensors(self) -> bool:
        """Whether there is a tensor in it."""
        return any(
            type(each) is Number or (type(each) is Items and each.has_tensors)
            for each in self.items
        )


class Constant:
    """Stands for a value that cannot be compared."""

    __slots__ = ()


#: What tells whether a tensor from outside is like the one of the recording.
Looks = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]


def looks_of(tensor: _Tensor) -> Looks:
    """What ``tensor`` looks like."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


class Outside:
    """A tensor that the region did not make: an argument, a parameter, one in a closure."""

    __slots__ = ("buffer", "host", "is_held", "is_surely_like", "looks", "number", "start", "twin")

    def __init__(self, number: int, looks: Looks) -> None:
        self.number = number
        self.looks = looks
        #: None if it is on a memory that is known.
        self.buffer: Buffer | None = None
        #: The number of a tensor that a step made, on whose memory this is, by unknown ways.
        self.host: int | None = None
        #: The number of an earlier one on the same memory, and how many bytes after that it begins.
        self.twin: tuple[int, int] | None = None
        #: At how many bytes of its memory it begins, if that matters.
        self.start: int | None = None
        #: Whether a call that is checked holds it.
        self.is_held = False
        #: A quick way to say yes, once there was one that is like it.
        self.is_surely_like: Callable[[Any], bool] = _unsure

    def is_like(self, tensor: Any) -> bool:
        """Whether ``tensor`` looks like the one of the recording."""
        if (
            not isinstance(tensor, _Tensor)
            or not is_plain_tensor(tensor)
            or looks_of(tensor) != self.looks
        ):
            return False
        self.is_surely_like = same_looks(tensor)
        return True


def _unsure(_: Any) -> bool:
    return False


class Pack:
    """A tensor that autograd saved."""

    __slots__ = ("memory", "number", "view", "writes")

    def __init__(
        self,
        view: View | None,
        number: int | None = None,
        writes: int | None = None,
        memory: int | None = None,
    ) -> None:
        #: None: it is held as it is.
        self.view = view
        #: Outside of all steps, the number of the tensor, and how often it was written to.
        self.number = number
        self.writes = writes
        #: The number of its memory, if that is known and was made in the region.
        self.memory = memory


class Step:
    """One call of a function."""

    __slots__ = (
        "args",
        "changed",
        "changes_looks",
        "depends_on_data",
        "draws",
        "first_buffer",
        "flags",
        "function",
        "is_new",
        "is_opaque",
        "kwargs",
        "mood",
        "ops",
        "outs",
        "own",
        "packs",
        "looks",
        "returns",
    )

    def __init__(self, function: Any, mood: Any, first_op: int, flags: Any = None) -> None:
        #: None: tensors were saved outside of all functions.
        self.function = function
        #: What stands for the arguments.
        self.args: Any = None
        self.kwargs: Any = None
        self.first_buffer = 0
        #: Grad mode and autocast.
        self.mood = mood
        #: The switches that it ran under.
        self.flags = flags
        #: If it is not torch's: the function. An op of others should run no other op.
        self.own: Any = None
        #: Whether it has constants that cannot be compared.
        self.is_opaque = False
        self.packs: list[Pack] = []
        #: The numbers of the tensors that it returns.
        self.outs: list[int] = []
        #: Whether they are all new.
        self.is_new = True
        #: What each is a view of.
        self.returns: list[View | None] = []
        #: The numbers of the arguments that it writes to, and what each is a view of then.
        self.changed: list[tuple[int, View]] = []
        #: Whether it changes how a tensor looks at its memory, which counts as a write.
        self.changes_looks = False
        #: Whether the shapes of what it returns depend on data; the looks, if they may be others.
        self.depends_on_data = False
        self.looks: list[Looks] | None = None
        #: The one op that draws random numbers.
        self.draws: list[Op] = []
        #: The range of ops that it ran.
        self.ops = (first_op, first_op)

    def is_like(self, other: Step) -> bool:
        """Whether both are the same call."""
        return (
            self.function == other.function
            and self.mood == other.mood
            and self.flags == other.flags
            and self.outs == other.outs
            and self.looks == other.looks
            and _same_template(self.args, other.args)
            and _same_template(self.kwargs, other.kwargs)
        )


def _same_template(a: Any, b: Any) -> bool:
    if type(a) is Number and type(b) is Number:
        return (a.number, a.writes) == (b.number, b.writes)
    if type(a) is Items and type(b) is Items:
        pairs = zip(a.items, b.items, strict=False)
        is_same_kind = (a.kind, a.keys, len(a.items)) == (b.kind, b.keys, len(b.items))
        return is_same_kind and all(_same_template(*pair) for pair in pairs)
    return type(a) is type(b) is Constant or same_constant(a, b)


class Objects:
    """The tensors of one call of a region, by number. Does not keep them alive."""

    __slots__ = ("_known", "count")

    def __init__(self) -> None:
        self._known: dict[int, tuple[ReferenceType[_Tensor], int, int | None]] = {}
        self.count = 0

    def number_of(self, tensor: _Tensor) -> int | None:
        """The number of ``tensor``, if it has one."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def add(self, tensor: _Tensor) -> int:
        """Give ``tensor`` the next number."""
        number = self.count
        self.count = number + 1
        self._known[id(tensor)] = (ref(tensor), number, version_of(tensor))
        return number

    def writes_to(self, tensor: _Tensor) -> int | None:
        """How often ``tensor`` was written to since it got its number; None if nobody counts."""
        before, now = self._known[id(tensor)][2], version_of(tensor)
        return None if before is None or now is None else now - before

    def alive(self) -> list[tuple[int, _Tensor]]:
        """The tensors that still exist."""
        found = [(number, reference()) for reference, number, _ in self._known.values()]
        return [(number, tensor) for number, tensor in found if tensor is not None]


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
_EQUAL = (type(None), bool, int, str, bytes, torch.device, torch.Size, range)


def is_comparable(value: Any) -> bool:
    """Whether ``value``, no tensor and no container, can be compared with that of another call."""
    kind = type(value)
    return kind in _EQUAL or kind in (float, complex) or isinstance(value, _IDENTICAL)


def same_constant(a: Any, b: Any) -> bool:
    """Whether two constants, which may be compared, are the same."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is float:
        if math.isnan(a):
            return math.isnan(b)
        return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
    if type(a) is complex:
        return same_constant(a.real, b.real) and same_constant(a.imag, b.imag)
    return type(a) in _EQUAL and bool(a == b)


class _OfNothing:
    """A type that nothing is of."""


def equal_type(value: Any) -> type:
    """Of which type what equals the constant ``value`` has to be, to be the same for that."""
    kind = type(value)
    is_enough = kind in _EQUAL or (kind is float and value != 0.0)  # there are two zeros
    return kind if is_enough else _OfNothing


def tensors_in(out: Any) -> list[_Tensor]:
    """The tensors that a function returns, in lists and tuples too."""
    if isinstance(out, _Tensor):
        return [out]
    if isinstance(out, (tuple, list)):
        return [tensor for each in out for tensor in tensors_in(each)]
    return []


def _getters(*names: str) -> set[Any]:
    return {getattr(_Tensor, name).__get__ for name in names if hasattr(_Tensor, name)}


def _methods(*names: str) -> set[Any]:
    return {getattr(_Tensor, name) for name in names if hasattr(_Tensor, name)}


#: What tells the looks of a tensor, that follow from those of the tensors before; and what switches
#: gradients on and off, which is compared at every function: the collector may end a generator in
#: the midst of a region, and with it a `torch.no_grad`.
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

#: What gives others a way to the memory of a tensor, to read and to write it unseen.
EXPOSING: frozenset[Any] = frozenset(
    _methods(
        *("data_ptr", "numpy", "__array__", "__dlpack__", "untyped_storage", "storage"),
        *("_typed_storage", "share_memory_", "apply_", "map_", "map2_"),
    )
    | {_Tensor.__cuda_array_interface__.__get__}
)

#: What gives a tensor another memory, or another tensor's.
UNSUPPORTED: frozenset[Any] = frozenset(
    _methods("set_", "resize_", "resize_as_", "_resize_output_") | {_Tensor.data.__set__}  # type: ignore[attr-defined]
)

#: What reads more than it is given, or runs other ops where a mode looks on.
UNREADABLE: frozenset[Any] = frozenset(
    {torch.tensor_split, _Tensor.tensor_split, torch.ctc_loss, F.ctc_loss}
    # What a tensor is a view of is not to be seen from the tensor.
    | _getters("_base")
    # What these run depends on the graph outside.
    | {torch.autograd.grad, torch.autograd.backward, _Tensor.backward}
    | {getattr(torch, name) for name in ("_pack_padded_sequence", "_pad_packed_sequence")}
)

#: The same, if they are told how long the sequences are.
UNREADABLE_IF_PACKED: frozenset[Any] = frozenset(
    {getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
)

#: What writes to lists of views, whose gradients torch gets wrong inside of any dispatch mode.
WRONG_IN_MODES: frozenset[Any] = frozenset(
    function
    for name, function in vars(torch).items()
    if name.startswith("_foreach_") and name.endswith("_")
)
