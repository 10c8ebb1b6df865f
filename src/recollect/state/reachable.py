"""What a function can reach beside its arguments: modules, generators, tensors, variables.

The search goes where a function keeps things: the module it is or is bound to, the cells of its
closure, its defaults, the arguments of a ``functools.partial``, the globals that its code names,
and from each of these one step further (a list of modules, an attribute of an object, a function
called by the function). It is made at every call, since any of these may be another one then.
Remembered are the names that a piece of code uses, and the index of a module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from enum import Enum, auto
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes, WeakKeyDictionary

import torch
from torch import nn

from recollect.state.code import globals_in
from recollect.state.module_index import BARE, Attributes, ModuleIndex, ModuleKind, index_of
from recollect.state.restorers import CELL, UNSET, VARIABLES, Entry, Restorers, attribute_restorers
from recollect.state.streams import generator_types

__all__ = ["BufferPlace", "Reachable", "SimpleModule", "Writes", "reachable_from"]


class Writes(Enum):
    """Whether a buffer may be written to without its version being raised."""

    SEEN = auto()
    MAYBE = auto()
    MAYBE_IN_TRAINING = auto()
    HIDDEN = auto()


#: The buffers of a module, the name of one, and how it may be written to.
BufferPlace = tuple[dict[str, Any], str, Writes]

#: How far to go from object to object, how many to look at, how many items of each, and through how
#: many functions.
_DEPTH = 6
_THINGS = 300
_ITEMS = 1000
_FUNCTIONS = 64

_UNINTERESTING: tuple[Any, ...] = (
    *(type(None), bool, int, float, str, bytes, type, ModuleType, BuiltinFunctionType),
    *(torch.dtype, torch.device, *ProxyTypes),
)


class Reachable:
    """What one function can reach."""

    __slots__ = (
        *("_count", "_seen", "buffers", "communicates", "generators", "indexes", "modules"),
        *("tensors", "variables"),
    )

    def __init__(self, function: Any, others: Iterable[Any] = ()) -> None:
        """Search from ``function``, and from ``others``, which it is given."""
        #: Modules that were found outside of others.
        self.modules: list[nn.Module] = []
        self.indexes: list[ModuleIndex] = []
        self.buffers: list[BufferPlace] = []
        #: Tensors outside of modules.
        self.tensors: list[torch.Tensor] = []
        #: Random streams that are objects: of torch, numpy and ``random``.
        self.generators: list[Any] = []
        #: Cells of closures and global variables, with their values.
        self.variables: list[Entry] = []
        #: Whether a module of torch's gathers statistics from other processes.
        self.communicates = False
        self._seen: set[int] = set()
        self._count = 0
        for value in (function, *others):
            self._look(value, _DEPTH)

    def _look(self, value: Any, depth: int) -> None:
        # By type: to ask the value itself what it is may run code of the user's (weak references).
        kind = type(value)
        if depth == 0 or kind in _blank or id(value) in self._seen:
            return
        handler = _handlers.get(kind) or _handler_for(kind)
        if handler is None:
            return
        if handler not in _FINDS:
            if self._count >= _THINGS:
                return
            self._count += 1
        self._seen.add(id(value))
        getattr(self, handler)(value, depth)

    # --- modules ----------------------------------------------------------------------------------

    def _add_module(self, module: nn.Module, _: int) -> None:
        """A module and all below it."""
        self.modules.append(module)
        index = index_of(module)
        self.indexes.append(index)
        if index.is_unfinished:
            raise ValueError(
                f"a checkpointed region uses {type(module).__name__} with parameters that are not "
                "made yet: a lazy module makes them in its first call, which cannot be repeated. "
                "Run the model once before (with torch.no_grad(): model(x))."
            )
        if index.scripted:
            self.tensors += index.scripted
        if isinstance(module, torch.jit.ScriptModule):
            return
        attributes = module.__dict__
        if attributes["_buffers"]:
            self._add_buffers(attributes, index.kind)
        for each, kind in index.with_buffers:
            self._add_buffers(each, kind)
        self.communicates |= index.communicates
        for attached in _attached_to(attributes, index):
            self._look(attached, 1)
        if index.globals is None:
            index.globals = [named for f in index.functions for named in _globals_of(f)]
        self._add_globals(index.globals)

    def _add_buffers(self, content: Attributes, kind: ModuleKind) -> None:
        training = content.get("training")
        writes = Writes.SEEN
        if kind is ModuleKind.OWN:
            writes = Writes.MAYBE_IN_TRAINING if training else Writes.MAYBE
        elif kind is ModuleKind.STATISTICS and training:
            writes = Writes.HIDDEN
        buffers = content["_buffers"]
        self.buffers += [(buffers, name, writes) for name in [*buffers]]

    # --- other things -----------------------------------------------------------------------------

    def _add_tensor(self, tensor: torch.Tensor, _: int) -> None:
        self.tensors.append(tensor)

    def _add_generator(self, generator: Any, _: int) -> None:
        self.generators.append(generator)

    def _look_at_method(self, method: Any, depth: int) -> None:
        self._look(method.__self__, depth)
        self._look(method.__func__, depth)

    def _look_at_partial(self, value: Any, depth: int) -> None:
        for item in (value.func, *value.args, *value.keywords.values()):
            self._look(item, depth)

    def _look_at_items(self, values: Iterable[Any], depth: int) -> None:
        items = [*islice(values, _ITEMS)]
        if _lead_nowhere(items):
            return  # a long list of numbers, say
        for item in items:
            if type(item) not in _blank:
                self._look(item, depth - 1)

    def _look_at_values(self, values: dict[Any, Any], depth: int) -> None:
        self._look_at_items(values.values(), depth)

    def _look_at_object(self, value: Any, depth: int) -> None:
        kind = type(value)
        restorers = _known_attributes.get(kind)
        if restorers is None:
            restorers = _known_attributes[kind] = attribute_restorers(kind)
        for restorer in restorers:
            self._look_at_items(restorer.items(restorer.take(value)), depth)
        call = getattr(kind, "__call__", None)  # noqa: B004 - the function, not whether
        if type(call) is FunctionType:
            self._look_at_function(call, depth - 1)

    def _look_at_function(self, function: FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            held = CELL.take(cell)
            if held:  # else it is not assigned yet
                self.variables.append((cell, CELL, held))
                self._look(held[0], depth)
        for default in function.__defaults__ or ():
            self._look(default, depth)
        if function.__kwdefaults__:
            for default in [*function.__kwdefaults__.values()]:
                self._look(default, depth)
        self._add_globals(_globals_of(function))

    def _add_globals(self, named: list[_Names]) -> None:
        for names in named:
            held = VARIABLES.take(names)
            self.variables.append((names, VARIABLES, held))
            for value in held.values():
                self._look(value, 2)


class _Attached(Reachable):
    """The same without what is below modules."""

    __slots__ = ()

    def _add_module(self, module: nn.Module, _: int) -> None:
        self.modules.append(module)


# --- what is known of types -----------------------------------------------------------------------

#: By type: the method for a value.
_handlers: WeakKeyDictionary[type, str] = WeakKeyDictionary()

#: Methods that are called however many values there are.
_FINDS = frozenset({"_add_tensor", "_add_module", "_add_generator"})

#: Types of values that lead to nothing, as far as they have been met.
_blank: set[type] = {ModuleIndex}

#: How the attributes of an object are read.
_known_attributes: WeakKeyDictionary[type, Restorers] = WeakKeyDictionary()


def _handler_for(kind: type) -> str | None:
    # Objects of ours keep no state of the user's.
    is_ours = str(kind.__module__).startswith("recollect.") and not issubclass(kind, nn.Module)
    if is_ours or issubclass(kind, _UNINTERESTING):
        _blank.add(kind)
        return None
    by_base: dict[Any, str] = {
        torch.Tensor: "_add_tensor",
        nn.Module: "_add_module",
        generator_types(): "_add_generator",
        FunctionType: "_look_at_function",
        MethodType: "_look_at_method",
        partial: "_look_at_partial",
        (list, tuple, set, frozenset, deque): "_look_at_items",
        dict: "_look_at_values",
        object: "_look_at_object",
    }
    handler = _handlers[kind] = next(h for base, h in by_base.items() if issubclass(kind, base))
    return handler


def _lead_nowhere(values: Iterable[Any]) -> bool:
    """Whether there is nothing to be found in ``values``."""
    kinds = {*map(type, values)} - _blank
    dull = [kind for kind in kinds if issubclass(kind, _UNINTERESTING)]
    _blank.update(dull)
    return len(dull) == len(kinds)


def _attached_to(attributes: Attributes, index: ModuleIndex) -> list[Any]:
    """The tensors among attributes of modules, and modules and generators that they lead to.

    Of modules that are not torch's layers; ``attributes``: those of the root of ``index``.
    """
    is_own = index.kind is ModuleKind.OWN
    own = [(attributes, index.bare), *index.own] if is_own else index.own
    leading: list[Any] = []
    for each, bare in own:
        # At every call and for every module: most have nothing but numbers.
        if not _blank.issuperset(map(type, islice(each.values(), bare, None))):
            others = [value for name, value in [*each.items()] if name not in BARE]
            if not _lead_nowhere(others):
                leading += [v for v in others if not issubclass(type(v), _NO_ATTACHMENTS)]
    if not leading:
        return []
    found = _Attached(None, leading)
    tensors = [value for value in leading if issubclass(type(value), torch.Tensor)]
    return [*tensors, *found.generators, *found.modules]


_NO_ATTACHMENTS = (nn.Module, *_UNINTERESTING)


class SimpleModule:
    """A module that reaches nothing but its parameters, in the form of `Reachable`."""

    __slots__ = ("indexes", "modules")

    buffers: tuple[BufferPlace, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    generators: tuple[Any, ...] = ()
    variables: tuple[Entry, ...] = ()
    communicates = False

    def __init__(self, module: nn.Module, index: ModuleIndex) -> None:
        self.modules = (module,)
        self.indexes = (index,)


def reachable_from(function: Any, others: Collection[Any]) -> Reachable | SimpleModule:
    """What ``function`` can reach, and it is given ``others``."""
    index = None if others else _simple_index(function)
    return Reachable(function, others) if index is None else SimpleModule(function, index)


def _simple_index(function: Any) -> ModuleIndex | None:
    """The index of a module that reaches nothing but its parameters, as most regions are."""
    if not isinstance(function, nn.Module):
        return None
    index = index_of(function)
    if index.is_simple is None:
        found = Reachable(function)
        others = found.buffers or found.tensors or found.generators or found.variables
        index.is_simple = len(found.modules) == 1 and not others and not found.communicates
    return index if index.is_simple and not _attached_to(function.__dict__, index) else None


# --- globals --------------------------------------------------------------------------------------

#: A namespace, and names of variables in it.
_Names = tuple[dict[str, Any], tuple[str, ...]]

#: By the addresses of code and namespace, with both. Of the first so many: it keeps them alive.
_known_globals: dict[tuple[int, int], tuple[CodeType, dict[str, Any], list[_Names]]] = {}
_KNOWN = 4096

#: Types of globals that are no variables.
_FIXED = (type, ModuleType, BuiltinFunctionType)


def _globals_of(function: FunctionType) -> list[_Names]:
    """The variables that ``function`` and the functions it calls name as globals."""
    code, namespace = function.__code__, function.__globals__
    key = id(code), id(namespace)
    known = _known_globals.get(key)
    if known is not None:
        return known[2]
    found = _find_globals(function)
    if len(_known_globals) < _KNOWN:
        _known_globals[key] = code, namespace, found
    return found


def _find_globals(function: FunctionType) -> list[_Names]:
    found: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
    pending, seen = [function], {id(function.__code__)}
    while pending and len(seen) <= _FUNCTIONS:
        current = pending.pop()
        namespace = current.__globals__
        if namespace.get("__name__", "").partition(".")[0] in ("torch", "recollect"):
            continue
        _, names = found.setdefault(id(namespace), (namespace, {}))
        for name in sorted(globals_in(current.__code__)):
            value = namespace.get(name, UNSET)
            if type(value) is FunctionType:
                if id(value.__code__) not in seen:
                    seen.add(id(value.__code__))
                    pending.append(value)
            elif value is not UNSET and not isinstance(value, _FIXED):
                names[name] = None
    return [(space, (*names,)) for space, names in found.values() if names]
