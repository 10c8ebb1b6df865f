"""Traces one step: every op that ran, the storages it allocated, and when these were freed (P2).

`TraceMode` watches the step. `StepTrace` is the result and holds no tensor: `build` makes a graph
of it.

Storages are watched through weak references, which do not prolong their lives. Memory that ops
allocate inside their kernels is not seen here, but measured for each kind of op, see `prices`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from recollect._torch.autograd import (
    backward_keeps_graph,
    current_graph_task,
    current_node_number,
    without_history,
)
from recollect._torch.dtensors import has_dtensors, local_tensor
from recollect._torch.fsdp import Shards
from recollect._torch.groups import MESSAGES
from recollect._torch.modes import DispatchMode, active_saved_tensor_hooks, no_function_modes
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import finds_shapes, run_ops_themselves, storage_key
from recollect.checks.place import source_line
from recollect.planning.recording.batch import tensors_of_batch
from recollect.planning.recording.prices import OpPrice, Prices
from recollect.policy.op_info import op_info
from recollect.replay.recorded_graph import copying, tensors_of

_Tensor = torch.Tensor
#: The file that calls the model while it is traced.
_CALLER = str(Path(__file__).with_name("record.py"))
#: How many events a step may have at most, and for each event of its forward: a loop may keep the
#: output of a model, and never go backward.
_MOST_EVENTS, _TIMES = 10_000, 50


@dataclass(slots=True)
class TracedOp:
    """One op that ran. Views cost and allocate nothing, and are left out."""

    price: OpPrice = field(init=False)
    op: int = -1  #: its number among the ops of all regions; -1 if it is not one of them
    #: The storages that it allocated, by place in its result.
    allocated: dict[tuple[int, ...], int] = field(default_factory=dict)
    #: Since the last op: the saved tensors that backward unpacked, those that autograd released,
    #: and the storages that were freed.
    unpacked: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    #: And those of a graph that is retained which backward has unpacked and no longer uses.
    returned: list[int] = field(default_factory=list)
    #: And the storages whose tensor is gone: at most the schedule still holds them.
    dropped: list[int] = field(default_factory=list)
    is_backward: bool = False  #: whether backward had begun
    backward: int = 0  #: which backward ran it; 0: none
    #: The storage of its first argument, if it adds tensors without a graph.
    adds_to: int | None = None
    #: Bytes that no op has allocated, before it ran and after: gathered parameters.
    gathered: tuple[int, int] = (0, 0)
    #: The line of the model that called it, such as ``model.py:12``; empty for ops of backward.
    source: str = ""


@dataclass(slots=True)
class StepTrace:
    """A traced step. Storages and saved tensors are known by their numbers."""

    events: list[TracedOp] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  #: by storage: its bytes
    #: By saved tensor: its storage; None if the step did not allocate that.
    saved: list[int | None] = field(default_factory=list)
    #: The storages of what forwards and units returned: the loop, or the model, may hold them.
    outputs: set[int] = field(default_factory=set)
    #: The storages that were there before it.
    earlier: range = range(0)
    #: Whether tensors were sent to another process, or came from one.
    has_messages: bool = False
    #: The most bytes that one collective of the model has taken and returned.
    largest_collective: int = 0
    #: After the last op: the saved tensors that were released, and the storages that were freed.
    released: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)


def _is_meta(leaf: Any) -> bool:
    device = leaf.device if isinstance(leaf, _Tensor) else leaf
    return isinstance(device, torch.device) and device.type == "meta"


def _nbytes(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, _Tensor))


class SavedHandle:
    """Stands in autograd's graph for a tensor that it saved."""

    __slots__ = ("__weakref__", "number", "packed")

    def __init__(self, number: int, packed: Any) -> None:
        self.number = number
        self.packed = packed


class TraceMode(DispatchMode):
    """Traces a step, whose ops are priced by ``prices``.

    ``shards``: of the model, if it is sharded. Its gathered parameters come and go without an op.
    """

    def __init__(self, prices: Prices, shards: Shards | None = None) -> None:
        super().__init__()
        self._prices = prices
        self._shards = shards
        self._passes_meta = prices.device.type != "meta"
        self._trace = StepTrace()
        #: The next op, for what happens before it.
        self._next = TracedOp()
        #: What a node has unpacked of a graph that is retained: it lets go of it when it is over.
        self._lent: list[int] = []
        self._node = (-1, -1)
        self._tensors: dict[int, Any] = {}
        self._is_backward = False
        #: Whether ops are not traced now, and after how many events no more are.
        self.is_paused = False
        self.limit = sys.maxsize
        #: How many ops of regions have begun, how many earlier regions have, and the function that
        #: counts those of the region that is running.
        self._begun = self._first = 0
        self._count_ops: Callable[[], int] | None = None
        #: Its hook for saved tensors; and whether ops of a region have run inside of other hooks.
        self._unpack: Callable[..., Any] | None = None
        self.has_other_hooks = False
        #: By key of a storage that the step allocated, and by saved tensor: a weak reference to it
        #: or to its handle, and the number of the storage.
        self._storages: dict[int, tuple[Any, int]] = {}
        self._saved: dict[int, Any] = {}
        #: What a backward unpacked that makes a graph of its own: weak references to storages, each
        #: with the saved tensor.
        self._held: list[tuple[Any, int]] = []

    def watch(self, tensors: Iterable[_Tensor]) -> None:
        """Before the step: notice when it frees ``tensors``, which are there already."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key is not None and key not in self._storages:
                self._add_storage(tensor, key)
        self._trace.earlier = range(len(self._trace.sizes))

    def begin_region(self, count_ops: Callable[[], int], unpack: Callable[..., Any]) -> None:
        """A forward, or a unit of one, begins, whose ops ``count_ops`` counts.

        ``unpack``: the hook by which backward gets what autograd saves in it.
        """
        self._count_ops, self._unpack = count_ops, unpack

    def end_region(self) -> None:
        """The region has ended or failed."""
        if self._count_ops is not None:
            self._first += self._count_ops()
        # The hook refers to this object, and to what forward holds.
        self._begun, self._count_ops, self._unpack = self._first, None, None

    def finish(self) -> StepTrace:
        """Stop watching. Returns the trace."""
        if self._shards is not None:  # whose first allocation is by an op, and counts as gathered
            for key in self._shards.gathered_storages() & self._storages.keys():
                self._trace.sizes[self._storages[key][1]] = 0
        self._trace.released = self._next.released
        self._trace.released += [number for storage, number in self._held if storage() is not None]
        self._trace.freed = self._next.freed
        self._held.clear()
        self._storages.clear()
        self._saved.clear()
        self._tensors.clear()
        return self._trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or copying.is_active:
            return op_info(func).call(*args, **kwargs)
        if has_dtensors(types):
            return NotImplemented
        if finds_shapes() or run_ops_themselves(types):
            return func(*args, **kwargs)
        with no_function_modes():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = -1
        if self._count_ops is not None and self._first + self._count_ops() > self._begun:
            number, self._begun = self._begun, self._first + self._count_ops()
            hooks = active_saved_tensor_hooks()
            self.has_other_hooks |= hooks is not None and hooks[1] is not self._unpack
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, _Tensor)]
        if self._passes_meta and any(map(_is_meta, leaves)):
            return func(*args, **kwargs)  # of a compiler, and without memory
        inputs = {storage_key(tensor) for tensor in tensors}
        gathered = self._gathered()
        price, result = self._prices.run(func, args, kwargs)
        if price is not None:
            backward = current_graph_task() + 1
            self._is_backward |= backward > 0
            trace, op = self._trace, self._next
            op.price, op.op = price, number
            trace.has_messages |= price.name in MESSAGES
            info = op_info(func)
            if info.is_asynchronous:  # not those of FSDP, whose buffers are known
                trace.largest_collective = max(trace.largest_collective, _nbytes((args, result)))
            elif info.communicates and number >= 0:  # it writes to its arguments
                trace.largest_collective = max(trace.largest_collective, _nbytes(args))
            op.is_backward, op.backward = self._is_backward, backward
            op.gathered = gathered, self._gathered()
            self._leave_node()
            if number >= 0:
                op.source = source_line(sys._getframe(1), _CALLER)
            self._next = TracedOp()
            trace.events.append(op)
            self.is_paused |= len(trace.events) >= self.limit
            for path, tensor in tensors_of(result):
                key = storage_key(tensor)
                if key is not None and key not in inputs and key not in self._storages:
                    made = op.allocated[path] = self._add_storage(tensor, key)
                    self._tensors[made] = ref(tensor, partial(self._drop, made))
            if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
                op.adds_to = self._storage_of(args[0])
        return result

    def _gathered(self) -> int:
        return 0 if self._shards is None else self._shards.gathered_bytes()

    def note_output(self, output: Any) -> None:
        """Note what a forward, or a unit of one, returned, in objects too."""
        storages = map(self._storage_of, tensors_of_batch((output,), {}))
        self._trace.outputs |= {storage for storage in storages if storage is not None}

    def note_end(self) -> None:
        """Forward is over: from here on, limit the number of events."""
        self.limit = _MOST_EVENTS + _TIMES * len(self._trace.events)

    @property
    def saved_so_far(self) -> int:
        """How many tensors autograd has saved."""
        return len(self._trace.saved)

    def _storage_of(self, tensor: _Tensor) -> int | None:
        """The number of the storage of ``tensor``; None if the step did not allocate it."""
        key = storage_key(tensor)
        known = None if key is None else self._storages.get(key)
        return None if known is None else known[1]

    def _add_storage(self, tensor: _Tensor, key: int) -> int:
        number = len(self._trace.sizes)
        storage = tensor.untyped_storage()
        self._trace.sizes.append(storage.nbytes())
        self._storages[key] = ref(storage, partial(self._free, key)), number
        return number

    def _drop(self, number: int, _: Any) -> None:
        del self._tensors[number]
        self._next.dropped.append(number)

    def _free(self, key: int, _: Any) -> None:
        self._next.freed.append(self._storages.pop(key)[1])

    @contextmanager
    def _paused(self) -> Iterator[None]:
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    # --- saved tensors ----------------------------------------------------------------------------

    def pack(self, pack: Callable[[_Tensor], Any], tensor: _Tensor) -> SavedHandle:
        """The hook that autograd calls to save a tensor."""
        trace, number = self._trace, len(self._trace.saved)
        packed = pack(tensor)
        with no_function_modes():  # a custom function saves outside of all functions of torch
            if type(packed) is list and packed[0] is tensor and not tensor.requires_grad:
                # Held by the schedule, as an alias: else nothing would tell when others drop it.
                packed[0] = without_history(tensor)
            trace.saved.append(self._storage_of(tensor))
        handle = SavedHandle(number, packed)
        self._saved[number] = ref(handle, lambda _: self._next.released.append(number))
        return handle

    def unpack(self, unpack: Callable[[Any], _Tensor], handle: SavedHandle) -> _Tensor:
        """The hook that backward calls to get it back: the same tensor, or a recomputed one."""
        self._is_backward = True
        number = handle.number
        self._next.unpacked.append(number)
        self._leave_node()
        with self._paused():
            tensor = unpack(handle.packed)
        if torch.is_grad_enabled():
            # The graph that this backward makes may hold it longer than that of forward does.
            untyped = local_tensor(tensor).untyped_storage()
            storage = ref(untyped, lambda _: self._next.released.append(number))
            self._held.append((storage, number))
        elif backward_keeps_graph():
            self._lent.append(number)
        return tensor

    def _leave_node(self) -> None:
        """Note what the last node of backward had unpacked, if it is over."""
        node = current_node_number()
        if node != self._node:
            self._next.returned += self._lent
            self._lent, self._node = [], node
