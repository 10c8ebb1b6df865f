"""What a function can get at beside its arguments: modules, generators, tensors.

A region's state is found by looking where a function keeps things: the module it is or is bound to,
the cells of its closure, its defaults, the arguments of a ``functools.partial``, the globals that
its code names, and from each of these one step further (a list of modules, an attribute of an
object, a function called by the function). It is looked up at every call, since any of these may be
another one then. Remembered are which names a piece of code uses, and what is below a module, as
long as it has the same children, parameters and buffers.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from itertools import islice
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ProxyTypes, WeakKeyDictionary

import torch
from torch import nn

from recollect.state.module_index import (
    BARE,
    OWN,
    STATISTICS,
    Attributes,
    ModuleKind,
    Tree,
    tree_of,
)
from recollect.state.streams import generator_types

__all__ = [
    "Reach",
    "Slot",
    "Writes",
    "callers_of",
    "content_of",
    "leads_nowhere",
    "recurrent_in",
    "simple_tree",
]


class Writes(Enum):
    """Whether a buffer may be written to without its version being raised."""

    SEEN = auto()
    MAYBE = auto()
    MAYBE_IN_TRAINING = auto()
    HIDDEN = auto()


#: The buffers of a module, the name of one, and how it may be written to.
Slot = tuple[dict[str, Any], str, Writes]

#: How far to go from object to object, how many to look at, how many items of each, and through how
#: many functions.
_DEPTH = 6
_THINGS = 300
_ITEMS = 1000
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
    *ProxyTypes,
)


class Reach:
    """What one function can get at."""

    __slots__ = (
        "_count",
        "_seen",
        "buffers",
        "callers",
        "cells",
        "communicates",
        "content",
        "generators",
        "globals",
        "modules",
        "names",
        "owners",
        "parameters",
        "recurrent",
        "tensors",
        "trees",
    )

    def __init__(self, function: Callable[..., Any], others: Iterable[Any] = ()) -> None:
        """Look from ``function``, and from ``others``: what else it can get at."""
        #: Modules at which a walk began.
        self.modules: list[nn.Module] = []
        self.trees: list[Tree] = []
        #: The attributes of these and of all below.
        self.content: list[dict[str, Any]] = []
        #: The same with those of compiled modules.
        self.callers: list[dict[str, Any]] = []
        #: The dictionaries in which modules have their parameters.
        self.parameters: list[dict[str, Any]] = []
        #: The dictionaries in which modules have parameters, buffers and children; their names.
        self.owners: list[dict[str, Any]] = []
        self.names: list[tuple[str, ...]] = []
        self.buffers: list[Slot] = []
        #: The attributes of recurrent layers.
        self.recurrent: list[dict[str, Any]] = []
        #: Tensors outside of modules.
        self.tensors: list[torch.Tensor] = []
        #: Random streams that are objects: of torch, numpy and ``random``.
        self.generators: list[Any] = []
        #: The cells of closures, with what is in them.
        self.cells: list[tuple[CellType, Any]] = []
        #: Global variables by namespace and name, with their values.
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        #: Whether a module of torch's gathers statistics from other processes.
        self.communicates = False
        self._seen: set[int] = set()
        self._count = 0
        if isinstance(function, nn.Module):
            self._walk(function)
        else:
            self._look(function, _DEPTH)
        for value in others:
            self._look(value, _DEPTH)

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
        self.trees.append(tree)
        if tree.is_unfinished:
            raise ValueError(
                f"a checkpointed region uses {type(module).__name__} with parameters that are not "
                "made yet: a lazy module makes them in its first call, which cannot be repeated. "
                "Run the model once before (with torch.no_grad(): model(x))."
            )
        self.parameters += tree.parameters
        self.owners += tree.owners
        self.names += tree.names
        if tree.scripted:
            self.tensors += tree.scripted
        if isinstance(module, torch.jit.ScriptModule):
            return
        content = module.__dict__
        self.content += content_of(module, tree)
        self.callers += callers_of(module, tree)
        self.recurrent += recurrent_in(module, tree)
        if content["_buffers"]:
            self._add_buffers(content, tree.kind)
        for each, kind in tree.with_buffers:
            self._add_buffers(each, kind)
        self.communicates |= tree.communicates
        leading = _leading_from(content, tree)
        if leading:
            self._follow(leading)
        if tree.named is None:
            tree.named = [named for f in tree.functions if (named := _globals_of(f))]
        for named in tree.named:
            self._look_at_globals(named)

    def _follow(self, leading: list[Any]) -> None:
        """Look at attributes of modules: for tensors and generators, and for what they lead to."""
        for tensor in _tensors_in(leading):
            self._add(self.tensors, tensor)
        attached = _Attached(leading)
        for generator in attached.generators:
            self._add(self.generators, generator)
        for module in attached.modules:
            self._walk(module)

    def _add_buffers(self, content: dict[str, Any], kind: ModuleKind) -> None:
        training = content.get("training")  # a compiled module has it elsewhere
        writes = Writes.SEEN
        if kind is OWN:
            writes = Writes.MAYBE_IN_TRAINING if training else Writes.MAYBE
        elif kind is STATISTICS and training:
            writes = Writes.HIDDEN
        buffers = content["_buffers"]
        self.buffers += [(buffers, name, writes) for name in [*buffers]]

    def _look(self, value: Any, depth: int) -> None:
        # By type: to ask the value itself what it is may run code of the user's (weak references).
        kind = type(value)
        if depth == 0 or kind in _blank or id(value) in self._seen:
            return
        way = _ways.get(kind) or _way_for(kind)
        if way is _Way.TENSOR:
            self._add(self.tensors, value)
        elif way is _Way.MODULE:
            self._walk(value)
        elif way is _Way.GENERATOR:
            self._add(self.generators, value)
        elif way is _Way.INSIDE and self._count < _THINGS:
            self._count += 1
            self._seen.add(id(value))
            self._look_inside(value, kind, depth)

    def _look_inside(self, value: Any, kind: type, depth: int) -> None:
        if kind is FunctionType:
            self._look_at_function(value, depth)
        elif kind is MethodType:
            self._look(value.__self__, depth)
            self._look(value.__func__, depth)
        elif issubclass(kind, partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self._look(item, depth)
        elif issubclass(kind, (list, tuple, set, frozenset, deque)):
            self._look_at_items(value, depth - 1)
        elif issubclass(kind, dict):
            self._look_at_items(value.values(), depth - 1)
        else:
            self._look_at_object(value, kind, depth - 1)

    def _look_at_items(self, values: Iterable[Any], depth: int) -> None:
        items = [*islice(values, _ITEMS)]
        if _lead_nowhere(items):
            return  # a long list of numbers, say
        for item in items:
            if type(item) not in _blank:
                self._look(item, depth)

    def _look_at_object(self, value: Any, kind: type, depth: int) -> None:
        try:
            attributes = _read_attribute(value, "__dict__")
        except AttributeError:
            attributes = None
        if type(attributes) is dict:
            self._look_at_items(attributes.values(), depth)
        slots, call = _known_parts.get(kind) or _parts_of(kind)
        for slot in slots:
            self._look(_read_slot(slot, value), depth)
        if call is not None:
            self._look_at_function(call, depth)

    def _look_at_function(self, function: FunctionType, depth: int) -> None:
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
            for default in [*function.__kwdefaults__.values()]:
                self._look(default, depth)
        self._look_at_globals(_globals_of(function))

    def _look_at_globals(self, named: _Globals) -> None:
        for names, namespace in named:
            for name in names:
                value = namespace.get(name, _ABSENT)
                if value is not _ABSENT:
                    self.globals.append((namespace, name, value))
                    self._look(value, 2)


class _Attached(Reach):
    """Modules and generators that attributes of modules lead to, though not registered there."""

    __slots__ = ()

    def __init__(self, leading: list[Any]) -> None:
        super().__init__(len)
        for value in leading:
            self._look(value, _DEPTH)

    def _walk(self, module: nn.Module) -> None:
        self._add(self.modules, module)


def _leading_from(content: Attributes, tree: Tree) -> list[Any]:
    """Attributes of modules that are, or may lead to, tensors, generators and other modules.

    ``content``: the attributes of the module of which ``tree`` is.
    """
    own = [(content, tree.bare), *tree.own] if tree.kind is OWN else tree.own
    found: list[Any] = []
    for attributes, bare in own:
        # At every call and for every module: most have nothing but numbers.
        if not _blank.issuperset(map(type, islice(attributes.values(), bare, None))):
            others = [value for name, value in [*attributes.items()] if name not in BARE]
            if not _lead_nowhere(others):
                found += [each for each in others if not issubclass(type(each), _NOWHERE)]
    return found


def simple_tree(function: Any) -> Tree | None:
    """What is below ``function`` if that is a module, and nothing but parameters is reached by it.

    As most regions are: there is no need to look any further.
    """
    if not isinstance(function, nn.Module):
        return None
    tree = tree_of(function)
    if tree.is_simple is None:
        tree.is_simple = _is_simple(Reach(function))
    if not tree.is_simple:
        return None
    leading = _leading_from(function.__dict__, tree)
    if leading:
        attached = _Attached(leading)
        if attached.modules or attached.generators or _tensors_in(leading):
            return None
    return tree


def _tensors_in(values: list[Any]) -> list[torch.Tensor]:
    return [value for value in values if issubclass(type(value), torch.Tensor)]


def _is_simple(reach: Reach) -> bool:
    found = reach.buffers, reach.tensors, reach.generators, reach.cells, reach.globals
    return len(reach.modules) == 1 and not any(found) and not reach.communicates


def content_of(module: Any, tree: Tree) -> list[dict[str, Any]]:
    """The attributes of ``module`` and of all below it."""
    content = module.__dict__
    return [content, *tree.content] if "training" in content else tree.content


def callers_of(module: Any, tree: Tree) -> list[dict[str, Any]]:
    """The same with those of compiled modules, which have no mode."""
    return [module.__dict__, *tree.callers]


def recurrent_in(module: Any, tree: Tree) -> list[dict[str, Any]]:
    """The attributes of the recurrent layers among ``module`` and all below it."""
    return [module.__dict__, *tree.recurrent] if isinstance(module, nn.RNNBase) else tree.recurrent


_read_attribute = object.__getattribute__


def _read_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # not assigned
        return None


_Parts = tuple[list[MemberDescriptorType], FunctionType | None]

#: By type, if there are none: the slots of its objects, and what runs when one is called.
_known_parts: WeakKeyDictionary[type, _Parts] = WeakKeyDictionary()


def _parts_of(kind: type) -> _Parts:
    spaces = [vars(owner).copy() for owner in kind.__mro__]
    members = [member for space in spaces if "__slots__" in space for member in space.values()]
    slots = [member for member in members if type(member) is MemberDescriptorType]
    call = getattr(kind, "__call__", None)  # noqa: B004 - the function, not whether
    parts = slots, call if type(call) is FunctionType else None
    if not slots and parts[1] is None:  # else it would hold its own key
        _known_parts[kind] = parts
    return parts


class _Way(Enum):
    """What to do with a value."""

    TENSOR = auto()
    MODULE = auto()
    GENERATOR = auto()
    INSIDE = auto()
    NOTHING = auto()


#: By type.
_ways: WeakKeyDictionary[type, _Way] = WeakKeyDictionary()


def _way_for(kind: type) -> _Way:
    if issubclass(kind, _UNINTERESTING):
        _blank.add(kind)
        return _Way.NOTHING
    way = _Way.INSIDE
    if issubclass(kind, torch.Tensor):
        way = _Way.TENSOR
    elif issubclass(kind, nn.Module):
        way = _Way.MODULE
    elif issubclass(kind, generator_types()):
        way = _Way.GENERATOR
    _ways[kind] = way
    return way


#: Types of values that lead to nothing, as far as they have been met.
_blank: set[type] = {Tree}

_NOWHERE = (nn.Module, *_UNINTERESTING)


def leads_nowhere(kind: type) -> None:
    """Say that nothing is to be found in the values of a type."""
    _blank.add(kind)


def _lead_nowhere(values: Iterable[Any]) -> bool:
    """Whether there is nothing to be found in ``values``."""
    kinds = {*map(type, values)} - _blank
    dull = [kind for kind in kinds if issubclass(kind, _UNINTERESTING)]
    _blank.update(dull)
    return len(dull) == len(kinds)


_Globals = list[tuple[tuple[str, ...], dict[str, Any]]]

#: By the addresses of code and namespace, with both. Of the first so many: it keeps them alive.
_known_globals: dict[tuple[int, int], tuple[CodeType, dict[str, Any], _Globals]] = {}
_KNOWN = 4096


def _globals_of(function: FunctionType) -> _Globals:
    """The variables that ``function`` and the functions it calls name as globals, by namespace."""
    code, namespace = function.__code__, function.__globals__
    key = id(code), id(namespace)
    known = _known_globals.get(key)
    if known is not None:
        return known[2]
    found = _find_globals(function)
    if len(_known_globals) < _KNOWN:
        _known_globals[key] = code, namespace, found
    return found


def _find_globals(function: FunctionType) -> _Globals:
    found: dict[int, tuple[list[str], dict[str, Any]]] = {}
    pending, seen = [function], {id(function.__code__)}
    while pending and len(seen) <= _FUNCTIONS:
        current = pending.pop()
        namespace = current.__globals__
        if namespace.get("__name__", "").partition(".")[0] in ("torch", "recollect"):
            continue
        names, _ = found.setdefault(id(namespace), ([], namespace))
        for name in _names_in(current.__code__):
            value = namespace.get(name, _ABSENT)
            if type(value) is FunctionType:
                if id(value.__code__) not in seen:
                    seen.add(id(value.__code__))
                    pending.append(value)
            elif value is not _ABSENT and not isinstance(value, _FIXED):
                names.append(name)
    return [(tuple(dict.fromkeys(names)), space) for names, space in found.values() if names]


#: Types of globals that are no variables.
_FIXED = (type, ModuleType, BuiltinFunctionType)


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
