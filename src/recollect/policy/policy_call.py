"""A policy during a call of a region: a decision for each op, and for each named tensor.

The rules are matched with each op once per policy (`Rulebook`); what depends on the call is decided
in the call (`PolicyCall`).
Modules that rules match have a pair of hooks during the call, which tell whether they are being
called. A rule that matched nothing is reported at the end (`check_rules`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from recollect._torch.dtensors import is_redistributing
from recollect._torch.modes import no_function_modes
from recollect._torch.modules import compiled_in, hook_module, unhook_module
from recollect.checks.names import model_of, plain_name
from recollect.checks.place import warn_user
from recollect.naming import Listener, listening
from recollect.policy.op_info import COLLECTIVE, OpInfo, op_info
from recollect.policy.rules import (
    CheckpointPolicy,
    FunctionRule,
    ModuleRule,
    NameRule,
    OpRule,
    Policy,
    Rule,
    SelectiveCheckpointContext,
    as_decision,
    first_unmatched,
    fits,
    listed,
)
from recollect.state.module_index import index_of
from recollect.state.reachable import Reachable

#: Modules, with the ranks of the rules that match each.
_Matched = list[tuple[nn.Module, tuple[int, ...]]]
_Named = list[tuple[str, nn.Module]]

_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


class Ruling:
    """A decision about the result of one call, with its reason and the rank of the rule."""

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

    def __init__(self, info: OpInfo, ruling: Ruling, rules: list[tuple[int, Rule]]) -> None:
        self.info = info
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


class PolicyCall:
    """Applies a policy to one call of ``function``. Enter it around the call.

    ``values``: the arguments. ``protects``: as for a `Rulebook`. ``checks``: report rules that
    matched nothing at the end of the call.
    """

    def __init__(
        self,
        policy: Policy,
        function: Callable[..., Any] | None = None,
        values: tuple[Any, ...] = (),
        *,
        protects: bool = True,
        checks: bool = True,
    ) -> None:
        self.rulebook = rulebook_of(policy, protects=protects)
        self.function = function
        self.values = values
        #: For each rule, how many of its modules are being called.
        self.inside = [0] * len(self.rulebook.rules)
        #: The names that tensors were given.
        self.names: list[str] = []
        #: Called with a tensor whose name matches a rule.
        self.keep: Callable[[torch.Tensor, str, Ruling], None] | None = None
        self._checks = checks
        self._context = SelectiveCheckpointContext(is_recompute=False)
        self._counts = [0] * len(self.rulebook.rules)
        self._matched: _Matched = []
        self._outer: Listener | None = None
        #: The names of the ops that were decided about.
        self._ran: set[str] = set()

    def __enter__(self) -> None:
        if self.rulebook.modules:
            self._hook_modules()
        if self.rulebook.names:
            self._outer, listening.listener = listening.listener, self._name

    def __exit__(self, *exc: object) -> None:
        for module, _ in self._matched:
            unhook_module(module, -id(self))
        if self.rulebook.names:
            listening.listener, self._outer = self._outer, None
        # A graph may hold this object, and an argument may have got a graph in the region.
        self.keep = self.function = None
        self.values = ()
        if exc[0] is None and self._checks:
            self.check_rules(self._ran)

    def _hook_modules(self) -> None:
        if self.function is None:
            raise ValueError(
                f"{Policy(*self.rulebook.rules)} needs to know the region's modules: pass the "
                "policy to recollect.checkpoint(policy=) or recollect.checkpointed(policy=)"
            )
        matched = _matched_modules(self.rulebook, _roots(self.function, self.values))
        # The region's own module has been entered already if its forward is the region.
        owner = getattr(self.function, "__self__", None)
        for module, ranks in matched:
            thread = threading.get_ident()
            enter, leave = (partial(_count, ranks, self.inside, step, thread) for step in (1, -1))
            if module is owner:
                enter()
            hook_module(module, -id(self), enter, leave)
        self._matched = matched

    # --- decisions --------------------------------------------------------------------------------

    def decide(
        self, info: OpInfo, out: Any, args: tuple[Any, ...], kwargs: Any, op: Any = None
    ) -> Ruling:
        """The ruling about a call of an op that returned ``out``. ``op``: as it was recorded."""
        self._ran.add(info.name)
        return self.decide_call(self.rulebook.for_op(info.op), out, args, kwargs)

    def decide_call(self, known: OpRuling, out: Any, args: tuple[Any, ...], kwargs: Any) -> Ruling:
        rulebook = self.rulebook
        for rank, rule in known.rules:
            if type(rule) is FunctionRule:
                context = self._context
                context.op_output = out
                try:
                    value = rule.function(context, known.info.op, *args, **(kwargs or {}))
                except TypeError as error:
                    _check_parameters(rule.function, error)
                    raise
                finally:
                    # The context outlives the call, and must not hold the result.
                    context.op_output = None
                return _unless_redistributing(rulebook.ruling_of_function(rank, value, known.info))
            if type(rule) is ModuleRule:
                if self.inside[rank]:
                    rulebook.unmatched.discard(rank)
                    return rulebook.rulings[rank]
            elif type(rule) is OpRule:  # of every n-th call
                self._counts[rank] += 1
                if self._counts[rank] % rule.n == 0:
                    return rulebook.rulings[rank]
        return _unless_redistributing(known.ruling)

    def _name(self, tensor: torch.Tensor, name: str) -> None:
        self.names.append(name)
        for rank, rule in self.rulebook.names.items():
            if rule.covers(name):
                assert self.keep is not None
                with no_function_modes():  # not a function of the region
                    self.keep(tensor, name, self.rulebook.rulings[rank])
                return

    # --- rules that match nothing -----------------------------------------------------------------

    def check_rules(self, ran: Iterable[str], *, warns: bool = True) -> None:
        """Report rules that matched nothing. ``ran``: the names of the ops that ran."""
        for rule in self.rulebook.names.values():
            pattern = first_unmatched(rule.patterns, tuple(self.names))
            if pattern is not None:
                raise ValueError(
                    f"{rule.title}: no tensor of the region was given a name like {pattern!r} by "
                    f"recollect.tag(tensor, name). The names are: {listed(self.names, pattern)}"
                )
        rulebook = self.rulebook
        # A rule about modules may match those of another region.
        inside = {rank for _, ranks in self._matched for rank in ranks}
        unmatched = {n for n in rulebook.unmatched if n in inside or n not in rulebook.modules}
        if warns and unmatched:
            rulebook.unmatched -= unmatched  # once is enough
            titles = [rulebook.rules[rank].title for rank in sorted(unmatched)]
            warn_user(
                f"the policy's {' and '.join(titles)} matched nothing in the region. The ops that "
                f"ran are: {listed((name.replace('::', '.') for name in ran), '')}"
            )


def _count(ranks: tuple[int, ...], counts: list[int], step: int, thread: int, *_: Any) -> None:
    """A hook that counts calls of a module. In a copy of the module it has counts of its own."""
    if threading.get_ident() == thread:
        for rank in ranks:
            counts[rank] += step


# --- the modules that rules match -----------------------------------------------------------------


def _roots(function: Callable[..., Any], values: tuple[Any, ...]) -> list[nn.Module]:
    """The modules that a region may call: its own, or those that it reaches or is passed."""
    owner = getattr(function, "__self__", function)
    found = [owner] if isinstance(owner, nn.Module) else Reachable(function).modules
    return found + [value for value in values if isinstance(value, nn.Module)]


def _matched_modules(rulebook: Rulebook, roots: list[nn.Module]) -> _Matched:
    """The modules of a region that rules match. A pattern must match one, here or in the model."""
    # There is a new index whenever the modules change.
    index = index_of(roots[0]) if len(roots) == 1 else None
    if index is not None and index in rulebook.matched:
        return [(module(), ranks) for module, ranks in rulebook.matched[index]]
    inside = [pair for root in roots for pair in _visible(root)]
    ranks: dict[int, set[int]] = {}
    for rank, rule in rulebook.modules.items():
        for pattern in rule.patterns:
            for module in _find(pattern, rule.title, inside, roots):
                ranks.setdefault(id(module), set()).add(rank)
    modules = {id(module): module for _, module in inside if id(module) in ranks}
    matched = [(module, (*sorted(ranks[key]),)) for key, module in modules.items()]
    if index is not None:
        # Weakly: the policy may outlive the model. The index holds all modules but the root.
        rulebook.matched[index] = [(ref(module), own) for module, own in matched]
    return matched


def _find(pattern: str, title: str, inside: _Named, roots: list[nn.Module]) -> list[nn.Module]:
    """The modules of a region that ``pattern`` matches, there or in the whole model.

    Raises if it matches none. The model is found by a search through memory.
    """
    found = [module for name, module in inside if fits(name, pattern)]
    if found:
        return found
    models = {id(model): model for model in map(model_of, roots)}
    outside = [pair for model in models.values() for pair in _visible(model)]
    found = [module for name, module in outside if fits(name, pattern)]
    if not found:
        raise ValueError(
            f"{title}: {pattern!r} matches no module (those in compiled code cannot be seen). "
            f"There are: {listed([name for name, _ in inside + outside], pattern)}"
        )
    own = {id(module) for _, module in inside}
    return [module for module in found if id(module) in own]


def _visible(root: nn.Module) -> _Named:
    """Modules by name, except those in compiled code, whose ops cannot be seen."""
    hidden = {id(each) for module in root.modules() for each in compiled_in(module)}
    pairs = root.named_modules(remove_duplicate=False)
    return [(plain_name(name), module) for name, module in pairs if id(module) not in hidden]


def _unless_redistributing(ruling: Ruling) -> Ruling:
    """``ruling``, unless it keeps by default what a ``DTensor`` communicates.

    That is part of an op on the whole tensor. With sequence parallelism these results are most of
    the activations.
    """
    is_kept = ruling.reason == COLLECTIVE and ruling.decision is CheckpointPolicy.PREFER_SAVE
    return DEFAULT if is_kept and is_redistributing(sys._getframe(1)) else ruling


def _check_parameters(function: Callable[..., Any], error: TypeError) -> None:
    """Say how a policy function is called, if it has raised ``error`` for its parameters."""
    raised_by = error.__traceback__ and error.__traceback__.tb_next
    if raised_by is None:  # by the call itself, and not in the function
        raise TypeError(
            f"the policy function {getattr(function, '__name__', function)} cannot be called as "
            f"policy(ctx, op, *args, **kwargs): {error}. Give it these parameters, such as "
            "lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default"
        ) from error
