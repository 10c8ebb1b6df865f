"""Collectives of a region: a rerun gets their results instead of running them again."""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.modes import DispatchMode
from recollect._torch.ops import OpOverload
from recollect.errors import CheckpointError
from recollect.policy.op_info import op_info, tensors_in


def _is_collective(func: Any) -> bool:
    # Not by exact type: ops that take objects (the process group) are of a type of their own.
    return isinstance(func, OpOverload) and func.namespace == "c10d"


def _written(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that a collective writes to: its first argument, by convention."""
    return tensors_in(args[:1])


class CollectiveRecorder(DispatchMode):
    """Runs in forward and keeps the results of collectives (``SyncBatchNorm``) for the rerun.

    Running them again would hang if the other processes did not rerun at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        #: The op, what it wrote, and what it returned.
        self.entries: list[tuple[Any, list[torch.Tensor], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = op_info(func).call(*args, **(kwargs or {}))
        if _is_collective(func):
            # Let the current stream wait for the results of the collective.
            for item in out if isinstance(out, tuple) else (out,):
                if not isinstance(item, (torch.Tensor, list)) and hasattr(item, "wait"):
                    item.wait()
            self.entries.append((func, [tensor.clone() for tensor in _written(args)], out))
        return out


class CollectivePlayer(DispatchMode):
    """Runs in a rerun and returns the results again, in their order."""

    def __init__(self, recorder: CollectiveRecorder) -> None:
        super().__init__()
        self._entries = iter(recorder.entries)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _is_collective(func):
            return op_info(func).call(*args, **(kwargs or {}))
        recorded, written, out = next(self._entries, (None, [], None))
        if recorded is not func:
            raise CheckpointError(
                f"the recomputation of a region communicates with other processes ({func}) where "
                "its forward did not: its code depends on something that has changed since."
            )
        for target, value in zip(_written(args), written, strict=True):
            target.copy_(value)
        return out
