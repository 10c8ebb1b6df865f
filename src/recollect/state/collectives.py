"""Results of communication between processes, kept from forward for the rerun.

``SyncBatchNorm`` gathers the statistics of all processes in forward. To do so again in a rerun
would cost a round of communication, and would hang if the other processes did not rerun at the same
moment. Its results are small, so they are kept.
"""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.modes import DispatchMode
from recollect._torch.ops import OpOverload
from recollect._torch.pytree import tree_leaves
from recollect.errors import CheckpointError

__all__ = ["CollectivePlayer", "CollectiveRecorder"]

#: The op, what it wrote, and what it returned.
_Entry = tuple[Any, list[torch.Tensor], Any]


def _is_collective(func: Any) -> bool:
    # Not by exact type: ops that take objects (the process group) are of a type of their own.
    return isinstance(func, OpOverload) and func.namespace == "c10d"


def _written(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that a collective writes to: its first argument, by convention."""
    return [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]


class CollectiveRecorder(DispatchMode):
    """Runs in forward and keeps the results of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[_Entry] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_collective(func):
            _wait(out)
            self.entries.append((func, [tensor.clone() for tensor in _written(args)], out))
        return out


def _wait(out: Any) -> None:
    """Let the current stream wait for what a collective writes."""
    for item in out if isinstance(out, tuple) else (out,):
        if not isinstance(item, (torch.Tensor, list)) and hasattr(item, "wait"):
            item.wait()


class CollectivePlayer(DispatchMode):
    """Runs in a rerun and gives the results again, in their order."""

    def __init__(self, recorder: CollectiveRecorder) -> None:
        super().__init__()
        self._entries = recorder.entries
        self._position = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _is_collective(func):
            return func(*args, **(kwargs or {}))
        if self._position >= len(self._entries) or self._entries[self._position][0] is not func:
            raise CheckpointError(
                f"the recomputation of a region communicates with other processes ({func}) where "
                "its forward did not: its code depends on something that has changed since."
            )
        _, written, out = self._entries[self._position]
        self._position += 1
        for target, value in zip(_written(args), written, strict=True):
            target.copy_(value)
        return out
