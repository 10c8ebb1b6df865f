"""The script of a step: every op that ran, and which earlier result each argument was.

Written while a step is traced, and read by `rescale` to find what the same ops would make of a
batch of another shape. Nothing here holds a tensor once the step is over: what is kept is looks
(shape, strides, dtype), numbers and constants.

A tensor is known again by its identity, what autograd had saved by the hooks it came through, and
anything else by its storage and layout. What nothing in the step has made is *outside*: the batch,
what the model and the optimizer hold, and whatever else code can get at, as targets of a loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from recollect._torch.tensors import name_of_storage, storage_key
from recollect.policy.op_info import op_info
from recollect.replay.tape import tensors_of

__all__ = ["SAME", "WHOLE", "Entry", "Look", "Ref", "Script", "Unknown", "look_of"]

_Tensor = torch.Tensor

#: Shape, strides and dtype of a tensor.
Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_Path = tuple[int, ...]

#: Stands for an op that gives the whole memory of a tensor, byte by byte: as storages are copied.
WHOLE = "the whole memory"
#: For one that gives a tensor as it is, on a memory that was not seen before.
SAME = "the same tensor"
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
        #: Of tensors that are neither made in the step nor of the batch, the model, the optimizer.
        self.outside: set[int] = set()
        #: By number of a memory: its bytes.
        self.sizes: list[int] = []
        self._static = {storage_key(tensor) for tensor in static}
        self._ids: dict[int, tuple[Any, int]] = {}
        #: By storage: the tensors on it that were seen, by their layout.
        self._storages: dict[int | None, dict[Any, int]] = {}
        self._watched: dict[int, Any] = {}
        self._saved: dict[int, int] = {}
        self.batch = [self._add(tensor) for tensor in batch]

    def close(self, sizes: list[int]) -> None:
        """The step is over, and made memories of these sizes. Lets go of all tensors."""
        self.sizes = list(sizes)
        self._ids, self._storages, self._watched, self._saved = {}, {}, {}, {}
        self._static = set()

    # --- what is seen -----------------------------------------------------------------------------

    def read(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Entry:
        """An op is about to run."""
        reads: list[int] = []
        # From the last one on: what is read tells more of what is met here first than what is
        # written to, which comes before it.
        template = [self._template(each, reads) for each in reversed(args)][::-1]
        named = {name: self._template(each, reads) for name, each in kwargs.items()}
        return Entry(op, template, named, tuple(reads))

    def wrote(self, entry: Entry, out: Any, event: int, made: dict[_Path, int]) -> None:
        """It ran."""
        if type(out) is _Tensor and op_info(entry.op).changes_memory:
            # It is on the memory of another one now, or on one that nobody was seen to make.
            self._ids.pop(id(out), None)
            number = self._number(out)
            source = entry.reads[:-1]  # what is on the storage that it was given
            entry = Entry(SAME, [], {}, source[:1] or (number,), [((), number)])
        else:
            entry.outs = [(path, self._add(tensor)) for path, tensor in tensors_of(out)]
        entry.event, entry.made = event, made
        if type(out) is int and op_info(entry.op).reads_number:
            entry.number = out
        self.entries.append(entry)

    def begin(self, key: int) -> None:
        """A storage was made: what was known of that name is gone."""
        self._storages[key] = {}

    def end(self, key: int) -> None:
        """A storage was let go."""
        self._storages.pop(key, None)
        self._watched.pop(key, None)

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
        if isinstance(value, torch.UntypedStorage):
            reads += [*self._storages.get(name_of_storage(value), {}).values()][:1]
            return Unknown()
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
        if number is not None:
            return number
        size, stride, dtype = look
        offset = int(tensor.storage_offset())
        for (other, _), base in reversed(on_storage.items()):
            if other[2] == dtype:
                args = [Ref(base), list(size), list(stride), offset]
                return self._add_view(tensor, torch.ops.aten.as_strided.default, args, base)
            if dtype is torch.uint8 and size == (_nbytes(other),):
                return self._add_view(tensor, WHOLE, [Ref(base)], base)
        return self._add_stranger(tensor)

    def _add_outside(self, tensor: _Tensor, key: int | None) -> int:
        is_weight = tensor.requires_grad and tensor.is_leaf
        if key in self._static or is_weight:
            return self._add(tensor)
        number = self._add_stranger(tensor)
        self.outside.add(number)
        return number

    def _add_stranger(self, tensor: _Tensor) -> int:
        """A tensor of which nobody knows where it comes from."""
        number = self._add(tensor)
        key = storage_key(tensor)
        if key is not None and key not in self._watched:
            # What the step makes its trace watches. When this one is gone its name means another.
            storage = tensor.untyped_storage()
            self._watched[key] = ref(storage, lambda _: self.end(key))
        self.entries.append(Entry(None, [], {}, (), [((), number)]))
        return number

    def _add_view(self, tensor: _Tensor, op: Any, args: list[Any], base: int) -> int:
        """A tensor that nobody was seen to make, on memory that is known."""
        number = self._add(tensor)
        self.entries.append(Entry(op, args, {}, (base,), [((), number)]))
        return number


def _nbytes(look: Look) -> int:
    return math.prod(look[0]) * look[2].itemsize
