"""Groups the forwards that a thread has run of one model into steps (P8)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import dropwhile
from typing import Any
from weakref import ref

from recollect.planning.loop.live import LiveStep
from recollect.planning.loop.planned_step import ForwardKind, StepKind
from recollect.planning.loop.watch import Waiting

#: How many forwards a step has at most.
_WAITING = 64
#: A forward that waits while later ones come and go so often is not waited for: somebody keeps its
#: output. (In a pipeline the first one that began is the first one to end.)
_ROUNDS = 3


class Forwards(threading.local):
    """What a thread remembers from one forward to the next.

    A step is over when no forward of it waits for a backward.
    """

    owner: Callable[[], Any] = staticmethod(lambda: None)  #: the model
    waiting: tuple[Waiting, ...] = ()  #: its forwards since none waited for a backward
    step: StepKind = ()  #: the kinds of these
    reached: int = 0  #: how many of them a backward has reached, from the first that waits on
    rounds: int = 0  #: how often more were reached than at the forward before
    live: LiveStep | None = None  #: the step that is traced
    # Before there is a plan:
    is_new: bool = True  #: whether none has run in this thread
    waited: int = 0  #: how many forwards have begun after it
    is_outgrown: bool = False  #: whether more forwards waited at once than were traced
    futile: int = 0  #: how often no step could be traced

    def begin(self, model: Any) -> None:
        """A forward of ``model`` begins: forget those of a step that is over."""
        is_same = self.owner() is model
        rest = dropwhile(lambda each: not each.is_waiting(), self.waiting)
        reached = sum(each.is_reached for each in rest)
        self.rounds += reached > self.reached
        self.reached = reached
        waits = is_same and any(each.is_waiting() for each in self.waiting)
        if not waits or self.rounds >= _ROUNDS or len(self.waiting) >= _WAITING:
            self.owner = (lambda: None) if model is None else ref(model)
            self.waiting, self.step, self.reached, self.rounds = (), (), 0, 0

    def add(self, kind: ForwardKind, waiting: Waiting) -> None:
        """A forward has run."""
        self.waiting, self.step = (*self.waiting, waiting), (*self.step, kind)
