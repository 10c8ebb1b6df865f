"""Selective checkpointing: keep the results of some ops, recompute the others.

Two dispatch modes share a ledger. ``RecordMode`` runs in forward and keeps the results that the
policy says to keep. ``RecomputeMode`` runs in the recomputation, where the n-th call of an op finds
the n-th entry: a kept result is handed out instead of running the op, and is then freed. If the op
drew random numbers, the stream is moved to where the op left it.

Whatever the policy says, some ops are recomputed: views and in-place ops, whose results are memory
of another tensor; ops that write to an argument (the statistics of a batch norm), which a later op
may read; and ops that draw from a generator of the user's. Casts of parameters by autocast are not
counted, since autocast may have the result from an earlier region; nor are the ops by which FSDP
gathers parameters, which are often still there in the recomputation.
"""

from __future__ import annotations

from typing import Any

from recollect.policy.op_info import SAC_IGNORED_OPS
from recollect.policy.rules import Policy, as_policy
from recollect.rerun.selective.ledger import Ledger
from recollect.rerun.selective.recompute import RecomputeMode
from recollect.rerun.selective.record import RecordMode
from recollect.store.offload_batch import OffloadBatch
from recollect.store.protocol import Store

__all__ = [
    "SAC_IGNORED_OPS",
    "RecomputeMode",
    "RecordMode",
    "create_selective_checkpoint_contexts",
    "selective_contexts",
]


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[Any, Any]:
    """Two contexts for ``context_fn=`` that keep the results of some ops.

    Args:
        policy_fn_or_list: A policy of ``recollect.policy``. Or a list of ops whose results are
            kept; a packet (``torch.ops.aten.mm``) stands for all its overloads. Or a function
            called as ``policy(ctx, op, *args, **kwargs)`` for each op of forward, which returns a
            ``CheckpointPolicy``.
        allow_cache_entry_mutation: Do not raise when a kept tensor was changed in place.

    Example::

        context_fn = functools.partial(
            recollect.create_selective_checkpoint_contexts, [torch.ops.aten.mm]
        )
        out = recollect.checkpoint(block, x, context_fn=context_fn)
    """
    policy = as_policy(policy_fn_or_list, "policy_fn_or_list")
    return selective_contexts(policy, allow_mutation=allow_cache_entry_mutation)


def selective_contexts(
    policy: Policy,
    *,
    allow_mutation: bool = False,
    store: Store | None = None,
    as_torch: bool = False,
) -> tuple[RecordMode, RecomputeMode]:
    """The two modes for one region.

    ``as_torch``: without our own defaults and warnings; a kept result is handed out once.
    """
    ledger = Ledger(OffloadBatch(store), allow_mutation=allow_mutation)
    return RecordMode(policy, ledger, as_torch=as_torch), RecomputeMode(ledger, once=as_torch)
