"""The options of a checkpointed call: checked once, then passed along as one value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from recollect.checks.determinism import Describe, resolve_check
from recollect.engines.rerun import Contexts
from recollect.selective import selective_contexts

__all__ = ["DEFAULTS", "Options", "noop_context_fn"]

ENGINES = ("rerun", "reentrant")


def noop_context_fn() -> Contexts:
    """The default of ``context_fn``: nothing around forward, nothing around the recomputation."""
    return nullcontext(), nullcontext()


@dataclass(frozen=True)
class Options:
    """How to run a region. Creating one checks every value and names the one that is wrong."""

    use_reentrant: bool = False
    context_fn: Callable[[], Contexts] = noop_context_fn
    determinism_check: str | Describe = "default"
    debug: bool = False
    early_stop: bool = True
    preserve_rng_state: bool = True
    policy: Any = None
    engine: str | None = None

    #: Derived: what the engines ask for on every call.
    reentrant: bool = field(init=False, repr=False)
    describe: Describe | None = field(init=False, repr=False, compare=False)
    contexts: Callable[[], Contexts] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("use_reentrant", "debug", "early_stop", "preserve_rng_state"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} should be True or False, but got {value!r}")
        if not callable(self.context_fn):
            raise TypeError(
                "context_fn should be a function that returns two context managers, but got "
                f"{self.context_fn!r}"
            )
        self._check_engine()
        derive = partial(object.__setattr__, self)  # the class is frozen
        derive("reentrant", self.use_reentrant or self.engine == "reentrant")
        derive("describe", resolve_check(self.determinism_check))
        derive("contexts", None if self.context_fn is noop_context_fn else self.context_fn)
        if self.policy is not None:
            self._check_policy()
        if self.reentrant:
            self._check_reentrant()

    def _check_engine(self) -> None:
        if self.engine is not None and self.engine not in ENGINES:
            raise ValueError(f"engine should be one of {list(ENGINES)}, but got {self.engine!r}")
        if self.use_reentrant and self.engine == "rerun":
            raise ValueError(
                "use_reentrant=True contradicts engine='rerun'; leave out one of the two"
            )

    def _check_policy(self) -> None:
        if self.context_fn is not noop_context_fn:
            raise ValueError(
                "policy and context_fn cannot be combined: policy= is short for context_fn="
                "functools.partial(create_selective_checkpoint_contexts, policy)"
            )
        make = partial(
            selective_contexts, self.policy, allow_mutation=False, packets=True, once=False
        )
        make()  # and drop: a bad policy is refused here, not in the call
        object.__setattr__(self, "contexts", make)

    def _check_reentrant(self) -> None:
        for name in ("context_fn", "policy", "debug", "determinism_check"):
            if getattr(self, name) != getattr(DEFAULTS, name):
                raise ValueError(
                    f"{name} has no effect with the reentrant engine; leave it out, or use the "
                    "default engine (use_reentrant=False)"
                )

    @classmethod
    def from_keywords(cls, keywords: dict[str, Any]) -> Options:
        """Options by name; a name that is none of them is refused."""
        known = [f.name for f in fields(cls) if f.init]
        for name in keywords:
            if name not in known:
                raise TypeError(f"unknown option {name!r}; the options are {', '.join(known)}")
        return cls(**keywords)


DEFAULTS = Options()
