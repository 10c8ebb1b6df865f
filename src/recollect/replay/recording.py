"""A recording: the functions and ops of one call, and the values that later calls hold (R7).

A policy names ops that must not be repeated. That leaves a choice of values to hold: the result
itself, or a smaller one computed from it. The choice is a minimum cut between the named ops and the
saved tensors, where a value costs the bytes of its whole storage. A plan names the values itself;
for ops that it does not know, values are chosen in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from copy import copy
from functools import cached_property
from itertools import pairwise, repeat
from operator import itemgetter
from typing import Any

import torch

from recollect.graph.flow import FOREVER, minimum_cut
from recollect.graph.release import find_needs
from recollect.policy.op_info import op_info
from recollect.replay.function_call import (
    USUAL,
    FunctionCall,
    OutsideTensor,
    has_equality,
    mode_getters,
)
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recorded_graph import Layout, RecordedGraph, RecordedOp, RecordedValue, View
from recollect.state.flags import (
    call_it,
    flag_getters,
    read_flags,
    read_usual_flags,
    usual_flags,
)

#: The ops that recompute a value, by its number and the values that have been recomputed before.
Chains = dict[tuple[int, ...], list[RecordedOp]]
#: Where a call finds a value to keep, the value, the layout of the tensor there, and whether it is
#: offloaded.
Catch = tuple[int, RecordedValue, Layout, bool]


class Recording:
    """One recorded call.

    Args:
        graph: Its ops and values.
        calls: The functions that it called.
        outsides: The tensors that it did not make, by number.
        writes_outside: Whether it wrote to one of their storages.
        stores_all: Whether everything that the policy keeps is offloaded.
        reason: Why it was not recorded to its end, if it was not.
    """

    def __init__(
        self,
        graph: RecordedGraph,
        calls: list[FunctionCall],
        outsides: dict[int, OutsideTensor],
        writes_outside: bool,
        stores_all: bool,
        reason: str | None,
    ) -> None:
        self.graph = graph
        self.calls = calls
        self.outsides = outsides
        self._stores_all = stores_all
        #: Whether it matters which outside tensors share a storage.
        self.shares_memory = writes_outside or any(o.twin for o in outsides.values())
        #: The same, or whether one shares the storage of a tensor that a function returned.
        self.places_matter = self.shares_memory or any(
            o.host is not None for o in outsides.values()
        )
        #: The metadata that depends on data.
        self.shapes = [call.metadata for call in calls if call.depends_on_data]
        self.reason = reason
        #: How many nodes of the graph of autograd the call made, if they were counted.
        self.nodes: int | None = None

    def is_like(self, other: Recording) -> bool:
        same_length = len(self.calls) == len(other.calls)
        return same_length and all(map(FunctionCall.is_like, self.calls, other.calls))

    def under(self, by: NamedSchedule) -> Recording:
        """The recording that this call would have been under another schedule of a plan.

        Both share their functions: which ops must not run again does not depend on a schedule.
        """
        other = copy(self)
        other.graph = self.graph.copy()
        for op in other.graph.ops:
            if op.key is not None:
                op.ruling = by.decide(op.key, op)
        for name in ("schedule", "expected"):
            vars(other).pop(name, None)
        return other

    @cached_property
    def schedule(self) -> RegionSchedule:
        """What later calls hold."""
        return RegionSchedule(self.graph, self.calls, stores_all=self._stores_all)

    @cached_property
    def expected(self) -> ExpectedCall | None:
        """The first function of a later call, linked to the next ones; None if there is none."""
        caught: set[int] = set()
        calls, known = [], 0
        for each in self.calls:
            calls.append(ExpectedCall(self, each, caught, known))
            known = max((known - 1, *(number for _, number, _ in each.tensors), *each.outs)) + 1
        for call, following in pairwise(calls):
            call.following = following
        return calls[0] if calls else None


class ExpectedCall:
    """One function of a recording, in the form that is fastest to compare with."""

    def __init__(
        self, recording: Recording, call: FunctionCall, caught: set[int], known: int
    ) -> None:
        self.call = call
        #: The next one.
        self.following: ExpectedCall | None = None
        self.function, self.keys = call.function, call.keys
        #: Whether no custom function of the user saves tensors in it.
        self.is_of_torch = call.function is not None and call.custom_function is None
        self._expect_arguments(recording, known)
        self._expect_results(recording.schedule, caught)
        graph, draws = recording.graph, recording.schedule.draws
        ops = graph.ops[slice(*call.ops)]
        self._expect_flags(graph, ops)
        #: How many offloaded tensors are freed after it.
        self.arrivals = sum(op.arrivals for op in ops)
        #: The ops that draw again in backward, each with its generator. Whether anything has to be
        #: done before it runs.
        self.draws = [
            (o.number, o.generator) for o in call.draws if o.generator and o.number in draws
        ]
        self.has_preparations = bool(self.draws) or call.changes_metadata
        #: The dtype of its result, if it returns one tensor; else None. The number of that tensor,
        #: if it is new and the function only keeps or drops tensors when it ends; else -1.
        is_usual = not (call.is_opaque or call.metadata or self.arrivals or self.caught_packed)
        is_usual &= not (call.in_flight or call.arrived)
        self.dtype = self.dtypes[0] if len(call.outs) == 1 else None
        self.only = call.outs[0] if is_usual and self.dtype is not None else -1
        if self.only <= max((known - 1, *(number for _, number, _ in call.tensors))):
            self.only = -1  # not a new tensor

    def _expect_arguments(self, recording: Recording, known: int) -> None:
        call = self.call
        #: The call mode, the flags and the types of the arguments of a call that fit, and what
        #: reads the first two. In such a call: the tensors that are known, and the new ones; the
        #: constants for which ``==`` implies the same, what picks them, and the other constants.
        self.state: list[Any] | None = None
        self.getters = mode_getters(call.call_mode)
        self.seen = [each for each in call.tensors if each[1] < known]
        self.new = [(place, recording.outsides[n]) for place, n, _ in call.tensors if n >= known]
        usual = {place: each for place, each in call.constants if has_equality(each)}
        self.others = [each for each in call.constants if each[0] not in usual]
        self.pick: Callable[[Any], Any] = itemgetter(*usual) if usual else len
        self.picked = self.pick(usual) if usual else call.arity
        self._is_simple = (
            call.form is None
            and call.function is not torch.einsum  # see `call_mode`
            and all(writes is not None for *_, writes in call.tensors)  # else torch counts none
            and len({each.number for _, each in self.new}) == len(self.new)
        )

    def _expect_results(self, schedule: RegionSchedule, caught: set[int]) -> None:
        call, here = self.call, schedule.here
        #: How many tensors autograd saves in it. For each, the view to recompute it by; None if
        #: held.
        self.count = len(call.packed)
        self.saved: Iterable[View | None] = (
            # Another call of an opaque function may save more tensors, or fewer.
            repeat(None)
            if call.is_opaque
            else [None if v is None or v.value.number in here else v for v in call.packed]
        )
        #: The values to keep, found among saved tensors, returned tensors and written arguments.
        #: ``caught``: those that an earlier function has given.
        self.caught_packed = _catch(enumerate(call.packed), schedule, caught)
        self.caught_returns = _catch(enumerate(call.returns), schedule, caught)
        self.caught_args = _catch(call.changed, schedule, caught)
        #: The tensors that it writes to.
        self.written = {number for number, _ in call.changed}
        #: The dtypes of the returned tensors, which may depend on the default dtype.
        self.dtypes = [None if view is None else view.layout[3] for view in call.returns]

    def _expect_flags(self, graph: RecordedGraph, ops: list[RecordedOp]) -> None:
        call = self.call
        #: The flags that it ran under, if one of them may decide how an op computes, or in which
        #: dtype; and the function that reads them.
        heeds_flags = any(
            op_info(op.op).depends_on_flags
            or not any(graph.values[n].layout[3].is_floating_point for n in op.reads)
            for op in ops
        )
        self.flags = call.flags if not call.is_opaque and heeds_flags else None
        self.read_flags = read_flags
        if self.flags is not None and call.function in USUAL:
            self.flags, self.read_flags = usual_flags(self.flags), read_usual_flags
        if self.flags is not None:
            self.getters += flag_getters(self.read_flags)

    def learn(self, values: tuple[Any, ...]) -> None:
        """Learn the state and types of a call that fits, where no dispatch mode is active."""
        if self._is_simple:
            with suppress(RuntimeError):  # a flag that torch refuses to read
                self.state = [*map(call_it, self.getters), *map(type, values)]


def _catch(
    views: Iterable[tuple[int, View | None]], schedule: RegionSchedule, caught: set[int]
) -> list[Catch]:
    found: list[Catch] = []
    for place, view in views:
        number = -1 if view is None else view.value.number
        if view is not None and number in schedule.caught and number not in caught:
            caught.add(number)
            found.append((place, view.value, view.layout, number in schedule.away))
    return found


class RegionSchedule:
    """Which values of a recording are held or offloaded.

    Args:
        graph: The recorded graph.
        calls: The recorded functions.
        stores_all: Whether everything that the policy keeps is offloaded.
    """

    def __init__(
        self, graph: RecordedGraph, calls: list[FunctionCall], *, stores_all: bool
    ) -> None:
        holdable = find_holdable(calls)
        _leave_to_autograd(graph, calls, holdable)
        #: The values that a plan holds, each with whether it is offloaded.
        planned = {n: op.ruling.offloads for op in graph.ops for n in op.held if n in holdable}
        saved = saved_by(calls)
        #: The values that are not recomputed.
        self.kept = _choose(graph, saved, holdable, planned) | planned.keys()
        #: Those of them that are offloaded.
        self.away = frozenset(
            n
            for n in self.kept
            if (planned[n] if n in planned else _goes_away(graph, n, self.kept, stores_all))
        )
        #: Those that stay on the device: autograd holds the saved tensors of these.
        self.here = self.kept - self.away
        needs = find_needs(graph, [n for n in saved if n not in self.here], self.kept)
        #: By value: how often backward uses it.
        self.uses = needs.uses
        #: The values that others are recomputed from, each with the first ticket that needs it.
        self.order = needs.order
        sources = [graph.values[number] for number, _ in needs.order]
        #: The values that a call must catch: the kept ones among these, and constants that a
        #: function made without an op.
        self.caught = frozenset(
            each.number for each in sources if each.number in self.kept or each.outside is None
        )
        #: The outside tensors that are needed, by their number.
        self.outsides = frozenset(each.outside for each in sources if each.outside is not None)
        #: The ops that draw again in backward: their generators' states must be saved.
        self.draws = frozenset(n for n in needs.again if graph.ops[n].generator is not None)
        #: The chains that backward has found so far.
        self.chains: Chains = {}


def forced_values(graph: RecordedGraph, calls: list[FunctionCall]) -> frozenset[int]:
    """The values that every plan keeps, because their ops must not run again."""
    holdable = find_holdable(calls)
    _leave_to_autograd(graph, calls, holdable)
    return _choose(graph, saved_by(calls), holdable, ())


def saved_by(calls: list[FunctionCall]) -> list[int]:
    """The values that autograd saves in ``calls`` and does not hold itself."""
    return [view.value.number for call in calls for view in call.packed if view is not None]


def find_holdable(calls: list[FunctionCall]) -> set[int]:
    """The values that a call can hold: those it can still reach when their function ends."""
    found: set[int] = set()
    saved = set(saved_by(calls))
    for call in calls:
        first, last = call.ops
        seen = [view.value for view in call.returns if view is not None]
        seen += [view.value for _, view in call.changed]
        # The user may write to outputs. If autograd saved them it raises, unless the write is
        # unseen.
        seen = [value for value in seen if not value.is_output or value.number in saved]
        seen += [view.value for view in call.packed if view is not None]
        found.update(
            value.number
            for value in seen
            if value.is_last and first <= value.op < last and not (value.is_output and value.unsure)
        )
    return found


def _leave_to_autograd(graph: RecordedGraph, calls: list[FunctionCall], holdable: set[int]) -> None:
    """Let autograd hold saved tensors that can be neither recomputed nor held by the call."""
    blocked: set[int] = set()
    for op in graph.ops:
        if _must_not_run(graph, op) or any(read in blocked for read in op.reads):
            blocked.update(op.results)
    blocked -= holdable
    for call in calls:
        call.packed = [
            None if view is None or view.value.number in blocked else view for view in call.packed
        ]


def _must_not_run(graph: RecordedGraph, op: RecordedOp) -> bool:
    return (op.keep or op.later or graph.unsure_read(op)) is not None


def _choose(
    graph: RecordedGraph, saved: list[int], holdable: set[int], planned: Container[int]
) -> frozenset[int]:
    """The cheapest values to hold, in addition to the ``planned`` ones."""
    needed = [graph.ops[n] for n in find_needs(graph, saved, planned).again]
    never = {op.number for op in needed if _must_not_run(graph, op)}
    if not never:
        return frozenset()
    costs: dict[int, int] = {}
    edges: list[tuple[int, int]] = []
    sources: list[int] = []
    for op in needed:
        for number in op.results:
            if number in planned:
                continue
            costs[number] = graph.values[number].nbytes if number in holdable else FOREVER
            if op.number in never:
                sources.append(number)
            else:
                edges += [(read, number) for read in op.reads]
    sinks = {number for number in saved if number in costs}
    edges = [(a, b) for a, b in edges if a in costs]
    return minimum_cut(costs, edges, sources, sinks)


def _goes_away(graph: RecordedGraph, number: int, kept: frozenset[int], stores_all: bool) -> bool:
    """Whether the policy offloads all results that a value is held in place of."""
    rulings = [op.ruling for op in graph.sources(number, kept, lambda op: op.keep is not None)]
    return bool(rulings) and all(r is not None and (stores_all or r.offloads) for r in rulings)
