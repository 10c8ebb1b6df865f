"""Watching one step: every op that runs, and when each piece of memory is made and let go.

Storages are watched through weak references, so to watch them changes nothing of how long they
live. What ops allocate and free inside their kernels is not seen here, but measured once for each
kind of op; see `rates`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch

from recollect._torch.modes import DispatchMode, no_function_modes
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key
from recollect.planning.rates import Call, Rates
from recollect.planning.script import Script
from recollect.replay.tape import tensors_of

__all__ = ["Event", "Saved", "Trace"]

_Tensor = torch.Tensor


@dataclass(slots=True)
class Event:
    """One op that ran.

    Args:
        call: Which op, on tensors of which looks.
        op: The number of the op of the region that it is; -1 if it is none.
        made: The numbers of the memories that it made, by where each is in what it returned.
        asks: The saved tensors that backward asked for since the last op.
        freed: The memories that were let go before this op, and after the last one.
        ends: The saved tensors that were.
        is_backward: Whether backward had begun.
        sum_of: The memory of its first argument, if it is a sum of tensors.
    """

    call: Call
    op: int
    made: dict[tuple[int, ...], int] = field(default_factory=dict)
    asks: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    is_backward: bool = False
    sum_of: int | None = None


class Saved:
    """Stands in the graph for a tensor that autograd saved."""

    __slots__ = ("__weakref__", "number", "packed")

    def __init__(self, number: int, packed: Any) -> None:
        self.number = number
        self.packed = packed


class Trace(DispatchMode):
    """Notes the ops of a step. ``rates`` measures those that it has not met before.

    ``script`` is written besides.
    """

    def __init__(self, rates: Rates, script: Script) -> None:
        super().__init__()
        self.rates = rates
        self.script = script
        self.events: list[Event] = []
        #: By number of a memory: its bytes.
        self.sizes: list[int] = []
        #: Of each saved tensor: the number of its memory, None if that was there before.
        self.saved: list[int | None] = []
        #: What was asked for, freed and let go since the last op.
        self.asks: list[int] = []
        self.freed: list[int] = []
        self.ends: list[int] = []
        self.is_backward = False
        self.muted = False
        #: How many ops of the region have begun; what asks that.
        self._begun = 0
        self.count_ops: Callable[[], int] | None = None
        self._known: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.muted:
            return func(*args, **kwargs)
        with no_function_modes():
            return self._note(func, args, kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = -1
        if self.count_ops is not None and self.count_ops() > self._begun:
            number, self._begun = self._begun, self.count_ops()
        inputs = {
            storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Tensor)
        }
        entry = self.script.read(func, args, kwargs)
        call, out = self.rates.run(func, args, kwargs)
        if call is None:  # a view, which makes and costs nothing
            self.script.wrote(entry, out, -1, {})
            return out
        event = Event(call, number, asks=self.asks, freed=self.freed, ends=self.ends)
        event.is_backward = self.is_backward
        self.asks, self.freed, self.ends = [], [], []
        self.events.append(event)
        for path, tensor in tensors_of(out):
            key = storage_key(tensor)
            if key is not None and key not in inputs and key not in self._known:
                event.made[path] = self._add(tensor, key)
        if func is torch.ops.aten.add.Tensor:
            event.sum_of = self._number(args[0])
        self.script.wrote(entry, out, len(self.events) - 1, event.made)
        return out

    def _number(self, tensor: _Tensor) -> int | None:
        """The number of the memory of ``tensor``; None if it was there before."""
        key = storage_key(tensor)
        known = None if key is None else self._known.get(key)
        return None if known is None else known[1]

    def _add(self, tensor: _Tensor, key: int) -> int:
        number = len(self.sizes)
        storage = tensor.untyped_storage()
        self.sizes.append(storage.nbytes())
        self._known[key] = ref(storage, partial(self._free, key)), number
        self.script.begin(key)
        return number

    def _free(self, key: int, _: Any) -> None:
        self.script.end(key)
        self.freed.append(self._known.pop(key)[1])

    def pack(self, pack: Callable[[_Tensor], Any], tensor: _Tensor) -> Saved:
        """The hook that is called when autograd saves a tensor."""
        self.script.save(len(self.saved), tensor)
        saved = Saved(len(self.saved), pack(tensor))
        self.saved.append(self._number(tensor))
        self._watch(saved)
        return saved

    def _watch(self, saved: Saved) -> None:
        number = saved.number
        # The reference has to live as long as what it refers to.
        self._known[-1 - number] = ref(saved, lambda _: self.ends.append(number)), number

    def unpack(self, unpack: Callable[[Any], _Tensor], saved: Saved) -> _Tensor:
        """The hook by which autograd asks for it."""
        self.is_backward = True
        self.asks.append(saved.number)
        muted, self.muted = self.muted, True
        try:
            tensor = unpack(saved.packed)
        finally:
            self.muted = muted
        self.script.give(saved.number, tensor)
        return tensor
