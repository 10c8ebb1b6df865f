"""Records the ops of a region, and the generator state before random ops such as dropout."""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.devices import default_device_type
from recollect._torch.dtensors import has_dtensors, waiting
from recollect._torch.modes import DispatchMode, no_dispatch_modes, no_function_modes
from recollect._torch.ops import is_form_of
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import finds_shapes, is_plain_tensor
from recollect.policy.op_info import COLLECTIVE, OpInfo, known_ops, op_info, tensors_in
from recollect.policy.policy_call import PolicyCall, Ruling
from recollect.policy.rules import CheckpointPolicy
from recollect.replay.memory_tracker import OPAQUE, MemoryTracker, RecordedStorage
from recollect.replay.named_schedule import ScheduleQuery
from recollect.replay.recorded_graph import (
    RecordedOp,
    RecordedValue,
    View,
    Views,
    is_whole,
    tensors_of,
)

_Tensor = torch.Tensor
_Args = tuple[Any, ...]
#: Why the results of an op of another library are kept.
FOREIGN = "of another library"
#: The storages that an op writes to, each with the argument through which it does.
_Written = dict[RecordedStorage, _Tensor]


class OpRecorder(DispatchMode):
    """Records what each op reads, makes and writes; holds results that must not be recomputed."""

    def __init__(self, tracker: MemoryTracker, query: PolicyCall | ScheduleQuery) -> None:
        super().__init__()
        self._tracker = tracker
        self._query = query
        query.keep = self._keep_named  # not called under a plan, which has no rules by name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: Any = None
    ) -> Any:
        if has_dtensors(types):
            return NotImplemented
        info = known_ops.get(id(func)) or op_info(func)
        tracker = self._tracker
        if finds_shapes():
            return info.call(*args, **(kwargs or {}))
        if tracker.is_idle:
            kwargs = kwargs or {}
            if info.writes:
                for tensor in info.written(args, kwargs):
                    tracker.protect(tensor)
            return info.call(*args, **kwargs)
        if tracker.call is not None:
            return self._note(info, args, kwargs or {})
        with no_function_modes():  # outside of functions, the recorder would see these calls
            return self._note(info, args, kwargs or {})

    def _note(self, info: OpInfo, args: _Args, kwargs: dict[str, Any]) -> Any:
        tracker = self._tracker
        if info.unrecordable is not None:
            # Recurrent layers make a new tensor a view of the storage of all their weights.
            if not (info.sets_storage and not args[0].numel() and tracker.knows(args[1])):
                tracker.stop(info.unrecordable)
            return info.call(*args, **kwargs)
        call = tracker.call
        if info.runs_no_kernel:
            if (tracker.is_casting or call is None) and info.is_alias:
                for tensor in tensors_in(args):
                    tracker.locate(tensor)  # perhaps a cast weight: its views do not show that
            if info.has_absolute_offset(args, kwargs):
                storage = tracker.locate(args[0])
                if call is not None and storage is not None and not storage.is_placed:
                    call.is_opaque = True
            if info.is_inplace_view:
                tracker.note_metadata_change(args[0])
            return info.call(*args, **kwargs)
        if call is not None:
            # The function reads a number into Python. Another call may read another one.
            custom = call.custom_function
            if info.reads_number or (custom is not None and not is_form_of(info.op, custom)):
                call.is_opaque = True
            if info.has_dynamic_shape and _picks_by_mask(info, args):
                call.depends_on_data = True
        return self._run(info, args, kwargs)

    def _run(self, info: OpInfo, args: _Args, kwargs: dict[str, Any]) -> Any:
        tracker = self._tracker
        if info.has_library_rng:
            args = info.without_idle_state(args)
        op = tracker.new_op(info.op, waiting(info.call) if info.is_asynchronous else info.call)
        written: _Written = {}
        if info.writes:
            written = self._written(info, args, kwargs)
            for storage in written:
                tracker.before_change(storage)
        if info.writes_unseen:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, _Tensor):
                    tracker.expose(leaf)
        self._read(op, args, kwargs)
        if written:
            self._note_overwritten(op, info, written)
        if tracker.is_idle:
            return info.call(*args, **kwargs)
        if info.is_random and not info.has_library_rng:
            out = self._draw(op, info, args, kwargs)
        else:
            out = info.call(*args, **kwargs)
        tracker.is_in_op = True
        self._decide(op, info, out, args, kwargs)
        if written:
            self._write(op, info, written)
        self._note_results(op, info, out)
        if op.arrivals:
            tracker.arrivals += op.arrivals
        tracker.is_in_op = False
        return out

    # --- arguments --------------------------------------------------------------------------------

    def _written(self, info: OpInfo, args: _Args, kwargs: dict[str, Any]) -> _Written:
        found: _Written = {}
        for tensor in info.written(args, kwargs):
            self._tracker.protect(tensor)
            storage = self._tracker.locate(tensor)
            if storage is not None:
                found[storage] = tensor
        return found

    def _read(self, op: RecordedOp, args: _Args, kwargs: dict[str, Any]) -> None:
        reads: dict[int, None] = {}
        op.args = [self._argument(each, reads) for each in args]
        if kwargs:
            op.kwargs = {name: self._argument(each, reads) for name, each in kwargs.items()}
        op.reads = list(reads)

    def _argument(self, value: Any, reads: dict[int, None]) -> Any:
        if isinstance(value, _Tensor):
            view = self._tracker.view(value)
            if view is not None:
                reads[view.value.number] = None
                view.value.is_wanted = True
            return view
        if type(value) is list or type(value) is tuple:
            items = [self._argument(each, reads) for each in value]
            if any(type(each) in (View, Views) for each in items):
                return Views(items, type(value))
        return value

    def _note_overwritten(self, op: RecordedOp, info: OpInfo, written: _Written) -> None:
        """Find the values that ``op`` overwrites without reading them."""
        fresh, call = [], self._tracker.call
        for storage, tensor in written.items():
            view = self._tracker.view_in(storage, tensor)
            value = view.value
            whole = view.layout is value.layout and is_whole(view.layout, value.nbytes)
            if info.updates_statistics and call is not None:  # unnoticed by autograd: hold it
                call.packed = [None if v is None or v.value is value else v for v in call.packed]
            if whole and (info.updates_statistics or (info.overwrites and _times(value, op) == 1)):
                fresh.append(value)
        op.fresh = frozenset(value.number for value in fresh)
        op.reads = [number for number in op.reads if number not in op.fresh]

    # --- results ----------------------------------------------------------------------------------

    def _draw(self, op: RecordedOp, info: OpInfo, args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run an op that may draw random numbers, and save the generator's state before it."""
        generator = info.generator(args, kwargs) or _default_generator(args, kwargs)
        state = generator.get_state()
        out = info.call(*args, **kwargs)
        with no_dispatch_modes():
            is_unmoved = info.is_attention and torch.equal(generator.get_state(), state)
        if is_unmoved:
            return out  # attention without dropout
        op.generator = generator
        self._tracker.remat.states[op.number] = state
        if self._tracker.call is not None:
            self._tracker.call.draws.append(op)
        return out

    def _decide(
        self, op: RecordedOp, info: OpInfo, out: Any, args: _Args, kwargs: dict[str, Any]
    ) -> None:
        """Find out why the op must not run again, if so."""
        call, graph = self._tracker.call, self._tracker.graph
        if call is None or call.is_opaque or not info.is_overload or graph.unsure_read(op):
            op.never_again(OPAQUE, None)
            return
        ruling = op.ruling = self._query.decide(info, out, args, kwargs, op)
        why_kept = "nondeterministic" if info.is_nondeterministic else None
        if info.has_library_rng and info.uses_library_rng(args):
            why_kept = "random, by a state of its library"
        insists = ruling.decision is CheckpointPolicy.MUST_RECOMPUTE
        if info.communicates and not insists:
            # Which ops run again depends on layouts, and so on the rank: others may not take part.
            why_kept = COLLECTIVE
        if not insists and not info.is_pure(args, kwargs):
            why_kept = FOREIGN
        if op.key is not None and why_kept is None:
            return  # it may run again for results that are not held
        if ruling.keeps and info.can_be_kept:
            op.never_again(ruling.reason, ruling)
        elif why_kept is not None:
            op.never_again(why_kept, ruling)

    def _write(self, op: RecordedOp, info: OpInfo, written: _Written) -> None:
        """Make the next value of each storage that was written to."""
        tracker = self._tracker
        tracker.written.update(written)
        for old in [storage.value for storage in written]:
            lost = tracker.graph.maker_of(old) if old.number not in tracker.remat.kept else None
            if op.keep is None and lost is not None and lost.keep and old.number not in op.fresh:
                # The old value was held, and is gone now. So hold all that is written.
                op.never_again(lost.keep, lost.ruling)
        for storage, tensor in written.items():
            old = storage.value
            new = storage.value = tracker.graph.after(old)
            old.is_stale |= storage.has_data or info.writes_uncounted
            new.op = op.number
            op.writes.append((old.number, new.number))
            if storage.outside is not None:
                new.unsure = "state of the model"
            elif storage.is_exposed:
                new.unsure = OPAQUE
            elif _holds(op, None) and storage not in tracker.inner:
                tracker.hold(tracker.view_in(storage, tensor), tensor, op.ruling)
            elif old.number not in op.fresh:
                new.unsure = old.unsure

    def _note_results(self, op: RecordedOp, info: OpInfo, out: Any) -> None:
        tracker, call = self._tracker, self._tracker.call
        for path, tensor in tensors_of(out):
            known = tracker.storage_of(tensor)
            if known is not None:  # an argument, a view of one, or a view of another result
                if info.is_wait and known.is_in_flight and call is not None:
                    known.is_in_flight = False
                    call.arrived += known.tensors
                if op.keep == FOREIGN and not info.is_alias:
                    # The library's own storage, which it has written to.
                    tracker.expose(tensor)
                continue
            if not is_plain_tensor(tensor):
                tracker.stop_at(tensor)
                return
            storage = tracker.add(tensor)
            storage.is_in_flight = info.is_asynchronous
            op.make(path, storage.value)
            storage.is_placed = storage.start == 0 and op.keep not in (OPAQUE, FOREIGN)
            if call is not None and call.is_opaque:
                tracker.inner.add(storage)
            elif _holds(op, len(op.makes) - 1):
                tracker.hold(View(storage.value, storage.value.layout), tensor, op.ruling)
            elif info.leaves_uninitialized:
                storage.value.unsure = OPAQUE

    def _keep_named(self, tensor: _Tensor, name: str, ruling: Ruling) -> None:
        tracker = self._tracker
        number = tracker.numbers.number_of(tensor)
        if number is not None and not tracker.is_idle:
            tracker.note_unseen_writes(tensor, number)
        found = None if tracker.is_idle else self._recomputable(tensor)
        if found is None or (found[1].ruling and found[1].ruling.rank < ruling.rank):
            return  # held anyway, or an earlier rule recomputes it
        storage, op = found
        if not op_info(op.op).can_be_kept:
            raise ValueError(
                f"recollect.tag(..., {name!r}): {ruling.reason} cannot keep this tensor: it was "
                "changed in place. Name the result of another op."
            )
        # Other results of the op may be gone by now: later calls recompute them.
        op.hold_results(ruling.reason, ruling)
        tracker.hold(tracker.view_in(storage, tensor), tensor, ruling)
        tracker.remat.release_last()

    def keep(self, tensor: _Tensor) -> None:
        """Hold a tensor as a schedule would: under another schedule its op may run again."""
        tracker, found = self._tracker, self._recomputable(tensor)
        if found is not None and found[1].planned is None:
            storage, op = found
            number = storage.value.number
            op.planned = frozenset(n for n, made in enumerate(op.makes) if made == number)
            tracker.hold(tracker.view_in(storage, tensor), tensor, None)
            tracker.remat.release_last()

    def _recomputable(self, tensor: _Tensor) -> tuple[RecordedStorage, RecordedOp] | None:
        """The storage of ``tensor``, and the op that backward would recompute it by, if any."""
        tracker = self._tracker
        storage = tracker.storage_of(tensor)
        op = None if storage is None else tracker.graph.maker_of(storage.value)
        if storage is None or op is None or (storage.value.unsure or op.keep) is not None:
            return None
        return storage, op


def _holds(op: RecordedOp, result: int | None) -> bool:
    """Whether a result of ``op`` is held: the one at this position in ``makes``; None: in place."""
    if op.keep is not None or op.planned is None:
        return op.keep is not None
    return result is None or result in op.planned


def _picks_by_mask(info: OpInfo, args: _Args) -> bool:
    """Whether the result's shape depends on data: it does for masks, not for integer indices."""
    if not info.is_index:
        return True
    masks = (torch.bool, torch.uint8)
    return any(index is not None and index.dtype in masks for index in args[1])


def _default_generator(args: _Args, kwargs: dict[str, Any]) -> torch.Generator:
    """The generator that an op uses if it is given none."""
    tensors = tensors_in([*args, *kwargs.values()])
    where = kwargs.get("device") or (tensors[0].device if tensors else default_device_type())
    device = torch.device(where)
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device.type)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def _times(value: RecordedValue, op: RecordedOp) -> int:
    """How often ``value`` is among the arguments of ``op``."""
    args = [*op.args, *op.kwargs.values()]
    flat = [each for arg in args for each in (arg if type(arg) is Views else [arg])]
    return sum(type(each) is View and each.value is value for each in flat)
