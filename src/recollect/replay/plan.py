"""What to keep, for everything that backward asks for to be had again.

Policies speak of ops: this one is dear, do not repeat it. That is a question of which buffers to
hold, and there is a choice: the result itself, or what was made from it, whatever is least. The
answer is a minimum cut between the ops that are not to be repeated and the tensors that autograd
saved, where holding a buffer costs its whole memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from recollect.replay.mincut import FOREVER, minimum_cut
from recollect.replay.planned_ops import held_by
from recollect.replay.steps import Step
from recollect.replay.tape import Buffer, Op, Tape, results_of

__all__ = ["Plan", "first_uses", "forced_in", "holdable", "saved_by", "uses_of"]


def first_uses(tape: Tape, asked: Iterable[Buffer], kept: Container[int]) -> list[tuple[int, int]]:
    """What ``asked`` is made from, each with how many of them come before the first it is for.

    In the order of that.
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    for number, ask in enumerate(asked):
        wanted = [ask]
        while wanted:
            buffer = wanted.pop()
            op = tape.maker_of(buffer)
            if buffer.number in kept or op is None:
                found.setdefault(buffer.number, number)
            elif op.number not in seen:
                seen.add(op.number)
                wanted += op.reads
    return list(found.items())


def uses_of(tape: Tape, asked: Iterable[Buffer], kept: Container[int]) -> list[int]:
    """How often each buffer is read or asked for when all of ``asked`` are had again."""
    uses = [0] * len(tape.buffers)
    seen: set[int] = set()
    wanted: list[Buffer] = []
    for buffer in asked:
        uses[buffer.number] += 1
        wanted.append(buffer)
    while wanted:
        buffer = wanted.pop()
        op = tape.maker_of(buffer)
        if buffer.number in kept or op is None or op.number in seen:
            continue
        seen.add(op.number)
        for read in op.reads:
            uses[read.number] += 1
            wanted.append(read)
    return uses


def _must_not_run(op: Op) -> bool:
    reason = op.keep or op.later
    return reason is not None or any(read.unsure is not None for read in op.reads)


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
        #: How often each buffer is wanted. What autograd saved of the kept stays with autograd.
        tickets = [buffer for buffer in saved_by(steps) if buffer.number not in here]
        self.uses = uses_of(tape, tickets, chosen)
        #: What is held for others to be made from, with how many tickets need it no more by then.
        self.order = first_uses(tape, tickets, chosen)
        wanted = [buffer for buffer in tape.buffers if self.uses[buffer.number]]
        #: What has to be caught for others to be made from it; also what a function makes that is
        #: no result of an op.
        self.caught = frozenset(
            b.number
            for b in wanted
            if b.number in chosen or (b.maker is None and b.outside is None)
        )
        #: The outside tensors that are needed, by their number.
        self.outsides = frozenset(b.outside for b in wanted if b.outside is not None)
        #: The ops whose generators must be read.
        self.draws = frozenset(
            b.maker
            for b in wanted
            if b.maker is not None
            and b.number not in chosen
            and tape.ops[b.maker].generator is not None
        )


def forced_in(tape: Tape, steps: list[Step]) -> frozenset[int]:
    """The buffers that are kept whatever a plan says, since what makes them must not run again."""
    can_be_held = holdable(steps)
    _hold_saved(steps, _blocked(tape) - can_be_held)
    return _choose(tape, saved_by(steps), can_be_held, ())


def saved_by(steps: list[Step]) -> list[Buffer]:
    """What autograd saves in ``steps``, and does not hold itself."""
    packs = (pack for step in steps for pack in step.packs)
    return [pack.view.buffer for pack in packs if pack.view is not None]


def _blocked(tape: Tape) -> set[int]:
    """The buffers that cannot be made again without an op that must not run."""
    found: set[int] = set()
    for op in tape.ops:
        if _must_not_run(op) or any(read.number in found for read in op.reads):
            found.update(buffer.number for buffer in results_of(op))
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
    saved = {buffer.number for buffer in saved_by(steps)}
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
            if buffer.is_last and buffer.maker is not None and first <= buffer.maker < last:
                found.add(buffer.number)
    return found


def _planned(tape: Tape, can_be_held: set[int]) -> dict[int, bool]:
    """What a plan has held, each with whether it goes to a store."""
    return {
        buffer.number: op.ruling.offloads
        for op in tape.ops
        for buffer in held_by(op)
        if buffer.number in can_be_held
    }


def _choose(
    tape: Tape, asked: list[Buffer], can_be_held: set[int], planned: Container[int]
) -> frozenset[int]:
    """The cheapest buffers to hold, beside those that are held by plan."""
    needed: dict[int, Op] = {}
    wanted = list(asked)
    while wanted:
        buffer = wanted.pop()
        op = None if buffer.number in planned else tape.maker_of(buffer)
        if op is not None and op.number not in needed:
            needed[op.number] = op
            wanted += op.reads
    if not any(_must_not_run(op) for op in needed.values()):
        return frozenset()
    costs: dict[int, int] = {}
    edges: list[tuple[int, int]] = []
    sources: list[int] = []
    for op in needed.values():
        for buffer in results_of(op):
            if buffer.number in planned:
                continue
            costs[buffer.number] = buffer.nbytes if buffer.number in can_be_held else FOREVER
            if _must_not_run(op):
                sources.append(buffer.number)
            else:
                edges += [(read.number, buffer.number) for read in op.reads]
    sinks = {buffer.number for buffer in asked if buffer.number in costs}
    edges = [(a, b) for a, b in edges if a in costs]
    return minimum_cut(costs, edges, sources, sinks)


def _goes_away(tape: Tape, number: int, kept: frozenset[int], stores_all: bool) -> bool:
    """Whether all that need not run again thanks to a buffer was to be stored elsewhere."""
    answers = []
    seen = {number}
    wanted = [tape.buffers[number]]
    while wanted:
        op = tape.maker_of(wanted.pop())
        if op is None:
            continue
        if op.keep is not None:
            answers.append(op.ruling is not None and (stores_all or op.ruling.offloads))
            continue
        for read in op.reads:
            if read.number not in seen and read.number not in kept:
                seen.add(read.number)
                wanted.append(read)
    return bool(answers) and all(answers)
