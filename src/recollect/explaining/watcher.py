"""The dispatch mode under which the forward runs that is explained.

It is entered before any region, so each op comes here last, after the modes of regions have had it:
whatever they keep is known here by then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from recollect._torch.modes import DispatchMode
from recollect._torch.ops import op_name
from recollect._torch.pytree import tree_leaves
from recollect.checks.place import Names, Place
from recollect.explaining.memory import Memories, Memory
from recollect.explaining.region import Region
from recollect.settings import is_recomputing

__all__ = ["Watcher"]

#: Makes a tensor of what Python code has written: its argument is as new as its result.
_FRESH = "aten::lift_fresh"


class Watcher(DispatchMode):
    """Notes the memory that ops make, with the module and the regions they ran in."""

    def __init__(self, roots: list[nn.Module]) -> None:
        super().__init__()
        self.memories = Memories()
        #: Those that are being run, the outermost first.
        self.regions: list[Region] = []
        self._prefix = type(roots[0]).__name__ + ": " if len(roots) == 1 else ""
        self._names: Names = WeakKeyDictionary()
        self._muted = False

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Look away: what happens is the work of a store."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def path(self) -> str:
        """The module that is running."""
        path = Place(sys._getframe(1)).path(self._names)
        # The name of the model would be all that the paths have in common.
        return path.removeprefix(self._prefix) if self._prefix else path

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._muted and op_name(func) != _FRESH:
            # Before the op, which may give a tensor another memory.
            self.memories.add_foreign(_tensors((args, kwargs)))
        out = func(*args, **kwargs) if kwargs else func(*args)
        if not self._muted:
            self._note(func, out)
        return out

    def _note(self, op: Any, out: Any) -> None:
        # What a rerun inside of forward makes is of no region: that is over with the rerun.
        regions = [] if is_recomputing() else self.regions
        for region in regions:
            region.ops += 1
        made = self._made(op, out)
        for memory in made:
            memory.numbers = tuple((region, region.ops) for region in regions)
        for region in regions:
            if region.seen is not None:
                region.seen.append((op, region.ops, made))

    def _made(self, op: Any, out: Any) -> list[Memory]:
        results = [each for each in _tensors(out) if self.memories.has_new(each)]
        path = self.path() if results else ""
        return [memory for tensor in results for memory in self.memories.add(tensor, op, path)]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
