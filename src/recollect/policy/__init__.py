"""Policies: which results of a checkpointed region are kept, and where.

A policy is a list of rules. For each op of forward, the first rule that matches decides; results
that no rule matches are recomputed::

    from recollect import policy

    recollect.checkpoint(block, x, policy=policy.matmuls() | policy.attention())

Policies are values: immutable, comparable, cheap to combine with ``|``. One object can serve any
number of regions, in eager code and under ``torch.compile``. A rule that matched nothing is
reported: a pattern raises an error that lists the names, an op that never runs gives a warning.
"""

from __future__ import annotations

from typing import Any

from recollect.policy.op_info import ATTENTION, MATMULS
from recollect.policy.rules import (
    CheckpointPolicy,
    ModuleRule,
    NameRule,
    OpRule,
    PatternRule,
    Policy,
    Rule,
    checked_ops,
    written,
)
from recollect.report.units import argument_text

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

_SAVE = CheckpointPolicy.MUST_SAVE
_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
_OFFLOAD = CheckpointPolicy.MUST_CPU_OFFLOAD

# --- rules about ops ------------------------------------------------------------------------------


def ops(*packets: Any) -> list[Any]:
    """Each op of ``packets`` (``torch.ops.aten.mm``) with all its overloads."""
    return checked_ops(packets, "ops")


def _op_policy(name: str, given: tuple[Any, ...], decision: CheckpointPolicy) -> Policy:
    if not given:
        raise TypeError(f"{name}() needs at least one op, such as torch.ops.aten.mm")
    found = frozenset(checked_ops(given, f"{name}()"))
    return Policy(OpRule(written(name, given), decision, found))


def save_ops(*ops: Any) -> Policy:
    """Keep the results of these ops. A packet, ``torch.ops.aten.mm``, means all its overloads."""
    return _op_policy("save_ops", ops, _SAVE)


def recompute_ops(*ops: Any) -> Policy:
    """Recompute the results of these ops, whatever later rules and the defaults say."""
    return _op_policy("recompute_ops", ops, _RECOMPUTE)


def offload_ops(*ops: Any) -> Policy:
    """Keep the results of these ops in host memory."""
    return _op_policy("offload_ops", ops, _OFFLOAD)


def every_nth(op: Any, n: int) -> Policy:
    """Keep the ``n``-th, ``2n``-th, ... result of ``op``, counted in every call of a region.

    The next rules decide about the calls in between. All overloads of a packet count together.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n should be a positive int, but got {n!r}")
    found = frozenset(checked_ops([op], "every_nth()"))
    return Policy(OpRule(f"every_nth({op}, {n})", _SAVE, found, n=n))


def matmuls() -> Policy:
    """Keep matrix products: most of a transformer's time, for part of its memory."""
    return Policy(OpRule("matmuls()", _SAVE, names=MATMULS))


def attention() -> Policy:
    """Keep the results of attention kernels, such as ``scaled_dot_product_attention``."""
    return Policy(OpRule("attention()", _SAVE, names=ATTENTION))


def everything() -> Policy:
    """Keep every result."""
    return Policy(Rule("everything()", _SAVE))


def nothing() -> Policy:
    """Keep only the results that are kept by default: discrete choices, communication.

    To recompute those too, put them first: ``recompute_ops(...) | nothing()``.
    """
    return Policy(Rule("nothing()", CheckpointPolicy.PREFER_RECOMPUTE))


# --- rules about modules and names ----------------------------------------------------------------


def _pattern_policy(
    kind: type[PatternRule],
    name: str,
    patterns: tuple[str, ...],
    decision: CheckpointPolicy,
    example: str,
) -> Policy:
    if not patterns:
        raise TypeError(f"{name}() needs at least one pattern, such as {example!r}")
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(
                f"{name}() takes patterns such as {example!r}, but got {argument_text(pattern)}"
            )
    return Policy(kind(written(name, patterns), decision, patterns))


def save_modules(*patterns: str) -> Policy:
    """Keep all results computed inside these modules.

    A pattern matches the whole path of a module, or its end after a dot; ``*`` stands for any
    characters: ``"attn.wo"``, ``"layers.*.mlp"``.
    """
    return _pattern_policy(ModuleRule, "save_modules", patterns, _SAVE, "*.attn.wo")


def offload_modules(*patterns: str) -> Policy:
    """Keep all results computed inside these modules in host memory. Patterns: `save_modules`."""
    return _pattern_policy(ModuleRule, "offload_modules", patterns, _OFFLOAD, "*.mlp.up")


def save_named(*patterns: str) -> Policy:
    """Keep the tensors that the region names: ``recollect.tag(tensor, name)``."""
    return _pattern_policy(NameRule, "save_named", patterns, _SAVE, "queries")
