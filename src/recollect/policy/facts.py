"""What is known of an op, whatever the policy. Read once: a schema takes microseconds."""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.ops import (
    bare_op,
    dropout_positions,
    is_cast,
    is_random,
    metadata_ops,
    returns_alias,
    writes_argument,
    written_arguments,
)
from recollect.policy.op_sets import allocates, not_to_be_repeated

__all__ = ["SAC_IGNORED_OPS", "Facts", "facts_of", "known_facts"]

#: Ops that no policy is asked about. Forward and recomputation detach a different number of times,
#: and our own checks read the metadata of tensor subclasses through ops.
SAC_IGNORED_OPS: set[Any] = {
    torch.ops.aten.detach.default,
    torch.ops.prim.device.default,
} | metadata_ops()


class Facts:
    """About one op."""

    __slots__ = (
        "_dropout",
        "allocates",
        "call",
        "can_be_kept",
        "is_alias",
        "is_cast",
        "is_ignored",
        "is_random",
        "is_usual",
        "is_view",
        "not_to_be_repeated",
        "op",
        "writes",
        "written",
    )

    def __init__(self, op: Any) -> None:
        self.op = op
        #: How to call it.
        self.call = bare_op(op)
        #: Whether it returns memory of its inputs, and whether it writes to them. Such ops are
        #: recomputed whatever the policy says: in the recomputation that memory is another.
        self.is_alias = returns_alias(op)
        self.writes = writes_argument(op)
        self.written = written_arguments(op)
        self.is_cast = is_cast(op)
        self.is_ignored = op in SAC_IGNORED_OPS
        self.is_random = is_random(op)
        self._dropout = dropout_positions(op)
        #: Whether there is nothing special about it.
        self.is_usual = not (self.writes or self.is_cast or self.is_random)
        #: Whether it makes memory that somebody we do not see may fill.
        self.allocates = allocates(op)
        self.is_view = self.is_alias and not self.writes
        self.can_be_kept = not (self.is_alias or self.writes or self.allocates)
        #: Why it is kept, if nobody insists on the contrary.
        self.not_to_be_repeated = not_to_be_repeated(op)

    @property
    def is_recurrent(self) -> bool:
        """Whether it draws, if at all, from a state of its library; see `draws_alone`."""
        return self._dropout is not None

    def draws_alone(self, args: tuple[Any, ...]) -> bool:
        """Whether a call of it draws from a state that no generator knows of."""
        if self._dropout is None:
            return False
        dropout, train, _ = self._dropout
        return bool(args[dropout] and args[train])

    def without_idle_state(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, without the state of the library if the call does not draw from it.

        It is given the one that other layers use.
        """
        if self._dropout is None or self.draws_alone(args):
            return args
        state = self._dropout[2]
        return *args[:state], None, *args[state + 1 :]


#: By id: ops live for good, and hash slowly.
known_facts: dict[int, Facts] = {}


def facts_of(op: Any) -> Facts:
    """What is known of ``op``."""
    known = known_facts.get(id(op))
    if known is None:
        known = known_facts[id(op)] = Facts(op)
    return known
