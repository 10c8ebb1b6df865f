"""Policies resolved per op: what the rules say about each op is found once for a policy."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from recollect.policy.decisions import CheckpointPolicy, as_decision
from recollect.policy.op_info import OpInfo, op_info
from recollect.policy.rules import (
    AnyRule,
    FunctionRule,
    ModuleRule,
    NameRule,
    NthRule,
    OpRule,
    Policy,
    Rule,
)

__all__ = ["OpRuling", "Rulebook", "Ruling", "rulebook_of"]

_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


class Ruling:
    """A decision about the result of one call, with its reason and the rank of the rule."""

    __slots__ = ("decision", "keeps", "offloads", "rank", "reason")

    def __init__(self, decision: CheckpointPolicy, reason: str, rank: int) -> None:
        self.decision = decision
        self.offloads = decision in _OFFLOADS
        self.keeps = self.offloads or decision in _SAVES
        self.reason = reason
        self.rank = rank


#: The rank of decisions that no rule has made.
_NO_RULE = 1 << 30
_DEFAULT = Ruling(CheckpointPolicy.PREFER_RECOMPUTE, "no rule matches", _NO_RULE)


class OpRuling:
    """What a policy says about one op, and what of it depends on the call."""

    __slots__ = ("call", "info", "is_kept", "is_per_call", "is_plain", "is_view", "rules", "ruling")

    def __init__(self, info: OpInfo, ruling: Ruling, rules: list[tuple[int, Rule]]) -> None:
        self.info = info
        self.call = info.call
        self.is_plain = info.is_plain
        self.is_view = info.is_view
        #: Holds unless one of ``rules`` decides, which are to be tried at every call.
        self.ruling = ruling
        #: With their ranks.
        self.rules = rules
        #: Whether the decision depends on the call; otherwise, whether results are kept.
        self.is_per_call = bool(rules) and info.can_be_kept
        self.is_kept = ruling.keeps and info.can_be_kept


class Rulebook:
    """The rules of one policy, and what they say about the ops met so far.

    ``protects``: results that are `OpInfo.kept_by_default` are kept unless a rule insists.
    """

    def __init__(self, policy: Policy, *, protects: bool) -> None:
        self.rules = policy.rules
        self.modules = {n: r for n, r in enumerate(self.rules) if isinstance(r, ModuleRule)}
        self.names = {n: r for n, r in enumerate(self.rules) if isinstance(r, NameRule)}
        #: Ranks of the rules about ops and modules that have matched nothing yet.
        self.unmatched = {
            rank
            for rank, rule in enumerate(self.rules)
            if isinstance(rule, ModuleRule) or (isinstance(rule, OpRule) and not rule.is_empty)
        }
        #: By a region's module, the modules in it that rules match.
        self.matched: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        #: By id of the op: ops hash slowly.
        self.known: dict[int, OpRuling] = {}
        self._protects = protects
        #: By rank of a rule, and id of a decision or of what a policy function returned.
        self._rulings: dict[tuple[int, int], Ruling] = {}
        self._returned: dict[tuple[int, int], Ruling] = {}

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))

    def for_op(self, op: Any) -> OpRuling:
        """What the policy says about ``op``."""
        found = self.known.get(id(op))
        if found is None:
            found = self.known[id(op)] = self._resolve(op_info(op))
        return found

    def _resolve(self, info: OpInfo) -> OpRuling:
        per_call: list[tuple[int, Rule]] = []
        ruling = None
        for rank, rule in enumerate(self.rules):
            if isinstance(rule, OpRule):
                if not rule.covers(info.op):
                    continue
                self.unmatched.discard(rank)
            if ruling is not None:
                continue  # only to see which other rules match
            if isinstance(rule, (NthRule, ModuleRule, FunctionRule)):
                per_call.append((rank, rule))
            elif isinstance(rule, (OpRule, AnyRule)):
                ruling = self.ruling(rank, rule.decision)
        return OpRuling(info, self._protected(ruling or _DEFAULT, info), per_call)

    def ruling(self, rank: int, decision: CheckpointPolicy) -> Ruling:
        """The ruling by the rule of this rank."""
        key = (rank, id(decision))  # members of an enum hash slowly
        ruling = self._rulings.get(key)
        if ruling is None:
            ruling = self._rulings[key] = Ruling(decision, self.rules[rank].title, rank)
            self.unmatched.discard(rank)
        return ruling

    def ruling_of_function(self, rank: int, value: Any, info: OpInfo) -> Ruling:
        """The ruling by a policy function that returned ``value``."""
        # By id: the values that are allowed are never freed.
        ruling = self._returned.get((rank, id(value)))
        if ruling is None:
            ruling = self.ruling(rank, as_decision(value, info.op))
            self._returned[rank, id(value)] = ruling
        return self._protected(ruling, info)

    def _protected(self, ruling: Ruling, info: OpInfo) -> Ruling:
        """``ruling``, or to keep what is kept by default if it does not insist."""
        reason = info.kept_by_default
        if reason is None or not self._protects:
            return ruling
        if ruling.decision is not CheckpointPolicy.PREFER_RECOMPUTE:
            return ruling
        return Ruling(CheckpointPolicy.PREFER_SAVE, reason, ruling.rank)


def rulebook_of(policy: Policy, *, protects: bool = True) -> Rulebook:
    """The rulebook of ``policy``, which holds it."""
    rulebook: Rulebook | None = policy.rulebooks.get(protects)
    if rulebook is None:
        rulebook = policy.rulebooks[protects] = Rulebook(policy, protects=protects)
    return rulebook
