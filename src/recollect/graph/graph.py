"""A training step as the planner sees it: ops, the memory they make, and when backward wants it.

A step is a row of `Moment`, one for each op that ran, forward and backward. The ops of the region
that is planned (`Op`) make values; autograd saves some of them, and asks for them again in backward
(`Ask`). What is to become of a value is decided by the op that makes it: its results are kept, go
to the host, or are made again. Everything else that has memory (gradients, the loss, parameters)
is not for the plan to change, and stands in the moments as a number of bytes.

Pure data: no torch here, nor in what simulates and solves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

__all__ = ["Ask", "Graph", "Link", "Memory", "Moment", "Op", "Origins", "Tally", "Value"]


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of memory that ops of the region make in forward.

    Args:
        nbytes: As the allocator counts it.
        born: The moment of the op that makes it.
        dies: The last moment at which somebody besides autograd and the plan still holds it.
    """

    nbytes: int
    born: int
    dies: int


@dataclass(frozen=True, slots=True)
class Value:
    """What a memory holds from one write to the next. An op makes it.

    Args:
        nbytes: Of its memory.
        op: The number of the op that makes it.
        memory: The number of its memory in forward. Values made in place share one.
    """

    nbytes: int
    op: int
    memory: int


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the region, which may run again in backward.

    Args:
        name: Such as ``aten::mm``.
        path: The module that called it.
        key: What it is called in a plan; the same in every call of the model, whatever its shapes.
        seconds: What it takes.
        reads: The values of the region that it reads.
        makes: The values that it makes on new memory.
        places: Which of its results each of them is.
        writes: The values that it makes in place: of each what was there before (None if it does
            not look at that), and what is there then.
        workspace: The bytes that it allocates besides, while it runs.
        state: The bytes that are held for it to run again: where a generator stood.
        can_keep: Whether its results can be kept.
        can_send: Whether they can go to the host.
        forced: Whether they are, by any plan: it must not run again.
        last: The number of the last op of its function, after which results go to the host; -1: it
            is the last.
    """

    name: str
    path: str
    key: str
    seconds: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[tuple[int | None, int], ...] = ()
    places: tuple[int, ...] = ()
    workspace: int = 0
    state: int = 0
    can_keep: bool = True
    can_send: bool = False
    forced: bool = False
    last: int = -1


@dataclass(frozen=True, slots=True)
class Ask:
    """A tensor that autograd saved, and asks for once in backward.

    Args:
        value: Which.
        saved: The moment of forward in which it was saved.
    """

    value: int
    saved: int


@dataclass(frozen=True, slots=True)
class Moment:
    """An op that ran in the step.

    Args:
        seconds: What it took.
        before: Bytes not for the plan to change that are allocated before it runs, counted from
            `Graph.base`.
        during: The most of them while it runs.
        op: The number of the op of the region that it is; -1 if it is none.
        asks: What backward asks for before it, by number.
        ends: Which of the saved tensors are let go after it.
    """

    seconds: float
    before: int
    during: int
    op: int = -1
    asks: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """The way to the memory of the host.

    Args:
        out_rate: Bytes a second to the host.
        in_rate: Bytes a second from the host.
    """

    out_rate: float
    in_rate: float


@dataclass(frozen=True, slots=True)
class Origins:
    """What the bytes of a graph are made of, for them to be found anew if memories take others.

    Args:
        memories: By number of a memory of the graph: its number among all that the step made.
        made: By moment: which memories are made in it that are not for the plan to change.
        freed: By moment: which of them are let go before it.
        workspaces: By moment: the bytes that its op allocates besides.
        block: What the allocator hands out are multiples of this.
    """

    memories: tuple[int, ...]
    made: tuple[tuple[int, ...], ...]
    freed: tuple[tuple[int, ...], ...]
    workspaces: tuple[int, ...]
    block: int = 1

    def size(self, nbytes: int) -> int:
        """As the allocator counts it."""
        return -(-nbytes // self.block) * self.block


@dataclass(frozen=True)
class Tally:
    """What one forward came to.

    Args:
        made: By module: the bytes that its ops made. No mapping, which could be changed.
        saved: The bytes of that which autograd saved.
        gradients: The bytes of the tensors from outside that require a gradient.
        is_whole: Whether it was recorded to its end.
    """

    made: tuple[tuple[str, int], ...]
    saved: int
    gradients: int
    is_whole: bool = True


@dataclass(frozen=True)
class Graph:
    """One training step.

    Args:
        ops: Those of the region, in the order of forward.
        values: What they make.
        memories: Where, in forward.
        asks: What autograd saved of that, in the order of forward.
        moments: The step: forward, from ``turn`` on backward, and what follows it.
        turn: The number of the first moment of backward.
        base: Bytes that are allocated throughout: parameters, buffers, optimizer state.
        rerun_cost: Seconds that it takes to run an op again, beside its own.
        engine_cost: Seconds that the engine adds to a step that runs by a plan, whatever it keeps.
        spread: By how much the times of ops may be off, as a fraction: samples differed so.
        link: The way to the host, if there is one.
        varies: Whether shapes depend on data, and may be others in the next step.
        origins: What its bytes are made of, if that is known.
        outline: The same step, as it is judged by the recording of its forward alone.
        tally: What its forward came to.
    """

    ops: Sequence[Op]
    values: Sequence[Value]
    memories: Sequence[Memory]
    asks: Sequence[Ask]
    moments: Sequence[Moment]
    turn: int
    base: int = 0
    rerun_cost: float = 0.0
    engine_cost: float = 0.0
    spread: float = 0.0
    link: Link | None = None
    varies: bool = False
    origins: Origins | None = field(default=None, compare=False, repr=False)
    outline: Graph | None = field(default=None, compare=False, repr=False)
    tally: Tally | None = field(default=None, compare=False, repr=False)

    @cached_property
    def results(self) -> list[tuple[int, ...]]:
        """By op: the values that it makes."""
        return [(*op.makes, *(new for _, new in op.writes)) for op in self.ops]

    @cached_property
    def plain_seconds(self) -> float:
        """What the step takes if everything is kept."""
        return sum(moment.seconds for moment in self.moments)

    @cached_property
    def forced(self) -> frozenset[int]:
        """The ops that must not run again."""
        return frozenset(number for number, op in enumerate(self.ops) if op.forced)

    @cached_property
    def needed(self) -> frozenset[int]:
        """The ops that would run again if nothing were kept that need not be."""
        return self.wanted(frozenset())

    def wanted(self, kept: frozenset[int]) -> frozenset[int]:
        """The ops whose results are asked for, or read by others that run again."""
        found: set[int] = set()
        values = [ask.value for ask in self.asks]
        while values:
            number = self.values[values.pop()].op
            if number not in found:
                found.add(number)
                if number not in kept and not self.ops[number].forced:
                    values += self.ops[number].reads
        return frozenset(found)

    @cached_property
    def last_op(self) -> int:
        """The last op that ran in forward; -1 if there is none."""
        return max((moment.op for moment in self.moments), default=-1)

    @cached_property
    def choices(self) -> list[int]:
        """The ops for which there is something to decide, in the order of forward."""
        ops = self.ops
        return sorted(n for n in self.needed if ops[n].can_keep and not ops[n].forced)
