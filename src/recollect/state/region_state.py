"""The state that a rerun restores besides its arguments, for `rerun` and `reentrant` (R3).

In forward:

1. Search the objects that the function can reach.
2. Read random streams and ambient state, copy buffers, note the versions of everything else.
3. When it is over, note which buffers it has changed.

In a rerun:

4. Prepare to raise if the function uses a tensor that has changed since (2).
5. Restore containers, buffers, variables, streams and ambient state to (2), run the function, and
   undo that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from recollect._torch.dynamo import hide_from_dynamo
from recollect.settings import recomputing, version_guard_enabled
from recollect.state.ambient import Ambient
from recollect.state.buffers import BufferState, Guards, UseOfChanged
from recollect.state.collectives import CollectivePlayer, CollectiveRecorder
from recollect.state.inputs import Inputs
from recollect.state.module_contents import ModuleContents
from recollect.state.module_index import ModuleIndex
from recollect.state.module_state import ModuleState
from recollect.state.reachable import Reachable
from recollect.state.rng import (
    Streams,
    read_same_streams,
    read_streams,
    reseed_recurrent_layers,
    settle_streams,
    write_streams,
)
from recollect.state.variables import Counters, Variables


class RegionState:
    """The state around one call of a function."""

    __slots__ = (
        *(
            "_ambient",
            "_buffers",
            "_contents",
            "_counters",
            "_guards",
            "_inputs",
            "_modules",
            "_streams",
        ),
        "_variables",
        "collectives",
    )

    def __init__(
        self,
        function: Any,
        inputs: Inputs,
        preserve_rng_state: bool,
        *,
        counters: Counters = "restored",
    ) -> None:
        """``counters``: what a rerun does with counters of calls."""
        self._counters = counters
        found = Reachable(function, inputs.reachable())
        self._inputs = inputs
        self._streams: Streams | None = None
        if preserve_rng_state:
            for index in found.indexes:
                if index.recurrent:
                    _reseed(index)
            self._streams = read_streams(found.generators)
        self._modules = ModuleState(found.modules, found.indexes, found.module_values)
        self._guards = Guards(self._modules.guarded()) if version_guard_enabled() else None
        self._variables = Variables(found.variables) if found.variables else None
        self._contents = ModuleContents(found.contents) if found.contents else None
        self._buffers: BufferState | None = None
        if found.buffers or found.tensors or inputs.copied:
            self._buffers = BufferState(found.buffers, (*found.tensors, *inputs.copied))
            if self._guards is not None:
                self._guards.add(self._buffers.others)
                self._guards.release(self._modules.unheld())
            self._buffers.others.clear()  # the guards hold them, but for what `settle` says
        #: A mode for the engine to run forward under, if there is one.
        self.collectives = CollectiveRecorder() if found.communicates else None
        self._ambient = Ambient()

    def settle(self) -> None:
        """After the call: note what it has changed."""
        if self._streams is not None:
            self._streams = settle_streams(self._streams)
        unheld = self._modules.settle(counters=self._counters)
        if self._variables is not None:
            unheld += self._variables.settle(counters=self._counters)
        if self._contents is not None:
            unheld += self._contents.settle(counters=self._counters)
        if self._buffers is not None:
            unchanged = self._buffers.settle()
            if self._guards is not None:
                self._guards.add(unchanged)
            if not self._buffers.has_changes:
                self._buffers = None
        if self._guards is not None:
            self._guards.release(unheld)

    @property
    def preserves_rng(self) -> bool:
        """Whether a rerun gets the random numbers of the call."""
        return self._streams is not None

    def changes(self) -> UseOfChanged | None:
        """A mode to run the function under if something that it may use has changed since."""
        changes = None if self._guards is None else self._guards.changes()
        return None if changes is None else UseOfChanged(changes)

    def check_gradients(self) -> None:
        """After a backward through the graph of a rerun: raise if gradients went astray."""
        contents = self._contents
        self._modules.check_gradients([] if contents is None else contents.take_made())

    @hide_from_dynamo
    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run ``function`` in the state of the call, with the arguments from `Inputs.recall`."""
        swapped = self._inputs.swapped()
        if swapped is None:
            return self._run_restored(function, args, kwargs)
        with swapped:
            return self._run_restored(function, args, kwargs)

    @hide_from_dynamo
    def _run_restored(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        # Almost always nothing has changed, and this check is the only cost.
        same_modules, same_ambient = self._modules.is_present(), self._ambient.is_present()
        same_variables = self._variables is None or self._variables.is_present()
        is_present = same_modules and same_ambient and same_variables and not self._contents
        if is_present and self._buffers is None and self.collectives is None:
            return self._run(function, args, kwargs)
        with ExitStack() as stack:
            if self._buffers is not None:
                self._buffers.restore(stack)
            if self.collectives is not None:
                stack.enter_context(CollectivePlayer(self.collectives))
            if not same_modules:
                self._modules.restore(stack)
            if self._contents:  # after the attributes, from which it is found
                stack.enter_context(self._contents.swapped())
            if self._variables is not None:
                self._variables.restore(stack)
            if not same_ambient:
                self._ambient.enter(stack)
            return self._run(function, args, kwargs)

    @hide_from_dynamo
    def _run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run ``function`` with its random numbers and context variables."""
        streams = self._streams
        outside = None if streams is None else read_same_streams(streams)
        recomputing.depth += 1
        try:
            if streams is not None:
                write_streams(streams)
            # A copy: assignments of the function must not stay.
            return self._ambient.context.copy().run(function, *args, **kwargs)
        finally:
            recomputing.depth -= 1
            if outside is not None:
                write_streams(outside)


def _reseed(index: ModuleIndex) -> None:
    """Prepare recurrent layers to draw the same in a rerun."""
    layers = [layer for each in index.recurrent if (layer := each()) is not None]
    dropping = [layer for layer in layers if layer.dropout and layer.training]
    for device in {p.device for layer in dropping for p in layer.parameters()}:
        reseed_recurrent_layers(device)
