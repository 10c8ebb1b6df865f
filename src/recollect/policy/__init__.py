"""Policies: which results of a checkpointed region are kept, and where.

A policy is a list of rules. Each op of forward is put to them in order and the first that has an
answer wins; an op on which no rule has one is recomputed::

    from recollect import policy

    recollect.checkpoint(block, x, policy=policy.matmuls() | policy.attention())

Policies are values: immutable, comparable, cheap to combine with ``|``, and the same object can
serve any number of regions, in eager code and under ``torch.compile``. A rule that matches nothing
is loud: a pattern raises and lists what there is, an op that never runs warns.
"""

from recollect.policy.makers import (
    attention,
    every_nth,
    everything,
    matmuls,
    nothing,
    offload_modules,
    offload_ops,
    ops,
    recompute_ops,
    save_modules,
    save_named,
    save_ops,
)
from recollect.policy.rules import Policy

__all__ = [
    "Policy",
    "attention",
    "every_nth",
    "everything",
    "matmuls",
    "nothing",
    "offload_modules",
    "offload_ops",
    "ops",
    "recompute_ops",
    "save_modules",
    "save_named",
    "save_ops",
]
