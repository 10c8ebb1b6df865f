"""Notices the steps of the optimizers that train a model (P8)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from recollect._torch.fsdp import shards_of
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import local_tensors
from recollect.planning.recording.model_state import gradients_of, parameters_of
from recollect.planning.recording.step import storage_sizes

__all__ = ["Updates", "later_base"]


class Updates:
    """The optimizers that have made a step of ``parameters`` since `watch`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self.has_updated = False

    def watch(self) -> None:
        """Begin."""
        # One hook, which stays: torch goes through all hooks while one is called, and none may
        # leave.
        global _is_registered  # noqa: PLW0603 - once in a process
        if not _is_registered:
            _is_registered = True
            register_optimizer_step_post_hook(_after_update)
        _watching.add(self)

    def noticed(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step."""
        groups = optimizer.param_groups
        if any(id(each) in self._parameters for group in groups for each in group["params"]):
            self.has_updated = True
            self._optimizers.add(optimizer)

    def state(self) -> Iterator[torch.Tensor]:
        """The tensors of the state of these optimizers."""
        for optimizer in self._optimizers:
            leaves = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state)]
            yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def later_base(model: nn.Module, device: torch.device, updates: Updates, gradients: int) -> int:
    """The bytes that are allocated before a later step, with so many of gradients.

    It may begin now.
    """
    if device.type == "cuda":
        now = sum(storage_sizes(gradients_of(model)))
        return torch.cuda.memory_allocated(device) - now + gradients
    shards = shards_of(model)
    late = 0 if shards is None else shards.in_flight_bytes()
    held = [*parameters_of(model), *model.buffers(), *updates.state()]
    local = [part for tensor in held for part in local_tensors(tensor)]
    return sum(storage_sizes(local)) + gradients + late


_watching: WeakSet[Updates] = WeakSet()
_is_registered = False


def _after_update(optimizer: Optimizer, *_: Any) -> None:
    for updates in [*_watching]:
        updates.noticed(optimizer)
