"""What to do with the result of an op: decisions, and the functions that take them.

Pure: nothing here runs an op or holds a tensor.
"""

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
    "check_ops",
    "expand_packets",
]


class CheckpointPolicy(enum.Enum):
    """What selective checkpointing does with the result of an op.

    ``SAVE`` keeps it from forward to backward, ``RECOMPUTE`` forgets it and runs the op again,
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
    """Handed to a policy function with each op.

    ``op_output`` is what the op returned. A policy is asked in forward only, so ``is_recompute``
    is always False; it is there for older policies that read it. The object is valid during the
    call it is passed to.
    """

    def __init__(self, *, is_recompute: bool, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output

    def __repr__(self) -> str:
        return f"SelectiveCheckpointContext(is_recompute={self.is_recompute})"


PolicyFunction = Callable[..., Any]


def as_decision(value: Any, op: Any) -> CheckpointPolicy:
    """What a policy function returned, as a decision; anything else is refused."""
    if type(value) is CheckpointPolicy:
        return value
    if value is True or value is False:
        return CheckpointPolicy.MUST_SAVE if value else CheckpointPolicy.PREFER_RECOMPUTE
    # torch's own enum of the same name, from somebody who imported it there.
    if type(value) is TorchCheckpointPolicy:
        return CheckpointPolicy[value.name]
    # No TypeError: ``x @ w`` would make "unsupported operand type(s)" of it.
    raise ValueError(
        f"the policy function returned {value!r} for {op}; return a CheckpointPolicy, such as "
        "CheckpointPolicy.MUST_SAVE or CheckpointPolicy.PREFER_RECOMPUTE"
    )


def check_ops(ops: Iterable[Any], name: str) -> None:
    """Refuse whatever in ``ops`` (to the user: ``name``) is not an op with its overload."""
    for op in ops:
        if isinstance(op, (OpOverload, HigherOrderOperator)):
            continue
        hint = ""
        if isinstance(op, OpOverloadPacket):
            hint = (
                " Please update the OpOverloadPacket to a specific OpOverload: "
                f"torch.ops.{op}.default rather than torch.ops.{op}."
            )
        elif (packet := packet_of(op)) is not None:
            hint = f" A function of torch is no op: name torch.ops.{packet} instead."
        raise ValueError(
            f"Expected op in {name} to be an OpOverload but got: {op} of type {type(op)}.{hint}"
        )


def expand_packets(ops: Iterable[Any]) -> list[Any]:
    """``ops`` with every packet (``torch.ops.aten.mm``) replaced by all its overloads."""
    expanded: list[Any] = []
    for op in ops:
        if isinstance(op, OpOverloadPacket):
            expanded += [getattr(op, name) for name in op.overloads()]
        else:
            expanded.append(op)
    return expanded
