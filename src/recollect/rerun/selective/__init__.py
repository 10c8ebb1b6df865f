"""Selective checkpointing: keep the results of some ops, recompute the others.

Two dispatch modes share a ledger. ``RecordMode`` runs in forward, asks the policy about each op and
writes down what it decided: the result, or that there is none. ``ReplayMode`` runs in the
recomputation, where the n-th call of an op finds the n-th entry: a kept result is handed out
instead of running the op, and is then forgotten. If the op drew random numbers, the stream is moved
to where the op left it.

Views and in-place ops are recomputed whatever the policy says. What they return is memory of
another tensor, and in the recomputation that is another one. So are ops that write to an argument
(the statistics of a batch norm), which a later op may read, and those that draw from a generator of
the user's.

A parameter that autocast converts is no op of the region's: autocast may have the result from an
earlier region, in forward or in the recomputation. Such casts run when they come, and are not
counted.
"""

from recollect.policy.facts import SAC_IGNORED_OPS
from recollect.rerun.selective.contexts import (
    create_selective_checkpoint_contexts,
    selective_contexts,
)
from recollect.rerun.selective.record import RecordMode
from recollect.rerun.selective.replay import ReplayMode

__all__ = [
    "SAC_IGNORED_OPS",
    "RecordMode",
    "ReplayMode",
    "create_selective_checkpoint_contexts",
    "selective_contexts",
]
