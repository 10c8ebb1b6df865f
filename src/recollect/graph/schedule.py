"""What a plan decides: whether the results of an op are kept, offloaded or recomputed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Decisions for the ops of a graph. The results of ops that are not named are recomputed.

    With ``modules``, these are checkpointed as a whole and everything else runs plain; ``kept`` is
    then what that keeps.
    """

    kept: frozenset[int]  #: the ops whose results stay on the device
    offloaded: frozenset[int] = frozenset()  #: the ops whose results are offloaded to the host
    limit: int = 0  #: bytes that may be in flight to the host
    ahead: int | None = None  #: bytes that may be prefetched; None: ``limit``
    #: Prefetching starts when this many saved tensors off the device are left; None: when backward
    #: starts.
    begin: int | None = None
    #: Paths of modules, each with the engine that runs it.
    modules: tuple[tuple[str, str], ...] = ()
    link_share: float = 1.0  #: the part of the link's rates that it relies on
