"""``torch.utils.checkpoint``, name by name.

Signatures, defaults, warnings and error types are torch's; the code behind them is recollect's.
``docs/guide/drop-in.md`` lists the limitations of torch that recollect lifts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from typing import Any

import torch

from recollect._torch.dynamo import hide_from_dynamo
from recollect.checks.determinism import DeterminismCheck
from recollect.errors import CheckpointError
from recollect.options import DEFAULTS, Options, noop_context_fn
from recollect.policy.decisions import CheckpointPolicy, SelectiveCheckpointContext
from recollect.policy.rules import as_policy
from recollect.region import enter_region, run_compiled, run_region
from recollect.rerun.frame import Contexts
from recollect.rerun.groups import GraphExecGroup
from recollect.rerun.reentrant import (
    CheckpointFunction,
    check_backward_validity,
    detach_variable,
)
from recollect.rerun.selective import SAC_IGNORED_OPS, selective_contexts
from recollect.sequential import run_segments, steps_of
from recollect.settings import set_checkpoint_debug_enabled, set_checkpoint_early_stop
from recollect.state.devices import DefaultDeviceType, infer_device_type
from recollect.state.rng import get_device_states, set_device_states

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

# Private in torch, and taken from there by others all the same.
_infer_device_type = infer_device_type
_DEFAULT_DETERMINISM_MODE: DeterminismCheck = "default"

_REENTRANT = Options(use_reentrant=True)
_REENTRANT_NO_RNG = Options(use_reentrant=True, preserve_rng_state=False)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: DeterminismCheck = _DEFAULT_DETERMINISM_MODE,
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)``, recomputing its activations in backward.

    The drop-in for ``torch.utils.checkpoint.checkpoint``: ``use_reentrant`` is to be passed, and
    ``preserve_rng_state`` is taken from ``kwargs``. See ``recollect.checkpoint`` for the options.
    """
    if torch.compiler.is_dynamo_compiling():
        kwargs.pop("preserve_rng_state", None)
        return run_compiled(
            function, args, kwargs, None if context_fn is noop_context_fn else context_fn
        )
    if use_reentrant is None:
        _warn_use_reentrant("torch.utils.checkpoint")
        use_reentrant = True
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if use_reentrant:
        if context_fn is not noop_context_fn or debug is not False:
            raise ValueError(
                "Passing `context_fn` or `debug` is only supported when use_reentrant=False."
            )
        options = _REENTRANT if preserve_rng_state else _REENTRANT_NO_RNG
    else:
        options = _rerun_options(
            preserve_rng_state, context_fn, determinism_check, debug, early_stop
        )
    return run_region(function, args, kwargs, options, read_once=True)


def _rerun_options(
    preserve_rng_state: Any,
    context_fn: Callable[[], Contexts],
    determinism_check: Any,
    debug: Any,
    early_stop: Any,
) -> Options:
    if (
        preserve_rng_state is True
        and context_fn is noop_context_fn
        and determinism_check == _DEFAULT_DETERMINISM_MODE
        and debug is False
        and early_stop is True
    ):
        return DEFAULTS
    return Options(
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

    Segments are cut as torch cuts them: equal ones of ``len(functions) // segments``, and the rest
    in the last, which is run plainly. ``recollect.checkpoint_sequential`` balances them.
    """
    if use_reentrant is None:
        _warn_use_reentrant("torch.utils.checkpoint.checkpoint_sequential")
        use_reentrant = True
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError(f"Unexpected keyword arguments: {','.join(kwargs)}")
    steps = steps_of(functions, segments)
    size = len(steps) // segments
    boundaries = [*range(0, size * segments, size), len(steps)]
    options = Options(
        use_reentrant=bool(use_reentrant) if isinstance(use_reentrant, int) else use_reentrant,
        preserve_rng_state=bool(preserve_rng_state),
    )
    return run_segments(steps, boundaries, input, options, read_once=True)


def _warn_use_reentrant(name: str) -> None:
    warnings.warn(
        f"{name}: the use_reentrant parameter should be passed explicitly. use_reentrant=False is "
        "recommended; True is what not passing it means. torch announces that leaving it out will "
        "become an error.",
        stacklevel=3,
    )


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[Any, Any]:
    """Two contexts for ``context_fn=`` that keep the results of some ops.

    Takes ops with their overload, or a policy function, and gives each kept result out once, as
    torch does; ``recollect.create_selective_checkpoint_contexts`` has neither limit.
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
    **kwargs: Any,
) -> Generator[None, None, None]:
    """A region around a forward that somebody else calls, between two steps of this generator.

    torch's composable checkpoint enters and leaves regions from module hooks with it.
    """
    options = _rerun_options(preserve_rng_state, context_fn, determinism_check, debug, early_stop)
    if not torch.is_grad_enabled():
        yield
        return
    with enter_region(fn, args, kwargs, options, True):
        yield


for _hidden in (checkpoint, checkpoint_sequential):
    hide_from_dynamo(_hidden)
