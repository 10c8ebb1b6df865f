"""A context that restores everything that some code can reach (P1).

`plan` and `explain` run a step in it. Unlike `Reachable`, which a region searches at every call, a
`Snapshot` may take its time: it visits everything that can be found from its roots (modules, hooks,
closures, optimizers, classes, global variables) and takes the contents of each object by its
restorers. At the end, changed objects and tensors get their former contents back.
"""

from __future__ import annotations

import functools
import gc
import itertools
import re
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from recollect._torch.modes import any_autocast_enabled, function_modes, set_function_modes
from recollect._torch.modules import global_hooks
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import memory_key, tensor_hooks
from recollect.errors import CheckpointError
from recollect.state.ambient import read_autocast, write_autocast
from recollect.state.flags import read_flags, write_flags
from recollect.state.iterators import StandIn, is_used_up, successor, with_exchanged
from recollect.state.reachable import lazy_module, names_in
from recollect.state.restorers import (
    ARRAY,
    ARRAY_COPY,
    ATOMS,
    CAPTURED_ELSEWHERE,
    CELL,
    CLASS,
    FUNCTION,
    ITERATOR,
    UNSET,
    VARIABLES,
    Entry,
    Restorer,
    attribute_restorers,
    restorers_of,
)
from recollect.state.rng import generator_types, read_streams, settle_streams, write_streams
from recollect.state.tensor_snapshot import TensorSnapshot, WriteLog, Written
from recollect.state.tensors import nbytes

_Tensor = torch.Tensor
#: How many objects are visited.
LIMIT = 200_000
#: Bytes above which a tensor that is no parameter is copied at its first write only, and an array
#: is compared, and not put back.
LARGE = 256 << 20

_ATOMS = ATOMS - {FunctionType, MethodType, BuiltinFunctionType, type}
_WEAK = (WeakKeyDictionary, WeakValueDictionary, WeakSet)
_CACHE = type(functools.lru_cache(len))
#: The types of methods. Those that are called are visited.
_METHODS = (FunctionType, staticmethod, classmethod, property)
#: Types of objects without state except the objects that they refer to.
_TRANSPARENT = {*_METHODS[1:], MethodType, BuiltinFunctionType, MethodWrapperType}
#: Packages whose functions and classes hold no state of the user.
_CLOSED = frozenset({"torch", "recollect", "numpy", *sys.stdlib_module_names})
#: Parts of these packages whose objects do.
_OPEN = ("torch.nn.", "torch.optim.", "torch.distributions.", "torch.amp.", "torch.cuda.amp.")
#: What torch calls of the user's by name.
_CALLED_BY_TORCH = ("forward", "backward", "setup_context", "step", "pack_hook", "unpack_hook")


def _package(name: Any) -> str:
    return str(name).partition(".")[0]


def _is_closed(name: Any) -> bool:
    return _package(name) in _CLOSED


class Snapshot:
    """Everything that is reachable from ``roots``, which are given by name.

    ``parameters`` (None: all) and large tensors are copied when an op first writes to them (see
    `log`), unless an optimizer or a hook is found that trains them. ``written``: storages to copy
    before nevertheless, since ops were seen to write to them; None stands for all.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        parameters: Iterable[_Tensor] | None = None,
        written: Collection[Written] | None = (),
    ) -> None:
        self._entries: list[Entry] = []
        self._variables: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        #: By id: an object, and the id of the object that holds it.
        self._found: dict[int, tuple[Any, int | None]] = {}
        self._pending: list[tuple[Any, int | None]] = []
        #: The names that code uses; and functions of classes whose names it does not use.
        self._called: set[str] = {*_CALLED_BY_TORCH}
        self._idle: dict[str, list[Any]] = {}
        self._generators: list[Any] = []
        self._iterators: list[tuple[Any, str]] = []
        self._caches: list[tuple[Any, Any]] = []
        self._optimizers: list[Any] = []
        #: What to do last: give random streams, flags and modes their state.
        self._around = ExitStack()
        self._tensor_snapshot = TensorSnapshot()
        self._parameters = None if parameters is None else list(parameters)
        self._written = written
        #: All tensors that were found.
        self.tensors: list[_Tensor] = []
        self._roots = {id(value): name for name, value in roots.items()}
        with torch.inference_mode(False):
            self._search([*roots.values(), *global_hooks()])

    # --- search -----------------------------------------------------------------------------------

    @property
    def caches(self) -> list[Any]:
        """All of ``functools`` that were found."""
        return [cache for cache, _ in self._caches]

    def _search(self, values: Collection[Any]) -> None:
        self._push(values, None)
        for value, holder in self._pending:  # which grows meanwhile
            if id(value) not in self._found and self.is_whole:
                self._found[id(value)] = value, holder
                self._visit(value, type(value))
        self._pending = []
        named = [((space, (*held,)), held) for space, held in self._variables.values()]
        self._entries += [(names, VARIABLES, held) for names, held in named]

    @property
    def is_whole(self) -> bool:
        """Whether everything was visited."""
        return len(self._found) < LIMIT

    def _push(self, values: Iterable[Any], holder: Any) -> None:
        address = None if holder is None else id(holder)
        self._pending += [(value, address) for value in values if type(value) not in _ATOMS]

    def _take(self, thing: Any, restorer: Restorer) -> None:
        if restorer is ARRAY and getattr(thing, "nbytes", 0) <= LARGE:
            restorer = ARRAY_COPY
        held = restorer.take(thing)
        self._entries.append((thing, restorer, held))
        self._push(restorer.items(held), thing)

    def _visit(self, value: Any, cls: type) -> None:
        # By type: `isinstance` may run code of the user's (weak references).
        if issubclass(cls, _Tensor):
            self._visit_tensor(value)
        elif cls is FunctionType:
            self._visit_function(value)
        elif cls is CellType:
            self._take(value, CELL)
        elif issubclass(cls, type):
            self._visit_class(value)
        elif issubclass(cls, generator_types()):
            self._generators.append(value)
        elif (parts := _parts_of(value, cls)) is not None:
            self._push(parts, value)
        elif cls is _CACHE:
            self._visit_cache(value)
        elif _package(cls.__module__) != "recollect" or issubclass(cls, nn.Module):
            self._visit_object(value, cls)

    def _visit_object(self, value: Any, cls: type) -> None:
        if is_used_up(value):
            self._iterators.append((value, repr(value) if cls is itertools.count else ""))
            return
        restorers = restorers_of(cls)
        is_open = str(cls.__module__).startswith(_OPEN) or issubclass(cls, Optimizer)
        if restorers in (ITERATOR, CAPTURED_ELSEWHERE) or is_open:
            restorers = attribute_restorers(cls)
        for restorer in restorers:
            self._take(value, restorer)
        if issubclass(cls, dict):
            self._push(dict.keys(value), value)
        elif issubclass(cls, nn.Module):
            self._visit_module(value)
        elif issubclass(cls, Optimizer):
            self._optimizers.append(value)
        self._push([cls], value)

    def _visit_module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self._push([*module.parameters(), *module.buffers()], module)
        elif any(map(is_lazy, module.parameters(recurse=False))):
            raise lazy_module(self._name(module), module)

    def _visit_tensor(self, tensor: _Tensor) -> None:
        self.tensors.append(tensor)
        self._tensor_snapshot.add(tensor)
        self._push([vars(tensor), *tensor_hooks(tensor)], tensor)
        if tensor.is_leaf and tensor.requires_grad and not tensor.is_inference():
            self._push([get_gradient_edge(tensor).node], tensor)

    def _visit_function(self, function: FunctionType) -> None:
        cells = function.__closure__ or ()
        namespace = function.__globals__.get("__name__")
        if _package(namespace) == "recollect":  # whose variables are its own
            self._push([value for cell in cells for value in CELL.take(cell)], function)
            return
        self._take(function, FUNCTION)
        self._push([vars(function), *cells], function)
        if _is_closed(namespace):
            return
        for space, name, value in _variables_of(function):
            taken = self._variables.setdefault(id(space), (space, {}))[1]
            if name not in taken:
                taken[name] = value
                self._push([value], function)
        names = names_in(function.__code__) - self._called
        self._called |= names
        for name in names & self._idle.keys():
            self._push(self._idle.pop(name), function)

    def _visit_cache(self, cache: Any) -> None:
        self._caches.append((cache, cache.cache_info()))
        held = gc.get_referents(cache)
        # An unbounded cache has its results in a dict, which must not be changed from outside.
        results = [value for each in held if type(each) is dict for value in each.values()]
        self._push([each for each in held if type(each) is not dict] + results, cache)

    def _visit_class(self, cls: type) -> None:
        self._push([*cls.__bases__, type(cls)], cls)
        if _is_closed(cls.__module__):
            return
        taken = CLASS.take(cls)
        self._entries.append((cls, CLASS, taken))
        for name, member in taken.items():
            called_as = cls.__name__ if name in _MAKES else name
            is_called = called_as in self._called or (name not in _RARE and name[:2] == "__")
            if is_called or type(member) not in _METHODS:
                self._push([member], cls)
            else:
                self._idle.setdefault(called_as, []).append(member)

    # --- before and after -------------------------------------------------------------------------

    def __enter__(self) -> Snapshot:
        with torch.inference_mode(False):
            self._tensor_snapshot.copy_written(self._written or ())
            self._tensor_snapshot.copy(self._copied_at_first_write())
        self._around.callback(_leave_modes, function_modes(), read_autocast())
        self._around.callback(write_flags, read_flags())
        streams = read_streams(self._generators)
        self._around.callback(lambda: write_streams(settle_streams(streams)))
        self._replace_iterators()
        return self

    def _copied_at_first_write(self) -> set[int | None]:
        """The storages that the step is not expected to write to."""
        if self._written is None:
            return set()
        found = [t for t in self.tensors if isinstance(t, nn.Parameter)]
        parameters = found if self._parameters is None else self._parameters
        large = [t for t in self.tensors if not isinstance(t, nn.Parameter) and nbytes(t) > LARGE]
        idle = [*large, *(t for t in parameters if tensor_hooks(t)[1] is None)]
        trained = tree_leaves(
            [[each.param_groups, [*each.state.values()]] for each in self._optimizers]
        )
        keys = {memory_key(tensor) for tensor in idle}
        return keys - {memory_key(each) for each in trained if isinstance(each, _Tensor)}

    def log(self) -> WriteLog:
        """A mode for the first step: all tensors that its ops write to are put back."""
        return WriteLog(self._tensor_snapshot)

    @property
    def written(self) -> list[Written]:
        """The storages that ops were seen to write to, for a later snapshot."""
        return self._tensor_snapshot.written

    def _replace_iterators(self) -> None:
        """Until the end, holders of an iterator hold a copy of it, or a stand-in that raises."""
        others: dict[int, Any] = {}
        for each, _ in self._iterators:
            text = _USED_UP.format(name=self._name(each), kind=type(each).__name__)
            others[id(each)] = successor(each) or StandIn(each, partial(TypeError, text))
        for thing, restorer, held in self._entries if others else ():
            if restorer.mutable and restorer.items(held):
                replaced = with_exchanged(held, others)
                if replaced is not held:
                    restorer.put(thing, replaced)

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        with self._around, torch.inference_mode(False):
            lost = [*self._put_back()]
        if lost and exc is None:
            names = [self._name(thing) for thing in lost]
            listed = ", ".join(names[:_LISTED]) + ", ..." * (len(names) > _LISTED)
            raise CheckpointError(_LOST.format(names=listed))

    def _put_back(self) -> Iterator[Any]:
        """Restore all contents. Yields the objects for which that is impossible."""
        for thing, restorer, held in self._entries:
            if restorer.mutable and not restorer.same(thing, held):
                try:
                    restorer.put(thing, held)
                except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
                    yield thing
        yield from self._tensor_snapshot.restore()
        for cache, before in self._caches:
            if before.currsize == before.misses == 0:
                cache.cache_clear()
        yield from (each for each, text in self._iterators if text and repr(each) != text)

    # --- names ------------------------------------------------------------------------------------

    def _name(self, thing: Any) -> str:
        """The path to ``thing`` in an error."""
        parts: list[str] = []
        address: int | None = id(thing)
        while address is not None and address in self._found:
            value, holder = self._found[address]
            if address in self._roots:
                parts.append(self._roots[address])
            elif holder is not None:
                parts.append(self._part(self._found[holder][0], value))
            address = holder
        return _PLACE.sub(r".\1", "".join(reversed(parts)))

    def _part(self, holder: Any, value: Any) -> str:
        """What ``value`` is in ``holder``."""
        if type(holder) is FunctionType:
            named = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
            variables = [name for name, cell in named if cell is value]
            variables += [n for n, v in holder.__globals__.items() if v is value]
            return f" ({holder.__qualname__})" + "".join(f": {name}" for name in variables[:1])
        entries = [(restorer, held) for thing, restorer, held in self._entries if thing is holder]
        parts = [part for restorer, held in entries for part in restorer.parts(held)]
        return next((name for name, part in parts if part is value), "")


#: Methods that are called by the name of the class, and others that a step has no use for.
_MAKES = frozenset({"__init__", "__new__", "__post_init__"})
_RARE = _MAKES | {
    *("__copy__", "__deepcopy__", "__del__", "__dir__", "__getstate__", "__init_subclass__"),
    *("__reduce__", "__reduce_ex__", "__repr__", "__setstate__", "__str__"),
}
#: Where in a module it has its parts.
_PLACE = re.compile(r"\._(?:parameters|buffers|modules)\['([^']*)'\]")
_LISTED = 5

_LOST = (
    "the step has changed a value that cannot be put back: {names}. Either something other than a "
    "torch operation wrote to it (numpy, compiled code), or a later step wrote to it and the first "
    "one did not. Remove the hook or the attribute while the plan is made, or plan when all steps "
    "do the same. Then set the value again: it has changed."
)

_USED_UP = (
    "{name} is an iterator ({kind}), which this step uses up. Planning runs the step several times "
    "and must leave everything as it was: hold a list of the items and the number of the next one, "
    "or take the item outside and pass it as an argument"
)


def _leave_modes(modes: list[Any], autocast: Any) -> None:
    if any_autocast_enabled():
        torch.clear_autocast_cache()  # casts of weights, with their history
    write_autocast(autocast)
    if function_modes() != modes:
        set_function_modes(modes)


def _parts_of(value: Any, cls: type) -> list[Any] | None:
    """The values that an object refers to, if it has no other contents; else None."""
    if cls in _TRANSPARENT or issubclass(cls, partial):
        return gc.get_referents(value)
    if issubclass(cls, ReferenceType):
        return [value()]
    if issubclass(cls, (*_WEAK, threading.local)):
        return [value.data if issubclass(cls, _WEAK) else value.__dict__]  # of this thread
    if hasattr(cls, "next_functions"):  # a node of a graph: its hooks are all it refers to
        return [each for each in gc.get_referents(value) if isinstance(each, dict)]
    return None


def _variables_of(function: FunctionType) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The global variables that a function may use: namespace, name, value or `UNSET`.

    Those of modules that it names, too (``config.calls``), unless a module is closed.
    """
    names = names_in(function.__code__)
    pending, seen = [function.__globals__], set()
    while pending:
        namespace = pending.pop()
        seen.add(id(namespace))
        for name in names:
            value = namespace.get(name, UNSET)
            if not isinstance(value, ModuleType):
                yield namespace, name, value
            elif id(vars(value)) not in seen and not _is_closed(value.__name__):
                pending.append(vars(value))
