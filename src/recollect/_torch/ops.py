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

#: Functions of torch that run one op, given its arguments. An op called by itself has these read
#: by TorchScript, which takes thousands of instructions more. (Functions that return a tuple where
#: the op returns a list are left out.)
_BINDINGS: dict[OpOverload, Callable[..., Any]] = {
    _aten._softmax.default: torch._softmax,
    _aten.add.Tensor: torch.add,
    _aten.addmm.default: torch.addmm,
    _aten.baddbmm.default: torch.baddbmm,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.clone.default: torch.clone,
    _aten.detach.default: torch.detach,
    _aten.div.Tensor: torch.div,
    _aten.embedding.default: torch.embedding,
    _aten.expand.default: torch.Tensor.expand,
    _aten.gelu.default: torch._C._nn.gelu,
    _aten.mean.dim: torch.mean,
    _aten.mm.default: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.neg.default: torch.neg,
    _aten.permute.default: torch.permute,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.relu.default: torch.relu,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.select.int: torch.select,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.silu.default: torch._C._nn.silu,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.t.default: torch.t,
    _aten.tanh.default: torch.tanh,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
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
