"""Estimating a step from the recording of its forward, by comparison with the planned one (P8).

A plan is made from a step that was recorded as a whole. Of later steps there is a recording of
forward at most: ops, sizes, what autograd saved. From that `outline_of` makes a graph in which
backward is guessed: the functions of forward in reverse, each reading what it saved and making a
gradient for everything that it had read. As a prediction that is rough. Compared with the outline
of the planned step, it tells how much more a step takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from recollect.graph.graph import Graph, Link, Tally
from recollect.graph.simulate import simulate
from recollect.planning.build import build_graph
from recollect.planning.prices import OpPrice
from recollect.planning.trace import StepTrace, TracedOp
from recollect.replay.function_call import FunctionCall
from recollect.replay.named_schedule import Alike, NamedSchedule
from recollect.replay.recorded_graph import RecordedGraph, RecordedValue
from recollect.replay.recording import Recording

__all__ = ["Footprint", "counted", "estimated", "outline_of", "tally_of"]

_FREE = OpPrice("")
#: What goes to the host is there at once: the plan says after which op it is released here.
_LINK = Link(1e30, 1e30)


@dataclass(frozen=True)
class Footprint:
    """The planned forward, in bytes."""

    tally: Tally  #: its bytes by module
    #: Bytes of a step for each byte of the estimate from its outline: under the schedule of the
    #: plan, then under each of its alternatives.
    factors: tuple[float, ...]
    #: By module and name of an op, as in keys: how many of it there were.
    counts: tuple[tuple[str, int], ...]

    @cached_property
    def alike(self) -> Alike:
        """Maps ops that were not in the planned step to similar ones that were."""
        return Alike(dict(self.counts))

    def growth(self, other: Tally) -> int:
        """The bytes by which another forward exceeds this one, in whichever module."""
        saved = max(0, other.saved - self.tally.saved)
        return self.made_more(other) + saved + max(0, other.gradients - self.tally.gradients)

    def made_more(self, other: Tally) -> int:
        """The bytes by which the results of its ops exceed those here."""
        return sum(now - before for _, now, before in self.grown(other))

    def grown(self, other: Tally) -> list[tuple[str, int, int]]:
        """The modules whose results are larger in another forward, their bytes there and here."""
        known = dict(self.tally.made)
        found = [(path, size, known.get(path, 0)) for path, size in other.made]
        more = [each for each in found if each[1] > each[2]]
        return sorted(more, key=lambda each: each[2] - each[1])


def counted(graph: Graph) -> tuple[tuple[str, int], ...]:
    """How many ops there are of each name in each module."""
    return tuple(Counter(op.key.rpartition("|")[0] for op in graph.ops if op.key).items())


def estimated(outline: Graph, schedule: NamedSchedule) -> int:
    """The estimated peak of a step under ``schedule``, without what is there throughout."""
    return simulate(outline, schedule.schedule_in(outline)).peak


def tally_of(
    recording: Recording, before: RecordedGraph | None = None, steps: Iterable[FunctionCall] = ()
) -> Tally:
    """The bytes of a forward. ``before``, ``steps``: of the part before what was recorded."""
    made: dict[str, int] = {}
    sizes: dict[tuple[int, int], int] = {}
    for part, recorded in enumerate((before or RecordedGraph(), recording.graph)):
        for op in recorded.ops:
            if op.makes:
                path = "" if op.key is None else op.key.partition("|")[0]
                for buffer in (recorded.values[number] for number in op.makes):
                    sizes[part, buffer.storage] = buffer.nbytes
                    made[path] = made.get(path, 0) + buffer.nbytes
    saved = {
        (part, pack.storage)
        for part, each in enumerate((steps, recording.calls))
        for step in each
        for pack in step.packed
        if pack.storage is not None
    }
    outsides = [each.value for each in recording.outsides.values() if each.metadata[4]]
    return Tally(
        made=tuple(made.items()),
        saved=sum(sizes.get(place, 0) for place in saved),
        gradients=sum(buffer.nbytes for buffer in outsides if buffer is not None),
        is_whole=recording.reason is None,
    )


# --- the outline ----------------------------------------------------------------------------------


def outline_of(recording: Recording) -> Graph:
    """The graph of a step with this forward, without times."""
    trace = _GuessedStep(recording).trace
    return build_graph(trace, recording, base=0, on_device=False, link=_LINK)


class _GuessedStep:
    """The trace of a step, guessed."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._recorded = recording.graph
        self.trace = StepTrace()
        #: By number of a memory of the tape: of that of the trace, and of that of its gradient.
        self._memories: dict[int, int] = {}
        self._gradients: dict[int, int] = {}
        #: What is freed before the next event.
        self._freed: list[int] = []
        self._trained = _trained(recording)
        self._forward()
        packs = [pack for step in recording.calls for pack in step.packed]
        self.trace.saved = [
            None if pack.storage is None else self._memories.get(pack.storage) for pack in packs
        ]
        self._backward()

    def _add(self, nbytes: int) -> int:
        self.trace.sizes.append(nbytes)
        return len(self.trace.sizes) - 1

    def _event(self, op: int, *, is_backward: bool) -> TracedOp:
        ends, self.trace.ends = self.trace.ends, []
        freed, self._freed = self._freed, []
        event = TracedOp(price=_FREE, op=op, freed=freed, ends=ends, is_backward=is_backward)
        self.trace.events.append(event)
        return event

    def _forward(self) -> None:
        ops, values = self._recorded.ops, self._recorded.values
        last = {values[n].storage: op.number for op in ops for n in (*op.reads, *op.results)}
        kept = {buffer.storage for buffer in values if buffer.is_output}
        ending: dict[int, list[int]] = {}
        for memory, number in last.items():
            ending.setdefault(number, []).append(memory)
        for op in ops:
            event = self._event(op.number, is_backward=False)
            for path, buffer in zip(op.paths, (values[n] for n in op.makes), strict=True):
                event.made[path] = self._memories[buffer.storage] = self._add(buffer.nbytes)
            for memory in ending.get(op.number, ()):
                if memory in self._memories and memory not in kept:
                    self._freed.append(self._memories[memory])

    def _backward(self) -> None:
        number = len(self.trace.saved)
        for step in reversed(self._recording.calls):
            number -= len(step.packed)
            read, made = self._with_gradients(step)
            if not made and not step.packed:
                continue
            event = self._event(-1, is_backward=True)
            event.asks = [*range(number, number + len(step.packed))]
            self.trace.ends += event.asks
            for memory in {buffer.storage for buffer in made}:
                if memory in self._gradients:
                    self._freed.append(self._gradients.pop(memory))
            for place, (memory, nbytes) in enumerate({b.storage: b.nbytes for b in read}.items()):
                gradient = event.made[place,] = self._add(nbytes)
                if memory in self._gradients:
                    self._freed.append(gradient)  # it is added to the one that is there
                else:
                    self._gradients[memory] = gradient

    def _with_gradients(
        self, step: FunctionCall
    ) -> tuple[list[RecordedValue], list[RecordedValue]]:
        """What a function reads and makes that has a gradient."""
        ops, values = self._recorded.ops[slice(*step.ops)], self._recorded.values
        made = dict.fromkeys(number for op in ops for number in op.results)
        read = dict.fromkeys(number for op in ops for number in op.reads)
        return (
            [values[n] for n in read if n in self._trained and n not in made],
            [values[n] for n in made if n in self._trained],
        )


def _trained(recording: Recording) -> set[int]:
    """The numbers of the buffers that have a gradient."""
    found = {
        outside.value.number
        for outside in recording.outsides.values()
        if outside.value is not None and outside.metadata[4]
    }
    values = recording.graph.values
    for op in recording.graph.ops:
        if op.grad_enabled and any(read in found for read in op.reads):
            found.update(n for n in op.results if values[n].layout[3].is_floating_point)
    return found
