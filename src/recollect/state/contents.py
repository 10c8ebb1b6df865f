"""What lists, dicts and objects hold: one search for arguments and attributes, put back in place.

Contents are exchanged in place, on the user's own objects, which other arguments or a closure may
share. The search leaves out modules, and ends after a number of objects, counted from the outside
in. In attributes it also leaves out what is long, or belongs to the training around the module, or
to several threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from recollect.errors import CheckpointError, InputChanged
from recollect.state.iterators import StandIn, is_used_up, refusal_to_draw, with_exchanged
from recollect.state.restorers import (
    ARRAY,
    ARRAY_COPY,
    ATOMS,
    CAPTURED_ELSEWHERE,
    ITERATOR,
    TENSOR,
    Entry,
    Restorer,
    attribute_restorers,
    is_made_in_python,
    restorers_of,
)
from recollect.state.tensors import LARGE, are_statistics, is_small

_Tensor = torch.Tensor

#: How many objects are searched for one call; in attributes, and of how many items at most.
LIMIT = 1000
_IN_ATTRIBUTES = 300
_ITEMS = 1000
#: Seconds that a rerun waits for another thread's.
PATIENCE = 120.0

#: What has items. Whether there are too many is known without a copy of them.
_WITH_ITEMS: tuple[Any, ...] = (list, tuple, dict, set, frozenset, deque)
#: Packages whose objects run the training around a module.
_FRAMEWORKS = frozenset({"accelerate", "deepspeed", "lightning", "pytorch_lightning", "ray"})
#: Packages of what an object has that several threads use.
_OF_THREADS = frozenset({"_thread", "asyncio", "concurrent", "multiprocessing", "queue"})
_OF_THREADS |= {"_queue", "threading"}


class Contents:
    """The contents of everything mutable among some values and inside of them."""

    __slots__ = (
        *("_in_attributes", "captured_elsewhere", "copied", "entries", "iterator", "mutable"),
        "tensors",
    )

    def __init__(self, values: Collection[Any], *, in_attributes: bool = False) -> None:
        """``in_attributes``: the values are those of attributes of modules, not arguments."""
        self._in_attributes = in_attributes
        #: By the address of the object.
        self.entries: dict[int, list[Entry]] = {}
        #: Those of them that can change.
        self.mutable: list[Entry] = []
        #: Tensors; those that the region may write to (small ones without grad that something
        #: mutable holds), modules and random generators, which `RegionState` captures.
        self.tensors: list[_Tensor] = []
        self.copied: list[_Tensor] = []
        self.captured_elsewhere: list[Any] = []
        #: The first iterator among the arguments. Those in attributes get stand-ins.
        self.iterator: Any = None
        #: Items; whether they are arguments, or attributes; whether something mutable holds them.
        pending: list[tuple[Collection[Any], bool, bool]] = [(values, not in_attributes, False)]
        for items, are_arguments, are_state in pending:  # which grows meanwhile
            if len(items) > 8 and ATOMS.issuperset(map(type, items)):
                continue
            for value in items:
                if type(value) not in ATOMS and id(value) not in self.entries:
                    for _, restorer, held in self._add(value, are_arguments, are_state):
                        as_arguments = are_arguments and restorer.holds_arguments
                        as_state = are_state or restorer.mutable
                        pending.append((restorer.items(held), as_arguments, as_state))

    def _add(self, value: Any, is_argument: bool, is_state: bool) -> list[Entry]:
        cls = type(value)
        restorers = TENSOR if cls is _Tensor else restorers_of(cls)
        if restorers is ITERATOR:
            if cls is StandIn:  # of this rerun, or of one around it
                return []
            if is_argument or not is_made_in_python(cls):
                self.iterator = value if self.iterator is None else self.iterator
                return []
            restorers = attribute_restorers(cls)
        if restorers is TENSOR:
            if not value.is_inference():  # those have no version, and cannot be changed in place
                is_copied = (is_state and is_small(value)) or are_statistics(value)
                (self.copied if is_copied else self.tensors).append(value)
        elif restorers is CAPTURED_ELSEWHERE:
            self.captured_elsewhere.append(value)
        elif restorers and len(self.entries) < (_IN_ATTRIBUTES if self._in_attributes else LIMIT):
            entries = self.entries[id(value)] = self._take(value, restorers, is_argument)
            self.mutable += [entry for entry in entries if entry[1].mutable]
            return entries
        return []

    def _take(self, value: Any, restorers: Iterable[Restorer], is_argument: bool) -> list[Entry]:
        if self._in_attributes:
            if is_left_alone(value):
                return []
            restorers = _with_copies(value, restorers)
        entries = []
        for restorer in restorers:
            held = restorer.take(value)
            if restorer.mutable and not (is_argument and restorer.holds_arguments):
                owner = "a module" if self._in_attributes else "an argument"
                held = _with_stand_ins(value, restorer, held, owner)
            entries.append((value, restorer, held))
        if self._in_attributes and any(_are_left_alone(r.items(held)) for _, r, held in entries):
            return []
        return entries

    def everything(self) -> list[Any]:
        """All that was found, but for what is left alone."""
        things = [entries[0][0] for entries in self.entries.values() if entries]
        return [*things, *self.tensors, *self.copied, *self.captured_elsewhere]

    def parts(self, value: Any) -> list[tuple[str, Any]]:
        """The items of ``value``, each with the suffix that names it."""
        entries = self.entries.get(id(value), ())
        return [part for _, restorer, held in entries for part in restorer.parts(held)]


def _with_stand_ins(thing: Any, restorer: Restorer, held: Any, owner: str) -> Any:
    """The contents ``held``, with stand-ins for iterators. ``owner``: what ``thing`` is part of."""
    if not any(map(is_used_up, restorer.items(held))):
        return held
    stand_ins = {
        id(value): StandIn(
            value, refusal_to_draw(f"{type(thing).__name__}{suffix} of {owner}", value)
        )
        for suffix, value in restorer.parts(held)
        if is_used_up(value)
    }
    return with_exchanged(held, stand_ins)


# --- what attributes of modules hold --------------------------------------------------------------


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def is_left_alone(value: Any) -> bool:
    """Whether the contents of a value in an attribute of a module are none of the region's."""
    cls = type(value)
    base = next((base for base in _WITH_ITEMS if issubclass(cls, base)), None)
    return _package(cls) in _FRAMEWORKS or (base is not None and base.__len__(value) > _ITEMS)


def _are_left_alone(items: Collection[Any]) -> bool:
    """Whether there are too many, or one that several threads use."""
    return len(items) > _ITEMS or any(_package(cls) in _OF_THREADS for cls in {*map(type, items)})


def _with_copies(value: Any, restorers: Iterable[Restorer]) -> Iterable[Restorer]:
    """The same, but an array is copied, or left alone if it is large."""
    if ARRAY not in restorers:
        return restorers
    copies = () if getattr(value, "nbytes", 0) > LARGE else (ARRAY_COPY,)
    return *copies, *(each for each in restorers if each is not ARRAY)


# --- put back for a while -------------------------------------------------------------------------

#: Held by the thread whose rerun has swapped contents. Backward has a thread for each device.
_swapping = threading.RLock()


@contextmanager
def swapped_contents(entries: list[Entry], name: Callable[[Any], str] | None) -> Iterator[None]:
    """A context in which objects have the contents of ``entries``.

    What cannot be restored raises ``InputChanged`` with its ``name``, or is left as it is without.
    """
    if not _swapping.acquire(timeout=PATIENCE):
        raise CheckpointError(_STUCK)
    with ExitStack() as stack:
        stack.callback(_swapping.release)
        differ = [not restorer.same(thing, held) for thing, restorer, held in entries]
        for (thing, restorer, held), differs in zip(entries, differ, strict=True):
            present = restorer.take(thing) if differs else held
            if not differs or _put((thing, restorer, held), name):
                stack.callback(_put_back, (thing, restorer, present), differs, name)
        yield


def _put_back(entry: Entry, was_changed: bool, name: Callable[[Any], str] | None) -> None:
    if was_changed or not entry[1].same(entry[0], entry[2]):
        _put(entry, name)


def _put(entry: Entry, name: Callable[[Any], str] | None) -> bool:
    thing, restorer, held = entry
    try:
        restorer.put(thing, held)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if name is None:
            return False
        raise InputChanged(
            f"{name(thing)} of a checkpointed region changed: {error}. It cannot be put back for "
            "the recomputation. Pass a copy to the region, or change it after backward."
        ) from error
    return True


_STUCK = (
    "two threads recompute regions with arguments that have to be restored, such as the same "
    f"list, and one has waited {PATIENCE:.0f} seconds for the other. Does a region call backward "
    "inside of itself, over several devices? Pass it tensors and tuples only."
)
