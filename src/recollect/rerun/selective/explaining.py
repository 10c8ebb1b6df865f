"""Who wants to know what regions do: ``recollect.explain``, for the time of one forward.

Regions are run by modules that know nothing of explaining. They ask here, once for each region,
whether somebody is, and let that somebody make the parts through which tensors go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from recollect.policy.rules import Policy
from recollect.policy.rulings import Ruling
from recollect.rerun.selective.ledger import Entry
from recollect.rerun.selective.record import RecordMode
from recollect.store.offload_batch import OffloadBatch
from recollect.store.protocol import Store

__all__ = ["Explainer", "Replayed", "explaining", "make_offload_batch"]


class Replayed(Protocol):
    """Sees one call of a region of the replay engine."""

    def packing(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """``pack``, the hook that is called when autograd saves a tensor, watched."""

    def goes_on(self, recall: Any) -> None:
        """The call is not as recorded: from here on ``recall`` holds what is held."""

    def end(self, stopped: str | None) -> None:
        """The call is over. ``stopped``: why everything is held from some point on, if it is."""


class Explainer(Protocol):
    """Sees what becomes of the tensors of all regions of a forward."""

    def note(self, op: Any, out: Any, ruling: Ruling, entry: Entry | None) -> None:
        """As an `Observer` of every policy."""

    def applies(self, record: RecordMode, policy: Policy) -> None:
        """``record`` will run a region under ``policy``."""

    def deposit(self, store: Store | None) -> OffloadBatch:
        """Where a region puts what it sends away."""

    def frame(self, *args: Any) -> Any:
        """A frame of the rerun engine, with these arguments."""

    def slot(self, function: Callable[..., Any], signature: Any) -> Any:
        """What the replay engine may change of what it remembers of a function."""

    def replayed(
        self, function: Callable[..., Any], policy: Policy | None, recall: Any, slot: Any
    ) -> AbstractContextManager[Replayed]:
        """What a region of the replay engine runs in."""

    def left(self, reason: str) -> None:
        """The replay engine leaves a region to the rerun engine."""

    def reentrant(
        self, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> AbstractContextManager[None]:
        """What a region of the reentrant engine runs in."""


class _Explaining(threading.local):
    explainer: Explainer | None = None


explaining = _Explaining()


def make_offload_batch(store: Store | None) -> OffloadBatch:
    """Where one region puts what it sends away."""
    explainer = explaining.explainer
    return OffloadBatch(store) if explainer is None else explainer.deposit(store)
