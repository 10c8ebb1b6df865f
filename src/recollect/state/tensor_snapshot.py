"""Restores tensors that a step may change: their memory byte by byte, and their autograd state.

Storages that an optimizer or a hook may write to are copied to the host before the step. Others,
and those that the search has missed, are copied before the first op that writes to them
(`WriteLog`). A storage that was never copied has a fingerprint, which detects a write that no op
made, or that came after the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch

from recollect._torch.autograd import set_version, view_base
from recollect._torch.dtensors import local_tensor
from recollect._torch.modes import DispatchMode, no_function_modes, unobserved
from recollect._torch.tensors import (
    finds_shapes,
    inner_tensors,
    key_of_storage,
    memory_key,
    storage_key,
    tensor_hooks,
    write_tensor_hooks,
)
from recollect.checks.fingerprint import fingerprint
from recollect.policy.op_info import op_info, tensors_in

_Tensor = torch.Tensor


class _StorageState:
    """What one storage holds: a copy of it on the host, or its fingerprint."""

    fingerprint: _Tensor

    def __init__(self, storage: Any) -> None:
        self.storage = ref(storage)  # weakly: the step may have made it
        self.nbytes: int = storage.nbytes()
        self.copy: _Tensor | None = None

    def save(self) -> None:
        storage = self.storage()
        if self.copy is None and storage is not None:
            with unobserved():
                self.copy = _bytes(storage).to("cpu", copy=True)

    def note(self) -> None:
        storage = self.storage()
        if self.copy is None and storage is not None:
            self.fingerprint = fingerprint(_bytes(storage))

    def restore(self) -> bool:
        """Put the bytes back. False if they have changed and there is no copy."""
        storage = self.storage()
        if storage is None:
            return True
        if self.copy is None:
            has_size = storage.nbytes() == self.nbytes
            return has_size and torch.equal(fingerprint(_bytes(storage)), self.fingerprint)
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)
        now = _bytes(storage)
        # On a device, comparing costs as much as copying. On the host it spares read-only memory.
        if now.device.type != "cpu" or not torch.equal(now, self.copy):
            now.copy_(self.copy)
        return True


def _bytes(storage: Any) -> _Tensor:
    """All of a storage, as bytes, with a version of its own."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _TensorState:
    """A tensor as it was: the memory that it shows, and what autograd knows of it."""

    def __init__(self, tensor: _Tensor, storages: set[int]) -> None:
        self.tensor = tensor
        #: The keys of the storages that hold its data.
        self.storages = storages
        self.version = _version_of(tensor)
        self.is_leaf = tensor.is_leaf
        self.required_grad = tensor.requires_grad
        self.gradient = tensor.grad if tensor.is_leaf else None
        self.hooks = tensor_hooks(tensor)
        self.alias = None if storage_key(tensor) is None else tensor.detach()

    def restore(self) -> bool:
        """Restore the tensor. False if that is impossible."""
        tensor = self.tensor
        if self.alias is not None and _layout_of(tensor) != _layout_of(self.alias):
            tensor.data = self.alias
        write_tensor_hooks(tensor, self.hooks)
        if tensor.is_leaf != self.is_leaf:
            if tensor.is_leaf or view_base(tensor) is not None:  # no way back to a history, or out
                return False
            tensor.detach_()
        if self.is_leaf:
            if tensor.requires_grad != self.required_grad:
                tensor.requires_grad_(self.required_grad)
            if tensor.grad is not self.gradient:
                tensor.grad = self.gradient
        # A graph that was there before can still go backward.
        if self.version is not None and tensor._version != self.version:
            set_version(tensor, self.version)
        return True


def _layout_of(tensor: _Tensor) -> tuple[Any, ...]:
    offset = tensor.storage_offset()
    return storage_key(tensor), tensor.dtype, tensor.shape, tensor.stride(), offset


#: A storage that a step wrote to, and a tensor by which it did.
Written = tuple[ref[Any], ref[_Tensor]]


class TensorSnapshot:
    """Tensors, and the storages behind them."""

    def __init__(self) -> None:
        self._tensors: list[_TensorState] = []
        self._storages: dict[int, _StorageState] = {}
        #: What ops were seen to write to, by the keys of storages, and the versions before.
        self._written: dict[int, tuple[Written, int | None]] = {}

    def add(self, tensor: _Tensor) -> None:
        """Note what ``tensor`` is and which storages it has."""
        with unobserved():
            storages = _storages_of(tensor)
            self._tensors.append(_TensorState(tensor, {key for key, _ in storages}))
            for key, storage in storages:
                self._storages.setdefault(key, _StorageState(storage))

    def copy(self, at_first_write: set[int | None]) -> None:
        """Copy all storages, except those that are copied at the first write to them, by key."""
        with unobserved():
            for key, state in self._storages.items():
                if key in at_first_write:
                    state.note()
                else:
                    state.save()

    def copy_written(self, written: Iterable[Written]) -> None:
        """Copy the storages that were written to at another time."""
        for reference, by in written:
            storage, tensor = reference(), by()
            if storage is not None:
                key = key_of_storage(storage)
                self._storages.setdefault(key, _StorageState(storage)).save()
                if tensor is not None:
                    self._written[key] = (reference, by), _version_of(tensor)

    def save_before_write(self, tensor: _Tensor, made: dict[int, Any]) -> None:
        """Copy ``tensor`` before an op writes to it, unless the step made it (``made``)."""
        for key, storage in _storages_of(tensor):
            state = self._storages.get(key)
            if state is None or state.storage() is None:  # another one has its place
                if key in made:
                    continue
                state = self._storages[key] = _StorageState(storage)
            state.save()
            if key not in self._written:
                self._written[key] = (state.storage, ref(tensor)), _version_of(tensor)

    @property
    def written(self) -> list[Written]:
        return [each for each, _ in self._written.values()]

    def restore(self) -> Iterator[_Tensor]:
        """Put everything back. Yields the tensors for which that cannot be done."""
        with unobserved():
            lost = {key for key, state in self._storages.items() if not state.restore()}
            for (_, by), version in self._written.values():
                if version is not None and (tensor := by()) is not None:
                    set_version(tensor, version)
            for known in self._tensors:
                if not known.restore() or not lost.isdisjoint(known.storages):
                    yield known.tensor


def _version_of(tensor: _Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _storages_of(tensor: _Tensor) -> list[tuple[int, Any]]:
    """The storages that hold the data of ``tensor``, each with its key."""
    is_wrapper = hasattr(tensor, "__tensor_flatten__")  # its memory is that of others
    key = None if is_wrapper else memory_key(tensor)
    if key is not None:
        storage = tensor.untyped_storage()
        return [(key, storage)] if storage.device.type != "meta" else []
    inner = inner_tensors(tensor) or []
    return [found for each in inner if each is not tensor for found in _storages_of(each)]


class WriteLog(DispatchMode):
    """Copies what ops write to before they do, if it was there before the step."""

    only_watches = True

    def __init__(self, snapshot: TensorSnapshot) -> None:
        super().__init__()
        self._snapshot = snapshot
        #: What ops have made since, by the keys of storages.
        self._made: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if finds_shapes():
            return func(*args, **kwargs)
        with no_function_modes():
            info = op_info(func)
            for tensor in info.written(args, kwargs):
                self._snapshot.save_before_write(tensor, self._made)
            out = info.call(*args, **kwargs)
            given = {memory_key(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
            for tensor in tensors_in(out):
                key = memory_key(tensor)
                if key is not None and key not in given and key not in self._made:
                    storage = local_tensor(tensor).untyped_storage()
                    self._made[key] = ref(storage, self._forget(key))
        return out

    def _forget(self, key: int) -> Any:
        return lambda _: self._made.pop(key, None)
