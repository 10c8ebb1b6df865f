"""State that code keeps: in variables, defaults and attributes of functions, and in classes.

And what cannot be put back but can be exchanged: an ``itertools.count`` is used up by being asked,
so those who hold it hold a copy for a while.
"""

from __future__ import annotations

import ast
import copy
import functools
import gc
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from recollect.state.restorers import UNSET, Kind

__all__ = [
    "CELL",
    "CLASS",
    "FUNCTION",
    "UsedUp",
    "VARIABLES",
    "cached_by",
    "functions_in",
    "names_in",
    "successor",
    "variables_of",
]


class _Fields(Kind):
    """Some attributes of a thing, by name; those that are not there are `UNSET`."""

    def put(self, thing: Any, taken: dict[str, Any]) -> None:
        now = self.take(thing)
        for name in {**now, **taken}:
            value = taken.get(name, UNSET)
            if now.get(name, UNSET) is not value:
                self._write(thing, name, value)

    def same(self, thing: Any, taken: dict[str, Any]) -> bool:
        now = self.take(thing)
        return now.keys() == taken.keys() and all(now[name] is taken[name] for name in now)

    def items(self, taken: dict[str, Any]) -> Collection[Any]:
        return taken.values()

    def parts(self, taken: dict[str, Any]) -> Iterable[tuple[str, Any]]:
        return [(f".{name}", value) for name, value in taken.items()]

    def _write(self, thing: Any, name: str, value: Any) -> None:
        raise NotImplementedError


class _Cell(_Fields):
    """A variable of an enclosing function."""

    def take(self, thing: CellType) -> dict[str, Any]:
        try:
            return {"": thing.cell_contents}
        except ValueError:  # not assigned
            return {}

    def _write(self, thing: CellType, name: str, value: Any) -> None:
        if value is UNSET:
            del thing.cell_contents
        else:
            thing.cell_contents = value

    def parts(self, taken: dict[str, Any]) -> Iterable[tuple[str, Any]]:
        return [("", value) for value in taken.values()]


class _Function(_Fields):
    """The defaults of a function. Its attributes are a dict like others."""

    def take(self, thing: FunctionType) -> dict[str, Any]:
        return {name: getattr(thing, name) for name in ("__defaults__", "__kwdefaults__")}

    def _write(self, thing: FunctionType, name: str, value: Any) -> None:
        setattr(thing, name, value)


class _Class(_Fields):
    """The attributes of a class."""

    def take(self, thing: type) -> dict[str, Any]:
        return {name: value for name, value in vars(thing).items() if name not in _OF_CLASSES}

    def _write(self, thing: type, name: str, value: Any) -> None:
        if value is UNSET:
            type.__delattr__(thing, name)
        else:
            type.__setattr__(thing, name, value)


#: Attributes of a class that Python keeps for itself.
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "_abc_impl", "__abstractmethods__"})


class _Variables(_Fields):
    """Global variables: of a namespace, those that are among what was taken."""

    def put(self, thing: dict[str, Any], taken: dict[str, Any]) -> None:
        for name, value in taken.items():
            if value is UNSET:
                thing.pop(name, None)
            elif thing.get(name, UNSET) is not value:
                thing[name] = value

    def same(self, thing: dict[str, Any], taken: dict[str, Any]) -> bool:
        return all(thing.get(name, UNSET) is value for name, value in taken.items())

    def parts(self, taken: dict[str, Any]) -> Iterable[tuple[str, Any]]:
        return [(f"global {name}", value) for name, value in taken.items()]


CELL = _Cell()
FUNCTION = _Function()
CLASS = _Class()
VARIABLES = _Variables()


# --- what code names ------------------------------------------------------------------------------

#: By the address of code, with it: which names it uses, and those of functions inside of it.
_known: dict[int, tuple[CodeType, frozenset[str]]] = {}


def names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a piece of code, functions inside of it included."""
    known = _known.get(id(code))
    if known is None:
        inside = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
        known = _known[id(code)] = code, frozenset(code.co_names).union(*inside)
    return known[1]


def variables_of(
    function: FunctionType, is_closed: Callable[[Any], bool]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
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
            elif id(vars(value)) not in seen and not is_closed(value.__name__):
                pending.append(vars(value))


def functions_in(member: Any) -> list[Any]:
    """The functions that a member of a class is made of."""
    if isinstance(member, (staticmethod, classmethod)):
        return [member.__func__]
    if isinstance(member, property):
        return [each for each in (member.fget, member.fset, member.fdel) if each is not None]
    return [member.func] if isinstance(member, functools.cached_property) else [member]


_CACHE = type(functools.lru_cache(len))


def cached_by(function: Any) -> list[Any] | None:
    """What a ``functools.lru_cache`` holds, and the function that it is of; None if it is none."""
    if type(function) is not _CACHE:
        return None
    # Results, but for a cache without a limit, which has them in a dict. That is its own affair.
    held = gc.get_referents(function)
    inside = [value for each in held if type(each) is dict for value in each.values()]
    return [each for each in held if type(each) is not dict] + inside


# --- what can only be used up ---------------------------------------------------------------------

_SEQUENCES: tuple[Any, ...] = ([], (), range(0), range(1 << 70), "", "\xe9", b"", bytearray())
#: Iterators that can be copied, and the copies used up.
_COPIED = frozenset([*(type(iter(each)) for each in _SEQUENCES), type(reversed([]))])


class UsedUp:
    """Stands in for an iterator that the step must not use up."""

    def __init__(self, name: str, kind: str) -> None:
        self._name, self._kind = name, kind

    def __iter__(self) -> UsedUp:
        return self

    def __next__(self) -> Any:
        raise TypeError(
            f"{self._name} is an iterator ({self._kind}), which this step uses up. The step is run "
            "several times here, and must leave everything as it was: hold a list of the items and "
            "the number of the next one, or take the item outside and pass it as an argument"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # somebody asks what this is
            raise AttributeError(name)
        return self.__next__()


def successor(value: Any) -> Any:
    """A copy that goes on where ``value`` stands, an iterator; None if there can be none."""
    if type(value) is itertools.count:
        try:
            start = ast.literal_eval(repr(value).removeprefix("count"))
        except (ValueError, SyntaxError):  # of fractions, say
            return None
        return itertools.count(*start) if isinstance(start, tuple) else itertools.count(start)
    return copy.copy(value) if type(value) in _COPIED else None
