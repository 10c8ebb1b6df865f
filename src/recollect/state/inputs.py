"""The arguments of a region, held until its rerun and guarded against change.

A tensor is held with the version it had at the call. Inside another checkpointed region, or under
any other saved-tensor hooks, it is saved through those hooks, as an op would save it: the outer
region frees and recomputes it, and a hook that offloads saved tensors offloads this one too. With
``offload_inputs`` it goes to a store.

Lists, dicts and objects are restored (`contents`): a rerun must find a growing list or a counter as
it was, and its own changes must not show, since forward has made them already. Almost always there
are none, and arguments cost no more than a check of the type of each.

    at the call         ``Inputs(args, kwargs)``, which refuses iterators
    after forward       ``settle()``
    in backward         ``recall()``; the rerun inside of ``swapped()``

Contents are held while the graph of the region lives. As with torch, an object that comes to hold a
result of the region holds itself until backward frees the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import torch

from recollect._torch.autograd import active_saved_tensor_hooks, save_tensor
from recollect.checks.changed_input import argument_changed
from recollect.errors import InputChanged
from recollect.state.contents import Contents, swapped_contents
from recollect.state.restorers import ATOMS
from recollect.state.tensors import are_statistics
from recollect.store.offload_batch import OffloadBatch, OffloadedTensor

_Tensor = torch.Tensor


def check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse iterators among the arguments of a step that runs more than once."""
    iterator = Contents([*args, *kwargs.values()]).iterator
    if iterator is not None:
        raise TypeError(
            f"an argument is an iterator ({type(iterator).__name__}), which the first run would "
            "use up, and there are several. Pass a list of its items, `list(...)`"
        )


def inference_fault(error: RuntimeError, tensors: Iterable[torch.Tensor]) -> str | None:
    """What is wrong with ``tensors`` if ``error`` is torch's for one of inference mode."""
    is_meant = "nference tensor" in str(error)
    if not is_meant or not any(tensor.is_inference() for tensor in tensors):
        return None
    return (
        "a tensor of it was made under torch.inference_mode, and autograd cannot save it. Make it "
        f"outside, or pass a copy that is made there: .clone() ({error})"
    )


class _Saved:
    """In place of a tensor that was saved through hooks or put into a store."""

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


def _offload(offload_batch: OffloadBatch, value: Any) -> Any:
    # A tensor that needs no gradient is often shared by all regions (a mask); a leaf lives anyway.
    if isinstance(value, _Tensor) and value.requires_grad and not value.is_leaf:
        return _Saved(value, partial(_fetch, offload_batch.put(value.detach())))
    return value


def _fetch(offloaded: OffloadedTensor) -> _Tensor:
    leaf = offloaded.get().detach().requires_grad_()
    with torch.enable_grad():
        return leaf.view_as(leaf)  # no leaf, as in forward: autocast tells them apart


def _save(value: Any) -> Any:
    if not isinstance(value, _Tensor):
        return value
    try:
        return _Saved(value, save_tensor(value))
    except RuntimeError:
        # A view whose base was changed such that it cannot be used any more. Passing it is no
        # error as long as the region does not use it.
        return value


_ATOMS = ATOMS | {_Saved}
_FUNCTIONS = (FunctionType, MethodType, partial)


class Inputs:
    """Arguments of one call.

    Without ``guard``, changed tensors are used as they are. With an ``offload_batch``, activations
    are put there, unless other saved-tensor hooks take them.
    """

    __slots__ = (
        *("_args", "_contents", "_guard", "_guards", "_kwargs", "_refusal", "_saved", "_versions"),
        "copied",
    )

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        guard: bool = True,
        offload_batch: OffloadBatch | None = None,
    ) -> None:
        #: What to raise in backward, if the region itself has changed one.
        self._refusal: str | None = None
        self._guard = guard
        save = None if active_saved_tensor_hooks() is None else _save
        if save is None and offload_batch is not None:
            save = partial(_offload, offload_batch)
        #: Whether some are not held here, but saved.
        self._saved = save is not None
        if save is not None:
            args = tuple([save(value) for value in args])
            kwargs = {name: save(value) for name, value in kwargs.items()}
        self._args = args
        self._kwargs = kwargs
        self._guards: list[tuple[_Tensor, int]] = []
        #: Tensors that the region may write to: `RegionState` copies them. And their versions.
        self.copied: Sequence[_Tensor] = ()
        self._versions: Sequence[int] = ()
        self._contents: Contents | None = None
        others = _add_guards([*args, *kwargs.values()] if kwargs else [*args], self._guards)
        if others:
            self._take_contents(others)

    def _take_contents(self, values: list[Any]) -> None:
        contents = self._contents = Contents(values)
        if contents.iterator is not None:
            raise TypeError(
                f"{self._name(contents.iterator)} of a checkpointed region is an iterator "
                f"({type(contents.iterator).__name__}), which can be read only once: "
                "backward recomputes the region and would find it used up. Pass a list of its "
                "items, `list(...)`, or make the iterator inside the function."
            )
        self._guards += [(tensor, tensor._version) for tensor in contents.tensors]
        self.copied = contents.copied
        self._versions = [tensor._version for tensor in contents.copied]

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they are held, for error messages."""
        return self._args, self._kwargs

    def reachable(self) -> list[Any]:
        """The modules, generators and functions among the arguments."""
        found = [] if self._contents is None else self._contents.captured_elsewhere
        values = (*self._args, *self._kwargs.values()) if self._kwargs else self._args
        if len(values) == 1 and type(values[0]) is _Tensor:  # as most calls have it
            return found
        functions = [value for value in values if isinstance(value, _FUNCTIONS)]
        return found + functions if functions else found

    def settle(self) -> None:
        """Note what the region itself changed in place.

        If it changed a tensor, backward raises. All arguments are released, since the history of
        the tensor may run through the region. A copied tensor is restored for a rerun, unless it
        has gained a history.
        """
        for tensor, version in zip(self.copied, self._versions, strict=True):
            if tensor.requires_grad:
                self._refuse(tensor, version)
                return
            if tensor._version == version:
                self._guards.append((tensor, version))
        if not self._guard:
            return
        for tensor, version in self._with_saved() if self._saved else self._guards:
            if tensor._version != version:
                self._refuse(tensor, version)
                return

    def _with_saved(self) -> list[tuple[_Tensor, int]]:
        """The guarded tensors, and those that were saved and have changed."""
        saved = [v for v in (*self._args, *self._kwargs.values()) if type(v) is _Saved]
        return self._guards + [found for found in (s.changed() for s in saved) if found is not None]

    def _refuse(self, tensor: _Tensor, version: int) -> None:
        self._refusal = str(self._changed(tensor, version, "inside the region"))
        self._args, self._kwargs, self._guards, self._contents = (), {}, [], None
        self.copied, self._versions = (), ()

    def recall(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, or ``InputChanged``."""
        if self._refusal is not None:
            raise InputChanged(self._refusal)
        if self._guard:
            for tensor, version in self._with_saved() if self._saved else self._guards:
                if tensor._version != version:
                    raise self._changed(tensor, version, "after the region ran")
        if not self._saved:
            return self._args, self._kwargs
        args = tuple(a.unpack() if type(a) is _Saved else a for a in self._args)
        kwargs = {k: v.unpack() if type(v) is _Saved else v for k, v in self._kwargs.items()}
        return args, kwargs

    def swapped(self) -> AbstractContextManager[None] | None:
        """A context in which containers and objects have the contents of the call.

        Enter it after ``recall``, which may have to rerun another region. None: there are none.
        """
        if self._contents is None or not self._contents.mutable:
            return None
        return swapped_contents(self._contents.mutable, self._name if self._guard else None)

    def has(self, tensor: _Tensor) -> bool:
        return any(tensor is each for each, _ in self._guards) or any(
            tensor is each for each in self.copied
        )

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
            if type(value) is tuple:
                pending += [(f"{name}[{n}]", item) for n, item in enumerate(value)]
            elif self._contents is not None:
                parts = self._contents.parts(value)
                pending += [(name + suffix, part) for suffix, part in parts]
        return "an argument"


def _add_guards(values: list[Any], guards: list[tuple[_Tensor, int]]) -> list[Any]:
    """Guard the tensors among ``values``. Returns the values that may have contents."""
    others = []
    for value in values:  # which grows meanwhile
        cls = type(value)
        if cls is _Tensor or (cls not in _ATOMS and isinstance(value, _Tensor)):
            if value.is_inference():  # those have no version, and cannot be changed in place
                continue
            if not value.requires_grad and are_statistics(value):
                others.append(value)
            else:
                guards.append((value, value._version))
        elif cls is tuple:
            values += value
        elif cls not in _ATOMS:
            others.append(value)
    return others
