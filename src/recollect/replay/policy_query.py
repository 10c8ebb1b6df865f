"""Asking the policy, while a region is recorded, what not to run again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from recollect._torch.modes import no_function_modes
from recollect._torch.ops import op_name
from recollect.naming import listening
from recollect.policy.facts import Facts
from recollect.policy.modules import InsideModules
from recollect.policy.rules import Policy
from recollect.policy.rulings import Answer, Asker, Ruling, rulebook_of
from recollect.policy.unmatched_rules import check_names, warn_of_unheard
from recollect.replay.tape import Op

__all__ = ["Consultation"]


class Consultation:
    """A policy's answers for one call of ``function``. Enter it around the call.

    ``is_whole``: around all of it, so that a rule which matches nothing can be told.
    """

    def __init__(
        self,
        policy: Policy,
        function: Callable[..., Any],
        values: tuple[Any, ...],
        *,
        is_whole: bool = True,
    ) -> None:
        self._is_whole = is_whole
        self._rulebook = rulebook_of(policy)
        self._asker = Asker(self._rulebook)
        self._function = function
        self._values = values
        self._stack = ExitStack()
        self._modules: InsideModules | None = None
        self._names: list[str] = []
        self._ops: set[str] = set()
        #: What keeps a tensor that has been given a name for which it is kept.
        self.keep: Callable[[torch.Tensor, str, Ruling], None] | None = None

    def __enter__(self) -> None:
        with ExitStack() as stack:
            if self._rulebook.modules:
                self._modules = InsideModules(
                    self._rulebook, self._function, self._values, self._asker.inside
                )
                stack.enter_context(self._modules)
            if self._rulebook.names:
                stack.callback(setattr, listening, "listener", listening.listener)
                listening.listener = self
            self._stack = stack.pop_all()

    def __exit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on
        self._stack.__exit__(*exc)
        # The graph holds the hook by which it was recorded, and that leads here: an argument may
        # have got a history in the region.
        self.keep = None
        self._values = ()
        if exc[0] is None and self._is_whole:
            for rule in self._rulebook.names.values():
                check_names(rule, self._names)
            inside = frozenset() if self._modules is None else frozenset(self._modules.ranks)
            warn_of_unheard(self._rulebook, inside, self._ops)

    def decide(self, op: Op, facts: Facts, out: Any, args: tuple[Any, ...], kwargs: Any) -> Ruling:
        """What is to become of the result of an op."""
        self._ops.add(op_name(facts.op))
        answer: Answer = self._rulebook.answer_to(facts, protects=True)
        if not answer.questions:
            return answer.ruling
        return self._asker.decide(answer, facts, out, args, kwargs)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """``tensor`` is called ``name``."""
        self._names.append(name)
        for rank, rule in self._rulebook.names.items():
            if rule.covers(name):
                assert self.keep is not None
                with no_function_modes():  # it is none of the region's
                    self.keep(tensor, name, self._rulebook.ruling(rank, rule.decision))
                return
