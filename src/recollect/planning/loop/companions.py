"""Forwards of other models under plans, inside of a traced step (P8).

What they keep is a fixed part of that step. Once they run by another schedule, the step is another
one, and is traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from recollect.replay.named_schedule import NamedSchedule

#: How often a step is traced again because of others: they may go on to change one another's.
_TRIES = 8


class RunsBy(NamedTuple):
    """A forward runs by this schedule from now on; None: plain."""

    schedule: NamedSchedule | None


class Companion(NamedTuple):
    """A forward of another model.

    ``ran``: its schedule in the traced step; None: that model had no plan yet. ``later``: returns
    the schedule of later forwards like it; None while that is not known.
    """

    ran: RunsBy | None
    later: Callable[[], RunsBy | None]

    @property
    def has_changed(self) -> bool:
        """Whether later forwards like it keep other tensors."""
        now = self.later()
        return now is not None and now != self.ran


class Companions:
    """The companions of each traced step of a model; steps are sequences of the kinds of forwards.

    Only the first forward of a step is asked for: it decides whether the step is traced.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Sequence[Companion]] = {}
        self._retraced: dict[object, int] = {}

    def note(self, step: tuple[object, ...], companions: Sequence[Companion]) -> None:
        """A step was traced, with ``companions`` inside of it."""
        if companions or step in self._known:
            self._known[step] = companions

    def have_changed(self, first: object) -> bool:
        """Whether to trace steps that begin with ``first`` again: others in them run otherwise."""
        if not any(
            each.has_changed
            for step, companions in self._known.items()
            if step[0] == first
            for each in companions
        ):
            return False
        self._retraced[first] = self._retraced.get(first, 0) + 1
        return self._retraced[first] <= _TRIES
