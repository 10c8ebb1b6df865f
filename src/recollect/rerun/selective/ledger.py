"""The calls of a region's ops in forward, and the results that were kept, for the recomputation.

A call is known by its step: how many calls there were before it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from recollect._torch.dynamo import inductor_region_key
from recollect._torch.modes import detach_below_autograd
from recollect._torch.ops import OpOverload
from recollect._torch.pytree import tree_map_only
from recollect._torch.tensors import is_plain_tensor, memory_key, version_of
from recollect.checks.fingerprint import compare, fingerprint
from recollect.errors import KeptTensorError
from recollect.policy.op_info import tensors_in
from recollect.rerun.selective.labels import Labels
from recollect.state.rng import RngState
from recollect.state.tensors import same_values
from recollect.store.offload_batch import OffloadBatch, OffloadedTensor
from recollect.store.spans import laid_out


def map_only(kinds: Any, function: Callable[[Any], Any], results: Any) -> Any:
    """`tree_map_only`, but fast for a tensor or a tuple, which most ops return."""
    if isinstance(results, kinds):
        return function(results)
    if type(results) is tuple:
        return tuple([map_only(kinds, function, each) for each in results])
    return tree_map_only(kinds, function, results)


def same_results(a: Any, b: Any) -> bool:
    """Whether two results of an op are the same, bit for bit."""
    return all(same_values(x, y) for x, y in zip(tensors_in(a), tensors_in(b), strict=True))


def is_exposed(tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor`` is not torch's alone."""
    return is_plain_tensor(tensor) and not tensor.untyped_storage().resizable()


class Kept:
    """A tensor kept from forward, with the version it had; None if it may be changed in place."""

    __slots__ = ("val", "version")

    def __init__(self, detached: torch.Tensor, allow_mutation: bool) -> None:
        self.val = detached
        self.version = None if allow_mutation else version_of(detached)

    @property
    def memory(self) -> int | None:
        return memory_key(self.val)

    @property
    def is_exposed(self) -> bool:
        """Whether others may write to its memory unseen: an array of numpy, another process."""
        return is_exposed(self.val)

    def before_write(self) -> None:
        """Copy the tensor: its memory is about to be changed in place."""
        # With its strides, which ``clone`` does not always keep. `explain` sees what it allocates.
        val = self.val
        self.val = laid_out(val, val.stride(), 0) if is_plain_tensor(val) else val.clone()
        self.version = version_of(self.val)

    def get(self) -> torch.Tensor:
        """The tensor, unless it was changed in place."""
        if self.version is not None and self.val._version != self.version:
            raise KeptTensorError(
                "Tensor cached during selective activation checkpoint has been mutated: a tensor "
                f"of shape {list(self.val.shape)} that the policy keeps was changed in place "
                "afterwards. Recompute that op, or replace the in-place operation that follows it."
            )
        return self.val


_PLACES = (Kept, OffloadedTensor)


class KeptCall:
    """The kept results of one call."""

    #: Whether it was handed out.
    is_consumed = False
    #: Why it is kept; filled in by whoever observes the region.
    reason = ""
    #: The steps that changed the results in place afterwards.
    changes: tuple[int, ...] = ()

    def __init__(self, results: Any, inputs: tuple[Any, ...], rng: RngState | None) -> None:
        #: The results of the op, with `Kept` or `OffloadedTensor` in place of tensors.
        self.results = results
        #: The op and its inputs, in labels.
        self.inputs = inputs
        self.label = hash(inputs)
        #: Where the op left the random streams, if it drew from them.
        self.rng = rng
        #: The fingerprint of each result, if the op itself returned memory that is not torch's.
        self.fingerprints: list[torch.Tensor] = []

    def _places(self) -> list[Any]:
        places: list[Any] = []
        map_only(_PLACES, places.append, self.results)
        return places

    def before_write(self, memory: int) -> bool:
        """Prepare for a write to ``memory``: whether a result is in there."""
        written = [place for place in self._places() if place.memory == memory]
        for place in written:
            place.before_write()
        return bool(written)

    def is_exposed(self) -> bool:
        """Whether others may have written to a result unseen."""
        if not any(place.is_exposed for place in self._places()):
            return False
        # What an op makes of an array is mostly its own, and nobody writes to it.
        return not self.fingerprints or not self.equals(self.read())

    def equals(self, out: Any) -> bool:
        """Whether ``out`` is what the op returned, bit for bit."""
        if self.fingerprints:  # the results may have been written to since
            return compare(self.fingerprints, [*map(fingerprint, tensors_in(out))]) is None
        return same_results(self.read(), out)

    def read(self) -> Any:
        return map_only(_PLACES, lambda place: place.get(), self.results)

    def take(self) -> Any:
        """The results, handed out once."""
        out = self.read()
        self.results, self.is_consumed = None, True
        return out


class Ledger:
    """The calls of a region's ops. ``allow_mutation``: kept results may be changed in place."""

    def __init__(self, offload_batch: OffloadBatch, *, allow_mutation: bool = False) -> None:
        self.allow_mutation = allow_mutation
        #: The ops of all calls, in order, by their `key_of`.
        self.sequence: list[Any] = []
        #: By step.
        self.entries: dict[int, KeptCall] = {}
        #: How many calls there had been when autograd saved the last tensor.
        self.steps = 0
        #: How many of them a recomputation repeats.
        self.end = sys.maxsize
        self.labels = Labels()
        #: Whether forward is over.
        self.is_complete = False
        #: Where kept tensors go that are offloaded.
        self.offload_batch = offload_batch
        #: How many recomputations are running. The mode of forward sees one that runs before
        #: forward is over (the function goes backward inside), and must not record it.
        self.recomputations = 0
        self.lock = threading.Lock()

    def keep(
        self,
        step: int,
        out: Any,
        inputs: tuple[Any, ...] = (),
        rng: RngState | None = None,
        *,
        offloads: bool = False,
        is_of_others: bool = False,
    ) -> KeptCall:
        """Keep ``out``, the results of the call in ``step``.

        ``is_of_others``: of an op of another library.
        """

        def hold(tensor: torch.Tensor) -> Kept | OffloadedTensor:
            detached = detach_below_autograd(tensor)
            if offloads or self.offload_batch.chosen:
                return self.offload_batch.put(detached)
            return Kept(detached, self.allow_mutation)

        entry = self.entries[step] = KeptCall(map_only(torch.Tensor, hold, out), inputs, rng)
        if is_of_others and any(map(is_exposed, tensors_in(out))):
            entry.fingerprints = [*map(fingerprint, tensors_in(out))]
        return entry

    @staticmethod
    def key_of(op: Any, args: tuple[Any, ...]) -> Any:
        """What tells the calls of ``op`` from those of others."""
        return op if type(op) is OpOverload else inductor_region_key(op, args)

    def ops(self) -> Iterator[Any]:
        """The ops of all calls, but for the mark that a trace leaves."""
        return (self.op_at(n) for n, key in enumerate(self.sequence) if key is not None)

    def op_at(self, step: int) -> Any:
        key = self.sequence[step]
        return key[0] if type(key) is tuple else key

    def end_forward(self, *, stops_early: bool) -> None:
        """Forward is over. ``stops_early``: a recomputation ends with the last saved tensor.

        Kept results after that, such as the last product of a block, are dropped.
        """
        self.end = self.steps if stops_early else len(self.sequence)
        for step in [step for step in self.entries if step >= self.end]:
            del self.entries[step]
