"""Reads a batch: the arguments of the model, its tensors, and its signature (P8)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from recollect._torch.pytree import tree_map_only

_Tensor = torch.Tensor
#: How deep, and in how many objects, a batch is searched for tensors.
_DEPTH = 6
_OBJECTS = 1000

#: Objects that are not searched.
_LEAVES = (
    *(str, bytes, bytearray, int, float, complex, type(None), type, range, slice),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module),
    *(torch.dtype, torch.device, torch.Generator, torch.layout, torch.memory_format),
)


def split_batch(batch: Any, model: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``model`` that ``batch`` stands for."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return batch, {}
    return ((), dict(batch)) if _is_keywords(batch, model) else ((batch,), {})


def _is_keywords(batch: Any, model: Any) -> bool:
    """Whether a batch is the keyword arguments of a model, and not its only argument."""
    if type(batch) is dict or not isinstance(batch, Mapping):
        return type(batch) is dict
    if not all(isinstance(name, str) and name.isidentifier() for name in batch):
        return False
    return isinstance(batch, dict) or _takes_any(getattr(model, "forward", None), batch)


def _takes_any(forward: Any, names: Iterable[str]) -> bool:
    """Whether ``forward`` has a parameter of one of these names, as far as can be told."""
    try:
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError):  # it has no signature
        return True
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_all or any(name in parameters for name in names)


def check_batch(batch: Any, model: Any) -> None:
    """Refuse loaders and iterators, which give a batch only once."""
    if isinstance(batch, DataLoader):
        raise TypeError("batch is a DataLoader: pass what it gives, batch=next(iter(loader))")
    args, kwargs = split_batch(batch, model)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Iterator):
            what = "batch is" if value is batch else "batch has"
            raise TypeError(
                f"{what} an iterator ({type(value).__name__}), which can be read once, and a plan "
                "runs the step several times: pass what it gives, such as batch=next(iterator)"
            )


def signature_of_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Names, shapes and types: batches that take different memory differ in them.

    Tensors of one number, such as a count of tokens, are left out.
    """
    return tuple(_BatchReader(args, kwargs).signature)


def tensors_of_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Tensor]:
    """The tensors in a batch, in the order of its signature."""
    return _BatchReader(args, kwargs).tensors


def cut_off(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A batch without the graph that led to it.

    The step runs several times: its backward would free that graph, or go through it each time and
    add to gradients of what is beyond. Objects that hold tensors are as they were.
    """
    if all(each.is_leaf for each in tensors_of_batch(args, kwargs)):
        return args, kwargs
    cut: tuple[Any, dict[str, Any]] = tree_map_only(_Tensor, _without_graph, (args, kwargs))
    return cut


def _without_graph(tensor: _Tensor) -> _Tensor:
    if tensor.is_leaf:
        return tensor
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    with torch.inference_mode(False), torch.enable_grad():
        cut: _Tensor = _Origin.apply(anchor, [tensor])  # type: ignore[no-untyped-call]
    return cut


class _Origin(torch.autograd.Function):
    """Where a tensor has its history from, which ends here. It is no leaf, and no view."""

    @staticmethod
    def forward(ctx: Any, anchor: _Tensor, holder: list[_Tensor]) -> _Tensor:
        return holder[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def is_alike(signature: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two batches differ at most in the sizes of their tensors."""
    return describe_difference(signature, other) is None


def is_smaller(signature: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a batch, which `is_alike`, has no tensor that is larger in any dimension."""
    pairs = zip(signature, other, strict=True)
    shapes = [(mine[0], theirs[0]) for mine, theirs in pairs if isinstance(mine, tuple)]
    return all(a <= b for mine, theirs in shapes for a, b in zip(mine, theirs, strict=True))


def dimensions_of(signature: tuple[Any, ...]) -> tuple[int, ...]:
    """The dimensions of all tensors of a batch."""
    return tuple(n for each in signature if isinstance(each, tuple) for n in each[0])


def outline_of(signature: tuple[Any, ...]) -> tuple[Any, ...]:
    """The signature of a batch without its dimensions: batches that `is_alike` have the same."""
    return tuple((len(e[0]), *e[1:]) if isinstance(e, tuple) else e for e in signature)


def describe_difference(signature: tuple[Any, ...], other: tuple[Any, ...]) -> str | None:
    """Describe the first difference between two batches that are not alike; None if they are."""
    for mine, theirs in zip_longest(signature, other, fillvalue="nothing more"):
        if isinstance(mine, tuple) and isinstance(theirs, tuple):
            is_same = len(mine[0]) == len(theirs[0]) and mine[1:] == theirs[1:]
        else:
            is_same = mine == theirs
        if not is_same:
            return f"there is {_in_words(mine)}, and was {_in_words(theirs)}"
    return None


def _in_words(entry: Any) -> str:
    if isinstance(entry, tuple):
        return " that ".join((f"a tensor {list(entry[0])} of {entry[1]}", *entry[2:]))
    return f"a collection of {entry}" if isinstance(entry, int) else str(entry)


class _BatchReader:
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.signature: list[Any] = []
        self.tensors: list[_Tensor] = []
        #: The objects that were visited: they may refer to each other.
        self._objects: dict[int, Any] = {}
        for value in args:
            self._visit(value, _DEPTH)
        for name in sorted(kwargs):
            self._visit_named(name, kwargs[name], _DEPTH)

    def _visit_named(self, name: str, value: Any, depth: int) -> None:
        if not _is_scalar(value):
            self.signature.append(name)
            self._visit(value, depth)

    def _visit(self, value: Any, depth: int, *, in_object: bool = False) -> None:
        """Add a tensor by its shape and dtype, other values by their type or as they are.

        ``in_object``: only tensors are added, since the other attributes of an object may change.
        """
        signature: list[Any] = [] if in_object else self.signature
        if isinstance(value, _Tensor):
            if _is_scalar(value):
                return
            # The gradient of an input takes memory too.
            grad = ("requires grad",) if value.requires_grad else ()
            self.signature.append((tuple(value.shape), str(value.dtype), *grad))
            self.tensors.append(value)
        elif isinstance(value, (str, bool, type(None))):
            signature.append(repr(value))
        elif isinstance(value, _LEAVES) or not depth:
            # A number may differ in every step, as the count of steps does.
            is_number = isinstance(value, (int, float, complex))
            signature.append("a number" if is_number else type(value).__name__)
        elif isinstance(value, (list, tuple, set, frozenset)):
            signature.append(len(value))
            for each in value:
                self._visit(each, depth - 1, in_object=in_object)
        elif isinstance(value, Mapping):
            for name in value:
                if in_object:
                    self._visit(value[name], depth - 1, in_object=True)
                else:
                    self._visit_named(str(name), value[name], depth - 1)
        else:
            signature.append(type(value).__name__)
            self._visit_object(value, depth)

    def _visit_object(self, value: Any, depth: int) -> None:
        if id(value) in self._objects or len(self._objects) >= _OBJECTS:
            return
        self._objects[id(value)] = value
        for name, each in _attributes(value):
            if isinstance(each, _Tensor):
                self._visit_named(name, each, depth)
            else:
                self._visit(each, depth - 1, in_object=True)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _Tensor) and value.dim() == 0


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    """The fields of a dataclass; the attributes and slots of another object."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    slots: list[str] = []
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        slots += (names,) if isinstance(names, str) else names
    named = [name for name in slots if name not in ("__dict__", "__weakref__")]
    stored = getattr(value, "__dict__", {}).items()
    return [*stored, *((name, getattr(value, name)) for name in named if hasattr(value, name))]
