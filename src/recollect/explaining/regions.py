"""Regions of the rerun and the reentrant engine: what they hold, and which ops run again."""

from __future__ import annotations

from weakref import ref

from recollect._torch.pytree import tree_leaves
from recollect.explaining.storages import Region, StorageTable
from recollect.rerun.engine import Frame
from recollect.rerun.selective import RecordMode
from recollect.rerun.selective.ledger import Kept
from recollect.state.rng import RngState, read_rng

__all__ = ["ReentrantRegion", "RerunRegion"]

_CONTEXT_FN = "context_fn"


class ReentrantRegion(Region):
    """Runs forward without a graph, so nobody knows what backward needs."""

    engine = "reentrant"
    spares_all = True
    otherwise = "reentrant: forward runs without grad"

    @property
    def is_alive(self) -> bool:
        return True

    def runs_again(self, number: int) -> bool:
        return True


class RerunRegion(Region):
    """Runs the function again, and gives out what a policy keeps."""

    engine = "rerun"

    def __init__(self, name: str, frame: Frame) -> None:
        record = None if frame.contexts is None else frame.contexts[0]
        batch = record.ledger.offload_batch if isinstance(record, RecordMode) else frame.offloaded
        super().__init__(name, batch)
        self._frame = ref(frame)
        self._early_stop = frame.early_stop
        if frame.contexts is not None:
            self.otherwise = _CONTEXT_FN
        if frame.region_state.preserves_rng:
            self.rng_bytes = _bytes_of(read_rng())

    @property
    def is_alive(self) -> bool:
        return self._frame() is not None

    def runs_again(self, number: int) -> bool:
        return not self._early_stop or number <= self.last_save

    def end(self, table: StorageTable) -> None:
        super().end(table)
        frame = self._frame()
        record = None if frame is None or frame.contexts is None else frame.contexts[0]
        for entry in record.ledger.entries.values() if isinstance(record, RecordMode) else ():
            places = tree_leaves(entry.results)
            for storage in table.find(place.val for place in places if type(place) is Kept):
                storage.kept = entry.reason, self
            if entry.rng is not None:
                self.rng_bytes += _bytes_of(entry.rng)


def _bytes_of(state: RngState) -> int:
    cpu, devices = state
    return sum(each.nbytes for each in (cpu, *(devices or ())))
