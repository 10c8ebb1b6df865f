"""Which modules to checkpoint as a whole, while everything else runs plain (P4).

An engine that decides op by op has to watch every op. Where a step is bound by launching kernels,
that costs more than running a few modules twice, and a module costs what was measured for its kind.
So the choice is a knapsack: free enough bytes, for the least seconds. Modules contain modules; one
that is checkpointed takes the place of those inside. It is solved
greedily, by bytes freed per second. Of equal modules the first to run is chosen, since backward
reaches it last, when little else is in memory. The simulator says how many choices a budget takes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

from recollect.graph.graph import Graph, Schedule
from recollect.planning.solving.pool import Pool, Solution

#: A module with more than this part of all saved bytes is no use: backward needs it all at once.
_TOO_LARGE = 0.5
#: How many choices, from none to all, are simulated for the frontier.
_SAMPLES = 24
#: How many modules are left out again, one by one, to see whether a budget is still kept.
_SPARED = 30
#: The rounding error of a bound.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ModuleCandidate:
    """A module that can be checkpointed."""

    path: str  #: its name in the model
    first: int  #: the number of its first op
    count: int  #: how many ops it has
    freed: int  #: the bytes of saved tensors that are freed if it is checkpointed
    seconds: float  #: what its ops take


def paths_around(path: str) -> list[str]:
    """The module itself and the modules around it: ``a.0.b`` is in ``a.0`` and in ``a``."""
    parts = path.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))] if path else []


def module_kind(path: str) -> str:
    """The path without numbers: repeated blocks have the same kind."""
    return re.sub(r"\d+", "*", path)


def find_units(graph: Graph, paths: Collection[str]) -> list[ModuleCandidate]:
    """The modules of ``paths`` that free something, in the order of forward."""
    ops = graph.ops
    inside: dict[str, list[int]] = {}
    for number, op in enumerate(ops):
        for path in paths_around(op.path):
            if path in paths:
                inside.setdefault(path, []).append(number)
    freed = _freed(graph, inside)
    saved = (graph.values[each.value] for each in graph.saved)
    most = _TOO_LARGE * sum({value.storage: value.nbytes for value in saved}.values())
    found = [
        ModuleCandidate(
            path, numbers[0], len(numbers), freed[path], sum(ops[n].seconds for n in numbers)
        )
        for path, numbers in inside.items()
        if 0 < freed[path] <= most and not any(ops[n].forced for n in numbers)
    ]
    return sorted(found, key=lambda unit: (unit.first, -unit.count))


def _freed(graph: Graph, inside: Iterable[str]) -> dict[str, int]:
    """By module: the bytes of the saved tensors that its ops make and only its ops read."""
    freed = dict.fromkeys(inside, 0)
    #: By value: the modules whose ops read it.
    readers: dict[int, set[str]] = {}
    for op in graph.ops:
        for read in op.reads:
            readers.setdefault(read, set()).add(op.path)
    seen: set[int] = set()
    for saved in graph.saved:
        value = graph.values[saved.value]
        if value.storage in seen:
            continue
        seen.add(value.storage)
        around = paths_around(graph.ops[value.op].path)
        for path in readers.get(saved.value, ()):
            around = [each for each in around if each in paths_around(path)]
        for path in around:
            if path in freed:
                freed[path] += value.nbytes
    return freed


def block_paths(graph: Graph, paths: Collection[str]) -> tuple[str, ...]:
    """The blocks of a model: the outermost modules of ``paths`` with a number for a name."""
    found: dict[str, None] = {}
    for op in graph.ops:
        around = [path for path in paths_around(op.path) if path in paths]
        numbered = [path for path in around if path.rpartition(".")[2].isdecimal()]
        found |= dict.fromkeys(numbered[:1])
    return tuple(found)


def module_schedule(graph: Graph, modules: Iterable[tuple[str, str]]) -> Schedule:
    """The schedule that checkpoints ``modules``, each given with its engine."""
    chosen = tuple(modules)
    paths = {path for path, _ in chosen}
    homes = {
        path: next((p for p in paths_around(path) if p in paths), "")
        for path in {op.path for op in graph.ops}
    }
    home = [homes[op.path] for op in graph.ops]
    kept = {number for number, path in enumerate(home) if not path}
    for number, op in enumerate(graph.ops):
        # What goes from one module to another is an argument, which is held.
        makers = (graph.values[value].op for value in op.reads)
        kept.update(maker for maker in makers if home[maker] != home[number])
    return Schedule(frozenset(n for n in kept if graph.ops[n].can_keep), modules=chosen)


def kept_between_blocks(graph: Graph) -> frozenset[int]:
    """The ops that are kept if every block is checkpointed."""
    paths = {path for op in graph.ops for path in paths_around(op.path)}
    return module_schedule(graph, [(path, "rerun") for path in block_paths(graph, paths)]).kept


class ModuleSolver:
    """Finds modules to checkpoint in a graph whose `Graph.module_costs` are known."""

    def __init__(self, graph: Graph, units: Iterable[ModuleCandidate]) -> None:
        self._graph = graph
        #: By module: the engine that costs least.
        self._engines: dict[str, str] = {}
        for path, engine in sorted(graph.module_costs, key=graph.module_costs.__getitem__):
            self._engines.setdefault(path, engine)
        self._units = {unit.path: unit for unit in units if unit.path in self._engines}
        self._pool = Pool(graph)

    def solve(self, budget: int) -> Solution | None:
        """The quickest solution that stays within ``budget`` bytes, if there is one."""
        low, high = 0, len(self._choices)
        while low < high:  # the more is checkpointed, the lower the peak
            middle = (low + high) // 2
            if self._try(self._choices[middle]) <= budget:
                high = middle
            else:
                low = middle + 1
        if low < len(self._choices):
            paths = self._choices[low]
            # Some may not be needed for it: leave them out, the most costly first.
            for path in sorted(paths, key=self._cost, reverse=True)[:_SPARED]:
                fewer = tuple(each for each in paths if each != path)
                if fewer and self._try(fewer) <= budget:
                    paths = fewer
        return self._pool.under(budget)

    def frontier(self) -> list[Solution]:
        """Solutions that no other is better than: ascending peaks, descending seconds."""
        last = len(self._choices) - 1
        for number in sorted({round(last * n / (_SAMPLES - 1)) for n in range(_SAMPLES)}):
            self._try(self._choices[number])
        return self._pool.frontier()

    def _try(self, paths: Iterable[str]) -> int:
        modules = [(path, self._engines[path]) for path in paths]
        return self._pool.evaluate(module_schedule(self._graph, modules)).peak

    def _cost(self, path: str) -> float:
        return self._graph.module_costs[path, self._engines[path]]

    @cached_property
    def _choices(self) -> list[tuple[str, ...]]:
        """The checkpointed modules after each greedy choice: more bytes are freed each time."""
        units = self._units
        around = {
            path: [each for each in paths_around(path)[:-1] if each in units] for path in units
        }
        within: dict[str, list[str]] = {path: [] for path in units}
        for path, outer in around.items():
            for each in outer:
                within[each].append(path)
        chosen: set[str] = set()

        def gain(path: str) -> tuple[float, float]:
            """The bytes that it frees, and its cost, beyond those of the modules inside."""
            inner = [each for each in within[path] if each in chosen]
            freed = units[path].freed - sum(units[each].freed for each in inner)
            return freed, self._cost(path) - sum(map(self._cost, inner))

        def entry(path: str) -> tuple[float, int, str]:
            freed, cost = gain(path)
            return -freed / max(cost, 1e-9), units[path].first, path

        heap = [entry(path) for path in units]
        heapify(heap)
        found: list[tuple[str, ...]] = []
        while heap:
            known = heappop(heap)
            path = known[2]
            if path in chosen or any(each in chosen for each in around[path]):
                continue
            now = entry(path)
            if now != known:  # modules inside have been chosen since
                heappush(heap, now)
                continue
            if gain(path)[0] <= 0:
                continue
            chosen.difference_update(within[path])
            chosen.add(path)
            found.append(tuple(sorted(chosen, key=lambda each: units[each].first)))
        return found

    def bound(self, budget: int) -> float:
        """Seconds that no choice of modules within ``budget`` can be below.

        At the peak of the plain step, at least the bytes have to be freed that it has too many.
        Whatever is chosen, a byte costs no less than with the module that frees most for a second.
        """
        plain = self._pool.evaluate(Schedule(frozenset(range(len(self._graph.ops)))))
        rates = [self._cost(path) / unit.freed for path, unit in self._units.items()]
        too_many = max(0, plain.peak - budget)
        return self._graph.plain_seconds + (1 - _ROUNDING) * too_many * min(rates, default=0.0)
