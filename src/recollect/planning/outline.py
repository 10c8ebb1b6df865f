"""What a step would come to, judged by the recording of its forward alone.

A plan is made from a step that was watched as a whole. Later steps run under it, and of those there
is a recording of forward at most: ops, sizes, what autograd saved. From that a graph is made in
which backward is guessed: the functions of forward the other way round, each asking for what it
saved, and making a gradient for everything that it had read. As a prediction that is rough.
Compared with the same guess for the forward that was planned, it tells what a step takes more.
"""

from __future__ import annotations

from recollect.graph.graph import Graph, Link
from recollect.planning.build import build_graph
from recollect.planning.rates import Call
from recollect.planning.trace import Event
from recollect.replay.recording import Recording
from recollect.replay.steps import Step
from recollect.replay.tape import Buffer, Tape

__all__ = ["outline_of"]

_NOTHING = Call("")
#: What goes to the host is there at once: the plan says after which op it is gone from here.
_LINK = Link(1e30, 1e30)


def outline_of(recording: Recording) -> Graph:
    """The graph of a step with this forward. Times are none, and nothing is there throughout."""
    return build_graph(_Guessed(recording), recording, base=0, on_device=False, link=_LINK)


class _Guessed:
    """Stands for the trace of a step."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._tape = recording.tape
        self.events: list[Event] = []
        self.sizes: list[int] = []
        self.saved: list[int | None] = []
        #: By number of a memory of the tape: of that of the trace, and of that of its gradient.
        self._memories: dict[int, int] = {}
        self._gradients: dict[int, int] = {}
        #: What is let go before the next event.
        self._freed: list[int] = []
        self.ends: list[int] = []
        self._trained = _trained(recording)
        self._forward()
        self._backward()

    def _add(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        return len(self.sizes) - 1

    def _event(self, op: int, *, is_backward: bool) -> Event:
        event = Event(_NOTHING, op, freed=self._freed, ends=self.ends, is_backward=is_backward)
        self._freed, self.ends = [], []
        self.events.append(event)
        return event

    def _forward(self) -> None:
        last = _last_uses(self._tape)
        kept = {buffer.memory for buffer in self._tape.values if buffer.is_output}
        for op in self._tape.ops:
            event = self._event(op.number, is_backward=False)
            for path, value in zip(op.paths, op.makes, strict=True):
                buffer = self._tape.values[value]
                number = self._memories[buffer.memory] = self._add(buffer.nbytes)
                event.made[path] = number
            for memory in last.get(op.number, ()):
                if memory in self._memories and memory not in kept:
                    self._freed.append(self._memories[memory])
        packs = [pack for step in self._recording.steps for pack in step.packs]
        self.saved = [
            None if pack.memory is None else self._memories.get(pack.memory) for pack in packs
        ]

    def _backward(self) -> None:
        number = len(self.saved)
        for step in reversed(self._recording.steps):
            number -= len(step.packs)
            read, made = self._of(step)
            if not made and not step.packs:
                continue
            event = self._event(-1, is_backward=True)
            event.asks = [*range(number, number + len(step.packs))]
            self.ends += event.asks
            for memory in {buffer.memory for buffer in made}:
                if memory in self._gradients:
                    self._freed.append(self._gradients.pop(memory))
            for place, (memory, nbytes) in enumerate({b.memory: b.nbytes for b in read}.items()):
                gradient = event.made[place,] = self._add(nbytes)
                if memory in self._gradients:
                    self._freed.append(gradient)  # it is added to the one that is there
                else:
                    self._gradients[memory] = gradient

    def _of(self, step: Step) -> tuple[list[Buffer], list[Buffer]]:
        """What a function reads and makes that has a gradient."""
        ops = self._tape.ops[slice(*step.ops)]
        made = dict.fromkeys(number for op in ops for number in op.results)
        read = dict.fromkeys(number for op in ops for number in op.reads)
        values = self._tape.values
        return (
            [values[n] for n in read if n in self._trained and n not in made],
            [values[n] for n in made if n in self._trained],
        )


def _trained(recording: Recording) -> set[int]:
    """The numbers of the buffers that have a gradient."""
    found: set[int] = set()
    for outside in recording.outsides.values():
        if outside.buffer is not None and outside.looks[4]:
            found.add(outside.buffer.number)
    values = recording.tape.values
    for op in recording.tape.ops:
        if op.grad_enabled and any(read in found for read in op.reads):
            found.update(n for n in op.results if values[n].layout[3].is_floating_point)
    return found


def _last_uses(tape: Tape) -> dict[int, list[int]]:
    """By number of an op: the memories that no op after it reads or makes."""
    last: dict[int, int] = {}
    for op in tape.ops:
        for number in (*op.reads, *op.results):
            last[tape.values[number].memory] = op.number
    found: dict[int, list[int]] = {}
    for memory, number in last.items():
        found.setdefault(number, []).append(memory)
    return found
