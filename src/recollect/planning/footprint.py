"""The forward that a plan was made for, in bytes: what the forwards under it are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from recollect.graph.graph import Graph, Tally
from recollect.graph.simulate import simulate
from recollect.planning.choices import Choices
from recollect.replay.planned_ops import Alike
from recollect.replay.recording import Recording
from recollect.replay.steps import Step
from recollect.replay.tape import Tape

__all__ = ["Footprint", "counted", "estimated", "tally_of"]


def tally_of(recording: Recording, before: Tape | None = None, steps: Iterable[Step] = ()) -> Tally:
    """What a forward came to. ``before``, ``steps``: of the part before what was recorded."""
    made: dict[str, int] = {}
    sizes: dict[tuple[int, int], int] = {}
    for part, tape in enumerate((before or Tape(), recording.tape)):
        for op in tape.ops:
            if op.makes:
                key = op.key
                path = "" if key is None else key.partition("|")[0]
                for buffer in (tape.values[number] for number in op.makes):
                    sizes[part, buffer.memory] = buffer.nbytes
                    made[path] = made.get(path, 0) + buffer.nbytes
    saved = {
        (part, pack.memory)
        for part, each in enumerate((steps, recording.steps))
        for step in each
        for pack in step.packs
        if pack.memory is not None
    }
    outsides = [each.buffer for each in recording.outsides.values() if each.looks[4]]
    return Tally(
        made=tuple(made.items()),
        saved=sum(sizes.get(place, 0) for place in saved),
        gradients=sum(buffer.nbytes for buffer in outsides if buffer is not None),
        is_whole=recording.reason is None,
    )


@dataclass(frozen=True)
class Footprint:
    """The forward of the step that was planned, and what outlines of others are worth.

    Args:
        tally: What it came to.
        factors: Bytes for each byte that the outline of a step is estimated at: under the choices
            of the plan, then under each of its alternatives.
        counts: By module and name of an op, as keys have them, how many of it there were.
    """

    tally: Tally
    factors: tuple[float, ...]
    counts: tuple[tuple[str, int], ...]

    @cached_property
    def alike(self) -> Alike:
        """Which of these ops others are like."""
        return Alike(dict(self.counts))

    def growth(self, other: Tally) -> int:
        """The bytes by which another forward is above this one, wherever that is."""
        saved = max(0, other.saved - self.tally.saved)
        return self.made_more(other) + saved + max(0, other.gradients - self.tally.gradients)

    def made_more(self, other: Tally) -> int:
        """The same of what its ops make."""
        known = dict(self.tally.made)
        return sum(max(0, size - known.get(path, 0)) for path, size in other.made)

    def grown(self, other: Tally) -> list[tuple[str, int, int]]:
        """The modules that make more in another forward: what they make there, and made here."""
        known = dict(self.tally.made)
        found = [(path, size, known.get(path, 0)) for path, size in other.made]
        more = [each for each in found if each[1] > each[2]]
        return sorted(more, key=lambda each: each[2] - each[1])


def counted(graph: Graph) -> tuple[tuple[str, int], ...]:
    """How many ops there are of each name in each module."""
    return tuple(Counter(op.key.rpartition("|")[0] for op in graph.ops if op.key).items())


def estimated(outline: Graph, choices: Choices, alike: Alike | None = None) -> int:
    """What a step takes under ``choices`` beside what is there throughout, by its outline."""
    return simulate(outline, choices.schedule_in(outline, alike)).peak
