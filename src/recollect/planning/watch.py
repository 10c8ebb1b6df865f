"""What is in memory in a step under a plan: the output of the model, and the peak on the device.

A training loop may hold the output of the model through backward, or not: a plan has to assume one
of the two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

from recollect._torch.autograd import at_end_of_backward
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key
from recollect.checks.place import warn_user
from recollect.errors import PlanWarning

__all__ = ["PeakWatch", "tell_of_output", "watch_output"]

_Tensor = torch.Tensor
_log = logging.getLogger("recollect")
#: The part of a budget that is worth a line in a log.
_WORTH = 1e-3


def watch_output(output: Any, tell: Callable[[int, int], None]) -> None:
    """Have ``tell`` called once, when backward first reaches ``output``. Holds no tensor.

    With the bytes of ``output`` that are in memory by then, and with all of them. What the loss has
    saved of it has been freed, unless the graph is retained.
    """
    storages: dict[int, tuple[Any, int]] = {}
    for tensor in _tensors(output):
        key = storage_key(tensor)
        if key is not None:
            storage = tensor.untyped_storage()
            storages[key] = ref(storage), storage.nbytes()

    def reached() -> None:
        alive = sum(nbytes for storage, nbytes in storages.values() if storage() is not None)
        tell(alive, sum(nbytes for _, nbytes in storages.values()))

    if storages:
        _when_backward_reaches(output, reached)


def _when_backward_reaches(output: Any, act: Callable[[], None]) -> None:
    nodes = {id(t.grad_fn): t.grad_fn for t in _tensors(output) if t.grad_fn is not None}
    handles: list[Any] = []

    def reached(_: Any) -> None:
        found = [*handles]
        handles.clear()
        for handle in found:
            handle.remove()
        if found:  # else another of the nodes was first
            act()

    handles += [node.register_prehook(reached) for node in nodes.values()]


def _tensors(output: Any) -> Iterator[_Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, _Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([*vars(leaf).values()])


def tell_of_output(alive: int, planned: int, budget: int) -> bool:
    """Tell the user if the loop holds more or less of the output than planned. Whether it does.

    ``alive``: bytes of the output in memory when backward reaches it; ``planned``: in the plan.
    """
    if alive > planned:
        warn_user(
            f"the plan was made for a loop that does not hold the model's output, and "
            f"{alive - planned:,} bytes more of it than planned are in memory in backward: the "
            f"step may exceed its budget of {budget:,} bytes by as much. Let go of the output "
            "before loss.backward(), or plan for it: plan(..., holds_output=True)",
            PlanWarning,
        )
        return True
    if planned - alive > _WORTH * budget:
        _log.info(
            "the plan assumes that the model's output is held through backward, and it is not: "
            "%s bytes of the budget go unused. Plan with holds_output=False to use them",
            f"{planned - alive:,}",
        )
        return True
    return False


class PeakWatch:
    """The peak of CUDA's allocator from the beginning of a forward to the end of its backward.

    What happens between steps (evaluation, other models) does not count. The statistics are the
    user's, and are never reset: a step whose peak is below an earlier one is not noticed.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._device: torch.device | None = None
        #: The peak of the last step, if that was above the budget.
        self.over: int | None = None

    def read(self, model: Any) -> int | None:
        """The peak so far; None if there is nothing to read."""
        if not torch.cuda.is_initialized() or not isinstance(model, nn.Module):
            return None
        if self._device is None:
            devices = {parameter.device for parameter in model.parameters()}
            on_cuda = [device for device in devices if device.type == "cuda"]
            self._device = min(on_cuda, key=str, default=torch.device("cpu"))
        return None if self._device.type != "cuda" else _peak_on(self._device)

    def compare(self, output: Any, before: int) -> None:
        """When the backward of ``output`` is over, compare with ``before``, the peak before."""

        def compare() -> None:
            assert self._device is not None
            peak = _peak_on(self._device)
            if peak > before and peak > self._budget:
                self.over = peak

        _when_backward_reaches(output, lambda: at_end_of_backward(compare))


def _peak_on(device: torch.device) -> int:
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    peak: int = stats["allocated_bytes"]["all"]["peak"]
    return peak
