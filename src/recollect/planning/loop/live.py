"""Traces a training step while the user's loop runs it (P8).

Nothing runs twice, and none of the user's code sees an extra call: forward is recorded with little
kept, and a `TraceMode` stays on this thread's stack while the loop computes its loss and runs
backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import finalize, ref

import torch
from torch import nn

from recollect._torch.autograd import (
    after_each_backward,
    at_end_of_backward,
    backward_is_split,
    current_graph_task,
    current_operation,
)
from recollect._torch.fsdp import shards_of
from recollect._torch.modes import dispatch_modes, dispatch_modes_active, leave_dispatch_mode
from recollect.graph.graph import Graph, Link
from recollect.planning.loop.companions import Companion
from recollect.planning.loop.planned_step import ForwardKind, StepKind
from recollect.planning.loop.updates import Updates
from recollect.planning.loop.watch import Waiting, weakly
from recollect.planning.recording.build import build_graph
from recollect.planning.recording.model_state import ModelState, gradients_of, parameters_of
from recollect.planning.recording.prices import Prices
from recollect.planning.recording.record import ForwardObserver
from recollect.planning.recording.step import device_of, late_bytes, storage_sizes
from recollect.planning.recording.trace import TraceMode
from recollect.planning.regions.sharded import units_of
from recollect.replay.engine import obstacle_around
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording import Recording

#: A step whose output is only kept is given up after so many backwards elsewhere for each forward:
#: a later stage of a pipeline on this rank has one for each microbatch, before its own come.
_PATIENCE = 3


class _Active(threading.local):
    #: The step that this thread traces. Only one at a time: two would record each other's ops.
    step: LiveStep | None = None


_active = _Active()


def drop_stale_trace() -> None:
    """Leave the mode of a step that was closed in another thread, which has modes of its own."""
    if _active.step is not None and not _active.step.is_open:
        _active.step.close()


def obstacle_to_tracing() -> str | None:
    """Why no step can be traced now; None if one can.

    The trace outlives the call of forward. A dispatch mode that is on the stack now may be exited
    earlier, and would pop the trace in its place.
    """
    if _active.step is not None:
        return "a step of another model is being traced"
    if dispatch_modes_active():
        return "it is inside of a dispatch mode"
    return obstacle_around()


def note_companion(companion: Callable[[], Companion]) -> None:
    """A forward runs under a plan, perhaps inside of the traced step of another model."""
    step = _active.step
    if step is not None and step.is_pending:
        step.companions.append(companion())


class TracedStep(NamedTuple):
    """What a trace has found."""

    graph: Graph
    later_base: int  #: bytes that are allocated before a later step, which may begin now
    first_base: int  #: those that were there before it, when optimizers had no state perhaps
    has_messages: bool  #: whether it has exchanged messages with another process


class LiveStep:
    """One training step of the user's loop: forwards of a model, up to the end of their backward.

    A loop may call the model several times before backward. All of these forwards are traced
    together.

    Args:
        model: The model whose forwards they are.
        base: The bytes that are allocated before it, which CUDA's allocator knows better.
        link: The link to the host, if results may be offloaded.
        on_end: Called when backward has ended.
        wait: Makes what tells whether the backward of a forward has come.
    """

    def __init__(
        self,
        model: nn.Module,
        base: int = 0,
        link: Link | None = None,
        on_end: Callable[[], None] | None = None,
        wait: Callable[..., Waiting] = Waiting,
    ) -> None:
        self.device = device_of(model)
        #: The steps of optimizers since its forward.
        parameters = parameters_of(model)
        self.updates = Updates(parameters, weakly(self._leave))
        self._parameters = [ref(each) for each in parameters]
        #: The bytes of gradients that are there before it; once it is over: and throughout.
        gradients = gradients_of(model)
        self.gradients = sum(storage_sizes(gradients))
        self._base = base
        if self.device.type == "cuda":
            self._base = torch.cuda.memory_allocated(self.device)
        self._link = link
        self._on_end, self._wait = on_end, wait
        self._prices = Prices(self.device, once=True)
        self._trace = TraceMode(self._prices, shards_of(model))
        self._trace.watch(gradients)  # a loop may clear them between forward and backward
        #: The modules that are recorded separately; see `Graph`.
        self.units = units_of(model)
        self._thread = threading.get_ident()
        #: The state of the model when it began.
        self.state = ModelState.of(model)
        self.kinds: StepKind = ()  #: of its forwards
        self.recordings: list[Recording] = []  #: of its forwards
        self._waiting: list[Waiting] = []  #: tells of each forward whether its backward has come
        #: The forwards of other models under plans that ran inside of it.
        self.companions: list[Companion] = []
        self.has_graph = False  #: whether a backward can come: not through a frozen model
        self.is_open = False  #: whether it is being traced
        self.is_over = False  #: whether its backward has ended
        self.is_followed = False  #: whether forwards have followed that were not traced
        self._is_reached = False  #: whether a backward has reached it
        self._is_running = False  #: whether that backward has yet to end
        #: By forward that backward has reached: whether it left gradients to a later one.
        self._split: dict[int, bool] = {}
        #: How many backwards have ended that were not its own.
        self._missed = 0
        self._stop_waiting: Callable[[], None] = lambda: None

    def can_join(self) -> bool:
        """Whether another forward that begins now is part of it, and can be traced with it."""
        modes = dispatch_modes()
        is_mine = len(modes) == 1 and modes[0] is self._trace and not self._trace.is_paused
        return self.is_pending and is_mine and obstacle_around() is None

    def forward(
        self,
        kind: ForwardKind,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        by: NamedSchedule | None = None,
        blocks: Iterable[nn.Module] = (),
    ) -> tuple[Any, Waiting]:
        """Call a forward of this kind, with results kept by a schedule, or at ``blocks``.

        Returns what it returns, and what tells whether its backward has come.
        """
        if not self.is_open:
            self._open()
        self.kinds += (kind,)
        since = current_operation()
        try:
            observer = ForwardObserver(self._trace, by or NamedSchedule(), [*blocks], self.units)
            output, recording, remat = observer.call(function, args, kwargs)
        except BaseException:
            self.close()
            raise
        reached = partial(weakly(self.reached), len(self.recordings))
        self.recordings.append(recording)
        waiting = self._wait(output, remat, reached, weakly(self.dropped), since=since)
        self._waiting.append(waiting)
        self.has_graph |= waiting.has_graph
        return output, waiting

    def _open(self) -> None:
        """Begin to trace."""
        self.is_open = True
        _active.step = self
        self.updates.begin()
        self._trace.__enter__()
        # Nothing of the process may hold this object: its thread or its model may be gone first.
        self._stop_waiting = after_each_backward(weakly(self._after_backward))
        finalize(self, self._stop_waiting)

    def dropped(self) -> None:
        """The output of one of its forwards was freed, with its graph."""
        if self.is_pending or self._is_running or current_graph_task() != -1:
            return  # inside of backward modes cannot be left: `_after_backward` does it
        # If backward went through others, that was the step, and this one was not part of it.
        self.is_over |= self._is_reached
        self.close()

    def reached(self, number: int) -> None:
        """Backward has reached the output of a forward; perhaps in a thread of autograd's."""
        if not self.is_open:
            return
        parameters = [each for one in self._parameters if (each := one()) is not None]
        self._split[number] = backward_is_split(parameters)
        if any(mode is self._trace for mode in dispatch_modes()):
            self._is_reached = self._is_running = True
            at_end_of_backward(self._backward_ends)
        else:  # it runs in another thread, where nothing traces it
            at_end_of_backward(self.close)

    def _backward_ends(self) -> None:
        """A backward has ended that went through a forward. Others may follow."""
        self._is_running = False
        if not any(each.is_waiting() for each in self._waiting):
            self.is_over = self._trace.is_paused = True

    def _after_backward(self) -> None:
        """A backward is over, or has failed: perhaps that of this step."""
        is_inside = current_graph_task() != -1  # of another one
        if is_inside or threading.get_ident() != self._thread or not self.is_open:
            return
        if not self._is_reached:
            self._missed += 1
            if self._missed >= _PATIENCE * len(self.recordings) or not self.is_pending:
                self.close()
            return
        if self.is_over or self._is_running or not self.is_pending:
            self.is_over |= not self._is_running  # else it has failed
            self._finish()

    def _finish(self) -> None:
        on_end, is_over = self._on_end, self.is_over
        self.close()
        if is_over and on_end is not None:
            on_end()

    @property
    def is_pending(self) -> bool:
        """Whether a backward through it may still come."""
        return self.is_open and not self.is_over and any(e.is_waiting() for e in self._waiting)

    @property
    def is_split(self) -> bool:
        """Whether backward left gradients of parameters to a later one, which the trace lacks."""
        return any(self._split.values())

    def end_if_retained(self) -> None:
        """Another forward begins: the step is over if just its graph is still there.

        Backward has gone through all of it, and an optimizer has made its step.
        """
        is_reached = self._is_reached and all(each.is_reached for each in self._waiting)
        if self.is_open and not self.is_over and is_reached and self.updates.are_there:
            self.is_over = True
            self._finish()

    def close(self) -> None:
        """Stop tracing. In another thread than it began in, its mode stays, and sees nothing."""
        self._trace.is_paused = True
        self._stop_waiting()
        self.is_open, self._is_reached, self._on_end = False, False, None
        self._waiting.clear()
        # A tensor with a weak reference cannot be exchanged by `torch.utils.swap_tensors`.
        self._parameters.clear()
        if threading.get_ident() == self._thread:
            leave_dispatch_mode(self._trace)
        if _active.step is self:
            _active.step = None

    def _leave(self) -> None:
        """Leave the mode of a step that was closed in another thread."""
        if not self.is_open:
            self.close()

    # --- the result -------------------------------------------------------------------------------

    def finish(self, model: nn.Module) -> TracedStep:
        """What was traced, once the step is over. ``model``: as a later step finds it."""
        self._prices.finish()
        trace = self._trace.finish()
        graph = build_graph(
            trace,
            self.recordings,
            base=self._base,
            on_device=self.device.type == "cuda",
            link=self._link if len(self.recordings) == 1 else None,
        )
        self.gradients -= self._base - graph.base  # those that the step has freed
        later = self.updates.base_bytes(model, self.gradients)
        if self.device.type == "cuda":  # what is late is among it
            first = graph.base
        else:
            later += late_bytes(shards_of(model), trace.largest_collective, self.device)
            first = later - self.updates.made_bytes()
        return TracedStep(replace(graph, units=self.units), later, first, trace.has_messages)

    @property
    def has_other_hooks(self) -> bool:
        """Whether parts of its forwards save tensors by hooks of their own."""
        return self._trace.has_other_hooks

    @property
    def accumulated(self) -> int:
        """The bytes of gradients that forwards found which followed it before an update."""
        return max(0, self.updates.gradients - self.gradients) if self.is_followed else 0
