"""What is written down of a region: the ops it ran, and the values they read and made.

Values are in single-assignment form. A `Buffer` is what one memory holds at one time: writing to
the memory makes the next buffer. A tensor is a `View` of a buffer, so a view costs nothing to have
again, and whoever keeps one view of a memory has all of them. Running an `Op` again makes the
buffers that it made. Ops and buffers know each other by number, as a `graph.release.Dataflow`.

Nothing here holds a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import torch

__all__ = [
    "NEEDS_CARE",
    "Buffer",
    "Layout",
    "Op",
    "Tape",
    "View",
    "Views",
    "copy_of_memory",
    "is_whole",
    "layout_of",
    "tensors_of",
    "view_of",
]

#: Size, strides and offset (in elements) of a tensor, its dtype, and the offset in bytes. Offsets
#: count from the first tensor that was seen of the memory: where that begins may differ per call.
Layout = tuple[torch.Size, tuple[int, ...], int, torch.dtype, int]


def layout_of(tensor: torch.Tensor, start: int) -> Layout:
    """The layout of ``tensor``; ``start``: at how many bytes the first tensor begins."""
    dtype = tensor.dtype
    size = dtype.itemsize
    offset = int(tensor.storage_offset()) * size - start
    return tensor.shape, tensor.stride(), offset // size, dtype, offset


def view_of(tensor: torch.Tensor, own: Layout, layout: Layout) -> torch.Tensor:
    """The tensor of ``layout`` on the memory of ``tensor``, which is of the layout ``own``."""
    if layout is own:
        return tensor
    size, stride, offset, dtype, start = layout
    if dtype is own[3]:
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset - own[2])
    start += int(tensor.storage_offset()) * own[3].itemsize - own[4]
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    storage: Any = tensor.untyped_storage()
    return view.set_(storage, start // dtype.itemsize, size, stride)


def copy_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on a copy of its whole memory."""
    storage: Any = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def tensors_of(out: Any, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensors that an op returns, each with where in ``out`` it is."""
    if isinstance(out, torch.Tensor):
        return [(path, out)]
    if isinstance(out, (tuple, list)):
        return [found for n, each in enumerate(out) for found in tensors_of(each, (*path, n))]
    return []


def is_whole(layout: Layout, nbytes: int) -> bool:
    """Whether a tensor of ``layout`` is all of a memory of ``nbytes`` bytes, each once."""
    size, strides, _, dtype, _ = layout
    expected = 1
    for stride, length in sorted(zip(strides, size, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return expected * dtype.itemsize == nbytes


class Buffer:
    """What one memory holds at one time."""

    __slots__ = (
        "device",
        "is_last",
        "is_output",
        "is_spoilt",
        "is_wanted",
        "layout",
        "memory",
        "nbytes",
        "number",
        "op",
        "outside",
        "unsure",
    )

    def __init__(
        self, number: int, memory: int, layout: Layout, device: torch.device, nbytes: int
    ) -> None:
        self.number = number
        #: Which memory: buffers of one memory follow each other.
        self.memory = memory
        #: Of the first tensor that was seen of the memory.
        self.layout = layout
        self.device = device
        self.nbytes = nbytes
        #: The number of the op that makes it, -1 if it was there before.
        self.op = -1
        #: The number of the tensor outside that it is, if it is one.
        self.outside: int | None = None
        #: Whether the memory was not written to after this.
        self.is_last = True
        #: Whether autograd refuses to use what it saved of it, or should: it was written to.
        self.is_spoilt = False
        #: Whether an op has read it, or autograd has saved it.
        self.is_wanted = False
        #: Whether the region returns it.
        self.is_output = False
        #: Why its content cannot be had again, if it cannot: somebody unseen may write to it.
        self.unsure: str | None = None


class View:
    """A tensor, as an argument of an op or as autograd saved it."""

    __slots__ = ("_way", "buffer", "layout")

    def __init__(self, buffer: Buffer, layout: Layout) -> None:
        self.buffer = buffer
        self.layout = layout
        #: Found when it is first needed: a recording has far more views than are.
        self._way: Callable[[torch.Tensor], torch.Tensor] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that this is, where ``tensor`` is that of the buffer's own layout."""
        own = self.buffer.layout
        if self.layout is own:
            return tensor
        way = self._way
        if way is None:
            way = self._way = _way(own, self.layout)
        return way(tensor)


def _way(own: Layout, layout: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    """The quickest way from a tensor of the layout ``own`` to one of ``layout``."""
    size, stride, offset, dtype, _ = layout
    if dtype is not own[3] or offset != own[2]:
        return partial(view_of, own=own, layout=layout)
    if len(size) == 2 and (size[::-1], stride[::-1]) == own[:2]:
        return methodcaller("t")
    return methodcaller("as_strided", size, stride)


class Views(list[Any]):
    """A list or tuple among the arguments of an op that has views in it."""

    __slots__ = ("kind",)

    def __init__(self, items: list[Any], kind: type) -> None:
        super().__init__(items)
        self.kind = kind


#: The slots of an op that takes more to run than filling in its arguments.
NEEDS_CARE: list[tuple[int, View]] = []


class Op:
    """One call of an op."""

    __slots__ = (
        "args",
        "arrivals",
        "call",
        "flags",
        "fresh",
        "generator",
        "grad_enabled",
        "keep",
        "key",
        "kwargs",
        "later",
        "makes",
        "number",
        "only",
        "op",
        "paths",
        "planned",
        "reads",
        "ruling",
        "slots",
        "writes",
    )

    def __init__(self, number: int, op: Any, call: Any, flags: Any = None) -> None:
        self.number = number
        self.op = op
        self.call = call
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        #: The buffers whose content it reads.
        self.reads: list[int] = []
        #: The buffers that it makes on new memory, and where each is in what it returns.
        self.makes: list[int] = []
        self.paths: list[tuple[int, ...]] = []
        #: The buffer it writes to, and the buffer that it becomes.
        self.writes: list[tuple[int, int]] = []
        #: Those of the former that it overwrites without reading them.
        self.fresh: frozenset[int] = frozenset()
        #: The switches that it ran under, if they were not those of the region.
        self.flags = flags
        #: Some kernels look at the grad mode.
        self.grad_enabled = torch.is_grad_enabled()
        #: What it draws from, if it does.
        self.generator: torch.Generator | None = None
        #: Why it is not to be run again, and why not after a call that does not record.
        self.keep: str | None = None
        self.later: str | None = None
        #: What the policy said.
        self.ruling: Any = None
        #: By a plan: what it is called there, which of those that it makes are held, and how many
        #: of those offloaded before are freed after its function.
        self.key: str | None = None
        self.planned: frozenset[int] | None = None
        self.arrivals = 0
        #: Where among the arguments there are views; None until it is run again.
        self.slots: list[tuple[int, View]] | None = None
        #: What it makes, if it returns that and nothing else; -1 if not.
        self.only = -1

    def make(self, path: tuple[int, ...], buffer: Buffer) -> None:
        """Note that it makes ``buffer``, and where in what it returns that is."""
        buffer.op = self.number
        self.makes.append(buffer.number)
        self.paths.append(path)

    @property
    def results(self) -> list[int]:
        """The buffers that it makes."""
        return self.makes + [new for _, new in self.writes]

    @property
    def held(self) -> list[int]:
        """The results that a plan has held."""
        if self.planned is None:
            return []
        made = [value for place, value in enumerate(self.makes) if place in self.planned]
        return made + [new for _, new in self.writes]

    def prepare(self) -> list[tuple[int, View]]:
        """Find out how to run it."""
        values = [*self.args, *self.kwargs.values()]
        if (
            self.writes
            or self.generator is not None
            or self.flags is not None
            or any(type(value) is Views for value in values)
            or any(type(value) is View for value in self.kwargs.values())
        ):
            self.slots = NEEDS_CARE
        else:
            self.slots = [(n, each) for n, each in enumerate(self.args) if type(each) is View]
            self.only = self.makes[0] if self.paths == [()] else -1
        return self.slots

    def never_again(self, reason: str, ruling: Any) -> None:
        """Have its results kept."""
        if ruling is not self.ruling:
            self.ruling, self.planned = ruling, None
        self.keep = reason
        self.args, self.kwargs = [], {}


class Tape:
    """All of it: a `graph.release.Dataflow`."""

    __slots__ = ("chains", "memories", "ops", "values")

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Buffer] = []
        #: By number of a buffer: the ops that make it from what later calls keep.
        self.chains: dict[int, list[int]] = {}
        self.memories = 0

    def new(self, tensor: torch.Tensor, nbytes: int, start: int) -> Buffer:
        """The first buffer of a memory, of which ``tensor``, beginning at ``start``, is seen."""
        self.memories += 1
        layout = layout_of(tensor, start)
        return self._add(Buffer(len(self.values), self.memories, layout, tensor.device, nbytes))

    def after(self, last: Buffer) -> Buffer:
        """The buffer that follows ``last`` in its memory."""
        last.is_last = False
        number = len(self.values)
        return self._add(Buffer(number, last.memory, last.layout, last.device, last.nbytes))

    def until(self, count: int) -> Tape:
        """Its first ``count`` ops."""
        part = Tape()
        part.ops, part.values = self.ops[:count], self.values
        return part

    def maker_of(self, buffer: Buffer) -> Op | None:
        """The op that makes ``buffer``."""
        return None if buffer.op < 0 else self.ops[buffer.op]

    def _add(self, buffer: Buffer) -> Buffer:
        self.values.append(buffer)
        return buffer
