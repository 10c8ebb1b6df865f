"""Whose memory it is: the bytes of a simulated step, divided into bands such as modules.

The playback of `simulate`, with an owner for each change of memory. It is slow, and only used to
draw one plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from recollect.graph.graph import Graph
from recollect.graph.playback import Playback
from recollect.graph.schedule import Schedule

#: Bytes by band; bands without any may be missing.
_Bands = dict[int, int]


class Copy(NamedTuple):
    """A copy between device and host: when the link begins and ends it, and its bytes."""

    start: float
    end: float
    nbytes: int


class StackedStep(NamedTuple):
    """The memory of a step over time, and its copies."""

    #: Seconds, fixed bytes apart from `Graph.base`, and the bytes of each band.
    points: list[tuple[float, int, list[int]]]
    out: list[Copy]  #: to the host
    back: list[Copy]  #: from the host


def stacked(
    graph: Graph, schedule: Schedule | None, bands: Sequence[int], columns: int
) -> StackedStep:
    """The step under ``schedule``, as for `simulate`. ``bands``: by op, the band of its results.

    In each of ``columns`` equal spans of time, the highest point of the curve is taken.
    """
    run = _BandedPlayback(graph, schedule, bands)
    run.forward()
    run.backward()
    width = run.clock / columns or 1.0
    highest: dict[int, tuple[int, tuple[float, int, list[int]]]] = {}
    for seconds, fixed, levels in run.points():
        column, total = min(int(seconds / width), columns - 1), fixed + sum(levels)
        if column not in highest or total > highest[column][0]:
            highest[column] = total, (seconds, fixed, levels[:])
    return StackedStep([point for _, point in highest.values()], run.out, run.back)


class _BandedPlayback(Playback):
    """A playback that knows which band each byte belongs to."""

    def __init__(self, graph: Graph, schedule: Schedule | None, bands: Sequence[int]) -> None:
        count = len(graph.events) + 2
        self._bands = bands
        owners: dict[int, int] = {}
        for value in graph.values:  # values that are made in place belong to the first
            owners.setdefault(value.storage, bands[value.op])
        self._owners = owners
        #: By event: changes of memory before it.
        self._deltas: list[_Bands] = [{} for _ in range(count)]
        for number, storage in enumerate(graph.storages):
            _add(self._deltas[storage.born], owners.get(number, 0), storage.nbytes)
            _add(self._deltas[storage.dies + 1], owners.get(number, 0), -storage.nbytes)
        #: The changes of the current phase; by event, those once all is unpacked; by note, those
        #: until it.
        self._now: _Bands = {}
        self._unpacked: dict[int, _Bands] = {}
        self._noted: list[_Bands] = []
        self._shrunk: list[int] = []
        self.out: list[Copy] = []
        self.back: list[Copy] = []
        super().__init__(graph, schedule)

    # --- changes of memory ------------------------------------------------------------------------

    def _hold(self, kept: Iterable[int]) -> None:
        super()._hold(kept)
        for number, end in self.ends.items():
            storage, band = self.graph.storages[number], self._owners[number]
            _add(self._deltas[storage.dies + 1], band, storage.nbytes)
            if number not in self.holders:
                _add(self._deltas[end + 1], band, -storage.nbytes)

    def _drop(self, storage: int) -> None:
        super()._drop(storage)
        if not self.holders[storage]:
            after = self.ends[storage] + 1
            changes = self._now if after <= (self.phase + 1) // 2 else self._deltas[after]
            _add(changes, self._owners[storage], -self.graph.storages[storage].nbytes)

    def _shrink(self, value: int) -> None:
        super()._shrink(value)
        self._shrunk.append(value)
        self._change(value, -1)

    def _fetch(self, value: int) -> None:
        super()._fetch(value)
        self._change(value, 1)
        nbytes, link = self.tables.nbytes[value], self.link
        assert link is not None
        self.back.append(Copy(self.in_clock - nbytes / link.in_rate, self.in_clock, nbytes))

    def _send(self, numbers: Iterable[int]) -> None:
        link = self.link
        assert link is not None
        for number in numbers:
            super()._send([number])
            nbytes = self.tables.nbytes[number]
            self.out.append(Copy(self.out_clock - nbytes / link.out_rate, self.out_clock, nbytes))

    def _run_op(self, number: int) -> None:
        here, reads = self.working.here, self.graph.ops[number].reads
        for read in reads:  # first, as in the method below: the results come after them
            if read in self.offloaded and read not in here:
                self._fetch_now(read)
        was_here = [read for read in reads if read in here]
        results = self.graph.results[number]
        for value in results:
            self._change(value, 1)
        self._shrunk.clear()
        super()._run_op(number)
        # An op may read a value twice: it was counted as often.
        for old in self._shrunk:
            if old in was_here:
                was_here.remove(old)
        for value in results:
            if value not in here:
                self._change(value, -1)
        for value in was_here:
            if value not in here and not self.given[value]:
                self._change(value, -1)

    def _change(self, value: int, sign: int) -> None:
        band = self._bands[self.graph.values[value].op]
        _add(self._now, band, sign * self.tables.nbytes[value])

    # --- time -------------------------------------------------------------------------------------

    def _begin_phase(self, phase: int) -> None:
        if self.change or self.made != self.made_before:
            event = (self.phase + 1) // 2
            for band, nbytes in self._now.items():
                _add(self._deltas[event], band, nbytes)
            if self.phase % 2 == 0:
                self._unpacked[event] = self._now
            self._now = {}
        super()._begin_phase(phase)

    def _note(self, more: int) -> None:
        super()._note(more)
        self._noted.append(dict(self._now))

    def points(self) -> Iterator[tuple[float, int, list[int]]]:
        """As the curve of `simulate`: the bands of each event, and of the notes before it."""
        levels = [0] * (max(self._bands, default=0) + 1)
        seconds, during = [*self.tables.event_seconds, 0.0], self.tables.during
        clock = self.clocks[0]
        notes = deque(zip(self.notes, self._noted, strict=True))
        yield 0.0, 0, levels
        for event in range(len(during)):
            _apply(levels, self._deltas[event], int.__add__)
            while notes and notes[0][0][0] == event:
                (_, _, more, _, then), noted = notes.popleft()
                at_note = levels[:]
                _apply(at_note, self._unpacked.get(event, {}), int.__sub__)
                _apply(at_note, noted, int.__add__)
                yield then, more + self.states, at_note
            clock = self.clocks.get(event, clock)
            yield clock, during[event] + self.states, levels
            clock += seconds[event]


def _add(bands: _Bands, band: int, nbytes: int) -> None:
    bands[band] = bands.get(band, 0) + nbytes


def _apply(levels: list[int], changes: _Bands, change: Callable[[int, int], int]) -> None:
    for band, nbytes in changes.items():
        levels[band] = change(levels[band], nbytes)
