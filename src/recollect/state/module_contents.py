"""The contents of lists, dicts and objects in attributes of modules: caches, counters, histories.

A rerun finds what forward found, also where the region has put another list or object into the
attribute (of tensors and constants: `module_settings`); its own changes do not show. Only what the
region itself has changed is restored: other code may use the rest meanwhile. Most regions change
nothing there, so a module whose first calls have left it alone is not looked at again
(`ModuleIndex.looks_left`). An object with a lock or a thread is in use by other threads, and is
left alone, with all it holds.

A list to which the rerun has added words, flags, integers, dtypes, devices or shapes is a log, and
has them afterwards, as in torch; but for a plan, as with counters of calls.

After the call none of it is held, but found again from the modules: a list that came to hold a
result would, with its graph, hold itself, and that for ever if no backward comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from recollect.state.contents import Contents, is_left_alone, swapped_contents
from recollect.state.iterators import with_exchanged
from recollect.state.module_index import ModuleIndex
from recollect.state.module_settings import STANDARD_ATTRIBUTES
from recollect.state.reachable import leading_values
from recollect.state.restorers import (
    ATOMS,
    CAPTURED_ELSEWHERE,
    ITERATOR,
    TENSOR,
    Entry,
    Restorer,
    restorers_of,
)
from recollect.state.variables import (
    Counters,
    Slot,
    Where,
    has_tensors,
    in_attribute,
    kept,
    numbers_of,
)

#: What says that an object has no contents that are restored here.
_NO_CONTENTS = (TENSOR, ITERATOR, CAPTURED_ELSEWHERE, ())

#: What logs consist of, and lists of these. Floats are computed with.
_WORDS = frozenset({bool, int, str, type(None), torch.dtype, torch.device, torch.Size})


class _Changed(NamedTuple):
    """Something that the call has changed, and its contents at the call."""

    number: int
    kind: type
    restorer: Restorer
    held: Any


class ModuleContents:
    """What the attributes of some modules hold at the call."""

    __slots__ = (
        "_assigned",
        "_attributes",
        "_changed",
        "_entries",
        "_indexes",
        "_is_plan",
        "_made",
    )

    def __init__(
        self, found: Sequence[tuple[ModuleIndex, list[Any]]], made: list[torch.Tensor]
    ) -> None:
        """``found``: the values of attributes, by the index of the modules.

        ``made``: where a rerun notes the parameters that it has made, or modules in a dict have.
        """
        self._indexes = [index for index, _ in found]
        values = [value for _, values in found for value in values]
        self._entries = Contents(values, in_attributes=True).mutable
        #: Attributes that hold such things, and these; those that the call has assigned.
        self._attributes = [pair for index in self._indexes for pair in _attributes_of(index)]
        self._assigned: list[tuple[Slot, Any]] = []
        self._changed: list[_Changed] = []
        self._made = made
        #: Whether a rerun leaves no trace at all.
        self._is_plan = False

    def settle(self, *, counters: Counters) -> list[int]:
        """After the call: note what it has changed. Returns what is not to be held, by ``id``."""
        changed = [entry for entry in self._entries if not entry[1].same(entry[0], entry[2])]
        assigned = [pair for pair in self._attributes if not _is_same(pair[1], pair[0].read())]
        self._entries, self._attributes = [], []
        self._is_plan = counters == "restored"
        unheld: list[int] = []
        for index in self._indexes:
            index.contents_change |= bool(changed or assigned)
        for slot, then in assigned:
            self._assigned.append((slot, kept(then, in_attribute(str(slot.name)))))
        for thing, restorer, held in changed:
            where = Where(f"a {type(thing).__name__} of a module")
            held_now = [(each, kept(each, where)) for each in restorer.items(held)]
            others = {id(each): left for each, left in held_now if left is not each}
            unheld += [n for each, _ in held_now if id(each) in others for n in numbers_of(each)]
            found = with_exchanged(held, others) if others else held
            self._changed.append(_Changed(id(thing), type(thing), restorer, found))
        return unheld

    def is_present(self) -> bool:
        """Whether the call has changed none of it."""
        return not (self._changed or self._assigned)

    def restore(self, stack: ExitStack) -> None:
        """Give attributes and objects what they had at the call, until ``stack`` closes."""
        for slot, then in self._assigned:
            stack.callback(slot.write, slot.read())
            slot.write(then)
        stack.enter_context(self._swapped())

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        visited = Contents(self._values_now(), in_attributes=True).everything()
        present = {id(value): value for value in visited}
        entries = [
            (present[each.number], each.restorer, each.held)
            for each in self._changed
            if type(present.get(each.number)) is each.kind
        ]
        lists = [] if self._is_plan else [each for each, _, _ in entries if type(each) is list]
        swapped = swapped_contents(entries, lambda thing: f"a {type(thing).__name__}")
        with _logged(swapped, lists) if lists else swapped:
            yield
            self._note_made(entries, present)

    def _note_made(self, entries: Iterable[Entry], present: dict[int, Any]) -> None:
        now = [item for thing, kind, _ in entries for item in kind.items(kind.take(thing))]
        visited = Contents(now, in_attributes=True).everything()
        new = [value for value in visited if id(value) not in present]
        of_modules = [p for each in new if isinstance(each, nn.Module) for p in each.parameters()]
        made = [*of_modules, *(each for each in new if isinstance(each, nn.Parameter))]
        roots = [root for index in self._indexes if (root := index.root()) is not None]
        known = {id(p) for root in roots for p in root.parameters()} if made else set()
        self._made += [each for each in made if id(each) not in known]

    def _values_now(self) -> list[Any]:
        roots = [(index, index.root()) for index in self._indexes]
        values = [leading_values(root.__dict__, index) for index, root in roots if root is not None]
        return [value for each in values for value in each]


@contextmanager
def _logged(swapped: AbstractContextManager[None], lists: list[list[Any]]) -> Iterator[None]:
    """``swapped``, after which those of ``lists`` that are logs have what was added inside."""
    added: list[list[Any]] = []
    try:
        with swapped:
            before = [[*each] for each in lists]
            try:
                yield
            finally:
                added = [*map(_added_words, before, lists)]
    finally:
        for each, words in zip(lists, added, strict=False):  # none if there was an error before
            each.extend(words)


def _added_words(before: list[Any], now: list[Any]) -> list[Any]:
    """What was added to a list, if that is all that has changed, and it is no value to compute."""
    rest = now[len(before) :]
    is_log = all(map(is_, before, now)) and len(now) >= len(before) and all(map(_is_word, rest))
    return rest if is_log else []


def _is_word(value: Any) -> bool:
    return all(map(_is_word, value)) if type(value) in (list, tuple) else type(value) in _WORDS


def _attributes_of(index: ModuleIndex) -> Iterator[tuple[Slot, Any]]:
    """The attributes with contents, but for those that `ModuleSettings` restores."""
    root = index.root()
    spaces = [space for space, _ in index.user_modules]
    if root is not None and index.is_user_module:
        spaces.append(root.__dict__)
    for space in spaces:
        for name, value in [*space.items()]:
            if type(value) in ATOMS or name in STANDARD_ATTRIBUTES or has_tensors(value):
                continue
            if restorers_of(type(value)) not in _NO_CONTENTS and not is_left_alone(value):
                yield Slot(space, name), value


def _is_same(then: Any, now: Any) -> bool:
    """Whether it is the same object, or an equal tuple of constants, such as a size."""
    if type(then) is tuple and type(now) is tuple and len(then) == len(now):
        return all(
            a is b or (type(a) is type(b) in ATOMS and a == b)
            for a, b in zip(then, now, strict=True)
        )
    return then is now
