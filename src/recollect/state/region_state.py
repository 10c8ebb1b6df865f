"""Everything that a rerun must find again beside its arguments, in one object for all engines (R3).

In forward:

1. Search what the function can reach.
2. Read random streams and ambient state, copy buffers, note the versions of everything else.
3. When it is over, note which buffers it has changed.

In a rerun:

4. Prepare to raise on what has changed since (2), if it gets used.
5. Put buffers, variables, streams and ambient state back to (2), run the function, and undo that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from recollect.settings import recomputing, version_guard_enabled
from recollect.state.ambient import Ambient
from recollect.state.buffers import BufferState
from recollect.state.collectives import CollectivePlayer, CollectiveRecorder
from recollect.state.guards import Guards, UseOfChanged
from recollect.state.module_index import ModuleIndex
from recollect.state.module_state import ModuleState
from recollect.state.reachable import reachable_from
from recollect.state.restorers import UNSET, VARIABLES, Entry
from recollect.state.rng import reseed_recurrent_layers
from recollect.state.streams import (
    Streams,
    read_same_streams,
    read_streams,
    settle_streams,
    write_streams,
)

__all__ = ["RegionState"]


def _guard(indexes: Sequence[ModuleIndex]) -> Guards | None:
    if not version_guard_enabled():
        return None
    owners = chain.from_iterable([index.parameters for index in indexes])
    parameters = [*chain.from_iterable(map(dict.values, owners))]
    return Guards([parameter for parameter in parameters if parameter is not None])


def _reseed(indexes: Sequence[ModuleIndex]) -> None:
    """Prepare recurrent layers to draw the same in a rerun."""
    for index in indexes:
        if index.recurrent:
            layers = [layer for each in index.recurrent if (layer := each()) is not None]
            dropping = [layer for layer in layers if layer.dropout and layer.training]
            for device in {p.device for layer in dropping for p in layer.parameters()}:
                reseed_recurrent_layers(device)


class RegionState:
    """The state around one call of a function."""

    __slots__ = (
        *("_ambient", "_buffers", "_guards", "_modules", "_streams", "_variables"),
        "collectives",
    )

    def __init__(self, function: Any, others: Sequence[Any], preserve_rng_state: bool) -> None:
        """``others``: modules, generators and functions among the arguments."""
        found = reachable_from(function, others)
        self._streams: Streams | None = None
        if preserve_rng_state:
            _reseed(found.indexes)
            self._streams = read_streams(found.generators)
        self._modules = ModuleState(found.modules, found.indexes)
        self._guards = _guard(found.indexes)
        self._variables: Sequence[Entry] = found.variables
        self._buffers: BufferState | None = None
        if found.buffers or found.tensors:
            self._buffers = BufferState(found.buffers, found.tensors)
            if self._guards is not None:
                self._guards.add(self._buffers.others)
        #: A mode for the engine to run forward under, if there is one.
        self.collectives = CollectiveRecorder() if found.communicates else None
        self._ambient = Ambient()

    def settle(self) -> None:
        """Note what the call, which is over, has changed."""
        if self._streams is not None:
            self._streams = settle_streams(self._streams)
        if self._variables:
            self._variables = _unassigned(self._variables)
        if self._buffers is not None:
            unchanged = self._buffers.settle()
            if self._guards is not None:
                self._guards.add(unchanged)
            if not self._buffers.has_changes:
                self._buffers = None

    @property
    def preserves_rng(self) -> bool:
        """Whether a rerun gets the random numbers of the call."""
        return self._streams is not None

    def changes(self) -> UseOfChanged | None:
        """A mode to run the function under if something that it may use has changed since."""
        changes = None if self._guards is None else self._guards.changes()
        return None if changes is None else UseOfChanged(changes)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function`` with everything as it was, and leave everything as it is."""
        same_modules = self._modules.is_present()
        differing = [entry for entry in self._variables if not entry[1].same(entry[0], entry[2])]
        if same_modules and not differing and self._buffers is None and self.collectives is None:
            return self._run(function, args)
        with ExitStack() as stack:
            if self._buffers is not None:
                self._buffers.restore(stack)
            if self.collectives is not None:
                stack.enter_context(CollectivePlayer(self.collectives))
            if not same_modules:
                self._modules.restore(stack)
            for thing, restorer, held in differing:
                stack.callback(restorer.put, thing, restorer.take(thing))
                restorer.put(thing, held)
            return self._run(function, args)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        streams = self._streams
        outside = None if streams is None else read_same_streams(streams)
        recomputing.depth += 1
        try:
            if streams is not None:
                write_streams(streams)
            return self._ambient.run(function, *args)
        finally:
            recomputing.depth -= 1
            if outside is not None:
                write_streams(outside)


def _unassigned(variables: Sequence[Entry]) -> list[Entry]:
    """``variables`` without those that the region has assigned to (``nonlocal``, ``global``).

    Like an attribute, what they count is the user's.
    """
    left: list[Entry] = []
    for thing, restorer, held in variables:
        if restorer.same(thing, held):
            left.append((thing, restorer, held))
        elif restorer is VARIABLES:
            space = thing[0]
            same = {name: value for name, value in held.items() if space.get(name, UNSET) is value}
            left.append(((space, (*same,)), VARIABLES, same))
    return left
