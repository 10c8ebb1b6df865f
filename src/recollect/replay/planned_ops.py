"""Decisions about single ops of a model, as a plan makes them, in place of a policy.

A policy speaks of kinds of ops; a plan says of each op of the model what becomes of its results. To
find it again in another call, with other shapes perhaps, an op is called by the module that runs
it, its name, and how many of that name the module had run before.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from recollect._torch.modules import MODULE_CALL
from recollect._torch.ops import op_name
from recollect.policy.decisions import CheckpointPolicy
from recollect.policy.op_info import OpInfo
from recollect.policy.rulings import Ruling
from recollect.replay.tape import Op
from recollect.store.protocol import Store

__all__ = ["Alike", "Decisions", "Directed"]


class _Keys:
    """What the ops of one call of ``root`` are called, one after the other."""

    def __init__(self, root: Any) -> None:
        names = root.named_modules() if isinstance(root, nn.Module) else ()
        self._names = {id(module): name for name, module in names}
        self._counts: Counter[tuple[str, str]] = Counter()

    def path(self, frame: FrameType | None) -> str:
        """The innermost module that is being called."""
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                name: str | None = self._names.get(id(frame.f_locals.get("self")))
                if name is not None:
                    return name
            frame = frame.f_back
        return ""

    def next(self, op: Any, frame: FrameType | None) -> str:
        """What a call of ``op`` is called, made from ``frame``."""
        place = self.path(frame), op_name(op)
        number = self._counts[place]
        self._counts[place] = number + 1
        return f"{place[0]}|{place[1]}|{number}"

    def skip(self, keys: Iterable[str]) -> None:
        """These have been called before."""
        for key in keys:
            path, name, _ = key.split("|")
            self._counts[path, name] += 1


class Alike:
    """Which op of a planned step is like one that was not in it.

    A loop that runs longer calls the same ops once more, and a layer that was left out is like its
    neighbours. ``counts``: by what a key has before its number, how many of them there were.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts
        #: By such a beginning with all numbers in it left out: one of those that are like it.
        self._forms = {_form(start): start for start in reversed([*counts])}

    def of(self, key: str) -> str:
        """The key of an op that was planned: this one, if it was, else one like it if any is."""
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


class Decisions:
    """Which results of the ops of a model are kept or sent away; all others are made again.

    Known by identity, as recordings are made under it.

    Args:
        kept: By key of an op: the numbers of its results that stay on the device.
        away: The same, of those that go to the host.
        store: Where they go to.
        arrivals: By key of an op: how many of those that were sent first are let go when its
            function is over.
        begin: How many tickets are left when fetching ahead begins; None: it begins with backward.
        alike: What ops that were not in the planned step are like.
    """

    __slots__ = ("__weakref__", "alike", "arrivals", "away", "begin", "kept", "store")

    def __init__(
        self,
        kept: Mapping[str, frozenset[int]],
        away: Mapping[str, frozenset[int]] | None = None,
        store: Store | None = None,
        arrivals: Mapping[str, int] | None = None,
        begin: int | None = None,
        alike: Alike | None = None,
    ) -> None:
        self.alike = alike
        self.kept = kept
        self.away = {} if away is None else away
        self.store = store
        self.arrivals = {} if arrivals is None else arrivals
        self.begin = begin

    def __deepcopy__(self, memo: Any) -> Decisions:
        return self

    def decide(self, key: str, op: Op) -> Ruling:
        """What becomes of the results of ``op``, which is called ``key``."""
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


class Directed:
    """The decisions for one call of ``function``. Stands where a policy's `PolicyCall` does."""

    def __init__(
        self, decisions: Decisions, function: Callable[..., Any], before: Iterable[Op] = ()
    ) -> None:
        self._decisions = decisions
        self._keys = _Keys(getattr(function, "__self__", function))
        self._keys.skip(op.key for op in before if op.key is not None)
        self.keep: Callable[[torch.Tensor, str, Ruling], None] | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        self.keep = None  # it was recorded, and that leads here

    def decide(self, op: Op, info: OpInfo) -> Ruling:
        """What is to become of the result of an op."""
        return self._decisions.decide(self._keys.next(info.op, sys._getframe(1)), op)
