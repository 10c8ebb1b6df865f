"""What a plan decides: whether the results of an op are kept, offloaded or recomputed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Decisions for the ops of a graph. The results of ops that are not named are recomputed.

    With ``modules``, these are checkpointed as a whole and everything else runs plain; ``kept`` is
    then what that keeps.

    Args:
        kept: The ops whose results stay on the device.
        offloaded: The ops whose results are offloaded to the host.
        limit: Bytes that may be in flight to the host.
        ahead: Bytes that may be prefetched; None: ``limit``.
        begin: Prefetching starts when this many saved tensors off the device are left; None: when
            backward starts.
        modules: Paths of modules, each with the engine that runs it.
        link_share: The part of the link's rates that it relies on.
    """

    kept: frozenset[int]
    offloaded: frozenset[int] = frozenset()
    limit: int = 0
    ahead: int | None = None
    begin: int | None = None
    modules: tuple[tuple[str, str], ...] = ()
    link_share: float = 1.0
