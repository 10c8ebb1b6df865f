"""Ambient state: context variables, autocast, function modes, process-wide switches.

It decides what ops do (a default device is a function mode). A rerun finds it as forward did,
whatever surrounds backward, and nothing of it is left afterwards. Almost always nothing has
changed, and to find that out is all it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any

import torch

from recollect._torch.dynamo import is_nonstrict_tracing, nested_trace_policy
from recollect._torch.modes import (
    any_autocast_enabled,
    function_mode_count,
    function_modes,
    set_function_modes,
)
from recollect.state.flags import read_flags, write_flags

__all__ = ["Ambient", "read_autocast", "write_autocast"]

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu", "privateuseone")

#: For each type of device whether autocast is on, and its dtype; and whether casts are cached.
_Autocast = tuple[tuple[tuple[str, bool, torch.dtype], ...], bool]


def _knows_autocast(device_type: str) -> bool:
    try:
        torch.get_autocast_dtype(device_type)
    except RuntimeError:
        return False
    return True


_AUTOCAST_TYPES = tuple(filter(_knows_autocast, _DEVICE_TYPES))


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


def _switched_off(autocast: _Autocast) -> _Autocast:
    states, cache_enabled = autocast
    return tuple([(kind, False, dtype) for kind, _, dtype in states]), cache_enabled


def _enter_autocast(autocast: _Autocast | None, stack: ExitStack) -> None:
    """Bring ``autocast`` about until ``stack`` closes; None stands for all off."""
    before = read_autocast()
    stack.callback(_leave_autocast, before)
    torch.autocast_increment_nesting()
    write_autocast(_switched_off(before) if autocast is None else autocast)


def _leave_autocast(before: _Autocast) -> None:
    # The outermost one to be left drops the cached casts, as torch's own context does.
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    write_autocast(before)


class Ambient:
    """The ambient state at one moment."""

    __slots__ = ("_autocast", "_context", "_flags", "_modes", "_nested_trace")

    def __init__(self) -> None:
        self._context = copy_context()
        self._flags = read_flags()
        self._autocast = read_autocast() if any_autocast_enabled() else None
        self._modes = function_modes() if function_mode_count() else None
        self._nested_trace = nested_trace_policy() if is_nonstrict_tracing() else None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` with all of it as it was."""
        # A copy: what the function sets is gone afterwards, and a context runs one thing at a time.
        context = self._context.copy()
        if self._is_present():
            return context.run(function, *args)
        with ExitStack() as stack:
            self._enter(stack)
            return context.run(function, *args)

    def _is_present(self) -> bool:
        return (
            self._flags == read_flags()
            and self._autocast is None
            and self._modes is None
            and self._nested_trace is None
            and not function_mode_count()
            and not any_autocast_enabled()
        )

    def _enter(self, stack: ExitStack) -> None:
        flags, modes = read_flags(), function_modes()
        if flags != self._flags:
            stack.callback(write_flags, flags)
            write_flags(self._flags)
        if self._autocast is not None or any_autocast_enabled():
            _enter_autocast(self._autocast, stack)
        if modes != (self._modes or []):
            stack.callback(set_function_modes, modes)
            set_function_modes(self._modes or [])
        if self._nested_trace is not None:
            stack.enter_context(self._nested_trace())
