"""The recordings of a function: one for each signature, up to a limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from recollect._torch.dtensors import local_tensor, spec_of
from recollect._torch.modes import dispatch_mode_count, dispatch_modes
from recollect._torch.tensors import is_plain_tensor, unsupported_tensor
from recollect.observer import observing
from recollect.replay.function_call import casts, is_comparable, metadata_of
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording import Recording
from recollect.state.flags import Flags

#: How many signatures of a function have an entry.
_SIGNATURES = 16
#: After so many calls in a row that differ from the recording, every call is recorded.
_PATIENCE = 2


@dataclass(eq=False, slots=True)
class CacheEntry:
    """The state of one function under one signature: recorded, fallen back, or unsettled."""

    recording: Recording | None = None
    #: Why replay falls back to rerun, if so.
    fallback: str | None = None
    #: Why every call is recorded, if so.
    unsettled: str | None = None
    #: How the last call that differed from the recording did so.
    difference: str | None = None
    _last: Recording | None = None
    _misses: int = 0
    #: Whether the recording is of a call under another schedule, and none was checked against it.
    _is_given: bool = False

    def is_new(self) -> bool:
        return self.recording is None and self.fallback is None and self.unsettled is None

    def is_untried(self) -> bool:
        return self.is_new() and self._last is None

    def recorded(self, recording: Recording, *, has_budget: bool) -> None:
        """A call was recorded. ``has_budget``: no call may hold more than others."""
        last, self._last = self._last, recording
        is_same = last is not None and last.is_like(recording)
        if self.unsettled is not None and is_same and not (has_budget and recording.shapes):
            self.unsettled = None  # twice the same: it may stay so
        elif self.unsettled is None and last is None and recording.shapes:
            # They will most likely differ in the next call.
            self.unsettled = "shapes inside depend on data"
        self.recording = None if self.unsettled is not None else recording

    def give(self, recording: Recording) -> None:
        """Have calls checked against a recording of a call under another schedule of a plan."""
        self.recorded(recording, has_budget=True)
        self._is_given = True

    def checked(self, difference: str | None) -> None:
        """A call was checked against the recording, and differed by ``difference``."""
        is_given, self._is_given = self._is_given, False
        if difference is None:
            self._misses = 0
            return
        self.recording = None
        self.difference = difference
        self._misses += not is_given  # it was no call of this kind that was recorded
        if self._misses >= _PATIENCE:
            # A call that differs holds more than one that is recorded.
            self.unsettled = f"it differs in every call: {difference}"


#: The entries of each function by signature, the one used last at the end.
_entries: WeakKeyDictionary[Any, OrderedDict[Any, CacheEntry]] = WeakKeyDictionary()


def entry_of(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Any,
    offloads: tuple[bool, bool],
    flags: Flags,
) -> CacheEntry:
    """The entry of a call. A function that cannot be a key gets a new one every time."""
    modes = _modes() if dispatch_mode_count() else ()
    # Looking up a missing attribute of a module is slow.
    owner, code = (function, None) if isinstance(function, nn.Module) else _owner(function)
    training = owner.training if isinstance(owner, nn.Module) else None
    is_planned = isinstance(policy, NamedSchedule)
    try:
        signs = [_signature_of(value, is_planned) for value in (*args, *kwargs.values())]
    except RecursionError:
        raise UnsupportedArgument("an argument that contains itself") from None
    signature = (code, policy, offloads, modes, training, casts(), flags, *kwargs, *signs)
    try:
        entries = _entries.get(owner)
        if entries is None:
            entries = _entries.setdefault(owner, OrderedDict())
        entry = entries.get(signature)
    except TypeError:  # it has no weak references, or no hash
        return CacheEntry()
    if entry is None or len(entries) > 1:
        entries.pop(signature, None)
        entry = entries[signature] = entry or CacheEntry()
        if len(entries) > _SIGNATURES:
            entries.popitem(last=False)
    return entry


@contextmanager
def recordings_preserved() -> Iterator[None]:
    """A context that restores all recordings at its end."""
    before = dict(_entries.items())
    for owner, entries in before.items():
        _entries[owner] = OrderedDict((sign, copy(entry)) for sign, entry in entries.items())
    try:
        yield
    finally:
        _entries.clear()
        _entries.update(before)


def _owner(function: Any) -> tuple[Any, Any]:
    """The key of a function: its module or its code, and for a method also its code."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        return function.__self__, getattr(function.__func__, "__code__", None)
    return function.__code__ if isinstance(function, FunctionType) else function, None


def _modes() -> tuple[type, ...]:
    """The kinds of the active dispatch modes, without those of ``recollect.explain``."""
    kinds = map(type, dispatch_modes())
    if observing.observer is None:
        return tuple(kinds)
    return tuple(kind for kind in kinds if not getattr(kind, "only_watches", False))


class UnsupportedArgument(Exception):
    """The engine does not support an argument. Says which."""


def _signature_of(value: Any, accepts_dtensors: bool) -> Any:
    """The signature of an argument. ``accepts_dtensors``: whether it may be a ``DTensor``."""
    if isinstance(value, torch.Tensor):
        local = local_tensor(value)
        if not is_plain_tensor(local) or (local is not value and not accepts_dtensors):
            raise UnsupportedArgument(unsupported_tensor(value))
        if local is value:
            return metadata_of(value)
        return metadata_of(local), spec_of(value), value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value), *(_signature_of(each, accepts_dtensors) for each in value)
    if isinstance(value, dict):
        return dict, *((str(n), _signature_of(each, accepts_dtensors)) for n, each in value.items())
    if isinstance(value, float):
        return float, repr(value)  # 0.0 and -0.0 differ, and all NaNs are equal
    return (type(value), value) if is_comparable(value) else type(value)
