"""Tensors that a region writes to or reads, besides its arguments.

BatchNorm is counted once: tensors that a region writes to (statistics, counters, histories) must
end as after one forward, and a rerun must read their values of forward. So buffers that forward
changed get their former values in place during the rerun, and keep their version counters.

Not every change raises a version: the op of ``BatchNorm`` writes to the running statistics though
its schema does not say so, and ``buffer.data.copy_()`` is a common way to update a moving average.
So copies are compared by content on the CPU. On a device that would synchronize: there, buffers of
modules that may write so are assumed to have changed. Large buffers are usually masks and tables:
they are copied at their first call, and later only if they have ever changed.

Tensors that a region only reads, such as parameters, are guarded by their versions: where one was
changed in place, the rerun would compute with the new value, and plain autograd raises. The change
is an error only if the rerun uses the tensor, since a closure may hold a model with other
parameters. Setting the ``data`` of a parameter does not raise its version: sharding engines do so
all the time, and ensure that the values are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from recollect._torch.autograd import set_version
from recollect._torch.modes import DispatchMode, unobserved
from recollect._torch.tensors import copy_tensors, storage_key
from recollect.checks.changed_input import used_tensor_changed
from recollect.errors import InputChanged
from recollect.policy.op_info import op_info
from recollect.state.module_index import Writes
from recollect.state.reachable import BufferPlace
from recollect.state.tensors import (
    LARGE,
    are_statistics,
    is_copyable,
    is_small,
    nbytes,
    same_values,
)

_Tensor = torch.Tensor


class _Watched:
    """One tensor before the region."""

    __slots__ = (
        *("before", "has_changed", "is_copied", "is_new", "name", "required_grad", "tensor"),
        *("version", "writes"),
    )

    def __init__(self, name: str, tensor: _Tensor, writes: Writes) -> None:
        self.name = name
        self.tensor = tensor
        self.version = tensor._version
        self.required_grad = tensor.requires_grad
        self.writes = writes
        is_large = nbytes(tensor) > LARGE and writes is not Writes.HIDDEN
        #: By tensor and writes, whether it has ever changed; None for a small one.
        self.has_changed = _known_on_storage_of(tensor) if is_large else None
        known = None if self.has_changed is None else self.has_changed.get((id(tensor), writes))
        #: Whether to compare values even on a device, which synchronizes.
        self.is_new = is_large and known is None
        self.is_copied = known is not False
        #: The values, if they were copied.
        self.before: _Tensor | None = None

    def is_written(self) -> bool:
        if self.tensor._version != self.version:
            return True
        if self.before is None:
            return False
        if self.is_new or self.tensor.device.type == "cpu":
            return not same_values(self.tensor, self.before)
        return self.writes is not Writes.SEEN

    def remember(self, is_written: bool) -> None:
        if self.has_changed is not None:
            key = id(self.tensor), self.writes
            self.has_changed[key] = self.has_changed.get(key, False) or is_written


_HasChanged = dict[tuple[int, Writes], bool]

#: Of the storages of large buffers that were watched before: for each tensor, and how it may be
#: written to, in training or not, whether it has ever changed. By storage: a tensor with a weak
#: reference cannot be exchanged by `torch.utils.swap_tensors`, as `load_state_dict` may do.
_large: WeakKeyDictionary[torch.UntypedStorage, _HasChanged] = WeakKeyDictionary()


def _known_on_storage_of(tensor: _Tensor) -> _HasChanged:
    if storage_key(tensor) is None:
        return {}  # a tensor of a transform
    return _large.setdefault(tensor.untyped_storage(), {})


class BufferState:
    """The tensors that one region may write to."""

    __slots__ = ("_changed", "_guards", "_refusal", "_watched")

    def __init__(
        self,
        buffers: Sequence[BufferPlace],
        tensors: Sequence[_Tensor],
        guards: Guards | None = None,
    ) -> None:
        """Watch ``buffers``, and those of ``tensors`` that are small and need no gradient.

        Others are only guarded, and so are those that the region leaves alone.
        """
        self._guards = guards
        self._watched: list[_Watched] = []
        self._changed: list[_Watched] = []
        #: Why the region cannot be rerun, if so.
        self._refusal: str | None = None
        others: list[_Tensor] = []
        for owner, name, writes in buffers:
            tensor = owner[name]
            if isinstance(tensor, torch.nn.Parameter):
                tensor = tensor.detach()  # has its memory and its version
            if is_copyable(tensor):
                self._watched.append(_Watched(f"buffer `{name}`", tensor, writes))
            elif isinstance(tensor, _Tensor):
                others.append(tensor)
        for tensor in tensors:
            if are_statistics(tensor):
                self._watched.append(_Watched(_OUTSIDE, tensor, Writes.MAYBE))
            elif is_small(tensor):
                self._watched.append(_Watched(_OUTSIDE, tensor, Writes.SEEN))
            else:
                others.append(tensor)
        to_copy = [watched for watched in self._watched if watched.is_copied]
        if to_copy:
            with unobserved():
                copies = _copies([watched.tensor for watched in to_copy])
            for watched, copy in zip(to_copy, copies, strict=True):
                watched.before = copy
        if guards is not None:
            guards.add(others)

    def settle(self, *, counters: object = None) -> list[int]:
        """Note what the region has changed."""
        watched, self._watched = self._watched, []
        for each in watched:
            if each.tensor.requires_grad and not each.required_grad:
                self._refusal = _GAINED_HISTORY.format(
                    name=each.name, shape=list(each.tensor.shape)
                )
                return []  # the history runs through the region, which would hold itself
        with unobserved():
            written = [each.is_written() for each in watched]
        unchanged = []
        for each, is_written in zip(watched, written, strict=True):
            if is_written:
                self._changed.append(each)
            else:
                unchanged.append(each.tensor)
            each.remember(is_written)
        if self._guards is not None:
            self._guards.add(unchanged)
        self._guards = None
        return []

    def is_present(self) -> bool:
        """Whether the region has changed none of them; it may yet if forward is not over."""
        return not (self._watched or self._changed or self._refusal)

    def restore(self, stack: ExitStack) -> None:
        """Give changed tensors their values before the region, until ``stack`` closes."""
        if self._refusal is not None:
            raise InputChanged(self._refusal)
        changed = self._changed
        if self._watched:  # forward is not over: the region goes backward inside of itself
            with unobserved():
                changed = [each for each in self._watched if each.is_written()]
        for w in changed:
            if w.before is None:
                raise InputChanged(_NOT_COPIED.format(name=w.name, shape=list(w.tensor.shape)))
            if w.before.shape != w.tensor.shape:
                sizes = {"before": list(w.before.shape), "now": list(w.tensor.shape)}
                raise InputChanged(_RESIZED.format(name=w.name, **sizes))
        tensors = [w.tensor for w in changed]
        with unobserved():
            stack.callback(_write, tensors, _copies(tensors), [t._version for t in tensors])
        # Where the rerun saves a tensor, it has the version it had when forward saved it.
        _write(tensors, [w.before for w in changed], [w.version for w in changed])


def _write(tensors: list[_Tensor], values: list[Any], versions: list[int]) -> None:
    with unobserved():
        copy_tensors([tensor.data for tensor in tensors], values)
    for tensor, version in zip(tensors, versions, strict=True):
        set_version(tensor, version)


def _copies(tensors: list[_Tensor]) -> list[_Tensor]:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_tensors(copies, tensors)
    return copies


_OUTSIDE = "a tensor outside of modules"

_GAINED_HISTORY = (
    "a checkpointed region wrote to {name}, {shape}, a value that requires grad. Backward through "
    "that tensor would run the region again from the tensor's earlier value, which cannot be "
    "restored. Write a detached value (buffer.copy_(x.detach())), or return the value from the "
    "region."
)

_NOT_COPIED = (
    "a checkpointed region changed {name}, {shape}, which it had left alone in earlier calls. "
    "It is large and was not copied, so the region cannot be recomputed. From the next call on it "
    "will be copied. To avoid the error, change it outside of the region."
)

_RESIZED = (
    "a checkpointed region changed the shape of {name} from {before} to {now}, which cannot be "
    "undone for its recomputation. Give it its shape before the region runs, or assign a new "
    "tensor instead of resizing this one."
)


# --- tensors that a region only reads -------------------------------------------------------------

#: By address: a tensor that was changed, and how.
Changes = dict[int, tuple[_Tensor, str]]


class Guards:
    """The versions of the tensors that one region can read, and should leave alone."""

    __slots__ = ("_released", "_tensors", "_versions")

    def __init__(self, tensors: list[_Tensor]) -> None:
        #: Those that are not held, each with its version.
        self._released: list[tuple[ref[_Tensor], int]] = []
        self._tensors: list[_Tensor] = []
        self._versions: list[int] = []
        self.add(tensors)

    def add(self, tensors: list[_Tensor]) -> None:
        try:
            versions = [tensor._version for tensor in tensors]
        except RuntimeError:  # inference tensors have no version, and do not change
            self.add([tensor for tensor in tensors if not tensor.is_inference()])
        else:
            self._tensors += tensors
            self._versions += versions

    def release(self, numbers: Collection[int]) -> None:
        """Hold those of ``id`` in ``numbers`` no longer; others may hold them for the rerun."""
        if not numbers:
            return
        pairs = [*zip(self._tensors, self._versions, strict=True)]
        self._released += [(ref(tensor), v) for tensor, v in pairs if id(tensor) in numbers]
        left = [pair for pair in pairs if id(pair[0]) not in numbers]
        self._tensors = [tensor for tensor, _ in left]
        self._versions = [version for _, version in left]

    def changes(self) -> Changes | None:
        """The tensors that were changed in place since; None, almost always."""
        same = [tensor._version for tensor in self._tensors] == self._versions
        if same and not self._released:
            return None
        released = [(each(), version) for each, version in self._released]
        changes = {
            id(tensor): (tensor, f"is at version {tensor._version}; expected version {version}")
            for tensor, version in (*zip(self._tensors, self._versions, strict=True), *released)
            if tensor is not None and tensor._version != version
        }
        return changes or None


class UseOfChanged(DispatchMode):
    """Runs around a rerun and raises if that uses a tensor that has changed."""

    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self._changes = changes
        #: Kept, since the function may swallow it.
        self.error: InputChanged | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if id(tensor) in self._changes:
                    changed, difference = self._changes[id(tensor)]
                    self.error = used_tensor_changed(changed, func, difference)
                    raise self.error
        return op_info(func).call(*args, **(kwargs or {}))
