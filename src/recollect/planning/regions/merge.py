"""Merges the recordings of the units of one forward into one (P2).

Each unit has recorded its own ops and values, with numbers of its own. What one unit returns is
a tensor from outside for the next one: in the merged recording it is not read from the op that made
it, but there, since what crosses the border of a unit is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from recollect.replay.function_call import FunctionCall
from recollect.replay.recorded_graph import RecordedGraph, RecordedOp, RecordedValue, View
from recollect.replay.recording import Recording


@dataclass(frozen=True)
class UnitRecord:
    """The recording of one call of a unit."""

    recording: Recording
    #: How many tensors autograd saved in it: more than were recorded, if it was not to its end.
    saved: int


def merged(records: Sequence[UnitRecord]) -> Recording:
    """One recording with the ops of all, in order. The others stay as they are."""
    graph, calls = RecordedGraph(), list[FunctionCall]()
    for each in records:
        calls += _UnitCopy(graph, each.recording).add(each.saved)
    reasons = (each.recording.reason for each in records)
    reason = next((reason for reason in reasons if reason is not None), None)
    return Recording(graph, calls, {}, False, False, reason)


class _UnitCopy:
    """Copies one recording into ``graph``, behind what is there."""

    def __init__(self, graph: RecordedGraph, recording: Recording) -> None:
        self._graph = graph
        self._recording = recording
        self._first_op = len(graph.ops)
        self._first_value = len(graph.values)
        self._first_storage = graph.storages

    def add(self, saved: int) -> list[FunctionCall]:
        """Copy it. Returns its calls, which save so many tensors."""
        graph, source = self._graph, self._recording.graph
        graph.values += [self._value(each) for each in source.values]
        graph.ops += [self._op(each) for each in source.ops]
        graph.storages += source.storages + 1
        calls = [self._call(each) for each in self._recording.calls]
        unseen = saved - sum(len(call.packed) for call in calls)
        if unseen > 0:  # autograd holds them
            end = len(graph.ops)
            calls.append(FunctionCall(None, None, (end, end)))
            calls[-1].packed = [None] * unseen
        return calls

    def _value(self, value: RecordedValue) -> RecordedValue:
        return replace(
            value,
            number=value.number + self._first_value,
            storage_number=value.storage_number + self._first_storage,
            op=value.op + self._first_op if value.op >= 0 else -1,
        )

    def _numbers(self, values: Sequence[int]) -> list[int]:
        return [number + self._first_value for number in values]

    def _op(self, op: RecordedOp) -> RecordedOp:
        first, made = self._first_value, copy(op)
        made.number = op.number + self._first_op
        made.reads = self._numbers(op.reads)
        made.makes = self._numbers(op.makes)
        made.writes = [(old + first, new + first) for old, new in op.writes]
        made.fresh = frozenset(number + first for number in op.fresh)
        made.fills = None  # it is not run again from here
        return made

    def _call(self, call: FunctionCall) -> FunctionCall:
        made, (first, last) = copy(call), call.ops
        made.ops = first + self._first_op, last + self._first_op
        made.first_value = call.first_value + self._first_value
        made.packed = [view and self._view(view) for view in call.packed]
        made.returns = [view and self._view(view) for view in call.returns]
        made.changed = [(number, self._view(view)) for number, view in call.changed]
        made.draws = [self._graph.ops[op.number + self._first_op] for op in call.draws]
        return made

    def _view(self, view: View) -> View:
        return View(self._graph.values[view.value.number + self._first_value], view.layout)
