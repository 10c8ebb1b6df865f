"""Ops: their classes, names, schemas and tags.

An op that takes or returns an object of TorchScript (a process group) is of a subclass of
``OpOverload``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket

#: The op by which autocast converts a tensor.
CAST = torch.ops.aten._to_copy.default


class Argument(NamedTuple):
    """An argument of an op, as its schema declares it."""

    position: int
    name: str
    type: str
    is_written: bool
    is_out: bool


_aten = torch.ops.aten

_PLACES = (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn)


def bindings_of(op: OpOverload) -> list[Callable[..., Any]]:
    """The functions of torch's Python interface that have the name of ``op``.

    An op called by itself has its arguments read by TorchScript, which takes thousands of
    instructions more. Which overload a function calls depends on the arguments.
    """
    if op.namespace != "aten":
        return []
    name = op._schema.name.removeprefix("aten::")
    found = (getattr(place, name, None) for place in _PLACES)
    return [each for each in found if callable(each)]


#: Ops that may always be called by their binding. (Not those where it returns a tuple and the op a
#: list.) For others it depends on the arguments: see `bindings.quickest_call`.
_BINDINGS = {
    op: bindings_of(op)[0]
    for op in (
        *(_aten._softmax.default, _aten.add.Tensor, _aten.addmm.default, _aten.baddbmm.default),
        *(_aten.bmm.default, _aten.cat.default, _aten.clone.default, _aten.detach.default),
        *(_aten.div.Tensor, _aten.embedding.default, _aten.expand.default, _aten.gelu.default),
        *(_aten.mean.dim, _aten.mm.default, _aten.mul.Tensor, _aten.native_layer_norm.default),
        *(_aten.neg.default, _aten.permute.default, _aten.pow.Tensor_Scalar, _aten.relu.default),
        *(_aten.rsqrt.default, _aten.select.int, _aten.sigmoid.default, _aten.silu.default),
        *(_aten.sub.Tensor, _aten.sum.dim_IntList, _aten.t.default, _aten.tanh.default),
        *(_aten.transpose.int, _aten.unsqueeze.default, _aten.view.default),
    )
}


def bare_op(op: Any) -> Callable[..., Any]:
    """The fastest function that runs ``op``, without the method of ``OpOverload`` around it."""
    return _BINDINGS.get(op, op._op) if type(op) is OpOverload else op


def op_name(op: Any) -> str:
    """The dispatcher's name of ``op``, without its overload: ``aten::mm``."""
    return op._schema.name if isinstance(op, OpOverload) else str(op)


def arguments_of(op: Any) -> list[Argument]:
    """The arguments of ``op`` in order; none if it has no schema."""
    if not isinstance(op, OpOverload):
        return []
    return [
        Argument(
            position,
            each.name,
            str(each.type),
            each.alias_info is not None and each.alias_info.is_write,
            each.is_out,
        )
        for position, each in enumerate(op._schema.arguments)
    ]


def returned_aliases(op: Any) -> list[bool] | None:
    """For each result of ``op`` whether it is an argument or a view of one.

    None if ``op`` has no schema.
    """
    if not isinstance(op, OpOverload):
        return None
    return [result.alias_info is not None for result in op._schema.returns]


def has_tag(op: Any, tag: torch.Tag) -> bool:
    """Whether ``op`` is declared with ``tag``."""
    return isinstance(op, OpOverload) and tag in op.tags


def flop_formula(op: Any) -> Callable[..., int] | None:
    """The function that counts the FLOPs of an op from its arguments and result, if any."""
    from torch.utils.flop_counter import flop_registry  # imports the compiler's

    return flop_registry.get(op.overloadpacket) if type(op) is OpOverload else None


def packet_of(function: Any) -> OpOverloadPacket | None:
    """The ``aten`` op with the name of a torch function such as ``torch.mm``, if there is one."""
    name = str(getattr(function, "__name__", ""))
    packet = getattr(torch.ops.aten, name, None) if name and is_of_torch(function) else None
    return packet if isinstance(packet, OpOverloadPacket) else None


def metadata_ops() -> frozenset[Any]:
    """Ops that read shape, strides or device of tensor subclasses."""
    return frozenset(torch._subclasses.functional_tensor.FunctionalTensor.metadata_fns)


_KINDS_OF_TORCH = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    HigherOrderOperator,
)


def is_of_torch(function: Any) -> bool:
    """Whether ``function`` is torch's own, and so depends only on its arguments."""
    if isinstance(function, FunctionType):
        return function.__module__ == "torch" or function.__module__.startswith("torch.")
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return not is_op_of_others(function)
    return isinstance(function, _KINDS_OF_TORCH)


def is_op_of_others(function: Any) -> bool:
    """Whether ``function`` is an op that another library has registered."""
    if not isinstance(function, (OpOverload, OpOverloadPacket)):
        return False
    return not str(function).startswith(("aten.", "prims.", "prim."))


def is_form_of(op: Any, function: Any) -> bool:
    """Whether ``op`` is ``function``, or one of its overloads."""
    return op is function or getattr(op, "overloadpacket", None) is function
