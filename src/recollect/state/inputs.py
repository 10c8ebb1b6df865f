"""The arguments of a region, held until its rerun and guarded against change.

A tensor is held with the version it had at the call. Inside another checkpointed region (or under
any other saved-tensor hooks) it is saved through those hooks instead, as an op would save it: the
outer region then frees and recomputes it, and a hook that moves saved tensors to the host moves
this one too. Or it goes to a store, if the user wants that.

Lists, dicts and objects are put back to what they held at the call: see `argument_snapshot`. Almost
always there are none, and arguments cost no more than a check of the type of each.

    at the call         ``Inputs(args, kwargs)``, which refuses iterators
    after forward       ``settle()``
    in backward         ``recall()``; ``swapped = swap()``; the rerun; ``swapped.put_back()``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import torch

from recollect._torch.autograd import save_tensor, saved_tensor_hooks_active
from recollect.checks.changed_input import argument_changed
from recollect.errors import InputChanged
from recollect.state.argument_snapshot import ArgumentSnapshot, Swapped
from recollect.state.restorers import ATOMS
from recollect.state.tensors import are_statistics
from recollect.store.offload_batch import OffloadBatch, OffloadedTensor

__all__ = ["Inputs"]

_Tensor = torch.Tensor


class _Saved:
    """Replaces a tensor that was saved through hooks, or put into a store, and is not held here."""

    __slots__ = ("_version", "tensor", "unpack")

    def __init__(self, tensor: _Tensor, unpack: Callable[[], _Tensor]) -> None:
        self.unpack = unpack
        self.tensor = ref(tensor)
        self._version = -1 if tensor.is_inference() else tensor._version

    def changed(self) -> tuple[_Tensor, int] | None:
        """The tensor, if it is alive and was changed in place, and the version it had."""
        tensor = self.tensor()
        if tensor is None or self._version < 0 or tensor._version == self._version:
            return None
        return tensor, self._version


def _stow(value: Any, offload_batch: OffloadBatch) -> Any:
    # A tensor that needs no gradient is often shared by all regions (a mask); a leaf lives anyway.
    if isinstance(value, _Tensor) and value.requires_grad and not value.is_leaf:
        return _Saved(value, partial(_fetch, offload_batch.put(value.detach())))
    return value


def _fetch(parcel: OffloadedTensor) -> _Tensor:
    leaf = parcel.get().detach().requires_grad_()
    with torch.enable_grad():
        return leaf.view_as(leaf)  # no leaf, as in forward: autocast tells them apart


def _save(value: Any) -> Any:
    if not isinstance(value, _Tensor):
        return value
    try:
        return _Saved(value, save_tensor(value).unpack)
    except RuntimeError:
        # A view whose base was changed such that it cannot be used any more. To pass it is no
        # fault, as long as nobody does.
        return value


_ATOMS = ATOMS | {_Saved}
_FUNCTIONS = (FunctionType, MethodType, partial)


class Inputs:
    """Arguments of one call.

    Without ``guard``, tensors that have changed are taken as they are. With a ``offload_batch``,
    activations among them are put there, unless somebody else's hooks take them.
    """

    __slots__ = ("_args", "_contents", "_guard", "_guards", "_kwargs", "_saved", "_spoilt")

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        guard: bool = True,
        offload_batch: OffloadBatch | None = None,
    ) -> None:
        self._spoilt: str | None = None
        self._guard = guard
        self._saved = saved_tensor_hooks_active()
        if self._saved:
            args = tuple([_save(value) for value in args])
            kwargs = {name: _save(value) for name, value in kwargs.items()}
        elif offload_batch is not None:
            self._saved = True
            args = tuple([_stow(value, offload_batch) for value in args])
            kwargs = {name: _stow(value, offload_batch) for name, value in kwargs.items()}
        self._args = args
        self._kwargs = kwargs
        self._guards: list[tuple[_Tensor, int]] = []
        self._contents: ArgumentSnapshot | None = None
        others = _sort_out([*args, *kwargs.values()] if kwargs else [*args], self._guards)
        if others:
            self._take_contents(others)

    def _take_contents(self, values: list[Any]) -> None:
        contents = self._contents = ArgumentSnapshot()
        iterator = contents.add(values)
        if iterator is not None:
            raise TypeError(
                f"{self._name(iterator)} of a checkpointed region is an iterator "
                f"({type(iterator).__name__}), which can be gone through only once: backward "
                "recomputes the region and would find it used up. Pass a list of its items, "
                "`list(...)`, or make the iterator inside the function."
            )
        self._guards += [(tensor, tensor._version) for tensor in contents.tensors]

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they are held, for error messages."""
        return self._args, self._kwargs

    def reachable(self) -> list[Any]:
        """The modules, generators and functions among the arguments."""
        found = [] if self._contents is None else self._contents.captured_elsewhere
        values = (*self._args, *self._kwargs.values()) if self._kwargs else self._args
        functions = [value for value in values if isinstance(value, _FUNCTIONS)]
        return found + functions if functions else found

    def settle(self) -> None:
        """Note what the region itself changed in place.

        If it changed a tensor, backward raises. All arguments are released then, since the history
        of that tensor may run through the region, which would hold itself. A small tensor in a
        container or an object is put back for a rerun, as these are.
        """
        if self._contents is not None:
            gained = self._contents.settle()
            if gained is not None:
                self._give_up(gained, 0)
                return
        if not self._guard:
            return
        for tensor, version in self._all_guards():
            if tensor._version != version:
                self._give_up(tensor, version)
                return

    def _all_guards(self) -> list[tuple[_Tensor, int]]:
        if not self._saved:
            return self._guards
        saved = [v for v in (*self._args, *self._kwargs.values()) if type(v) is _Saved]
        return self._guards + [found for found in (s.changed() for s in saved) if found is not None]

    def _give_up(self, tensor: _Tensor, version: int) -> None:
        self._spoilt = str(self._changed(tensor, version, "inside the region"))
        self._args, self._kwargs, self._guards, self._contents = (), {}, [], None

    def recall(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, or ``InputChanged``."""
        if self._spoilt is not None:
            raise InputChanged(self._spoilt)
        if self._guard:
            for tensor, version in self._all_guards():
                if tensor._version != version:
                    raise self._changed(tensor, version, "after the region ran")
        if not self._saved:
            return self._args, self._kwargs
        args = tuple(a.unpack() if type(a) is _Saved else a for a in self._args)
        kwargs = {k: v.unpack() if type(v) is _Saved else v for k, v in self._kwargs.items()}
        return args, kwargs

    def swap(self) -> Swapped | None:
        """Put containers and objects back to the call, until ``put_back`` of the result.

        After ``recall``, which may have to rerun another region first. None: there is no need.
        """
        contents = self._contents
        return None if contents is None else contents.swap(self._name, guard=self._guard)

    def has(self, tensor: _Tensor) -> bool:
        """Whether ``tensor`` is one of the arguments."""
        if any(tensor is guarded for guarded, _ in self._guards):
            return True
        return self._contents is not None and id(tensor) in self._contents.entries

    def _changed(self, tensor: _Tensor, version: int, when: str) -> InputChanged:
        return argument_changed(self._name(tensor), tensor, version, when)

    def _name(self, target: Any) -> str:
        """Where ``target`` was among the arguments, such as ``kwargs['cache'].keys[0]``."""
        pending = [(f"args[{n}]", value) for n, value in enumerate(self._args)]
        pending += [(f"kwargs[{key!r}]", value) for key, value in self._kwargs.items()]
        seen: set[int] = set()
        for name, value in pending:  # which grows meanwhile
            if value is target or (type(value) is _Saved and value.tensor() is target):
                return name
            if id(value) in seen:
                continue
            seen.add(id(value))
            pending += [(name + suffix, part) for suffix, part in self._parts(value)]
        return "an argument"

    def _parts(self, value: Any) -> Iterable[tuple[str, Any]]:
        if type(value) is tuple:
            return [(f"[{n}]", item) for n, item in enumerate(value)]
        return () if self._contents is None else self._contents.parts(value)


def _sort_out(values: list[Any], guards: list[tuple[_Tensor, int]]) -> list[Any]:
    """Guard the tensors among ``values``; returns the values whose contents have to be taken."""
    others = []
    for value in values:  # which grows meanwhile
        cls = type(value)
        if cls is _Tensor or (cls not in _ATOMS and isinstance(value, _Tensor)):
            if value.is_inference():  # those have no version, and cannot be changed in place
                continue
            if are_statistics(value):
                others.append(value)
            else:
                guards.append((value, value._version))
        elif cls is tuple:
            values += value
        elif cls not in _ATOMS:
            others.append(value)
    return others
