"""A policy during one call of a region: a decision for each op, and for each named tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from recollect._torch.modes import no_function_modes
from recollect.naming import Listener, listening
from recollect.policy.decisions import SelectiveCheckpointContext
from recollect.policy.modules import InsideModules
from recollect.policy.op_info import OpInfo
from recollect.policy.rules import FunctionRule, ModuleRule, NthRule, Policy
from recollect.policy.rulings import OpRuling, Ruling, rulebook_of
from recollect.policy.unmatched_rules import check_names, warn_unmatched

__all__ = ["PolicyCall"]


class PolicyCall:
    """Applies a policy to one call of ``function``. Enter it around the call.

    ``values``: the arguments. ``protects``: as for a `Rulebook`. ``checks``: report rules that
    match nothing at the end of the call.
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
        #: For each rule, how many modules that it matches are being called.
        self.inside = [0] * len(self.rulebook.rules)
        #: The names that tensors were given.
        self.names: list[str] = []
        #: Called with a tensor whose name matches a rule.
        self.keep: Callable[[torch.Tensor, str, Ruling], None] | None = None
        self._checks = checks
        self._context = SelectiveCheckpointContext(is_recompute=False)
        self._counts = [0] * len(self.rulebook.rules)
        self._modules: InsideModules | None = None
        self._outer: Listener | None = None
        #: The names of the ops that were decided about.
        self._ran: set[str] = set()

    def __enter__(self) -> None:
        rulebook = self.rulebook
        if rulebook.modules:
            if self.function is None:
                raise ValueError(
                    f"{rulebook} needs to know the region's modules: pass the policy to "
                    "recollect.checkpoint(policy=) or recollect.checkpointed(policy=)"
                )
            modules = InsideModules(rulebook, self.function, self.values, self.inside)
            modules.__enter__()
            self._modules = modules
        if rulebook.names:
            self._outer, listening.listener = listening.listener, self

    def __exit__(self, *exc: object) -> None:
        if self._modules is not None:
            self._modules.__exit__(*exc)
        if self.rulebook.names:
            listening.listener, self._outer = self._outer, None
        # A graph may hold this object, and an argument may have got a history in the region.
        self.keep = self.function = None
        self.values = ()
        if exc[0] is None and self._checks:
            self.check_rules(self._ran)

    def check_rules(self, ran: Iterable[str], *, warns: bool = True) -> None:
        """Report rules that match nothing. ``ran``: the names of the ops that ran."""
        for rule in self.rulebook.names.values():
            check_names(rule, self.names)
        if warns:
            warn_unmatched(self.rulebook, () if self._modules is None else self._modules.ranks, ran)

    def decide(self, info: OpInfo, out: Any, args: tuple[Any, ...], kwargs: Any) -> Ruling:
        """The ruling about one call of an op, which returned ``out``."""
        self._ran.add(info.name)
        return self.decide_call(self.rulebook.for_op(info.op), out, args, kwargs)

    def decide_call(self, known: OpRuling, out: Any, args: tuple[Any, ...], kwargs: Any) -> Ruling:
        """The same, if what the policy says about the op is known."""
        rulebook = self.rulebook
        for rank, rule in known.rules:
            if type(rule) is FunctionRule:
                context = self._context
                context.op_output = out
                try:
                    value = rule.function(context, known.info.op, *args, **(kwargs or {}))
                finally:
                    # The context outlives the call, and must not hold the result.
                    context.op_output = None
                return rulebook.ruling_of_function(rank, value, known.info)
            if type(rule) is ModuleRule:
                if self.inside[rank]:
                    return rulebook.ruling(rank, rule.decision)
            elif type(rule) is NthRule:
                self._counts[rank] += 1
                if self._counts[rank] % rule.n == 0:
                    return rulebook.ruling(rank, rule.decision)
        return known.ruling

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """``tensor`` was given a name."""
        self.names.append(name)
        for rank, rule in self.rulebook.names.items():
            if rule.covers(name):
                assert self.keep is not None
                with no_function_modes():  # no function of the region
                    self.keep(tensor, name, self.rulebook.ruling(rank, rule.decision))
                return
