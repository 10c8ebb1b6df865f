"""Selective checkpointing: keep the results of some ops, recompute the others.

Two dispatch modes share a ledger. ``RecordMode`` runs in forward, applies the policy to each op and
keeps the results that it says to keep. ``RecomputeMode`` runs in the recomputation, where the n-th
call of an op finds the n-th entry: a kept result is handed out instead of running the op, and is
then freed. If the op drew random numbers, the stream is moved to where the op left it.

Views and in-place ops are recomputed whatever the policy says. They return memory of another
tensor, and in the recomputation that is another one. So are ops that write to an argument (the
statistics of a batch norm), which a later op may read, and those that draw from a generator of the
user's.

Casts of parameters by autocast are not counted, and run when they come: autocast may have the
result from an earlier region, in forward or in the recomputation.
"""

from recollect.policy.op_info import SAC_IGNORED_OPS
from recollect.rerun.selective.contexts import (
    create_selective_checkpoint_contexts,
    selective_contexts,
)
from recollect.rerun.selective.recompute import RecomputeMode
from recollect.rerun.selective.record import RecordMode

__all__ = [
    "SAC_IGNORED_OPS",
    "RecordMode",
    "RecomputeMode",
    "create_selective_checkpoint_contexts",
    "selective_contexts",
]
