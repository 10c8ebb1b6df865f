"""What a profiler of memory saw, with the addresses of the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType


class MemoryChange(NamedTuple):
    """A block that was allocated or freed."""

    time: int  #: in nanoseconds
    address: int
    nbytes: int  #: negative if it was freed


def memory_changes(results: Any) -> list[MemoryChange]:
    """The blocks of host memory that were allocated or freed, in order.

    ``results``: what a profiler found (``kineto_results``).
    """
    # Where times are equal, the order of the tree counts.
    return sorted(_changes(results.experimental_event_tree()), key=lambda change: change.time)


def _changes(tree: list[Any]) -> Iterator[MemoryChange]:
    host, ahead = torch.device("cpu"), tree[::-1]
    while ahead:
        event = ahead.pop()
        ahead += event.children[::-1]
        if event.tag == _EventType.Allocation and event.extra_fields.device == host:
            fields = event.extra_fields
            yield MemoryChange(event.start_time_ns, fields.ptr, fields.alloc_size)
