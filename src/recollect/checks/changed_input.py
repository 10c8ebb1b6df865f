"""Errors for a changed input: a tensor changed in place between forward and backward.

They begin with the words of autograd, which raises in the same situations. Raised by `state.inputs`
and `rerun.reentrant` (arguments), `state.buffers` (parameters, closures), `replay.held_values`
(values to recompute from), `rerun.engine` and `replay.rematerialize` (saved tensors). Of contents
that cannot be put back, `state.inputs` says so itself, and of modules `state.module_state`.
"""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.autograd import current_node
from recollect.checks.names import owner_name, tensor_name
from recollect.errors import InputChanged

_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: "
)
_WITHOUT_GUARD = "run forward inside `with recollect.set_checkpoint_version_guard(False):`."


def argument_changed(name: str, tensor: torch.Tensor, version: int, when: str) -> InputChanged:
    """The error for an argument of a region that was changed in place."""
    return InputChanged(
        f"{_MODIFIED}{name} of a checkpointed region, {_typed(tensor)}, was changed {when} and is "
        f"at version {tensor._version}; expected version {version} instead. The region would be "
        "recomputed from the changed value. Pass a copy (.clone()) to the region, or replace the "
        "in-place operation (x = x + 1 rather than x += 1). If the change does no harm, "
        f"{_WITHOUT_GUARD}"
    )


def used_tensor_changed(tensor: torch.Tensor, op: Any, difference: str) -> InputChanged:
    """The error for a tensor that a region reads, such as a parameter, and that is no argument."""
    return InputChanged(
        f"{_MODIFIED}{tensor_name(tensor)} {_typed(tensor)}, which a checkpointed region uses in "
        f"{op}, {difference} instead. It was changed since the region began, and backward would "
        "recompute the region from the changed value. Call backward() before you change it "
        "(optimizer.step() after backward()), or, if the change does no harm, "
        f"{_WITHOUT_GUARD}"
    )


def source_changed(tensor: torch.Tensor) -> InputChanged:
    """The error for a tensor that the replay engine holds, to recompute others from."""
    return InputChanged(
        f"{_MODIFIED}{_named(tensor)}, from which activations are recomputed{_saver()}, was "
        "changed after forward. Replace the in-place operation, or run it after backward "
        "(optimizer.step() after backward())."
    )


def saved_tensor_changed(tensor: torch.Tensor | torch.Size) -> InputChanged:
    """The error for a tensor that autograd saved; given by its shape if it is freed."""
    return InputChanged(
        f"{_MODIFIED}{_named(tensor)}, which an operation saved for backward{_saver()}, was "
        "changed afterwards. Autograd also raises here, except for writes that it cannot see: "
        "through .data, or by an in-place collective (dist.all_reduce). Replace the in-place "
        "operation, let it change a copy (.clone()), or run it after backward (optimizer.step() "
        "after backward())."
    )


def _typed(tensor: torch.Tensor) -> str:
    return f"[{tensor.type()} {list(tensor.shape)}]"


def _named(tensor: torch.Tensor | torch.Size) -> str:
    """The name of a parameter or buffer, also for a view of one; else a shape."""
    if not isinstance(tensor, torch.Tensor):
        return f"a tensor of shape {list(tensor)}"
    name = owner_name(tensor)
    return name or f"a tensor of shape {list(tensor.shape)} (no parameter or buffer)"


def _saver() -> str:
    """The node of the graph that needs a tensor, if one is running."""
    node = current_node()
    return "" if node is None else f" ({node.name()})"
