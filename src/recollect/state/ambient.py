"""Modes around a region that decide what its ops do: autocast and the default device.

Almost always there are none, in forward and again in backward; then capturing costs two questions
and restoring one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from recollect.torch_private import (
    any_autocast_enabled,
    current_device_context,
    function_mode_count,
    is_nonstrict_tracing,
    nested_trace_policy,
)

__all__ = ["Ambient", "enter_ambient"]

_AutocastState = tuple[str, bool, torch.dtype]


def _autocast_device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return ("cpu",)
    return (accelerator.type, "cpu")


_DEVICE_TYPES = _autocast_device_types()


def _read_autocast() -> tuple[list[_AutocastState], bool]:
    states = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _DEVICE_TYPES
    ]
    return states, torch.is_autocast_cache_enabled()


class Ambient:
    """The modes at one moment, of which there were some."""

    __slots__ = ("_autocast", "_device", "_nested_trace")

    def __init__(
        self,
        autocast: tuple[list[_AutocastState], bool] | None,
        device: AbstractContextManager[Any] | None,
        nested_trace: Callable[[], AbstractContextManager[Any]] | None,
    ) -> None:
        self._autocast = autocast
        self._device = device
        self._nested_trace = nested_trace

    @classmethod
    def capture(cls) -> Ambient | None:
        """The modes now; None if there are none."""
        if not (any_autocast_enabled() or function_mode_count() or is_nonstrict_tracing()):
            return None
        autocast = _read_autocast() if any_autocast_enabled() else None
        device = current_device_context()
        nested_trace = nested_trace_policy()
        if autocast is None and device is None and nested_trace is None:
            return None
        return cls(autocast, device, nested_trace)

    def enter(self, stack: ExitStack) -> None:
        """Bring the modes back until ``stack`` closes."""
        if self._autocast is not None:
            states, cache_enabled = self._autocast
            for kind, enabled, dtype in states:
                stack.enter_context(
                    torch.amp.autocast(
                        kind, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled
                    )
                )
        else:
            _leave_autocast(stack)
        if self._device is not None:
            stack.enter_context(self._device)
        if self._nested_trace is not None:
            stack.enter_context(self._nested_trace())


def _leave_autocast(stack: ExitStack) -> None:
    """Switch off any autocast around backward, until ``stack`` closes."""
    if any_autocast_enabled():
        for kind in _DEVICE_TYPES:
            stack.enter_context(torch.amp.autocast(kind, enabled=False))


def enter_ambient(ambient: Ambient | None, stack: ExitStack) -> None:
    """Bring back what ``Ambient.capture`` gave."""
    if ambient is None:
        _leave_autocast(stack)
    else:
        ambient.enter(stack)
