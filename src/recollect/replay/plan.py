"""What to keep, for everything that backward asks for to be had again.

Policies speak of ops: this one is dear, do not repeat it. That is a question of which buffers to
hold, and there is a choice: the result itself, or what was made from it, whatever is least. The
answer is a minimum cut between the ops that are not to be repeated and the tensors that autograd
saved, where holding a buffer costs its whole memory.
"""

from __future__ import annotations

from collections.abc import Container

from recollect.graph.release import find_needs
from recollect.replay.mincut import FOREVER, minimum_cut
from recollect.replay.steps import Step
from recollect.replay.tape import Op, Tape

__all__ = ["Plan", "forced_in", "holdable", "saved_by"]


def _must_not_run(tape: Tape, op: Op) -> bool:
    reason = op.keep or op.later
    return reason is not None or any(tape.values[n].unsure is not None for n in op.reads)


class Plan:
    """For one recording: which buffers are kept, and where each is caught.

    ``stores_all``: whatever a policy keeps goes to a store.
    """

    __slots__ = ("away", "caught", "draws", "kept", "order", "outsides", "uses")

    def __init__(self, tape: Tape, steps: list[Step], *, stores_all: bool) -> None:
        can_be_held = holdable(steps)
        _hold_saved(steps, _blocked(tape) - can_be_held)
        planned = _planned(tape, can_be_held)
        chosen = _choose(tape, saved_by(steps), can_be_held, planned) | planned.keys()
        #: What is not made again.
        self.kept = chosen
        #: What of that goes to a store.
        self.away = frozenset(
            n
            for n in chosen
            if (planned[n] if n in planned else _goes_away(tape, n, chosen, stores_all))
        )
        here = chosen - self.away
        # What autograd saved of the kept stays with autograd.
        needs = find_needs(tape, [n for n in saved_by(steps) if n not in here], chosen)
        #: How often each buffer is wanted.
        self.uses = needs.uses
        #: What is held for others to be made from, with the first ticket that needs it.
        self.order = needs.order
        wanted = [tape.values[number] for number, _ in needs.order]
        #: What has to be caught for others to be made from it; also what a function makes that is
        #: no result of an op.
        self.caught = frozenset(b.number for b in wanted if b.number in chosen or b.outside is None)
        #: The outside tensors that are needed, by their number.
        self.outsides = frozenset(b.outside for b in wanted if b.outside is not None)
        #: The ops whose generators must be read.
        self.draws = frozenset(n for n in needs.again if tape.ops[n].generator is not None)


def forced_in(tape: Tape, steps: list[Step]) -> frozenset[int]:
    """The buffers that are kept whatever a plan says, since what makes them must not run again."""
    can_be_held = holdable(steps)
    _hold_saved(steps, _blocked(tape) - can_be_held)
    return _choose(tape, saved_by(steps), can_be_held, ())


def saved_by(steps: list[Step]) -> list[int]:
    """The buffers that autograd saves in ``steps``, and does not hold itself."""
    packs = (pack for step in steps for pack in step.packs)
    return [pack.view.buffer.number for pack in packs if pack.view is not None]


def _blocked(tape: Tape) -> set[int]:
    """The buffers that cannot be made again without an op that must not run."""
    found: set[int] = set()
    for op in tape.ops:
        if _must_not_run(tape, op) or any(read in found for read in op.reads):
            found.update(op.results)
    return found


def _hold_saved(steps: list[Step], numbers: set[int]) -> None:
    """Have autograd hold what it saved of some buffers, for which nothing else can be held."""
    for step in steps:
        for pack in step.packs:
            if pack.view is not None and pack.view.buffer.number in numbers:
                pack.view = None


def holdable(steps: list[Step]) -> set[int]:
    """The buffers that are seen by the time the step that made them ends."""
    found: set[int] = set()
    saved = set(saved_by(steps))
    for step in steps:
        first, last = step.ops
        seen = [view.buffer for view in step.returns if view is not None]
        seen += [view.buffer for _, view in step.changed]
        # The user may change what the region returns; what is saved may not be changed anyway,
        # unless in ways that autograd does not notice.
        seen = [buffer for buffer in seen if not buffer.is_output or buffer.number in saved]
        seen += [pack.view.buffer for pack in step.packs if pack.view is not None]
        seen = [buffer for buffer in seen if not (buffer.is_output and buffer.unsure)]
        for buffer in seen:
            if buffer.is_last and first <= buffer.op < last:
                found.add(buffer.number)
    return found


def _planned(tape: Tape, can_be_held: set[int]) -> dict[int, bool]:
    """What a plan has held, each with whether it goes to a store."""
    return {
        number: op.ruling.offloads for op in tape.ops for number in op.held if number in can_be_held
    }


def _choose(
    tape: Tape, saved: list[int], can_be_held: set[int], planned: Container[int]
) -> frozenset[int]:
    """The cheapest buffers to hold, beside those that are held by plan."""
    needed = [tape.ops[n] for n in find_needs(tape, saved, planned).again]
    never = {op.number for op in needed if _must_not_run(tape, op)}
    if not never:
        return frozenset()
    costs: dict[int, int] = {}
    edges: list[tuple[int, int]] = []
    sources: list[int] = []
    for op in needed:
        for number in op.results:
            if number in planned:
                continue
            costs[number] = tape.values[number].nbytes if number in can_be_held else FOREVER
            if op.number in never:
                sources.append(number)
            else:
                edges += [(read, number) for read in op.reads]
    sinks = {number for number in saved if number in costs}
    edges = [(a, b) for a, b in edges if a in costs]
    return minimum_cut(costs, edges, sources, sinks)


def _goes_away(tape: Tape, number: int, kept: frozenset[int], stores_all: bool) -> bool:
    """Whether all that need not run again thanks to a buffer was to be stored elsewhere."""
    answers = []
    seen = {number}
    wanted = [number]
    while wanted:
        op = tape.maker_of(tape.values[wanted.pop()])
        if op is None:
            continue
        if op.keep is not None:
            answers.append(op.ruling is not None and (stores_all or op.ruling.offloads))
            continue
        for read in op.reads:
            if read not in seen and read not in kept:
                seen.add(read)
                wanted.append(read)
    return bool(answers) and all(answers)
