"""What became of the ops of a region in forward, for its recomputation to find.

The ledger has the ops in the order of their calls, and the results of those calls that were kept.
A call is known by its step: how many there were before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from recollect._torch.dynamo import inductor_region_key
from recollect._torch.modes import below_python
from recollect._torch.ops import OpOverload
from recollect._torch.pytree import tree_leaves, tree_map_only
from recollect._torch.tensors import is_plain_tensor, storage_key, version_of
from recollect.errors import KeptTensorError
from recollect.rerun.selective.origins import Origins
from recollect.state.rng import RngState
from recollect.store.offload_batch import Metadata, OffloadBatch, OffloadedTensor, metadata_of
from recollect.store.spans import laid_out

__all__ = ["ELSEWHERE", "Entry", "Kept", "Ledger", "Vacant", "map_only"]


def map_only(kinds: Any, function: Callable[[Any], Any], results: Any) -> Any:
    """``results`` of an op with each of ``kinds`` replaced by what ``function`` makes of it.

    A tuple is what ops return as a rule, and `tree_map_only` takes its time.
    """
    if type(results) is not tuple:
        return tree_map_only(kinds, function, results)
    return tuple(
        [
            function(each) if isinstance(each, kinds) else map_only(kinds, function, each)
            for each in results
        ]
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` with its strides, which ``clone`` does not always keep."""
    return laid_out(tensor, tensor.stride(), 0) if is_plain_tensor(tensor) else tensor.clone()


class Kept:
    """A tensor kept from forward, with the version it had."""

    __slots__ = ("val", "version")

    def __init__(self, detached: torch.Tensor) -> None:
        self.val = detached
        self.version = version_of(detached)

    @property
    def metadata(self) -> Metadata | None:
        """Shape, strides, dtype and device."""
        return metadata_of(self.val)

    @property
    def memory(self) -> int | None:
        """Which memory it is."""
        return storage_key(self.val)

    def before_write(self) -> None:
        """Have a copy of one's own: what is kept is about to be changed in place."""
        self.val = _copy(self.val)
        self.version = version_of(self.val)

    def take(self, *, allow_mutation: bool) -> torch.Tensor:
        """The tensor, if it is what it was."""
        is_counted = self.version is not None
        if is_counted and self.val._version != self.version and not allow_mutation:
            raise KeptTensorError(
                "Tensor cached during selective activation checkpoint has been mutated: a tensor "
                f"of shape {list(self.val.shape)} that the policy keeps was changed in place "
                "afterwards. Recompute that op, or replace the in-place operation that follows it."
            )
        return self.val


class Vacant:
    """The place of a result that no op and no gradient reads: its metadata, and no memory.

    What stands in for it is filled such that nobody can mistake it for the result.
    """

    __slots__ = ("_metadata",)

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def get(self) -> torch.Tensor:
        """A tensor of the same metadata."""
        shape, stride, dtype, device = self._metadata
        with below_python():
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            return tensor.fill_(float("nan"))


#: Up to so many numbers on the CPU somebody may want as a list: ``losses.tolist()``.
_LISTED = 256


def _may_be_listed(metadata: Metadata | None) -> bool:
    """Whether Python may read the numbers of such a tensor without an op."""
    if metadata is None or not metadata[2].is_floating_point:
        return True
    return metadata[3].type == "cpu" and metadata[0].numel() <= _LISTED


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
    #: Why it is kept; filled in by whoever observes the region.
    reason = ""
    #: The steps that changed the results in place afterwards.
    changes: Sequence[int] = ()

    def __init__(self, results: Any, inputs: tuple[Any, ...], rng: RngState | None) -> None:
        #: What the op returned, with `Kept` or `OffloadedTensor` in the places of tensors.
        self.results = results
        #: The op and what went in, in labels.
        self.inputs = inputs
        self.label = hash(inputs)
        #: Where the op left the random streams, if it drew from them.
        self.rng = rng

    def note_use(self, step: int) -> None:
        """An op that will run again reads it."""
        if self.first_use is None:
            self.first_use = step

    def is_read_before(self, step: int) -> bool:
        """Whether a gradient needs the results, or an op that runs again before that step."""
        return self.saved or (self.first_use is not None and self.first_use < step)

    def _places(self, memory: int | None) -> list[Kept | OffloadedTensor]:
        if memory is None:
            return []
        if type(self.results) is Kept:
            return [self.results] if self.results.memory == memory else []
        places = _leaves(self.results)
        return [x for x in places if isinstance(x, (Kept, OffloadedTensor)) and x.memory == memory]

    def is_in(self, memory: int | None) -> bool:
        """Whether a result is in that memory."""
        return bool(self._places(memory))

    def before_write(self, tensor: torch.Tensor, memory: int | None) -> bool:
        """To be called before ``tensor`` is written to: whether a result is in its memory."""
        places = self._places(memory)
        for place in places:
            place.before_write()
        return bool(places)

    @property
    def takes_an_op_to_read(self) -> bool:
        """Whether Python cannot read the results as it reads ``counts.tolist()``."""
        results = self.results
        places = results if isinstance(results, (list, tuple)) else (results,)
        return self.has_gradient and all(
            isinstance(place, (Kept, OffloadedTensor)) and not _may_be_listed(place.metadata)
            for place in places
        )

    def vacate(self) -> None:
        """Let go of the memory."""
        self.results = map_only(
            (Kept, OffloadedTensor), lambda each: Vacant(each.metadata), self.results
        )
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

        return map_only((Kept, *_PLACES), give, results)


_PLACES = (OffloadedTensor, Vacant)


def _leaves(results: Any) -> list[Any]:
    """As `tree_leaves`, but quick for a tuple."""
    if type(results) is Kept or type(results) in _PLACES:
        return [results]
    if type(results) is not tuple:
        return tree_leaves(results)
    return [leaf for each in results for leaf in _leaves(each)]


class _Elsewhere:
    """Holds what the region did not make: nobody needs to care for that."""

    saved = False

    def note_use(self, step: int) -> None:
        """Of no interest."""


ELSEWHERE = _Elsewhere()


class Ledger:
    """The calls of a region's ops."""

    __slots__ = (
        "_lock",
        "deposit",
        "entries",
        "is_complete",
        "origins",
        "replays",
        "sequence",
        "steps",
    )

    def __init__(self, deposit: OffloadBatch) -> None:
        #: The ops of all calls, in order, as `key_of` tells them apart.
        self.sequence: list[Any] = []
        #: By step, what was kept.
        self.entries: dict[int, Entry] = {}
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
        return op if type(op) is OpOverload else inductor_region_key(op, args)

    def ops(self) -> Iterator[Any]:
        """The ops of all calls, but for the mark that a trace leaves."""
        return (self.op_at(n) for n, key in enumerate(self.sequence) if key is not None)

    def op_at(self, step: int) -> Any:
        """The op that was called."""
        key = self.sequence[step]
        return key[0] if type(key) is tuple else key

    def drop(self, step: int) -> None:
        """Do not keep its results after all."""
        entry = self.entries.pop(step)
        entry.dropped, entry.results = True, None
