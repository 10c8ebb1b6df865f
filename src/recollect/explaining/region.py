"""One call of a checkpointed region, as far as it matters for what it holds and recomputes."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType

__all__ = ["NO_POLICY", "REENTRANT", "Region", "Seen"]

NO_POLICY = "no policy"
REENTRANT = "reentrant: forward runs without grad"

#: An op that ran in a region, how many had by then, and the memory that it made.
Seen = tuple[Any, int, list[Any]]


class Region:
    """One call of a checkpointed region."""

    def __init__(self, name: str, otherwise: str, engine: str = "rerun") -> None:
        self.name = name
        self.engine = engine
        #: What else is to be said of it.
        self.notes: list[str] = []
        #: Why an op is recomputed of which no policy says anything.
        self.otherwise = otherwise
        #: How many ops have run; how many had when autograd last saved a tensor.
        self.ops = 0
        self.last_save = 0
        self.early_stop = False
        #: Whether it runs without a graph, so that nobody knows what backward needs.
        self.is_blind = otherwise is REENTRANT
        #: The engine's part, alive as long as the graph.
        self.frame: ReferenceType[Any] | None = None
        #: Bytes of the random states that it holds.
        self.rng_bytes = 0
        #: Where ops and not the function are run again: those that ran, and the numbers of those
        #: that will run again.
        self.seen: list[Seen] | None = [] if engine == "replay" else None
        self.again: set[int] = set()

    @property
    def is_alive(self) -> bool:
        """Whether it can be recomputed: the graph is there."""
        return self.is_blind or (self.frame is not None and self.frame() is not None)

    def runs_again(self, number: int) -> bool:
        """Whether the recomputation gets to the op that was the ``number``-th."""
        if self.seen is not None:
            return number in self.again
        return self.is_blind or not self.early_stop or number <= self.last_save
