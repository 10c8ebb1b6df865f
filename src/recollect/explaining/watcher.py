"""Watches one forward: the storages that ops allocate, and what regions do with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from recollect._torch.autograd import saved_tensor_hooks_active
from recollect._torch.modes import DispatchMode
from recollect._torch.ops import op_name
from recollect._torch.pytree import tree_leaves
from recollect.checks.names import module_of, name_in
from recollect.checks.place import Names, Place
from recollect.explaining.regions import (
    ReentrantRegion,
    Region,
    RerunRegion,
    StorageTable,
    tensors_in,
)
from recollect.explaining.replay import ReplayRegion
from recollect.policy.rulings import Ruling
from recollect.rerun.selective.ledger import KeptCall
from recollect.settings import is_recomputing
from recollect.store.offload_batch import OffloadBatch, OffloadedTensor

_REGIONS: dict[str, Callable[[str, Any], Region]] = {
    "replay": ReplayRegion,
    "reentrant": ReentrantRegion,
    "rerun": RerunRegion,
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
            self.storages.add_foreign(_tensors((args, kwargs)))
        out = func(*args, **kwargs) if kwargs else func(*args)
        # Results of a rerun inside forward belong to no region: they are freed with the rerun.
        regions = [] if is_recomputing() else self._running
        for region in regions:
            region.ops += 1
        made = self.storages.add(_tensors(out), func)
        path = self._path() if made else ""
        for storage in made:
            storage.path = path
            storage.regions = tuple((region, region.ops) for region in regions)
        for region in regions:
            region.note_op(func, made)
        return out

    def _path(self) -> str:
        """The module that is running."""
        path = Place(sys._getframe(1)).path(self._names)
        # Without the name of the model, which all paths have in common.
        return path.removeprefix(self._prefix) if self._prefix else path

    # --- regions ----------------------------------------------------------------------------------

    @contextmanager
    def region(
        self, engine: str, function: Callable[..., Any], inputs: Any, source: Any
    ) -> Iterator[None]:
        """The context of a region's forward."""
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
        """``pack``, which also notes each tensor that autograd saves."""
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
        """A policy has decided."""
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
        """A region has put ``tensor`` into a store."""
        for storage in self.storages.find([tensor]):
            storage.offloads.append((ref(offloaded), batch))

    def fell_back(self, reason: str) -> None:
        """Replay falls back to rerun for the next region."""
        if not is_recomputing():
            self._fallback[:] = [f"left to the rerun engine: {reason}"]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
