"""What became of the ops of a region in forward, for its recomputation to find.

The ledger has for each op the number of its calls and, by number, those whose results were kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from recollect.errors import KeptTensorError
from recollect.selective.origins import Origins
from recollect.state.rng import RngState
from recollect.store.deposit import Deposit, Looks, Parcel, looks_of
from recollect.store.handles import version_of
from recollect.torch_private import (
    OpOverload,
    below_python,
    inductor_region_key,
    storage_key,
    tree_leaves,
    tree_map_only,
)

__all__ = ["ELSEWHERE", "Calls", "Entry", "Kept", "Ledger", "Vacant"]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` with its strides, which ``clone`` does not always keep."""
    if tensor.layout is not torch.strided or 0 in tensor.stride():
        return tensor.clone()
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


class Kept:
    """A tensor kept from forward, with the version it had."""

    __slots__ = ("val", "version")

    def __init__(self, detached: torch.Tensor) -> None:
        self.val = detached
        self.version = version_of(detached)

    @property
    def looks(self) -> Looks | None:
        """What it looks like."""
        return looks_of(self.val)

    @property
    def memory(self) -> int | None:
        """Which memory it is."""
        return storage_key(self.val)

    def before_write(self, _tensor: torch.Tensor) -> None:
        """Have a copy of one's own: what is kept is about to be changed in place."""
        self.val = _copy(self.val)
        self.version = version_of(self.val)

    def take(self, *, allow_mutation: bool) -> torch.Tensor:
        """The tensor, if it is what it was."""
        if version_of(self.val) != self.version and not allow_mutation:
            raise KeptTensorError(
                "Tensor cached during selective activation checkpoint has been mutated: a tensor "
                f"of shape {list(self.val.shape)} that the policy keeps was changed in place "
                "afterwards. Recompute that op, or replace the in-place operation that follows it."
            )
        return self.val


class Vacant:
    """The place of a result that no op and no gradient reads: its looks, and no memory.

    What stands in for it is filled such that nobody can mistake it for the result.
    """

    __slots__ = ("_looks",)

    def __init__(self, looks: Looks) -> None:
        self._looks = looks

    def get(self) -> torch.Tensor:
        """A tensor of the same looks."""
        shape, stride, dtype, device = self._looks
        with below_python():
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            return tensor.fill_(float("nan"))


#: Up to so many numbers on the CPU somebody may want as a list: ``losses.tolist()``.
_LISTED = 256


def _may_be_listed(looks: Looks | None) -> bool:
    """Whether Python may read the numbers of such a tensor without an op."""
    if looks is None or not looks[2].is_floating_point:
        return True
    return looks[3].type == "cpu" and looks[0].numel() <= _LISTED


class Entry:
    """The results of one call that were kept."""

    # No slots: what is rarely set has its default here.

    #: When the first op ran that reads it and will run again; None if none has.
    first_use: int | None = None
    #: Whether autograd saved it, or somebody may read it whom we do not see.
    saved = False
    #: Whether the results require grad.
    has_gradient = False
    #: Whether there is nothing to give but a stand-in; whether it is not even asked for.
    is_vacant = False
    dropped = False
    #: Whether it has been given out.
    is_consumed = False
    #: The calls that changed the results in place afterwards, and when.
    changes: Sequence[tuple[Calls, int, int]] = ()

    def __init__(
        self, results: Any, inputs: tuple[Any, ...], clock: int, rng: RngState | None
    ) -> None:
        #: What the op returned, with `Kept` or `Parcel` in the places of tensors.
        self.results = results
        #: The op and what went in, in labels.
        self.inputs = inputs
        self.label = hash(inputs)
        #: When the op ran, counted in ops.
        self.clock = clock
        #: Where the op left the random streams, if it drew from them.
        self.rng = rng

    def note_use(self, clock: int) -> None:
        """An op that will run again reads it."""
        if self.first_use is None:
            self.first_use = clock

    def is_read_until(self, clock: int) -> bool:
        """Whether a gradient needs the results, or an op that runs again until then."""
        return self.saved or (self.first_use is not None and self.first_use <= clock)

    def _places(self, memory: int | None) -> list[Kept | Parcel]:
        if memory is None:
            return []
        leaves = [self.results] if type(self.results) is Kept else tree_leaves(self.results)
        return [x for x in leaves if isinstance(x, (Kept, Parcel)) and x.memory == memory]

    def is_in(self, memory: int | None) -> bool:
        """Whether a result is in that memory."""
        return bool(self._places(memory))

    def before_write(self, tensor: torch.Tensor, memory: int | None) -> bool:
        """To be called before ``tensor`` is written to: whether a result is in its memory."""
        places = self._places(memory)
        for place in places:
            place.before_write(tensor)
        return bool(places)

    @property
    def takes_an_op_to_read(self) -> bool:
        """Whether Python cannot read the results as it reads ``counts.tolist()``."""
        results = self.results
        places = results if isinstance(results, (list, tuple)) else (results,)
        return self.has_gradient and all(
            isinstance(place, (Kept, Parcel)) and not _may_be_listed(place.looks)
            for place in places
        )

    def vacate(self) -> None:
        """Let go of the memory."""
        places = (Kept, Parcel)
        self.results = tree_map_only(places, lambda each: Vacant(each.looks), self.results)
        self.is_vacant = True

    def take(self, *, allow_mutation: bool) -> Any:
        """What the op returned, given out for good."""
        out = self.look(allow_mutation=allow_mutation)
        self.results, self.is_consumed = None, True
        return out

    def look(self, *, allow_mutation: bool = False) -> Any:
        """What the op returned."""
        results = self.results
        if type(results) is Kept:
            return results.take(allow_mutation=allow_mutation)
        if type(results) in _PLACES:
            return results.get()

        def give(place: Any) -> Any:
            return place.take(allow_mutation=allow_mutation) if type(place) is Kept else place.get()

        return tree_map_only((Kept, *_PLACES), give, results)


_PLACES = (Parcel, Vacant)


class _Elsewhere:
    """Holds what the region did not make: nobody needs to care for that."""

    saved = False

    def note_use(self, clock: int) -> None:
        """Of no interest."""


ELSEWHERE = _Elsewhere()


class Calls:
    """The calls of one op in forward."""

    __slots__ = ("count", "entries", "key", "op")

    def __init__(self, op: Any, key: Any) -> None:
        self.op = op
        #: What tells them from the calls of others.
        self.key = key
        self.count = 0
        #: By number of the call.
        self.entries: dict[int, Entry] = {}


class Ledger:
    """The calls of a region's ops."""

    __slots__ = (
        "_lock",
        "calls",
        "deposit",
        "is_complete",
        "origins",
        "replays",
        "sequence",
        "steps",
    )

    def __init__(self, deposit: Deposit) -> None:
        #: By `key_of`.
        self.calls: dict[Any, Calls] = {}
        #: The keys of all calls, in order.
        self.sequence: list[Any] = []
        #: How many there had been when autograd saved the last tensor.
        self.steps = 0
        self.origins = Origins()
        #: Whether forward is over.
        self.is_complete = False
        #: Where kept tensors go that do not stay where they are.
        self.deposit = deposit
        #: How many recomputations are under way. One that runs while forward is not over yet (the
        #: function goes backward inside) is seen by the mode of forward, which must not record it.
        self.replays = 0
        self._lock = threading.Lock()

    def begin_replay(self) -> bool:
        """A recomputation begins: whether it is the only one, and may have what was kept."""
        with self._lock:
            self.replays += 1
            return self.replays == 1

    def end_replay(self) -> None:
        """It has ended."""
        with self._lock:
            self.replays -= 1

    @staticmethod
    def key_of(op: Any, args: tuple[Any, ...]) -> Any:
        """What tells the calls of ``op`` from those of others."""
        # Ops live for good, and hash slowly.
        return id(op) if type(op) is OpOverload else inductor_region_key(op, args)

    def calls_of(self, op: Any, args: tuple[Any, ...]) -> Calls:
        """The calls of an op, begun if it is new."""
        key = self.key_of(op, args)
        calls = self.calls.get(key)
        if calls is None:
            calls = self.calls[key] = Calls(op, key)
        return calls

    def drop(self, calls: Calls, number: int) -> None:
        """Do not keep them after all."""
        entry = calls.entries.pop(number)
        entry.dropped, entry.results = True, None
