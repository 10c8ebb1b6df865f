"""Decisions about single ops of a model, as a plan makes them, in place of a policy.

A policy decides by the kind of an op; a plan decides for each op of the model. The key by which it
is found in another call, perhaps with other shapes, is the module that runs it, its name, and how
many ops of that name the module had run before.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from recollect._torch.modules import MODULE_CALL
from recollect._torch.ops import op_name
from recollect.policy.decisions import CheckpointPolicy
from recollect.policy.op_info import OpInfo
from recollect.policy.rulings import Ruling
from recollect.replay.recorded_graph import RecordedOp
from recollect.store.protocol import Store

__all__ = ["Alike", "PlannedOps", "PlannedQuery"]


class _Keys:
    """The keys of the ops of one call of ``root``, one after the other."""

    def __init__(self, root: Any) -> None:
        names = root.named_modules() if isinstance(root, nn.Module) else ()
        self._names = {id(module): name for name, module in names}
        self._counts: Counter[tuple[str, str]] = Counter()

    def path(self, frame: FrameType | None) -> str:
        """The path of the innermost module that is being called."""
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                name: str | None = self._names.get(id(frame.f_locals.get("self")))
                if name is not None:
                    return name
            frame = frame.f_back
        return ""

    def next(self, op: Any, frame: FrameType | None) -> str:
        """The key of a call of ``op``, made from ``frame``."""
        place = self.path(frame), op_name(op)
        number = self._counts[place]
        self._counts[place] = number + 1
        return f"{place[0]}|{place[1]}|{number}"

    def skip(self, keys: Iterable[str]) -> None:
        """Count ops that have run before."""
        for key in keys:
            path, name, _ = key.split("|")
            self._counts[path, name] += 1


class Alike:
    """Finds the planned op that is most like one that was not in the planned step.

    A loop that runs longer calls the same ops once more, and a layer that was skipped is like its
    neighbours. ``counts``: by key without its number, how many such ops were planned.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts
        #: The same keys by their form, without any numbers.
        self._forms = {_form(start): start for start in reversed([*counts])}

    def of(self, key: str) -> str:
        """``key`` if it was planned, else the key of a planned op like it if there is one."""
        start, _, number = key.rpartition("|")
        count = self._counts.get(start)
        if count is None:
            start = self._forms.get(_form(start), "")
            count = self._counts.get(start)
            if count is None:
                return key
        elif int(number) < count:
            return key
        return f"{start}|{int(number) % count}"


def _form(start: str) -> str:
    path, _, op = start.partition("|")
    return f"{_NUMBERS.sub('*', path)}|{op}"


_NUMBERS = re.compile(r"\d+")


@dataclass(eq=False)
class PlannedOps:
    """Which results of the ops of a model are kept or offloaded; all others are recomputed.

    Compared by identity: a recording belongs to one of these.

    Args:
        kept: By key of an op: the positions of its results that stay on the device.
        away: The same, of those that are offloaded.
        store: Where they are offloaded to.
        arrivals: By key of an op: how many of the tensors that were offloaded first are freed when
            its function is over.
        begin: How many tickets are left when fetching ahead begins; None: it begins with backward.
        alike: Finds decisions for ops that were not in the planned step.
    """

    kept: Mapping[str, frozenset[int]]
    away: Mapping[str, frozenset[int]] = field(default_factory=dict)
    store: Store | None = None
    arrivals: Mapping[str, int] = field(default_factory=dict)
    begin: int | None = None
    alike: Alike | None = None

    def __deepcopy__(self, memo: Any) -> PlannedOps:
        return self

    def decide(self, key: str, op: RecordedOp) -> Ruling:
        """The decision for ``op``, whose key is ``key``."""
        op.key = key
        op.arrivals = self.arrivals.get(key, 0)
        if key in self.away:
            op.planned = self.away[key]
            return _OFFLOADED
        known = key if key in self.kept or self.alike is None else self.alike.of(key)
        op.planned = self.kept.get(known)
        return _RECOMPUTED if op.planned is None else _KEPT


_KEPT = Ruling(CheckpointPolicy.MUST_SAVE, "planned", 0)
_OFFLOADED = Ruling(CheckpointPolicy.MUST_CPU_OFFLOAD, "planned", 0)
_RECOMPUTED = Ruling(CheckpointPolicy.PREFER_RECOMPUTE, "planned", 0)


class PlannedQuery:
    """The decisions for one call of ``function``, in place of a policy's."""

    def __init__(
        self, decisions: PlannedOps, function: Callable[..., Any], before: Iterable[RecordedOp] = ()
    ) -> None:
        self._decisions = decisions
        self._keys = _Keys(getattr(function, "__self__", function))
        self._keys.skip(op.key for op in before if op.key is not None)
        self.keep: Callable[[torch.Tensor, str, Ruling], None] | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        self.keep = None  # the autograd graph leads here by the hook that recorded it

    def decide(self, op: RecordedOp, info: OpInfo) -> Ruling:
        """The decision for an op."""
        return self._decisions.decide(self._keys.next(info.op, sys._getframe(1)), op)
