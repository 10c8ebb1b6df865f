"""A schedule by the names of ops: what a plan is, and what the engine plays (P6).

A policy decides by the kind of an op; a plan decides for each op of the model. The key by which it
is found in another call, perhaps with other shapes, is the module that runs it, its name, and how
many ops of that name the module had run before.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from types import FrameType
from typing import Any

import torch
from torch import nn

from recollect._torch.modules import MODULE_CALL
from recollect._torch.ops import op_name
from recollect.graph.graph import Graph
from recollect.graph.schedule import Schedule
from recollect.graph.simulate import simulate, uses_under
from recollect.policy.decisions import CheckpointPolicy
from recollect.policy.op_info import OpInfo
from recollect.policy.rulings import Ruling
from recollect.replay.recorded_graph import RecordedOp
from recollect.store.host import HostStore

__all__ = ["Alike", "NamedSchedule", "ScheduleQuery", "trimmed"]

#: Keys of ops, each with the positions of some of its results.
_Results = tuple[tuple[str, tuple[int, ...]], ...]


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


@dataclass(frozen=True)
class NamedSchedule:
    """A `Schedule` by the keys of ops: it applies to every call of a model, whatever its shapes.

    Args:
        kept: The results that stay on the device.
        away: The results that are offloaded.
        arrivals: Keys of ops, each with how many of the tensors that were offloaded first are freed
            when its function is over.
        limit: As in `Schedule`, like the next two.
        blocks: Paths of modules that are checkpointed as a whole, in place of all that. What is
            kept is then what goes from one to the next.
        alike: Finds the planned op for one that was not in the planned step.
    """

    kept: _Results = ()
    away: _Results = ()
    arrivals: tuple[tuple[str, int], ...] = ()
    limit: int = 0
    ahead: int | None = None
    begin: int | None = None
    blocks: tuple[str, ...] = ()
    alike: Alike | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, alike: Alike | None = None) -> NamedSchedule:
        """The same as ``schedule``, which is for ``graph``."""
        wanted = _wanted(graph, schedule)

        def results(numbers: frozenset[int]) -> _Results:
            found: dict[str, tuple[int, ...]] = {}
            for number in sorted(numbers):
                op = graph.ops[number]
                places = zip(op.makes, op.places, strict=True)
                found[op.key] = tuple(place for value, place in places if value in wanted)
            found.pop("", None)  # an op that cannot be named has its results kept anyway
            return tuple(found.items())

        arrivals = simulate(graph, schedule).arrivals
        return cls(
            results(schedule.kept | graph.forced),
            results(schedule.away),
            tuple((graph.ops[number].key, count) for number, count in arrivals),
            schedule.limit,
            schedule.ahead,
            schedule.begin,
            alike=alike,
        )

    def schedule_in(self, graph: Graph) -> Schedule:
        """The schedule for another graph of the same model."""
        numbers = {op.key: number for number, op in enumerate(graph.ops) if op.can_keep}
        kept = frozenset(n for key, n in numbers.items() if key and self._kept_as(key) is not None)
        away = frozenset(numbers[key] for key in self._away if key in numbers)
        if graph.link is None:  # it is where there is no other memory to offload to
            return Schedule(kept | away)
        return Schedule(kept - away, away, self.limit, self.ahead, self.begin)

    def to_json(self) -> dict[str, Any]:
        """What is written to a file."""
        content = asdict(replace(self, alike=None))
        del content["alike"]
        return content

    # --- for the engine ---------------------------------------------------------------------------

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Once: recordings are found by it in every call.
        return hash((self.kept, self.away, self.arrivals, self.limit, self.ahead, self.begin))

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self.__dataclass_fields__}

    @cached_property
    def _kept(self) -> dict[str, frozenset[int]]:
        return {key: frozenset(results) for key, results in self.kept}

    @cached_property
    def _away(self) -> dict[str, frozenset[int]]:
        return {key: frozenset(results) for key, results in self.away}

    @cached_property
    def _arrivals(self) -> dict[str, int]:
        return dict(self.arrivals)

    @cached_property
    def store(self) -> HostStore | None:
        """Where results are offloaded to."""
        if not self.away:
            return None
        # What is freed when is up to the schedule, and not to how fast copies are.
        return HostStore(in_flight=self.limit, ahead=self.ahead, _polls=False)

    def _kept_as(self, key: str) -> frozenset[int] | None:
        """The positions of the results that are kept of an op; None: it is recomputed."""
        found = self._kept.get(key)
        if found is None and self.alike is not None:
            found = self._kept.get(self.alike.of(key))
        return found

    def decide(self, key: str, op: RecordedOp) -> Ruling:
        """The decision for ``op``, whose key is ``key``."""
        op.key = key
        op.arrivals = self._arrivals.get(key, 0)
        op.planned = self._away.get(key)
        if op.planned is not None:
            return _OFFLOADED
        op.planned = self._kept_as(key)
        return _RECOMPUTED if op.planned is None else _KEPT


def trimmed(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule without results that backward does not need."""
    wanted = _wanted(graph, schedule)
    useful = {graph.values[value].op for value in wanted}
    return replace(schedule, kept=schedule.kept & useful, away=schedule.away & useful)


def _wanted(graph: Graph, schedule: Schedule) -> set[int]:
    """The values that are saved, or read to recompute others."""
    uses = uses_under(graph, schedule)
    saved = {each.value for each in graph.saved}
    return saved | {value for value, count in enumerate(uses) if count}


_KEPT = Ruling(CheckpointPolicy.MUST_SAVE, "planned", 0)
_OFFLOADED = Ruling(CheckpointPolicy.MUST_CPU_OFFLOAD, "planned", 0)
_RECOMPUTED = Ruling(CheckpointPolicy.PREFER_RECOMPUTE, "planned", 0)


class ScheduleQuery:
    """The decisions for one call of ``function``, in place of a policy's."""

    def __init__(
        self,
        schedule: NamedSchedule,
        function: Callable[..., Any],
        before: Iterable[RecordedOp] = (),
    ) -> None:
        self._schedule = schedule
        self._keys = _Keys(getattr(function, "__self__", function))
        self._keys.skip(op.key for op in before if op.key is not None)
        self.keep: Callable[[torch.Tensor, str, Ruling], None] | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        self.keep = None  # the autograd graph leads here by the hook that recorded it

    def decide(self, op: RecordedOp, info: OpInfo) -> Ruling:
        """The decision for an op."""
        return self._schedule.decide(self._keys.next(info.op, sys._getframe(1)), op)
