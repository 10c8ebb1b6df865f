"""What surrounds a call: context variables, flags, autocast, function modes."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import copy_context
from typing import Any

import torch

from recollect._torch.dynamo import is_nonstrict_tracing, nested_trace_policy
from recollect._torch.modes import (
    any_autocast_enabled,
    autocast_of,
    function_mode_count,
    function_modes,
    is_own_mode,
    set_function_modes,
)
from recollect.state.flags import read_flags, write_flags

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu", "privateuseone")
_AUTOCAST_TYPES = tuple(filter(torch.amp.is_autocast_available, _DEVICE_TYPES))

#: For each type of device whether autocast is on, and its dtype; and whether casts are cached.
_Autocast = tuple[tuple[tuple[str, bool, torch.dtype], ...], bool]


def read_autocast() -> _Autocast:
    """Autocast of every type of device, now."""
    return autocast_of(_AUTOCAST_TYPES), torch.is_autocast_cache_enabled()


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
