"""What a function can reach besides its arguments: modules, generators, tensors, variables.

The search follows the module that a function is or is bound to, its closure, its defaults, the
arguments of a ``functools.partial``, and the globals that its code names, and from there lists,
attributes and functions that it calls. It runs at every call, since any of these may change.
The names that code uses, and the index of a module, are cached, and so is a search from a module
that found nothing (`InVain`): a configuration, a table of functions.
"""

from __future__ import annotations

import dis
import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from logging import Logger
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any, ClassVar
from weakref import ProxyTypes, WeakKeyDictionary

import torch
from torch import nn

from recollect.state.module_index import Attributes, ModuleIndex, Writes, read_index
from recollect.state.module_settings import STANDARD_ATTRIBUTES
from recollect.state.restorers import (
    ATTRIBUTES,
    CELL,
    UNSET,
    VARIABLES,
    Entry,
    Restorers,
    attribute_restorers,
    dict_of,
)
from recollect.state.rng import generator_types

#: The buffers of a module (or parameters that it changes), the name of one, and how it may be
#: written to.
BufferPlace = tuple[dict[str, Any], str, Writes]

#: How far to go from object to object, and from global variables; how many to visit, how many items
#: of each, and through how many functions.
_DEPTH = 6
_GLOBAL_DEPTH = 2
_OBJECTS = 300
_ITEMS = 1000
_FUNCTIONS = 64

_UNINTERESTING: tuple[Any, ...] = (
    *(type(None), bool, int, float, str, bytes, type, ModuleType, BuiltinFunctionType),
    *(torch.dtype, torch.device, *ProxyTypes),
    Logger,  # most modules name one as a global, and it leads to all others
)


def lazy_module(name: str, module: nn.Module) -> ValueError:
    """The error for a module whose parameters do not exist yet."""
    return ValueError(
        f"{name} is a {type(module).__name__} whose parameters do not exist yet: a lazy module "
        "makes them in its first call, which cannot be repeated. Run the model once before, under "
        "torch.no_grad()."
    )


class InVain:
    """Values from which a search found nothing, and what it went through on the way.

    While all of that looks the same, there is nothing to be found: it need not be searched again.
    Nothing of it is held, since what is empty now may hold an output later. That something else
    of the same type has an ``id`` now does no harm: what it holds is compared, too.
    """

    __slots__ = ("_ids", "_numbers", "_places", "_types")

    def __init__(self, roots: list[Any]) -> None:
        #: Of the roots, and of what each place holds, one after the other.
        self._ids: list[int] = []
        self._types: list[type] = []
        #: By ``id``: the number of the first of them.
        self._numbers: dict[int, int] = {}
        #: The number of each object or container, and whether it is an object.
        self._places: list[tuple[int, bool]] = []
        self._note(roots)

    def add(self, place: Any, *, is_object: bool) -> None:
        """Note an object or a container, before its contents are searched."""
        self._places.append((self._numbers[id(place)], is_object))
        self._note(_held_by(place, is_object))

    def covers(self, roots: list[Any]) -> bool:
        """Whether a search from ``roots`` would find nothing."""
        ids, types, found = self._ids, self._types, [*roots]
        for number, is_object in self._places:
            place = found[number] if number < len(found) else None
            if id(place) != ids[number] or type(place) is not types[number]:
                return False
            found += _held_by(place, is_object)
        return [*map(id, found)] == ids and all(map(is_, map(type, found), types))

    def _note(self, values: list[Any]) -> None:
        for value in values:
            self._numbers.setdefault(id(value), len(self._ids))
            self._ids.append(id(value))
            self._types.append(type(value))


def _held_by(place: Any, is_object: bool) -> list[Any]:
    return gc.get_referents(dict_of(place) if is_object else place)


#: How containers are read that show what they hold, and how many items that is.
_READERS: dict[Any, Callable[[Any], int]] = {
    **{kind.__iter__: kind.__len__ for kind in (list, tuple, set, frozenset, deque)},
    **{kind.values: kind.__len__ for kind in (dict, OrderedDict)},
}


#: A method of `Reachable`: it gets a value, and how far to go from there.
_Handler = Callable[[Any, Any, int], None]


class Reachable:
    """What one function can reach."""

    __slots__ = (
        *("_count", "_into_modules", "_passed", "_seen", "buffers", "communicates", "contents"),
        *("generators", "indexes", "module_values", "modules", "tensors", "variables"),
    )

    def __init__(
        self,
        function: Any,
        others: Iterable[Any] = (),
        *,
        into_modules: bool = True,
        depth: int = _DEPTH,
        passed: InVain | None = None,
    ) -> None:
        """Search from ``function``, and from ``others``, its arguments."""
        #: Modules that were found outside of others.
        self.modules: list[nn.Module] = []
        self.indexes: list[ModuleIndex] = []
        #: The parameters, buffers and children of each.
        self.module_values: list[list[Any]] = []
        self.buffers: list[BufferPlace] = []
        #: Tensors outside of modules.
        self.tensors: list[torch.Tensor] = []
        #: Random streams that are objects: of torch, numpy and ``random``.
        self.generators: list[Any] = []
        #: What attributes of modules hold whose contents a region may change, by index.
        self.contents: list[tuple[ModuleIndex, list[Any]]] = []
        #: Cells of closures and global variables, with their values.
        self.variables: list[Entry] = []
        #: Whether a module of torch's gathers statistics from other processes.
        self.communicates = False
        self._seen: set[int] = set()
        self._count = 0
        self._into_modules = into_modules
        #: What was searched, unless what is found depends on more than the contents of that.
        self._passed = passed
        if isinstance(function, nn.Module):  # as most regions are
            self._seen.add(id(function))
            self._add_module(function, _DEPTH)
        else:
            self._visit(function, _DEPTH)
        for value in others:
            self._visit(value, depth)

    def in_vain(self) -> InVain | None:
        """What was searched, if that was in vain."""
        found = self.modules or self.tensors or self.generators or self.variables
        return None if found else self._passed

    def _visit(self, value: Any, depth: int) -> None:
        # By type: `isinstance` may run code of the user's (weak references).
        kind = type(value)
        if depth == 0 or kind in _blank or id(value) in self._seen:
            return
        handler = self._USUAL.get(kind) or self._handlers.get(kind) or self._handler_for(kind)
        if handler is None:
            return
        if handler not in self._UNCOUNTED:
            if self._count >= _OBJECTS:
                self._passed = None
                return
            self._count += 1
        self._seen.add(id(value))
        handler(self, value, depth)

    # --- modules ----------------------------------------------------------------------------------

    def _add_module(self, module: nn.Module, _: int) -> None:
        """A module and all below it."""
        self.modules.append(module)
        if not self._into_modules:
            return
        index, values = read_index(module)
        self.indexes.append(index)
        self.module_values.append(values)
        if index.is_unfinished:
            raise lazy_module("a module of a checkpointed region", module)
        if index.scripted:
            self.tensors += index.scripted
        if index.is_scripted:
            return
        attributes = module.__dict__
        if attributes["_buffers"]:
            self._add_buffers(attributes, index.writes)
        for each, writes in index.with_buffers:
            self._add_buffers(each, writes)
        for owner in index.rewritten:
            self.buffers += [(owner, name, Writes.HIDDEN) for name in [*owner]]
        self.communicates |= index.communicates
        leading = leading_values(attributes, index)
        if leading:
            self._add_contents(leading, index)
            self._add_attached(leading, index)
        if index.globals is None:
            index.globals = _find_globals(index.functions)
        if index.globals:
            self._add_globals(index.globals, index)
        for cell in index.cells:
            self._add_cell(cell, _GLOBAL_DEPTH)

    def _add_attached(self, leading: list[Any], index: ModuleIndex) -> None:
        if index.attached_in_vain is not None and index.attached_in_vain.covers(leading):
            return
        found = _search(leading, _DEPTH)
        index.attached_in_vain = found.in_vain()
        # A list of outputs would hold the graph of the step before.
        themselves = {*map(id, leading)}
        tensors = [t for t in found.tensors if t.is_leaf or id(t) in themselves]
        self._add_found(found, tensors)

    def _add_globals(self, named: list[_Names], index: ModuleIndex) -> None:
        values = self._take_globals(named)
        known = index.globals_in_vain
        if not values or (known is not None and known.covers(values)):
            return
        found = _search(values, _GLOBAL_DEPTH)
        index.globals_in_vain = found.in_vain()
        self.variables += found.variables
        self._add_found(found, found.tensors)

    def _add_found(self, found: Reachable, tensors: list[torch.Tensor]) -> None:
        for each in (*tensors, *found.generators, *found.modules):
            self._visit(each, 1)

    def _add_buffers(self, content: Attributes, writes: tuple[Writes, Writes]) -> None:
        buffers = content["_buffers"]
        how = writes[bool(content.get("training"))]
        self.buffers += [(buffers, name, how) for name in [*buffers]]

    def _add_contents(self, values: list[Any], index: ModuleIndex) -> None:
        if not (index.contents_change or index.looks_left):
            return
        values = [value for value in values if not issubclass(type(value), torch.Tensor)]
        ids = [*map(id, values)]
        if index.contents_change or ids != index.looked_at:
            index.looks_left -= not index.contents_change
            index.looked_at = ids
            self.contents.append((index, values))

    # --- other things -----------------------------------------------------------------------------

    def _add_tensor(self, tensor: torch.Tensor, _: int) -> None:
        self.tensors.append(tensor)

    def _add_generator(self, generator: Any, _: int) -> None:
        self.generators.append(generator)

    def _visit_bound(self, value: Any, depth: int) -> None:
        self._passed = None
        # The object first: the globals of its methods are those of its module.
        for item in reversed(gc.get_referents(value)):
            self._visit(item, depth)

    def _visit_container(self, values: Any, depth: int) -> None:
        kind = type(values)
        reader = kind.values if issubclass(kind, dict) else kind.__iter__
        if reader not in _READERS or _READERS[reader](values) > _ITEMS:
            self._passed = None
        elif depth > 1 and self._passed is not None:  # else its items are not visited
            self._passed.add(values, is_object=False)
        self._visit_items(values, depth)

    def _visit_items(self, values: Iterable[Any], depth: int) -> None:
        items = [*islice(values.values() if isinstance(values, dict) else values, _ITEMS)]
        if _lead_nowhere(items):
            return  # a long list of numbers, say
        for item in items:
            if type(item) not in _blank:
                self._visit(item, depth - 1)

    def _visit_object(self, value: Any, depth: int) -> None:
        kind = type(value)
        restorers = _known_attributes.get(kind)
        if restorers is None:
            restorers = _known_attributes[kind] = attribute_restorers(kind)
        if restorers != (ATTRIBUTES,):
            self._passed = None
        elif depth > 1 and self._passed is not None:
            self._passed.add(value, is_object=True)
        for restorer in restorers:
            self._visit_items(restorer.items(restorer.take(value)), depth)
        call = getattr(kind, "__call__", None)  # noqa: B004 - the function, not whether
        if type(call) is FunctionType:
            self._visit_function(call, depth - 1)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        self._passed = None
        for cell in function.__closure__ or ():
            self._add_cell(cell, depth)
        for default in function.__defaults__ or ():
            self._visit(default, depth)
        if function.__kwdefaults__:
            for default in [*function.__kwdefaults__.values()]:
                self._visit(default, depth)
        if not any(function in index.functions for index in self.indexes):
            for value in self._take_globals(_globals_of(function)):
                self._visit(value, _GLOBAL_DEPTH)

    def _add_cell(self, cell: CellType, depth: int) -> None:
        held = CELL.take(cell)
        if held:  # else it is not assigned yet
            self.variables.append((cell, CELL, held))
            self._visit(held[0], depth)

    def _take_globals(self, named: list[_Names]) -> list[Any]:
        """Note global variables. Returns the values that may lead to something."""
        values: list[Any] = []
        for names in named:
            held = VARIABLES.take(names)
            self.variables.append((names, VARIABLES, held))
            values += [value for value in held.values() if type(value) not in _blank]
        return values

    #: What visits a value, by its first base class in this list.
    _BY_BASE: ClassVar[list[tuple[tuple[type, ...], _Handler]]] = [
        ((torch.Tensor, nn.Parameter), _add_tensor),
        ((nn.Module,), _add_module),
        ((FunctionType,), _visit_function),
        ((MethodType, partial), _visit_bound),
        ((list, tuple, set, frozenset, deque, dict), _visit_container),
    ]
    #: By type. The usual ones apart: a weak dictionary is slow.
    _USUAL: ClassVar = {kind: handler for kinds, handler in _BY_BASE for kind in kinds}
    _handlers: ClassVar[WeakKeyDictionary[type, _Handler]] = WeakKeyDictionary()

    #: Those that are called however many values there are.
    _UNCOUNTED = frozenset({_add_tensor, _add_module, _add_generator})

    def _handler_for(self, kind: type) -> _Handler | None:
        # Objects of recollect hold no state of the user.
        is_ours = str(kind.__module__).startswith("recollect.") and not issubclass(kind, nn.Module)
        if is_ours or issubclass(kind, _UNINTERESTING):
            _blank.add(kind)
            return None
        found = (handler for kinds, handler in self._BY_BASE if issubclass(kind, kinds))
        is_generator = issubclass(kind, generator_types())
        handler = Reachable._add_generator if is_generator else next(found, Reachable._visit_object)
        self._handlers[kind] = handler
        return handler


# --- types ----------------------------------------------------------------------------------------

#: Types met so far whose values lead to nothing.
_blank: set[type] = {ModuleIndex}

#: How the attributes of an object are read.
_known_attributes: WeakKeyDictionary[type, Restorers] = WeakKeyDictionary()


def _lead_nowhere(values: Iterable[Any]) -> bool:
    kinds = {*map(type, values)} - _blank
    dull = [kind for kind in kinds if issubclass(kind, _UNINTERESTING)]
    _blank.update(dull)
    return len(dull) == len(kinds)


def leading_values(attributes: Attributes, index: ModuleIndex) -> list[Any]:
    """What attributes of user modules hold that may lead to something, but for modules.

    ``attributes``: those of the root of ``index``.
    """
    places = index.user_modules
    if index.is_user_module:
        places = [(attributes, index.standard_attributes), *places]
    leading: list[Any] = []
    for each, first in places:
        # At every call and for every module: most have nothing but numbers.
        values = [*islice(each.values(), first, None)]
        if not _blank.issuperset(map(type, values)):
            if not first:
                values = [v for name, v in [*each.items()] if name not in STANDARD_ATTRIBUTES]
            leading += [value for value in values if type(value) not in _blank]
    if not leading or _lead_nowhere(leading):
        return []
    return [v for v in leading if not issubclass(type(v), _NO_ATTACHMENTS)]


def _search(values: list[Any], depth: int) -> Reachable:
    """What attributes or globals of modules lead to."""
    return Reachable(None, values, into_modules=False, depth=depth, passed=InVain(values))


_NO_ATTACHMENTS = (nn.Module, *_UNINTERESTING)


# --- globals --------------------------------------------------------------------------------------

#: A namespace, and names of variables in it.
_Names = tuple[dict[str, Any], tuple[str, ...]]

#: By the ids of code and namespace, with both, which it keeps alive: so at most `_KNOWN`.
_known_globals: dict[tuple[int, int], tuple[CodeType, dict[str, Any], list[_Names]]] = {}
_KNOWN = 4096

#: Types of globals that are no variables.
_FIXED = (type, ModuleType, BuiltinFunctionType)

#: The instructions that read a global; the second in the body of a class.
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")


def _globals_of(function: FunctionType) -> list[_Names]:
    """The variables that ``function`` and the functions it calls name as globals."""
    code, namespace = function.__code__, function.__globals__
    key = id(code), id(namespace)
    known = _known_globals.get(key)
    if known is not None:
        return known[2]
    found = _find_globals([function])
    if len(_known_globals) < _KNOWN:
        _known_globals[key] = code, namespace, found
    return found


def names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a piece of code and in functions inside of it."""
    inside = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*inside)


def _globals_in(code: CodeType) -> frozenset[str]:
    """The names of globals alone. An attribute of the same name must not hold a global.

    ``output.logits`` in a script would hold its ``logits`` of the step before.
    """
    inside = (_globals_in(each) for each in code.co_consts if isinstance(each, CodeType))
    loaded = (each.argval for each in dis.get_instructions(code) if each.opname in _LOADS)
    return frozenset(loaded).union(*inside)


def _find_globals(functions: list[FunctionType]) -> list[_Names]:
    found: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
    pending, seen = [*reversed(functions)], {id(each.__code__) for each in functions}
    most = len(functions) * _FUNCTIONS
    while pending and len(seen) <= most:
        current = pending.pop()
        namespace = current.__globals__
        if namespace.get("__name__", "").partition(".")[0] in ("torch", "recollect"):
            continue
        _, names = found.setdefault(id(namespace), (namespace, {}))
        for name in sorted(_globals_in(current.__code__)):
            value = namespace.get(name, UNSET)
            if type(value) is FunctionType:
                if id(value.__code__) not in seen:
                    seen.add(id(value.__code__))
                    pending.append(value)
            elif value is not UNSET and not isinstance(value, _FIXED):
                names[name] = None
    return [(space, (*names,)) for space, names in found.values() if names]
