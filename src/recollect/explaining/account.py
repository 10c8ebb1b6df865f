"""Once forward is over: who holds each piece of memory, and what became of those that are gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from recollect._torch.ops import op_name
from recollect.explaining.graph import saved_by_graph
from recollect.explaining.memory import Memory, storages_of, tensors_in
from recollect.explaining.region import Region
from recollect.explaining.regions import OFFLOAD_INPUTS, Observer
from recollect.explaining.rows import AUTOGRAD, ELSEWHERE, RESULT, Row
from recollect.store.handles import Composite, OnDevice, OnHost

__all__ = ["rows_of"]

_STAYS = "stays where it is"

#: Fate, reason and region.
_Finding = tuple[str, str, Region | None]


class _Holders:
    """What the graph and the result hold: the ids of storages."""

    def __init__(self, observer: Observer, result: Any) -> None:
        self.graph: set[int] = set()
        #: Memory that no op was seen to make, with the node that saved it.
        self.unseen: dict[int, tuple[str, torch.Tensor]] = {}
        memories = observer.watcher.memories
        for node, tensor in saved_by_graph(result):
            self.graph |= {id(storage) for storage in storages_of(tensor)}
            if memories.has_new(tensor):
                self.unseen[id(storages_of(tensor)[0])] = node, tensor.detach()
        self.result = {id(s) for tensor in tensors_in(result) for s in storages_of(tensor)}


def rows_of(observer: Observer, result: Any) -> tuple[Row, ...]:
    """The rows of the forward that returned ``result``."""
    holders = _Holders(observer, result)
    rows = [row for memory in observer.watcher.memories.all for row in _rows(memory, holders)]
    rows += [_unseen_row(node, tensor) for node, tensor in holders.unseen.values()]
    rows += [_rng_row(region) for region in observer.all if region.is_alive and region.rng_bytes]
    return tuple(rows)


def _rows(memory: Memory, holders: _Holders) -> Iterator[Row]:
    if memory.bytes == 0:
        return
    moved = [parcel for parcel in _parcels(memory) if not _stays(memory, parcel[0])]
    if memory.is_alive:
        found = _as_input(memory) or _by_rule(memory) or _outside(memory, holders)
        if found is not None:
            yield _row(memory, *found, memory.bytes)
    elif not moved:
        yield from _gone(memory)
    if moved:
        _, reason, region = moved[0]
        yield _row(memory, "offloaded", reason, region, memory.bytes)


# --- memory that is there -------------------------------------------------------------------------


def _as_input(memory: Memory) -> _Finding | None:
    """Whether a region holds it to be called again. First, since no policy would change that."""
    region = memory.input_of
    if region is not None and region.is_alive:
        return "input", f"input of {region.name}", region
    for reason, region in _staying(memory):
        if reason == OFFLOAD_INPUTS:
            return "input", f"input of {region.name}: {OFFLOAD_INPUTS}, but {_STAYS}", region
    return None


def _by_rule(memory: Memory) -> _Finding | None:
    if memory.kept is not None and memory.kept[1].is_alive:
        return "kept", *memory.kept
    for reason, region in _staying(memory):
        return "kept", f"{reason}, but {_STAYS}", region
    return None


def _outside(memory: Memory, holders: _Holders) -> _Finding | None:
    """Who holds what no region does; None if it goes as soon as it is copied."""
    storage = id(memory.storage())
    if storage in holders.graph:
        return "kept", AUTOGRAD, None
    if storage in holders.result:
        return "kept", RESULT, None
    is_leaving = any(isinstance(handle, OnHost) for handle, _, _ in _parcels(memory))
    return None if is_leaving else ("kept", ELSEWHERE, None)


# --- memory that is gone --------------------------------------------------------------------------


def _gone(memory: Memory) -> Iterator[Row]:
    """Memory that an op in a region made, and that was freed."""
    region = _innermost(memory)
    if region is None:
        return
    if memory.let_go is not None:
        yield _row(memory, "not held", memory.let_go, region, memory.bytes)
    elif any(each.runs_again(number) for each, number in memory.numbers):
        spared = memory.bytes if memory.saved or region.is_blind else 0
        yield _row(memory, "recomputed", memory.ruling or region.otherwise, region, spared)


def _innermost(memory: Memory) -> Region | None:
    return memory.numbers[-1][0] if memory.numbers else None


# --- memory in stores -----------------------------------------------------------------------------


def _parcels(memory: Memory) -> list[tuple[Any, str, Region]]:
    """What stores hold of ``memory``: handle, reason and region."""
    alive = [(parcel(), reason, region) for parcel, reason, region in memory.parcels]
    return [(p.handle, why or memory.ruling or "", r) for p, why, r in alive if p is not None]


def _staying(memory: Memory) -> list[tuple[str, Region]]:
    """Of what was to be sent away, what was not: reason and region."""
    return [(why, region) for handle, why, region in _parcels(memory) if _stays(memory, handle)]


def _stays(memory: Memory, handle: Any) -> bool:
    """Whether ``handle`` of a store is ``memory`` itself, where it is."""
    if isinstance(handle, Composite):
        return any(_stays(memory, part) for part in handle.handles.values())
    tensor = handle.tensor if isinstance(handle, OnDevice) else handle
    if not isinstance(tensor, torch.Tensor):
        return False
    return any(storage is memory.storage() for storage in storages_of(tensor))


# --- rows -----------------------------------------------------------------------------------------


def _row(memory: Memory, fate: str, reason: str, region: Region | None, count: int) -> Row:
    name = None if region is None else region.name
    op = op_name(memory.op).replace("::", ".")
    return Row(memory.path, op, memory.shape, memory.dtype, count, fate, reason, name)


def _unseen_row(node: str, tensor: torch.Tensor) -> Row:
    count = sum(storage.nbytes() for storage in storages_of(tensor))
    return Row("", node, tuple(tensor.shape), tensor.dtype, count, "kept", AUTOGRAD, None)


def _rng_row(region: Region) -> Row:
    count = region.rng_bytes
    reason = "for the same random numbers"
    return Row(
        region.name, "(random state)", (count,), torch.uint8, count, "kept", reason, region.name
    )
