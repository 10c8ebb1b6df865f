"""A context after which everything that some code can get at is as it was before.

Unlike `Reach`, which is asked at every call of a region, this may take its time: it looks into
everything that can be found from where it begins (modules, hooks, closures, optimizers, classes,
global variables), as deep as that goes, and writes down what each thing holds. At the end each
thing that holds something else is given its former contents, and so is the memory of tensors.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from operator import is_not
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
from recollect.state.argument_snapshot import Contents
from recollect.state.code import (
    CELL,
    CLASS,
    FUNCTION,
    VARIABLES,
    UsedUp,
    cached_by,
    functions_in,
    names_in,
    successor,
    variables_of,
)
from recollect.state.flags import read_flags, write_flags
from recollect.state.memories import Memories, WriteLog, Written
from recollect.state.restorers import (
    ATOMS,
    CARED_FOR,
    ITERATOR,
    Kind,
    attribute_kinds,
    is_made_in_python,
    kinds_of,
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
    iterator = Contents().look_into([*args, *kwargs.values()])
    if iterator is not None:
        raise TypeError(
            f"an argument is an iterator ({type(iterator).__name__}), which one run would use up, "
            "and this is not the only one. Pass a list of its items, `list(...)`"
        )


class Snapshot:
    """What can be got at from ``roots``, by name.

    ``trained``: parameters that are copied when an op first writes to them (see `log`), unless they
    are found to be trained by an optimizer or a hook; None stands for all. ``written``: what is
    copied before nevertheless, since ops were seen to write to it; None stands for all.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        trained: Iterable[_Tensor] | None,
        written: Collection[Written] | None = (),
    ) -> None:
        #: A thing, its kind, and what it held.
        self._entries: list[tuple[Any, Kind, Any]] = []
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
        self._memories = Memories()
        self._trained = None if trained is None else list(trained)
        self._written = written
        #: All tensors that were found.
        self.tensors: list[_Tensor] = []
        self._roots = {id(value): name for name, value in roots.items()}
        with torch.inference_mode(False):
            self._find([*roots.values(), *global_hooks()])

    # --- what there is ----------------------------------------------------------------------------

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
        self._entries += [(space, VARIABLES, taken) for space, taken in self._variables.values()]

    @property
    def is_whole(self) -> bool:
        """Whether everything was looked into."""
        return len(self._found) < LIMIT

    def _push(self, values: Iterable[Any], holder: Any) -> None:
        address = None if holder is None else id(holder)
        self._pending += [(value, address) for value in values if type(value) not in _ATOMS]

    def _take(self, thing: Any, kind: Kind) -> None:
        taken = kind.take(thing) if kind.nbytes(thing) > LARGE else kind.hold(thing)
        self._entries.append((thing, kind, taken))
        self._push(kind.items(taken), thing)

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
        kinds = kinds_of(cls)
        if kinds is ITERATOR and not is_made_in_python(cls):
            self._iterators.append((value, repr(value) if cls is count else ""))
            return
        if kinds in (ITERATOR, CARED_FOR) or _is_open(cls):
            kinds = tuple(attribute_kinds(cls))
        for kind in kinds:
            self._take(value, kind)
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
        self._memories.add(tensor)
        self._push([vars(tensor), *tensor_hooks(tensor)], tensor)
        if tensor.is_leaf and tensor.requires_grad:
            self._push([get_gradient_edge(tensor).node], tensor)

    def _look_into_function(self, function: FunctionType) -> None:
        cells = function.__closure__ or ()
        namespace = function.__globals__.get("__name__")
        if _package(namespace) == "recollect":  # whose variables are its own
            self._push([value for cell in cells for value in CELL.items(CELL.take(cell))], function)
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
            self._memories.copy_written(self._written or ())
            self._memories.copy(self._spared())
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
        return WriteLog(self._memories)

    @property
    def written(self) -> list[Written]:
        """What ops were seen to write to."""
        return self._memories.written

    def _exchange(self) -> None:
        """Those who hold an iterator hold another one until the end, and use that up."""
        others: dict[int, Any] = {}
        for each, _ in self._iterators:
            other = successor(each)
            others[id(each)] = other or UsedUp(self._name(each), type(each).__name__)
        for thing, kind, taken in self._entries if others else ():
            items = kind.items(taken) if kind.mutable else ()
            exchanged = [_exchanged(item, others) for item in items]
            if any(map(is_not, items, exchanged)):
                is_dict = isinstance(taken, dict)
                kind.put(thing, dict(zip(taken, exchanged, strict=True)) if is_dict else exchanged)

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
        """Give everything what it held. Yields what could not be given that."""
        for thing, kind, taken in self._entries:
            if kind.mutable and not kind.same(thing, taken):
                try:
                    kind.put(thing, taken)
                except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
                    yield thing
        yield from self._memories.restore()
        for cache, before in self._caches:
            if before.currsize == before.misses == 0:
                cache.cache_clear()
        yield from (each for each, text in self._iterators if text and repr(each) != text)

    # --- names ------------------------------------------------------------------------------------

    def _name(self, thing: Any) -> str:
        """How to get at ``thing``, for the user."""
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
        entries = [(kind, taken) for thing, kind, taken in self._entries if thing is holder]
        parts = [part for kind, taken in entries for part in kind.parts(taken)]
        return next((name for name, part in parts if part is value), "")


#: Methods that are called by the name of the class, and others that a step has no use for.
_MAKES = frozenset({"__init__", "__new__", "__post_init__"})
_RARE = _MAKES | {
    "__copy__",
    "__deepcopy__",
    "__del__",
    "__dir__",
    "__getstate__",
    "__init_subclass__",
    "__reduce__",
    "__reduce_ex__",
    "__repr__",
    "__setstate__",
    "__str__",
}
#: The types of what classes have as methods, of which those are looked at that are called.
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


def _parts_of(value: Any, cls: type) -> list[Any] | None:
    """What a thing leads to that holds nothing else; None if it may."""
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


def _exchanged(value: Any, others: dict[int, Any]) -> Any:
    """``value``, with iterators in it exchanged, if it has to be another one for that."""
    if id(value) in others:
        return others[id(value)]
    if type(value) is tuple:
        items = tuple([_exchanged(item, others) for item in value])
        return items if any(map(is_not, items, value)) else value
    if type(value) is MethodWrapperType and id(value.__self__) in others:
        return getattr(others[id(value.__self__)], value.__name__)
    if type(value) is partial:
        args, keywords = (
            _exchanged(value.args, others),
            _exchanged((*value.keywords.values(),), others),
        )
        if args is not value.args or any(map(is_not, keywords, value.keywords.values())):
            return partial(value.func, *args, **dict(zip(value.keywords, keywords, strict=True)))
    return value
