"""The reentrant engine: one autograd node around a region whose forward records nothing.

Forward runs under ``no_grad``; backward runs the function again with grad and starts a backward of
its own on the result. Simple, and as fast as rerunning can be, at the price of the limits listed in
``docs/guide/engines.md``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from recollect._torch.autograd import backward_allows_reentrant
from recollect._torch.dynamo import hide_from_dynamo
from recollect._torch.modes import set_grad_enabled
from recollect.checks.changed_input import argument_changed
from recollect.errors import InputChanged
from recollect.settings import version_guard_enabled
from recollect.state.inputs import Inputs
from recollect.state.region_state import RegionState
from recollect.state.tensors import are_statistics


def detach_variable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """``inputs`` with each tensor detached, requiring grad if it did; the rest as it is."""
    if not isinstance(inputs, tuple):
        raise RuntimeError(
            "Only tuple of tensors is supported. Got Unsupported input type: "
            f"{type(inputs).__name__}"
        )
    return tuple(_detached(x) if isinstance(x, torch.Tensor) else x for x in inputs)


@hide_from_dynamo
def _detached(tensor: torch.Tensor) -> torch.Tensor:
    alias = tensor.detach()
    alias.requires_grad = tensor.requires_grad
    return alias


def check_backward_validity(inputs: Iterable[Any]) -> None:
    """Warn if no tensor in ``inputs`` requires grad: the reentrant engine then gives none."""
    if not any(x.requires_grad for x in inputs if isinstance(x, torch.Tensor)):
        warnings.warn(
            "None of the inputs have requires_grad=True. Gradients will be None",
            stacklevel=2,
        )


class CheckpointFunction(torch.autograd.Function):
    """The autograd node: ``CheckpointFunction.apply(function, preserve_rng_state, *args)``."""

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any
    ) -> Any:
        # Tensors go through save_for_backward, which guards their versions; None holds their place.
        others: list[Any] = []
        indices: list[int] = []
        # Until the end of forward, saved tensors are not guarded.
        versions: list[int | None] = []
        for index, value in enumerate(args):
            if not isinstance(value, torch.Tensor):
                others.append(value)
                continue
            indices.append(index)
            if not value.requires_grad and are_statistics(value):
                others.append(value)
                versions.append(None)
            else:
                others.append(None)
                versions.append(None if value.is_inference() else value._version)
        inputs = ctx.inputs = Inputs((*others,), {}, version_guard_enabled())
        check_backward_validity(args)
        ctx.run_function = run_function
        state = ctx.region_state = RegionState(
            run_function, inputs, preserve_rng_state, counters="counted"
        )
        ctx.tensor_indices = indices
        ctx.save_for_backward(*[args[index] for index in indices])
        # Without grad, as the forward of every such node.
        if state.collectives is None:
            outputs = run_function(*args)
        else:
            with state.collectives:
                outputs = run_function(*args)
        ctx.changed = _changed_inside(args, indices, versions)
        inputs.settle()
        state.settle()
        return _apart_from_outside(outputs, args)

    @staticmethod
    @hide_from_dynamo
    def backward(ctx: Any, *grads: Any) -> Any:
        if not backward_allows_reentrant():
            raise RuntimeError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or "
                "passing an `inputs` parameter to .backward(). Use the default engine "
                "(use_reentrant=False), or call .backward() without `inputs`."
            )
        if ctx.changed is not None:
            raise InputChanged(ctx.changed)
        inputs = list(ctx.inputs.recall()[0])
        for index, tensor in zip(ctx.tensor_indices, ctx.saved_tensors, strict=True):
            inputs[index] = _detached(tensor)
        outputs = _rerun(ctx, inputs)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        if not pairs:
            raise RuntimeError(
                "none of output has requires_grad=True, this checkpoint() is not necessary"
            )
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        ctx.region_state.check_gradients()
        # An input that the function changed in place is no leaf any more.
        leaves = [x if isinstance(x, torch.Tensor) and x.is_leaf else None for x in inputs]
        return None, None, *(None if leaf is None else leaf.grad for leaf in leaves)


def _apart_from_outside(outputs: Any, args: tuple[Any, ...]) -> Any:
    """``outputs`` with an alias for each tensor that has a history, and is no argument.

    It is from outside, such as a parameter, since forward records none. Autograd would give it the
    node of the region as its history, in whose rerun it would lead to that node again.
    """
    if isinstance(outputs, torch.Tensor):
        is_outside = outputs.requires_grad and not any(outputs is each for each in args)
        return outputs.detach() if is_outside else outputs
    if type(outputs) is tuple:
        return tuple([_apart_from_outside(each, args) for each in outputs])
    return outputs


def _changed_inside(
    args: tuple[Any, ...], indices: list[int], versions: list[int | None]
) -> str | None:
    """What to raise in backward if the function changed one of its arguments."""
    if not version_guard_enabled():
        return None
    for index, version in zip(indices, versions, strict=True):
        if version is not None and args[index]._version != version:
            name = f"args[{index}]"
            return str(argument_changed(name, args[index], version, "inside the region"))
    return None


@hide_from_dynamo
def _rerun(ctx: Any, inputs: list[Any]) -> Any:
    changes = ctx.region_state.changes()
    grad_was_enabled = torch.is_grad_enabled()
    set_grad_enabled(True)
    try:
        if changes is None:
            return ctx.region_state.run(ctx.run_function, inputs, {})
        with changes:
            outputs = ctx.region_state.run(ctx.run_function, inputs, {})
    finally:
        set_grad_enabled(grad_was_enabled)
    if changes.error is not None:
        raise changes.error
    return outputs
