"""Policies resolved per op: the rules are matched with each op once per policy."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from recollect.policy.op_info import OpInfo, op_info
from recollect.policy.rules import (
    CheckpointPolicy,
    FunctionRule,
    ModuleRule,
    NameRule,
    OpRule,
    Policy,
    Rule,
    as_decision,
)

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


#: Where no rule decides: ranked behind all rules.
DEFAULT = Ruling(CheckpointPolicy.PREFER_RECOMPUTE, "no rule matches", 1 << 30)


class OpRuling:
    """What a policy says about one op, and the rules that depend on the call."""

    __slots__ = ("call", "info", "is_plain", "may_be_kept", "rules", "ruling")

    def __init__(self, info: OpInfo, ruling: Ruling, rules: list[tuple[int, Rule]]) -> None:
        self.info = info
        self.call = info.call
        self.is_plain = info.is_plain
        #: Applies unless one of ``rules`` decides: rank and rule, tried at every call.
        self.ruling = ruling
        self.rules = rules
        self.may_be_kept = info.can_be_kept and (ruling.keeps or bool(rules))


class Rulebook:
    """The rules of one policy, resolved for the ops seen so far.

    A rule's rank is its place in the policy. ``protects``: results that are
    `OpInfo.kept_by_default` are kept unless a rule insists on recomputing them.
    """

    def __init__(self, policy: Policy, *, protects: bool) -> None:
        self.rules = policy.rules
        self.modules = {n: r for n, r in enumerate(self.rules) if isinstance(r, ModuleRule)}
        self.names = {n: r for n, r in enumerate(self.rules) if isinstance(r, NameRule)}
        #: What each rule says about the results that it matches.
        self.rulings = [Ruling(r.decision, r.title, n) for n, r in enumerate(self.rules)]
        #: Ranks of the op and module rules that have matched nothing yet.
        self.unmatched = {
            rank
            for rank, rule in enumerate(self.rules)
            if isinstance(rule, ModuleRule)
            or (isinstance(rule, OpRule) and (rule.ops or rule.names))
        }
        #: By `ModuleIndex` of a region's module, the modules in it that rules match.
        self.matched: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        #: By id of the op: ops hash slowly.
        self.known: dict[int, OpRuling] = {}
        self._protects = protects
        #: By id of a policy function's return value: allowed values are never freed.
        self._returned: dict[int, Ruling] = {}

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))

    def for_op(self, op: Any) -> OpRuling:
        found = self.known.get(id(op))
        if found is None:
            found = self.known[id(op)] = self._resolve(op_info(op))
        return found

    def _resolve(self, info: OpInfo) -> OpRuling:
        per_call: list[tuple[int, Rule]] = []
        ruling = None
        for rank, rule in enumerate(self.rules):
            if isinstance(rule, NameRule):
                continue
            if isinstance(rule, OpRule):
                if not rule.covers(info.op):
                    continue
                self.unmatched.discard(rank)
            if ruling is not None:
                continue  # only to find out which other rules match
            is_nth = isinstance(rule, OpRule) and rule.n > 1
            if is_nth or isinstance(rule, (ModuleRule, FunctionRule)):
                per_call.append((rank, rule))
            else:
                ruling = self.rulings[rank]
        return OpRuling(info, self._protected(ruling or DEFAULT, info), per_call)

    def ruling_of_function(self, rank: int, value: Any, info: OpInfo) -> Ruling:
        """The ruling by a policy function that returned ``value``."""
        ruling = self._returned.get(id(value))
        if ruling is None:
            decision = as_decision(value, info.op)
            ruling = self._returned[id(value)] = Ruling(decision, self.rules[rank].title, rank)
        return self._protected(ruling, info)

    def _protected(self, ruling: Ruling, info: OpInfo) -> Ruling:
        """``ruling``, unless the result is kept by default and the ruling does not insist."""
        reason = info.kept_by_default
        if reason is None or not self._protects:
            return ruling
        if ruling.decision is not CheckpointPolicy.PREFER_RECOMPUTE:
            return ruling
        return Ruling(CheckpointPolicy.PREFER_SAVE, reason, ruling.rank)


def rulebook_of(policy: Policy, *, protects: bool = True) -> Rulebook:
    """The rulebook of ``policy``, which caches it."""
    rulebook: Rulebook | None = policy.rulebooks.get(protects)
    if rulebook is None:
        rulebook = policy.rulebooks[protects] = Rulebook(policy, protects=protects)
    return rulebook
