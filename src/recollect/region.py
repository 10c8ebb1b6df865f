"""Runs a region with the chosen engine, or leaves it to the compiler (R2)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from recollect._torch.dynamo import (
    called_while_traced,
    dynamo_callback,
    hide_from_dynamo,
    run_without_dynamo,
    torch_checkpoint,
)
from recollect.checks.place import hide_own_frames
from recollect.observer import observing
from recollect.options import Options, noop_context_fn
from recollect.replay.engine import LeftToRerun, replay_region
from recollect.report.units import argument_text
from recollect.rerun.engine import Frame
from recollect.rerun.frame import Contexts, make_contexts
from recollect.rerun.reentrant import CheckpointFunction
from recollect.rerun.selective import RecordMode
from recollect.settings import resolve_debug, resolve_early_stop
from recollect.state.variables import Counters
from recollect.store.offload_batch import OffloadBatch

#: A function of a sequential model.
Step = Callable[[Any], Any]


@hide_from_dynamo
def run_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    *,
    read_once: bool = False,
) -> Any:
    """Run a region with checked options. ``read_once``: refuse to recompute for a second read."""
    if torch.compiler.is_dynamo_compiling():
        if options.offload_inputs or options.store is not None:
            warn_of_idle()
        return run_compiled(function, args, kwargs, options.context_fn)
    if not callable(function):
        raise TypeError(
            f"function should be callable, but got {argument_text(function)}. Pass a function or "
            "module and its arguments: checkpoint(module, x), not checkpoint(module(x))"
        )
    if dynamo_callback() is not None:
        # After a graph break, eager code makes this call.
        return run_without_dynamo(run_region, function, args, kwargs, options, read_once=read_once)
    try:
        if options.reentrant:
            return _run_reentrant(function, args, kwargs, options)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if options.replay:
            batch, inputs = OffloadBatch(options.store), options.offload_inputs
            result = replay_region(function, args, kwargs, options.policy, batch, inputs)
            if type(result) is not LeftToRerun:
                return result
        with enter_region(function, args, kwargs, options, read_once):
            return function(*args, **kwargs)
    except Exception as error:
        hide_own_frames(error)
        raise


@hide_from_dynamo
def enter_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    read_once: bool,
    counters: Counters | None = None,
) -> AbstractContextManager[None]:
    """A context of the rerun engine, inside which the caller runs the function's forward.

    ``counters``: instead of that of ``options``.
    """
    contexts = None if options.make_contexts is None else make_contexts(options.make_contexts)
    batch = OffloadBatch(options.store) if options.offload_inputs else None
    if batch is not None and contexts is not None and isinstance(contexts[0], RecordMode):
        batch = contexts[0].ledger.offload_batch  # that of its policy
    frame = Frame(
        function,
        args,
        kwargs,
        options.preserve_rng_state,
        contexts,
        options.describe,
        resolve_early_stop(options.early_stop),
        resolve_debug(options.debug),
        read_once,
        counters or options.counters,
        batch,
    )
    return frame if observing.observer is None else _observed(frame, args, kwargs)


@contextmanager
def _observed(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    observer = observing.observer
    assert observer is not None
    with observer.region("rerun", frame.function, (args, kwargs), frame), frame:
        yield


@hide_from_dynamo
def _run_reentrant(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    if kwargs:
        raise ValueError(
            f"Unexpected keyword arguments: {','.join(kwargs)}. The reentrant engine passes "
            "positional arguments only; use the default engine (use_reentrant=False)"
        )
    observer = observing.observer
    batch = OffloadBatch(options.store) if options.offload_inputs else None
    with (
        nullcontext() if observer is None else observer.region("reentrant", function, args, batch),
        nullcontext() if batch is None else _offloading(batch),
    ):
        return CheckpointFunction.apply(function, options.preserve_rng_state, *args)  # type: ignore[no-untyped-call]


def _offloading(batch: OffloadBatch) -> saved_tensors_hooks:
    """Hooks that put the activations that a node saves into a store."""

    def pack(tensor: torch.Tensor) -> Any:
        is_activation = tensor.requires_grad and not tensor.is_leaf
        return batch.put(tensor.detach()) if is_activation else tensor

    def unpack(packed: Any) -> Any:
        if isinstance(packed, torch.Tensor):
            return packed
        batch.announce()
        return packed.get()

    return saved_tensors_hooks(pack, unpack)


def run_compiled(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context_fn: Callable[[], Contexts] | None,
) -> Any:
    """Leave a region to the compiler that is tracing this call.

    Dynamo knows torch's function by identity and turns the call into a node of its graph; the
    compiler then decides what to recompute. Options about RNG, state and checks do not apply there.
    """
    checkpoint = torch_checkpoint()
    if context_fn is None or context_fn is noop_context_fn:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **kwargs)


@called_while_traced
def warn_of_idle() -> None:
    """Warn that compiled code holds nothing in host memory."""
    warnings.warn(
        "offload_inputs= and store= have no effect in compiled code, which holds everything on the "
        "device. Leave them out, or keep the region from the compiler: torch.compiler.disable",
        stacklevel=2,
    )


# --- sequential models ---------------------------------------------------------------------------


def steps_of(functions: Any, segments: int) -> list[Step]:
    """The functions of a ``Sequential`` or an iterable, which are to be cut into ``segments``."""
    if isinstance(functions, nn.Sequential):
        functions = functions.children()
    if not isinstance(functions, Iterable):
        raise TypeError(
            "functions should be an nn.Sequential or a list of modules or functions, but got "
            f"{argument_text(functions)}"
        )
    steps = list(functions)
    for position, step in enumerate(steps):
        if not callable(step):
            raise TypeError(
                f"functions[{position}] should be callable, but got {argument_text(step)}"
            )
    if not 1 <= segments <= len(steps):
        raise ValueError(
            f"segments should be between 1 and the number of functions, {len(steps)}, but got "
            f"{segments}"
        )
    return steps


def balanced(count: int, segments: int) -> list[int]:
    """The boundaries that cut ``count`` steps into parts whose lengths differ by at most one."""
    short, longer = divmod(count, segments)
    lengths = (short + (part < longer) for part in range(segments))
    return list(accumulate(lengths, initial=0))


def run_segments(
    steps: list[Step],
    boundaries: list[int],
    input: Any,
    options: Options,
    *,
    read_once: bool = False,
) -> Any:
    """Run ``steps``, each segment but the last one checkpointed."""
    *checkpointed, last = pairwise(boundaries)
    for start, end in checkpointed:
        chain = _chain(steps[start:end])
        input = run_region(chain, (input,), {}, options, read_once=read_once)
    return _chain(steps[slice(*last)])(input)


def _chain(steps: list[Step]) -> Step:
    def run(value: Any) -> Any:
        for step in steps:
            value = step(value)
        return value

    return run
