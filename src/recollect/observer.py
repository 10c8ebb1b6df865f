"""How engines report to ``recollect.explain`` what their regions do.

Engines check once per region whether there is an observer. They report that the region runs, the
tensors that autograd saves in it, the decisions of its policy, and the tensors that it offloads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class RegionObserver(Protocol):
    """Receives reports about the regions of this thread."""

    def region(
        self, engine: str, function: Callable[..., Any], inputs: Any, source: Any
    ) -> AbstractContextManager[None]:
        """The context of a region's forward. ``source``: the engine's own object for the call."""

    def packing(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``pack``, the hook for each tensor that autograd saves in the region, observed."""

    def decided(self, op: Any, out: Any, ruling: Any, entry: Any) -> None:
        """A policy has decided on ``out``, the results of ``op``, kept as ``entry`` or not."""

    def offloaded(self, batch: Any, tensor: Any, offloaded: Any) -> None:
        """The offload batch of a region has put ``tensor`` into a store."""

    def fell_back(self, reason: str) -> None:
        """Replay falls back to rerun for the next region."""


class _Observing(threading.local):
    observer: RegionObserver | None = None


observing = _Observing()


def observed_pack(pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``pack``, a hook for saved tensors, observed if there is an observer."""
    observer = observing.observer
    return pack if observer is None else observer.packing(pack)
