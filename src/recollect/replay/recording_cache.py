"""The recordings of a function: one for each signature, up to a limit."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from recollect._torch.modes import dispatch_mode_count, dispatch_modes
from recollect._torch.tensors import is_plain_tensor, unsupported_tensor
from recollect.observer import observing
from recollect.replay.call_mode import casts
from recollect.replay.function_call import is_comparable, metadata_of
from recollect.replay.recording import Recording
from recollect.state.flags import Flags

__all__ = ["CacheEntry", "UnsupportedArgument", "entry_of", "recordings_preserved", "signature_of"]

#: How many signatures of a function have an entry.
_SIGNATURES = 16
#: After so many calls in a row that differ from the recording, every call is recorded.
_PATIENCE = 2


@dataclass(eq=False, slots=True)
class CacheEntry:
    """What is known of the calls of one function with one signature."""

    recording: Recording | None = None
    #: Why the rerun engine has to run it, if so.
    fallback: str | None = None
    #: Why every call is recorded, if so.
    unsettled: str | None = None
    #: How the last call that differed from the recording did so.
    difference: str | None = None
    _last: Recording | None = None
    _misses: int = 0

    def recorded(self, recording: Recording, *, has_budget: bool) -> None:
        """A call was recorded. ``has_budget``: no call may hold more than others."""
        last, self._last = self._last, recording
        is_same = last is not None and last.is_like(recording)
        if self.unsettled is not None and is_same and not (has_budget and recording.shapes):
            self.unsettled = None  # twice the same: it may stay so
        elif self.unsettled is None and last is None and recording.shapes:
            # They will most likely differ next time, and the rest be recorded anyway.
            self.unsettled = "shapes inside depend on data"
        self.recording = None if self.unsettled is not None else recording

    def checked(self, difference: str | None) -> None:
        """A call was checked against the recording, and differed by ``difference``."""
        if difference is None:
            self._misses = 0
            return
        self.recording = None
        self.difference = difference
        self._misses += 1
        if self._misses >= _PATIENCE:
            # Checking it once more would only hold more.
            self.unsettled = f"it is another function at every call: {difference}"


_entries: WeakKeyDictionary[Any, OrderedDict[Any, CacheEntry]] = WeakKeyDictionary()


def entry_of(function: Callable[..., Any], signature: Any) -> CacheEntry:
    """The entry of a call. A function that cannot be a key gets a new one every time."""
    owner = _owner(function)
    try:
        entries = _entries.get(owner)
        if entries is None:
            entries = _entries.setdefault(owner, OrderedDict())
        entry = entries.get(signature)
    except TypeError:  # it has no weak references, or no hash
        return CacheEntry()
    if entry is None:
        entry = entries[signature] = CacheEntry()
        if len(entries) > _SIGNATURES:
            entries.popitem(last=False)
    elif len(entries) > 1:
        entries.pop(signature, None)  # to insert it as the newest
        entries[signature] = entry
    return entry


@contextmanager
def recordings_preserved() -> Iterator[None]:
    """A context after which all recordings are as they were before."""
    before = dict(_entries.items())
    for owner, entries in before.items():
        _entries[owner] = OrderedDict(
            (signature, copy(entry)) for signature, entry in entries.items()
        )
    try:
        yield
    finally:
        _entries.clear()
        _entries.update(before)


def _owner(function: Any) -> Any:
    """The key of a function: the module, or the code, so that a new lambda finds its entries."""
    if isinstance(function, nn.Module):
        return function  # attributes that a module does not have take long to look up
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, MethodType):
        return function.__self__
    return function.__code__ if isinstance(function, FunctionType) else function


def _code(function: Any) -> Any:
    if isinstance(function, nn.Module):
        return None
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(getattr(function, "__func__", None), "__code__", None)


def signature_of(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Any,
    sends_away: tuple[bool, bool],
    flags: Flags,
) -> Any:
    """Calls with different signatures have different recordings."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    training = owner.training if isinstance(owner, nn.Module) else None
    modes = _modes() if dispatch_mode_count() else ()
    try:
        values = [_sign(value) for value in args]
        values += [(name, _sign(value)) for name, value in kwargs.items()]
    except RecursionError:
        raise UnsupportedArgument("an argument that contains itself") from None
    return (_code(function), policy, sends_away, modes, training, casts(), flags, *values)


def _modes() -> tuple[type, ...]:
    """The kinds of the active dispatch modes, without those of ``recollect.explain``."""
    kinds = map(type, dispatch_modes())
    if observing.observer is None:
        return tuple(kinds)
    return tuple(kind for kind in kinds if not getattr(kind, "only_watches", False))


class UnsupportedArgument(Exception):
    """There is an argument that the engine does not support. Says which."""


def _sign(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not is_plain_tensor(value):
            raise UnsupportedArgument(unsupported_tensor(value))
        return metadata_of(value)
    if isinstance(value, (list, tuple)):
        return type(value), *map(_sign, value)
    if isinstance(value, dict):
        return dict, *((str(name), _sign(each)) for name, each in value.items())
    if isinstance(value, float):
        return float, repr(value)  # 0.0 and -0.0 differ, and all NaNs are equal
    return (type(value), value) if is_comparable(value) else type(value)
