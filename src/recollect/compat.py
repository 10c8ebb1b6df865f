"""``torch.utils.checkpoint``, name by name (R1).

Signatures, defaults, warnings and error types are torch's; the code behind them is recollect's.
``docs/guide/drop-in.md`` lists the limitations of torch that recollect lifts.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Generator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from recollect._torch.dynamo import hide_from_dynamo
from recollect.checks.determinism import DeterminismCheck
from recollect.errors import CheckpointError, RecollectWarning
from recollect.options import Options, installed_options, noop_context_fn, usual_options
from recollect.policy.rules import CheckpointPolicy, SelectiveCheckpointContext, as_policy
from recollect.region import (
    enter_region,
    run_compiled,
    run_region,
    run_segments,
    steps_of,
    warn_of_idle,
)
from recollect.rerun.engine import GraphExecGroup
from recollect.rerun.frame import Contexts
from recollect.rerun.reentrant import (
    CheckpointFunction,
    check_backward_validity,
    detach_variable,
)
from recollect.rerun.selective import SAC_IGNORED_OPS, selective_contexts
from recollect.rerun.selective import create_selective_checkpoint_contexts as unlimited_contexts
from recollect.settings import set_checkpoint_debug_enabled, set_checkpoint_early_stop
from recollect.state.rng import (
    DefaultDeviceType,
    get_device_states,
    infer_device_type,
    set_device_states,
)

__all__ = [
    "checkpoint",
    "checkpoint_sequential",
    "CheckpointError",
    "CheckpointFunction",
    "check_backward_validity",
    "detach_variable",
    "get_device_states",
    "set_device_states",
    "noop_context_fn",
    "set_checkpoint_early_stop",
    "DefaultDeviceType",
    "set_checkpoint_debug_enabled",
    "CheckpointPolicy",
    "SelectiveCheckpointContext",
    "create_selective_checkpoint_contexts",
    "SAC_IGNORED_OPS",
    "GraphExecGroup",
]

# Private in torch, but other libraries import them.
_infer_device_type = infer_device_type
_DEFAULT_DETERMINISM_MODE: DeterminismCheck = "default"

#: Options that torch's functions do not have: those of `install`. While recollect is installed, a
#: call may give them too, as by ``gradient_checkpointing_kwargs`` of transformers.
_OWN = ("engine", "policy", "offload_inputs", "store")
#: Those that torch's have, in the order of `_options`.
_Given = tuple[Any, Any, Any, Any, Any, Any, Any]

_REENTRANT = Options(use_reentrant=True)
_REENTRANT_NO_RNG = Options(use_reentrant=True, preserve_rng_state=False)


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: DeterminismCheck = _DEFAULT_DETERMINISM_MODE,
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)``, recomputing its activations in backward.

    The drop-in for ``torch.utils.checkpoint.checkpoint``: pass ``use_reentrant``. Without a
    function it returns a decorator. See ``recollect.checkpoint`` for the options.
    """
    given = (
        *(use_reentrant, preserve_rng_state, context_fn, determinism_check),
        *(debug, early_stop, respect_saved_tensors_hooks),
    )
    if function is None and not args:
        return _decorator(kwargs, given)
    assert function is not None
    own = _take_own(function, kwargs) if installed_options.is_active else {}
    return _run(function, args, kwargs, given, own)


def _decorator(
    own: dict[str, Any], given: _Given
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    unknown = [name for name in own if name not in _OWN or not installed_options.is_active]
    if unknown:
        raise ValueError(f"Unexpected keyword arguments: {','.join(unknown)}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return _run(function, args, kwargs, given, own)

        return hide_from_dynamo(checkpointed)

    return decorate


@hide_from_dynamo
def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: _Given,
    own: dict[str, Any],
) -> Any:
    """Run a region by the options ``given`` in torch's order and our ``own``, or compile it."""
    if not torch.compiler.is_dynamo_compiling():
        options = _options("torch.utils.checkpoint", *given, own)
        return run_region(function, args, kwargs, options, read_once=True)
    use_reentrant, _, context_fn, *_ = given
    if not installed_options.is_active or use_reentrant or context_fn is not noop_context_fn:
        return run_compiled(function, args, kwargs | own, context_fn)
    installed = installed_options.options
    contexts = installed.context_fn
    if own.get("policy") is not None:
        contexts = functools.partial(unlimited_contexts, own["policy"])
    is_held = own.get("offload_inputs") or own.get("store") is not None
    if is_held or installed.offload_inputs or installed.store is not None:
        warn_of_idle()
    return run_compiled(function, args, kwargs, contexts)


def _take_own(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take our own options out of ``kwargs``, except parameters of ``function`` of that name."""
    names = [name for name in _OWN if name in kwargs]
    return {name: kwargs.pop(name) for name in names if not _has_parameter(function, name)}


def _has_parameter(function: Any, name: str) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    functions = [owner.forward, function] if isinstance(owner, nn.Module) else [function]
    try:
        return any(name in inspect.signature(each).parameters for each in functions)
    except (TypeError, ValueError):  # of a function written in C, which has none to show
        return False


def _options(
    caller: str,
    use_reentrant: bool | None,
    preserve_rng_state: Any,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: Any = _DEFAULT_DETERMINISM_MODE,
    debug: Any = False,
    early_stop: Any = True,
    respect_saved_tensors_hooks: Any = None,
    own: dict[str, Any] | None = None,
    *,
    stacklevel: int = 4,
) -> Options:
    """The options of a call: torch's, our ``own``, and those of `install` that it does not set."""
    own, installed = own or {}, installed_options.keywords
    if use_reentrant is None and not own and not installed:
        warnings.warn(
            f"{caller}: the use_reentrant parameter should be passed explicitly. "
            "use_reentrant=False is recommended; without it, True is used. torch announces that "
            "leaving it out will become an error.",
            stacklevel=stacklevel,
        )
        use_reentrant = True
    if use_reentrant and not own:
        if installed:
            given = ", ".join(f"{name}=..." for name in installed)
            warnings.warn(
                "torch.utils.checkpoint is called with use_reentrant=True, so recollect.install("
                f"{given}) has no effect on it. Pass use_reentrant=False; in transformers: "
                'gradient_checkpointing_kwargs={"use_reentrant": False}',
                RecollectWarning,
                stacklevel=stacklevel,
            )
        of_rerun = (context_fn is noop_context_fn, debug is False)
        if not all((*of_rerun, respect_saved_tensors_hooks is None)):
            raise ValueError(
                "Passing `context_fn`, `debug`, or `respect_saved_tensors_hooks` is only supported "
                "when use_reentrant=False."
            )
        return _REENTRANT if preserve_rng_state else _REENTRANT_NO_RNG
    is_selective = context_fn is not noop_context_fn or "policy" in {**installed, **own}
    if respect_saved_tensors_hooks and is_selective:
        raise ValueError(
            "respect_saved_tensors_hooks=True is not supported: recollect passes what a policy "
            "keeps to no hooks. Leave it out. To keep in host memory: offload rules of "
            "recollect.policy, or CheckpointPolicy.MUST_CPU_OFFLOAD"
        )
    # Arguments of the call override `install`.
    loses: Collection[str] = ()
    if context_fn is not noop_context_fn or own.get("engine") == "reentrant":
        loses = _OWN
    elif (
        debug
        or determinism_check != _DEFAULT_DETERMINISM_MODE
        or (use_reentrant is False and installed_options.options.reentrant)
    ):
        loses = ("engine",)
    if preserve_rng_state is True and early_stop is True and not use_reentrant and not loses:
        if not own:
            return installed_options.options
        if not installed and own.keys() <= {"engine", "policy"}:
            return usual_options(own.get("engine"), own.get("policy"))
    return Options(
        **{name: value for name, value in installed.items() if name not in loses} | own,
        use_reentrant=bool(use_reentrant),
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=bool(debug),
        early_stop=bool(early_stop),
        preserve_rng_state=bool(preserve_rng_state),
    )


def checkpoint_sequential(
    functions: Any,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``functions`` in sequence, all ``segments`` but the last one checkpointed.

    Segments are cut as in torch: equal ones of ``len(functions) // segments``, and the rest in the
    last, which is not checkpointed. ``recollect.checkpoint_sequential`` balances them.
    """
    if not isinstance(use_reentrant, int | None):  # a second input, perhaps
        raise TypeError(f"use_reentrant should be True or False, but got {use_reentrant!r}")
    caller = "torch.utils.checkpoint.checkpoint_sequential"
    keeps_rng = kwargs.pop("preserve_rng_state", True)
    options = _options(caller, use_reentrant, keeps_rng, stacklevel=3)
    if kwargs:
        raise ValueError(f"Unexpected keyword arguments: {','.join(kwargs)}")
    steps = steps_of(functions, segments)
    size = len(steps) // segments
    boundaries = [*range(0, size * segments, size), len(steps)]
    return run_segments(steps, boundaries, input, options, read_once=True)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[Any, Any]:
    """Two contexts for ``context_fn=`` that keep the results of some ops.

    As in torch, it takes ops with their overload or a policy function, and each kept result can be
    used once; ``recollect.create_selective_checkpoint_contexts`` has neither limit.
    """
    policy = as_policy(policy_fn_or_list, "policy_fn_or_list", packets=False)
    return selective_contexts(policy, allow_mutation=allow_cache_entry_mutation, as_torch=True)


def _checkpoint_without_reentrant_generator(
    fn: Callable[..., Any],
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: DeterminismCheck = _DEFAULT_DETERMINISM_MODE,
    debug: bool = False,
    early_stop: bool = True,
    *args: Any,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Generator[None, None, None]:
    """A region around a forward that the caller runs between two steps of this generator.

    torch's composable checkpoint enters and leaves regions from module hooks with it.
    """
    return _checkpoint_without_reentrant_generator_impl(
        *(fn, args, kwargs),
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
    )


def _checkpoint_without_reentrant_generator_impl(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **given: Any
) -> Generator[None, None, None]:
    """The same; composable checkpoint of torch 2.15 calls this one."""
    # Always the rerun engine, because the caller runs the forward. The policy of `install` applies.
    options = _options("", False, **{"preserve_rng_state": True, **given})
    is_recomputed = torch.is_grad_enabled()
    with enter_region(fn, args, kwargs, options, True, "live") if is_recomputed else nullcontext():
        yield


for _hidden in (checkpoint, checkpoint_sequential):
    hide_from_dynamo(_hidden)
