"""Simulates a step under a schedule: its peak memory, and its time (P4).

Every solver is judged by it. The bytes at each event if nothing is kept for backward are computed
once per graph (`Tables`); the changes that a schedule makes are added to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import add
from typing import NamedTuple

from recollect.graph.graph import Graph, Schedule, Tables
from recollect.graph.playback import Playback, results_of
from recollect.graph.release import find_needs

#: Covers rounding: a lower bound is summed in another order.
_ROUNDED_DOWN = 1 - 1e-12


@dataclass(frozen=True, slots=True)
class Outcome:
    """The memory and time of a schedule."""

    peak: int  #: the peak of allocated bytes
    seconds: float  #: the time of the step
    rerun: float  #: the part of it in which ops run again
    waits: float  #: the part of it in which the device waits for copies
    busiest: int  #: the number of the event with the peak
    #: The parts of the peak: the base, other fixed bytes (gradients, the loss, workspace), kept
    #: bytes, and recomputed or fetched bytes.
    parts: tuple[int, int, int, int]
    #: The ops after which offloaded tensors are freed on the device, each with how many, the oldest
    #: first.
    arrivals: tuple[tuple[int, int], ...] = ()
    #: The seconds and bytes whenever memory changes, if asked for.
    curve: tuple[tuple[float, int], ...] = ()
    #: The second at which each event begins, if the curve was asked for.
    starts: tuple[float, ...] = ()


def simulate(
    graph: Graph,
    schedule: Schedule | None,
    *,
    curve: bool = False,
    unheld: frozenset[int] = frozenset(),
) -> Outcome:
    """Simulate the step of ``graph`` under ``schedule``, which does not hold ``unheld`` values.

    None: without a plan. Autograd holds all saved tensors.
    """
    return _outcome(Playback(graph, schedule, unheld).play(), curve=curve)


def simulate_if(
    graph: Graph, schedule: Schedule, is_useful: Callable[[int, float], bool]
) -> Outcome | None:
    """`simulate`, or None if ``is_useful`` rejects lower bounds on the peak and seconds.

    The bounds take a fraction of the time.
    """
    run = Playback(graph, schedule)
    run.forward()
    if not is_useful(*_at_least(run)):
        return None
    run.backward()
    return _outcome(run)


def simulate_plain(graph: Graph, *, curve: bool = False) -> Outcome:
    """`simulate` without a plan."""
    return simulate(graph, None, curve=curve)


class Transfer(NamedTuple):
    """An offloaded value on its way."""

    value: int  #: its number
    freed: int  #: the op after which it is freed on the device
    fetched: int  #: the event before which the copy back begins


def transfers_under(graph: Graph, schedule: Schedule) -> list[Transfer]:
    """The offloaded values, in the order in which they leave the device."""
    run = Playback(graph, schedule).play()
    offloaded = [value for op in sorted(run.offloads) for value in run.offloads[op]]
    freed = [op for op, count in run.arrivals for _ in range(count)]
    return [
        Transfer(value, op, run.fetches[value])
        for value, op in zip(offloaded, freed, strict=True)
        if value in run.fetches
    ]


def levels_under(graph: Graph, schedule: Schedule) -> list[int]:
    """By event: the bytes during it, without what is recomputed for it and freed before."""
    return _levels(Playback(graph, schedule).play())


def uses_under(graph: Graph, schedule: Schedule) -> list[int]:
    """By value: how often backward reads or unpacks it, if it is not kept."""
    kept = results_of(graph, schedule.kept | graph.forced)
    held = kept | results_of(graph, schedule.offloaded)
    missing = [saved.value for saved in graph.saved if saved.value not in kept]
    return find_needs(graph, missing, held).uses


def _outcome(run: Playback, *, curve: bool = False) -> Outcome:
    levels = _levels(run)
    peak, busiest, parts = _peak(run, levels)
    drawn, starts = _curve(run, levels) if curve else ((), ())
    return Outcome(
        peak, run.clock, run.rerun, run.waits, busiest, parts, tuple(run.arrivals), drawn, starts
    )


def _levels(run: Playback) -> list[int]:
    return list(map(add, run.tables.least, accumulate(run.changes)))


def _at_least(run: Playback) -> tuple[int, float]:
    """After forward: lower bounds on the peak and the seconds."""
    tables, changes = run.tables, run.changes[:]
    until = {number: run.ends[number] for number, count in run.holders.items() if count}
    # Without the memory of recomputed values. A value that others are recomputed from is held until
    # its first ticket and all later ones are dead.
    for tickets, order in zip(run.tickets, run.order, strict=True):
        dead = [*accumulate([tables.frees[ticket] for ticket in reversed(tickets)], max)]
        for value, index in order:
            number = run.graph.values[value].storage
            until[number] = max(until[number], dead[-1 - index])
    for number, end in until.items():
        changes[end + 1] -= tables.sizes[number]
    peak = max(map(add, tables.least, accumulate(changes))) + run.states
    rerun = max(0.0, sum([run.seconds[op] for op in run.again]) - run.rerun)
    seconds = run.clock + sum(tables.event_seconds[run.over :]) + rerun
    return peak, seconds * _ROUNDED_DOWN


def _noted(run: Playback, levels: list[int]) -> list[int]:
    """The bytes at each note. ``levels``: by event, the bytes during it."""
    during, unpacked = run.tables.during, run.unpacked
    return [
        levels[event] - during[event] - unpacked.get(event, 0) + change + more
        for event, change, more, _, _ in run.notes
    ]


def _peak(run: Playback, levels: list[int]) -> tuple[int, int, tuple[int, int, int, int]]:
    peak = max(levels)
    event = levels.index(peak)
    more = run.tables.during[event]
    made = -1
    if run.notes:
        noted = _noted(run, levels)
        most = max(noted)
        note = run.notes[noted.index(most)]
        if most > peak or (most == peak and note[0] <= event):
            peak, (event, _, more, made, _) = most, note
    if peak + run.states <= 0:
        return 0, 0, (0, 0, 0, 0)
    if made < 0:
        made = sum(run.changes_made[: event + 1])
    peak += run.states
    base = run.graph.base
    busiest = min(event, max(0, len(levels) - 2))  # not the end, but the last event
    return peak, busiest, (base, more, peak - base - more - made, made)


def _curve(
    run: Playback, levels: list[int]
) -> tuple[tuple[tuple[float, int], ...], tuple[float, ...]]:
    """The seconds and bytes of each event, and of the notes before it; and when events begin."""
    seconds, states = [*run.tables.event_seconds, 0.0], run.states
    curve, starts = [(0.0, run.graph.base)], []
    clock = run.clocks[0]
    notes = deque(zip(run.notes, _noted(run, levels), strict=True))
    for now, level in enumerate(levels):
        while notes and notes[0][0][0] == now:
            (_, _, _, _, then), nbytes = notes.popleft()
            curve.append((then, nbytes + states))
        clock = run.clocks.get(now, clock)
        curve.append((clock, level + states))
        starts.append(clock)
        clock += seconds[now]
    return tuple(curve), tuple(starts[:-1])


# --- whose memory it is ---------------------------------------------------------------------------

#: A number for each band, in so many bits of one large number.
_BITS = 64


#: Seconds, fixed bytes apart from `Graph.base`, and the bytes of each band.
_Point = tuple[float, int, list[int]]


class Copy(NamedTuple):
    """A copy between device and host: when the link begins and ends it, and its bytes."""

    start: float
    end: float
    nbytes: int


class StackedStep(NamedTuple):
    """The memory of a step over time, divided into bands such as modules, and its copies."""

    points: list[_Point]
    out: list[Copy]  #: to the host
    back: list[Copy]  #: from the host


def stacked(
    graph: Graph, schedule: Schedule | None, bands: Sequence[int], most: int
) -> StackedStep:
    """The step under ``schedule``, as for `simulate`. ``bands``: by op, the band of its results.

    There are at most ``most`` points.
    """
    run = Playback(graph, schedule, tables=Tables(_packed(graph, bands))).play()
    points = [*_points(run, bands)]
    copies = [
        [Copy(start, end, graph.values[value].nbytes) for start, end, value in way]
        for way in (run.out, run.back)
    ]
    return StackedStep([*_seen(points, run.clock, most // 2)], *copies)


def _seen(points: list[_Point], end: float, spans: int) -> Iterator[_Point]:
    """The highest and the last point in each of equal spans of time.

    The last one ends a spike, which otherwise seems to last until the next span.
    """
    width = end / spans or 1.0
    for _, span in groupby(points, lambda point: min(int(point[0] / width), spans - 1)):
        *others, last = span
        highest = max((*others, last), key=lambda point: point[1] + sum(point[2]))
        yield from [highest] if highest is last else [highest, last]


def _points(run: Playback, bands: Sequence[int]) -> Iterator[_Point]:
    """The curve of a step that was played with the tables of a `_packed` graph."""
    shifts = [_BITS * n for n in range(max(bands, default=0) + 2)]
    for seconds, packed in _curve(run, _levels(run))[0]:
        fixed, *levels = [packed >> shift & (1 << _BITS) - 1 for shift in shifts]
        yield seconds, fixed - run.graph.base, levels


def _packed(graph: Graph, bands: Sequence[int]) -> Graph:
    """The graph with the bytes of each band in bits of their own. The lowest are the fixed bytes.

    Memory is only added up. So what is added to a band stays in its bits.
    """
    shifts = [_BITS * (band + 1) for band in bands]
    owners: dict[int, int] = {}
    for value in graph.values:  # values that are made in place belong to the first
        owners.setdefault(value.storage, shifts[value.op])
    return replace(
        graph,
        values=[replace(value, nbytes=value.nbytes << shifts[value.op]) for value in graph.values],
        storages=[
            replace(storage, nbytes=storage.nbytes << owners.get(number, _BITS))
            for number, storage in enumerate(graph.storages)
        ],
    )
