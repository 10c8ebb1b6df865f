"""Policies and their rules. Pure: nothing here runs an op or holds a tensor."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache, reduce
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy as TorchCheckpointPolicy

from recollect._torch.ops import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    op_name,
    packet_of,
)

# --- decisions ------------------------------------------------------------------------------------


class CheckpointPolicy(enum.Enum):
    """What selective checkpointing does with the result of an op.

    ``SAVE`` keeps it from forward to backward, ``RECOMPUTE`` frees it and runs the op again,
    ``CPU_OFFLOAD`` keeps it in host memory. The compiler and our defaults may overrule ``PREFER_``,
    but not ``MUST_``.
    """

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_CPU_OFFLOAD = 4
    PREFER_CPU_OFFLOAD = 5


class SelectiveCheckpointContext:
    """Passed to a policy function with each op, and valid during that call.

    ``op_output`` is the op's result. Policies decide in forward only, so ``is_recompute`` is always
    False; it exists for older policies that read it.
    """

    def __init__(self, *, is_recompute: bool, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output

    def __repr__(self) -> str:
        return f"SelectiveCheckpointContext(is_recompute={self.is_recompute})"


def as_decision(value: Any, op: Any) -> CheckpointPolicy:
    """The return value of a policy function as a decision; raises if it is none."""
    if type(value) is CheckpointPolicy:
        return value
    if value is True or value is False:
        return CheckpointPolicy.MUST_SAVE if value else CheckpointPolicy.PREFER_RECOMPUTE
    # torch's own enum of the same name.
    if type(value) is TorchCheckpointPolicy:
        return CheckpointPolicy[value.name]
    # Not a TypeError: ``x @ w`` would turn it into "unsupported operand type(s)".
    raise ValueError(
        f"the policy function returned {value!r} for {op}; return a CheckpointPolicy, such as "
        "CheckpointPolicy.MUST_SAVE or CheckpointPolicy.PREFER_RECOMPUTE"
    )


# --- rules ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """Decides about the results that it matches; this class matches all.

    ``title`` is how the user wrote it.
    """

    title: str
    decision: CheckpointPolicy

    def __repr__(self) -> str:
        return self.title


@dataclass(frozen=True, slots=True, repr=False)
class OpRule(Rule):
    """Matches ops, given as objects or names; only every ``n``-th call in a run of a region."""

    ops: frozenset[Any] = frozenset()
    names: frozenset[str] = frozenset()
    n: int = 1

    def covers(self, op: Any) -> bool:
        return op in self.ops or op_name(op) in self.names

    def __reduce__(self) -> Any:
        # Ops cannot be pickled, but have names.
        paths = [
            f"higher_order.{op_name(op)}" if isinstance(op, HigherOrderOperator) else str(op)
            for op in self.ops
        ]
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return _unpickle, (values | {"ops": sorted(paths)},)


def _unpickle(values: dict[str, Any]) -> OpRule:
    found = [reduce(getattr, path.split("."), torch.ops) for path in values["ops"]]
    return OpRule(**values | {"ops": frozenset(found)})


@dataclass(frozen=True, slots=True, repr=False)
class PatternRule(Rule):
    """Matches by patterns of names."""

    patterns: tuple[str, ...]

    def covers(self, name: str) -> bool:
        return _fits_any(name, self.patterns)


class ModuleRule(PatternRule):
    """Matches all ops inside some modules."""

    __slots__ = ()


class NameRule(PatternRule):
    """Matches tensors that were given a name."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, repr=False)
class FunctionRule(Rule):
    """Asks the user's function, which decides about every op."""

    function: Callable[..., Any]


class Policy:
    """Rules; the first that matches decides. Made by the functions of ``recollect.policy``."""

    __slots__ = ("_hash", "_rules", "has_functions", "options", "rulebooks")

    def __init__(self, *rules: Rule) -> None:
        self._rules = rules
        self._hash: int | None = None
        #: A cache: the rules resolved per op. See `rulebook_of`.
        self.rulebooks: dict[bool, Any] = {}
        #: Whether it has a user's function, which may hold anything, and change.
        self.has_functions = any(isinstance(rule, FunctionRule) for rule in rules)
        #: A cache: the options of a region that has only this policy, by engine.
        self.options: dict[str | None, Any] = {}

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self._rules

    def __or__(self, other: Any) -> Policy:
        """This policy, then ``other`` for results that no rule of it matches."""
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


# --- what users write -----------------------------------------------------------------------------


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
    if getattr(value, "__module__", None) == __package__:
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


@lru_cache(maxsize=64)  # the same list is given in every call of a region
def _of_ops(ops: tuple[Any, ...], packets: bool) -> Policy:
    found = checked_ops(ops, "policy" if packets else "`op_list`", packets=packets)
    title = written("save_ops", ops)
    return Policy(OpRule(title, CheckpointPolicy.MUST_SAVE, frozenset(found)))


def checked_ops(ops: Iterable[Any], name: str, *, packets: bool = True) -> list[Any]:
    """``ops`` with every packet (``torch.ops.aten.mm``) replaced by all its overloads.

    Anything but an op raises, and so does a packet unless ``packets``. ``name``: the argument in
    errors.
    """
    checked: list[Any] = []
    for op in ops:
        if isinstance(op, (OpOverload, HigherOrderOperator)):
            checked.append(op)
        elif packets and isinstance(op, OpOverloadPacket):
            checked += [getattr(op, overload) for overload in op.overloads()]
        else:
            raise ValueError(
                f"Expected op in {name} to be an OpOverload but got: {op} of type {type(op)}."
                f"{_hint(op)}"
            )
    return checked


def _hint(op: Any) -> str:
    if isinstance(op, str):
        name = op.replace("::", ".").removeprefix("torch.ops.")
        path = name if "." in name else f"aten.{name}"
        return f" The name of an op is not an op: use torch.ops.{path} instead."
    if isinstance(op, OpOverloadPacket):
        return (
            " Please update the OpOverloadPacket to a specific OpOverload: "
            f"torch.ops.{op}.default rather than torch.ops.{op}."
        )
    packet = packet_of(op)
    return f" A torch function is not an op: use torch.ops.{packet} instead." if packet else ""


def written(name: str, values: Iterable[Any]) -> str:
    """A call of the function ``name``, as the user wrote it."""
    shown = [repr(value) if isinstance(value, str) else str(value) for value in values]
    return f"{name}({', '.join(shown)})"


# --- patterns of names ----------------------------------------------------------------------------


def fits(name: str, pattern: str) -> bool:
    """Whether ``pattern`` matches ``name``, or its end after a dot.

    So ``attn.wo`` and ``*.attn.wo`` find the projection in a block as well as in a model of blocks.
    """
    if fnmatchcase(f".{name}", pattern):
        return True
    while True:
        if fnmatchcase(name, pattern):
            return True
        _, dot, name = name.partition(".")
        if not dot:
            return False


@lru_cache(maxsize=1024)
def _fits_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fits(name, pattern) for pattern in patterns)


@lru_cache(maxsize=1024)
def first_unmatched(patterns: tuple[str, ...], names: tuple[str, ...]) -> str | None:
    """The first of ``patterns`` that matched none of ``names``."""
    return next((p for p in patterns if not any(fits(name, p) for name in names)), None)


#: How many names an error shows.
_SHOWN = 40


def listed(names: Iterable[str], sought: str) -> str:
    """``names`` for an error about ``sought``, the most similar first."""
    known = sorted({name for name in names if name})
    if not known:
        return "none"
    similar = get_close_matches(sought.strip("*."), known, n=5, cutoff=0.5)
    ordered = [*similar, *(name for name in known if name not in similar)]
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
