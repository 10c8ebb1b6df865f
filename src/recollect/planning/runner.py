"""Running the forward of a model under a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from recollect.checks.place import warn_user
from recollect.engines.replay.direct import Decisions
from recollect.engines.replay.engine import replay_region
from recollect.errors import PlanWarning
from recollect.planning.step import signature_of_batch
from recollect.store.deposit import Deposit
from recollect.torch_private import dynamo_is_watching, run_without_dynamo

__all__ = ["Runner", "run_planned"]


#: For how many shapes of batches it is remembered what to do.
_REMEMBERED = 64


class Planned(Protocol):
    """What is needed of a plan to run by it."""

    @property
    def budget(self) -> int: ...

    @property
    def plain_peak(self) -> int: ...

    @property
    def predicted_peak(self) -> int: ...

    @property
    def signature(self) -> tuple[Any, ...]: ...

    @property
    def decisions(self) -> Decisions: ...

    def for_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """The plan for another batch."""


def run_planned(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    by: Decisions,
    told: set[str],
) -> Any:
    """Call ``function`` with what it makes kept, sent away or dropped as decided.

    ``told``: the reasons for not doing so that the user has been warned of. One warning is enough.
    """
    deposit = Deposit(host=by.store, last_first=True)
    is_done, result = replay_region(function, args, kwargs, by, deposit, False)
    if not is_done:
        reason = str(result)
        if reason not in told:
            told.add(reason)
            warn_user(
                f"the plan is not in effect, and the step may exceed its budget: {reason}",
                PlanWarning,
            )
        return function(*args, **kwargs)
    if by.away:
        deposit.arrive()  # forward is over: what is leaving would only be in the way
    return result


class Runner:
    """What stands in the place of the forward of a model under ``plan``."""

    def __init__(self, plan: Planned) -> None:
        self.plan = plan
        self._known: dict[Any, Decisions | None] = {}
        self._told: set[str] = set()

    def __reduce__(self) -> Any:
        return Runner, (self.plan,)

    def __deepcopy__(self, memo: Any) -> Runner:
        return Runner(self.plan)

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        if dynamo_is_watching():
            return run_without_dynamo(self, function, args, kwargs)
        signature = signature_of_batch(args, kwargs)
        try:
            decisions = self._known[signature]
        except KeyError:
            decisions = self._decide(signature, args, kwargs)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[signature] = decisions
        if decisions is None:
            return function(*args, **kwargs)
        return run_planned(function, args, kwargs, decisions, self._told)

    def _decide(
        self, signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Decisions | None:
        """What to go by for a batch; None if it fits as it is."""
        plan = self.plan
        if signature == plan.signature or _is_smaller(signature, plan.signature):
            return _decisions_of(plan)
        other = plan.for_batch(args, kwargs)
        if other.predicted_peak > plan.budget:
            warn_user(
                f"the plan was made for another batch, and this one needs "
                f"{other.predicted_peak:,} bytes at least, which is more than its budget of "
                f"{plan.budget:,}. Make a plan with the largest batch that there is",
                PlanWarning,
            )
        return _decisions_of(other)


def _decisions_of(plan: Planned) -> Decisions | None:
    return None if plan.plain_peak <= plan.budget else plan.decisions


def _is_smaller(signature: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a batch is like another, and no tensor in it is longer in any direction."""
    if len(signature) != len(other):
        return False
    for mine, theirs in zip(signature, other, strict=True):
        if isinstance(mine, str) or isinstance(theirs, str):
            if mine != theirs:
                return False
            continue
        (shape, dtype), (longest, as_before) = mine, theirs
        if dtype != as_before or len(shape) != len(longest):
            return False
        if any(a > b for a, b in zip(shape, longest, strict=True)):
            return False
    return True
