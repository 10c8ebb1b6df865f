"""How the contents of a list, a dict, an object, a variable are taken, compared and put back.

Contents are taken as a list or a dict and compared by identity. No code of the user's is called: no
``==`` (except of keys, as in every dict), no method that a subclass may have overridden, no
property, no ``__getattr__``.

The restorers of an object depend on its type: a dict with attributes has two. Some types are left
alone. Enumerations do not change; the objects of some packages are in use by more than a region;
nothing is known of types that are written in C and not named here.
"""

from __future__ import annotations

import enum
import gc
import io
import math
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from functools import partial
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

from recollect._torch.autograd import set_version
from recollect._torch.modes import unobserved
from recollect.state.streams import generator_types
from recollect.state.tensors import LARGE, same_values

__all__ = [
    "ATOMS",
    "BUFFER",
    "CAPTURED_ELSEWHERE",
    "CELL",
    "CLASS",
    "DICT",
    "Entry",
    "FUNCTION",
    "ITERATOR",
    "Restorer",
    "Restorers",
    "SMALL_TENSOR",
    "TENSOR",
    "UNSET",
    "VARIABLES",
    "attribute_restorers",
    "difference",
    "hold",
    "is_made_in_python",
    "is_whole",
    "restorers_of",
]

_Tensor = torch.Tensor

#: Types of values that hold nothing that can change.
ATOMS: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, type(...), type),
        *(FunctionType, MethodType, BuiltinFunctionType, ModuleType),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    }
)

#: In the place of a value that is not there.
UNSET = object()


class Restorer:
    """Takes, compares and puts back the contents of one kind of thing."""

    def __init__(
        self,
        take: Callable[[Any], Any],
        put: Callable[[Any, Any], None] | None,
        name: str | None = None,
        same: Callable[[Any, Any], bool] | None = None,
        *,
        holds_arguments: bool = True,
    ) -> None:
        """``name``: the suffix that names an item, given its key or number; None: no items.

        ``put`` raises if it is impossible; None: the contents cannot change. ``same``: whether a
        thing still holds what was taken.
        """
        self.take = take
        self.put = put or _cannot_change
        self.same = same or self._same_items
        self._name = name
        self.mutable = put is not None
        #: Whether the items were passed as such: an iterator among them is an argument.
        self.holds_arguments = holds_arguments

    def _same_items(self, thing: Any, held: Any) -> bool:
        now = self.take(thing)
        if len(now) != len(held) or not all(map(is_, _values(now), _values(held))):
            return False
        return type(held) is not dict or all(map(is_, now, held))

    def items(self, held: Any) -> Collection[Any]:
        """The values to look into."""
        return () if self._name is None else _values(held)

    def parts(self, held: Any) -> list[tuple[str, Any]]:
        """The same, each with the suffix that names it."""
        if self._name is None:
            return []
        is_dict = type(held) is dict
        pairs = held.items() if is_dict else enumerate(held)
        as_key = self._name.startswith("[") and is_dict
        return [(self._name.format(_short(k) if as_key else k), value) for k, value in pairs]


def _cannot_change(thing: Any, _: Any) -> None:
    raise TypeError(f"a {type(thing).__name__} cannot change")


#: A thing, one of its restorers, and what it held.
Entry = tuple[Any, Restorer, Any]


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
    # Items in both stay where they are, and so does the order, as far as a set has one.
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


DICT = Restorer(_take_dict, _put_dict, "[{}]")

#: The first that fits; the order is that of derivation.
_BUILT_IN: dict[type, Restorer] = {
    list: Restorer(lambda thing: [*list.__iter__(thing)], _put_list, "[{}]"),
    OrderedDict: Restorer(
        partial(_take_dict, base=OrderedDict), partial(_put_dict, base=OrderedDict), "[{}]"
    ),
    dict: DICT,
    set: Restorer(lambda thing: [*set.__iter__(thing)], _put_set, "{{...}}"),
    deque: Restorer(lambda thing: [*deque.__iter__(thing)], _put_deque, "[{}]"),
    tuple: Restorer(lambda thing: [*tuple.__iter__(thing)], None, "[{}]"),
    frozenset: Restorer(lambda thing: [*frozenset.__iter__(thing)], None, "{{...}}"),
}

#: A view of a dict refers to it and to nothing else.
_VIEW = Restorer(gc.get_referents, None, "")
_VIEWS = frozenset(
    type(getattr(cls(), view)())
    for cls in (dict, OrderedDict)
    for view in ("keys", "values", "items")
)


# --- attributes and variables ---------------------------------------------------------------------


def _dict_of(thing: Any) -> Any:
    return object.__getattribute__(thing, "__dict__")  # whatever its class does to attributes


_ATTRIBUTES = Restorer(
    lambda thing: _take_dict(_dict_of(thing)),
    lambda thing, held: _put_dict(_dict_of(thing), held),
    ".{}",
    holds_arguments=False,
)


def _slots_restorer(owners: dict[str, ref[type]]) -> Restorer:
    """For the ``__slots__`` of an object, given by name the class that has each.

    Classes are held weakly, and descriptors, which refer to them, are looked up.
    """

    def take(thing: Any) -> dict[str, Any]:
        return {name: _read_slot(vars(cls())[name], thing) for name, cls in owners.items()}

    def put(thing: Any, held: dict[str, Any]) -> None:
        for name, cls in owners.items():
            slot = vars(cls())[name]
            if held[name] is not UNSET:
                slot.__set__(thing, held[name])
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
    get = names[0].get
    return all(get(name, UNSET) is value for name, value in held.items())


def _put_variables(names: _Names, held: dict[str, Any]) -> None:
    for name, value in held.items():
        if value is UNSET:
            names[0].pop(name, None)
        elif names[0].get(name, UNSET) is not value:
            names[0][name] = value


CELL = Restorer(_take_cell, _put_cell, "", _same_cell)
CLASS = Restorer(_take_class, _put_class, ".{}")
FUNCTION = Restorer(_take_defaults, _put_defaults, "")
#: Of a namespace and names in it: global variables.
VARIABLES = Restorer(_take_variables, _put_variables, "global {}", _same_variables)


# --- memory ---------------------------------------------------------------------------------------


def _take_buffer(thing: Any, most: float = LARGE) -> tuple[Any, Any]:
    data = _bytes_of(thing)
    if len(data) > most:
        return _form_of(thing), crc32(data)
    return _form_of(thing), thing[:] if isinstance(thing, (bytearray, array)) else thing.copy()


def _same_buffer(thing: Any, held: tuple[Any, Any]) -> bool:
    form, copy = held
    if _form_of(thing) != form:
        return False
    data = _bytes_of(thing)
    return bool(crc32(data) == copy if type(copy) is int else data == _bytes_of(copy))


def _put_buffer(thing: Any, held: tuple[Any, Any]) -> None:
    form, copy = held
    if type(copy) is int:
        raise ValueError("it is large, and was not copied")
    if isinstance(thing, (bytearray, array)):
        thing[:] = copy
    elif _form_of(thing) != form:  # assignment would broadcast and cast
        raise ValueError("it has another shape or type")
    else:
        thing[...] = copy


def _form_of(thing: Any) -> tuple[Any, ...]:
    if isinstance(thing, (bytearray, array)):
        return "len", len(thing)
    return "shape", thing.shape, thing.dtype


def _bytes_of(thing: Any) -> Any:
    return bytes(thing) if isinstance(thing, (bytearray, array)) else thing.tobytes()


def _take_tensor(tensor: _Tensor) -> tuple[int, _Tensor]:
    with unobserved():
        return tensor._version, tensor.clone()


def _put_tensor(tensor: _Tensor, held: tuple[int, _Tensor]) -> None:
    with unobserved():
        tensor.data.copy_(held[1])
    set_version(tensor, held[0])


def _same_tensor(tensor: _Tensor, held: tuple[int, _Tensor]) -> bool:
    # batch_norm writes to the statistics it is given without raising their version. To compare
    # values on a device would be to wait for it.
    if tensor._version != held[0] or tensor.device.type != "cpu":
        return tensor._version == held[0]
    with unobserved():
        return same_values(tensor, held[1])


#: A bytearray or an array: compared by its bytes, of many of which there is a checksum only.
#: Objects in an array of numpy's count as bytes do: by their addresses.
BUFFER = Restorer(_take_buffer, _put_buffer, same=_same_buffer)
#: A tensor that is copied. It gets its version back with its values.
SMALL_TENSOR = Restorer(_take_tensor, _put_tensor, same=_same_tensor)


def hold(thing: Any, restorer: Restorer, most: float = math.inf) -> Any:
    """The contents of ``thing``, with a copy of an array of up to ``most`` bytes."""
    return _take_buffer(thing, most) if restorer is BUFFER else restorer.take(thing)


def is_whole(restorer: Restorer, held: Any) -> bool:
    """Whether ``held`` is enough to put the contents back."""
    return restorer is not BUFFER or type(held[1]) is not int


def difference(thing: Any, restorer: Restorer, held: Any) -> str:
    """In words, for contents that cannot be put back."""
    if restorer is BUFFER:
        (name, before, *_), (_, after, *_) = held[0], _form_of(thing)
        if before != after:
            return f"{name} {before} -> {after}"
    return "it holds other values"


# --- which type has which restorers ---------------------------------------------------------------

#: Not looked into. A file is a log, as a rule, though one can iterate over it.
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

#: In place of restorers, for types that are treated apart: tensors; what can be iterated over only
#: once; modules and random generators.
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
        return None if issubclass(cls, numpy.memmap) else BUFFER
    if issubclass(cls, (bytearray, array)):
        return BUFFER
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
        restorers = (_ATTRIBUTES, *restorers)
    return restorers


def is_made_in_python(cls: type) -> bool:
    """Whether an iterator's ``__next__`` is written in Python: its attributes are its state."""
    return type(getattr(cls, "__next__", None)) is FunctionType and not _is_opaque(cls)


def _is_opaque(cls: type) -> bool:
    module = str(cls.__module__)  # anything, if a class sets it
    return module.partition(".")[0] in _OPAQUE and not module.startswith(_PLAIN_DATA)
