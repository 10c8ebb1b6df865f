"""Watches steps under a plan: whether the loop holds the model's output, and the peak (P7).

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

__all__ = ["PeakWatch", "Waiting", "report_output", "watch_output", "when_backward_reaches"]

_Tensor = torch.Tensor
_log = logging.getLogger("recollect")
#: The fraction of a budget that is worth a line in a log.
_WORTH_A_LINE = 1e-3


def watch_output(output: Any, act: Callable[[int, int], None]) -> None:
    """Have ``act`` called once, when backward first reaches ``output``. Holds no tensor.

    Its arguments are the bytes of ``output`` that are still in memory, and all bytes of it. By then
    the tensors that the loss saved have been freed, unless the graph is retained.
    """
    storages: dict[int, tuple[Any, int]] = {}
    for tensor in _tensors(output):
        key = storage_key(tensor)
        if key is not None:
            storage = tensor.untyped_storage()
            storages[key] = ref(storage), storage.nbytes()

    def reached() -> None:
        alive = sum(nbytes for storage, nbytes in storages.values() if storage() is not None)
        act(alive, sum(nbytes for _, nbytes in storages.values()))

    if storages:
        when_backward_reaches(output, reached)


class Waiting:
    """Alive until backward reaches ``output``, or its graph is dropped. Nothing else holds it."""

    def __init__(self, output: Any) -> None:
        when_backward_reaches(output, self._reached)

    def _reached(self) -> None:
        """Nothing to do: the hook that holds this object is gone."""

    def is_waiting(self) -> bool:
        """Whether backward has yet to come: it is alive."""
        return True


def when_backward_reaches(output: Any, act: Callable[[], None]) -> None:
    """Have ``act`` called once, when backward first reaches ``output``."""
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


def report_output(alive: int, planned: int, budget: int) -> bool:
    """Warn or log if the loop holds more or less of the output than planned. Whether it does.

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
    if planned - alive > _WORTH_A_LINE * budget:
        _log.info(
            "the plan assumes that the model's output is held through backward, and it is not: "
            "%s bytes of the budget go unused. Plan with holds_output=False to use them",
            f"{planned - alive:,}",
        )
        return True
    return False


class PeakWatch:
    """Compares the peak of CUDA's allocator in a step, forward and backward, with the budget.

    What happens between steps (evaluation, other models) does not count. The statistics are the
    user's and are never reset, so a step whose peak is below an earlier one is not noticed.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._device: torch.device | None = None
        #: The peak of the last step, if it exceeded the budget.
        self.over: int | None = None

    def read(self, model: Any) -> int | None:
        """The peak so far; None if the model is not on a CUDA device."""
        if not torch.cuda.is_initialized() or not isinstance(model, nn.Module):
            return None
        if self._device is None:
            devices = {parameter.device for parameter in model.parameters()}
            on_cuda = [device for device in devices if device.type == "cuda"]
            self._device = min(on_cuda, key=str, default=torch.device("cpu"))
        return None if self._device.type != "cuda" else _peak_on(self._device)

    def compare(self, output: Any, before: int) -> None:
        """Compare when the backward of ``output`` ends. ``before``: the peak before the step."""

        def compare() -> None:
            assert self._device is not None
            peak = _peak_on(self._device)
            if peak > before and peak > self._budget:
                self.over = peak

        when_backward_reaches(output, lambda: at_end_of_backward(compare))


def _peak_on(device: torch.device) -> int:
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    peak: int = stats["allocated_bytes"]["all"]["peak"]
    return peak
