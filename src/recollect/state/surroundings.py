"""Everything that a rerun must find again beside its arguments, in one object for all engines.

forward                                     rerun

(1) look what the function can reach        (4) raise on what has changed, if it gets used
(2) random streams, ambient state,          (5) buffers, streams, ambient state as in (2)
    copies of buffers                       (6) run the function
(3) settle: which buffers has it changed;   (7) all of (5) as it was before
    versions of everything else
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from recollect.settings import recomputing, version_guard_enabled
from recollect.state.ambient import Ambient
from recollect.state.cells import fill_cells, moved_cells, settled_cells
from recollect.state.collectives import CollectivePlayer, CollectiveRecorder
from recollect.state.guards import Guards, UseOfChanged
from recollect.state.mutation import Watch, is_small, put_back
from recollect.state.reach import Reach
from recollect.state.slots import Moved, Slots, put_in_place
from recollect.state.streams import read_streams, settle_streams, swap_streams, write_streams

__all__ = ["Surroundings"]


class Surroundings:
    """What surrounds one call of a function."""

    __slots__ = (
        "_ambient",
        "_cells",
        "_guards",
        "_renormalised",
        "_slots",
        "_streams",
        "_watch",
        "collectives",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: bool,
    ) -> None:
        reach = Reach(function, args, kwargs)
        self._streams = read_streams(reach.generators) if preserve_rng_state else None
        self._ambient = Ambient()
        self._slots = Slots(reach.owners)
        self._cells = reach.cells
        guarded = [p for owner in reach.parameters for p in owner.values() if p is not None]
        state: list[torch.Tensor] = []
        for tensor in reach.tensors:
            (state if not tensor.requires_grad and is_small(tensor) else guarded).append(tensor)
        self._watch = Watch(reach.buffers, state) if reach.buffers or state else None
        self._guards = Guards(guarded) if version_guard_enabled() else None
        self._renormalised = reach.renormalised
        #: A mode for the engine to run forward under, if there is one.
        self.collectives = CollectiveRecorder() if reach.communicates else None

    def settle(self) -> None:
        """Take note of what the call, which is over, has done."""
        if self._streams is not None:
            self._streams = settle_streams(self._streams)
        if self._cells:
            self._cells = settled_cells(self._cells)
        unchanged = [] if self._watch is None else self._watch.settle()
        if self._watch is not None and not self._watch.has_changes:
            self._watch = None
        if self._guards is not None and unchanged:
            self._guards.add(unchanged)
        if self._guards is not None and self._renormalised:
            self._guards.renew([p for owner in self._renormalised for p in owner.values()])

    @property
    def preserves_rng(self) -> bool:
        """Whether a rerun gets the random numbers of the call."""
        return self._streams is not None

    def changes(self) -> UseOfChanged | None:
        """What to run the function under if something that it may use has changed since."""
        changes = None if self._guards is None else self._guards.changes()
        return None if changes is None else UseOfChanged(changes)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function`` with everything as it was, and leave everything as it is."""
        moved = self._slots.moved()
        if moved or self._cells or self._watch is not None or self.collectives is not None:
            with ExitStack() as stack:
                self._restore(moved, stack)
                return self._run(function, *args)
        return self._run(function, *args)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        outside = None if self._streams is None else swap_streams(self._streams)
        recomputing.depth += 1
        try:
            return self._ambient.run(function, *args)
        finally:
            recomputing.depth -= 1
            if outside is not None:
                write_streams(outside)

    def _restore(self, moved: list[Moved], stack: ExitStack) -> None:
        """What few regions need, until ``stack`` closes."""
        if self._watch is not None:
            stack.callback(put_back, self._watch.recall())
        if self.collectives is not None:
            stack.enter_context(CollectivePlayer(self.collectives))
        stack.callback(put_in_place, put_in_place(moved))
        stack.callback(fill_cells, fill_cells(moved_cells(self._cells)))
