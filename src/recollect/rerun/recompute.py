"""One recomputation of a region in backward: steps (5) to (7) of `rerun.engine` (R5).

The graph that a recomputation builds holds numbers in the place of saved tensors, good for as long
as the recomputation lasts (the function may go backward inside). Nothing here refers to a graph
that refers back: there are no cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.autograd.function import BackwardCFunction

from recollect._torch.autograd import (
    current_operation,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    view_base,
)
from recollect._torch.dynamo import dynamo_callback, hide_from_dynamo, run_without_dynamo
from recollect._torch.modes import dispatch_mode_count, set_grad_enabled
from recollect._torch.modules import call_skipped_hooks
from recollect.checks.determinism import (
    Describe,
    count_mismatch,
    cpu_metadata,
    metadata,
    metadata_mismatch,
    same,
)
from recollect.checks.diagnosis import MismatchContext
from recollect.checks.differences import explain, value_difference
from recollect.errors import CheckpointError, StopRecompute
from recollect.rerun.frame import ForwardFrame, RecomputedTensors, Ticket, as_one, noting
from recollect.rerun.selective import RecomputeMode
from recollect.state.buffers import UseOfChanged


class Recomputation:
    """One run of a frame's function in backward."""

    __slots__ = (
        *("_changes", "_dead", "_expected", "_frame", "_frame_after", "_log", "_raised"),
        *("_recompute_mode", "_stopped", "_surplus", "_tensors", "_unwritten_by", "_versions"),
    )

    def __init__(self, frame: ForwardFrame, *, keep_all: bool = False) -> None:
        self._frame = frame
        self._dead = frozenset() if keep_all else frame.dead()
        self._expected = len(frame.tickets)
        #: By number; None where the ticket is dead.
        self._tensors: list[Any] = []
        self._versions: list[int] = []
        self._stopped = False
        self._surplus = False
        #: The frame, once the rerun is over.
        self._frame_after: ReferenceType[ForwardFrame] | None = None
        #: The operation that may still write to a tensor that it saved.
        self._unwritten_by = -1
        self._raised: str | None = None
        #: The mode that returns kept results, if there are any.
        self._recompute_mode: RecomputeMode | None = None
        #: Present if something that the function may use has changed. The function then runs to its
        #: end, so that every op is checked.
        self._changes: UseOfChanged | None = frame.region_state.changes()
        self._log = None if frame.forward_log is None else frame.make_log()

    @hide_from_dynamo
    def run(self) -> RecomputedTensors:
        """Recompute the tensors that forward saved; an error if they differ."""
        frame = self._frame
        try:
            if frame.offloaded is not None:
                frame.offloaded.announce()
            # This may rerun an outer region, which has to see its own arguments as they were.
            args, kwargs = frame.inputs.recall()
            self._run_with(args, kwargs)
            self._verify()
            tensors = self._tensors[: self._expected]
            if _may_hold_memory(tensors, frame.function):
                tensors = [t if t is None else t.detach() for t in tensors]
        except CheckpointError as error:
            log = frame.forward_log
            if frame.debug and log is not None and self._log is not None:
                raise explain(error, log, self._log, stopped=self._stopped) from error
            raise
        finally:
            # The graph of the rerun holds on to the hooks, and they to this object.
            self._tensors.clear()
            self._frame_after = ref(frame)
            del self._frame
        return RecomputedTensors(tensors, self._versions)

    @hide_from_dynamo
    def _run_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = self._frame
        has_contexts = (
            frame.contexts is not None or self._log is not None or self._changes is not None
        )
        call = self._call_in_contexts if has_contexts else self._call
        # First, since it is refused where hooks are disabled: nothing else has been changed then.
        push_saved_tensor_hooks(self._pack_hook(), self._unpack)
        grad_was_enabled = torch.is_grad_enabled()
        set_grad_enabled(True)
        if frame.forward_log is not None:
            frame.forward_log.recording = False  # it is on if the function goes backward inside
        try:
            if dynamo_callback() is not None:
                run_without_dynamo(frame.region_state.run, call, (args, kwargs), {})
            else:
                frame.region_state.run(call, (args, kwargs), {})
        except StopRecompute as stop:
            if stop.args[0] is not self:
                raise
        finally:
            pop_saved_tensor_hooks()
            set_grad_enabled(grad_was_enabled)
            if frame.forward_log is not None:
                frame.forward_log.recording = True

    @hide_from_dynamo
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the function. Where it stops early, the hooks that are always called still are."""
        try:
            self._frame.function(*args, **kwargs)
        except StopRecompute as stop:
            call_skipped_hooks(stop.__traceback__)
            raise

    @hide_from_dynamo
    def _call_in_contexts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with as_one(self._contexts((*args, *kwargs.values()))):
            try:
                self._call(args, kwargs)
            except StopRecompute:
                raise
            except BaseException as error:
                # Not the error itself: its traceback refers to this object.
                self._raised = repr(error)
                raise
        if self._changes is not None and self._changes.error is not None:
            raise self._changes.error
        if self._raised is not None:
            raise CheckpointError(
                "the recompute context given by context_fn suppressed an exception of the "
                f"checkpointed function: {self._raised}. Let its __exit__ return False."
            )

    def _contexts(self, values: tuple[Any, ...]) -> list[AbstractContextManager[Any]]:
        frame = self._frame
        contexts: list[Any] = [] if frame.contexts is None else [frame.contexts[1]]
        if contexts and isinstance(contexts[0], RecomputeMode):
            restores_rng = frame.region_state.preserves_rng
            replay = contexts[0].for_rerun(values, restores_rng=restores_rng)
            self._recompute_mode = contexts[0] = replay
        return contexts + [each for each in (self._changes, self._log) if each is not None]

    def _pack_hook(self) -> Callable[[torch.Tensor], Any]:
        tensors = self._tensors
        versions = self._versions
        dead = self._dead
        # From this number on there is more to do than keeping the tensor.
        stops_early = self._frame.early_stop and self._changes is None
        limit = self._expected - 2 if stops_early else self._expected

        def pack(tensor: torch.Tensor) -> int:
            number = len(tensors)
            tensors.append(tensor)
            versions.append(tensor._version)
            if number >= limit:
                self._near_end(number, tensor)
            return number

        def pack_with_care(tensor: torch.Tensor) -> Any:
            number = len(tensors)
            packed: Any = number
            cut_off = tensor if tensor.grad_fn is None else tensor.detach()
            if number in dead:
                # Only the graph of this rerun can need it, and holds it itself.
                packed = cut_off
                tensors.append(None)
            else:
                tensors.append(cut_off)
            versions.append(tensor._version)
            if number >= limit:
                self._near_end(number, tensor)
            return packed

        # An active dispatch mode (a tracer's, or one of the user's context) sees a detach for each
        # saved tensor, as it does with torch.
        contexts = self._frame.contexts
        has_modes = contexts is not None and not isinstance(contexts[1], RecomputeMode)
        chosen = pack_with_care if dead or has_modes or dispatch_mode_count() else pack
        return noting(self._log, chosen) if self._frame.compares_values else chosen

    def _near_end(self, number: int, tensor: torch.Tensor) -> None:
        missing = self._expected - number - 1
        if missing >= 0 and not tensor.requires_grad and self._may_be_unwritten(tensor):
            self._unwritten_by = current_operation()
        if missing > 0:
            return
        if missing == 0:
            self._stopped = True
            if self._unwritten_by != current_operation():
                raise StopRecompute(self)
        elif self._stopped:
            # The function has gone on: all is there and written, or it swallowed the signal.
            raise StopRecompute(self)
        elif not self._frame.running:
            # Not an error raised here and now, which user code could swallow.
            self._surplus = True
            raise StopRecompute(self)
        # Otherwise the function goes backward inside forward, which has not saved all it will.

    def _may_be_unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether the operation that is saving ``tensor`` may write to it afterwards.

        ``rrelu`` saves the buffer for its noise, then its input, and then draws the noise. Such a
        buffer is new: it has no history, version or base, and is none of the inputs.
        """
        return (
            tensor.is_floating_point()
            and tensor._version == 0
            and view_base(tensor) is None
            and not self._frame.inputs.has(tensor)
        )

    def _unpack(self, packed: Any) -> torch.Tensor:
        """The unpack hook of the graph that this rerun builds."""
        if type(packed) is not int:
            return packed  # type: ignore[no-any-return]
        if self._frame_after is None:
            return self._tensors[packed]  # type: ignore[no-any-return]
        # Somebody goes backward on that graph later: the function has stored a part of it.
        frame = self._frame_after()
        tensors = [] if frame is None else Recomputation(frame, keep_all=True).run().tensors
        tensor = tensors[packed] if packed < len(tensors) else None
        if tensor is None:
            raise CheckpointError(
                "backward was called on a part of the graph of a recomputation that cannot be "
                "recomputed. Keep results of the first run of a checkpointed function, not of the "
                "second: see recollect.is_recomputing()."
            )
        return tensor

    def _verify(self) -> None:
        frame = self._frame
        if self._recompute_mode is not None:
            self._recompute_mode.check_end()
        if self._surplus or (len(self._tensors) < self._expected and not frame.running):
            raise count_mismatch(self._context())
        if frame.describe is not None:
            self._compare(frame.describe)
        if frame.compares_values:
            assert frame.forward_log is not None
            assert self._log is not None
            error = value_difference(frame.forward_log, self._log, self._context(), self._dead)
            if error is not None:
                raise error

    def _context(self) -> MismatchContext:
        frame = self._frame
        args, kwargs = frame.inputs.given
        return MismatchContext(frame.function, frame.tickets, self._tensors, args, kwargs)

    def _compare(self, describe: Describe) -> None:
        frame = self._frame
        # Here in one loop, and not one by one in the hook: the code is warm then.
        numbered = enumerate(self._tensors[: self._expected])
        tickets: list[Ticket | None]
        if self._dead or describe not in (cpu_metadata, metadata):
            tickets = [t if t is None else (n, *_described(describe, t)) for n, t in numbered]
        elif describe is cpu_metadata:
            tickets = [(n, t.shape, t.dtype) for n, t in numbered]
        else:
            tickets = [(n, t.shape, t.dtype, t.device) for n, t in numbered]
        if same(tickets, frame.tickets):
            return
        # A dead ticket may differ. (One list is longer than the other where the function goes
        # backward inside forward.)
        differences = [
            (number, before[1:], after[1:])
            for number, (before, after) in enumerate(zip(frame.tickets, tickets, strict=False))
            if after is not None and not same(before, after)
        ]
        if differences:
            raise metadata_mismatch(self._context(), differences)


#: Functions whose last recomputation used no custom functions. By id of the function, or of the
#: object whose method it is: that, weakly, and how many tensors the recomputation saved.
_without_custom_functions: dict[int, tuple[ReferenceType[Any], int]] = {}
#: How many are known at most: ids are used again.
_KNOWN = 4096


def _may_hold_memory(tensors: list[Any], function: Any) -> bool:
    """Whether the history of ``tensors`` may hold memory: a custom function may have tensors.

    Others save what they need through the hooks, so their tensors need not be detached. A function
    that saves as many tensors as the last time is assumed to use no custom functions still: to make
    a Python object of every node is slow, and only memory is at stake.
    """
    owner = getattr(function, "__self__", function)
    known = _without_custom_functions.get(id(owner))
    if known is not None and known[1] == len(tensors) and known[0]() is owner:
        return False
    try:
        kinds = {type(tensor.grad_fn) for tensor in tensors if tensor is not None}
    except RuntimeError:
        # A view that may not be differentiated any more. Nobody has, and nobody need.
        return True
    if any(issubclass(kind, BackwardCFunction) for kind in kinds):
        return True
    with suppress(TypeError):  # there are no weak references to some objects
        if len(_without_custom_functions) >= _KNOWN:
            _without_custom_functions.clear()
        _without_custom_functions[id(owner)] = ref(owner), len(tensors)
    return False


def _described(describe: Describe, tensor: torch.Tensor) -> tuple[Any, ...]:
    """The description of ``tensor`` in a ticket."""
    description = describe(tensor)
    return description if describe in (cpu_metadata, metadata) else (description,)
