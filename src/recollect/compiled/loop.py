"""Notices the training steps of the user's loop in a compiled model, and measures them (P8).

A step begins when the model is called and no forward of it waits for its backward. It ends with the
backward after which none waits. A profiler of memory is on for that time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.autograd.profiler import profile

from recollect._torch.autograd import after_each_backward, current_graph_task
from recollect.compiled.backend import Notes
from recollect.compiled.timeline import Timeline, timeline_of
from recollect.planning.loop.updates import Updates
from recollect.planning.loop.watch import Waiting, weakly
from recollect.planning.recording.memory_events import (
    ended_profiler,
    may_communicate,
    started_profiler,
)
from recollect.planning.recording.model_state import parameters_of
from recollect.planning.recording.step import bytes_of_gradients, device_of


class LoopSteps:
    """The training steps of one loop. ``notes`` count what is compiled, until others do.

    ``on_begin`` is called before the first forward of a step, and returns whether to measure it;
    ``on_measured`` after a step was measured.
    """

    def __init__(
        self,
        model: nn.Module,
        notes: Notes,
        on_begin: Callable[[], bool],
        on_measured: Callable[[Timeline], None],
    ) -> None:
        self.device = device_of(model)
        self._model, self._on_begin, self._on_measured = ref(model), on_begin, on_measured
        self.updates = Updates(parameters_of(model))
        self.updates.begin()
        self._notes = notes
        #: The profiler that is on, if one is.
        self._profilers: list[profile] = []
        self._thread = threading.get_ident()
        self._waiting: list[Waiting] = []
        #: How many calls of the model and its modules are under way: the outermost begins a step.
        self._depth = 0
        self.count = 0  #: how many steps have begun
        self.missed = 0  #: how many of them could not be measured
        self._is_over = False
        #: Whether the step is not to be measured, which backward is still part of.
        self._is_void = False
        #: The most bytes of gradients that were there when a step began.
        self.gradients = 0
        self._stop = after_each_backward(weakly(self._after_backward))
        finalize(self, self._stop)
        finalize(self, _end_all, self._profilers)

    def run(self, call: Callable[[], Any]) -> Any:
        """Call a compiled module, or the model around it."""
        if self._is_over or not torch.is_grad_enabled() or threading.get_ident() != self._thread:
            return call()
        if _is_in_backward():  # of a region that runs again, which may end halfway
            return call()
        if not self._depth:
            self._begin()
        self._depth += 1
        try:
            result = call()
        except BaseException:
            self._give_up()
            raise
        finally:
            self._depth -= 1
        self._waiting.append(Waiting(result))
        return result

    def watch_compiler(self, notes: Notes) -> None:
        """Other code is in effect; ``notes`` count what it compiles."""
        self._notes.on_compile = None
        self._notes, self.missed = notes, 0

    def end(self) -> None:
        """Notice no more."""
        self._is_over = True
        self._give_up()
        self._notes.on_compile = None
        self._stop()

    # --- steps ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._is_waiting():
            return
        self._give_up()  # of a step without backward
        self._waiting.clear()
        model = self._model()
        if model is not None:
            self.gradients = max(self.gradients, bytes_of_gradients(model))
        is_wanted = self._on_begin()
        self.count += 1
        if self._is_over or not is_wanted:
            return
        if not self._notes.compiled:  # a step that compiles says nothing: its compiler is measured
            self.missed += 1
            return
        profiler = None if may_communicate() else started_profiler()
        self._notes.on_compile = self._give_up
        self._profilers += [] if profiler is None else [profiler]
        self.missed += profiler is None

    def _is_waiting(self) -> bool:
        return any(each.is_waiting() for each in self._waiting)

    def _after_backward(self) -> None:
        if _is_in_backward() or threading.get_ident() != self._thread:
            return
        if self._is_void:
            self._give_up()
        if self._profilers and not self._is_waiting():
            timeline = timeline_of(ended_profiler(self._profilers.pop()).events(), self.device)
            if len(timeline.stretches) > 1:
                self._on_measured(timeline)
            else:  # nothing compiled has run
                self.missed += 1

    def _give_up(self) -> None:
        """Do not measure the step that has begun."""
        self._is_void = _is_in_backward()
        if self._is_void:  # a profiler that ended here would be on again after backward
            return
        self.missed += len(self._profilers)
        _end_all(self._profilers)


def _is_in_backward() -> bool:
    return current_graph_task() != -1


def _end_all(profilers: list[profile]) -> None:
    while profilers:
        ended_profiler(profilers.pop())
