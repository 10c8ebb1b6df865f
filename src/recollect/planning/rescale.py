"""The graph of a step for a batch of another shape, from the script of the one that was traced.

None of the user's code runs. The ops of the script are asked what they would make of tensors of
other shapes, on the meta device, where there is no memory: that takes microseconds an op, and each
kind of call is asked about once. Ops whose arguments are as before are not asked. Sizes that were
computed by code are translated (`literals`); where that leaves a choice, and the choice turns out
not to fit with an op that follows, the next one is tried.

What the ops would allocate takes the place of what they did in the graph. Seconds and workspace
grow as the bytes that an op reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recollect._torch.modes import below_python
from recollect._torch.ops import OpOverload, op_name
from recollect.errors import CheckpointError
from recollect.graph.graph import Graph
from recollect.planning.build import resized
from recollect.planning.literals import Call, Like, dense_strides, has_sizes, is_dense, translations
from recollect.planning.script import SAME, WHOLE, Entry, Look, Ref, Script, Unknown, look_of
from recollect.planning.sizes import Dims, Shape
from recollect.replay.tape import tensors_of

__all__ = ["CannotPredict", "Rescaled", "rescaled"]

_META = torch.device("meta")
#: How often ops are asked in all, as a multiple of how many there are, before it is given up.
_TRIES = 4
_MORE_TRIES = 1000


class CannotPredict(CheckpointError):
    """What a step would take cannot be told without running it."""


@dataclass(frozen=True)
class Rescaled:
    """A step with another batch.

    Args:
        graph: What it comes to.
        more: Bytes of tensors that code outside of the step has to make for it: tables of another
            length, targets.
    """

    graph: Graph
    more: int


def rescaled(graph: Graph, script: Script, batch: Sequence[Look]) -> Rescaled:
    """The step of ``graph``, of which ``script`` is, with a batch of tensors of other looks.

    Raises `CannotPredict` if it cannot be told.
    """
    if graph.origins is None:
        raise CannotPredict("it is not known what made the memory of the step")
    run = _Run(script, batch)
    with below_python(), torch.no_grad():
        run.run()
    return Rescaled(resized(graph, run.sizes, run.factors()), run.more())


# --- what one op makes ----------------------------------------------------------------------------


#: Of each tensor that an op returns: where it is, its look, and the bytes of its storage.
_Results = tuple[tuple[tuple[int, ...], Look, int], ...]


#: A call of an op, and the one that was recorded; None: there is nothing to call.
_Way = tuple[Call, Call] | None


class _Misfit(Exception):
    """An op does not take arguments of such looks, or nobody knows what it makes of them."""


def _asked(op: Any, call: Call) -> _Results:
    try:
        out = op(*_made(call.args), **_made(call.kwargs))
    except Exception as error:  # a kernel, or what stands for one, may raise anything
        raise _Misfit(str(error).partition("\n")[0]) from error
    found = []
    for path, tensor in tensors_of(out):
        look = look_of(tensor)
        if look is None:
            raise _Misfit(f"its result is of layout {tensor.layout}")
        found.append((path, look, tensor.untyped_storage().nbytes()))
    return tuple(found)


def _made(value: Any) -> Any:
    """Arguments with tensors in the place of their looks."""
    if type(value) is Like:
        size, stride, dtype = value.look
        return torch.empty_strided(size, stride, dtype=dtype, device=_META)
    if type(value) is list:
        return [_made(each) for each in value]
    if type(value) is dict:
        return {name: _made(each) for name, each in value.items() if name != "pin_memory"}
    return _META if isinstance(value, torch.device) else value


def _key(value: Any) -> Any:
    """What tells calls apart. Numbers that are equal may be of different types."""
    if type(value) is Like:
        return value.look
    if type(value) is list:
        return tuple([_key(each) for each in value])
    if type(value) is dict:
        return tuple([(name, _key(each)) for name, each in value.items()])
    return type(value), value


# --- all of the script ----------------------------------------------------------------------------


class _Run:
    """Goes through a script with tensors of other shapes."""

    def __init__(self, script: Script, batch: Sequence[Look]) -> None:
        self._script = script
        self._before = script.looks
        #: By number of a tensor: its look now.
        self._looks = list(script.looks)
        #: By number of a memory: its bytes now.
        self.sizes = list(script.sizes)
        changes = []
        for number, look in zip(script.batch, batch, strict=True):
            before = self._before[number]
            if before is None or before[2] != look[2] or len(before[0]) != len(look[0]):
                raise CannotPredict("the batch has tensors of another kind")
            self._looks[number] = look
            changes.append((before[0], look[0]))
        numbers = {e.number for e in script.entries if e.number is not None and e.number > 1}
        self._dims = Dims(changes, numbers)
        self._known: dict[Any, _Results | _Misfit] = {}
        self._left = _TRIES * len(script.entries) + _MORE_TRIES
        self._furthest = (-1, "")

    def run(self) -> None:
        """Find all looks and sizes."""
        entries = self._script.entries
        #: Where another way may be left: which entry, the ways, what was known before.
        forks: list[tuple[int, Iterator[_Way], int]] = []
        place = 0
        while place < len(entries):
            if self._is_as_before(entries[place]):
                self._reset(entries[place])
                place += 1
                continue
            ways, mark = self._ways(place), self._dims.mark
            while not self._go(place, ways):
                if not forks or self._left <= 0:
                    raise self._failure()
                place, ways, mark = forks.pop()
                self._dims.undo(mark)
            forks.append((place, ways, mark))
            place += 1

    def _failure(self) -> CannotPredict:
        place, why = self._furthest
        entry = self._script.entries[place]
        what = "a tensor from outside" if entry.op is None else op_name(entry.op)
        return CannotPredict(f"what {what} makes of it is not known without running it ({why})")

    def _is_as_before(self, entry: Entry) -> bool:
        """Whether it is certain that an op makes what it made, or makes nothing."""
        if not entry.outs:
            return True
        if any(self._looks[n] != self._before[n] for n in entry.reads):
            return False
        return entry.op is not None and not has_sizes(entry.op)

    def _reset(self, entry: Entry) -> None:
        for path, number in entry.outs:
            self._looks[number] = self._before[number]
            if path in entry.made:
                memory = entry.made[path]
                self.sizes[memory] = self._script.sizes[memory]

    # --- one op -----------------------------------------------------------------------------------

    def _go(self, place: int, ways: Iterator[_Way]) -> bool:
        """Take the next way that fits, if there is one."""
        entry, mark = self._script.entries[place], self._dims.mark
        try:
            for way in ways:
                self._left -= 1
                try:
                    self._take(entry, way)
                except _Misfit as misfit:
                    self._note_failure(place, str(misfit))
                    self._dims.undo(mark)
                    continue
                return True
        except _Misfit as misfit:
            self._note_failure(place, str(misfit))
            return False
        self._note_failure(place, "there is no size that fits")
        return False

    def _note_failure(self, place: int, why: str) -> None:
        if place > self._furthest[0]:
            self._furthest = place, why

    def _ways(self, place: int) -> Iterator[_Way]:
        entry = self._script.entries[place]
        if entry.op is None:
            yield from self._outside(entry)
            return
        if entry.op in (WHOLE, SAME):
            yield from self._renamed(entry)
            return
        if type(entry.op) is not OpOverload or "_rnn" in op_name(entry.op):
            raise _Misfit("it is up to a library what that takes")
        outs = [self._before[number] for _, number in entry.outs]
        now, before = self._call(entry, self._looks), self._call(entry, self._before)
        for call in translations(entry.op, now, before, outs, self._dims):
            yield call, before

    def _call(self, entry: Entry, looks: list[Look | None]) -> Call:
        def filled(value: Any) -> Any:
            if type(value) is Ref:
                look = looks[value.number]
                if look is None:
                    raise _Misfit("an argument is no memory with strides")
                return Like(look)
            if type(value) is list:
                return [filled(each) for each in value]
            if type(value) is Unknown:
                raise _Misfit("nothing is known of an argument")
            return value

        named = {name: filled(value) for name, value in entry.kwargs.items()}
        return Call(filled(entry.args), named)

    def _renamed(self, entry: Entry) -> Iterator[None]:
        """A tensor that came to be without an op."""
        ((_, number),), (base,) = entry.outs, entry.reads
        if entry.op == WHOLE:
            before, now = _nbytes(self._before[base]), _nbytes(self._looks[base])
            self._looks[number] = (now,), (1,), torch.uint8
            self._dims.note((before,), (now,))
        for memory in entry.made.values():
            factor = self._factor(entry.reads)
            self.sizes[memory] = math.ceil(self._script.sizes[memory] * factor)
        yield None

    def _outside(self, entry: Entry) -> Iterator[None]:
        """A tensor that others have made: code will make it of another shape, if at all."""
        ((_, number),) = entry.outs
        before = self._before[number]
        if before is None:
            yield None
            return
        size, stride, dtype = before
        for found in self._shapes_of(number, size, dtype):
            strides = stride if found == size else dense_strides(found, size, stride)
            self._looks[number] = found, strides, dtype
            self._dims.note(size, found)
            yield None

    def _shapes_of(self, number: int, size: Shape, dtype: torch.dtype) -> Iterator[Shape]:
        if dtype is torch.uint8 and len(size) == 1:
            # Bytes: as many as another tensor has, of which it is to be a copy.
            others = [n for n in range(number) if _nbytes(self._before[n]) == size[0]]
            yield from dict.fromkeys((_nbytes(self._looks[n]),) for n in reversed(others))
        yield from self._dims.of_shape(size)

    def _take(self, entry: Entry, way: _Way) -> None:
        if way is None:
            return
        if way[0] == way[1]:
            self._reset(entry)
            return
        now, before = (self._ask(entry.op, call) for call in way)
        paths = [path for path, _ in entry.outs]
        if [path for path, _, _ in now] != paths or [path for path, _, _ in before] != paths:
            raise _Misfit(f"it makes {len(now)} tensors, and made {len(paths)}")
        found = [self._settled(entry, n, now[n], before[n]) for n in range(len(paths))]
        for (path, number), (look, nbytes) in zip(entry.outs, found, strict=True):
            self._looks[number] = look
            recorded = self._before[number]
            if recorded is not None and recorded != look:
                self._dims.note(recorded[0], look[0])
            if path in entry.made:
                self.sizes[entry.made[path]] = nbytes

    def _settled(self, entry: Entry, place: int, now: Any, before: Any) -> tuple[Look, int]:
        """The look and bytes of a result, from what is predicted now, and for what was before."""
        path, number = entry.outs[place]
        recorded = self._before[number]
        (_, look, nbytes), (_, predicted, nbytes_before) = now, before
        assert recorded is not None
        size, stride, dtype = recorded
        memory = entry.made.get(path)
        actual = nbytes_before if memory is None else self._script.sizes[memory]
        if predicted == recorded and nbytes_before == actual:
            return look, nbytes
        is_foreseen = size == predicted[0] and dtype == predicted[2]
        if memory is None and is_foreseen:
            return look, nbytes
        if not math.prod(size) and not actual:
            return recorded, 0  # what this kernel does not need
        if is_dense(size, stride) and math.prod(size) * dtype.itemsize == actual:
            # How it lies in memory is up to the kernel, and stays so. If not even its shape was
            # foreseen, it becomes what others of that shape do.
            shape = look[0] if is_foreseen else next(self._dims.of_shape(size), None)
            if shape is not None:
                strides = dense_strides(shape, size, stride)
                return (shape, strides, dtype), math.prod(shape) * dtype.itemsize
        if len(size) == dtype.itemsize == 1 and not is_foreseen:
            # Bytes that a library puts aside for its backward.
            factor = self._factor(entry.reads)
            return ((math.ceil(size[0] * factor),), (1,), dtype), math.ceil(actual * factor)
        raise _Misfit("it made something else than could be predicted")

    def _ask(self, op: Any, call: Call) -> _Results:
        key = (id(op), _key(call.args), _key(call.kwargs))
        known = self._known.get(key)
        if known is None:
            try:
                known = _asked(op, call)
            except _Misfit as misfit:
                known = misfit
            self._known[key] = known
        if isinstance(known, _Misfit):
            raise known
        return known

    # --- what it comes to -------------------------------------------------------------------------

    def _factor(self, numbers: Sequence[int]) -> float:
        """How much more bytes tensors have, of those that are others than before.

        What is not, weights above all, is left out: a product takes as much longer as there are
        more rows, however large the matrix is.
        """
        others = [n for n in numbers if self._looks[n] != self._before[n]]
        before = sum(_nbytes(self._before[number]) for number in others)
        return sum(_nbytes(self._looks[number]) for number in others) / before if before else 1.0

    def factors(self) -> dict[int, float]:
        """By event, of those that differ: how much more it reads and writes."""
        found = {}
        for entry in self._script.entries:
            if entry.event >= 0:
                numbers = [*entry.reads, *(number for _, number in entry.outs)]
                factor = self._factor(numbers)
                if factor != 1.0:
                    found[entry.event] = factor
        return found

    def more(self) -> int:
        """Bytes of the tensors outside that have to be others."""
        others = [n for n in self._script.outside if self._looks[n] != self._before[n]]
        return sum(_nbytes(self._looks[number]) for number in others)


def _nbytes(look: Look | None) -> int:
    return 0 if look is None else math.prod(look[0]) * look[2].itemsize
