"""The public functions ``checkpoint``, ``checkpointed`` and ``checkpoint_sequential`` (R1)."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from recollect._torch.dynamo import hide_from_dynamo
from recollect.checks.determinism import DeterminismCheck
from recollect.modules import OPTIONS, copy_signature, unwrap_module, wrap_module
from recollect.options import Engine, Keywords, Options, noop_context_fn, usual_options
from recollect.region import (
    balanced,
    run_compiled,
    run_region,
    run_segments,
    steps_of,
    warn_of_idle,
)
from recollect.report.units import argument_text
from recollect.rerun.frame import Contexts
from recollect.rerun.selective import create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from typing_extensions import Unpack

C = TypeVar("C", bound=Callable[..., Any])


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
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
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` without keeping its activations for backward.

    Backward recomputes the activations that it needs. Gradients, random streams and the result
    equal those of a plain call.

    Args:
        function: Anything callable: a module, a bound method, a lambda.
        *args: Its positional arguments.
        use_reentrant: Use the reentrant engine; the same as ``engine="reentrant"``.
        context_fn: Returns two context managers: forward runs under the first, the recomputation
            under the second.
        determinism_check: How recomputed tensors are compared with the originals: ``"default"``
            (shape, dtype, device), ``"values"`` (bit for bit, naming the first op that differs),
            ``"none"``, or a function from a tensor to something comparable.
        debug: On a mismatch show the ops of both runs side by side, from the first difference on.
        early_stop: End the recomputation as soon as all tensors that backward needs are there.
        preserve_rng_state: Give the recomputation the random numbers of forward.
        policy: Keep some results instead of recomputing them: made by ``recollect.policy``, such as
            ``policy.matmuls() | policy.attention()``; or a list of ops (packets such as
            ``torch.ops.aten.mm`` stand for all their overloads); or a policy function.
        engine: ``"rerun"`` (the default: run the function again), ``"reentrant"``, or ``"replay"``
            (record the ops once; backward runs those it needs).
        offload_inputs: Hold the activations among the arguments in host memory.
        store: Holds kept tensors instead of the device: a ``recollect.store.HostStore``, or your
            own ``recollect.store.Store``.
        **kwargs: Keyword arguments of ``function``.

    Example::

        hidden = recollect.checkpoint(block, hidden, mask=mask)
    """
    if torch.compiler.is_dynamo_compiling():
        if policy is not None:
            context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
        if offload_inputs or store is not None:
            warn_of_idle()
        return run_compiled(function, args, kwargs, context_fn)
    if (
        use_reentrant is False
        and context_fn is noop_context_fn
        and determinism_check == "default"
        and debug is False
        and early_stop is True
        and preserve_rng_state is True
        and offload_inputs is False
        and store is None
    ):
        options = usual_options(engine, policy)
    else:
        options = Options(
            use_reentrant,
            context_fn,
            determinism_check,
            debug,
            early_stop,
            preserve_rng_state,
            policy,
            engine,
            offload_inputs,
            store,
        )
    try:
        return run_region(function, args, kwargs, options)
    except TypeError as error:
        _note_misspelt(error, kwargs)
        raise


def _note_misspelt(error: TypeError, kwargs: Iterable[str]) -> None:
    """Note on an error of ``function`` that one of its keywords is close to an option of ours."""
    for name in kwargs:
        close = difflib.get_close_matches(name, Keywords.__annotations__, 1)
        if close and f"keyword argument '{name}'" in str(error) and hasattr(error, "add_note"):
            error.add_note(f"recollect: did you mean {close[0]}=, an option of checkpoint?")


@overload
def checkpointed(function_or_module: C, /, **options: Unpack[Keywords]) -> C: ...


@overload
def checkpointed(**options: Unpack[Keywords]) -> Callable[[C], C]: ...


def checkpointed(function_or_module: Any = None, /, **options: Any) -> Any:
    """Make a function or module that is checkpointed whenever it is called.

    All keyword arguments of a call go to the function; the options of ``checkpoint`` are set here,
    once. For a module, the same object is returned with its ``forward`` checkpointed: parameter
    names, ``state_dict``, hooks, copying and pickling do not change. ``unwrap`` undoes it.

    Works as a decorator, with and without options::

        for block in model.blocks:
            recollect.checkpointed(block)


        @recollect.checkpointed(early_stop=False)
        def step(x, *, debug): ...
    """
    checked = Options.from_keywords(options)
    if function_or_module is None:
        return functools.partial(_checkpointed, options=checked)
    return _checkpointed(function_or_module, checked)


def _checkpointed(target: Any, options: Options) -> Any:
    if isinstance(target, nn.Module):
        return wrap_module(target, options)
    if not callable(target) or isinstance(target, type):
        raise TypeError(
            "function_or_module should be a function or an nn.Module, but got "
            f"{argument_text(target)}. Wrap it before it is called: checkpointed(module)(x)"
        )
    if inspect.isgeneratorfunction(target):
        raise TypeError(
            f"function_or_module should not be a generator function, as {target!r} is: calling it "
            "runs nothing that could be checkpointed"
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        return run_region(target, args, kwargs, options)

    copy_signature(target, call)
    vars(call)[OPTIONS] = options
    return call


def unwrap(function_or_module: Any) -> Any:
    """Undo ``checkpointed``, ``fit`` or a plan: the same module or function as before."""
    if isinstance(function_or_module, nn.Module):
        return unwrap_module(function_or_module)
    if not isinstance(getattr(function_or_module, OPTIONS, None), Options):
        shown = argument_text(function_or_module)
        if hasattr(function_or_module, "applied"):
            raise TypeError(
                f"function_or_module should be the model, but got a {shown}: recollect.unwrap("
                "model), or plan.remove(model)"
            )
        raise ValueError(f"this {shown} is not checkpointed: there is nothing to unwrap")
    return function_or_module.__wrapped__


def checkpoint_sequential(
    functions: nn.Sequential | Iterable[Callable[..., Any]],
    segments: int,
    input: Any,
    **options: Unpack[Keywords],
) -> Any:
    """Run ``functions`` one after the other, checkpointed in ``segments`` parts.

    The lengths of the parts differ by at most one, the earlier ones are longer. The last part is
    not checkpointed, because backward needs its activations first. ``options`` are those of
    ``checkpoint``.

    Example::

        out = recollect.checkpoint_sequential(model.layers, 4, x)
    """
    checked = Options.from_keywords(options)
    if isinstance(segments, bool) or not isinstance(segments, int):
        raise TypeError(
            f"segments should be an int, but got {argument_text(segments)}. The order is: "
            "checkpoint_sequential(functions, segments, input)"
        )
    steps = steps_of(functions, segments)
    return run_segments(steps, balanced(len(steps), segments), input, checked)


hide_from_dynamo(checkpoint)
