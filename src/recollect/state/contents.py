"""The contents of lists, dicts and objects in attributes of modules: caches, counters, histories.

A rerun finds what forward found, and its own changes do not show. Only what the region itself has
changed is restored: other code may use the rest meanwhile. Most regions change nothing there, so a
module whose first calls have left it alone is not looked at again (`ModuleIndex.looks_left`).

A list to which the rerun has added numbers or words is a log, and has them afterwards, as in torch;
but for a plan, as with counters of calls.

As with arguments, a list or an object that comes to hold a result of the region, with its graph, is
held by that graph until backward frees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from recollect.state.forgotten import (
    Where,
    can_be_held,
    has_tensors,
    is_held,
    numbers_of,
    stand_in,
)
from recollect.state.inputs import swapped_contents
from recollect.state.iterators import with_exchanged
from recollect.state.module_index import ModuleIndex
from recollect.state.restorers import ARRAY, ARRAY_COPY, ATOMS, Entry, restorers_of
from recollect.state.tensors import LARGE
from recollect.state.variables import Counters

#: How many objects are visited, and of how many items at most.
_OBJECTS = 300
_ITEMS = 1000

#: Packages whose objects run the training around a module.
_FRAMEWORKS = frozenset({"accelerate", "deepspeed", "lightning", "pytorch_lightning", "ray"})


class Contents:
    """What the attributes of some modules hold at the call."""

    __slots__ = ("_entries", "_indexes", "_logs")

    def __init__(self, found: Sequence[tuple[ModuleIndex, list[Any]]]) -> None:
        """``found``: the values of attributes, by the index of the modules."""
        self._indexes = [index for index, _ in found]
        self._entries = _entries_of(value for _, values in found for value in values)
        #: Lists to which the call has added.
        self._logs: list[list[Any]] = []

    def settle(self, *, counters: Counters) -> list[int]:
        """After the call: note what it has changed. Returns what is not to be held, by ``id``."""
        changed = [entry for entry in self._entries if not entry[1].same(entry[0], entry[2])]
        self._entries, unheld = [], []
        for index in self._indexes:
            index.contents_change |= bool(changed)
        for thing, restorer, held in changed:
            present = {*map(id, restorer.items(restorer.take(thing)))}
            if type(thing) is list and len(thing) > len(held) and counters != "restored":
                self._logs.append(thing)
            gone = [each for each in restorer.items(held) if _is_unheld(each, present)]
            unheld += [number for each in gone for number in numbers_of(each)]
            where = Where(f"a {type(thing).__name__} of a module")
            stand_ins = {id(each): stand_in(each, where) for each in gone}
            left = with_exchanged(held, stand_ins) if stand_ins else held
            self._entries.append((thing, restorer, left))
        return unheld

    def __bool__(self) -> bool:
        return bool(self._entries)

    def swapped(self) -> AbstractContextManager[None]:
        """A context in which changed contents are as at the call."""
        swapped = swapped_contents(self._entries, lambda thing: f"a {type(thing).__name__}")
        return _logged(swapped, self._logs) if self._logs else swapped


@contextmanager
def _logged(swapped: AbstractContextManager[None], logs: list[list[Any]]) -> Iterator[None]:
    """``swapped``, after which ``logs`` have what was added to them inside."""
    added: list[list[Any]] = []
    try:
        with swapped:
            lengths = [*map(len, logs)]
            try:
                yield
            finally:
                added = [log[length:] for log, length in zip(logs, lengths, strict=True)]
    finally:
        for log, more in zip(logs, added, strict=False):
            if all(can_be_held(each) and not has_tensors(each) for each in more):
                log.extend(more)


def _is_unheld(value: Any, present: set[int]) -> bool:
    return id(value) not in present and not is_held(value) and has_tensors(value)


def _entries_of(values: Iterable[Any]) -> list[Entry]:
    """The contents of everything that can change among ``values`` and inside of them."""
    entries: list[Entry] = []
    found: dict[int, Any] = {}
    pending = [*values]
    for value in pending:  # which grows meanwhile
        cls = type(value)
        if cls in ATOMS or id(value) in found or len(found) >= _OBJECTS:
            continue
        found[id(value)] = value
        if str(cls.__module__).partition(".")[0] in _FRAMEWORKS:
            continue
        for usual in restorers_of(cls):
            restorer = ARRAY_COPY if usual is ARRAY else usual
            if usual is ARRAY and getattr(value, "nbytes", 0) > LARGE:
                continue
            held = restorer.take(value)
            items = restorer.items(held)
            if len(items) <= _ITEMS:
                pending += items
                entries += [(value, restorer, held)] if restorer.mutable else []
    return entries
