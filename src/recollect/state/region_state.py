"""The state that a rerun restores besides its arguments, in one object for all engines (R3).

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
from contextvars import copy_context
from typing import Any

import torch

from recollect._torch.dynamo import hide_from_dynamo, is_nonstrict_tracing, nested_trace_policy
from recollect._torch.modes import (
    DispatchMode,
    any_autocast_enabled,
    function_mode_count,
    function_modes,
    is_own_mode,
    set_function_modes,
)
from recollect._torch.ops import OpOverload
from recollect.errors import CheckpointError
from recollect.policy.op_info import op_info, tensors_in
from recollect.settings import recomputing, version_guard_enabled
from recollect.state.buffers import BufferState, Guards, UseOfChanged
from recollect.state.flags import read_flags, write_flags
from recollect.state.inputs import Inputs
from recollect.state.module_state import ModuleIndex, ModuleState
from recollect.state.reachable import Reachable
from recollect.state.restorers import UNSET, VARIABLES, Entry, put_until
from recollect.state.rng import (
    Streams,
    read_same_streams,
    read_streams,
    reseed_recurrent_layers,
    settle_streams,
    write_streams,
)

_Tensor = torch.Tensor


class RegionState:
    """The state around one call of a function."""

    __slots__ = (
        *("_ambient", "_buffers", "_guards", "_inputs", "_modules", "_streams", "_variables"),
        "collectives",
    )

    def __init__(self, function: Any, inputs: Inputs, preserve_rng_state: bool) -> None:
        found = Reachable(function, inputs.reachable())
        self._inputs = inputs
        self._streams: Streams | None = None
        if preserve_rng_state:
            for index in found.indexes:
                if index.recurrent:
                    _reseed(index)
            self._streams = read_streams(found.generators)
        self._modules = ModuleState(found.modules, found.indexes)
        self._guards = Guards(self._modules.guarded()) if version_guard_enabled() else None
        self._variables: Sequence[Entry] = found.variables
        self._buffers: BufferState | None = None
        if found.buffers or found.tensors or inputs.copied:
            self._buffers = BufferState(found.buffers, (*found.tensors, *inputs.copied))
            if self._guards is not None:
                self._guards.add(self._buffers.others)
        #: A mode for the engine to run forward under, if there is one.
        self.collectives = CollectiveRecorder() if found.communicates else None
        self._ambient = Ambient()

    def settle(self) -> None:
        """After the call: note what it has changed."""
        if self._streams is not None:
            self._streams = settle_streams(self._streams)
        self._modules.settle()
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
        differing = _differing(self._variables) if self._variables else []
        is_present = same_modules and same_ambient and not differing
        if is_present and self._buffers is None and self.collectives is None:
            return self._run(function, args, kwargs)
        with ExitStack() as stack:
            if self._buffers is not None:
                self._buffers.restore(stack)
            if self.collectives is not None:
                stack.enter_context(CollectivePlayer(self.collectives))
            if not same_modules:
                self._modules.restore(stack)
            for entry in differing:
                put_until(stack, *entry)
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


def _differing(variables: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in variables if not entry[1].same(entry[0], entry[2])]


def _unassigned(variables: Sequence[Entry]) -> list[Entry]:
    """``variables`` without those that the region has assigned to (``nonlocal``, ``global``).

    They are the user's own state, like attributes.
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


# --- ambient state --------------------------------------------------------------------------------

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu", "privateuseone")
_AUTOCAST_TYPES = tuple(filter(torch.amp.is_autocast_available, _DEVICE_TYPES))

#: For each type of device whether autocast is on, and its dtype; and whether casts are cached.
_Autocast = tuple[tuple[tuple[str, bool, torch.dtype], ...], bool]


def read_autocast() -> _Autocast:
    """Autocast of every type of device, now."""
    states = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _AUTOCAST_TYPES
    ]
    return tuple(states), torch.is_autocast_cache_enabled()


def write_autocast(autocast: _Autocast) -> None:
    """Set autocast of every type of device."""
    states, cache_enabled = autocast
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cache_enabled)


def _enter_autocast(autocast: _Autocast | None, stack: ExitStack) -> None:
    """Set ``autocast`` until ``stack`` closes; None stands for all off."""
    before = states, cache_enabled = read_autocast()
    stack.callback(_leave_autocast, before)
    torch.autocast_increment_nesting()
    all_off = tuple([(kind, False, dtype) for kind, _, dtype in states]), cache_enabled
    write_autocast(all_off if autocast is None else autocast)


def _leave_autocast(before: _Autocast) -> None:
    # The outermost one to be left drops the cached casts, as torch's own context does.
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    write_autocast(before)


def _users_modes(modes: list[Any]) -> list[Any]:
    """``modes`` without ours: one that records a call must not see what runs after the call."""
    return [mode for mode in modes if not is_own_mode(mode)]


class Ambient:
    """Context variables, flags, autocast and function modes (a default device) at the call."""

    __slots__ = ("_autocast", "_flags", "_modes", "_nested_trace", "context")

    def __init__(self) -> None:
        self.context = copy_context()
        self._flags = read_flags()
        self._autocast = read_autocast() if any_autocast_enabled() else None
        self._modes = _users_modes(function_modes()) if function_mode_count() else None
        self._nested_trace = nested_trace_policy() if is_nonstrict_tracing() else None

    def is_present(self) -> bool:
        """Whether all but the context variables is as it was; almost always."""
        return (
            self._flags == read_flags()
            and self._autocast is None
            and self._modes is None
            and self._nested_trace is None
            and not function_mode_count()
            and not any_autocast_enabled()
        )

    def enter(self, stack: ExitStack) -> None:
        """Restore all but the context variables, until ``stack`` closes."""
        flags, modes = read_flags(), function_modes()
        if flags != self._flags:
            stack.callback(write_flags, flags)
            write_flags(self._flags)
        if self._autocast is not None or any_autocast_enabled():
            _enter_autocast(self._autocast, stack)
        then = self._modes or []
        if _users_modes(modes) != then:
            stack.callback(set_function_modes, modes)
            set_function_modes([*filter(is_own_mode, modes), *then])
        if self._nested_trace is not None:
            stack.enter_context(self._nested_trace())


# --- collectives ----------------------------------------------------------------------------------


def _is_collective(func: Any) -> bool:
    # Not by exact type: ops that take objects (the process group) are of a type of their own.
    return isinstance(func, OpOverload) and func.namespace == "c10d"


def _written(args: tuple[Any, ...]) -> list[_Tensor]:
    """The tensors that a collective writes to: its first argument, by convention."""
    return tensors_in(args[:1])


class CollectiveRecorder(DispatchMode):
    """Runs in forward and keeps the results of collectives (``SyncBatchNorm``) for the rerun.

    Running them again would hang if the other processes did not rerun at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        #: The op, what it wrote, and what it returned.
        self.entries: list[tuple[Any, list[_Tensor], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = op_info(func).call(*args, **(kwargs or {}))
        if _is_collective(func):
            # Let the current stream wait for the results of the collective.
            for item in out if isinstance(out, tuple) else (out,):
                if not isinstance(item, (_Tensor, list)) and hasattr(item, "wait"):
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
