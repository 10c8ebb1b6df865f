"""What a function can get at beside its arguments: modules, generators, tensors.

A region's state is found by looking where a function keeps things: the module it is or is bound to,
the cells of its closure, its defaults, the arguments of a ``functools.partial``, the globals that
its code names, and from each of these one step further (a list of modules, an attribute of an
object, a function called by the function). It is looked up at every call, since any of these may be
another one then. Remembered are which names a piece of code uses, and what is below a module, until
a module anywhere gets another child, parameter or buffer.
"""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

from recollect.state.trees import BARE, OWN, STATISTICS, Tree, tree_of

__all__ = ["Reach", "Slot", "Writes"]


class Writes(Enum):
    """Whether a buffer may be written to without its version being raised."""

    SEEN = auto()
    MAYBE = auto()
    MAYBE_IN_TRAINING = auto()
    HIDDEN = auto()


#: The buffers of a module, the name of one, and how it may be written to.
Slot = tuple[dict[str, Any], str, Writes]

#: How far to go from object to object, and through how many functions.
_DEPTH = 3
_FUNCTIONS = 64

_UNINTERESTING = (
    type(None),
    bool,
    int,
    float,
    str,
    bytes,
    type,
    ModuleType,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
)


class Reach:
    """What one function can get at."""

    __slots__ = (
        "_code",
        "_seen",
        "buffers",
        "cells",
        "communicates",
        "generators",
        "modules",
        "owners",
        "parameters",
        "renormalised",
        "tensors",
    )

    def __init__(
        self, function: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]
    ) -> None:
        #: Those at which a walk began.
        self.modules: list[nn.Module] = []
        #: The dictionaries in which modules have their parameters.
        self.parameters: list[dict[str, Any]] = []
        #: These, and those with buffers.
        self.owners: list[dict[str, Any]] = []
        #: Those whose parameters a module may change in forward.
        self.renormalised: list[dict[str, Any]] = []
        self.buffers: list[Slot] = []
        #: Tensors outside of modules.
        self.tensors: list[torch.Tensor] = []
        #: Random streams that are objects: of torch, numpy and ``random``.
        self.generators: list[Any] = []
        #: The cells of closures, with what is in them.
        self.cells: list[tuple[CellType, Any]] = []
        #: Whether a module of torch's gathers statistics from other processes.
        self.communicates = False
        self._seen: set[int] = set()
        self._code = 0
        if isinstance(function, nn.Module):
            self._walk(function)
        else:
            self._look(function, _DEPTH)
        for value in args:
            if not isinstance(value, torch.Tensor):
                self._look_at_argument(value)
        if kwargs:
            for value in kwargs.values():
                if not isinstance(value, torch.Tensor):
                    self._look_at_argument(value)

    def _look_at_argument(self, value: Any) -> None:
        # The tensors among the arguments are guarded as such.
        if isinstance(value, (list, tuple)):
            for item in value:
                if not isinstance(item, torch.Tensor):
                    self._look_at_argument(item)
        elif isinstance(value, dict):
            for item in value.values():
                if not isinstance(item, torch.Tensor):
                    self._look_at_argument(item)
        elif isinstance(value, nn.Module):
            self._walk(value)
        elif isinstance(value, _generator_types()):
            self._add(self.generators, value)

    def _add(self, found: list[Any], value: Any) -> None:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            found.append(value)

    def _walk(self, module: nn.Module) -> None:
        """A module and all below it."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        self.modules.append(module)
        tree = tree_of(module)
        self.parameters += tree.parameters
        self.owners += tree.owners
        if tree.renormalised:
            self.renormalised += tree.renormalised
        if tree.with_buffers:
            self._add_buffers(tree)
        for content, forward in tree.own:
            if not _generator_types_set().isdisjoint(map(type, content.values())):
                for value in content.values():
                    if isinstance(value, _generator_types()):
                        self._add(self.generators, value)
            if type(forward) is FunctionType and (named := _globals_of(forward)):
                self._look_at_globals(named)
        if tree.attached is None:
            tree.attached = []  # for a module that leads to itself
            tree.attached = self._attached(tree)
        for reference in tree.attached:
            self._look(reference(), 1)

    @classmethod
    def _attached(cls, tree: Tree) -> list[Any]:
        """Modules and generators that attributes of modules lead to, though not registered there.

        As something to call: a module may lead to the one that holds it, and none is kept alive.
        """
        found = cls(len, (), {})
        for content, _ in tree.own:
            for name, value in content.items():
                if name not in BARE and not isinstance(value, (nn.Module, torch.Tensor)):
                    found._look(value, _DEPTH)
        modules: list[Any] = [ref(module) for module in found.modules]
        return modules + [partial(_identity, generator) for generator in found.generators]

    def _add_buffers(self, tree: Tree) -> None:
        self.communicates |= tree.communicates
        for content, kind in tree.with_buffers:
            training = content["training"]
            writes = Writes.SEEN
            if kind is OWN:
                writes = Writes.MAYBE_IN_TRAINING if training else Writes.MAYBE
            elif kind is STATISTICS and training:
                writes = Writes.HIDDEN
            buffers = content["_buffers"]
            self.buffers += [(buffers, name, writes) for name in buffers]

    def _look(self, value: Any, depth: int) -> None:
        if depth == 0 or isinstance(value, _UNINTERESTING) or id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            self._add(self.tensors, value)
        elif isinstance(value, nn.Module):
            self._walk(value)
        elif isinstance(value, _generator_types()):
            self._add(self.generators, value)
        else:
            self._seen.add(id(value))
            self._look_inside(value, depth - 1)

    def _look_inside(self, value: Any, depth: int) -> None:
        if type(value) is FunctionType:
            self._look_at_function(value, depth + 1)
        elif type(value) is MethodType:
            self._look(value.__self__, depth + 1)
            self._look(value.__func__, depth + 1)
        elif type(value) is partial:
            for item in (value.func, *value.args, *value.keywords.values()):
                self._look(item, depth + 1)
        elif isinstance(value, (list, tuple)):
            for item in value[:_FUNCTIONS]:
                self._look(item, depth)
        elif isinstance(value, dict):
            for item in list(value.values())[:_FUNCTIONS]:
                self._look(item, depth)
        elif hasattr(value, "__dict__"):
            self._look_at_object(value, depth)

    def _look_at_object(self, value: Any, depth: int) -> None:
        for item in list(vars(value).values())[:_FUNCTIONS]:
            self._look(item, depth)
        call = getattr(type(value), "__call__", None)  # noqa: B004 - the function, not whether
        if type(call) is FunctionType:
            self._look_at_function(call, depth)

    def _look_at_function(self, function: FunctionType, depth: int) -> None:
        self._code += 1
        if self._code > _FUNCTIONS:
            return
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.cells.append((cell, content))
            self._look(content, depth)
        for default in function.__defaults__ or ():
            self._look(default, depth)
        if function.__kwdefaults__:
            for default in function.__kwdefaults__.values():
                self._look(default, depth)
        self._look_at_globals(_globals_of(function))

    def _look_at_globals(self, named: _Globals) -> None:
        for names, namespace in named:
            for name in names:
                self._look(namespace.get(name), 2)


def _identity(value: Any) -> Any:
    return value


@lru_cache
def _with_numpy(loaded: bool) -> tuple[type, ...]:
    kinds: list[type] = [torch.Generator, random.Random]
    if loaded:
        numpy_random: Any = sys.modules["numpy.random"]
        kinds += [numpy_random.Generator, numpy_random.RandomState]
    return tuple(kinds)


def _generator_types() -> tuple[type, ...]:
    return _with_numpy("numpy.random" in sys.modules)


@lru_cache
def _as_set(kinds: tuple[type, ...]) -> frozenset[type]:
    return frozenset(kinds)


def _generator_types_set() -> frozenset[type]:
    return _as_set(_generator_types())


_Globals = list[tuple[tuple[str, ...], dict[str, Any]]]

#: By code. What lasts as long as its code, in a process, is not many.
_known_globals: dict[CodeType, _Globals] = {}


def _globals_of(function: FunctionType) -> _Globals:
    """The globals with data that ``function`` and the functions it calls name, by namespace."""
    known = _known_globals.get(function.__code__)
    if known is None:
        known = _known_globals[function.__code__] = _find_globals(function)
    return known


def _find_globals(function: FunctionType) -> _Globals:
    found: dict[int, tuple[list[str], dict[str, Any]]] = {}
    pending, seen = [function], {function.__code__}
    while pending and len(seen) <= _FUNCTIONS:
        current = pending.pop()
        namespace = current.__globals__
        if namespace.get("__name__", "").partition(".")[0] in ("torch", "recollect"):
            continue
        names, _ = found.setdefault(id(namespace), ([], namespace))
        for name in _names_in(current.__code__):
            value = namespace.get(name, _ABSENT)
            if type(value) is FunctionType:
                if value.__code__ not in seen:
                    seen.add(value.__code__)
                    pending.append(value)
            elif value is None or not isinstance(value, (*_UNINTERESTING, _Absent)):
                names.append(name)
    return [(tuple(dict.fromkeys(names)), space) for names, space in found.values() if names]


class _Absent:
    """Stands for a name that is not defined."""


_ABSENT = _Absent()


def _names_in(code: CodeType) -> list[str]:
    """The globals that a piece of code names, functions inside of it included."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names_in(constant)
    return names
