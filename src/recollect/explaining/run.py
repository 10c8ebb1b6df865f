"""Watches one forward, and finds who holds each storage and why others were freed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from recollect._torch.autograd import graph_nodes, packed_by, saved_tensor_hooks_active
from recollect._torch.modes import DispatchMode
from recollect._torch.ops import op_name
from recollect._torch.pytree import tree_leaves
from recollect.checks.names import module_of, name_in
from recollect.checks.place import Names, Place, hide_own_frames
from recollect.explaining.regions import (
    ReentrantRegion,
    Region,
    ReplayRegion,
    RerunRegion,
    StorageTable,
    TrackedStorage,
    storages_of,
    tensors_in,
)
from recollect.observer import observing
from recollect.policy.op_info import op_info
from recollect.policy.op_info import tensors_in as op_tensors
from recollect.policy.policy_call import Ruling
from recollect.replay.recording_cache import recordings_preserved
from recollect.report.explanation import AUTOGRAD, ELSEWHERE, RESULT, Explanation
from recollect.report.rows import RegionCall, Row
from recollect.rerun.selective.ledger import KeptCall
from recollect.settings import is_recomputing
from recollect.state.inputs import check_arguments, inference_fault
from recollect.state.reachable import Reachable
from recollect.state.snapshot import Snapshot
from recollect.store.offload_batch import OffloadBatch, OffloadedTensor
from recollect.store.transfers import Composite, OnDevice, OnHost

_OFFLOAD_INPUTS = "offload_inputs"
_STAYS = "stays where it is"

#: Fate, reason and region.
_Finding = tuple[str, str, Region | None]
#: An offloaded part of a storage: handle, reason and region.
_Offload = tuple[Any, str, Region]


def explain(function_or_module: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Run one forward, and report what stays in memory until backward, and why.

    For each result of an op the report says whether it is kept (and by which rule of a policy),
    offloaded, recomputed, or held as the input of a checkpointed region. Forward runs once, with
    grad enabled, and once more if the replay engine has not recorded its regions yet. Everything
    that it changes is restored, and no graph is left.

    Args:
        function_or_module: What to run: the model, or a function that also computes the loss.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Example::

        print(recollect.explain(model, x))
    """
    if not callable(function_or_module):
        raise TypeError(
            f"function_or_module should be callable, but got {type(function_or_module).__name__}. "
            "Pass the model, or a function such as lambda: loss(model(x), y)"
        )
    try:
        with recordings_preserved():
            watcher, rows = _forward(function_or_module, args, kwargs)
            if any(
                isinstance(each, ReplayRegion) and each.is_rehearsal for each in watcher.regions
            ):
                # A region was recorded for the first time: later calls hold other tensors.
                watcher, rows = _forward(function_or_module, args, kwargs)
    except Exception as error:
        hide_own_frames(error)
        raise
    calls = [RegionCall(each.name, each.engine, tuple(each.notes)) for each in watcher.regions]
    return Explanation(rows, tuple(calls))


def _forward(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Watcher, tuple[Row, ...]]:
    """Run forward, and restore everything that it changes."""
    check_arguments(args, kwargs)
    with Snapshot({"function": function, "arguments": (args, kwargs)}) as snapshot:
        roots = Reachable(function, [*args, *kwargs.values()]).modules
        watcher = Watcher(roots)
        watcher.storages.add_foreign([*snapshot.tensors, *tensors_in((args, kwargs))])
        with torch.inference_mode(False), torch.enable_grad(), snapshot.log(), _watched_by(watcher):
            result = copy_context().run(_called, function, args, kwargs)
        return watcher, _rows_of(watcher, result)


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ``function``. Says which of both has a tensor that autograd cannot save."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        parameters = [*function.parameters()] if isinstance(function, nn.Module) else []
        for name, tensors in (("model", parameters), ("an argument", tensors_in((args, kwargs)))):
            if (fault := inference_fault(error, tensors)) is not None:
                raise RuntimeError(f"{name}: {fault}") from error
        raise
    except TypeError as error:
        if len(args) == 1 and type(args[0]) in (tuple, dict) and hasattr(error, "add_note"):
            form = "*batch" if type(args[0]) is tuple else "**batch"
            error.add_note(
                "recollect: explain calls the model with its own arguments, unlike plan, which "
                f"takes a {type(args[0]).__name__} for them: recollect.explain(model, {form})"
            )
        raise


@contextmanager
def _watched_by(watcher: Watcher) -> Iterator[None]:
    before, observing.observer = observing.observer, watcher
    try:
        with watcher:
            yield
    finally:
        observing.observer = before


# --- the ops and regions of the forward -----------------------------------------------------------

#: By engine.
_REGIONS: dict[str, Any] = {
    each.engine: each for each in (ReplayRegion, ReentrantRegion, RerunRegion)
}

#: Makes a tensor from Python numbers: its argument is as new as its result.
_FRESH = "aten::lift_fresh"


class Watcher(DispatchMode):
    """The mode of an explained forward, and the `RegionObserver` of its regions.

    The mode is entered before any region, so it sees each op after the modes of regions have.
    """

    only_watches = True

    def __init__(self, roots: list[nn.Module]) -> None:
        super().__init__()
        self.storages = StorageTable()
        #: The regions that have been entered, in their order.
        self.regions: list[Region] = []
        #: Those that are running, the outermost first.
        self._running: list[Region] = []
        #: Why replay fell back to rerun for the next region.
        self._fallback: list[str] = []
        self._roots = roots
        self._prefix = type(roots[0]).__name__ + ": " if len(roots) == 1 else ""
        self._names: Names = WeakKeyDictionary()

    # --- ops --------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if op_name(func) != _FRESH:
            # Before the op, which may give a tensor another storage.
            self.storages.add_foreign(op_tensors([*args, *(kwargs or {}).values()]))
        out = op_info(func).call(*args, **(kwargs or {}))
        # Results of a rerun inside forward belong to no region: they are freed with the rerun.
        regions = [] if is_recomputing() else self._running
        for region in regions:
            region.ops += 1
        made = self.storages.add(op_tensors(out), func)
        path = self._path() if made else ""
        for storage in made:
            storage.path = path
            storage.regions = tuple((region, region.ops) for region in regions)
        for region in regions:
            region.note_op(func, made)
        return out

    def _path(self) -> str:
        path = Place(sys._getframe(1)).path(self._names)
        # Without the name of the model, which all paths have in common.
        return path.removeprefix(self._prefix) if self._prefix else path

    # --- regions ----------------------------------------------------------------------------------

    @contextmanager
    def region(
        self, engine: str, function: Callable[..., Any], inputs: Any, source: Any
    ) -> Iterator[None]:
        if is_recomputing() or not torch.is_grad_enabled():
            yield
            return
        region: Region = _REGIONS[engine](self._name(function), source)
        if engine == "rerun":
            region.notes += self._fallback
            self._fallback.clear()
        if not saved_tensor_hooks_active():
            region.inputs = self.storages.find(tensors_in(inputs))
        self.regions.append(region)
        self._running.append(region)
        try:
            yield
        finally:
            self._running.pop()
        region.end(self.storages)

    def _name(self, function: Callable[..., Any]) -> str:
        """The name of a region: its module's path in the model, if it has one."""
        module = module_of(function)
        if module is not None:
            if any(module is root for root in self._roots):
                return type(module).__name__
            names = (name_in(root, module) for root in self._roots)
            return next(filter(None, names), type(module).__name__)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        name = name.rpartition("<locals>.")[2]
        path = self._path()
        return f"{name} in {path}" if path else name

    def packing(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if is_recomputing() or not self._running:
            return pack
        region = self._running[-1]
        pack = region.packing(pack)

        def note_and_pack(tensor: torch.Tensor) -> Any:
            region.last_save = region.ops
            for storage in self.storages.find([tensor]):
                storage.saved = True
            return pack(tensor)

        return note_and_pack

    def decided(self, op: Any, out: Any, ruling: Ruling, entry: KeptCall | None) -> None:
        if is_recomputing() or not self._running:
            return
        reason = ruling.reason
        if ruling.keeps and entry is None:
            reason = f"{reason}, but it has to run again"
        for storage in self.storages.find(tree_leaves(out)):
            if storage.op is op:
                storage.ruling = reason
                if entry is not None:
                    storage.entries.append((reason, ref(entry)))
        if entry is not None:
            entry.reason = reason

    def offloaded(
        self, batch: OffloadBatch, tensor: torch.Tensor, offloaded: OffloadedTensor
    ) -> None:
        for storage in self.storages.find([tensor]):
            storage.offloads.append((ref(offloaded), batch))

    def fell_back(self, reason: str) -> None:
        if not is_recomputing():
            self._fallback[:] = [f"left to the rerun engine: {reason}"]


# --- who holds what -------------------------------------------------------------------------------


def _rows_of(watcher: Watcher, result: Any) -> tuple[Row, ...]:
    """The rows of the forward that returned ``result``."""
    account = _Account(watcher, result)
    rows = [row for storage in watcher.storages.all for row in account.rows(storage)]
    for node, tensor in account.unseen.values():
        count = sum(storage.nbytes() for storage in storages_of(tensor))
        shape = tuple(tensor.shape)
        rows.append(Row("", node, "kept", count, 0.0, AUTOGRAD, shape, tensor.dtype))
    for region in watcher.regions:
        if region.is_alive and region.rng_bytes:
            why, count = "for the same random numbers", region.rng_bytes
            described = (count,), torch.uint8, region.name
            rows.append(Row(region.name, "(random state)", "kept", count, 0.0, why, *described))
    return tuple(rows)


class _Account:
    def __init__(self, watcher: Watcher, result: Any) -> None:
        self._senders = {id(region.batch): region for region in watcher.regions}
        #: The ids of the storages that the graph and the result hold.
        self._graph: set[int] = set()
        self._result = {id(s) for tensor in tensors_in(result) for s in storages_of(tensor)}
        #: Storages that no op was seen to allocate, with the node that saved them.
        self.unseen: dict[int, tuple[str, torch.Tensor]] = {}
        for node, tensor in _saved_by_graph(result):
            storages = storages_of(tensor)
            self._graph |= set(map(id, storages))
            if any(map(watcher.storages.is_new, storages)):
                self.unseen[id(storages[0])] = node, tensor.detach()

    def rows(self, storage: TrackedStorage) -> Iterator[Row]:
        """The rows of ``storage``: who holds it or why it was freed, and its copy in a store."""
        if storage.bytes == 0:
            return
        offloads = self._offloads(storage)
        moved = [each for each in offloads if not _stays(storage, each[0])]
        if storage.storage() is not None:
            found = self._holder(storage, offloads)
            if found is not None:
                yield _row(storage, *found)
        elif not moved:
            yield from _freed(storage)
        if moved:
            _, reason, region = moved[0]
            yield _row(storage, "offloaded", reason, region)

    def _holder(self, storage: TrackedStorage, offloads: list[_Offload]) -> _Finding | None:
        """Who holds a storage that is alive; None if only its copy to the host does."""
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
        address = id(storage.storage())
        outside = RESULT if address in self._result else ELSEWHERE
        outside = AUTOGRAD if address in self._graph else outside
        return None if is_leaving and outside is ELSEWHERE else ("kept", outside, None)

    def _offloads(self, storage: TrackedStorage) -> list[_Offload]:
        found = []
        for reference, batch in storage.offloads:
            offloaded, region = reference(), self._senders.get(id(batch))
            if offloaded is not None and region is not None:
                is_own = storage.is_made_in(region)
                reason = storage.ruling or "" if is_own else _OFFLOAD_INPUTS
                found.append((offloaded.handle, reason, region))
        return found


def _stays(storage: TrackedStorage, handle: Any) -> bool:
    """Whether the store did not copy: ``handle`` holds ``storage`` itself."""
    if isinstance(handle, Composite):
        return any(_stays(storage, part) for part in handle.handles.values())
    tensor = handle.tensor if isinstance(handle, OnDevice) else handle
    if not isinstance(tensor, torch.Tensor):
        return False
    return any(each is storage.storage() for each in storages_of(tensor))


def _freed(storage: TrackedStorage) -> Iterator[Row]:
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


def _row(
    storage: TrackedStorage, fate: str, reason: str, region: Region | None, count: int | None = None
) -> Row:
    return Row(
        path=storage.path,
        op=op_name(storage.op).replace("::", "."),
        fate=fate,
        bytes=storage.bytes if count is None else count,
        reason=reason,
        shape=storage.shape,
        dtype=storage.dtype,
        region=None if region is None else region.name,
    )


def _saved_by_graph(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors saved in the graph of ``result``, each with the name of its node."""
    for node in graph_nodes(tensor.grad_fn for tensor in tensors_in(result)):
        held = packed_by(node)
        if isinstance(node, BackwardCFunction):
            held = [*held, *vars(node).values()]  # put on the context by a custom function
        for tensor in tensors_in(held):
            yield node.name(), tensor
