"""A recording: what one call of a region did, which later calls are checked against."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from recollect._torch.tensors import UnsupportedTensor
from recollect.replay.function_call import FunctionCall, OutsideTensor
from recollect.replay.recorded_graph import RecordedGraph
from recollect.replay.region_schedule import RegionSchedule

__all__ = ["Recording"]


class Recording:
    """One recorded call.

    Args:
        graph: Its ops and values.
        calls: The functions that it called.
        outsides: The tensors that it did not make, by number.
        writes_outside: Whether it wrote to one of their storages.
        stores_all: Whether everything that the policy keeps is offloaded.
        reason: Why it was not recorded to its end, if it was not.
    """

    def __init__(
        self,
        graph: RecordedGraph,
        calls: list[FunctionCall],
        outsides: dict[int, OutsideTensor],
        writes_outside: bool,
        stores_all: bool,
        reason: str | None,
    ) -> None:
        self.graph = graph
        self.calls = calls
        self.outsides = outsides
        self._stores_all = stores_all
        #: Whether it matters which outside tensors share a storage.
        self.shares_memory = writes_outside or any(o.twin for o in outsides.values())
        #: The metadata that depends on data.
        self.shapes = [call.metadata for call in calls if call.depends_on_data]
        self.reason = reason
        #: False if that is a tensor which the engine does not support.
        self.is_supported = not isinstance(reason, UnsupportedTensor)
        #: What a later call is checked against, step by step, once there is one.
        self.expected: Any = None

    def is_like(self, other: Recording) -> bool:
        """Whether both called the same functions."""
        pairs = zip(self.calls, other.calls, strict=False)
        return len(self.calls) == len(other.calls) and all(a.is_like(b) for a, b in pairs)

    @cached_property
    def schedule(self) -> RegionSchedule:
        """What later calls hold."""
        return RegionSchedule(self.graph, self.calls, stores_all=self._stores_all)
