"""Reads and writes the switches that decide what ops do: default dtype, precision, sdpa backends.

Reading them all takes about a microsecond. A rerun sets only those that are not as they were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from recollect._torch.flags import FLAGS, SPECIAL_FLAGS, read_precisions, write_precisions

if sys.version_info >= (3, 11):
    from operator import call
else:

    def call(get: Any) -> Any:
        """Call ``get``."""
        return get()


#: Calls a getter.
call_it: Callable[[Callable[[], Any]], Any] = call
#: The value of each flag; then, if one could not be read, the precisions that prevent it.
Flags = tuple[Any, ...]

_GETTERS = tuple(get for get, _ in FLAGS)
_USUAL_GETTERS = tuple(get for get in _GETTERS if get.__name__ not in SPECIAL_FLAGS)
_UNREADABLE = object()


def read_flags() -> Flags:
    """The switches now."""
    try:
        return (*map(call_it, _GETTERS),)
    except RuntimeError:
        # torch refuses to read an older switch after a newer one was used for the same setting.
        return *map(_try, _GETTERS), read_precisions()


def read_usual_flags() -> Flags:
    """The switches now, without those that only a few special ops depend on."""
    try:
        return (*map(call_it, _USUAL_GETTERS),)
    except RuntimeError:
        return read_flags()


def flag_getters(read: Callable[[], Flags]) -> tuple[Callable[[], Any], ...]:
    """What ``read`` reads, one of the two functions above. Each may raise a `RuntimeError`."""
    return _USUAL_GETTERS if read is read_usual_flags else _GETTERS


def usual_flags(flags: Flags) -> Flags:
    """What `read_usual_flags` returned when ``flags`` were read."""
    usual = tuple(v for v, get in zip(flags, _GETTERS, strict=False) if get in _USUAL_GETTERS)
    return flags if _UNREADABLE in usual else usual


def _try(get: Any) -> Any:
    try:
        return get()
    except RuntimeError:
        return _UNREADABLE


def write_flags(flags: Flags) -> None:
    """Set the switches that are not as in ``flags``."""
    for (read, write), value in zip(FLAGS, flags, strict=False):
        # Read at its turn: to set one may set another.
        if value is not _UNREADABLE and value != _try(read):
            write(value)
    if len(flags) > len(FLAGS):
        write_precisions(flags[-1])
