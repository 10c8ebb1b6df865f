"""A schedule by op names: what a plan stores, and what the engine plays (P6).

The key of an op is the same in every call, whatever the shapes: the module that runs it, its name,
and how many ops of that name the module has run before.
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
from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import simulate, uses_under
from recollect.policy.op_info import OpInfo
from recollect.policy.policy_call import Ruling
from recollect.policy.rules import CheckpointPolicy
from recollect.replay.recorded_graph import RecordedOp
from recollect.store.host import HostStore

#: Keys of ops, each with the positions of some of its results.
_Results = tuple[tuple[str, tuple[int, ...]], ...]
_Places = dict[str, frozenset[int]]


class Alike:
    """Finds a similar planned op for one that was not in the planned step.

    A longer loop calls the same ops once more, and a skipped layer is like its neighbours.
    ``counts``: by key without its number, how many such ops were planned.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts
        #: The same keys by their form, without any numbers.
        self._forms = {_form(start): start for start in reversed([*counts])}

    @classmethod
    def to_ops_of(cls, graph: Graph) -> Alike:
        return cls(op_counts(graph))

    def of(self, key: str) -> str:
        """``key`` if it was planned, else the key of a similar planned op if there is one."""
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


def op_counts(graph: Graph) -> Counter[str]:
    """How many ops of each name each module has."""
    counts = Counter[str]()
    for region in range(len(graph.regions)):
        keys = [graph.ops[number].key for number in graph.ops_of(region)]
        counts |= Counter(key.rpartition("|")[0] for key in keys if key)
    return counts


def _form(start: str) -> str:
    path, _, op = start.partition("|")
    return f"{_NUMBERS.sub('*', path)}|{op}"


_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class NamedSchedule:
    """A `Schedule` by the keys of ops: it applies to every call of a model, whatever its shapes.

    Args:
        kept: The results that stay on the device.
        offloaded: The results that are offloaded.
        arrivals: Keys of ops, each with how many offloaded tensors, the oldest first, are freed
            when its function ends.
        limit: As in `Schedule`, like all up to ``link_share``.
        units: As in `Graph`.
        prefix: Of the unit that it is a part for (see `within`); empty: for the whole model.
        alike: Finds the planned op for one that was not in the planned step.
    """

    kept: _Results = ()
    offloaded: _Results = ()
    arrivals: tuple[tuple[str, int], ...] = ()
    limit: int = 0
    ahead: int | None = None
    begin: int | None = None
    modules: tuple[tuple[str, str], ...] = ()
    link_share: float = 1.0
    units: tuple[str, ...] = ()
    prefix: str = ""
    alike: Alike | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, graph: Graph, schedule: Schedule, alike: Alike | None = None, region: int = 0
    ) -> NamedSchedule:
        """The same as ``schedule``, which is for ``graph``: its part for one region."""
        wanted, ops = _wanted(graph, schedule), graph.ops_of(region)

        def results(numbers: frozenset[int]) -> _Results:
            found: dict[str, tuple[int, ...]] = {}
            for number in sorted(numbers.intersection(ops)):
                op = graph.ops[number]
                places = zip(op.makes, op.places, strict=True)
                found[op.key] = tuple(place for value, place in places if value in wanted)
            found.pop("", None)  # results of ops without a key are kept anyway
            return tuple(found.items())

        arrivals = simulate(graph, schedule).arrivals
        return cls(
            results(schedule.kept | graph.forced),
            results(schedule.offloaded),
            tuple((graph.ops[number].key, count) for number, count in arrivals),
            schedule.limit,
            schedule.ahead,
            schedule.begin,
            schedule.modules,
            schedule.link_share,
            graph.units,
            alike=alike,
        )

    def schedule_in(self, graph: Graph, regions: Iterable[int] | None = None) -> Schedule:
        """The schedule for another graph of the same model, and for some of its regions."""
        numbers: Iterable[int] = range(len(graph.ops))
        if regions is not None:
            numbers = [number for region in regions for number in graph.ops_of(region)]
        keys = {n: graph.ops[n].key for n in numbers if graph.ops[n].can_keep}
        kept = frozenset(n for n, key in keys.items() if key and self._kept_as(key) is not None)
        offloaded = frozenset(n for n, key in keys.items() if key in self._tables[1])
        if graph.link is None:  # there is no host memory to offload to
            return Schedule(kept | offloaded, modules=self.modules)
        copies = self.limit, self.ahead, self.begin
        return Schedule(kept - offloaded, offloaded, *copies, self.modules, self.link_share)

    def to_json(self) -> dict[str, Any]:
        content = asdict(replace(self, alike=None))
        del content["alike"]
        return content

    # --- for the engine ---------------------------------------------------------------------------

    def within(self, path: str, call: int) -> NamedSchedule:
        """The part of it for a call of the unit at ``path``: so many came before it in forward.

        The keys of its ops begin with the path of the unit, and with the number of the call if
        that is not the first. The same object every time.
        """
        prefix = f"{path}@{call}" if call else path
        part = self._parts.get(prefix)
        if part is None:
            part = self._parts[prefix] = replace(self, prefix=prefix)
            # Most of it is the same, and a model may have hundreds of units.
            vars(part).update(_tables=self._tables, _hash=hash((self._hash, prefix)))
        return part

    @cached_property
    def _parts(self) -> dict[str, NamedSchedule]:
        return {}

    @property
    def wrapped(self) -> tuple[str, ...]:
        """The paths of the modules that are wrapped for it: checkpointed ones, and units."""
        return (*self.engines, *self.units)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Cached: every call looks up its recording by it.
        about = (self.kept, self.offloaded, self.arrivals, self.limit, self.begin, self.modules)
        return hash((*about, self.units, self.prefix))

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self.__dataclass_fields__}

    @cached_property
    def _tables(self) -> tuple[_Places, _Places, dict[str, int]]:
        """By key of an op: its kept results, its offloaded results, its arrivals."""
        kept, offloaded = (
            {key: frozenset(places) for key, places in results}
            for results in (self.kept, self.offloaded)
        )
        return kept, offloaded, dict(self.arrivals)

    @cached_property
    def engines(self) -> dict[str, str]:
        """The engine of each checkpointed module, by path."""
        return dict(self.modules)

    @cached_property
    def store(self) -> HostStore | None:
        if not self.offloaded:
            return None
        # The schedule decides when memory is freed, not the speed of copies.
        return HostStore(in_flight=self.limit, ahead=self.ahead, _polls=False)

    def _kept_as(self, key: str) -> frozenset[int] | None:
        """The positions of an op's kept results; None if it is recomputed."""
        kept = self._tables[0]
        return kept.get(key if key in kept or self.alike is None else self.alike.of(key))

    def decide(self, key: str, op: RecordedOp) -> Ruling:
        """The decision for ``op``, whose key is ``key``."""
        _, offloaded, arrivals = self._tables
        op.key, op.arrivals, op.planned = key, arrivals.get(key, 0), offloaded.get(key)
        if op.planned is not None:
            return _OFFLOADED
        op.planned = self._kept_as(key)
        return _RECOMPUTED if op.planned is None else _KEPT


def trimmed(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule without results that backward does not need."""
    wanted = _wanted(graph, schedule)
    useful = {graph.values[value].op for value in wanted}
    return replace(schedule, kept=schedule.kept & useful, offloaded=schedule.offloaded & useful)


def _wanted(graph: Graph, schedule: Schedule) -> set[int]:
    """The values that are saved, or read to recompute others."""
    uses = uses_under(graph, schedule)
    saved = {each.value for each in graph.saved}
    return saved | {value for value, count in enumerate(uses) if count}


_KEPT = Ruling(CheckpointPolicy.MUST_SAVE, "planned", 0)
_OFFLOADED = Ruling(CheckpointPolicy.MUST_CPU_OFFLOAD, "planned", 0)
_RECOMPUTED = Ruling(CheckpointPolicy.PREFER_RECOMPUTE, "planned", 0)


class ScheduleQuery:
    """The decisions for one call of ``function``, in place of a policy's.

    ``before``: the ops of the call that have run already.
    """

    def __init__(
        self,
        schedule: NamedSchedule,
        function: Callable[..., Any],
        before: Iterable[RecordedOp] = (),
    ) -> None:
        self._schedule = schedule
        self.keep: Callable[[torch.Tensor, str, Ruling], None] | None = None
        #: By module: its paths, several if blocks share it.
        self._paths: dict[int, list[str]] = {}
        root = getattr(function, "__self__", function)
        for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
            if not path:
                self._paths[id(module)] = [""]
            for name, child in module.named_children():
                self._paths.setdefault(id(child), []).append(f"{path}.{name}" if path else name)
        #: By key without its number: how many such ops have run.
        self._counts = Counter(op.key.rpartition("|")[0] for op in before if op.key is not None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        self.keep = None  # the autograd graph may hold this object through its hooks

    def decide(self, info: OpInfo, out: Any, args: Any, kwargs: Any, op: RecordedOp) -> Ruling:
        """The decision for ``op``, as of `PolicyCall`; the other arguments do not matter."""
        path, prefix = self._path(sys._getframe(1)), self._schedule.prefix
        if prefix:
            path = f"{prefix}.{path}" if path else prefix
        start = f"{path}|{info.name}"
        number = self._counts[start]
        self._counts[start] = number + 1
        return self._schedule.decide(f"{start}|{number}", op)

    def _path(self, frame: FrameType | None) -> str:
        """The path of the innermost module that is being called."""
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                paths = self._paths.get(id(frame.f_locals.get("self")))
                if paths is not None:
                    return paths[0] if len(paths) == 1 else self._path_in(paths, frame.f_back)
            frame = frame.f_back
        return ""

    def _path_in(self, paths: list[str], frame: FrameType | None) -> str:
        """The one of ``paths`` in the module that is being called around it, or the first."""
        around = self._path(frame)
        return next((path for path in paths if around and path.startswith(f"{around}.")), paths[0])
