"""Process-wide switches that decide what an op does: default dtype, precision, attention backends.

Reading them all takes about a microsecond. They are set again for a rerun only where one is
not as it was.
"""

from __future__ import annotations

from typing import Any

from recollect._torch.flags import FLAGS, read_precisions, write_precisions

__all__ = ["Flags", "read_flags", "write_flags"]

#: The value of each flag; then, if one could not be read, the precisions that are in its way.
Flags = tuple[Any, ...]

_GETTERS = tuple(get for get, _ in FLAGS)
_UNREADABLE = object()


def read_flags() -> Flags:
    """The switches now."""
    try:
        return tuple([get() for get in _GETTERS])
    except RuntimeError:
        # torch refuses to say by an older switch what was set by a newer one.
        return *map(_try, _GETTERS), read_precisions()


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
