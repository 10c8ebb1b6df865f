"""The options of a checkpointed call: checked once, then passed along as one value (R1)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any, Literal, TypedDict, get_args

import torch

from recollect.checks.determinism import DeterminismCheck, resolve_check
from recollect.policy.rules import Policy, as_policy
from recollect.rerun.frame import Contexts
from recollect.rerun.selective import create_selective_checkpoint_contexts, selective_contexts
from recollect.settings import checked_switch
from recollect.state.variables import Counters
from recollect.store import check_store

Engine = Literal["rerun", "reentrant", "replay"]


class Keywords(TypedDict, total=False):
    """The options by name, for type checkers."""

    use_reentrant: bool
    context_fn: Callable[[], Contexts]
    determinism_check: DeterminismCheck
    debug: bool
    early_stop: bool
    preserve_rng_state: bool
    policy: Any
    engine: Engine | None
    offload_inputs: bool
    store: Any


def noop_context_fn() -> Contexts:
    """The default of ``context_fn``: nothing around forward, nothing around the recomputation."""
    return nullcontext(), nullcontext()


class Options:
    """How to run a region. Checks every value; errors name the option that is wrong.

    Immutable. A plain class, because a frozen dataclass costs several microseconds per call.
    """

    #: What a rerun does with counters of calls.
    counters: Counters = "counted"

    def __init__(
        self,
        use_reentrant: bool = False,
        context_fn: Callable[[], Contexts] = noop_context_fn,
        determinism_check: DeterminismCheck = "default",
        debug: bool = False,
        early_stop: bool = True,
        preserve_rng_state: bool = True,
        policy: Any = None,
        engine: Engine | None = None,
        offload_inputs: bool = False,
        store: Any = None,
    ) -> None:
        self._given = (
            *(use_reentrant, context_fn, determinism_check, debug, early_stop),
            *(preserve_rng_state, policy, engine, offload_inputs, store),
        )
        is_default = use_reentrant is False and engine is None
        self.reentrant = False if is_default else _is_reentrant(use_reentrant, engine)
        #: Whether to use the replay engine.
        self.replay = engine == "replay"
        self.debug: bool = checked_switch("debug", debug)
        self.early_stop: bool = checked_switch("early_stop", early_stop)
        self.preserve_rng_state: bool = checked_switch("preserve_rng_state", preserve_rng_state)
        #: Describes a saved tensor, to be compared; None compares nothing.
        self.describe = resolve_check(determinism_check)
        #: Make the two contexts of a call, None if there are none: in a form that dynamo takes as a
        #: constant, and with the policy ready for use.
        self.context_fn, self.make_contexts = _checked_contexts(context_fn, policy, store)
        self.offload_inputs: bool = checked_switch("offload_inputs", offload_inputs)
        self.store = store
        if store is not None:
            check_store(store, "store")
            if policy is None and not offload_inputs:
                raise ValueError(
                    "store has no effect without a policy or offload_inputs=True: nothing is kept"
                )
        #: The policy, ready for use.
        self.policy = None if policy is None else as_policy(policy, "policy")
        if self.reentrant or self.replay:
            self._refuse_idle(context_fn is not noop_context_fn, determinism_check)

    def _refuse_idle(self, has_context: bool, determinism_check: Any) -> None:
        """Raise for options that have no effect with the engine."""
        given = {
            "policy": self.reentrant and self.policy is not None,
            "context_fn": has_context,
            "debug": self.debug,
            "determinism_check": determinism_check not in ("default", "none"),
        }
        idle = next((name for name, is_given in given.items() if is_given), None)
        if idle is not None:
            raise ValueError(
                f"{idle} has no effect with the {'reentrant' if self.reentrant else 'replay'} "
                "engine; leave it out, or use the default engine (use_reentrant=False)"
            )

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> Options:
        """Options by name; an unknown name raises."""
        for name in keywords:
            if name not in _NAMES:
                raise TypeError(f"unknown option {name!r}; the options are {', '.join(_NAMES)}")
        return cls(**keywords)

    def __repr__(self) -> str:
        given = zip(_SIGNATURE.values(), self._given, strict=True)
        shown = [f"{each.name}={value!r}" for each, value in given if value != each.default]
        return f"Options({', '.join(shown)})"

    def __reduce__(self) -> Any:
        # As given: the default check depends on the machine's accelerators. Ops are pickled by
        # name.
        given = dict(zip(_NAMES, self._given, strict=True))
        policy = given["policy"]
        if isinstance(policy, list | tuple | set | frozenset):
            given["policy"] = [str(op) for op in policy]
        return _unpickle, (given,)


def usual_options(engine: Engine | None, policy: Any) -> Options:
    """Options with defaults for the others; cached if that keeps nothing alive."""
    if policy is None and engine is None:
        return DEFAULTS
    if policy is None and engine == "replay":
        return _REPLAY
    if type(policy) is not Policy or policy.has_functions or not isinstance(engine, str | None):
        return Options(policy=policy, engine=engine)
    options: Options | None = policy.options.get(engine)
    if options is None:
        options = policy.options[engine] = Options(policy=policy, engine=engine)
    return options


_SIGNATURE = inspect.signature(Options).parameters
_NAMES = tuple(_SIGNATURE)


def _unpickle(keywords: dict[str, Any]) -> Options:
    policy = keywords["policy"]
    if isinstance(policy, list):
        policy = [reduce(getattr, name.split("."), torch.ops) for name in policy]
    return Options.from_keywords(keywords | {"policy": policy})


def _is_reentrant(use_reentrant: Any, engine: Any) -> bool:
    checked_switch("use_reentrant", use_reentrant)
    if engine is not None and engine not in get_args(Engine):
        raise ValueError(f"engine should be one of {list(get_args(Engine))}, but got {engine!r}")
    if use_reentrant and engine in ("rerun", "replay"):
        raise ValueError(
            f"use_reentrant=True contradicts engine={engine!r}; leave out one of the two"
        )
    return bool(use_reentrant) or engine == "reentrant"


_Maker = Callable[[], Contexts] | None


def _checked_contexts(context_fn: Any, policy: Any, store: Any) -> tuple[_Maker, _Maker]:
    if policy is None:
        if context_fn is noop_context_fn:
            return None, None
        if callable(context_fn):
            return context_fn, context_fn
        raise TypeError(
            "context_fn should be a function that returns two context managers, but got "
            f"{context_fn!r}"
        )
    if context_fn is not noop_context_fn:
        raise ValueError(
            "policy and context_fn cannot be combined: policy= is short for context_fn="
            "functools.partial(create_selective_checkpoint_contexts, policy)"
        )
    return (
        partial(create_selective_checkpoint_contexts, policy),
        partial(selective_contexts, as_policy(policy, "policy"), store=store),
    )


DEFAULTS = Options()
_REPLAY = Options(engine="replay")


class _InstalledOptions:
    """The options that ``install`` has set for calls of torch's functions, for all threads."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Recollect is not installed."""
        self.is_active = False
        self.keywords: dict[str, Any] = {}
        self.options = DEFAULTS

    def set(self, keywords: dict[str, Any]) -> None:
        """Recollect is installed with these options, which are checked first."""
        self.options = Options.from_keywords(keywords) if keywords else DEFAULTS
        self.keywords, self.is_active = keywords, True


installed_options = _InstalledOptions()
