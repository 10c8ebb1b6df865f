"""One call of a checkpointed region, as far as it matters for what it holds and recomputes."""

from __future__ import annotations

from weakref import ReferenceType

from recollect.engines.rerun import Frame

__all__ = ["REENTRANT", "Region"]

REENTRANT = "reentrant: forward runs without grad"


class Region:
    """One call of a checkpointed region."""

    def __init__(self, name: str, otherwise: str) -> None:
        self.name = name
        #: Why an op is recomputed of which no policy says anything.
        self.otherwise = otherwise
        #: How many ops have run; how many had when autograd last saved a tensor.
        self.ops = 0
        self.last_save = 0
        self.early_stop = False
        #: Whether it runs without a graph, so that nobody knows what backward needs.
        self.is_blind = otherwise is REENTRANT
        #: The engine's part, alive as long as the graph.
        self.frame: ReferenceType[Frame] | None = None
        #: Bytes of the random states that it holds.
        self.rng_bytes = 0

    @property
    def is_alive(self) -> bool:
        """Whether it can be recomputed: the graph is there."""
        return self.is_blind or (self.frame is not None and self.frame() is not None)

    def runs_again(self, number: int) -> bool:
        """Whether the recomputation gets to the op that was the ``number``-th."""
        return self.is_blind or not self.early_stop or number <= self.last_save
