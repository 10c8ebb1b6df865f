"""When a value is needed, recomputed, and freed: one set of rules for engine and simulator.

The replay engine runs this code on tensors, the simulator on bytes. So the simulator predicts
exactly what the engine does.

Forward drops values that are not held. Backward unpacks saved tensors, roughly from the last to the
first:

1. A missing value is recomputed: `missing_ops` finds the ops.
2. A recomputed value stays in the `WorkingSet` and is freed after its last use: a read by an op
   that runs again, or an unpack by autograd.
3. A held value is freed once the first saved tensor that needs it, and all after that, are dead
   (`pop_unneeded`), at the next unpack of a value that is not in the working set.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class _FlowOp(Protocol):
    @property
    def reads(self) -> Sequence[int]:
        """The values that it reads."""


class _FlowValue(Protocol):
    @property
    def op(self) -> int:
        """The op that makes it; -1 if none does."""


class Dataflow(Protocol):
    """Ops and values by number: a recorded region, or the graph of a training step."""

    @property
    def ops(self) -> Sequence[_FlowOp]:
        """In the order in which forward ran them."""

    @property
    def values(self) -> Sequence[_FlowValue]:
        """The values that they read or make."""


class Needs(NamedTuple):
    """The ops and inputs needed to recompute all saved tensors."""

    uses: list[int]  #: by value: how often it is read or unpacked
    again: set[int]  #: the ops that run again
    #: The values to recompute from, each with the index of the first saved tensor that needs it,
    #: sorted by that index.
    order: list[tuple[int, int]]


def find_needs(flow: Dataflow, saved: Iterable[int], held: Container[int]) -> Needs:
    """Find what is needed to recompute the ``saved`` values from the ``held`` ones."""
    ops, values = flow.ops, flow.values
    uses = [0] * len(values)
    again: set[int] = set()
    first: dict[int, int] = {}
    for index, tensor in enumerate(saved):
        uses[tensor] += 1
        wanted = [tensor]
        while wanted:
            value = wanted.pop()
            op = values[value].op
            if value in held or op < 0:
                if value not in first:
                    first[value] = index
            elif op not in again:
                again.add(op)
                for read in ops[op].reads:
                    uses[read] += 1
                    wanted.append(read)
    return Needs(uses, again, list(first.items()))


def missing_ops(
    flow: Dataflow, value: int, here: Container[int], held: Container[int]
) -> list[int]:
    """The ops that make ``value`` from values that are ``here`` or ``held``, in order."""
    ops, values = flow.ops, flow.values
    found: set[int] = set()
    wanted = [value]
    while wanted:
        each = wanted.pop()
        if each in here or each in held:
            continue
        op = values[each].op
        if op not in found:
            assert op >= 0, "a value that no op makes, and nobody holds"
            found.add(op)
            wanted += ops[op].reads
    return sorted(found)


def pop_unneeded(order: list[tuple[int, int]], alive: int) -> list[int]:
    """Remove from ``order`` the values that only dead saved tensors need, and return them.

    Alive are the first ``alive`` of the saved tensors: backward frees them from the last to the
    first.
    """
    found = []
    while order and order[-1][1] >= alive:
        found.append(order.pop()[0])
    return found


class WorkingSet(Generic[T]):
    """Values that one backward has recomputed or fetched and still needs."""

    __slots__ = ("given", "here", "uses")

    def __init__(self, uses: list[int]) -> None:
        #: By value: how often it will still be read or unpacked.
        self.uses = uses
        #: By value.
        self.here: dict[int, T] = {}
        #: The values that autograd has unpacked: nobody may write to them.
        self.given: set[int] = set()

    def use(self, value: int) -> None:
        """A value was read or unpacked."""
        left = self.uses[value] - 1
        self.uses[value] = left
        if left <= 0:
            self.here.pop(value, None)

    def give(self, value: int) -> None:
        """Autograd unpacks a saved tensor."""
        self.given.add(value)
        left = self.uses[value] - 1  # as in `use`
        self.uses[value] = left
        if left <= 0:
            self.here.pop(value, None)

    def use_up(self, value: int) -> bool:
        """Use a value that an op writes to in place; returns whether the op needs no copy of it."""
        self.use(value)
        return value not in self.here and value not in self.given

    def end_op(self, reads: Iterable[int], results: Iterable[tuple[int, T]]) -> None:
        """An op has run again: free values after their last use, and keep results still needed."""
        uses, here = self.uses, self.here
        for value in reads:
            left = uses[value] - 1
            uses[value] = left
            if left <= 0:
                here.pop(value, None)
        for value, result in results:
            if uses[value] > 0:
                here[value] = result
