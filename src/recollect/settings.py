"""Switches that a user sets around code, and the flag that code may read.

The switches are context variables: setting one in a thread or an asyncio task does not affect
others. Whether a region is being rerun is thread-local.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

_early_stop: ContextVar[bool | None] = ContextVar("recollect.early_stop", default=None)
_debug: ContextVar[bool | None] = ContextVar("recollect.debug", default=None)
_version_guard: ContextVar[bool] = ContextVar("recollect.version_guard", default=True)


class _Recomputing(threading.local):
    depth: int = 0


recomputing = _Recomputing()


def is_recomputing() -> bool:
    """Whether the calling thread is rerunning a checkpointed region.

    Use it to keep side effects to the first run::

        def forward(self, x):
            if not recollect.is_recomputing():
                self.calls += 1
            return self.inner(x)
    """
    return recomputing.depth > 0


def checked_switch(name: str, value: Any, *, optional: bool = False) -> Any:
    """``value``, if it is True, False or, where that is allowed, None."""
    if value is True or value is False or (optional and value is None):
        return value
    allowed = "True, False or None" if optional else "True or False"
    raise TypeError(f"{name} should be {allowed}, but got {value!r}")


@contextmanager
def _set(
    variable: ContextVar[Any], name: str, value: Any, *, optional: bool = False
) -> Iterator[None]:
    token = variable.set(checked_switch(name, value, optional=optional))
    try:
        yield
    finally:
        variable.reset(token)


def set_checkpoint_early_stop(enable: bool) -> AbstractContextManager[None]:
    """Decide for every region entered inside whether its recomputation may stop early.

    By default a recomputation ends as soon as all tensors that backward needs are there. The
    setting overrides ``early_stop=`` of the call. It is read when a region runs forward, and need
    not be active during backward.
    """
    return _set(_early_stop, "enable", enable)


def set_checkpoint_debug_enabled(enabled: bool | None) -> AbstractContextManager[None]:
    """Turn debug traces on or off for every region entered inside.

    Overrides ``debug=`` of the call; ``None`` leaves the decision to the call.
    """
    return _set(_debug, "enabled", enabled, optional=True)


def set_checkpoint_version_guard(enabled: bool) -> AbstractContextManager[None]:
    """Turn the guard against changed tensors on or off for every region entered inside.

    By default backward raises if a tensor that a region reads (an argument, a parameter, a buffer)
    was changed in place after the region ran, as plain autograd does. Without the guard the region
    is recomputed from the changed values: for code that knows that the change does no harm. Need
    not be active during backward.
    """
    return _set(_version_guard, "enabled", enabled)


#: Whether the guard is on for a region that is entered now.
version_guard_enabled = _version_guard.get


def resolve_early_stop(requested: bool) -> bool:
    """The early-stop setting in force for a call with the option ``requested``."""
    setting = _early_stop.get()
    return requested if setting is None else setting


def resolve_debug(requested: bool) -> bool:
    """The debug setting in force for a call with the option ``requested``."""
    setting = _debug.get()
    return requested if setting is None else setting
