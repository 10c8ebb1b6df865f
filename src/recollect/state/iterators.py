"""Iterators, which can be consumed only once: stand-ins and copies for code that runs again."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable
from functools import partial
from operator import is_not
from types import MethodWrapperType
from typing import Any

from recollect.errors import InputChanged
from recollect.settings import recomputing
from recollect.state.restorers import ITERATOR, is_made_in_python, restorers_of


class StandIn:
    """Raises what ``refusal`` gives if it is drawn from; None gives the item of the iterator."""

    __slots__ = ("_iterator", "_refusal")

    def __init__(self, iterator: Any, refusal: Callable[[], Exception | None]) -> None:
        self._iterator = iterator
        self._refusal = refusal

    def __iter__(self) -> StandIn:
        return self

    def __next__(self) -> Any:
        self._before_draw()
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        self._before_draw()  # `send`, say
        return getattr(self._iterator, name)

    def _before_draw(self) -> None:
        error = self._refusal()
        if error is not None:
            raise error


def refusal_to_draw(name: str, iterator: Any) -> Callable[[], InputChanged | None]:
    """What `StandIn` raises in a rerun, for an iterator called ``name``."""
    text = (
        f"{name} of a checkpointed region is an iterator ({type(iterator).__name__}), which can be "
        "read only once, and the recomputation of the region draws from it. Take the item outside "
        "and pass it as an argument, or hold a list and the number of the next item."
    )
    # Not for another thread, which has nothing to do with the rerun.
    return lambda: InputChanged(text) if recomputing.depth else None


def is_used_up(value: Any) -> bool:
    """Whether ``value`` is an iterator whose position cannot be put back."""
    cls = type(value)
    return cls is not StandIn and restorers_of(cls) is ITERATOR and not is_made_in_python(cls)


def with_exchanged(held: Any, others: dict[int, Any]) -> Any:
    """The contents that a restorer took, each item `exchanged`; the same object if none is."""
    is_dict = isinstance(held, dict)
    items = [*held.values()] if is_dict else held
    replaced = [exchanged(item, others) for item in items]
    if not any(map(is_not, replaced, items)):
        return held
    return dict(zip(held, replaced, strict=True)) if is_dict else replaced


def exchanged(value: Any, others: dict[int, Any]) -> Any:
    """``value``, with itself or the items of a tuple, method or partial replaced by ``others``."""
    if id(value) in others:
        return others[id(value)]
    if type(value) is tuple:
        items = with_exchanged([*value], others)
        return tuple(items) if any(map(is_not, items, value)) else value
    if type(value) is MethodWrapperType and id(value.__self__) in others:
        return getattr(others[id(value.__self__)], value.__name__)
    if type(value) is partial:
        args = exchanged(value.args, others)
        keywords = with_exchanged(value.keywords, others)
        if args is not value.args or keywords is not value.keywords:
            return partial(value.func, *args, **keywords)
    return value


_SEQUENCES: tuple[Any, ...] = ([], (), range(0), range(1 << 70), "", "\xe9", b"", bytearray())
#: Iterators that can be copied, and the copies used up.
_COPIED = frozenset([*(type(iter(each)) for each in _SEQUENCES), type(reversed([]))])


def successor(value: Any) -> Any:
    """A copy of an iterator, at the same position; None if there can be none."""
    if type(value) is itertools.count:
        try:
            start = ast.literal_eval(repr(value).removeprefix("count"))
        except (ValueError, SyntaxError):  # of fractions, say
            return None
        return itertools.count(*start) if isinstance(start, tuple) else itertools.count(start)
    return copy.copy(value) if type(value) in _COPIED else None
