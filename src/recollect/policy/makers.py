"""The functions that make policies."""

from __future__ import annotations

from typing import Any

from recollect.policy.decisions import CheckpointPolicy, checked_ops
from recollect.policy.op_sets import ATTENTION, MATMULS
from recollect.policy.rules import AnyRule, ModuleRule, NameRule, NthRule, OpRule, Policy, written

__all__ = [
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
    """Keep what these ops return. A packet, ``torch.ops.aten.mm``, stands for all its overloads."""
    return _op_policy("save_ops", ops, _SAVE)


def recompute_ops(*ops: Any) -> Policy:
    """Run these ops again, whatever later rules and our own defaults say."""
    return _op_policy("recompute_ops", ops, _RECOMPUTE)


def offload_ops(*ops: Any) -> Policy:
    """Keep what these ops return in the memory of the host."""
    return _op_policy("offload_ops", ops, _OFFLOAD)


def every_nth(op: Any, n: int) -> Policy:
    """Keep the ``n``-th, ``2n``-th, ... result of ``op``, counted in every call of a region.

    The calls in between are left to the rules that follow. All overloads of a packet are counted
    together.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n should be a positive int, but got {n!r}")
    found = frozenset(checked_ops([op], "every_nth()"))
    return Policy(NthRule(f"every_nth({op}, {n})", _SAVE, found, n=n))


def matmuls() -> Policy:
    """Keep products of matrices: most of the time of a transformer, for a share of its memory."""
    return Policy(OpRule("matmuls()", _SAVE, frozenset(), MATMULS))


def attention() -> Policy:
    """Keep the results of attention kernels (``scaled_dot_product_attention`` and its kind)."""
    return Policy(OpRule("attention()", _SAVE, frozenset(), ATTENTION))


def everything() -> Policy:
    """Keep every result."""
    return Policy(AnyRule("everything()", _SAVE))


def nothing() -> Policy:
    """Keep nothing but the results that are kept by default: discrete choices, communication.

    To recompute those as well, name them before: ``recompute_ops(...) | nothing()``.
    """
    return Policy(AnyRule("nothing()", CheckpointPolicy.PREFER_RECOMPUTE))


# --- rules about modules and names ----------------------------------------------------------------


def _patterns(name: str, patterns: tuple[str, ...], example: str) -> tuple[str, ...]:
    if not patterns:
        raise TypeError(f"{name}() needs at least one pattern, such as {example!r}")
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"{name}() takes patterns such as {example!r}, but got {pattern!r}")
    return patterns


def save_modules(*patterns: str) -> Policy:
    """Keep what runs inside these modules.

    A pattern is compared with the path of a module, or with the end of it after a dot; ``*`` stands
    for any characters: ``"attn.wo"``, ``"layers.*.mlp"``. The modules need not be changed.
    """
    checked = _patterns("save_modules", patterns, "*.attn.wo")
    return Policy(ModuleRule(written("save_modules", patterns), _SAVE, checked))


def offload_modules(*patterns: str) -> Policy:
    """Keep what runs inside these modules in the memory of the host. As ``save_modules``."""
    checked = _patterns("offload_modules", patterns, "*.mlp.up")
    return Policy(ModuleRule(written("offload_modules", patterns), _OFFLOAD, checked))


def save_named(*patterns: str) -> Policy:
    """Keep the tensors that the region names: ``recollect.tag(tensor, name)``."""
    checked = _patterns("save_named", patterns, "queries")
    return Policy(NameRule(written("save_named", patterns), _SAVE, checked))
