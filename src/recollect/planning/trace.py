"""The trace of one step: every op that ran, what it read and made, when storages were freed.

`Trace` is the mode that watches the step; `StepTrace` is what remains of it, without tensors. A
graph is built from it, and `rescale` finds from it what the same ops would make of another batch.

Storages are watched through weak references, which do not change how long they live. What ops
allocate inside their kernels is not seen here, but measured once for each kind of op; see `prices`.

A tensor is recognized by its identity, a saved one by the hooks it came through, any other by its
storage and layout. What no op of the step has made is *outside*: the batch, what the model and the
optimizer hold, and whatever else code can reach, such as targets of a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch

from recollect._torch.modes import DispatchMode, no_function_modes
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import name_of_storage, storage_key
from recollect.planning.prices import OpPrice, Prices
from recollect.policy.op_info import op_info
from recollect.replay.recorded_graph import tensors_of

__all__ = [
    "SAME",
    "WHOLE",
    "Ref",
    "StepTrace",
    "TensorLayout",
    "Trace",
    "TracedOp",
    "Unknown",
    "layout_of",
]

_Tensor = torch.Tensor

_Path = tuple[int, ...]

#: Stands for an op that gives the whole storage of a tensor as bytes: as storages are copied.
WHOLE = "the whole storage"
#: Stands for one that gives the same tensor on a storage that was not seen before.
SAME = "the same tensor"
_CONSTANTS = (
    *(type(None), bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class TensorLayout(NamedTuple):
    """A tensor without values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor among the arguments of an op, by its number in the trace."""

    number: int


class Unknown:
    """Stands for an unknown argument."""


@dataclass(slots=True)
class TracedOp:
    """One op that ran."""

    func: Any = None  #: the op; None: a tensor from outside was met that is none of the model's
    args: list[Any] = field(default_factory=list)  #: its arguments, with a `Ref` for each tensor
    kwargs: dict[str, Any] = field(default_factory=dict)  #: its keyword arguments
    reads: tuple[int, ...] = ()  #: the numbers of all tensors among them
    #: The tensors in its result, by place and number.
    outs: list[tuple[_Path, int]] = field(default_factory=list)
    #: What it costs; None: it makes a view, which costs and allocates nothing.
    price: OpPrice | None = None
    op: int = -1  #: the number of the op of the region; -1 if it is none of the region
    #: The storages that it allocated, by the place of each in its result.
    made: dict[_Path, int] = field(default_factory=dict)
    #: The saved tensors that backward read since the last op.
    asks: list[int] = field(default_factory=list)
    #: The storages that were freed since the last op.
    freed: list[int] = field(default_factory=list)
    #: The saved tensors that autograd released since the last op.
    ends: list[int] = field(default_factory=list)
    is_backward: bool = False  #: whether backward had begun
    sum_of: int | None = None  #: the storage of its first argument, if it is a sum of tensors
    #: The whole number that it read from a tensor for the code, if it did.
    number: int | None = None

    @property
    def seconds(self) -> float:
        """What it takes."""
        return 0.0 if self.price is None else self.price.seconds

    @property
    def workspace(self) -> int:
        """Bytes that it allocates beside its results."""
        return 0 if self.price is None else self.price.workspace


@dataclass(slots=True)
class StepTrace:
    """A step that was watched."""

    ops: list[TracedOp] = field(default_factory=list)  #: all ops, views too
    events: list[TracedOp] = field(default_factory=list)  #: those that are no views
    sizes: list[int] = field(default_factory=list)  #: by number of a storage: its bytes
    #: Of each saved tensor: the number of its storage, None if that was there before.
    saved: list[int | None] = field(default_factory=list)
    #: The saved tensors that autograd released after the last op.
    ends: list[int] = field(default_factory=list)
    #: By number of a tensor: its layout.
    layouts: list[TensorLayout | None] = field(default_factory=list)
    #: The numbers of the tensors of the batch, in their order.
    batch: list[int] = field(default_factory=list)
    #: The tensors that are neither made in the step nor of the batch, the model, the optimizer.
    outside: set[int] = field(default_factory=set)


def layout_of(tensor: _Tensor) -> TensorLayout | None:
    """The layout of ``tensor``; None if it is no memory with strides."""
    if tensor.layout is not torch.strided:
        return None
    return TensorLayout(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class SavedHandle:
    """Stands in autograd's graph for a tensor that it saved."""

    __slots__ = ("__weakref__", "number", "packed")

    def __init__(self, number: int, packed: Any) -> None:
        self.number = number
        self.packed = packed


class Trace(DispatchMode):
    """Watches a step, whose ops are priced by ``prices``.

    ``batch``: the tensors of the batch; ``static``: those that do not depend on it, as parameters.
    """

    def __init__(self, prices: Prices, batch: Sequence[_Tensor], static: Iterable[_Tensor]) -> None:
        super().__init__()
        self.prices = prices
        self.found = StepTrace()
        self._tensors = _Tensors(self.found, static)
        self.found.batch = [self._tensors.add(tensor) for tensor in batch]
        #: What was read and freed since the last op.
        self._asks: list[int] = []
        self._freed: list[int] = []
        self.is_backward = False
        self._is_muted = False
        #: How many ops of the region have begun, and the function that counts them.
        self._begun = 0
        self.count_ops: Callable[[], int] | None = None
        #: By storage that the step made: its number. And references to what stands for saved ones.
        self._storages: dict[int, tuple[Any, int]] = {}
        self._saved: dict[int, tuple[Any, int]] = {}

    def finish(self) -> StepTrace:
        """The step is over. Releases all tensors."""
        self._tensors = _Tensors(self.found, ())
        self._saved.clear()
        return self.found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_muted:
            return func(*args, **kwargs)
        with no_function_modes():
            return self._note(func, args, kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = -1
        if self.count_ops is not None and self.count_ops() > self._begun:
            number, self._begun = self._begun, self.count_ops()
        leaves = tree_leaves((args, kwargs))
        inputs = {storage_key(leaf) for leaf in leaves if isinstance(leaf, _Tensor)}
        op = self._tensors.read(func, args, kwargs)
        op.price, out = self.prices.run(func, args, kwargs)
        if op.price is not None:
            op.op, op.is_backward = number, self.is_backward
            op.asks, op.freed, op.ends = self._asks, self._freed, self.found.ends
            self._asks, self._freed, self.found.ends = [], [], []
            self.found.events.append(op)
            for path, tensor in tensors_of(out):
                key = storage_key(tensor)
                if key is not None and key not in inputs and key not in self._storages:
                    op.made[path] = self._add_storage(tensor, key)
            if func is torch.ops.aten.add.Tensor:
                op.sum_of = self._storage_of(args[0])
        self._tensors.wrote(op, out)
        return out

    def _storage_of(self, tensor: _Tensor) -> int | None:
        """The number of the storage of ``tensor``; None if it was there before."""
        key = storage_key(tensor)
        known = None if key is None else self._storages.get(key)
        return None if known is None else known[1]

    def _add_storage(self, tensor: _Tensor, key: int) -> int:
        number = len(self.found.sizes)
        storage = tensor.untyped_storage()
        self.found.sizes.append(storage.nbytes())
        self._storages[key] = ref(storage, partial(self._free, key)), number
        self._tensors.begin(key)
        return number

    def _free(self, key: int, _: Any) -> None:
        self._tensors.end(key)
        self._freed.append(self._storages.pop(key)[1])

    # --- saved tensors ----------------------------------------------------------------------------

    def pack(self, pack: Callable[[_Tensor], Any], tensor: _Tensor) -> SavedHandle:
        """The hook that is called when autograd saves a tensor."""
        found, number = self.found, len(self.found.saved)
        tensor_number = self._tensors.number(tensor)
        saved = SavedHandle(number, pack(tensor))
        found.saved.append(self._storage_of(tensor))
        self._saved[number] = ref(saved, lambda _: self.found.ends.append(number)), tensor_number
        return saved

    def unpack(self, unpack: Callable[[Any], _Tensor], saved: SavedHandle) -> _Tensor:
        """The hook that is called when backward reads it: that tensor, or a recomputed one."""
        self.is_backward = True
        self._asks.append(saved.number)
        is_muted, self._is_muted = self._is_muted, True
        try:
            tensor = unpack(saved.packed)
        finally:
            self._is_muted = is_muted
        if saved.number in self._saved and isinstance(tensor, _Tensor):
            self._tensors.recognize(tensor, self._saved[saved.number][1])
        return tensor


class _Tensors:
    """Recognizes the tensors of a step, and writes its ops."""

    def __init__(self, found: StepTrace, static: Iterable[_Tensor]) -> None:
        self._found = found
        self._static = {storage_key(tensor) for tensor in static}
        self._ids: dict[int, tuple[Any, int]] = {}
        #: By storage: the tensors on it that were seen, by their layout.
        self._storages: dict[int | None, dict[Any, int]] = {}
        self._watched: dict[int, Any] = {}

    def read(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedOp:
        """An op is about to run."""
        reads: list[int] = []
        # From the last one on: arguments that are read tell more than those that are written to,
        # which come first.
        template = [self._template(each, reads) for each in reversed(args)][::-1]
        named = {name: self._template(each, reads) for name, each in kwargs.items()}
        return TracedOp(func, template, named, tuple(reads))

    def wrote(self, op: TracedOp, out: Any) -> None:
        """It ran."""
        if type(out) is _Tensor and op_info(op.func).changes_memory:
            # It is on the storage of another one now, or on one that no op was seen to allocate.
            self._ids.pop(id(out), None)
            number = self.number(out)
            source = op.reads[:-1]  # what is on the storage that it was given
            op.func, op.args, op.kwargs = SAME, [], {}
            op.reads, op.outs = source[:1] or (number,), [((), number)]
        else:
            op.outs = [(path, self.add(tensor)) for path, tensor in tensors_of(out)]
        if type(out) is int and op_info(op.func).reads_number:
            op.number = out
        self._found.ops.append(op)

    def begin(self, key: int) -> None:
        """A storage was allocated: what was known under its name is gone."""
        self._storages[key] = {}

    def end(self, key: int) -> None:
        """A storage was freed."""
        self._storages.pop(key, None)
        self._watched.pop(key, None)

    def _template(self, value: Any, reads: list[int]) -> Any:
        if isinstance(value, _Tensor):
            number = self.number(value)
            reads.append(number)
            return Ref(number)
        if isinstance(value, (list, tuple)):
            return [self._template(each, reads) for each in value]
        if isinstance(value, torch.UntypedStorage):
            reads += [*self._storages.get(name_of_storage(value), {}).values()][:1]
            return Unknown()
        if isinstance(value, torch.Generator):
            return None  # no numbers are drawn in rescaling
        return value if isinstance(value, _CONSTANTS) else Unknown()

    # --- numbers of tensors -----------------------------------------------------------------------

    def recognize(self, tensor: _Tensor, number: int) -> None:
        """It is another object for a tensor that has a number."""
        self._ids[id(tensor)] = ref(tensor), number

    def add(self, tensor: _Tensor) -> int:
        """Give a new tensor a number."""
        number, layout = len(self._found.layouts), layout_of(tensor)
        self._found.layouts.append(layout)
        self.recognize(tensor, number)
        if layout is not None:
            on_storage = self._storages.setdefault(storage_key(tensor), {})
            on_storage[layout, int(tensor.storage_offset())] = number
        return number

    def number(self, tensor: _Tensor) -> int:
        """The number of a tensor, which may be a new one."""
        layout = layout_of(tensor)
        known = self._ids.get(id(tensor))
        if known is not None and known[0]() is tensor and self._found.layouts[known[1]] == layout:
            return known[1]
        key = storage_key(tensor)
        if layout is not None and self._storages.get(key):
            return self._number_on(key, tensor, layout)
        if key in self._static or (tensor.requires_grad and tensor.is_leaf):
            return self.add(tensor)
        number = self._add_stranger(tensor, key)
        self._found.outside.add(number)
        return number

    def _number_on(self, key: int | None, tensor: _Tensor, layout: TensorLayout) -> int:
        """The number of a tensor on a storage on which others are known."""
        on_storage, offset = self._storages[key], int(tensor.storage_offset())
        if (layout, offset) in on_storage:
            return on_storage[layout, offset]
        for (other, _), base in reversed(on_storage.items()):
            if other.dtype == layout.dtype:
                args = [Ref(base), list(layout.size), list(layout.stride), offset]
                return self._add_by(tensor, TracedOp(_AS_STRIDED, args, {}, (base,)))
            if layout.dtype is torch.uint8 and layout.size == (other.nbytes,):
                return self._add_by(tensor, TracedOp(WHOLE, [Ref(base)], {}, (base,)))
        return self._add_stranger(tensor, key)

    def _add_stranger(self, tensor: _Tensor, key: int | None) -> int:
        """A tensor of unknown origin."""
        if key is not None and key not in self._watched:
            # Only what the step makes is watched else. A freed storage's name is used again.
            self._watched[key] = ref(tensor.untyped_storage(), lambda _: self.end(key))
        return self._add_by(tensor, TracedOp())

    def _add_by(self, tensor: _Tensor, op: TracedOp) -> int:
        """A tensor that no op was seen to make: ``op`` could have made it."""
        number = self.add(tensor)
        op.outs.append(((), number))
        self._found.ops.append(op)
        return number


_AS_STRIDED = torch.ops.aten.as_strided.default
