"""What a call is checked against, function by function, and what it holds of what autograd saves.

Built once per recording, in the form that is fastest to compare with.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from recollect.policy.op_info import op_info
from recollect.replay.function_call import Constant, FunctionCall, Items, Number, equal_type
from recollect.replay.recorded_graph import Layout, RecordedGraph, RecordedOp, RecordedValue, View
from recollect.replay.recording import Recording

__all__ = ["CheckedStep", "checked_steps"]

#: The place of a value that is kept, the value, the layout of the tensor there, and whether it is
#: offloaded.
Catch = tuple[int, RecordedValue, Layout, bool]


class CheckedStep:
    """One function."""

    def __init__(self, recording: Recording, call: FunctionCall, caught: set[int]) -> None:
        self.call = call
        #: The next one.
        self.following: CheckedStep | None = None
        self.function = call.function
        self.call_mode = call.call_mode
        self._split_arguments(call)
        #: How many tensors autograd saves in it, and whether all of them are held.
        self.count = len(call.packed)
        self.is_opaque = call.is_opaque
        #: If it returns one tensor, and that is new, its number; else -1.
        self.first_out = call.outs[0] if len(call.outs) == 1 and call.is_new else -1
        #: Of what it returns: the dtypes, which may follow from the default dtype; the metadata.
        self.dtypes = [None if view is None else view.layout[3] for view in call.returns]
        self.metadata = call.metadata
        self._split_saved(recording, call)
        #: The values to keep that are found among saved tensors, returned ones, and arguments that
        #: are written to.
        self.caught_packed = _catch((pack.view for pack in call.packed), recording, caught)
        self.caught_returns = _catch(call.returns, recording, caught)
        self.caught_args = [
            (call.changed[place][0], value, layout, away)
            for place, value, layout, away in _catch(
                (view for _, view in call.changed), recording, caught
            )
        ]
        #: The tensors that it writes to, and whether it changes the metadata of one in place.
        self.written = {number for number, _ in call.changed}
        self.changes_metadata = call.changes_metadata
        ops = recording.graph.ops[slice(*call.ops)]
        #: The flags that it ran under, if they may matter to it.
        heeds_switches = any(_heeds_switches(recording.graph, op) for op in ops)
        self.flags = call.flags if not call.is_opaque and heeds_switches else None
        #: How many of the tensors offloaded before are freed after it.
        self.arrivals = sum(op.arrivals for op in ops)
        self.draws = [op for op in call.draws if op.number in recording.schedule.draws]

    def _split_arguments(self, call: FunctionCall) -> None:
        """Tell tensors from constants, if there are no tensors in containers."""
        args = [] if call.args is None else call.args.items
        kwargs = call.kwargs
        #: The names of keyword arguments, and how many arguments there are with these.
        self.keys = None if kwargs is None else kwargs.keys
        values = self.values = args if kwargs is None else [*args, *kwargs.items]
        self.arity = len(values)
        #: Of each tensor: its place, its number, how often it was written to.
        self.tensors: list[tuple[int, int, int]] = []
        #: Of each constant: its place, its value, and the type under which ``==`` implies the same.
        self.constants: list[tuple[int, Any, type]] = []
        #: Of each container: its place, and its items.
        self.containers: list[tuple[int, Items]] = []
        #: Whether that is all. If not, arguments are compared one after the other.
        self.is_simple = True
        for place, value in enumerate(values):
            if type(value) is Number and value.writes is not None:
                self.tensors.append((place, value.number, value.writes))
            elif type(value) is Items and not value.has_tensors:
                self.containers.append((place, value))
            elif type(value) in (Number, Items, Constant):
                self.is_simple = False
            else:
                self.constants.append((place, value, equal_type(value)))

    def _split_saved(self, recording: Recording, call: FunctionCall) -> None:
        """Tell saved tensors that are held from those that are dropped."""
        here = recording.schedule.kept - recording.schedule.away
        # Another call of an opaque function may save other tensors: all are held.
        views = [] if call.is_opaque else [pack.view for pack in call.packed]
        is_held = [view is None or view.value.number in here for view in views]
        self.held = [place for place, held in enumerate(is_held) if held]
        #: The place and the view of each.
        self.dropped = [
            (place, view) for place, view in enumerate(views) if view and not is_held[place]
        ]


def _heeds_switches(graph: RecordedGraph, op: RecordedOp) -> bool:
    """Whether a flag may decide how ``op`` computes, or in which dtype."""
    is_floating = any(graph.values[n].layout[3].is_floating_point for n in op.reads)
    return not is_floating or op_info(op.op).depends_on_flags


def _catch(views: Iterable[View | None], recording: Recording, caught: set[int]) -> list[Catch]:
    schedule = recording.schedule
    found: list[Catch] = []
    for place, view in enumerate(views):
        number = -1 if view is None else view.value.number
        if view is not None and number in schedule.caught and number not in caught:
            caught.add(number)
            found.append((place, view.value, view.layout, number in schedule.away))
    return found


def checked_steps(recording: Recording) -> CheckedStep | None:
    """What the first function is checked against, linked to the next ones; None if none is."""
    caught: set[int] = set()
    for number, outside in recording.outsides.items():
        outside.is_held = outside.value is not None and number in recording.schedule.outsides
    calls = [CheckedStep(recording, call, caught) for call in recording.calls]
    for call, following in pairwise(calls):
        call.following = following
    return calls[0] if calls else None
