"""The rules that policies are made of, and policies.

Pure: nothing here runs an op or holds a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from typing import Any

import torch

from recollect._torch.ops import HigherOrderOperator, OpOverload, OpOverloadPacket, op_name
from recollect.policy.decisions import CheckpointPolicy, PolicyFunction, checked_ops
from recollect.policy.patterns import fits_any

__all__ = [
    "AnyRule",
    "FunctionRule",
    "ModuleRule",
    "NameRule",
    "NthRule",
    "OpRule",
    "PatternRule",
    "Policy",
    "Rule",
    "as_policy",
    "written",
]


@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """Decides about the results that it matches. ``title`` is how the user wrote it."""

    title: str
    decision: CheckpointPolicy

    def __repr__(self) -> str:
        return self.title


@dataclass(frozen=True, slots=True, repr=False)
class OpRule(Rule):
    """Matches ops, by themselves or by name."""

    ops: frozenset[Any]
    names: frozenset[str] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Whether it can match nothing."""
        return not self.ops and not self.names

    def covers(self, op: Any) -> bool:
        """Whether ``op`` is one of them."""
        return op in self.ops or op_name(op) in self.names

    def __reduce__(self) -> Any:
        # Ops cannot be pickled, but have names.
        paths = [
            f"higher_order.{op_name(op)}" if isinstance(op, HigherOrderOperator) else str(op)
            for op in self.ops
        ]
        others = {each.name: getattr(self, each.name) for each in fields(self)}
        return _unpickle, (type(self), others | {"ops": sorted(paths)})


def _unpickle(cls: type[OpRule], values: dict[str, Any]) -> OpRule:
    found = [reduce(getattr, path.split("."), torch.ops) for path in values["ops"]]
    return cls(**values | {"ops": frozenset(found)})


@dataclass(frozen=True, slots=True, repr=False)
class NthRule(OpRule):
    """Matches every ``n``-th call of some ops in a run of the region."""

    n: int = 1


@dataclass(frozen=True, slots=True, repr=False)
class PatternRule(Rule):
    """Matches by patterns of names."""

    patterns: tuple[str, ...]

    def covers(self, name: str) -> bool:
        """Whether ``name`` fits one of the patterns."""
        return fits_any(name, self.patterns)


class ModuleRule(PatternRule):
    """Matches whatever runs inside some modules."""

    __slots__ = ()


class NameRule(PatternRule):
    """Matches tensors that were given a name."""

    __slots__ = ()


class AnyRule(Rule):
    """Matches whatever is left."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, repr=False)
class FunctionRule(Rule):
    """Calls a function of the user's, which decides about every op."""

    function: PolicyFunction


class Policy:
    """Rules; the first that matches decides. Made by the functions of ``recollect.policy``."""

    __slots__ = ("_hash", "_rules", "has_functions", "options", "rulebooks")

    def __init__(self, *rules: Rule) -> None:
        self._rules = rules
        self._hash: int | None = None
        #: A cache: the rules resolved for the ops that were met. See `rulebook_of`.
        self.rulebooks: dict[bool, Any] = {}
        #: Whether a function of the user's decides, which may hold anything, and change.
        self.has_functions = any(isinstance(rule, FunctionRule) for rule in rules)
        #: A cache: the options of a region that has only this policy, by engine.
        self.options: dict[str | None, Any] = {}

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in order."""
        return self._rules

    def __or__(self, other: Any) -> Policy:
        """This policy, then ``other`` for what no rule of it matches."""
        return Policy(*self.rules, *as_policy(other, "the right side of |").rules)

    def __ror__(self, other: Any) -> Policy:
        return as_policy(other, "the left side of |") | self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.rules == other.rules

    def __hash__(self) -> int:
        if self._hash is None or self.has_functions:
            self._hash = hash(self.rules)  # slow, and needed in every call of a region
        return self._hash

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))

    def __reduce__(self) -> Any:
        return Policy, self.rules


def as_policy(value: Any, name: str, *, packets: bool = True) -> Policy:
    """A policy, a collection of ops to keep, or a policy function, as a policy.

    ``packets``: accept any collection, of ops with or without their overload.
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, (list, tuple, set, frozenset) if packets else list):
        try:
            return _of_ops(tuple(value), packets)
        except TypeError:  # not hashable, and hence no op
            checked_ops(value, "policy" if packets else "`op_list`")
            raise
    is_op = isinstance(value, (OpOverload, OpOverloadPacket))
    if getattr(value, "__module__", None) == _MAKERS:
        raise TypeError(
            f"{name} is the function policy.{value.__name__}, which makes a policy: call it, "
            f"{name}=policy.{value.__name__}(...)"
        )
    if callable(value) and not isinstance(value, type) and not is_op:
        return Policy(FunctionRule("policy function", CheckpointPolicy.PREFER_RECOMPUTE, value))
    raise TypeError(
        f"{name} must be either a function or a list of ops, or made by recollect.policy, such as "
        f"policy.save_ops(torch.ops.aten.mm). Got {value!r} of type {type(value).__name__} as the "
        "policy"
    )


#: Where the functions are that make policies.
_MAKERS = "recollect.policy.makers"


@lru_cache(maxsize=64)  # the same list is given in every call of a region
def _of_ops(ops: tuple[Any, ...], packets: bool) -> Policy:
    found = checked_ops(ops, "policy" if packets else "`op_list`", packets=packets)
    title = written("save_ops", ops)
    return Policy(OpRule(title, CheckpointPolicy.MUST_SAVE, frozenset(found)))


def written(name: str, values: Iterable[Any]) -> str:
    """A call of the function ``name``, as the user wrote it."""
    shown = [repr(value) if isinstance(value, str) else str(value) for value in values]
    return f"{name}({', '.join(shown)})"
