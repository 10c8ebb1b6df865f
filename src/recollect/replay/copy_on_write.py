"""After a difference: what is held must survive writes that the recording does not know of."""

from __future__ import annotations

from typing import Any

from recollect._torch.modes import DispatchMode
from recollect.policy.op_info import op_info
from recollect.replay.rematerialize import Recall

__all__ = ["Protector"]


class Protector(DispatchMode):
    """Has a copy made of what is held before an op writes to it."""

    def __init__(self, recall: Recall) -> None:
        super().__init__()
        self._recall = recall

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        info = op_info(func)
        kwargs = kwargs or {}
        if info.writes:
            for tensor in info.written(args, kwargs):
                self._recall.before_write(tensor)
        return info.call(*args, **kwargs)
