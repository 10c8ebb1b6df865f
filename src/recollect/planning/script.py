"""The script of a step: every op that ran, and which earlier result each argument was.

Written while a step is traced, and read by `rescale` to find what the same ops would make of a
batch of another shape. Nothing here holds a tensor once the step is over: what is kept is looks
(shape, strides, dtype), numbers and constants.

A tensor is known again by its identity, what autograd had saved by the hooks it came through, and
anything else by its storage and layout. What nothing in the step has made is *outside*: the batch,
what the model and the optimizer hold, and whatever else code can get at, as targets of a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from recollect.engines.replay.tape import tensors_of
from recollect.torch_private import storage_key, takes_number

__all__ = ["Entry", "Look", "Ref", "Script", "Unknown", "look_of"]

_Tensor = torch.Tensor

#: Shape, strides and dtype of a tensor.
Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_Path = tuple[int, ...]

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor among the arguments of an op, by its number in the script."""

    number: int


class Unknown:
    """Stands for an argument of which nothing can be said."""


@dataclass(slots=True)
class Entry:
    """One op that ran.

    Args:
        op: Which; None: nothing ran, but a tensor was met that is outside, and none of the model.
        args: Its arguments, with a `Ref` for each tensor.
        kwargs: Those with names.
        reads: The numbers of all tensors among them.
        outs: Where in what it returned, and the number of the tensor that is there.
        made: Where in what it returned, and the number of the memory that it made.
        event: The number of its event in the trace; -1: a view, which is none.
        number: What it read from a tensor for the code to go on with, if that is a whole number.
    """

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    outs: list[tuple[_Path, int]] = field(default_factory=list)
    made: dict[_Path, int] = field(default_factory=dict)
    event: int = -1
    number: int | None = None


def look_of(tensor: _Tensor) -> Look | None:
    """The look of ``tensor``; None if it is no memory with strides."""
    if tensor.layout is not torch.strided:
        return None
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


class Script:
    """Written by `Trace`, op by op.

    Args:
        batch: The tensors of the batch.
        static: Those that are the same whatever the batch is: parameters, buffers, their state.
    """

    def __init__(self, batch: Sequence[_Tensor], static: Iterable[_Tensor]) -> None:
        self.entries: list[Entry] = []
        #: By number of a tensor: its look.
        self.looks: list[Look | None] = []
        #: The numbers of the tensors of the batch, in their order.
        self.batch: list[int] = []
        #: By number of a memory: its bytes.
        self.sizes: list[int] = []
        self._static = {storage_key(tensor) for tensor in static}
        self._ids: dict[int, tuple[Any, int]] = {}
        #: By storage: the tensors on it that were seen, by their layout.
        self._storages: dict[int | None, dict[Any, int]] = {}
        self._saved: dict[int, int] = {}
        self.batch = [self._add(tensor) for tensor in batch]

    def close(self, sizes: list[int]) -> None:
        """The step is over, and made memories of these sizes. Lets go of all tensors."""
        self.sizes = list(sizes)
        self._ids, self._storages, self._saved, self._static = {}, {}, {}, set()

    # --- what is seen -----------------------------------------------------------------------------

    def read(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Entry:
        """An op is about to run."""
        reads: list[int] = []
        template = [self._template(each, reads) for each in args]
        named = {name: self._template(each, reads) for name, each in kwargs.items()}
        return Entry(op, template, named, tuple(reads))

    def wrote(self, entry: Entry, out: Any, event: int, made: dict[_Path, int]) -> None:
        """It ran."""
        entry.event, entry.made = event, made
        entry.outs = [(path, self._add(tensor)) for path, tensor in tensors_of(out)]
        if type(out) is int and takes_number(entry.op):
            entry.number = out
        self.entries.append(entry)

    def begin(self, key: int) -> None:
        """A storage was made: what was known of that name is gone."""
        self._storages[key] = {}

    def end(self, key: int) -> None:
        """A storage was let go."""
        self._storages.pop(key, None)

    def save(self, saved: int, tensor: _Tensor) -> None:
        """Autograd saves a tensor."""
        self._saved[saved] = self._number(tensor)

    def give(self, saved: int, tensor: _Tensor) -> None:
        """It is given back: that tensor, or one that was made again."""
        number = self._saved.get(saved)
        if number is not None and isinstance(tensor, _Tensor):
            self._ids[id(tensor)] = ref(tensor), number

    def _template(self, value: Any, reads: list[int]) -> Any:
        if isinstance(value, _Tensor):
            number = self._number(value)
            reads.append(number)
            return Ref(number)
        if isinstance(value, (list, tuple)):
            return [self._template(each, reads) for each in value]
        if isinstance(value, torch.Generator):
            return None  # nothing is to be drawn
        return value if isinstance(value, _CONSTANTS) else Unknown()

    # --- which tensor is which --------------------------------------------------------------------

    def _add(self, tensor: _Tensor) -> int:
        number = len(self.looks)
        look = look_of(tensor)
        self.looks.append(look)
        self._ids[id(tensor)] = ref(tensor), number
        if look is not None:
            on_storage = self._storages.setdefault(storage_key(tensor), {})
            on_storage[look, int(tensor.storage_offset())] = number
        return number

    def _number(self, tensor: _Tensor) -> int:
        look = look_of(tensor)
        known = self._ids.get(id(tensor))
        if known is not None and known[0]() is tensor and self.looks[known[1]] == look:
            return known[1]
        key = storage_key(tensor)
        on_storage = self._storages.get(key)
        if look is None or not on_storage:
            return self._add_outside(tensor, key)
        number = on_storage.get((look, int(tensor.storage_offset())))
        return self._add_view(tensor, look, on_storage) if number is None else number

    def _add_outside(self, tensor: _Tensor, key: int | None) -> int:
        number = self._add(tensor)
        is_weight = tensor.requires_grad and tensor.is_leaf
        if key not in self._static and not is_weight:
            self.entries.append(Entry(None, [], {}, (), [((), number)]))
        return number

    def _add_view(self, tensor: _Tensor, look: Look, on_storage: dict[Any, int]) -> int:
        """A tensor that nobody was seen to make, on memory that is known."""
        base = next(reversed(on_storage.values()))
        size, stride, _ = look
        offset = int(tensor.storage_offset())
        args = [Ref(base), list(size), list(stride), offset]
        entry = Entry(torch.ops.aten.as_strided.default, args, {}, (base,))
        number = self._add(tensor)
        entry.outs = [((), number)]
        self.entries.append(entry)
        return number
