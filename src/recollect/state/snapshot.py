"""A context after which everything that some code can reach is as it was before (P1).

`plan` and `explain` run a step in it. Unlike `Reachable`, which a region searches at every call, it
may take its time: it looks into everything that can be found from its roots (modules, hooks,
closures, optimizers, classes, global variables), as deep as that goes, and takes the contents of
each thing by its restorers, those that the arguments of a region have. At the end each thing that
has changed gets its former contents, and so does the memory of tensors.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    TracebackType,
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
from recollect._torch.tensors import memory_key, tensor_hooks
from recollect.errors import CheckpointError
from recollect.state.ambient import read_autocast, write_autocast
from recollect.state.argument_snapshot import ArgumentSnapshot
from recollect.state.code import cached_by, functions_in, names_in, variables_of
from recollect.state.flags import read_flags, write_flags
from recollect.state.iterators import StandIn, exchanged, is_used_up, successor, with_replaced
from recollect.state.memories import TensorSnapshot, WriteLog, Written
from recollect.state.restorers import (
    ATOMS,
    CAPTURED_ELSEWHERE,
    CELL,
    CLASS,
    FUNCTION,
    ITERATOR,
    VARIABLES,
    Entry,
    Restorer,
    attribute_restorers,
    hold,
    restorers_of,
)
from recollect.state.streams import generator_types, read_streams, settle_streams, write_streams
from recollect.state.tensors import nbytes

__all__ = ["LIMIT", "Snapshot", "check_arguments"]

_Tensor = torch.Tensor
#: How many things are looked into.
LIMIT = 200_000
#: Bytes from which a tensor that is no parameter is copied at its first write only, and an array is
#: not copied.
LARGE = 256 << 20

_ATOMS = ATOMS - {FunctionType, MethodType, BuiltinFunctionType, type}
_WEAK = (WeakKeyDictionary, WeakValueDictionary, WeakSet)
_BOUND = (MethodType, BuiltinFunctionType, MethodWrapperType)
#: Packages whose functions and classes keep no state of the user's.
_CLOSED = frozenset({"torch", "recollect", "numpy", *sys.stdlib_module_names})
#: Parts of those whose objects do.
_OPEN = ("torch.nn.", "torch.optim.", "torch.distributions.", "torch.amp.", "torch.cuda.amp.")
#: What torch calls of the user's by name.
_CALLED_BY_TORCH = ("forward", "backward", "setup_context", "step", "pack_hook", "unpack_hook")


def _package(name: Any) -> str:
    return str(name).partition(".")[0]


def _is_closed(name: Any) -> bool:
    return _package(name) in _CLOSED


def _is_open(cls: type) -> bool:
    """Whether objects of type ``cls`` are looked into, though others of torch are not."""
    return str(cls.__module__).startswith(_OPEN) or issubclass(cls, Optimizer)


def check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse iterators among the arguments of what is to be run more than once."""
    iterator = ArgumentSnapshot().add([*args, *kwargs.values()])
    if iterator is not None:
        raise TypeError(
            f"an argument is an iterator ({type(iterator).__name__}), which one run would use up, "
            "and this is not the only one. Pass a list of its items, `list(...)`"
        )


class Snapshot:
    """Everything that is reachable from ``roots``, which are given by name.

    ``trained``: parameters that are copied when an op first writes to them (see `log`), unless they
    are found to be trained by an optimizer or a hook; None stands for all. ``written``: memory that
    is copied before nevertheless, since ops were seen to write to it; None stands for all.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        trained: Iterable[_Tensor] | None,
        written: Collection[Written] | None = (),
    ) -> None:
        self._entries: list[Entry] = []
        self._variables: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        #: By address: what was found, and the address of what it was found in.
        self._found: dict[int, tuple[Any, int | None]] = {}
        self._pending: list[tuple[Any, int | None]] = []
        #: The names that code uses; and functions of classes whose names it does not use.
        self._called: set[str] = {*_CALLED_BY_TORCH}
        self._idle: dict[str, list[Any]] = {}
        self._generators: list[Any] = []
        self._iterators: list[tuple[Any, str]] = []
        self._caches: list[tuple[Any, Any]] = []
        self._optimizers: list[Any] = []
        self._memory = TensorSnapshot()
        self._trained = None if trained is None else list(trained)
        self._written = written
        #: All tensors that were found.
        self.tensors: list[_Tensor] = []
        self._roots = {id(value): name for name, value in roots.items()}
        with torch.inference_mode(False):
            self._find([*roots.values(), *global_hooks()])

    # --- search -----------------------------------------------------------------------------------

    @property
    def caches(self) -> list[Any]:
        """All of ``functools`` that were found."""
        return [cache for cache, _ in self._caches]

    def _find(self, values: Collection[Any]) -> None:
        self._push(values, None)
        for value, holder in self._pending:  # which grows meanwhile
            if id(value) not in self._found and self.is_whole:
                self._found[id(value)] = value, holder
                self._look_into(value, type(value))
        self._pending = []
        named = [((space, (*held,)), held) for space, held in self._variables.values()]
        self._entries += [(names, VARIABLES, held) for names, held in named]

    @property
    def is_whole(self) -> bool:
        """Whether everything was looked into."""
        return len(self._found) < LIMIT

    def _push(self, values: Iterable[Any], holder: Any) -> None:
        address = None if holder is None else id(holder)
        self._pending += [(value, address) for value in values if type(value) not in _ATOMS]

    def _take(self, thing: Any, restorer: Restorer) -> None:
        held = hold(thing, restorer, LARGE)
        self._entries.append((thing, restorer, held))
        self._push(restorer.items(held), thing)

    def _look_into(self, value: Any, cls: type) -> None:
        # By type: to ask the value itself what it is may run code of the user's (weak references).
        if issubclass(cls, _Tensor):
            self._look_into_tensor(value)
        elif cls is FunctionType:
            self._look_into_function(value)
        elif cls is CellType:
            self._take(value, CELL)
        elif issubclass(cls, type):
            self._look_into_class(value)
        elif issubclass(cls, generator_types()):
            self._generators.append(value)
        elif (parts := _parts_of(value, cls)) is not None:
            self._push(parts, value)
        elif (cached := cached_by(value)) is not None:
            self._caches.append((value, value.cache_info()))
            self._push(cached, value)
        elif _package(cls.__module__) != "recollect" or issubclass(cls, nn.Module):
            self._look_into_object(value, cls)

    def _look_into_object(self, value: Any, cls: type) -> None:
        if is_used_up(value):
            self._iterators.append((value, repr(value) if cls is count else ""))
            return
        restorers = restorers_of(cls)
        if restorers in (ITERATOR, CAPTURED_ELSEWHERE) or _is_open(cls):
            restorers = attribute_restorers(cls)
        for restorer in restorers:
            self._take(value, restorer)
        if issubclass(cls, dict):
            self._push(dict.keys(value), value)
        elif issubclass(cls, nn.Module):
            self._look_into_module(value)
        elif issubclass(cls, Optimizer):
            self._optimizers.append(value)
        self._push([cls], value)

    def _look_into_module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self._push([*module.parameters(), *module.buffers()], module)
        elif any(map(is_lazy, module.parameters(recurse=False))):
            raise ValueError(
                f"{self._name(module)} is a {type(module).__name__} with parameters that are not "
                "made yet: a lazy module makes them in its first call, which cannot be repeated. "
                "Run the model once before (with torch.no_grad(): model(x))."
            )

    def _look_into_tensor(self, tensor: _Tensor) -> None:
        self.tensors.append(tensor)
        self._memory.add(tensor)
        self._push([vars(tensor), *tensor_hooks(tensor)], tensor)
        if tensor.is_leaf and tensor.requires_grad:
            self._push([get_gradient_edge(tensor).node], tensor)

    def _look_into_function(self, function: FunctionType) -> None:
        cells = function.__closure__ or ()
        namespace = function.__globals__.get("__name__")
        if _package(namespace) == "recollect":  # whose variables are its own
            self._push([value for cell in cells for value in CELL.take(cell)], function)
            return
        self._take(function, FUNCTION)
        self._push([vars(function), *cells], function)
        if _is_closed(namespace):
            return
        for space, name, value in variables_of(function, _is_closed):
            taken = self._variables.setdefault(id(space), (space, {}))[1]
            if name not in taken:
                taken[name] = value
                self._push([value], function)
        names = names_in(function.__code__) - self._called
        self._called |= names
        for name in names & self._idle.keys():
            self._push(self._idle.pop(name), function)

    def _look_into_class(self, cls: type) -> None:
        self._push([*cls.__bases__, type(cls)], cls)
        if _is_closed(cls.__module__):
            return
        taken = CLASS.take(cls)
        self._entries.append((cls, CLASS, taken))
        for name, member in taken.items():
            called_as = cls.__name__ if name in _MAKES else name
            is_called = called_as in self._called or (name not in _RARE and name[:2] == "__")
            if is_called or type(member) not in _METHODS:
                self._push(functions_in(member), cls)
            else:
                self._idle.setdefault(called_as, []).extend(functions_in(member))

    # --- before and after -------------------------------------------------------------------------

    def __enter__(self) -> Snapshot:
        with torch.inference_mode(False):
            self._memory.copy_written(self._written or ())
            self._memory.copy(self._spared())
        self._streams = read_streams(self._generators)
        self._flags, self._autocast = read_flags(), read_autocast()
        self._modes = function_modes()
        self._exchange()
        return self

    def _spared(self) -> set[int | None]:
        """The storages that are copied at the first write to them."""
        if self._written is None:
            return set()
        parameters = [t for t in self.tensors if isinstance(t, nn.Parameter)]
        trained = parameters if self._trained is None else self._trained
        idle = [t for t in trained if tensor_hooks(t)[1] is None]
        large = [t for t in self.tensors if not isinstance(t, nn.Parameter) and nbytes(t) > LARGE]
        groups = [group for each in self._optimizers for group in each.param_groups]
        states = [state for each in self._optimizers for state in each.state.values()]
        busy = [t for group in groups for t in group["params"]]
        busy += [v for each in states if isinstance(each, dict) for v in each.values()]
        keys = {memory_key(t) for t in [*idle, *large]}
        return keys - {memory_key(t) for t in busy if isinstance(t, _Tensor)}

    def log(self) -> WriteLog:
        """A mode for the first step: what ops write to in it is put back, whatever it is."""
        return WriteLog(self._memory)

    @property
    def written(self) -> list[Written]:
        """What ops were seen to write to."""
        return self._memory.written

    def _exchange(self) -> None:
        """Until the end, holders of an iterator hold a copy of it, or a stand-in that raises."""
        others: dict[int, Any] = {}
        for each, _ in self._iterators:
            text = _USED_UP.format(name=self._name(each), kind=type(each).__name__)
            others[id(each)] = successor(each) or StandIn(each, partial(TypeError, text))
        for thing, restorer, held in self._entries if others else ():
            if restorer.mutable and restorer.items(held):
                replaced = with_replaced(held, partial(exchanged, others=others))
                if replaced is not held:
                    restorer.put(thing, replaced)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with torch.inference_mode(False):
            lost = [*self._put_back()]
        write_streams(settle_streams(self._streams))
        write_flags(self._flags)
        if any_autocast_enabled():
            torch.clear_autocast_cache()  # casts of weights, with their history
        write_autocast(self._autocast)
        if function_modes() != self._modes:
            set_function_modes(self._modes)
        if lost and exc is None:
            names = [self._name(thing) for thing in lost]
            listed = ", ".join(names[:_LISTED]) + ", ..." * (len(names) > _LISTED)
            raise CheckpointError(_LOST.format(names=listed))

    def _put_back(self) -> Iterator[Any]:
        """Put all contents back. Yields the things for which that is impossible."""
        for thing, restorer, held in self._entries:
            if restorer.mutable and not restorer.same(thing, held):
                try:
                    restorer.put(thing, held)
                except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
                    yield thing
        yield from self._memory.restore()
        for cache, before in self._caches:
            if before.currsize == before.misses == 0:
                cache.cache_clear()
        yield from (each for each, text in self._iterators if text and repr(each) != text)

    # --- names ------------------------------------------------------------------------------------

    def _name(self, thing: Any) -> str:
        """The path to ``thing``, for the user."""
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
#: The types of methods, of which those that are called are looked into.
_METHODS = (FunctionType, staticmethod, classmethod, property)
#: Where in a module it has its parts.
_PLACE = re.compile(r"\._(?:parameters|buffers|modules)\['([^']*)'\]")
_LISTED = 5

_LOST = (
    "the step has changed what cannot be put back: {names}. Either no operation of torch wrote to "
    "it (numpy, compiled code), or the first step did not, and a later one did. Take the hook or "
    "the attribute away while the plan is made, or make it when the next step does the same as the "
    "one after it; then set the value again, which is not what it was."
)

_USED_UP = (
    "{name} is an iterator ({kind}), which this step uses up. The step is run several times here, "
    "and must leave everything as it was: hold a list of the items and the number of the next one, "
    "or take the item outside and pass it as an argument"
)


def _parts_of(value: Any, cls: type) -> list[Any] | None:
    """The values that a thing refers to, if that is all there is to it; else None."""
    if cls in _BOUND:
        return [value.__self__, getattr(value, "__func__", None)]
    if issubclass(cls, partial):
        return [value.func, value.args, value.keywords]
    if issubclass(cls, ReferenceType):
        return [value()]
    if issubclass(cls, (*_WEAK, threading.local)):
        return [value.data if issubclass(cls, _WEAK) else value.__dict__]  # of this thread
    if hasattr(cls, "next_functions"):  # a node of a graph: its hooks are all it refers to
        return [each for each in gc.get_referents(value) if isinstance(each, dict)]
    return None
