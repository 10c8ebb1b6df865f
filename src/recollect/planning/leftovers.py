"""Seeing to it that no tensor without values outlives the look for which it was made.

Code memoizes: in a ``functools.lru_cache``, a global dict, a closure. What it memoizes while a step
is recorded on fake tensors is fake, and would take the place of a real one in training. What the
model can get at is put back by others (see `Step.undone`). Here the rest is found, by asking the
garbage collector: caches of ``functools`` are cleared, for anything else there is an error that
says who holds it. Should one still be overlooked, using it is an error: see `fake_tensors`.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

from torch import nn

from recollect._torch.tensors import fakes_left
from recollect.errors import CheckpointError

__all__ = ["nothing_fake_left"]

_Cache = type(functools.lru_cache(len))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
#: How far to go from a tensor to who holds it, and how many to look at on the way.
_DEPTH = 6
_MOST = 1000


@contextmanager
def nothing_fake_left(caches: Callable[[], Iterable[Any]] = list) -> Iterator[None]:
    """A context after which no tensor is left that `fake_tensors` made in it.

    ``caches``: gives those of ``functools`` that are known. Of what is frozen (``gc.freeze``) the
    collector does not tell.
    """
    before = {id(fake) for fake in fakes_left()}
    try:
        yield
    except BaseException:
        _clear_caches(before, caches())  # the exception may hold some, as long as it is there
        raise
    gc.collect()
    _clear_caches(before, caches())
    left = _left(before)
    if left:
        raise CheckpointError(
            f"model: the step was recorded on tensors without values, and {_holder(left)} still "
            "holds one, which would be used in training in the place of a real one. Hold it in "
            "the model instead, self.register_buffer(name, tensor, persistent=False), or make the "
            "plan on the device on which the model is trained"
        )


def _left(before: set[int]) -> list[Any]:
    return [fake for fake in fakes_left() if id(fake) not in before]


def _clear_caches(before: set[int], known: Iterable[Any]) -> None:
    left = _left(before)
    if not left:
        return
    ids = {id(fake) for fake in left}
    found = [holder for holder, _ in _holders(left) if type(holder) is _Cache]
    for cache in [*found, *(each for each in known if _leads_to(each, ids))]:
        cache.cache_clear()
    del left
    gc.collect()


def _leads_to(cache: Any, ids: set[int]) -> bool:
    """Whether one of some things is among what a cache holds, or inside of that."""
    things = gc.get_referents(cache)
    for _ in range(_DEPTH):
        if any(id(each) in ids for each in things):
            return True
        things = gc.get_referents(*(each for each in things if type(each) in _CONTAINERS))
    return False


def _holders(things: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Who holds some things, from near to far, each with what it holds of them."""
    seen = {id(things)}
    near = list(things)
    for _ in range(_DEPTH):
        seen |= {id(each) for each in near} | {id(near)}
        far = [each for each in gc.get_referrers(*near) if _may_hold(each, seen)]
        found = []
        for holder in far[:_MOST]:
            held = [each for each in near if any(part is each for part in gc.get_referents(holder))]
            if held:
                yield holder, held[0]
                found.append(holder)
        if not found:
            return
        near = [each for each in found if not _is_end(each)]


def _is_end(holder: Any) -> bool:
    """Whether those who hold it hold much else, and are not to be blamed."""
    return isinstance(holder, (_Cache, FunctionType, type, nn.Module)) or _is_namespace(holder)


def _is_namespace(holder: Any) -> bool:
    """Whether it has the global variables of a module."""
    return type(holder) is dict and str(holder.get("__name__")) in sys.modules


def _may_hold(thing: Any, seen: set[int]) -> bool:
    return id(thing) not in seen and type(thing) not in (FrameType, GeneratorType)


def _holder(left: list[Any]) -> str:
    """The first holder that a user can be told of."""
    container = ""
    cells: set[int] = set()
    for holder, held in _holders(left):
        if _is_namespace(holder):
            name = next((key for key, value in holder.items() if value is held), None)
            return f"the global variable {name!r} of {holder['__name__']}"
        if type(holder) is FunctionType:
            pairs = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
            closed = [f"the variable {name!r} around " for name, cell in pairs if id(cell) in cells]
            return f"{''.join(closed[:1])}the function {holder.__qualname__}"
        if isinstance(holder, type):
            return f"the class {holder.__qualname__}"
        if hasattr(holder, "__dict__") and not isinstance(holder, _CONTAINERS):
            attributes = getattr(holder, "__dict__", {})
            names = [key for key, value in attributes.items() if value is held]
            what = f"the attribute {names[0]!r} of " if names else ""
            return f"{what}a {type(holder).__name__}"
        if type(holder) is CellType:
            cells.add(id(holder))
        container = container or f"a {type(holder).__name__}"
    return container or "somebody"
