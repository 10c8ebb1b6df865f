"""Containers and objects among the arguments of a region, as they were when it was called.

A list grows, a counter on an object goes up, a cache gets longer: by the time of backward an
argument holds something else than the region saw. A rerun must find it as it was, and whatever the
rerun does to it must not be seen by anybody, since forward has done it already. So

    at the call     what each of them held is written down, one level at a time      ``Contents``
    before a rerun  those that hold something else now get their former contents     ``swap``
    after it        each gets back what it held before                               ``put_back``

All of this is done to the user's own objects, in place: two arguments that were one list are one
list, and a closure that has the same list sees the same items. ``kinds`` says how.

Looked into: lists, dicts, sets, deques and whatever derives from them; tuples, for what is inside;
objects that have a ``__dict__`` or ``__slots__``. Arrays and bytearrays are compared by content:
small ones are put back, of large ones there is a checksum, and a change is an error. Small tensors
without grad are copied, if something that can change holds them: a region that counts in a dict may
do so. An iterator cannot be put back: as an argument it is refused. One that an attribute leads to,
as in an object that has much else, may be of no concern to the region: a rerun finds a stand-in
that raises if it is drawn from. Not looked into are modules and what else ``kinds`` leaves alone,
and everything beyond the first ``LIMIT`` things, counted from the outside in.

What was taken is held for as long as the graph of the region lives, and so are the things. A thing
that comes to hold what the region has made thus holds itself, until backward frees the graph; this
is so with torch too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from recollect.checks.changed_input import argument_changed
from recollect.errors import CheckpointError, InputChanged
from recollect.settings import recomputing
from recollect.state.restorers import (
    ATOMS,
    CARED_FOR,
    ITERATOR,
    SMALL_TENSOR,
    TENSOR,
    Kind,
    Kinds,
    attribute_kinds,
    is_made_in_python,
    kinds_of,
)
from recollect.state.tensors import are_statistics, is_small

__all__ = ["Contents", "StandIn", "Swapped"]

_Tensor = torch.Tensor

#: How many things are looked into for one call.
LIMIT = 1000
#: Seconds that a rerun waits for one in another thread that uses the same container.
PATIENCE = 120.0

#: A thing, its kind, and what it held.
_Entry = tuple[Any, Kind, Any]


class Contents:
    """What everything that can change, among some values and inside of them, held at one moment."""

    __slots__ = ("_busy", "_entries", "_mutable", "cared_for", "tensors")

    def __init__(self) -> None:
        #: By the address of the thing.
        self._entries: dict[int, list[_Entry]] = {}
        #: Those of them that can change.
        self._mutable: list[_Entry] = []
        #: The addresses of what the region itself changes, once that is known.
        self._busy: set[int] | None = None
        #: The tensors that were met, save those of which there is a copy.
        self.tensors: list[_Tensor] = []
        #: Modules and random generators that were met: others see to their state.
        self.cared_for: list[Any] = []

    def look_into(self, values: Collection[Any]) -> Any:
        """Write down what ``values`` hold. Returns an iterator that cannot be there, or None."""
        entries = self._entries
        #: What to look at, whether these are arguments or attributes, and whether they can change.
        pending: list[tuple[Collection[Any], bool, bool]] = [(values, True, False)]
        for items, are_arguments, are_state in pending:  # which grows meanwhile
            if len(items) > 8 and ATOMS.issuperset(map(type, items)):
                continue
            for value in items:
                cls = type(value)
                if cls in _NO_CONTENTS or id(value) in entries:
                    continue
                kinds = TENSOR if cls is _Tensor else kinds_of(cls)
                if kinds is ITERATOR:
                    if are_arguments or not is_made_in_python(cls):
                        return value
                    kinds = tuple(attribute_kinds(cls))
                if kinds is TENSOR:
                    self._add_tensor(value, are_state)
                elif kinds is CARED_FOR:
                    self.cared_for.append(value)
                elif kinds and len(entries) < LIMIT:
                    for kind, contents in self._add(value, kinds, are_arguments):
                        as_arguments = are_arguments and kind.holds_arguments
                        as_state = are_state or kind.mutable
                        pending.append((kind.items(contents), as_arguments, as_state))
        return None

    def _add(self, thing: Any, kinds: Kinds, is_argument: bool = True) -> list[tuple[Kind, Any]]:
        entries: list[_Entry] = []
        for kind in kinds:
            taken = kind.take(thing)
            if not (is_argument and kind.holds_arguments):
                taken = _with_stand_ins(thing, kind, taken)
            entries.append((thing, kind, taken))
        self._entries[id(thing)] = entries
        self._mutable += [entry for entry in entries if entry[1].mutable]
        return [(kind, taken) for _, kind, taken in entries]

    def _add_tensor(self, tensor: _Tensor, is_state: bool) -> None:
        if tensor.is_inference():  # those have no version, and cannot be changed in place
            return
        is_watched = (is_state and is_small(tensor)) or are_statistics(tensor)
        if is_watched and len(self._entries) < LIMIT:
            self._add(tensor, (SMALL_TENSOR,))
        else:
            self.tensors.append(tensor)

    def has(self, thing: Any) -> bool:
        """Whether ``thing`` is among what is put back."""
        return id(thing) in self._entries

    def parts(self, value: Any) -> list[tuple[str, Any]]:
        """What was in ``value``, each with what it adds to its name."""
        return [
            part
            for _, kind, taken in self._entries.get(id(value), ())
            for part in kind.parts(taken)
        ]

    def gained_history(self) -> _Tensor | None:
        """A copied tensor to which the region wrote what requires grad: it cannot be put back."""
        for thing, kind, _ in self._mutable:
            if kind is SMALL_TENSOR and thing.requires_grad:
                return thing  # type: ignore[no-any-return]
        return None

    def settle(self) -> None:
        """Note what the region itself has changed: it will do so again in a rerun."""
        self._busy = {
            id(thing) for thing, kind, taken in self._mutable if not kind.same(thing, taken)
        }

    def swap(self, name: Callable[[Any], str], *, guard: bool) -> Swapped | None:
        """Give everything its contents back until the result is told to ``put_back``.

        A tensor that the region left alone may not have changed, as in plain autograd. That, and
        what cannot be put back, is an ``InputChanged`` with its ``name``; without ``guard`` both
        are left as they are.
        """
        if not self._mutable:
            return None
        return Swapped(self._mutable, self._busy, name if guard else None)


class Swapped:
    """Things that have their former contents for a while."""

    __slots__ = ("_before", "_claimed")

    def __init__(
        self, entries: list[_Entry], busy: set[int] | None, name: Callable[[Any], str] | None
    ) -> None:
        differ, self._claimed = _claims.take(entries, busy or set())
        #: What each holds without us, and whether it was given something else.
        self._before: list[tuple[_Entry, bool]] = []
        try:
            for entry, differs in zip(entries, differ, strict=True):
                if differs:
                    if busy is None or id(entry[0]) in busy or entry[1] is not SMALL_TENSOR:
                        self._exchange(entry, name)
                    elif name is not None:
                        self._refuse(entry, name)
                elif entry[1].is_whole(entry[2]):
                    self._before.append((entry, False))
        except BaseException:
            self.put_back()
            raise

    def _exchange(self, entry: _Entry, name: Callable[[Any], str] | None) -> None:
        thing, kind, taken = entry
        before = kind.hold(thing)
        try:
            kind.put(thing, taken)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if name is not None:
                raise _not_put_back(name(thing), kind.difference(thing, taken), error) from error
        else:
            self._before.append(((thing, kind, before), True))

    @staticmethod
    def _refuse(entry: _Entry, name: Callable[[Any], str]) -> None:
        tensor, _, (version, _) = entry
        raise argument_changed(name(tensor), tensor, version, "after the region ran")

    def put_back(self) -> None:
        """Give everything what it held before, whatever has happened to it since."""
        before, self._before = self._before, []
        claimed, self._claimed = self._claimed, []
        try:
            for (thing, kind, held), was_changed in before:
                if was_changed or not kind.same(thing, held):
                    kind.put(thing, held)
        finally:
            _claims.give_back(claimed)


# --- iterators in attributes ----------------------------------------------------------------------


class StandIn:
    """Stands for an iterator while a region is rerun, which would find it used up."""

    __slots__ = ("_iterator", "_name")

    def __init__(self, iterator: Any, name: str) -> None:
        self._iterator = iterator
        self._name = name

    def __iter__(self) -> StandIn:
        return self

    def __next__(self) -> Any:
        self._before_draw()
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name in _DRAWING:
            self._before_draw()
        return getattr(self._iterator, name)

    def _before_draw(self) -> None:
        if recomputing.depth:  # or it is another thread, that has nothing to do with the rerun
            raise InputChanged(
                f"{self._name} of an argument of a checkpointed region is an iterator "
                f"({type(self._iterator).__name__}), which can be gone through only once, and the "
                "recomputation of the region draws from it. Take the item outside and pass it as "
                "an argument, or hold a list and the number of the next item."
            )


#: The methods of generators by which they are drawn from.
_DRAWING = frozenset({"send", "throw", "close", "asend", "athrow", "aclose", "__anext__"})


def _with_stand_ins(thing: Any, kind: Kind, taken: Any) -> Any:
    """What was taken, with stand-ins for the iterators in it, if these can be put there."""
    if not kind.mutable or not any(map(_is_used_up, kind.items(taken))):
        return taken
    names = {id(value): type(thing).__name__ + suffix for suffix, value in kind.parts(taken)}

    def stand_in(value: Any) -> Any:
        return StandIn(value, names[id(value)]) if _is_used_up(value) else value

    if isinstance(taken, dict):
        return {key: stand_in(value) for key, value in taken.items()}
    return [stand_in(value) for value in taken]


def _is_used_up(value: Any) -> bool:
    """Whether ``value`` is an iterator of which a rerun would not find what forward has found."""
    cls = type(value)
    return cls not in ATOMS and kinds_of(cls) is ITERATOR and not is_made_in_python(cls)


# One that is met is that of a rerun around.
_NO_CONTENTS = ATOMS | {StandIn}


def _not_put_back(name: str, difference: str, error: Exception) -> InputChanged:
    return InputChanged(
        f"{name} of a checkpointed region changed: {difference}. It cannot be put back for the "
        f"recomputation ({error}). Pass a copy to the region, or change it after backward."
    )


# --- threads --------------------------------------------------------------------------------------


#: The address of a thing, the thread that uses it, and whether that changes it.
_Claim = tuple[int, tuple[int, bool]]


class _Claims:
    """Which threads use which things in a rerun.

    Backward runs on as many threads as there are devices. A thing that is as it was at the call can
    serve any number of reruns at once. One that is given other contents, or that the region itself
    changes, serves the reruns of one thread: others wait.
    """

    def __init__(self) -> None:
        self._released = threading.Condition()
        #: By the address of the thing: the threads that use it, and whether they change it.
        self._users: dict[int, list[tuple[int, bool]]] = {}

    def take(self, entries: list[_Entry], busy: set[int]) -> tuple[list[bool], list[_Claim]]:
        """Whether each of ``entries`` differs from its thing now, and what to give back."""
        me = threading.get_ident()
        things = {id(thing) for thing, _, _ in entries}
        differ: list[bool] = []
        to_change: set[int] = set()

        def is_free() -> bool:
            if self._in_use(things, me, by_readers=False):
                return False
            differ[:] = [not kind.same(thing, taken) for thing, kind, taken in entries]
            changed = [
                id(entry[0]) for entry, differs in zip(entries, differ, strict=True) if differs
            ]
            to_change.clear()
            to_change.update(busy, changed)
            return not self._in_use(to_change, me, by_readers=True)

        with self._released:
            if not self._released.wait_for(is_free, PATIENCE):
                raise CheckpointError(_STUCK)
            claimed = [(thing, (me, thing in to_change)) for thing in things]
            for thing, use in claimed:
                self._users.setdefault(thing, []).append(use)
        return differ, claimed

    def give_back(self, claimed: list[_Claim]) -> None:
        """End what ``take`` began."""
        with self._released:
            for thing, use in claimed:
                uses = self._users[thing]
                uses.remove(use)
                if not uses:
                    del self._users[thing]
            self._released.notify_all()

    def _in_use(self, things: Iterable[int], me: int, *, by_readers: bool) -> bool:
        users = self._users
        return bool(users) and any(
            user != me and (by_readers or writes)
            for thing in things
            for user, writes in users.get(thing, ())
        )


_claims = _Claims()

_STUCK = (
    "two threads recompute regions that use the same container, or object, as it was at different "
    f"times, and one has waited {PATIENCE:.0f} seconds for the other. If a region goes backward "
    "inside of itself, over several devices, give each region a container of its own."
)
