"""Who watches the regions of a forward: ``recollect.explain``, while it runs one.

Engines check once for each region whether there is an observer. They report that the region runs,
the tensors that autograd saves in it, what its policy decides, and what it offloads. What a region
holds is read from its engine after forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["RegionObserver", "observed_pack", "observing"]


class RegionObserver(Protocol):
    """Is told what the regions of this thread do."""

    def region(
        self, engine: str, function: Callable[..., Any], inputs: Any, source: Any
    ) -> AbstractContextManager[None]:
        """The context of a region's forward. ``source``: what its engine knows of the call."""

    def packing(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``pack``, the hook for each tensor that autograd saves in the region, observed."""

    def decided(self, op: Any, out: Any, ruling: Any, entry: Any) -> None:
        """A policy has decided on ``out``, the results of ``op``, kept as ``entry`` or not."""

    def offloaded(self, batch: Any, tensor: Any, offloaded: Any) -> None:
        """The offload batch of a region has put ``tensor`` into a store."""

    def fell_back(self, reason: str) -> None:
        """The replay engine leaves the next region to the rerun engine."""


class _Observing(threading.local):
    observer: RegionObserver | None = None


observing = _Observing()


def observed_pack(pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``pack``, a hook for saved tensors, observed if anybody does."""
    observer = observing.observer
    return pack if observer is None else observer.packing(pack)
