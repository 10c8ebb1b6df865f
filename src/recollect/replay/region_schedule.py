"""Which values later calls of a recorded region hold, and what follows from that (R7).

Policies speak of ops: this one is expensive, do not repeat it. That leaves a choice of values to
hold: the result itself, or something computed from it, whichever is smaller. The choice is a
minimum cut between the ops that must not be repeated and the tensors that autograd saved, where
holding a value costs its whole storage. A plan names the values, and what it does not know of is
chosen in the same way.
"""

from __future__ import annotations

from collections.abc import Container

from recollect.graph.flow import FOREVER, minimum_cut
from recollect.graph.release import find_needs
from recollect.replay.function_call import FunctionCall
from recollect.replay.recorded_graph import RecordedGraph, RecordedOp

__all__ = ["RegionSchedule", "find_holdable", "forced_values", "saved_by"]


class RegionSchedule:
    """The values of a recording that are held or offloaded.

    Args:
        graph: The recorded graph.
        calls: The recorded functions.
        stores_all: Whether everything that the policy keeps is offloaded.
    """

    __slots__ = ("away", "caught", "chains", "draws", "kept", "order", "outsides", "uses")

    def __init__(
        self, graph: RecordedGraph, calls: list[FunctionCall], *, stores_all: bool
    ) -> None:
        holdable = find_holdable(calls)
        _leave_to_autograd(graph, calls, holdable)
        #: What a plan has held, each with whether it is offloaded.
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
        # Autograd holds the saved tensors of values that stay on the device.
        here = self.kept - self.away
        needs = find_needs(graph, [n for n in saved if n not in here], self.kept)
        #: By value: how often backward uses it.
        self.uses = needs.uses
        #: The values that others are recomputed from, each with the first ticket that needs it.
        self.order = needs.order
        sources = [graph.values[number] for number, _ in needs.order]
        #: The values that a call has to catch: the kept ones of these, and constants that a
        #: function made without an op.
        self.caught = frozenset(
            each.number for each in sources if each.number in self.kept or each.outside is None
        )
        #: The outside tensors that are needed, by their number.
        self.outsides = frozenset(each.outside for each in sources if each.outside is not None)
        #: The ops that draw again, and whose generators must be read.
        self.draws = frozenset(n for n in needs.again if graph.ops[n].generator is not None)
        #: By value: the ops that recompute it from what is kept, once they are known.
        self.chains: dict[int, list[int]] = {}


def forced_values(graph: RecordedGraph, calls: list[FunctionCall]) -> frozenset[int]:
    """The values that are kept whatever a plan says, since their ops must not run again."""
    holdable = find_holdable(calls)
    _leave_to_autograd(graph, calls, holdable)
    return _choose(graph, saved_by(calls), holdable, ())


def saved_by(calls: list[FunctionCall]) -> list[int]:
    """The values that autograd saves in ``calls``, and does not hold itself."""
    packs = (pack for call in calls for pack in call.packed)
    return [pack.view.value.number for pack in packs if pack.view is not None]


def find_holdable(calls: list[FunctionCall]) -> set[int]:
    """The values that a call can hold: those it can still get at when their function ends."""
    found: set[int] = set()
    saved = set(saved_by(calls))
    for call in calls:
        first, last = call.ops
        seen = [view.value for view in call.returns if view is not None]
        seen += [view.value for _, view in call.changed]
        # The user may change what the region returns. What autograd saved must not be changed
        # anyway, unless in ways that it does not notice.
        seen = [value for value in seen if not value.is_output or value.number in saved]
        seen += [pack.view.value for pack in call.packed if pack.view is not None]
        found.update(
            value.number
            for value in seen
            if value.is_last and first <= value.op < last and not (value.is_output and value.unsure)
        )
    return found


def _leave_to_autograd(graph: RecordedGraph, calls: list[FunctionCall], holdable: set[int]) -> None:
    """Have autograd hold the saved tensors that can be neither recomputed nor held otherwise."""
    blocked: set[int] = set()
    for op in graph.ops:
        if _must_not_run(graph, op) or any(read in blocked for read in op.reads):
            blocked.update(op.results)
    blocked -= holdable
    for call in calls:
        for pack in call.packed:
            if pack.view is not None and pack.view.value.number in blocked:
                pack.view = None


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
    """Whether the policy offloads all results that need not be recomputed thanks to a value."""
    rulings = [op.ruling for op in graph.sources(number, kept, lambda op: op.keep is not None)]
    return bool(rulings) and all(r is not None and (stores_all or r.offloads) for r in rulings)
