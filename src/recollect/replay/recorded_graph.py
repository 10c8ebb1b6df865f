"""The graph that a region records: the ops that it ran, and the values they read and make.

Values are in single-assignment form. A `RecordedValue` is the content of a storage between two
writes: a write makes the next value of the storage. A tensor is a `View` of a value, so views cost
nothing to recompute, and holding one view of a storage holds them all. Ops and values refer to each
other by number, as in every `graph.release.Dataflow`.

Nothing here holds a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from recollect._torch.dtensors import wrapped

#: Size, strides and offset (in elements) of a tensor, its dtype, and the offset in bytes. Offsets
#: are relative to the first tensor seen on the storage, whose own offset may differ per call.
Layout = tuple[torch.Size, tuple[int, ...], int, torch.dtype, int]


def layout_of(tensor: torch.Tensor, start: int) -> Layout:
    """The layout of ``tensor``, whose storage was first seen at the byte offset ``start``."""
    dtype = tensor.dtype
    size = dtype.itemsize
    first: Any = tensor.storage_offset()
    offset = first * size - start
    return tensor.shape, tensor.stride(), offset // size, dtype, offset


def view_of(tensor: torch.Tensor, own: Layout, layout: Layout) -> torch.Tensor:
    """The tensor of ``layout`` on the storage of ``tensor``, whose layout is ``own``."""
    if layout is own:
        return tensor
    size, stride, offset, dtype, start = layout
    if dtype is own[3]:
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset - own[2])
    start += int(tensor.storage_offset()) * own[3].itemsize - own[4]
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    storage: Any = tensor.untyped_storage()
    return view.set_(storage, start // dtype.itemsize, size, stride)


class _Copying(threading.local):
    #: Whether this thread makes a copy that is no part of the user's step.
    is_active = False


copying = _Copying()


def copy_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on a copy of its whole storage."""
    was_active, copying.is_active = copying.is_active, True
    try:
        storage: Any = tensor.untyped_storage().clone()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    finally:
        copying.is_active = was_active


def tensors_of(out: Any, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensors that an op returns, each with its position in ``out``."""
    if isinstance(out, torch.Tensor):
        return [(path, out)]
    if isinstance(out, (tuple, list)):
        return [found for n, each in enumerate(out) for found in tensors_of(each, (*path, n))]
    return []


def is_whole(layout: Layout, nbytes: int) -> bool:
    """Whether a tensor of ``layout`` covers each byte of a storage of ``nbytes`` once."""
    size, strides, _, dtype, _ = layout
    expected = 1
    for stride, length in sorted(zip(strides, size, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return expected * dtype.itemsize == nbytes


@dataclass(eq=False, slots=True)
class RecordedValue:
    """The content of a storage between two writes."""

    number: int
    #: The number of the storage.
    storage_number: int
    #: The layout of the first tensor seen on the storage.
    layout: Layout
    device: torch.device
    nbytes: int
    #: The number of the op that makes it; -1 if no op does.
    op: int = -1
    #: The number of the outside tensor, if it is the value of one.
    outside: int | None = None
    #: Whether the storage was not written to after it.
    is_last: bool = True
    #: Whether saved tensors of it must be refused, because it was overwritten.
    is_stale: bool = False
    #: Whether an op has read it, or autograd has saved it.
    is_wanted: bool = False
    #: Whether the region returns it.
    is_output: bool = False
    #: Why ops that read it must not run again, if so: unseen code may write to it.
    unsure: str | None = None


class View:
    """A tensor, as an argument of an op or as autograd saved it.

    ``spec``: of a ``DTensor``, whose local tensor has the layout.
    """

    __slots__ = ("is_own", "layout", "maker", "spec", "value")

    def __init__(self, value: RecordedValue, layout: Layout, spec: Any = None) -> None:
        self.value = value
        self.layout = layout
        self.spec = spec
        #: Whether it is the tensor with the value's own layout.
        self.is_own = layout is value.layout and spec is None
        #: Made on first use: most views of a recording are never used.
        self.maker: Callable[[torch.Tensor], torch.Tensor] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This view of ``tensor``, which has the value's own layout."""
        if self.is_own:
            return tensor
        return (self.maker or self.find_maker())(tensor)

    def find_maker(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The fastest function that makes this view from a tensor in the value's own layout."""
        own, layout, spec = self.value.layout, self.layout, self.spec
        size, stride, offset, dtype, _ = layout
        make: Callable[[torch.Tensor], torch.Tensor] = methodcaller("as_strided", size, stride)
        if layout is own or dtype is not own[3] or offset != own[2]:
            make = partial(view_of, own=own, layout=layout)
        elif len(size) == 2 and (size[::-1], stride[::-1]) == own[:2]:
            make = methodcaller("t")
        self.maker = make if spec is None else lambda tensor: wrapped(make(tensor), spec)
        return self.maker


class Views(list[Any]):
    """A list or tuple among the arguments of an op that contains views."""

    def __init__(self, items: list[Any], kind: type) -> None:
        super().__init__(items)
        self.kind = kind


_VIEWS = (View, Views)
_NO_VALUES: frozenset[int] = frozenset()
#: In `RecordedOp.paths`: the op returns one tensor, which is no item of a list.
_ONE_RESULT: list[tuple[int, ...]] = [()]

#: A tensor among the arguments of an op: its place, the number of its value, and the function that
#: makes the view; None if it has the value's own layout.
Fill = tuple[int, int, Callable[[torch.Tensor], torch.Tensor] | None]
#: In `RecordedOp.fills`: rerunning the op takes more than filling in its arguments.
NEEDS_CARE: list[Fill] = []


class RecordedOp:
    """One call of an op.

    A plain class: a dataclass with so many lists takes twice as long to make.
    """

    def __init__(self, number: int, op: Any, call: Any, flags: Any = None) -> None:
        self.number = number
        self.op = op
        self.call = call
        #: The flags that it ran under, if they differ from those of the region.
        self.flags = flags
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        #: The values that it reads.
        self.reads: list[int] = []
        #: The values that it makes on new storages, and the position of each in what it returns.
        self.makes: list[int] = []
        self.paths: list[tuple[int, ...]] = []
        #: For each storage that it writes to: the values before and after.
        self.writes: list[tuple[int, int]] = []
        #: The values that it overwrites without reading them.
        self.fresh: frozenset[int] = _NO_VALUES
        #: Some kernels read the grad mode.
        self.grad_enabled = torch.is_grad_enabled()
        #: The generator that it draws from, if any.
        self.generator: torch.Generator | None = None
        #: Why it must not run again, if so; and why it must not in checked calls only.
        self.keep: str | None = None
        self.later: str | None = None
        #: Whether it cannot run again because its arguments are gone.
        self.is_lost = False
        #: The ruling of the policy.
        self.ruling: Any = None
        #: In a plan: its key, the positions in ``makes`` of held values, and how many offloaded
        #: tensors are freed after its function.
        self.key: str | None = None
        self.planned: frozenset[int] | None = None
        self.arrivals = 0
        #: The tensors among its arguments; None until it first runs again.
        self.fills: list[Fill] | None = None
        #: If it makes a single value: that value, else -1. If it does so in place: the old value,
        #: else -1. The other values that it reads.
        self.only = -1
        self.old = -1
        self.others: Sequence[int] = ()

    def make(self, path: tuple[int, ...], value: RecordedValue) -> None:
        value.op = self.number
        self.makes.append(value.number)
        self.paths.append(path)

    @property
    def results(self) -> list[int]:
        return self.makes + [new for _, new in self.writes]

    @property
    def held(self) -> list[int]:
        """The results that a plan holds."""
        if self.planned is None:
            return []
        made = [value for place, value in enumerate(self.makes) if place in self.planned]
        return made + [new for _, new in self.writes]

    def prepare(self) -> list[Fill]:
        """Find out how to run it again."""
        is_inplace = bool(self.writes) and not self.makes and not self.fresh
        if (
            (self.writes and not (is_inplace and len(self.writes) == 1))
            or self.generator is not None
            or self.flags is not None
            or (self.kwargs and any(type(each) in _VIEWS for each in self.kwargs.values()))
        ):
            self.fills = NEEDS_CARE
            return self.fills
        fills: list[Fill] = []
        for place, each in enumerate(self.args):
            if type(each) is View:
                fills.append((place, each.value.number, None if each.is_own else each.find_maker()))
            elif type(each) is Views:
                self.fills = NEEDS_CARE
                return self.fills
        self.others = self.reads
        if is_inplace:
            self.old, self.only = self.writes[0]
            self.others = [number for number in self.reads if number != self.old]
        elif self.paths == _ONE_RESULT:
            self.only = self.makes[0]
        self.fills = fills
        return fills

    def hold_results(self, reason: str, ruling: Any) -> None:
        """Hold its results instead of recomputing them."""
        if ruling is not self.ruling:
            self.ruling, self.planned = ruling, None
        self.keep = reason

    def never_again(self, reason: str, ruling: Any) -> None:
        """Hold its results, and free its arguments: it cannot run again."""
        self.hold_results(reason, ruling)
        self.args, self.kwargs, self.is_lost = [], {}, True


@dataclass(eq=False, slots=True)
class RecordedGraph:
    """The recorded ops and values of a region, in the order of forward."""

    ops: list[RecordedOp] = field(default_factory=list)
    values: list[RecordedValue] = field(default_factory=list)
    #: How many storages there are.
    storages: int = 0

    def new(self, tensor: torch.Tensor, nbytes: int) -> RecordedValue:
        """The first value of a storage: ``tensor``, from whose beginning offsets are counted."""
        self.storages += 1
        layout = tensor.shape, tensor.stride(), 0, tensor.dtype, 0
        value = RecordedValue(len(self.values), self.storages, layout, tensor.device, nbytes)
        self.values.append(value)
        return value

    def after(self, last: RecordedValue) -> RecordedValue:
        last.is_last = False
        place = last.storage_number, last.layout, last.device, last.nbytes
        value = RecordedValue(len(self.values), *place)
        self.values.append(value)
        return value

    def until(self, count: int) -> RecordedGraph:
        return RecordedGraph(self.ops[:count], self.values, self.storages)

    def copy(self) -> RecordedGraph:
        """The same graph, to hold other results."""
        return RecordedGraph([copy(op) for op in self.ops], self.values, self.storages)

    def maker_of(self, value: RecordedValue) -> RecordedOp | None:
        return None if value.op < 0 else self.ops[value.op]

    def unsure_read(self, op: RecordedOp) -> str | None:
        """Why a value that ``op`` reads cannot be recomputed, if there is one."""
        for number in op.reads:
            if (unsure := self.values[number].unsure) is not None:
                return unsure
        return None

    def sources(
        self, number: int, held: Container[int], is_source: Callable[[RecordedOp], object]
    ) -> list[RecordedOp]:
        """The nearest ops behind a value for which ``is_source`` holds.

        The search stops at ``held`` values, except the given one.
        """
        found: list[RecordedOp] = []
        seen = {number}
        wanted = [number]
        while wanted:
            op = self.maker_of(self.values[wanted.pop()])
            if op is None:
                continue
            if is_source(op):
                found.append(op)
                continue
            for read in op.reads:
                if read not in seen and read not in held:
                    seen.add(read)
                    wanted.append(read)
        return found
