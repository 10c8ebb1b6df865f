"""After forward: who holds each storage, and what became of those that are gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from recollect._torch.autograd import packed_by
from recollect._torch.ops import op_name
from recollect.explaining.storages import Region, TrackedStorage, storages_of, tensors_in
from recollect.explaining.watcher import Watcher
from recollect.report.explanation import AUTOGRAD, ELSEWHERE, RESULT
from recollect.report.rows import TensorRow
from recollect.store.handles import Composite, OnDevice, OnHost

__all__ = ["rows_of"]

_OFFLOAD_INPUTS = "offload_inputs"
_STAYS = "stays where it is"


def rows_of(watcher: Watcher, result: Any) -> tuple[TensorRow, ...]:
    """The rows of the forward that returned ``result``."""
    account = _Account(watcher, result)
    rows = [row for storage in watcher.storages.all for row in account.rows(storage)]
    rows += [_unseen_row(node, tensor) for node, tensor in account.unseen.values()]
    holding = [each for each in watcher.regions if each.is_alive and each.rng_bytes]
    return *rows, *map(_rng_row, holding)


#: Fate, reason and region.
_Finding = tuple[str, str, Region | None]
#: What a store holds of a storage: handle, reason and region.
_Offload = tuple[Any, str, Region]


class _Account:
    def __init__(self, watcher: Watcher, result: Any) -> None:
        self._senders = watcher.senders
        #: The ids of the storages that the graph and the result hold.
        self._graph: set[int] = set()
        self._result = {id(s) for tensor in tensors_in(result) for s in storages_of(tensor)}
        #: Storages that no op was seen to allocate, with the node that saved them.
        self.unseen: dict[int, tuple[str, torch.Tensor]] = {}
        for node, tensor in _saved_by_graph(result):
            self._graph |= {id(storage) for storage in storages_of(tensor)}
            if watcher.storages.has_new(tensor):
                self.unseen[id(storages_of(tensor)[0])] = node, tensor.detach()

    def rows(self, storage: TrackedStorage) -> Iterator[TensorRow]:
        """What there is to say of ``storage``."""
        if storage.bytes == 0:
            return
        offloads = self._offloads(storage)
        moved = [each for each in offloads if not _stays(storage, each[0])]
        if storage.is_alive:
            found = self._holder(storage, offloads)
            if found is not None:
                yield _row(storage, *found)
        elif not moved:
            yield from _freed(storage)
        if moved:
            _, reason, region = moved[0]
            yield _row(storage, "offloaded", reason, region)

    def _holder(self, storage: TrackedStorage, offloads: list[_Offload]) -> _Finding | None:
        """Who holds a storage that is there; None if it goes as soon as it is copied."""
        staying = [(why, region) for handle, why, region in offloads if _stays(storage, handle)]
        # Inputs first, since no policy would change that.
        region = storage.input_of
        if region is not None and region.is_alive:
            return "input", f"input of {region.name}", region
        for reason, region in staying:
            if reason == _OFFLOAD_INPUTS:
                return "input", f"input of {region.name}: {reason}, but {_STAYS}", region
        if storage.kept is not None and storage.kept[1].is_alive:
            return "kept", *storage.kept
        for reason, region in staying:
            return "kept", f"{reason}, but {_STAYS}", region
        is_leaving = any(isinstance(handle, OnHost) for handle, _, _ in offloads)
        outside = self._outside(id(storage.storage()))
        return None if is_leaving and outside is ELSEWHERE else ("kept", outside, None)

    def _outside(self, storage: int) -> str:
        """Who holds a storage that no region holds, by its id."""
        if storage in self._graph:
            return AUTOGRAD
        return RESULT if storage in self._result else ELSEWHERE

    def _offloads(self, storage: TrackedStorage) -> list[_Offload]:
        found = []
        for reference, batch in storage.offloads:
            offloaded, sender = reference(), batch()
            region = None if sender is None else self._senders.get(sender)
            if offloaded is not None and region is not None:
                is_own = storage.is_made_in(region)
                reason = storage.ruling or "" if is_own else _OFFLOAD_INPUTS
                found.append((offloaded.handle, reason, region))
        return found


def _stays(storage: TrackedStorage, handle: Any) -> bool:
    """Whether ``handle`` of a store is ``storage`` itself, where it is."""
    if isinstance(handle, Composite):
        return any(_stays(storage, part) for part in handle.handles.values())
    tensor = handle.tensor if isinstance(handle, OnDevice) else handle
    if not isinstance(tensor, torch.Tensor):
        return False
    return any(each is storage.storage() for each in storages_of(tensor))


def _freed(storage: TrackedStorage) -> Iterator[TensorRow]:
    """A storage that an op in a region allocated, and that was freed."""
    if not storage.regions:
        return
    region = storage.regions[-1][0]
    unread = (why for why, kept in storage.entries if kept() is None)  # dropped after forward
    reason = storage.not_held or next((f"{why}, but nothing needs it" for why in unread), None)
    if reason is not None:
        yield _row(storage, "not held", reason, region)
    elif any(each.runs_again(number) for each, number in storage.regions):
        is_spared = storage.saved or region.spares_all
        reason = storage.ruling or region.otherwise
        yield _row(storage, "recomputed", reason, region, storage.bytes if is_spared else 0)


# --- the graph of the result ----------------------------------------------------------------------


def _saved_by_graph(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that backward from ``result`` finds saved, each with the name of its node."""
    for node in _nodes(result):
        held = packed_by(node)
        if isinstance(node, BackwardCFunction):
            held = [*held, *vars(node).values()]  # put on the context by a custom function
        for tensor in tensors_in(held):
            yield node.name(), tensor


def _nodes(result: Any) -> Iterator[Any]:
    pending = [tensor.grad_fn for tensor in tensors_in(result)]
    # The nodes themselves: the Python object of a node that nobody holds is another every time.
    seen = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


# --- rows -----------------------------------------------------------------------------------------


def _row(
    storage: TrackedStorage, fate: str, reason: str, region: Region | None, count: int | None = None
) -> TensorRow:
    return TensorRow(
        path=storage.path,
        op=op_name(storage.op).replace("::", "."),
        fate=fate,
        bytes=storage.bytes if count is None else count,
        reason=reason,
        shape=storage.shape,
        dtype=storage.dtype,
        region=None if region is None else region.name,
    )


def _unseen_row(node: str, tensor: torch.Tensor) -> TensorRow:
    count = sum(storage.nbytes() for storage in storages_of(tensor))
    shape = tuple(tensor.shape)
    return TensorRow("", node, "kept", count, reason=AUTOGRAD, shape=shape, dtype=tensor.dtype)


def _rng_row(region: Region) -> TensorRow:
    return TensorRow(
        path=region.name,
        op="(random state)",
        fate="kept",
        bytes=region.rng_bytes,
        reason="for the same random numbers",
        shape=(region.rng_bytes,),
        dtype=torch.uint8,
        region=region.name,
    )
