"""Compares the tensors that a recomputation saved with those that forward saved.

A check is a function from a tensor to something comparable, called on each tensor that autograd
saves, in both runs. The default compares shape, dtype and device: wrong ones would make backward
fail or, worse, broadcast. ``"values"`` also compares fingerprints (``checks.differences``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from recollect.checks.diagnosis import MismatchContext, describe
from recollect.errors import RecomputeMismatch

Describe = Callable[[torch.Tensor], Any]
DeterminismCheck = Literal["default", "none", "values"] | Describe

_HINT = """
To see the first difference of the two runs, pass `debug=True` to `checkpoint(...)`, or put the
forward inside `with set_checkpoint_debug_enabled(True):`; the error then shows the ops of both.

If the region calls code compiled with automatic dynamic shapes, forward and recomputation may have
used two different graphs (a static one, then a dynamic one). Either
  - Use torch._dynamo.mark_dynamic() to explicitly mark varying dimensions of the inputs, so that
    one dynamic graph is used from the start, or
  - Call torch._C._dynamo.eval_frame._set_lru_cache(False) to disable LRU cache reordering, so that
    both runs find the same graph first.
"""


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The default check."""
    return tensor.shape, tensor.dtype, tensor.device


def cpu_metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The default check where there is no accelerator: all data is on the CPU then."""
    return tensor.shape, tensor.dtype


default_check = cpu_metadata if torch.accelerator.current_accelerator() is None else metadata


def values_check(tensor: torch.Tensor) -> Any:
    """The check ``"values"``: the engine logs fingerprints besides the default check."""
    return default_check(tensor)


_NAMED_CHECKS: dict[str, Describe | None] = {
    "default": default_check,
    "values": values_check,
    "none": None,
}


def resolve_check(check: DeterminismCheck) -> Describe | None:
    """The function behind ``determinism_check=``; None compares nothing."""
    if callable(check):
        return check
    if not isinstance(check, str) or check not in _NAMED_CHECKS:
        raise ValueError(
            f"determinism_check should be one of {list(_NAMED_CHECKS)} or a function from a tensor "
            f"to something comparable, but got {check!r}"
        )
    return _NAMED_CHECKS[check]


def same(before: Any, after: Any) -> bool:
    """Whether two descriptions, or lists of them, are equal."""
    try:
        return bool(before == after)
    except (RuntimeError, ValueError) as error:
        raise TypeError(
            "determinism_check returned something that == does not compare to True or False "
            f"({error}); return numbers, strings or tuples of them, such as tensor.sum().item()"
        ) from error


def count_mismatch(context: MismatchContext) -> RecomputeMismatch:
    """The error for a recomputation that saved fewer or more tensors than forward."""
    in_forward, in_recompute = len(context.tickets), len(context.tensors)
    if in_recompute > in_forward:
        return RecomputeMismatch(
            "torch.utils.checkpoint: trying to save more tensors during recomputation than during "
            f"the original forward pass, which saved {in_forward}.\n{describe(context)}{_HINT}"
        )
    return RecomputeMismatch(
        "torch.utils.checkpoint: A different number of tensors was saved during the original "
        "forward and recomputation.\n"
        f"Number of tensors saved during forward: {in_forward}\n"
        f"Number of tensors saved during recomputation: {in_recompute}\n"
        f"{describe(context)}{_HINT}"
    )


#: Differences listed one by one.
_LISTED = 20


def metadata_mismatch(
    context: MismatchContext, differences: list[tuple[int, Any, Any]]
) -> RecomputeMismatch:
    """The error for a recomputation that saved other tensors."""
    lines = "".join(
        f"tensor at position {position}:\n"
        f"saved metadata: {_readable(before)}\n"
        f"recomputed metadata: {_readable(after)}\n"
        for position, before, after in differences[:_LISTED]
    )
    if len(differences) > _LISTED:
        lines += f"... and {len(differences) - _LISTED} more\n"
    return RecomputeMismatch(
        "torch.utils.checkpoint: Recomputed values for the following tensors have different "
        f"metadata than during the forward pass.\n{lines}{describe(context, differences[0][0])}"
        f"{_HINT}"
    )


def _readable(description: Any) -> Any:
    match description:
        case (torch.Size() as shape, torch.dtype() as dtype, *device):
            return {"shape": shape, "dtype": dtype, "device": device[0] if device else "cpu"}
        case (single,):
            return single
    return description
