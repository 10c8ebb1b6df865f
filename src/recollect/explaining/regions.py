"""What regions do with memory: save it, keep it, put it into stores, hold it as their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from recollect._torch.autograd import saved_tensor_hooks_active
from recollect._torch.pytree import tree_leaves
from recollect.checks.names import module_of, name_in
from recollect.explaining.memory import Memory, tensors_in
from recollect.explaining.region import NO_POLICY, REENTRANT, Region
from recollect.explaining.replay import Replayed, Slots
from recollect.explaining.watcher import Watcher
from recollect.policy.rules import NameRule, Policy
from recollect.policy.rulings import Ruling
from recollect.rerun.engine import Frame
from recollect.rerun.selective import RecordMode
from recollect.rerun.selective.ledger import Entry, Kept
from recollect.settings import is_recomputing
from recollect.state.rng import RngState, read_rng
from recollect.store.offload_batch import OffloadBatch, OffloadedTensor
from recollect.store.protocol import Store

__all__ = ["OFFLOAD_INPUTS", "Observer"]

OFFLOAD_INPUTS = "offload_inputs"
_CONTEXT_FN = "context_fn"


class _WatchedFrame(Frame):
    """A frame that tells its region what happens."""

    __slots__ = ("_observer", "_region")

    _observer: Observer
    _region: Region

    def watch(self, observer: Observer, region: Region) -> None:
        """To be called once."""
        self._observer = observer
        self._region = region

    def __enter__(self) -> None:
        self._observer.regions.append(self._region)
        try:
            super().__enter__()
        except BaseException:
            self._observer.regions.pop()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(exc_type, exc, traceback)
        finally:
            self._observer.regions.pop()
        self._observer.end(self._region, self.contexts)

    def _pack_hook(self) -> Callable[[torch.Tensor], Any]:
        pack = super()._pack_hook()
        observer, region = self._observer, self._region

        def note_and_pack(tensor: torch.Tensor) -> Any:
            observer.note_saved(tensor, region)
            return pack(tensor)

        return note_and_pack


class _WatchedBatch(OffloadBatch):
    """A deposit that tells what is put."""

    __slots__ = ("_observer",)

    def __init__(self, store: Store | None, observer: Observer) -> None:
        super().__init__(store)
        self._observer = observer

    def put(self, tensor: torch.Tensor) -> OffloadedTensor:
        with self._observer.watcher.muted():
            parcel = super().put(tensor)
        self._observer.note_put(tensor, parcel)
        return parcel


class Observer:
    """Sees all regions of one forward. The `Explainer` that they ask for."""

    def __init__(self, watcher: Watcher, roots: list[nn.Module], slots: Slots) -> None:
        self.watcher = watcher
        self._slots = slots
        #: Whether a region was recorded that will be run otherwise from now on.
        self.is_rehearsal = False
        #: Why the replay engine has left a region to the rerun engine, which will make a frame.
        self._left: list[str] = []
        self.regions = watcher.regions
        #: Those that have been entered, in their order.
        self.all: list[Region] = []
        self._roots = roots
        self._memories = watcher.memories
        self._policies: WeakKeyDictionary[RecordMode, Policy] = WeakKeyDictionary()
        #: By id of what is kept, as long as its region runs: that, the rule, and the memory.
        self._rulings: dict[int, tuple[Entry, str, list[Memory]]] = {}
        #: The region that is being made.
        self._opening: Region | None = None

    # --- made for regions -------------------------------------------------------------------------

    def frame(self, *args: Any) -> Frame:
        """A frame with these arguments, watched."""
        if is_recomputing():
            return Frame(*args)
        function, given, keywords, _, contexts, _, early_stop, *_ = args
        region = self._region(function, NO_POLICY if contexts is None else _CONTEXT_FN)
        region.notes += self._left
        self._left.clear()
        region.early_stop = early_stop
        held = not saved_tensor_hooks_active()
        self._opening = region
        try:
            frame = _WatchedFrame(*args)
        finally:
            self._opening = None
        frame.watch(self, region)
        region.frame = ref(frame)
        if frame.surroundings.preserves_rng:
            region.rng_bytes = _bytes_of(read_rng())
        if held:
            self._note_inputs(region, (given, keywords))
        return frame

    @contextmanager
    def reentrant(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
        """What a region of the reentrant engine runs in."""
        if is_recomputing() or not torch.is_grad_enabled():
            yield
            return
        region = self._region(function, REENTRANT, "reentrant")
        held = not saved_tensor_hooks_active()
        self.regions.append(region)
        try:
            yield
        finally:
            self.regions.pop()
        if held:
            self._note_inputs(region, args)

    @contextmanager
    def replayed(
        self, function: Callable[..., Any], policy: Policy | None, recall: Any, slot: Any
    ) -> Iterator[Replayed]:
        """What a region of the replay engine runs in."""
        region = self._region(function, NO_POLICY, "replay")
        region.frame = ref(recall)
        watched = Replayed(self._memories, region, policy, recall, slot, self.note_saved)
        self.regions.append(region)
        try:
            yield watched
        finally:
            self.regions.pop()
        self.is_rehearsal |= watched.is_rehearsal

    def slot(self, function: Callable[..., Any], signature: Any) -> Any:
        """What the replay engine may change of what it remembers of a function."""
        return self._slots.slot(function, signature)

    def left(self, reason: str) -> None:
        """The replay engine leaves a region to the rerun engine."""
        if not is_recomputing():
            self._left[:] = [f"left to the rerun engine: {reason}"]

    def deposit(self, store: Store | None) -> OffloadBatch:
        """Where a region puts what it sends away."""
        return _WatchedBatch(store, self)

    def applies(self, record: RecordMode, policy: Policy) -> None:
        """``record`` will run a region under ``policy``."""
        self._policies[record] = policy

    # --- told by regions --------------------------------------------------------------------------

    def note(self, op: Any, out: Any, ruling: Ruling, entry: Entry | None) -> None:
        """A policy has decided."""
        if is_recomputing() or not self.regions:
            return
        reason = ruling.reason
        if ruling.keeps and entry is None:
            reason = f"{reason}, but it has to run again"
        made = [memory for memory in self._find(tree_leaves(out)) if memory.op is op]
        for memory in made:
            memory.ruling = reason
        if entry is not None:
            self._rulings[id(entry)] = entry, reason, made

    def note_saved(self, tensor: torch.Tensor, region: Region) -> None:
        """Autograd saves ``tensor`` inside of ``region``, which forgets it."""
        region.last_save = region.ops
        for memory in self._memories.find(tensor):
            memory.saved = True

    def note_put(self, tensor: torch.Tensor, parcel: OffloadedTensor) -> None:
        """A region has put ``tensor`` into a store."""
        region = self._opening or self.regions[-1]
        is_input = self._opening is not None or region.is_blind
        for memory in self._memories.find(tensor):
            is_from_outside = region.seen is not None and not memory.is_made_in(region)
            why = OFFLOAD_INPUTS if is_input or is_from_outside else ""
            memory.parcels.append((ref(parcel), why, region))

    def end(self, region: Region, contexts: Any) -> None:
        """The forward of ``region`` is over: see what it has kept."""
        record = None if contexts is None else contexts[0]
        if isinstance(record, RecordMode):
            by_name = _name_rules(self._policies.get(record))
            for entry in record.ledger.entries.values():
                self._note_kept(region, entry, by_name)
        for key, (entry, reason, made) in [*self._rulings.items()]:
            if entry.dropped:  # and in no ledger any more
                _let_go(made, reason)
                del self._rulings[key]
        if not self.regions:
            self._rulings.clear()  # which would hold what is kept

    def _note_kept(self, region: Region, entry: Entry, by_name: str) -> None:
        _, reason, made = self._rulings.pop(id(entry), (entry, by_name, []))
        if entry.is_vacant:
            _let_go(made, reason)
        places = tree_leaves(entry.results)
        for memory in self._find(place.val for place in places if type(place) is Kept):
            memory.kept = reason, region
        if entry.rng is not None:
            region.rng_bytes += _bytes_of(entry.rng)

    # --- helpers ----------------------------------------------------------------------------------

    def _region(
        self, function: Callable[..., Any], otherwise: str, engine: str = "rerun"
    ) -> Region:
        region = Region(self._name(function), otherwise, engine)
        self.all.append(region)
        return region

    def _name(self, function: Callable[..., Any]) -> str:
        """What to call a region: by its module's path in the model, if it has one."""
        module = module_of(function)
        if module is not None:
            if any(module is root for root in self._roots):
                return type(module).__name__
            names = (name_in(root, module) for root in self._roots)
            return next(filter(None, names), type(module).__name__)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        name = name.rpartition("<locals>.")[2]
        path = self.watcher.path()
        return f"{name} in {path}" if path else name

    def _note_inputs(self, region: Region, values: Any) -> None:
        for memory in self._find(tensors_in(values)):
            away = any(of is region and why for _, why, of in memory.parcels)
            if memory.input_of is None and not away:
                memory.input_of = region

    def _find(self, values: Iterable[Any]) -> list[Memory]:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return [memory for tensor in tensors for memory in self._memories.find(tensor)]


def _let_go(made: list[Memory], reason: str) -> None:
    for memory in made:
        memory.let_go = f"{reason}, but nothing needs it"


def _name_rules(policy: Policy | None) -> str:
    """The rules by which a result may be kept after its op has run."""
    rules = () if policy is None else policy.rules
    return " | ".join(rule.title for rule in rules if isinstance(rule, NameRule))


def _bytes_of(state: RngState) -> int:
    cpu, devices = state
    return sum(each.nbytes for each in (cpu, *(devices or ())))
