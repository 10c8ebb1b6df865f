"""The batch: the arguments of the model, and the signature that tells batches apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

__all__ = [
    "check_batch",
    "is_alike",
    "is_smaller",
    "signature_of_batch",
    "split_batch",
    "tensors_of_batch",
    "told_apart",
]

_Tensor = torch.Tensor
#: How deep, and in how many objects of other classes, tensors are searched in a batch.
_DEPTH = 6
_OBJECTS = 1000

#: What has no tensors of a batch in it.
_BARE = (
    *(str, bytes, bytearray, int, float, complex, type(None), type, range, slice),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module),
    *(torch.dtype, torch.device, torch.Generator, torch.layout, torch.memory_format),
)


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that ``batch`` stands for."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return batch, {}
    if type(batch) is dict or (isinstance(batch, dict) and all(map(str.isidentifier, batch))):
        return (), dict(batch)
    return (batch,), {}


def check_batch(batch: Any) -> None:
    """Refuse what gives batches one after the other."""
    if isinstance(batch, DataLoader):
        raise TypeError("batch is a DataLoader: pass what it gives, batch=next(iter(loader))")
    args, kwargs = split_batch(batch)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Iterator):
            what = "batch is" if value is batch else "batch has"
            raise TypeError(
                f"{what} an iterator ({type(value).__name__}), which can be read once, and a plan "
                "runs the step several times: pass what it gives, such as batch=next(iterator)"
            )


def signature_of_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Names, shapes and types: batches that take different memory differ in them."""
    found: list[Any] = []
    walk = _Walk(found)
    for value in args:
        walk.see(value, _DEPTH)
    for name in sorted(kwargs):
        found.append(name)
        walk.see(kwargs[name], _DEPTH)
    return tuple(found)


def tensors_of_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Tensor]:
    """The tensors in a batch, in the order of its signature."""
    walk = _Walk([])
    for value in (*args, *(kwargs[name] for name in sorted(kwargs))):
        walk.see(value, _DEPTH)
    return walk.tensors


def is_alike(signature: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a batch is like another, but for how long its tensors are."""
    return len(signature) == len(other) and all(map(_is_alike, signature, other))


def is_smaller(signature: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a batch that `is_alike` has no tensor that is longer in any direction."""
    pairs = zip(signature, other, strict=True)
    shapes = [(mine[0], theirs[0]) for mine, theirs in pairs if isinstance(mine, tuple)]
    return all(a <= b for mine, theirs in shapes for a, b in zip(mine, theirs, strict=True))


def _is_alike(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return len(mine[0]) == len(theirs[0]) and bool(mine[1] == theirs[1])
    return bool(mine == theirs)


def told_apart(signature: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """The first difference between batches that are not alike."""
    for mine, theirs in zip_longest(signature, other, fillvalue="nothing more"):
        if not _is_alike(mine, theirs):
            return f"there is {_in_words(mine)}, and was {_in_words(theirs)}"
    return "it is another one"


def _in_words(entry: Any) -> str:
    if isinstance(entry, tuple):
        return f"a tensor {list(entry[0])} of {entry[1]}"
    return f"a collection of {entry}" if isinstance(entry, int) else str(entry)


class _Walk:
    """Goes through the values of a batch, and notes what it finds."""

    def __init__(self, found: list[Any]) -> None:
        self._found = found
        self.tensors: list[_Tensor] = []
        #: The objects of other classes that were visited: they may refer to each other.
        self._objects: dict[int, Any] = {}

    def see(self, value: Any, depth: int, *, is_inside: bool = False) -> None:
        """Note a value: a tensor by its shape and dtype, others by their type or as they are.

        ``is_inside``: of an object of some class only tensors are noted: the rest may change.
        """
        found: list[Any] = [] if is_inside else self._found
        if isinstance(value, _Tensor):
            self._found.append((tuple(value.shape), str(value.dtype)))
            self.tensors.append(value)
        elif isinstance(value, (str, bool, type(None))):
            found.append(repr(value))
        elif isinstance(value, _BARE) or not depth:
            # A number may be another one in every step, such as that of the step.
            found.append(type(value).__name__)
        elif isinstance(value, (list, tuple, set, frozenset)):
            found.append(len(value))
            for each in value:
                self.see(each, depth - 1, is_inside=is_inside)
        elif isinstance(value, Mapping):
            for name in value:
                found.append(str(name))
                self.see(value[name], depth - 1, is_inside=is_inside)
        else:
            found.append(type(value).__name__)
            self._see_inside(value, depth)

    def _see_inside(self, value: Any, depth: int) -> None:
        """Note the tensors in an object: a dataclass, or one of any class."""
        if id(value) in self._objects or len(self._objects) >= _OBJECTS:
            return
        self._objects[id(value)] = value
        for name, each in _attributes(value):
            if isinstance(each, _Tensor):
                self._found.append(name)
                self.see(each, depth)
            else:
                self.see(each, depth - 1, is_inside=True)


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    """The attributes of an object that are stored in it."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    slots = [
        name
        for kind in type(value).__mro__
        for name in _names(vars(kind).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]
    stored = list(getattr(value, "__dict__", {}).items())
    return [*stored, *((name, getattr(value, name)) for name in slots)]


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
