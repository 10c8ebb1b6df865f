"""The rules that policies are made of, and policies.

Pure: nothing here runs an op or holds a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, reduce
from typing import Any

import torch

from recollect._torch.ops import HigherOrderOperator, OpOverload, OpOverloadPacket, op_name
from recollect.policy.decisions import CheckpointPolicy, PolicyFunction, check_ops, expand_packets
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


class Rule:
    """Says what becomes of the results that it matches.

    ``title`` is how the user wrote it.
    """

    __slots__ = ("decision", "title")

    def __init__(self, title: str, decision: CheckpointPolicy) -> None:
        self.title = title
        self.decision = decision

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def __repr__(self) -> str:
        return self.title

    def _content(self) -> tuple[Any, ...]:
        return (self.title, self.decision)


class OpRule(Rule):
    """Matches ops, by themselves or by name."""

    __slots__ = ("names", "ops")

    def __init__(
        self, title: str, decision: CheckpointPolicy, ops: Iterable[Any], names: frozenset[str]
    ) -> None:
        super().__init__(title, decision)
        self.ops = frozenset(ops)
        self.names = names

    @property
    def is_empty(self) -> bool:
        """Whether it can match nothing."""
        return not self.ops and not self.names

    def covers(self, op: Any) -> bool:
        """Whether ``op`` is one of them."""
        return op in self.ops or op_name(op) in self.names

    def _content(self) -> tuple[Any, ...]:
        return (*super()._content(), self.ops, self.names)

    def __reduce__(self) -> Any:
        # Ops cannot be pickled, but have names.
        return _unpickle, (type(self), self._state())

    def _state(self) -> tuple[Any, ...]:
        names = [op_name(op) if isinstance(op, HigherOrderOperator) else str(op) for op in self.ops]
        return self.title, self.decision, sorted(names), self.names


class NthRule(OpRule):
    """Matches every ``n``-th call of some ops in a run of the region."""

    __slots__ = ("n",)

    def __init__(
        self,
        title: str,
        decision: CheckpointPolicy,
        ops: Iterable[Any],
        names: frozenset[str],
        n: int,
    ) -> None:
        super().__init__(title, decision, ops, names)
        self.n = n

    def _content(self) -> tuple[Any, ...]:
        return (*super()._content(), self.n)

    def _state(self) -> tuple[Any, ...]:
        return (*super()._state(), self.n)


def _unpickle(cls: type[OpRule], state: tuple[Any, ...]) -> OpRule:
    title, decision, names, *rest = state
    paths = [name if "." in name else f"higher_order.{name}" for name in names]
    found = [reduce(getattr, path.split("."), torch.ops) for path in paths]
    return cls(title, decision, found, *rest)


class PatternRule(Rule):
    """Matches by patterns of names."""

    __slots__ = ("patterns",)

    def __init__(self, title: str, decision: CheckpointPolicy, patterns: tuple[str, ...]) -> None:
        super().__init__(title, decision)
        self.patterns = patterns

    def covers(self, name: str) -> bool:
        """Whether ``name`` fits one of the patterns."""
        return fits_any(name, self.patterns)

    def _content(self) -> tuple[Any, ...]:
        return (*super()._content(), self.patterns)


class ModuleRule(PatternRule):
    """Matches whatever runs inside some modules."""

    __slots__ = ()


class NameRule(PatternRule):
    """Matches tensors that were given a name."""

    __slots__ = ()


class AnyRule(Rule):
    """Matches whatever is left."""

    __slots__ = ()


class FunctionRule(Rule):
    """Asks a function of the user's, which has an answer for every op."""

    __slots__ = ("function",)

    def __init__(self, function: PolicyFunction) -> None:
        super().__init__("policy function", CheckpointPolicy.PREFER_RECOMPUTE)
        self.function = function

    def _content(self) -> tuple[Any, ...]:
        return (*super()._content(), self.function)


class Policy:
    """Rules in the order in which they are asked. Made by the functions of ``recollect.policy``."""

    __slots__ = ("_hash", "_rules", "has_functions", "options", "rulebook")

    def __init__(self, *rules: Rule) -> None:
        self._rules = rules
        self._hash: int | None = None
        #: What whoever applies the policy remembers of it.
        self.rulebook: Any = None
        #: Whether a function of the user's is asked, which may hold anything, and change.
        self.has_functions = any(isinstance(rule, FunctionRule) for rule in rules)
        #: What whoever is given it as an option remembers, by engine.
        self.options: dict[str | None, Any] = {}

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in order."""
        return self._rules

    def __or__(self, other: Any) -> Policy:
        """This policy, and ``other`` for what it has no answer to."""
        return Policy(*self.rules, *as_policy(other, "the right side of |").rules)

    def __ror__(self, other: Any) -> Policy:
        return as_policy(other, "the left side of |") | self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.rules == other.rules

    def __hash__(self) -> int:
        if self._hash is None or self.has_functions:
            self._hash = hash(self.rules)  # which takes a while, and regions are known by it
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
            check_ops(value, "policy" if packets else "`op_list`")
            raise
    is_op = isinstance(value, (OpOverload, OpOverloadPacket))
    if getattr(value, "__module__", None) == _MAKERS:
        raise TypeError(
            f"{name} is the function policy.{value.__name__}, which makes a policy: call it, "
            f"{name}=policy.{value.__name__}(...)"
        )
    if callable(value) and not isinstance(value, type) and not is_op:
        return Policy(FunctionRule(value))
    raise TypeError(
        f"{name} must be either a function or a list of ops, or made by recollect.policy, such as "
        f"policy.save_ops(torch.ops.aten.mm). Got {value!r} of type {type(value).__name__} as the "
        "policy"
    )


#: Where the functions are that make policies.
_MAKERS = "recollect.policy.makers"


@lru_cache(maxsize=64)  # a list is given anew at every call of a region
def _of_ops(ops: tuple[Any, ...], packets: bool) -> Policy:
    expanded = expand_packets(ops) if packets else list(ops)
    check_ops(expanded, "policy" if packets else "`op_list`")
    title = written("save_ops", ops)
    return Policy(OpRule(title, CheckpointPolicy.MUST_SAVE, expanded, frozenset()))


def written(name: str, values: Iterable[Any]) -> str:
    """A call of the function ``name``, as the user wrote it."""
    shown = [repr(value) if isinstance(value, str) else str(value) for value in values]
    return f"{name}({', '.join(shown)})"
