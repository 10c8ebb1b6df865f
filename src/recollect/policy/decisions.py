"""Decisions about the result of an op, and what a policy function takes and returns."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy as TorchCheckpointPolicy

from recollect._torch.ops import HigherOrderOperator, OpOverload, OpOverloadPacket, packet_of

__all__ = [
    "CheckpointPolicy",
    "PolicyFunction",
    "SelectiveCheckpointContext",
    "as_decision",
    "checked_ops",
]


class CheckpointPolicy(enum.Enum):
    """What selective checkpointing does with the result of an op.

    ``SAVE`` keeps it from forward to backward, ``RECOMPUTE`` frees it and runs the op again,
    ``CPU_OFFLOAD`` keeps it in the memory of the host. ``MUST_`` binds the compiler and our own
    defaults as well; with ``PREFER_`` they may decide otherwise.
    """

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_CPU_OFFLOAD = 4
    PREFER_CPU_OFFLOAD = 5


class SelectiveCheckpointContext:
    """Passed to a policy function with each op, and valid during that call.

    ``op_output`` is what the op returned. A policy decides in forward only, so ``is_recompute`` is
    always False; it is there for older policies that read it.
    """

    def __init__(self, *, is_recompute: bool, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output

    def __repr__(self) -> str:
        return f"SelectiveCheckpointContext(is_recompute={self.is_recompute})"


PolicyFunction = Callable[..., Any]


def as_decision(value: Any, op: Any) -> CheckpointPolicy:
    """The return value of a policy function as a decision; anything else is refused."""
    if type(value) is CheckpointPolicy:
        return value
    if value is True or value is False:
        return CheckpointPolicy.MUST_SAVE if value else CheckpointPolicy.PREFER_RECOMPUTE
    # torch's own enum of the same name.
    if type(value) is TorchCheckpointPolicy:
        return CheckpointPolicy[value.name]
    # No TypeError: ``x @ w`` would make "unsupported operand type(s)" of it.
    raise ValueError(
        f"the policy function returned {value!r} for {op}; return a CheckpointPolicy, such as "
        "CheckpointPolicy.MUST_SAVE or CheckpointPolicy.PREFER_RECOMPUTE"
    )


def checked_ops(ops: Iterable[Any], name: str, *, packets: bool = True) -> list[Any]:
    """``ops`` with every packet (``torch.ops.aten.mm``) replaced by all its overloads.

    What is no op is refused, and so is a packet unless ``packets``. ``name``: what the user calls
    the ops.
    """
    checked: list[Any] = []
    for op in ops:
        if isinstance(op, (OpOverload, HigherOrderOperator)):
            checked.append(op)
        elif packets and isinstance(op, OpOverloadPacket):
            checked += [getattr(op, overload) for overload in op.overloads()]
        else:
            raise ValueError(
                f"Expected op in {name} to be an OpOverload but got: {op} of type {type(op)}."
                f"{_hint(op)}"
            )
    return checked


def _hint(op: Any) -> str:
    if isinstance(op, OpOverloadPacket):
        return (
            " Please update the OpOverloadPacket to a specific OpOverload: "
            f"torch.ops.{op}.default rather than torch.ops.{op}."
        )
    packet = packet_of(op)
    return (
        "" if packet is None else f" A function of torch is no op: name torch.ops.{packet} instead."
    )
