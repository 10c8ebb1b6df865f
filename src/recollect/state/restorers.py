"""Takes the contents of an object (a list, a dict, attributes, a variable) and puts them back.

A `Restorer` takes contents as a list or a dict, compares them by identity, and puts them back in
place. It calls no user code: no ``==`` (except of keys, as in every dict), no overridden method, no
property, no ``__getattr__``.

The restorers of an object depend on its type: a dict with attributes has two. Enumerations, objects
that other code uses at the same time, and unknown types written in C have none.
"""

from __future__ import annotations

import enum
import gc
import io
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from contextlib import ExitStack
from copy import copy
from functools import partial
from itertools import repeat
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch
from torch import nn

from recollect.state.rng import generator_types

_Tensor = torch.Tensor

#: Types of values that hold nothing that can change.
ATOMS: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, type(...), type),
        *(FunctionType, MethodType, BuiltinFunctionType, ModuleType),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    }
)

#: Stands for a value that is not there.
UNSET: Any = object()


class Restorer:
    """Takes, compares and puts back one kind of contents."""

    def __init__(
        self,
        take: Callable[[Any], Any],
        put: Callable[[Any, Any], None] | None,
        name: str | None = None,
        same: Callable[[Any, Any], bool] | None = None,
        *,
        holds_arguments: bool = True,
    ) -> None:
        """``put`` raises if it is impossible; None if the contents cannot change.

        ``name``: the suffix that names an item, by its key or number; None if there are no items.
        ``same``: whether the contents are still those that ``take`` returned.
        """
        self.take = take
        self.put: Any = put
        self.same = same or self._same_items
        self._name = name
        self.mutable = put is not None
        #: Whether items were passed as such: an iterator among them is an argument.
        self.holds_arguments = holds_arguments

    def _same_items(self, thing: Any, held: Any) -> bool:
        now = self.take(thing)
        if len(now) != len(held) or not all(map(is_, _values(now), _values(held))):
            return False
        return type(held) is not dict or all(map(is_, now, held))

    def items(self, held: Any) -> Collection[Any]:
        """The values among the contents."""
        return () if self._name is None else _values(held)

    def parts(self, held: Any) -> list[tuple[str, Any]]:
        """The same, each with the suffix that names it."""
        if self._name is None:
            return []
        is_dict = type(held) is dict
        pairs = held.items() if is_dict else enumerate(held)
        as_key = self._name.startswith("[") and is_dict
        return [(self._name.format(_short(k) if as_key else k), value) for k, value in pairs]


#: An object, one of its restorers, and what that took.
Entry = tuple[Any, Restorer, Any]


def put_until(stack: ExitStack, thing: Any, restorer: Restorer, held: Any) -> None:
    """Give ``thing`` the contents ``held``, until ``stack`` closes."""
    stack.callback(restorer.put, thing, restorer.take(thing))
    restorer.put(thing, held)


def _values(held: Any) -> Collection[Any]:
    return held.values() if type(held) is dict else held


def _short(key: Any) -> str:
    text = repr(key) if type(key) in ATOMS else f"<{type(key).__name__}>"
    return text if len(text) <= 40 else f"{text[:36]}...{text[-1]}"


# --- containers -----------------------------------------------------------------------------------


def _put_list(thing: Any, held: list[Any]) -> None:
    list.__setitem__(thing, slice(None), held)


def _put_deque(thing: Any, held: list[Any]) -> None:
    deque.clear(thing)
    deque.extend(thing, held)


def _put_set(thing: Any, held: list[Any]) -> None:
    # Items in both stay, and so does the order, as far as a set has one.
    former = {*map(id, held)}
    for item in [item for item in set.__iter__(thing) if id(item) not in former]:
        set.discard(thing, item)
    set.update(thing, held)


def _take_dict(thing: Any, base: Any = dict) -> dict[Any, Any]:
    return thing.copy() if type(thing) is dict else dict(base.items(thing))


def _put_dict(thing: Any, held: dict[Any, Any], base: Any = dict) -> None:
    # Only differing items are touched: another thread may be reading the others.
    for key in [key for key in base.__iter__(thing) if key not in held]:
        base.__delitem__(thing, key)
    present = dict(base.items(thing))
    for key, value in held.items():
        if present.get(key, UNSET) is not value:
            base.__setitem__(thing, key, value)
    if not all(map(is_, base.__iter__(thing), held)):
        base.clear(thing)
        for key, value in held.items():
            base.__setitem__(thing, key, value)


def _items_restorer(base: Any, put: Callable[[Any, Any], None] | None, name: str) -> Restorer:
    return Restorer(lambda thing: [*base.__iter__(thing)], put, name)


def _dict_restorer(base: Any) -> Restorer:
    return Restorer(partial(_take_dict, base=base), partial(_put_dict, base=base), "[{}]")


#: The first base that fits, in the order of derivation.
_BUILT_IN: dict[type, Restorer] = {
    list: _items_restorer(list, _put_list, "[{}]"),
    OrderedDict: _dict_restorer(OrderedDict),
    dict: _dict_restorer(dict),
    set: _items_restorer(set, _put_set, "{{...}}"),
    deque: _items_restorer(deque, _put_deque, "[{}]"),
    tuple: _items_restorer(tuple, None, "[{}]"),
    frozenset: _items_restorer(frozenset, None, "{{...}}"),
}

#: A view of a dict refers to the dict alone.
_VIEW = Restorer(gc.get_referents, None, "")
_VIEWS = frozenset(
    type(getattr(cls(), view)())
    for cls in (dict, OrderedDict)
    for view in ("keys", "values", "items")
)


# --- attributes and variables ---------------------------------------------------------------------


def dict_of(thing: Any) -> Any:
    """The attributes of an object."""
    return object.__getattribute__(thing, "__dict__")  # whatever its class does to attributes


ATTRIBUTES = Restorer(
    lambda thing: _take_dict(dict_of(thing)),
    lambda thing, held: _put_dict(dict_of(thing), held),
    ".{}",
    holds_arguments=False,
)


def _slots_restorer(owners: dict[str, ref[type]]) -> Restorer:
    """For the ``__slots__`` of an object, given by name the class that has each.

    Not by attribute: a subclass may have a property of that name. Descriptors refer to their class,
    so they are looked up, and the class is held weakly.
    """

    def take(thing: Any) -> dict[str, Any]:
        return {name: _read_slot(vars(cls())[name], thing) for name, cls in owners.items()}

    def put(thing: Any, held: dict[str, Any]) -> None:
        for name, value in held.items():
            slot = vars(owners[name]())[name]
            if value is not UNSET:
                slot.__set__(thing, value)
            elif _read_slot(slot, thing) is not UNSET:
                slot.__delete__(thing)

    return Restorer(take, put, ".{}", holds_arguments=False)


def _read_slot(slot: Any, thing: Any) -> Any:
    try:
        return slot.__get__(thing)
    except AttributeError:
        return UNSET


def _take_cell(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned
        return []


def _same_cell(cell: CellType, held: list[Any]) -> bool:
    try:
        return bool(held) and cell.cell_contents is held[0]
    except ValueError:
        return False


def _put_cell(cell: CellType, held: list[Any]) -> None:
    if held:
        cell.cell_contents = held[0]
    else:
        del cell.cell_contents


def _take_defaults(function: FunctionType) -> list[Any]:
    return [function.__defaults__, function.__kwdefaults__]


def _put_defaults(function: Any, held: list[Any]) -> None:
    function.__defaults__, function.__kwdefaults__ = held


#: Attributes of a class that Python keeps for itself.
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "_abc_impl", "__abstractmethods__"})


def _take_class(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if name not in _OF_CLASSES}


def _put_class(cls: type, held: dict[str, Any]) -> None:
    now = _take_class(cls)
    for name in now.keys() - held.keys():
        type.__delattr__(cls, name)
    for name, value in held.items():
        if now.get(name, UNSET) is not value:
            type.__setattr__(cls, name, value)


_Names = tuple[dict[str, Any], Collection[str]]


def _take_variables(names: _Names) -> dict[str, Any]:
    return {name: names[0].get(name, UNSET) for name in names[1]}


def _same_variables(names: _Names, held: dict[str, Any]) -> bool:
    # Without a generator, which would cost as much again: this runs at every call of a region.
    return all(map(is_, map(names[0].get, held, repeat(UNSET)), held.values()))


def _put_variables(names: _Names, held: dict[str, Any]) -> None:
    for name, value in held.items():
        if value is UNSET:
            names[0].pop(name, None)
        elif names[0].get(name, UNSET) is not value:
            names[0][name] = value


CELL = Restorer(_take_cell, _put_cell, "", _same_cell)
CLASS = Restorer(_take_class, _put_class, ".{}")
FUNCTION = Restorer(_take_defaults, _put_defaults, "")
#: Global variables, given a namespace and names in it.
VARIABLES = Restorer(_take_variables, _put_variables, "global {}", _same_variables)


# --- arrays ---------------------------------------------------------------------------------------


def _form_of(thing: Any) -> str:
    if isinstance(thing, (bytearray, array)):
        return f"length {len(thing)}"
    return f"shape {thing.shape}, dtype {thing.dtype}"


def _take_bytes(thing: Any) -> tuple[str, bytes]:
    data = bytes(thing) if isinstance(thing, (bytearray, array)) else thing.tobytes()
    return _form_of(thing), data


def _take_checksum(thing: Any) -> tuple[str, int]:
    form, data = _take_bytes(thing)
    return form, crc32(data)


def _refuse_array(thing: Any, held: tuple[str, int]) -> None:
    now = _form_of(thing)
    raise ValueError("it holds other values" if now == held[0] else f"{held[0]} -> {now}")


def _put_copy(thing: Any, held: Any) -> None:
    is_resizable = isinstance(thing, (bytearray, array))
    if not is_resizable and _form_of(thing) != _form_of(held):
        # Assignment would broadcast and cast.
        raise ValueError(f"{_form_of(held)} -> {_form_of(thing)}")
    thing[slice(None) if is_resizable else ...] = held


#: A bytearray or an array, of ``array`` or numpy. A region compares checksums: a copy for each call
#: would cost too much. A snapshot copies. Objects in a numpy array are
#: compared by address.
ARRAY = Restorer(
    _take_checksum, _refuse_array, same=lambda thing, held: _take_checksum(thing) == held
)
ARRAY_COPY = Restorer(
    copy, _put_copy, same=lambda thing, held: _take_bytes(thing) == _take_bytes(held)
)


# --- which type has which restorers ---------------------------------------------------------------

#: Types without restorers. A file is a log, as a rule, though one can iterate over it.
_CLOSED = (
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, partial),
    *(enum.Enum, torch.optim.Optimizer, io.IOBase),
)

#: Packages whose objects are in use by more than the region: by threads, by the system, by torch's
#: own machinery, which would fail if they changed for a while.
_OPAQUE = frozenset(
    {
        *("_io", "_thread", "_weakrefset", "asyncio", "concurrent", "contextvars", "ctypes", "io"),
        *("logging", "multiprocessing", "queue", "selectors", "socket", "sqlite3", "ssl"),
        *("subprocess", "threading", "torch", "triton", "weakref"),
    }
)
#: Parts of those that are plain data.
_PLAIN_DATA = ("torch.distributions", "torch.nn")

Restorers = tuple[Restorer, ...]

#: In place of restorers: for tensors, for iterators, for modules and random generators.
TENSOR: Restorers = (Restorer(id, None),)
ITERATOR: Restorers = (Restorer(id, None),)
CAPTURED_ELSEWHERE: Restorers = (Restorer(id, None),)

_known: WeakKeyDictionary[type, Restorers] = WeakKeyDictionary()


def restorers_of(cls: type) -> Restorers:
    """The restorers for an object of type ``cls``, or one of the constants above."""
    restorers = _known.get(cls)
    if restorers is None:
        restorers = _known[cls] = _find_restorers(cls)
    return restorers


def _find_restorers(cls: type) -> Restorers:
    if issubclass(cls, _Tensor):
        return TENSOR
    if issubclass(cls, (nn.Module, *generator_types())):
        return CAPTURED_ELSEWHERE
    if issubclass(cls, _CLOSED):
        return ()
    if hasattr(cls, "__next__") or hasattr(cls, "__anext__"):
        return ITERATOR
    attributes = () if _is_opaque(cls) else attribute_restorers(cls)
    content = _content_restorer(cls)
    return attributes if content is None else (content, *attributes)


def _content_restorer(cls: type) -> Restorer | None:
    if cls in _VIEWS:
        return _VIEW
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(cls, numpy.ndarray):
        # A mapped file may be larger than memory: it is not read.
        return None if issubclass(cls, numpy.memmap) else ARRAY
    if issubclass(cls, (bytearray, array)):
        return ARRAY
    return next((restorer for base, restorer in _BUILT_IN.items() if issubclass(cls, base)), None)


def attribute_restorers(cls: type) -> Restorers:
    """The restorers for the attributes of an object of type ``cls``."""
    spaces = [(base, vars(base)) for base in cls.__mro__]
    described = next((space["__dict__"] for _, space in spaces if "__dict__" in space), None)
    owners = {
        name: ref(base)
        for base, space in reversed(spaces)
        if "__slots__" in space
        for name, slot in space.items()
        if type(slot) is MemberDescriptorType
    }
    restorers: Restorers = (_slots_restorer(owners),) if owners else ()
    if isinstance(described, (GetSetDescriptorType, MemberDescriptorType)):  # and no property
        restorers = (ATTRIBUTES, *restorers)
    return restorers


def is_made_in_python(cls: type) -> bool:
    """Whether an iterator's ``__next__`` is written in Python: its attributes are its state."""
    return type(getattr(cls, "__next__", None)) is FunctionType and not _is_opaque(cls)


def _is_opaque(cls: type) -> bool:
    module = str(cls.__module__)  # anything, if a class sets it
    return module.partition(".")[0] in _OPAQUE and not module.startswith(_PLAIN_DATA)
