"""Groups the forwards that a thread has run of one model into steps (P8)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import dropwhile
from typing import Any
from weakref import ref

from recollect.planning.loop.kinds import ForwardKind, StepKind
from recollect.planning.loop.live import LiveStep
from recollect.planning.loop.watch import Waiting
from recollect.planning.recording.model_state import ModelState

#: How many forwards a step has at most.
_WAITING = 64
#: A forward that waits while later ones come and go so often is not waited for: somebody keeps its
#: output. (In a pipeline the first one that began is the first one to end.)
_ROUNDS = 3


class Forwards(threading.local):
    """What a thread remembers from one forward to the next.

    A step is over when no forward of it waits for a backward.
    """

    #: The model, and its forwards since none waited for a backward.
    owner: Callable[[], Any] = staticmethod(lambda: None)
    waiting: tuple[Waiting, ...] = ()
    step: StepKind = ()
    #: How many of them, from the first that waits on, a backward has gone through; and how often a
    #: forward began when more had than at the forward before.
    reached: int = 0
    rounds: int = 0
    #: The step that is traced, and the kinds of its forwards; none before there is a plan.
    live: LiveStep | None = None
    traced: StepKind = ()
    #: Before there is a plan: the forwards that were traced, the state of the model, and how many
    #: forwards have run since.
    kinds: StepKind = ()
    state: ModelState | None = None
    waited: int = 0
    #: And whether more of them waited at once than in the step that was traced.
    is_outgrown: bool = False
    #: How often no step could be traced, before there was a plan.
    futile: int = 0

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
