"""Everything that a rerun must find again beside its arguments, in one object for all engines.

In forward:

1. Look what the function can reach.
2. Read random streams and ambient state, copy buffers, note the versions of everything else.
3. When it is over, note which buffers it has changed.

In a rerun:

4. Prepare to raise on what has changed since (2), if it gets used.
5. Put buffers, streams and ambient state back to (2), run the function, and undo that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from recollect.settings import recomputing, version_guard_enabled
from recollect.state.ambient import Ambient
from recollect.state.collectives import CollectivePlayer, CollectiveRecorder
from recollect.state.guards import Guards, UseOfChanged
from recollect.state.hooks import Calls
from recollect.state.mutation import Watch
from recollect.state.reachable import Reach, callers_of, content_of, recurrent_in, simple_tree
from recollect.state.rng import reseed_recurrent_layers
from recollect.state.slots import Slots, put_in_place
from recollect.state.streams import (
    Streams,
    read_same_streams,
    read_streams,
    settle_streams,
    write_streams,
)
from recollect.state.variables import Variables

__all__ = ["Surroundings"]


def _guard(owners: list[dict[str, Any]]) -> Guards | None:
    if not version_guard_enabled():
        return None
    parameters = [*chain.from_iterable(map(dict.values, owners))]
    return Guards([parameter for parameter in parameters if parameter is not None])


def _reseed(recurrent: list[dict[str, Any]]) -> None:
    """Prepare recurrent layers, given by their attributes, to draw the same in a rerun."""
    layers = [each for each in recurrent if each.get("dropout") and each.get("training")]
    weights = [weight for each in layers for weight in each.get("_flat_weights") or ()]
    # A weight that a parametrization computes is None in that list until the first forward.
    for device in {weight.device for weight in weights if weight is not None}:
        reseed_recurrent_layers(device)


class Surroundings:
    """What surrounds one call of a function."""

    __slots__ = (
        "_ambient",
        "_calls",
        "_guards",
        "_slots",
        "_streams",
        "_variables",
        "_watch",
        "collectives",
    )

    _guards: Guards | None
    _streams: Streams | None
    _variables: Variables | None
    _watch: Watch | None
    #: A mode for the engine to run forward under, if there is one.
    collectives: CollectiveRecorder | None

    def __init__(
        self, function: Callable[..., Any], others: Sequence[Any], preserve_rng_state: bool
    ) -> None:
        """``others``: what else the function can get at, among its arguments."""
        tree = None if others else simple_tree(function)
        if tree is None:
            self._init_from(Reach(function, others), preserve_rng_state)
        else:
            self._streams = None
            if preserve_rng_state:
                _reseed(recurrent_in(function, tree))
                self._streams = read_streams(())
            self._slots = Slots(tree.owners, tree.names, content_of(function, tree))
            self._calls = Calls((tree,), callers_of(function, tree))
            self._guards = _guard(tree.parameters)
            self._variables = self._watch = self.collectives = None
        self._ambient = Ambient()

    def _init_from(self, reach: Reach, preserve_rng_state: bool) -> None:
        self._streams = None
        if preserve_rng_state:
            _reseed(reach.recurrent)
            self._streams = read_streams(reach.generators)
        self._slots = Slots(reach.owners, reach.names, reach.content)
        self._calls = Calls(reach.trees, reach.callers)
        self._guards = _guard(reach.parameters)
        self._variables = None
        if reach.cells or reach.globals:
            self._variables = Variables(reach.cells, reach.globals)
        self._watch = None
        if reach.buffers or reach.tensors:
            self._watch = Watch(reach.buffers, reach.tensors)
            if self._guards is not None:
                self._guards.add(self._watch.others)
        self.collectives = CollectiveRecorder() if reach.communicates else None

    def settle(self) -> None:
        """Take note of what the call, which is over, has done."""
        if self._streams is not None:
            self._streams = settle_streams(self._streams)
        if self._variables is not None:
            self._variables.settle()
        if self._watch is not None:
            unchanged = self._watch.settle()
            if self._guards is not None:
                self._guards.add(unchanged)
            if not self._watch.has_changes:
                self._watch = None

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
        modules_are_same = self._slots.is_present() and self._calls.is_present()
        if (
            modules_are_same
            and self._variables is None
            and self._watch is None
            and self.collectives is None
        ):
            return self._run(function, args)
        with ExitStack() as stack:
            self._restore(stack, modules=not modules_are_same)
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

    def _restore(self, stack: ExitStack, *, modules: bool) -> None:
        """What few regions need, until ``stack`` closes; that of ``modules`` even fewer."""
        if self._watch is not None:
            self._watch.recall(stack)
        if self.collectives is not None:
            stack.enter_context(CollectivePlayer(self.collectives))
        if modules:
            self._calls.restore(stack)
            stack.callback(put_in_place, put_in_place(self._slots.moved()))
        if self._variables is not None:
            self._variables.restore(stack)
