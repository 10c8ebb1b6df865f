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
from typing import Any, Protocol

import torch

from recollect._torch.dynamo import hide_from_dynamo
from recollect._torch.modes import DispatchMode
from recollect._torch.ops import OpOverload
from recollect.errors import CheckpointError, InputChanged
from recollect.policy.op_info import op_info, tensors_in
from recollect.settings import recomputing, version_guard_enabled
from recollect.state.ambient import Ambient
from recollect.state.buffers import BufferState, Guards, UseOfChanged
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


class _Part(Protocol):
    """Some of the state at a call."""

    def settle(self, *, counters: Counters) -> list[int]:
        """After the call: note what it has changed. Returns what is not to be held, by ``id``."""

    def is_present(self) -> bool:
        """Whether all of it is as it was, and stays so in a rerun; almost always."""

    def restore(self, stack: ExitStack) -> None:
        """Restore it until ``stack`` closes, or raise."""


class RegionState:
    """The state around one call of a function."""

    __slots__ = (
        *("_ambient", "_counters", "_guards", "_inputs", "_made", "_parts", "_streams"),
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
        #: Parameters that the last rerun has made.
        self._made: list[torch.Tensor] = []
        modules = ModuleState(found.modules, found.indexes, found.module_values, self._made)
        self._guards = Guards(modules.guarded()) if version_guard_enabled() else None
        #: In the order of restoring: contents are found from attributes.
        self._parts: list[_Part] = [modules]
        if found.contents:
            self._parts.append(ModuleContents(found.contents, self._made))
        if found.variables:
            self._parts.append(Variables(found.variables))
        if found.buffers or found.tensors or inputs.copied:
            tensors = (*found.tensors, *inputs.copied)
            self._parts.insert(0, BufferState(found.buffers, tensors, self._guards))
            if self._guards is not None:
                self._guards.release(modules.unheld())
        #: A mode for the engine to run forward under, if there is one.
        self.collectives = CollectiveRecorder() if found.communicates else None
        self._ambient = Ambient()

    def settle(self) -> None:
        """After the call: note what it has changed."""
        if self._streams is not None:
            self._streams = settle_streams(self._streams)
        for part in self._parts:
            unheld = part.settle(counters=self._counters)
            if unheld and self._guards is not None:
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
        made = [*self._made]
        self._made.clear()
        if any(each.grad is not None for each in made):
            raise InputChanged(_NEW_PARAMETERS)

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
        changed = [part for part in self._parts if not part.is_present()]
        is_same_ambient = self._ambient.is_present()
        if not changed and is_same_ambient and self.collectives is None:
            return self._run(function, args, kwargs)
        self._made.clear()
        with ExitStack() as stack:
            if self.collectives is not None:
                stack.enter_context(CollectivePlayer(self.collectives))
            for part in changed:
                part.restore(stack)
            if not is_same_ambient:
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


# --- collectives: a rerun gets their results instead of running them again ------------------------


def _is_collective(func: Any) -> bool:
    # Not by exact type: ops that take objects (the process group) are of a type of their own.
    return isinstance(func, OpOverload) and func.namespace == "c10d"


def _written(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that a collective writes to: its first argument, by convention."""
    return tensors_in(args[:1])


class CollectiveRecorder(DispatchMode):
    """Runs in forward and keeps the results of collectives (``SyncBatchNorm``) for the rerun.

    Running them again would hang if the other processes did not rerun at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        #: The op, what it wrote, and what it returned.
        self.entries: list[tuple[Any, list[torch.Tensor], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = op_info(func).call(*args, **(kwargs or {}))
        if _is_collective(func):
            # Let the current stream wait for the results of the collective.
            for item in out if isinstance(out, tuple) else (out,):
                if not isinstance(item, (torch.Tensor, list)) and hasattr(item, "wait"):
                    item.wait()
            self.entries.append((func, [tensor.clone() for tensor in _written(args)], out))
        return out


class CollectivePlayer(DispatchMode):
    """Runs in a rerun and returns the results again, in their order."""

    def __init__(self, recorder: CollectiveRecorder) -> None:
        super().__init__()
        self._entries = iter(recorder.entries)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _is_collective(func):
            return op_info(func).call(*args, **(kwargs or {}))
        recorded, written, out = next(self._entries, (None, [], None))
        if recorded is not func:
            raise CheckpointError(
                f"the recomputation of a region communicates with other processes ({func}) where "
                "its forward did not: its code depends on something that has changed since."
            )
        for target, value in zip(_written(args), written, strict=True):
            target.copy_(value)
        return out


_NEW_PARAMETERS = (
    "a checkpointed region makes parameters of its modules, and its recomputation has made them "
    "again: those got the gradients. Run the model once before, under torch.no_grad(), or use the "
    "default engine."
)
