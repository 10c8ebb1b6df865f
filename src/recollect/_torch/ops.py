"""What the schema and the tags of an op say about it."""

from __future__ import annotations

import types
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket


def bare_op(op: Any) -> Callable[..., Any]:
    """The function that ``op`` calls, without the method of ``OpOverload`` around it."""
    return op._op if type(op) is OpOverload else op


def op_name(op: Any) -> str:
    """The name by which the dispatcher knows ``op``, without its overload: ``aten::mm``."""
    return op._schema.name if type(op) is OpOverload else str(op)


def argument_names(op: Any, *, lists: bool = False) -> list[str]:
    """The names of the arguments of ``op``, in order; ``lists``: of those that are sizes only."""
    if type(op) is not OpOverload:
        return []
    arguments = op._schema.arguments
    if lists:
        return [each.name for each in arguments if str(each.type) in _LISTS_OF_SIZES]
    return [each.name for each in arguments]


#: Types of arguments that are lists of sizes.
_LISTS_OF_SIZES = ("List[int]", "Optional[List[int]]", "List[SymInt]", "Optional[List[SymInt]]")


def packet_of(function: Any) -> OpOverloadPacket | None:
    """The op of ``aten`` that a function of torch is named after, if there is one: ``torch.mm``."""
    name = str(getattr(function, "__name__", ""))
    packet = getattr(torch.ops.aten, name, None) if name and is_of_torch(function) else None
    return packet if isinstance(packet, OpOverloadPacket) else None


def returns_alias(op: Any) -> bool:
    """Whether ``op`` returns one of its inputs, or a view of it."""
    if type(op) is not OpOverload:
        return False
    # The one view whose schema does not say so: callers promise not to use the input any more.
    if op is torch.ops.aten._unsafe_view.default:
        return True
    return any(result.alias_info is not None for result in op._schema.returns)


#: Ops that write to running statistics without saying so in their schemas.
_HIDDEN_WRITES = frozenset(
    {
        "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts",
        "aten::batch_norm_update_stats",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::native_batch_norm",
    }
)


def written_arguments(op: Any) -> list[tuple[int, str]]:
    """The arguments that ``op`` may write to: position and name of each."""
    if type(op) is not OpOverload:
        return []
    is_hidden = op._schema.name in _HIDDEN_WRITES
    return [
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (is_hidden and argument.name.startswith("running_"))
    ]


def writes_argument(op: Any) -> bool:
    """Whether ``op`` writes to one of its arguments."""
    if type(op) is not OpOverload:
        return False
    return bool(written_arguments(op)) or op._schema.name in _HIDDEN_WRITES


def is_random(op: Any) -> bool:
    """Whether ``op`` draws from a random stream."""
    return type(op) is OpOverload and torch.Tag.nondeterministic_seeded in op.tags


def _argument_of(op: Any, is_wanted: Callable[[Any], bool]) -> tuple[int, str] | None:
    """Position and name of the first argument of ``op`` that is wanted."""
    if type(op) is not OpOverload:
        return None
    found = enumerate(op._schema.arguments)
    return next(((n, each.name) for n, each in found if is_wanted(each)), None)


def generator_position(op: Any) -> tuple[int, str] | None:
    """The argument of ``op`` that is its generator: position and name."""
    return _argument_of(op, lambda argument: "Generator" in str(argument.type))


def dropout_of(op: Any) -> tuple[int, str] | None:
    """The argument of ``op`` that is a dropout probability: position and name."""
    return _argument_of(op, lambda argument: argument.name in ("dropout_p", "dropout", "p"))


def is_pointwise(op: Any) -> bool:
    """Whether each element of the result is a function of one element of each argument."""
    if type(op) is not OpOverload or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return torch.Tag.pointwise in op.tags


#: Views with an absolute storage offset, whatever that of their argument.
_ABSOLUTE = ("aten::as_strided", "aten::as_strided_")


def offset_position(op: Any) -> tuple[int, str] | None:
    """The argument of a view that is its storage offset: position and name."""
    if op_name(op) not in _ABSOLUTE:
        return None
    return _argument_of(op, lambda argument: argument.name == "storage_offset")


#: Namespaces of ops that write to their arguments without saying so in their schemas.
_WRITING_UNSEEN = ("c10d::", "symm_mem::")

#: The higher-order op that is known to write to no argument.
_FLEX_ATTENTION = "flex_attention"


def writes_unseen(op: Any) -> bool:
    """Whether ``op`` may write to arguments that no schema names."""
    if type(op) is OpOverload:
        return op._schema.name.startswith(_WRITING_UNSEEN)
    return str(op) != _FLEX_ATTENTION


#: The op by which autocast converts a tensor.
CAST = torch.ops.aten._to_copy.default


def is_cast(op: Any) -> bool:
    """Whether ``op`` is `CAST`."""
    return op is CAST


def metadata_ops() -> frozenset[Any]:
    """Ops that read shape, strides or device of tensor subclasses."""
    return frozenset(torch._subclasses.functional_tensor.FunctionalTensor.metadata_fns)


#: Ops whose result shares memory, but has other values than the memory.
_LAZY = ("aten::_conj", "aten::_neg_view", "aten::conj", "aten::resolve_conj", "aten::resolve_neg")


def makes_lazy_view(op: Any) -> bool:
    """Whether ``op`` returns a lazily conjugated or negated view."""
    return op_name(op) in _LAZY


def has_dynamic_shape(op: Any) -> bool:
    """Whether the shape of the result may depend on data."""
    return type(op) is not OpOverload or torch.Tag.dynamic_output_shape in op.tags


_KINDS_OF_TORCH = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    HigherOrderOperator,
)


def is_of_torch(function: Any) -> bool:
    """Whether ``function`` is torch's own: a function of its arguments alone."""
    if isinstance(function, FunctionType):
        return function.__module__ == "torch" or function.__module__.startswith("torch.")
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return not is_op_of_others(function)
    return isinstance(function, _KINDS_OF_TORCH)


def is_op_of_others(function: Any) -> bool:
    """Whether ``function`` is an op that another library has registered."""
    if not isinstance(function, (OpOverload, OpOverloadPacket)):
        return False
    name = str(function)
    return not name.startswith(("aten.", "prims.", "prim."))


def is_form_of(op: Any, function: Any) -> bool:
    """Whether ``op`` is ``function``, or one of its overloads."""
    return op is function or getattr(op, "overloadpacket", None) is function


def changes_looks(op: Any) -> bool:
    """Whether ``op`` gives its argument another shape, on the same memory."""
    return type(op) is OpOverload and torch.Tag.inplace_view in op.tags


_REPLACING = ("aten::resize_", "aten::resize_as_", "aten::set_", "aten::_resize_output_")


def changes_memory(op: Any) -> bool:
    """Whether ``op`` gives its argument another storage."""
    return op_name(op) in _REPLACING


def dropout_positions(op: Any) -> tuple[int, int, int] | None:
    """For recurrent layers of cuDNN: the positions of dropout, its switch and its state.

    They draw from a state of the library on the device, which no generator has. It is seeded again
    from a generator whose state has been set.
    """
    if op_name(op) not in ("aten::_cudnn_rnn", "aten::miopen_rnn"):
        return None
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout"), names.index("train"), names.index("dropout_state")


def takes_number(op: Any) -> bool:
    """Whether ``op`` returns a value of a tensor as a Python number."""
    return type(op) is OpOverload and torch.Tag.data_dependent_output in op.tags


def is_nondeterministic(op: Any) -> bool:
    """Whether ``op`` may return other bits for the same input."""
    return type(op) is OpOverload and torch.Tag.nondeterministic_bitwise in op.tags


_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in (
        *("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal"),
        *("normal", "random", "uniform", "zero"),
    )
)


def overwrites(op: Any) -> bool:
    """Whether ``op`` overwrites its argument without reading it."""
    if type(op) is not OpOverload:
        return False
    # bernoulli_ with a tensor of probabilities reads that, not what it writes to.
    return op._schema.name in _OVERWRITING or any(a.is_out for a in op._schema.arguments)


#: Normalizations whose results are independent of the running statistics that they update.
_UPDATING_NORMS = _HIDDEN_WRITES | {
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
}


def training_position(op: Any) -> int | None:
    """For a normalization: the position of the argument that says to update running statistics.

    -1 if it always does, None if ``op`` is not such a normalization.
    """
    if op_name(op) not in _UPDATING_NORMS:
        return None
    names = [argument.name for argument in op._schema.arguments]
    return names.index("training") if "training" in names else -1


def effects_of(op: Any) -> tuple[list[bool], list[tuple[int, str]]] | None:
    """What the schema of ``op`` says: which results are new, and which arguments are written to.

    A result that is not new is an argument or a view of one. None if ``op`` has no schema.
    """
    if type(op) is not OpOverload:
        return None
    new = [result.alias_info is None for result in op._schema.returns]
    arguments = enumerate(op._schema.arguments)
    written = [(n, a.name) for n, a in arguments if a.alias_info and a.alias_info.is_write]
    return new, written
