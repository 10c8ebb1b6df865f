"""After a difference: what is held must survive writes that the recording does not know of."""

from __future__ import annotations

from typing import Any

from recollect._torch.modes import DispatchMode
from recollect.replay.kinds import kind_of
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
        kind = kind_of(func)
        kwargs = kwargs or {}
        if kind.facts.writes:
            for tensor in kind.written(args, kwargs):
                self._recall.before_write(tensor)
        return kind.call(*args, **kwargs)
