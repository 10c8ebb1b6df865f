"""Containers and objects among the arguments of a region, as they were when it was called.

A list grows, a counter on an object goes up, a cache gets longer: by the time of backward an
argument no longer holds what the region saw. A rerun must find it as it was, and nobody may see
what the rerun does to it, since forward has done that already. So

    at the call     `ArgumentSnapshot.add` takes the contents of each
    before a rerun  `swap` puts them back where they differ
    after it        `Swapped.put_back` undoes that

in place, on the user's own objects: two arguments that were one list are one list, and a closure
that has the same list sees the same items. `restorers` has the types that are looked into.

Large arrays are compared by a checksum, and a change is an error. Small tensors without grad are
copied if something mutable holds them: a region that counts in a dict may do so. An iterator cannot
be put back: as an argument it is refused; for one in an attribute a rerun finds a stand-in that
raises if it is drawn from. Not looked into are modules, and everything beyond the first ``LIMIT``
things, counted from the outside in.

Contents are held for as long as the graph of the region lives. A thing that comes to hold a result
of the region thus holds itself, until backward frees the graph; so it does with torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import torch

from recollect.checks.changed_input import argument_changed
from recollect.errors import CheckpointError, InputChanged
from recollect.settings import recomputing
from recollect.state.iterators import StandIn, is_used_up, with_replaced
from recollect.state.restorers import (
    ATOMS,
    CAPTURED_ELSEWHERE,
    ITERATOR,
    SMALL_TENSOR,
    TENSOR,
    Entry,
    Restorer,
    Restorers,
    attribute_restorers,
    difference,
    hold,
    is_made_in_python,
    is_whole,
    restorers_of,
)
from recollect.state.tensors import are_statistics, is_small

__all__ = ["ArgumentSnapshot", "Swapped"]

_Tensor = torch.Tensor

#: How many things are looked into for one call.
LIMIT = 1000
#: Seconds that a rerun waits for another thread's.
PATIENCE = 120.0

# A stand-in is that of a rerun around this call.
_NO_CONTENTS = ATOMS | {StandIn}


class ArgumentSnapshot:
    """The contents of everything mutable among some values and inside of them."""

    __slots__ = ("_changed_inside", "_mutable", "captured_elsewhere", "entries", "tensors")

    def __init__(self) -> None:
        #: By the address of the thing.
        self.entries: dict[int, list[Entry]] = {}
        #: Those of them that can change.
        self._mutable: list[Entry] = []
        #: The addresses of what the region itself changes, once that is known.
        self._changed_inside: set[int] | None = None
        #: The tensors that were found, except those that are copied.
        self.tensors: list[_Tensor] = []
        #: Modules and random generators that were found: `RegionState` captures them.
        self.captured_elsewhere: list[Any] = []

    def add(self, values: Collection[Any]) -> Any:
        """Take the contents of ``values``. Returns an iterator that cannot be there, or None."""
        entries = self.entries
        #: Items, whether they are arguments or attributes, and whether they can change.
        pending: list[tuple[Collection[Any], bool, bool]] = [(values, True, False)]
        for items, are_arguments, are_state in pending:  # which grows meanwhile
            if len(items) > 8 and ATOMS.issuperset(map(type, items)):
                continue
            for value in items:
                cls = type(value)
                if cls in _NO_CONTENTS or id(value) in entries:
                    continue
                restorers = TENSOR if cls is _Tensor else restorers_of(cls)
                if restorers is ITERATOR:
                    if are_arguments or not is_made_in_python(cls):
                        return value
                    restorers = attribute_restorers(cls)
                if restorers is TENSOR:
                    self._add_tensor(value, are_state)
                elif restorers is CAPTURED_ELSEWHERE:
                    self.captured_elsewhere.append(value)
                elif restorers and len(entries) < LIMIT:
                    for _, restorer, held in self._add(value, restorers, are_arguments):
                        as_arguments = are_arguments and restorer.holds_arguments
                        as_state = are_state or restorer.mutable
                        pending.append((restorer.items(held), as_arguments, as_state))
        return None

    def _add(self, thing: Any, restorers: Restorers, is_argument: bool = True) -> list[Entry]:
        entries: list[Entry] = []
        for restorer in restorers:
            held = restorer.take(thing)
            if restorer.mutable and not (is_argument and restorer.holds_arguments):
                held = _with_stand_ins(thing, restorer, held)
            entries.append((thing, restorer, held))
        self.entries[id(thing)] = entries
        self._mutable += [entry for entry in entries if entry[1].mutable]
        return entries

    def _add_tensor(self, tensor: _Tensor, is_state: bool) -> None:
        if tensor.is_inference():  # those have no version, and cannot be changed in place
            return
        is_copied = (is_state and is_small(tensor)) or are_statistics(tensor)
        if is_copied and len(self.entries) < LIMIT:
            self._add(tensor, (SMALL_TENSOR,))
        else:
            self.tensors.append(tensor)

    def parts(self, value: Any) -> list[tuple[str, Any]]:
        """The items that ``value`` held, each with the suffix that names it."""
        entries = self.entries.get(id(value), ())
        return [part for _, restorer, held in entries for part in restorer.parts(held)]

    def settle(self) -> _Tensor | None:
        """Note what the region itself has changed: it will do so again in a rerun.

        Returns a copied tensor to which it wrote what requires grad: that cannot be put back.
        """
        for thing, restorer, _ in self._mutable:
            if restorer is SMALL_TENSOR and thing.requires_grad:
                return thing  # type: ignore[no-any-return]
        self._changed_inside = {id(t) for t, r, held in self._mutable if not r.same(t, held)}
        return None

    def swap(self, name: Callable[[Any], str], *, guard: bool) -> Swapped | None:
        """Put all contents back until the result is told to ``put_back``.

        A tensor that the region left alone may not have changed, as in plain autograd. That, and
        what cannot be put back, is an ``InputChanged`` with its ``name``; without ``guard`` both
        are left as they are.
        """
        if not self._mutable:
            return None
        return Swapped(self._mutable, self._changed_inside, name if guard else None)


#: Held by the thread whose rerun has swapped contents. Backward has a thread for each device.
_swapping = threading.RLock()


class Swapped:
    """Things that have their former contents for a while."""

    __slots__ = ("_before", "_is_over")

    def __init__(
        self,
        entries: list[Entry],
        changed_inside: set[int] | None,
        name: Callable[[Any], str] | None,
    ) -> None:
        if not _swapping.acquire(timeout=PATIENCE):
            raise CheckpointError(_STUCK)
        #: What each holds without us, and whether it was given other contents.
        self._before: list[tuple[Entry, bool]] = []
        self._is_over = False
        try:
            differ = [not restorer.same(thing, held) for thing, restorer, held in entries]
            for entry, differs in zip(entries, differ, strict=True):
                thing, restorer, held = entry
                if not differs:
                    if is_whole(restorer, held):
                        self._before.append((entry, False))
                elif restorer is SMALL_TENSOR and not _is_in(thing, changed_inside):
                    _refuse(entry, name)
                else:
                    self._exchange(entry, name)
        except BaseException:
            self.put_back()
            raise

    def _exchange(self, entry: Entry, name: Callable[[Any], str] | None) -> None:
        thing, restorer, held = entry
        before = hold(thing, restorer)
        try:
            restorer.put(thing, held)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if name is not None:
                what = difference(thing, restorer, held)
                raise _not_put_back(name(thing), what, error) from error
        else:
            self._before.append(((thing, restorer, before), True))

    def put_back(self) -> None:
        """Give everything what it held before, whatever has happened to it since."""
        if self._is_over:
            return
        before, self._before, self._is_over = self._before, [], True
        try:
            for (thing, restorer, held), was_changed in before:
                if was_changed or not restorer.same(thing, held):
                    restorer.put(thing, held)
        finally:
            _swapping.release()


def _is_in(thing: Any, changed_inside: set[int] | None) -> bool:
    return changed_inside is None or id(thing) in changed_inside


def _refuse(entry: Entry, name: Callable[[Any], str] | None) -> None:
    tensor, _, (version, _) = entry
    if name is not None:
        raise argument_changed(name(tensor), tensor, version, "after the region ran")


def _with_stand_ins(thing: Any, restorer: Restorer, held: Any) -> Any:
    """What was taken, with stand-ins for the iterators in it."""
    if not any(map(is_used_up, restorer.items(held))):
        return held
    names = {id(value): type(thing).__name__ + suffix for suffix, value in restorer.parts(held)}

    def stand_in(value: Any) -> Any:
        if not is_used_up(value):
            return value
        name, kind = names[id(value)], type(value).__name__
        # Not for another thread, which has nothing to do with the rerun.
        return StandIn(value, lambda: _drawn_from(name, kind) if recomputing.depth else None)

    return with_replaced(held, stand_in)


# --- errors ---------------------------------------------------------------------------------------


def _not_put_back(name: str, difference: str, error: Exception) -> InputChanged:
    return InputChanged(
        f"{name} of a checkpointed region changed: {difference}. It cannot be put back for the "
        f"recomputation ({error}). Pass a copy to the region, or change it after backward."
    )


def _drawn_from(name: str, kind: str) -> InputChanged:
    return InputChanged(
        f"{name} of an argument of a checkpointed region is an iterator ({kind}), which can be "
        "gone through only once, and the recomputation of the region draws from it. Take the item "
        "outside and pass it as an argument, or hold a list and the number of the next item."
    )


_STUCK = (
    "two threads recompute regions whose arguments have to be put back to what they were, such as "
    f"the same container, and one has waited {PATIENCE:.0f} seconds for the other. Does a region "
    "go backward inside of itself, over several devices? Pass it tensors and tuples only."
)
