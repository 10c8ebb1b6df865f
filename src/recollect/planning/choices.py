"""What a plan decides, under the names by which the engine knows the ops of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recollect.graph.graph import Graph
from recollect.graph.simulate import Schedule, simulate, uses_under
from recollect.planning.blocks import Blocks
from recollect.replay.planned_ops import Alike, PlannedOps
from recollect.store.host import HostStore

__all__ = ["Choices", "trimmed"]

#: Keys of ops, each with which of its results. No mapping, which could be changed.
Results = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Choices:
    """A schedule that does not depend on the graph it was made for.

    Args:
        kept: What stays on the device.
        away: What goes to the host.
        arrivals: Keys of ops, each with how many of what was sent first are let go after it.
        limit: As in `Schedule`, as the others.
        blocks: Paths of modules that are checkpointed, each as a whole, in place of all that. What
            is kept is then what goes from one to another.
    """

    kept: Results
    away: Results
    arrivals: tuple[tuple[str, int], ...]
    limit: int
    ahead: int | None
    begin: int | None
    blocks: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule) -> Choices:
        """Those of a schedule for ``graph``."""
        wanted = _wanted(graph, schedule)

        def results(numbers: frozenset[int]) -> Results:
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
        )

    def schedule_in(self, graph: Graph, alike: Alike | None = None) -> Schedule:
        """The schedule for another graph of the same model, by the names of its ops."""
        numbers = {op.key: number for number, op in enumerate(graph.ops) if op.can_keep}
        kept = frozenset(numbers[key] for key, _ in self.kept if key in numbers)
        if alike is not None:
            names = {key for key, _ in self.kept}
            kept |= frozenset(n for key, n in numbers.items() if key and alike.of(key) in names)
        away = frozenset(numbers[key] for key, _ in self.away if key in numbers)
        if graph.link is None:  # it is where there is no other memory to send to
            return Schedule(kept | away)
        return Schedule(kept, away, self.limit, self.ahead, self.begin)

    def decisions(self, alike: Alike | None = None) -> PlannedOps:
        """What the engine goes by. Others at every call: recordings know them by identity."""
        if self.blocks:
            return Blocks()
        store = None
        if self.away:  # what is free when is up to the plan, and not to how fast copies are
            store = HostStore(in_flight=self.limit, ahead=self.ahead, _polls=False)
        kept = {key: frozenset(results) for key, results in self.kept}
        away = {key: frozenset(results) for key, results in self.away}
        return PlannedOps(kept, away, store, dict(self.arrivals), self.begin, alike)


def trimmed(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule without what nobody would ask for, and does not have to be kept then."""
    wanted = _wanted(graph, schedule)
    useful = {graph.values[value].op for value in wanted}
    return replace(schedule, kept=schedule.kept & useful, away=schedule.away & useful)


def _wanted(graph: Graph, schedule: Schedule) -> set[int]:
    """The values that are asked for, or read to make others."""
    uses = uses_under(graph, schedule)
    asked = {saved.value for saved in graph.saved}
    return asked | {value for value, count in enumerate(uses) if count}
