"""The names that code uses."""

from __future__ import annotations

import functools
from typing import Any

from recollect.state.code import cached_by, functions_in, globals_in, names_in, variables_of
from recollect.state.restorers import UNSET

LIMIT = 3


def uses(x: Any) -> Any:
    return x.shape, [LIMIT + n for n in x], lambda: missing  # noqa: F821 - a global to come


def test_names_and_globals() -> None:
    assert names_in(uses.__code__) >= {"shape", "LIMIT", "missing"}
    assert globals_in(uses.__code__) == {"LIMIT", "missing"}


def test_variables_of_a_function() -> None:
    found = {name: value for _, name, value in variables_of(uses, lambda _: True)}
    assert (found["LIMIT"], found["missing"]) == (3, UNSET)


def uses_module() -> Any:
    return functools.WRAPPER_ASSIGNMENTS


def test_variables_of_modules_unless_closed() -> None:
    def values(closed: bool) -> list[Any]:
        return [value for _, _, value in variables_of(uses_module, lambda _: closed)]

    assert functools.WRAPPER_ASSIGNMENTS in values(closed=False)
    assert functools.WRAPPER_ASSIGNMENTS not in values(closed=True)


def test_functions_of_members() -> None:
    assert functions_in(staticmethod(uses)) == [uses]
    assert functions_in(classmethod(uses)) == [uses]
    assert functions_in(property(uses)) == [uses]
    assert functions_in(functools.cached_property(uses)) == [uses]
    assert functions_in(3) == [3]


def test_a_cache_and_its_results() -> None:
    @functools.lru_cache
    def table(n: int) -> list[int]:
        return [n]

    made = table(3)
    held = cached_by(table)
    assert held is not None
    assert any(each is made for each in held)
    assert any(each is table.__wrapped__ for each in held)
    assert cached_by(uses) is None
