"""The graph of a step for a batch of another shape, from the trace of the recorded step (P8).

None of the user's code runs. The ops of the trace run on the meta device with tensors of other
shapes: that takes microseconds an op, once for each kind of call. Ops whose arguments are as before
are skipped. Size arguments are translated (`size_rules`); where that leaves a choice, and the
choice does not fit an op that follows, the next one is tried: a depth-first search, with a limit.

What the ops would allocate replaces what they did in the graph. Seconds and workspace grow as the
bytes that an op reads and writes.
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
from recollect.planning.size_rules import OpCall, has_sizes, translations
from recollect.planning.sizes import Dims, Shape, dense_strides, is_dense
from recollect.planning.trace import (
    SAME,
    WHOLE,
    Ref,
    StepTrace,
    TensorLayout,
    TracedOp,
    Unknown,
    layout_of,
)
from recollect.replay.recorded_graph import tensors_of

__all__ = ["CannotPredict", "Rescaled", "rescaled"]

_META = torch.device("meta")
#: How many calls are tried in all, as a multiple of the number of ops, before it is given up.
_TRIES = 4
_MORE_TRIES = 1000


class CannotPredict(CheckpointError):
    """What a step would take cannot be predicted without running it."""


@dataclass(frozen=True)
class Rescaled:
    """A step with another batch.

    ``more``: bytes of tensors that code outside of the step has to make for it: tables of another
    length, targets.
    """

    graph: Graph
    more: int


def rescaled(graph: Graph, trace: StepTrace, batch: Sequence[TensorLayout]) -> Rescaled:
    """The step of ``graph`` and ``trace`` with a batch of tensors of other layouts.

    Raises `CannotPredict` if there is no translation that fits.
    """
    if graph.origins is None:
        raise CannotPredict("it is not known what made the memory of the step")
    run = _Rescaling(trace, batch)
    with below_python(), torch.no_grad():
        run.run()
    return Rescaled(resized(graph, run.sizes, run.factors()), run.more())


# --- one op on the meta device --------------------------------------------------------------------


#: Of each tensor in the result of an op: its place, its layout, and the bytes of its storage.
_Results = tuple[tuple[tuple[int, ...], TensorLayout, int], ...]

#: A call to try, and the recorded one; None: there is nothing to call.
_Way = tuple[OpCall, OpCall] | None


class _Misfit(Exception):
    """An op does not take arguments of such layouts, or its result is unknown."""


def _run_on_meta(call: OpCall) -> _Results:
    try:
        out = call.op(*_on_meta(call.args), **_on_meta(call.kwargs))
    except Exception as error:  # a kernel, or what stands for one, may raise anything
        raise _Misfit(str(error).partition("\n")[0]) from error
    found = []
    for path, tensor in tensors_of(out):
        layout = layout_of(tensor)
        if layout is None:
            raise _Misfit(f"its result is of layout {tensor.layout}")
        found.append((path, layout, tensor.untyped_storage().nbytes()))
    return tuple(found)


def _on_meta(value: Any) -> Any:
    """Arguments with tensors in the place of layouts."""
    if type(value) is TensorLayout:
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=_META)
    if type(value) is list:
        return [_on_meta(each) for each in value]
    if type(value) is dict:
        return {name: _on_meta(each) for name, each in value.items() if name != "pin_memory"}
    return _META if isinstance(value, torch.device) else value


def _key(value: Any) -> Any:
    """What tells calls apart. Numbers that are equal may be of different types."""
    if type(value) is TensorLayout:
        return value
    if type(value) is list:
        return tuple([_key(each) for each in value])
    if type(value) is dict:
        return tuple([(name, _key(each)) for name, each in value.items()])
    return type(value), value


# --- all of the trace -----------------------------------------------------------------------------


class _Rescaling:
    """A trace with tensors of other shapes."""

    def __init__(self, trace: StepTrace, batch: Sequence[TensorLayout]) -> None:
        self._trace = trace
        self._before = trace.layouts
        #: By number of a tensor: its layout now.
        self._layouts = list(trace.layouts)
        #: By number of a storage: its bytes now.
        self.sizes = list(trace.sizes)
        changes = []
        for number, layout in zip(trace.batch, batch, strict=True):
            before = self._before[number]
            kind = layout.dtype, len(layout.size)
            if before is None or (before.dtype, len(before.size)) != kind:
                raise CannotPredict("the batch has tensors of another kind")
            self._layouts[number] = layout
            changes.append((before.size, layout.size))
        numbers = {e.number for e in trace.ops if e.number is not None and e.number > 1}
        self._dims = Dims(changes, numbers)
        self._known: dict[Any, _Results | _Misfit] = {}
        self._left = _TRIES * len(trace.ops) + _MORE_TRIES
        self._furthest = (-1, "")

    def run(self) -> None:
        """Find the layouts of all tensors, and the sizes of all storages."""
        #: Where other ways may be left: the op, its ways, what was known before.
        forks: list[tuple[int, Iterator[bool], int]] = []
        place = 0
        while place < len(self._trace.ops):
            op = self._trace.ops[place]
            if self._is_as_before(op):
                self._reset(op)
                place += 1
                continue
            ways, mark = self._ways(place), self._dims.mark
            while not next(ways, False):
                if not forks or self._left <= 0:
                    raise self._failure()
                place, ways, mark = forks.pop()
                self._dims.undo(mark)
            forks.append((place, ways, mark))
            place += 1

    def _failure(self) -> CannotPredict:
        place, why = self._furthest
        op = self._trace.ops[place]
        what = "a tensor from outside" if op.func is None else op_name(op.func)
        return CannotPredict(f"what {what} makes of it is not known without running it ({why})")

    def _is_as_before(self, op: TracedOp) -> bool:
        """Whether it is certain that an op makes what it made, or makes nothing."""
        if not op.outs:
            return True
        if any(self._layouts[n] != self._before[n] for n in op.reads):
            return False
        return op.func is not None and not has_sizes(op.func)

    def _reset(self, op: TracedOp) -> None:
        for path, number in op.outs:
            self._layouts[number] = self._before[number]
            if path in op.made:
                memory = op.made[path]
                self.sizes[memory] = self._trace.sizes[memory]

    # --- one op -----------------------------------------------------------------------------------

    def _ways(self, place: int) -> Iterator[bool]:
        """Translate an op in all ways that fit; each is in effect when True is yielded."""
        op, mark = self._trace.ops[place], self._dims.mark
        try:
            for way in self._translated(op):
                self._left -= 1
                try:
                    self._take(op, way)
                except _Misfit as misfit:
                    self._note_failure(place, str(misfit))
                    self._dims.undo(mark)
                else:
                    yield True
        except _Misfit as misfit:
            self._note_failure(place, str(misfit))
        self._note_failure(place, "there is no size that fits")

    def _note_failure(self, place: int, why: str) -> None:
        if place > self._furthest[0]:
            self._furthest = place, why

    def _translated(self, op: TracedOp) -> Iterator[_Way]:
        if op.func is None:
            yield from self._outside(op)
        elif op.func in (WHOLE, SAME):
            yield from self._renamed(op)
        elif type(op.func) is not OpOverload or "_rnn" in op_name(op.func):
            raise _Misfit("it is up to a library what that takes")
        else:
            outs = [self._before[number] for _, number in op.outs]
            now, before = self._call(op, self._layouts), self._call(op, self._before)
            for call in translations(now, before, outs, self._dims):
                yield call, before

    def _call(self, op: TracedOp, layouts: list[TensorLayout | None]) -> OpCall:
        def filled(value: Any) -> Any:
            if type(value) is Ref:
                layout = layouts[value.number]
                if layout is None:
                    raise _Misfit("an argument is no memory with strides")
                return layout
            if type(value) is list:
                return [filled(each) for each in value]
            if type(value) is Unknown:
                raise _Misfit("nothing is known of an argument")
            return value

        named = {name: filled(value) for name, value in op.kwargs.items()}
        return OpCall(op.func, filled(op.args), named)

    def _renamed(self, op: TracedOp) -> Iterator[None]:
        """A tensor that no op has made."""
        ((_, number),), (base,) = op.outs, op.reads
        if op.func == WHOLE:
            before, now = _nbytes(self._before[base]), _nbytes(self._layouts[base])
            self._layouts[number] = TensorLayout((now,), (1,), torch.uint8)
            self._dims.note((before,), (now,))
        for memory in op.made.values():
            factor = self._factor(op.reads)
            self.sizes[memory] = math.ceil(self._trace.sizes[memory] * factor)
        yield None

    def _outside(self, op: TracedOp) -> Iterator[None]:
        """A tensor from outside: code will make it of another shape, if at all."""
        ((_, number),) = op.outs
        before = self._before[number]
        if before is None:
            yield None
            return
        size, stride, dtype = before
        for found in self._shapes_of(number, size, dtype):
            strides = stride if found == size else dense_strides(found, size, stride)
            self._layouts[number] = TensorLayout(found, strides, dtype)
            self._dims.note(size, found)
            yield None

    def _shapes_of(self, number: int, size: Shape, dtype: torch.dtype) -> Iterator[Shape]:
        if dtype is torch.uint8 and len(size) == 1:
            # Bytes: as many as another tensor has, which it is to hold a copy of.
            others = [n for n in range(number) if _nbytes(self._before[n]) == size[0]]
            yield from dict.fromkeys((_nbytes(self._layouts[n]),) for n in reversed(others))
        yield from self._dims.of_shape(size)

    def _take(self, op: TracedOp, way: _Way) -> None:
        if way is None:
            return
        if way[0] == way[1]:
            self._reset(op)
            return
        now, before = (self._results(call) for call in way)
        paths = [path for path, _ in op.outs]
        if [path for path, _, _ in now] != paths or [path for path, _, _ in before] != paths:
            raise _Misfit(f"it makes {len(now)} tensors, and made {len(paths)}")
        found = [self._result_of(op, n, now[n], before[n]) for n in range(len(paths))]
        for (path, number), (layout, nbytes) in zip(op.outs, found, strict=True):
            self._layouts[number] = layout
            recorded = self._before[number]
            if recorded is not None and recorded != layout:
                self._dims.note(recorded.size, layout.size)
            if path in op.made:
                self.sizes[op.made[path]] = nbytes

    def _result_of(
        self, op: TracedOp, place: int, now: Any, before: Any
    ) -> tuple[TensorLayout, int]:
        """The layout and bytes of a result, from what meta kernels say of it now and before.

        They are believed if they are right for the recorded call.
        """
        path, number = op.outs[place]
        recorded = self._before[number]
        (_, layout, nbytes), (_, predicted, nbytes_before) = now, before
        assert recorded is not None
        size, stride, dtype = recorded
        memory = op.made.get(path)
        actual = nbytes_before if memory is None else self._trace.sizes[memory]
        if predicted == recorded and nbytes_before == actual:
            return layout, nbytes
        is_foreseen = size == predicted.size and dtype == predicted.dtype
        if memory is None and is_foreseen:
            return layout, nbytes
        if not math.prod(size) and not actual:
            return recorded, 0  # what this kernel does not need
        if is_dense(size, stride) and recorded.nbytes == actual:
            # How it lies in memory is up to the kernel, and stays so. If not even its shape was
            # foreseen, it becomes what others of that shape do.
            shape = layout.size if is_foreseen else next(self._dims.of_shape(size), None)
            if shape is not None:
                found = TensorLayout(shape, dense_strides(shape, size, stride), dtype)
                return found, found.nbytes
        if len(size) == dtype.itemsize == 1 and not is_foreseen:
            # Bytes that a library puts aside for its backward.
            factor = self._factor(op.reads)
            found = TensorLayout((math.ceil(size[0] * factor),), (1,), dtype)
            return found, math.ceil(actual * factor)
        raise _Misfit("it made something else than could be predicted")

    def _results(self, call: OpCall) -> _Results:
        key = (id(call.op), _key(call.args), _key(call.kwargs))
        known = self._known.get(key)
        if known is None:
            try:
                known = _run_on_meta(call)
            except _Misfit as misfit:
                known = misfit
            self._known[key] = known
        if isinstance(known, _Misfit):
            raise known
        return known

    # --- the result -------------------------------------------------------------------------------

    def _factor(self, numbers: Sequence[int]) -> float:
        """The growth of the tensors that have changed, in bytes.

        Others, weights above all, are left out: a product takes as much longer as there are more
        rows, however large the matrix is.
        """
        others = [n for n in numbers if self._layouts[n] != self._before[n]]
        before = sum(_nbytes(self._before[number]) for number in others)
        return sum(_nbytes(self._layouts[number]) for number in others) / before if before else 1.0

    def factors(self) -> dict[int, float]:
        """By event that differs: the growth of what it reads and writes."""
        found = {}
        for event, op in enumerate(self._trace.events):
            factor = self._factor([*op.reads, *(number for _, number in op.outs)])
            if factor != 1.0:
                found[event] = factor
        return found

    def more(self) -> int:
        """Bytes of the tensors from outside that have changed."""
        others = [n for n in self._trace.outside if self._layouts[n] != self._before[n]]
        return sum(_nbytes(self._layouts[number]) for number in others)


def _nbytes(layout: TensorLayout | None) -> int:
    return 0 if layout is None else layout.nbytes
