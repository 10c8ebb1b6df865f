"""A policy applied: what it says about each op, found once for each policy and op."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from recollect.policy.decisions import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    as_decision,
)
from recollect.policy.facts import Facts
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

__all__ = ["Answer", "Asker", "Rulebook", "Ruling", "rulebook_of"]

_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


class Ruling:
    """What becomes of a result, why, and by which of the policy's rules."""

    __slots__ = ("decision", "keeps", "offloads", "rank", "reason")

    def __init__(self, decision: CheckpointPolicy, reason: str, rank: int) -> None:
        self.decision = decision
        self.offloads = decision in _OFFLOADS
        self.keeps = self.offloads or decision in _SAVES
        self.reason = reason
        self.rank = rank


#: The rank of what no rule has decided.
_NO_RULE = 1 << 30
DEFAULT = Ruling(CheckpointPolicy.PREFER_RECOMPUTE, "no rule matches", _NO_RULE)


class Answer:
    """What a policy says about one op: at once, or depending on the call."""

    __slots__ = ("protects", "questions", "ruling")

    def __init__(self, ruling: Ruling, questions: list[tuple[int, Rule]], protects: bool) -> None:
        #: If no question comes before it.
        self.ruling = ruling
        #: The rules, with their ranks, that have to be asked at every call.
        self.questions = questions
        #: Whether what is not to be repeated is kept.
        self.protects = protects


class Rulebook:
    """The rules of one policy, with what they have said so far."""

    __slots__ = (
        "_answers",
        "_rulings",
        "_said",
        "matched",
        "modules",
        "names",
        "ops",
        "rules",
        "unheard",
    )

    def __init__(self, policy: Policy) -> None:
        self.rules = policy.rules
        self.modules = {n: r for n, r in enumerate(self.rules) if isinstance(r, ModuleRule)}
        self.names = {n: r for n, r in enumerate(self.rules) if isinstance(r, NameRule)}
        #: Ranks of the rules about ops and modules that have matched nothing yet.
        self.unheard = {
            rank
            for rank, rule in enumerate(self.rules)
            if isinstance(rule, ModuleRule) or (isinstance(rule, OpRule) and not rule.is_empty)
        }
        #: By a region's module, the modules in it that rules match.
        self.matched: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        #: What modes know of ops, by id; with and without protection of what is not to be repeated.
        self.ops: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        #: By id of the op; with and without protection of what is not to be repeated.
        self._answers: tuple[dict[int, Answer], dict[int, Answer]] = ({}, {})
        self._rulings: dict[tuple[int, int], Ruling] = {}
        self._said: dict[tuple[int, int], Ruling] = {}

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))

    def answer_to(self, facts: Facts, *, protects: bool) -> Answer:
        """What the policy says about an op. ``protects``: keep what is not to be repeated."""
        answers = self._answers[protects]
        answer = answers.get(id(facts))
        if answer is None:
            answer = answers[id(facts)] = self._answer_to(facts, protects)
        return answer

    def _answer_to(self, facts: Facts, protects: bool) -> Answer:
        questions: list[tuple[int, Rule]] = []
        ruling = None
        for rank, rule in enumerate(self.rules):
            if isinstance(rule, OpRule):
                if not rule.covers(facts.op):
                    continue
                self.unheard.discard(rank)
            if ruling is not None:
                continue  # to see which other rules match
            if isinstance(rule, (NthRule, ModuleRule, FunctionRule)):
                questions.append((rank, rule))
            elif isinstance(rule, (OpRule, AnyRule)):
                ruling = self.ruling(rank, rule.decision)
        ruling = ruling or DEFAULT
        return Answer(self.protected(ruling, facts) if protects else ruling, questions, protects)

    def ruling(self, rank: int, decision: CheckpointPolicy) -> Ruling:
        """That the rule of this rank has decided so."""
        key = (rank, id(decision))  # enum members live for good, and hash slowly
        ruling = self._rulings.get(key)
        if ruling is None:
            ruling = self._rulings[key] = Ruling(decision, self.rules[rank].title, rank)
            self.unheard.discard(rank)
        return ruling

    def said(self, rank: int, value: Any, facts: Facts, protects: bool) -> Ruling:
        """What a policy function's answer amounts to."""
        # By id: the values that are allowed live for good.
        ruling = self._said.get((rank, id(value)))
        if ruling is None:
            ruling = self.ruling(rank, as_decision(value, facts.op))
            self._said[rank, id(value)] = ruling
        if protects and facts.not_to_be_repeated is not None:
            return self.protected(ruling, facts)
        return ruling

    @staticmethod
    def protected(ruling: Ruling, facts: Facts) -> Ruling:
        """``ruling``, or to keep what is not to be repeated if it does not insist."""
        reason = facts.not_to_be_repeated
        if reason is None or ruling.decision is not CheckpointPolicy.PREFER_RECOMPUTE:
            return ruling
        return Ruling(CheckpointPolicy.PREFER_SAVE, reason, ruling.rank)


class Asker:
    """The questions of one call of a region: counts start anew, and modules are entered."""

    __slots__ = ("_context", "_counts", "_rulebook", "inside")

    def __init__(self, rulebook: Rulebook) -> None:
        self._rulebook = rulebook
        self._context = SelectiveCheckpointContext(is_recompute=False)
        self._counts = [0] * len(rulebook.rules)
        #: For each rule, how many modules that it matches are being called.
        self.inside = [0] * len(rulebook.rules)

    def decide(
        self, answer: Answer, facts: Facts, out: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Ruling:
        """Put the questions about one call of an op, which returned ``out``."""
        rulebook = self._rulebook
        for rank, rule in answer.questions:
            if type(rule) is FunctionRule:
                context = self._context
                context.op_output = out
                try:
                    said = rule.function(context, facts.op, *args, **(kwargs or {}))
                finally:
                    # The context outlives the call; the result must not be held by it.
                    context.op_output = None
                return rulebook.said(rank, said, facts, answer.protects)
            if type(rule) is ModuleRule:
                if self.inside[rank]:
                    return rulebook.ruling(rank, rule.decision)
            elif type(rule) is NthRule:
                self._counts[rank] += 1
                if self._counts[rank] % rule.n == 0:
                    return rulebook.ruling(rank, rule.decision)
        return answer.ruling


def rulebook_of(policy: Policy) -> Rulebook:
    """The rulebook of ``policy``, which holds it."""
    rulebook: Rulebook | None = policy.rulebook
    if rulebook is None:
        rulebook = policy.rulebook = Rulebook(policy)
    return rulebook
