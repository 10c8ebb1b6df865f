"""How much of what a model returned is still in memory when backward reaches it.

A training loop may hold the output of the model through backward, or not: that is a matter of the
loop, which a plan has to assume something of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any
from weakref import ref

import torch

from recollect._torch.autograd import at_end_of_backward
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key
from recollect.checks.place import warn_user
from recollect.errors import PlanWarning

__all__ = ["at_end_of_backward_of", "tell_of_output", "watch_output"]

_Tensor = torch.Tensor
_log = logging.getLogger("recollect")
#: The part of a budget that is worth a line in a log.
_WORTH = 1e-3


def watch_output(output: Any, tell: Callable[[int, int], None]) -> None:
    """Have ``tell`` called once, when backward first reaches ``output``.

    With the bytes of ``output`` that are in memory by then, and with all of them. What the loss has
    saved of it has been freed at that moment, unless the graph is retained. Holds nothing of it.
    """
    storages: dict[int, tuple[Any, int]] = {}
    for tensor in _tensors(output):
        key = storage_key(tensor)
        if key is not None:
            storage = tensor.untyped_storage()
            storages[key] = ref(storage), storage.nbytes()

    def reached() -> None:
        found = [*storages.values()]
        alive = sum(nbytes for storage, nbytes in found if storage() is not None)
        tell(alive, sum(nbytes for _, nbytes in found))

    if storages:
        _when_backward_reaches(output, reached)


def at_end_of_backward_of(output: Any, act: Callable[[], None]) -> None:
    """Have ``act`` called once, when the backward is over that first reaches ``output``."""
    _when_backward_reaches(output, lambda: at_end_of_backward(act))


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

    Args:
        alive: Bytes of the output that are in memory when backward reaches it.
        planned: The same, of the step that was planned.
        budget: Bytes.
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
