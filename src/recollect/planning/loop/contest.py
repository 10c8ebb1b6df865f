"""Which of several schedules is the fastest, found out in the steps of the user's loop (P8).

A plan that is made from the loop is never tried before it is used. Its times are those of single
ops, and do not tell how well copies to the host overlap with the computation, nor what the engine
costs on the host. So schedules that differ in whether they offload, or checkpoint whole modules,
take turns, all of them within the budget, and the fastest stays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from recollect._torch.autograd import at_end_of_backward
from recollect.planning.loop.watch import when_backward_reaches
from recollect.planning.recording.sampling import now
from recollect.replay.named_schedule import NamedSchedule

_log = logging.getLogger("recollect")
#: Steps that each schedule gets. The first of them is not measured: it runs in other memory.
_STEPS = 3
#: How much faster another schedule has to be than the first one, as a fraction.
_FASTER = 0.01


@dataclass
class _Entry:
    schedule: NamedSchedule
    steps: int = 0
    #: The begin and the end of steps, as seconds or CUDA events.
    times: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return min((_between(*each) for each in self.times), default=float("inf"))


class Contest:
    """Schedules that take turns until the fastest is known.

    Args:
        schedules: What steps may run by. The first one is predicted to be the fastest.
        on_device: Whether they run on a CUDA device.
    """

    def __init__(self, schedules: Sequence[NamedSchedule], *, on_device: bool) -> None:
        self._entries = [_Entry(each) for each in schedules]
        self._on_device = on_device
        self._current: _Entry | None = None
        self._begin: Any = None

    def next(self) -> NamedSchedule:
        """What the step that begins now runs by."""
        left = [each for each in self._entries if each.steps < _STEPS]
        entry = self._current = left[0] if left else None
        if entry is None:
            return self._entries[0].schedule
        entry.steps += 1
        self._begin = self._mark()
        return entry.schedule

    def watch(self, output: Any) -> None:
        """Time the step that has begun. ``output``: of its forward."""
        entry, begin = self._current, self._begin
        if entry is not None and entry.steps > 1:
            ended = partial(self._ended, entry, begin)
            when_backward_reaches(output, lambda: at_end_of_backward(ended))

    def _ended(self, entry: _Entry, begin: Any) -> None:
        entry.times.append((begin, self._mark()))

    def winner(self) -> NamedSchedule | None:
        """The fastest schedule; None while that is not known."""
        if any(each.steps < _STEPS for each in self._entries) or not self._has_arrived():
            return None
        first = self._entries[0]
        best = min(self._entries, key=lambda each: each.seconds)
        if best.seconds > (1 - _FASTER) * first.seconds:
            best = first
            found = "the schedule that was expected to be the fastest is"
        else:
            less = 100 * (1 - best.seconds / first.seconds)
            found = f"steps with {_text(best, first)} take {less:.0f}% less time"
        took = f"{1e3 * best.seconds:.0f} ms from forward to the end of backward"
        _log.info("recollect: %s: %s", found, took)
        for each in self._entries:
            store = each.schedule.store
            if each is not best and store is not None:
                store.trim()  # the pinned memory that it has filled
        return best.schedule

    def _has_arrived(self) -> bool:
        """Whether the device has come to the end of all steps: nothing waits for it here."""
        ends = [end for each in self._entries for _, end in each.times]
        return all(end.query() for end in ends if isinstance(end, torch.cuda.Event))

    def _mark(self) -> Any:
        if not self._on_device:
            return now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _text(best: _Entry, first: _Entry) -> str:
    """What is different in steps by ``best``."""
    if best.schedule.modules:
        return f"{len(best.schedule.modules)} modules checkpointed as a whole"
    if best.schedule.offloaded and first.schedule.offloaded:
        return "copies that have more time"
    if best.schedule.offloaded or first.schedule.offloaded:
        return "some results offloaded" if best.schedule.offloaded else "nothing offloaded"
    return "single ops recomputed" if first.schedule.modules else "other ops recomputed"


def _between(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3)
