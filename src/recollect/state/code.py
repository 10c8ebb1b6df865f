"""What code names: globals, attributes, and the functions that classes and caches are made of."""

from __future__ import annotations

import dis
import functools
import gc
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from recollect.state.restorers import UNSET

__all__ = ["cached_by", "functions_in", "globals_in", "names_in", "variables_of"]


def names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a piece of code, functions inside of it included."""
    inside = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*inside)


def globals_in(code: CodeType) -> frozenset[str]:
    """The names of globals alone. Takes longer to find."""
    inside = (globals_in(each) for each in code.co_consts if isinstance(each, CodeType))
    loaded = (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    return frozenset(loaded).union(*inside)


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
