"""How the contents of a list, a dict, an object are taken, compared, and put back in place.

What is in a container is compared by identity. Nothing of the user's is called: no ``==`` (but of
keys, as in every dict), no method that a subclass may have overridden, no property, no
``__getattr__``.

Which kinds an object is made of depends on its type: a dict with attributes is of two. Some types
are left alone. Functions, classes and enumerations do not change; the objects of some packages are
in use by more than a region; of what is written in C and not named here, nothing is known.
"""

from __future__ import annotations

import enum
import gc
import io
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from operator import is_
from types import (
    BuiltinFunctionType,
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
    "CARED_FOR",
    "ITERATOR",
    "Kind",
    "Kinds",
    "SMALL_TENSOR",
    "TENSOR",
    "UNSET",
    "attribute_kinds",
    "is_made_in_python",
    "is_opaque",
    "kinds_of",
]

_Tensor = torch.Tensor

#: Types of values in which there is nothing to see.
ATOMS: frozenset[type] = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        type(...),
        type,
        FunctionType,
        MethodType,
        BuiltinFunctionType,
        ModuleType,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
    }
)


# --- kinds of things ------------------------------------------------------------------------------


#: In the place of what is not there.
UNSET = object()


class Kind:
    """How the contents of one kind of thing are taken, compared and put back."""

    #: Whether what is inside was handed over as such: an iterator there is an argument.
    holds_arguments = True
    #: Whether the contents can change.
    mutable = True

    def take(self, thing: Any) -> Any:
        """What ``thing`` holds now."""
        raise NotImplementedError

    def hold(self, thing: Any) -> Any:
        """The same, and certainly enough to put it back."""
        return self.take(thing)

    def nbytes(self, thing: Any) -> int:
        """How many bytes are copied to hold it, where that may be many."""
        return 0

    def is_whole(self, taken: Any) -> bool:
        """Whether what was taken is enough to put it back."""
        return True

    def same(self, thing: Any, taken: Any) -> bool:
        """Whether ``thing`` still holds what was taken."""
        raise NotImplementedError

    def put(self, thing: Any, taken: Any) -> None:
        """Make ``thing`` hold what was taken; raises if that cannot be."""
        raise NotImplementedError

    def difference(self, thing: Any, taken: Any) -> str:
        """In words, for contents that cannot be put back."""
        return "it holds other values"

    def items(self, taken: Any) -> Collection[Any]:
        """What to look into further."""
        return ()

    def parts(self, taken: Any) -> Iterable[tuple[str, Any]]:
        """The same, each with what it adds to the name of the whole."""
        return ()


class _Sequence(Kind):
    """A list, set or deque, by the methods of that very type."""

    def __init__(self, base: Any, put: Callable[[Any, list[Any]], None]) -> None:
        self._iterate = base.__iter__
        self._length = base.__len__
        self._put = put
        self._in_order = base is not set

    def take(self, thing: Any) -> list[Any]:
        return list(self._iterate(thing))

    def same(self, thing: Any, taken: list[Any]) -> bool:
        return self._length(thing) == len(taken) and all(map(is_, self._iterate(thing), taken))

    def put(self, thing: Any, taken: list[Any]) -> None:
        self._put(thing, taken)

    def items(self, taken: list[Any]) -> list[Any]:
        return taken

    def parts(self, taken: list[Any]) -> Iterable[tuple[str, Any]]:
        return [(f"[{n}]" if self._in_order else "{...}", item) for n, item in enumerate(taken)]


def _put_list(thing: Any, taken: list[Any]) -> None:
    list.__setitem__(thing, slice(None), taken)


def _put_deque(thing: Any, taken: list[Any]) -> None:
    deque.clear(thing)
    deque.extend(thing, taken)


def _put_set(thing: Any, taken: list[Any]) -> None:
    # What is in both stays where it is, and so does the order, as far as a set has one.
    former = {*map(id, taken)}
    for item in [item for item in set.__iter__(thing) if id(item) not in former]:
        set.discard(thing, item)
    set.update(thing, taken)


class _Mapping(Kind):
    """A dict, with the order of its keys, by the methods of that very type."""

    def __init__(self, base: Any) -> None:
        self._base = base

    def take(self, thing: Any) -> dict[Any, Any]:
        return thing.copy() if type(thing) is dict else dict(self._base.items(thing))

    def same(self, thing: Any, taken: dict[Any, Any]) -> bool:
        base = self._base
        return (
            base.__len__(thing) == len(taken)
            and all(map(is_, base.values(thing), taken.values()))
            and all(map(is_, base.__iter__(thing), taken))
        )

    def put(self, thing: Any, taken: dict[Any, Any]) -> None:
        base = self._base
        # Only what differs is touched: another thread that reads the rest shall find it.
        for key in [key for key in base.__iter__(thing) if key not in taken]:
            base.__delitem__(thing, key)
        present = dict(base.items(thing))
        for key, value in taken.items():
            if present.get(key, UNSET) is not value:
                base.__setitem__(thing, key, value)
        if not all(map(is_, base.__iter__(thing), taken)):
            base.clear(thing)
            for key, value in taken.items():
                base.__setitem__(thing, key, value)

    def items(self, taken: dict[Any, Any]) -> Collection[Any]:
        return taken.values()

    def parts(self, taken: dict[Any, Any]) -> Iterable[tuple[str, Any]]:
        return [(f"[{_short(key)}]", value) for key, value in taken.items()]


def _short(key: Any) -> str:
    text = repr(key) if type(key) in ATOMS else f"<{type(key).__name__}>"
    return text if len(text) <= 40 else f"{text[:36]}...{text[-1]}"


_read_attribute = object.__getattribute__


class _Attributes(_Mapping):
    """The ``__dict__`` of an object, whatever its class does to attributes."""

    holds_arguments = False

    def take(self, thing: Any) -> dict[Any, Any]:
        return super().take(_read_attribute(thing, "__dict__"))

    def same(self, thing: Any, taken: dict[Any, Any]) -> bool:
        return super().same(_read_attribute(thing, "__dict__"), taken)

    def put(self, thing: Any, taken: dict[Any, Any]) -> None:
        super().put(_read_attribute(thing, "__dict__"), taken)

    def parts(self, taken: dict[Any, Any]) -> Iterable[tuple[str, Any]]:
        return [(f".{key}", value) for key, value in taken.items()]


class _Slots(Kind):
    """The ``__slots__`` of an object, as the classes that define them and their names.

    A class is not held by what is known of it, as it would be by the descriptors of its slots.
    """

    holds_arguments = False

    def __init__(self, slots: list[tuple[ref[type], str]]) -> None:
        self._slots = slots

    def take(self, thing: Any) -> list[Any]:
        return [_read_slot(slot, thing) for slot in self._descriptors()]

    def same(self, thing: Any, taken: list[Any]) -> bool:
        return all(map(is_, self.take(thing), taken))

    def put(self, thing: Any, taken: list[Any]) -> None:
        for slot, value in zip(self._descriptors(), taken, strict=True):
            if value is not UNSET:
                slot.__set__(thing, value)
            elif _read_slot(slot, thing) is not UNSET:
                slot.__delete__(thing)

    def items(self, taken: list[Any]) -> list[Any]:
        return [value for value in taken if value is not UNSET]

    def parts(self, taken: list[Any]) -> Iterable[tuple[str, Any]]:
        named = zip(self._slots, taken, strict=True)
        return [(f".{name}", value) for (_, name), value in named if value is not UNSET]

    def _descriptors(self) -> list[Any]:
        return [vars(owner())[name] for owner, name in self._slots]


def _read_slot(slot: Any, thing: Any) -> Any:
    try:
        return slot.__get__(thing)
    except AttributeError:
        return UNSET


class _Fixed(Kind):
    """A tuple, a frozenset, a view of a dict: what is inside may change, but not what it is."""

    mutable = False

    def __init__(self, inside: Callable[[Any], Collection[Any]], name: str) -> None:
        self._inside = inside
        self._name = name

    def take(self, thing: Any) -> Collection[Any]:
        return self._inside(thing)

    def items(self, taken: Collection[Any]) -> Collection[Any]:
        return taken

    def parts(self, taken: Collection[Any]) -> Iterable[tuple[str, Any]]:
        return [(self._name.format(n), item) for n, item in enumerate(taken)]


class _Buffer(Kind):
    """Bytes that anybody can write to: compared by content, and put back if they are few."""

    _measure = "len"

    def take(self, thing: Any) -> tuple[Any, Any]:
        fingerprint = self._fingerprint(thing)
        return fingerprint, self._copy(thing) if type(fingerprint[-1]) is bytes else None

    def hold(self, thing: Any) -> tuple[Any, Any]:
        return self._fingerprint(thing), self._copy(thing)

    def is_whole(self, taken: tuple[Any, Any]) -> bool:
        return taken[1] is not None

    def same(self, thing: Any, taken: tuple[Any, Any]) -> bool:
        return bool(self._fingerprint(thing) == taken[0])

    def put(self, thing: Any, taken: tuple[Any, Any]) -> None:
        if taken[1] is None:
            raise ValueError("it is large, and was not copied")
        self._assign(thing, taken[1])

    def difference(self, thing: Any, taken: tuple[Any, Any]) -> str:
        before, after = taken[0][0], self._fingerprint(thing)[0]
        if before == after:
            return "it holds other values"
        return f"{self._measure} {before} -> {after}"

    def _copy(self, thing: Any) -> Any:
        return thing[:]

    def _assign(self, thing: Any, copy: Any) -> None:
        thing[:] = copy

    def _fingerprint(self, thing: Any) -> tuple[Any, ...]:
        data = memoryview(thing).tobytes()
        return len(data), _digest(data)


class _Array(_Buffer):
    """An array of numpy's. Objects in it count as bytes do: by their addresses."""

    _measure = "shape"

    def nbytes(self, thing: Any) -> int:
        return int(thing.nbytes)

    def _assign(self, thing: Any, copy: Any) -> None:
        if (thing.shape, thing.dtype) != (copy.shape, copy.dtype):
            raise ValueError("it has another shape or type")  # assignment would broadcast and cast
        thing[...] = copy

    def _copy(self, thing: Any) -> Any:
        return thing.copy()

    def _fingerprint(self, thing: Any) -> tuple[Any, ...]:
        return thing.shape, thing.dtype, _digest(thing.tobytes())


def _digest(data: bytes) -> bytes | int:
    return data if len(data) <= LARGE else crc32(data)


class _SmallTensor(Kind):
    """A tensor that is copied. It gets its version back with its value: nothing has happened."""

    def take(self, thing: _Tensor) -> tuple[int, _Tensor]:
        with unobserved():
            return thing._version, thing.clone()

    def same(self, thing: _Tensor, taken: tuple[int, _Tensor]) -> bool:
        # batch_norm writes to the statistics it is given without raising their version. To compare
        # values on a device would be to wait for it.
        if thing._version != taken[0] or thing.device.type != "cpu":
            return thing._version == taken[0]
        with unobserved():
            return same_values(thing, taken[1])

    def put(self, thing: _Tensor, taken: tuple[int, _Tensor]) -> None:
        with unobserved():
            thing.data.copy_(taken[1])
        set_version(thing, taken[0])


# --- which type is of which kind ------------------------------------------------------------------

SMALL_TENSOR = _SmallTensor()
_BUFFER = _Buffer()
_ARRAY = _Array()
_ATTRIBUTES = _Attributes(dict)

#: The first that fits; the order is that of derivation.
_BUILT_IN: tuple[tuple[type, Kind], ...] = (
    (list, _Sequence(list, _put_list)),
    (OrderedDict, _Mapping(OrderedDict)),
    (dict, _Mapping(dict)),
    (set, _Sequence(set, _put_set)),
    (deque, _Sequence(deque, _put_deque)),
    (tuple, _Fixed(lambda thing: [*tuple.__iter__(thing)], "[{}]")),
    (frozenset, _Fixed(lambda thing: [*frozenset.__iter__(thing)], "{{...}}")),
    (bytearray, _BUFFER),
    (array, _BUFFER),
)

#: A view of a dict refers to it and to nothing else.
_VIEW = _Fixed(gc.get_referents, "")
_VIEWS: frozenset[type] = frozenset(
    type(getattr(cls(), view)())
    for cls in (dict, OrderedDict)
    for view in ("keys", "values", "items")
)

_CLOSED = (
    type,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    partial,
    enum.Enum,
    torch.optim.Optimizer,
)

#: Packages whose objects are in use by more than the region: by threads, by the system, by torch's
#: own machinery. To change them back for a while would pull the rug from under somebody.
_OPAQUE = frozenset(
    {
        "_io",
        "_thread",
        "_weakrefset",
        "asyncio",
        "concurrent",
        "contextvars",
        "ctypes",
        "io",
        "logging",
        "multiprocessing",
        "queue",
        "selectors",
        "socket",
        "sqlite3",
        "ssl",
        "subprocess",
        "threading",
        "torch",
        "triton",
        "weakref",
    }
)
#: Parts of those that are plain data.
_PLAIN_DATA = ("torch.distributions", "torch.nn")

Kinds = tuple[Kind, ...]

#: In place of kinds, for types that are treated apart: tensors; what can be gone through only once;
#: modules and random generators, whose state is looked after by others.
TENSOR: Kinds = (Kind(),)
ITERATOR: Kinds = (Kind(),)
CARED_FOR: Kinds = (Kind(),)

_known: WeakKeyDictionary[type, Kinds] = WeakKeyDictionary()


def kinds_of(cls: type) -> Kinds:
    """The kinds that make up an object of type ``cls``, or one of the constants above."""
    kinds = _known.get(cls)
    if kinds is None:
        kinds = _known[cls] = _find_kinds(cls)
    return kinds


def _find_kinds(cls: type) -> Kinds:
    if issubclass(cls, _Tensor):
        return TENSOR
    if issubclass(cls, (nn.Module, *generator_types())):
        return CARED_FOR
    if issubclass(cls, _CLOSED):
        return ()
    if issubclass(cls, io.IOBase):  # a log, as a rule, though one can iterate over it
        return ()
    if hasattr(cls, "__next__") or hasattr(cls, "__anext__"):
        return ITERATOR
    kinds = [] if (kind := _content_kind(cls)) is None else [kind]
    if not is_opaque(cls):
        kinds += attribute_kinds(cls)
    return tuple(kinds)


def is_made_in_python(cls: type) -> bool:
    """Whether the method ``__next__`` of an iterator is Python's, so that attributes tell all."""
    return type(getattr(cls, "__next__", None)) is FunctionType and not is_opaque(cls)


def _content_kind(cls: type) -> Kind | None:
    if cls in _VIEWS:
        return _VIEW
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(cls, numpy.ndarray):
        # A file that is mapped may be larger than memory; to read all of it is out of the question.
        return None if issubclass(cls, numpy.memmap) else _ARRAY
    return next((kind for base, kind in _BUILT_IN if issubclass(cls, base)), None)


def attribute_kinds(cls: type) -> list[Kind]:
    """The kinds of what an object of type ``cls`` has as attributes."""
    spaces = [(base, vars(base)) for base in cls.__mro__]
    described = next((space["__dict__"] for _, space in spaces if "__dict__" in space), None)
    slots = [
        (ref(base), name)
        for base, space in spaces
        if "__slots__" in space
        for name, slot in space.items()
        if type(slot) is MemberDescriptorType
    ]
    kinds: list[Kind] = []
    if isinstance(described, (GetSetDescriptorType, MemberDescriptorType)):  # and no property
        kinds.append(_ATTRIBUTES)
    if slots:
        kinds.append(_Slots(slots))
    return kinds


def is_opaque(cls: type) -> bool:
    """Whether the objects of type ``cls`` are not to be looked into."""
    module = str(cls.__module__)  # anything, if a class sets it
    return module.partition(".")[0] in _OPAQUE and not module.startswith(_PLAIN_DATA)
