"""The rerun engine: forget what autograd saves, run the function again when backward asks.

    forward                                     backward

    (1) Frame: inputs, RNG, ambient modes
    (2) function runs under pack and unpack     (5) unpack(ticket): first of this backward?
    (3) for each saved tensor autograd gets         rerun the function with the state of (1)
        a ticket, with its number and what      (6) the n-th tensor saved now goes to the n-th place
        it looked like; the tensor is let go        of a Pass, if its ticket (3) is alive and fits
    (4) settle: inputs that the region          (7) all places filled: stop the rerun early
        changed, devices that it started        (8) unpack takes the tensor out of its place

A tensor leaves its place as it is unpacked, also with ``retain_graph``: recomputed memory shrinks
as backward goes, and a second backward reruns. Tickets of a part of the graph that has been freed
are dead, and nothing is kept for them. A pass belongs to one backward (a graph task of autograd's,
or the ``GraphExecGroup`` around several): two that run interleaved, one inside the other or in two
threads, do not see each other's tensors.

The graph that a rerun builds gets numbers, good for as long as the rerun lasts (the function may go
backward inside). Nothing here refers to a graph that refers back: there are no cycles.

The hooks run three times for every saved tensor of a model; they are written for speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from sys import getrefcount
from types import TracebackType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.autograd.function import BackwardCFunction

from recollect._torch.autograd import (
    at_end_of_backward,
    current_graph_task,
    current_operation,
    get_graph_exec_group,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from recollect._torch.dynamo import (
    dynamo_is_watching,
    hide_from_dynamo,
    is_tracing,
    never_traced,
    run_without_dynamo,
)
from recollect._torch.modes import TorchDispatchMode, dispatch_modes_active, set_grad_enabled
from recollect.checks.determinism import (
    Describe,
    count_mismatch,
    cpu_metadata,
    default_check,
    metadata,
    metadata_mismatch,
    same,
    too_many_saved,
    values_check,
)
from recollect.checks.diagnosis import Scene
from recollect.checks.oplog import OpLog
from recollect.checks.trace import explain
from recollect.checks.values import value_difference
from recollect.errors import AlreadyUnpacked, CheckpointError, InputChanged, StopRecompute
from recollect.rerun.selective import RecordMode, ReplayMode
from recollect.settings import version_guard_enabled
from recollect.state.guards import UseOfChanged
from recollect.state.inputs import Inputs
from recollect.state.region_state import Surroundings
from recollect.store.offload_batch import OffloadBatch

__all__ = ["Contexts", "Frame", "make_contexts"]

#: What ``context_fn`` returns: one context for forward, one for the rerun.
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def make_contexts(context_fn: Callable[[], Contexts]) -> Contexts:
    """Call ``context_fn`` and check what it gives before anything is entered."""
    contexts = context_fn()
    if not isinstance(contexts, (tuple, list)) or len(contexts) != 2:
        raise TypeError(
            "context_fn should return a tuple of two context managers, one for forward and one "
            f"for the recomputation, but returned {contexts!r}"
        )
    for context in contexts:
        if not (hasattr(context, "__enter__") and hasattr(context, "__exit__")):
            raise TypeError(
                "context_fn should return a tuple of two context managers, but "
                f"{context!r} of type {type(context).__name__} is none"
            )
    if is_tracing() and not all(isinstance(c, TorchDispatchMode) for c in contexts):
        raise AssertionError(
            "In torch.compile mode, `context_fn` arg passed to `torch.utils.checkpoint` must "
            "generate a tuple of two `TorchDispatchMode`s."
        )
    return contexts[0], contexts[1]


#: Stands in the graph for a saved tensor: its number, and its description by the check.
Ticket = tuple[Any, ...]


class Pass:
    """The recomputed tensors of a frame, for one backward."""

    __slots__ = ("tensors", "versions")

    def __init__(self, tensors: list[torch.Tensor | None], versions: list[int]) -> None:
        #: By number; None once unpacked, or where nobody can ask.
        self.tensors = tensors
        self.versions = versions


class Frame:
    """One call of a checkpointed function. Enter it to run the function's forward inside."""

    __slots__ = (
        "__weakref__",
        "compares_values",
        "contexts",
        "debug",
        "deposit",
        "describe",
        "early_stop",
        "entered",
        "forward_log",
        "function",
        "inputs",
        "locks",
        "passes",
        "read_once",
        "running",
        "surroundings",
        "tickets",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: bool,
        contexts: Contexts | None,
        describe: Describe | None,
        early_stop: bool,
        debug: bool,
        read_once: bool,
        deposit: OffloadBatch | None = None,
    ) -> None:
        self.function = function
        #: Where the inputs go, if they are not held.
        self.deposit = deposit
        self.inputs = Inputs(args, kwargs, version_guard_enabled(), deposit)
        self.surroundings = Surroundings(function, self.inputs.reachable(), preserve_rng_state)
        self.contexts = contexts
        self.entered: AbstractContextManager[Any] | None = None
        #: Whether the bits are compared, beside what ``describe`` sees.
        self.compares_values = describe is values_check
        self.describe = default_check if self.compares_values else describe
        self.early_stop = early_stop
        self.debug = debug
        self.forward_log = self.make_log()
        self.read_once = read_once
        self.running = True
        #: One for each saved tensor. Held here and by the graph: one that only this list holds is
        #: dead. (To count references costs nothing in forward; a weak one would have to be made.)
        self.tickets: list[Ticket] = []
        #: By backward.
        self.passes: dict[Any, Pass] = {}
        self.locks: dict[Any, threading.RLock] = {}
        if contexts is not None and isinstance(contexts[0], RecordMode):
            values, exact = (*args, *kwargs.values()), self.forward_log is not None
            contexts[0].bind(function, values, stops_early=early_stop, exact=exact)

    def make_log(self) -> OpLog | None:
        """A log for one run, if there is to be one."""
        if not self.debug and not self.compares_values:
            return None
        return OpLog(stacks=self.debug, fingerprints=self.compares_values)

    # --- forward ----------------------------------------------------------------------------------

    def __enter__(self) -> None:
        push_saved_tensor_hooks(self._pack_hook(), self.unpack)
        recorder = self.surroundings.collectives
        if self.contexts is None and self.forward_log is None and recorder is None:
            return
        try:
            if self.contexts is not None and self.forward_log is None and recorder is None:
                self.contexts[0].__enter__()  # a stack for one would take longer
                self.entered = self.contexts[0]
                return
            with ExitStack() as stack:
                if self.contexts is not None:
                    stack.enter_context(self.contexts[0])
                if recorder is not None:
                    stack.enter_context(recorder)
                if self.forward_log is not None:
                    stack.enter_context(self.forward_log)
                self.entered = stack.pop_all()
        except BaseException:
            pop_saved_tensor_hooks()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.entered is not None:
                self._exit_contexts(exc_type, exc, traceback)
        finally:
            pop_saved_tensor_hooks()
        if exc is None:
            self.running = False
            self.inputs.settle()
            self.surroundings.settle()

    def _exit_contexts(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entered, self.entered = self.entered, None
        assert entered is not None
        if entered.__exit__(exc_type, exc, traceback) and exc is not None:
            raise RuntimeError(
                "the forward context given by context_fn suppressed an exception of the "
                f"checkpointed function: {exc!r}. There is no result to return then; let its "
                "__exit__ return False."
            ) from exc

    def _pack_hook(self) -> Callable[[torch.Tensor], Ticket]:
        tickets = self.tickets
        describe = self.describe

        # The two default checks are written out: a call would cost as much as what it does.
        def pack_on_cpu(tensor: torch.Tensor) -> Ticket:
            ticket = (len(tickets), tensor.shape, tensor.dtype)
            tickets.append(ticket)
            return ticket

        def pack(tensor: torch.Tensor) -> Ticket:
            ticket = (len(tickets), tensor.shape, tensor.dtype, tensor.device)
            tickets.append(ticket)
            return ticket

        def pack_described(tensor: torch.Tensor) -> Ticket:
            ticket = (len(tickets), None if describe is None else describe(tensor))
            tickets.append(ticket)
            return ticket

        chosen: Callable[[torch.Tensor], Ticket] = pack_on_cpu if describe is cpu_metadata else pack
        if describe is not cpu_metadata and describe is not metadata:
            chosen = pack_described
        if self.contexts is not None and isinstance(self.contexts[0], RecordMode):
            chosen = self.contexts[0].noting(chosen)
        return _noting(self.forward_log, chosen) if self.compares_values else chosen

    # --- backward ---------------------------------------------------------------------------------

    def dead(self) -> frozenset[int]:
        """The numbers of the tickets that the graph does not hold any more."""
        counts = _reference_counts(self.tickets)
        if min(counts, default=_OF_THE_DEAD + 1) > _OF_THE_DEAD:
            return frozenset()
        return frozenset(n for n, count in enumerate(counts) if count <= _OF_THE_DEAD)

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """The saved-tensor hook by which autograd asks for a tensor back."""
        number = ticket[0]
        passed = self.passes.get(current_graph_task())
        if passed is None or (tensor := passed.tensors[number]) is None:
            passed, tensor = self._recall(number)
        passed.tensors[number] = None
        if tensor._version != passed.versions[number]:
            raise InputChanged(_CHANGED_WHEN_SAVED.format(shape=list(tensor.shape)))
        return tensor

    def _recall(self, number: int) -> tuple[Pass, torch.Tensor]:
        """The pass of this backward, made now if need be, and the tensor."""
        backward = get_graph_exec_group()
        if backward is None:
            backward = current_graph_task()
        if backward == _OUTSIDE:
            # Asked for outside of backward (node._saved_self): nothing stays behind.
            passed = Rerun(self).run()
        else:
            # Two threads of one backward may ask at once: one reruns, the other waits for it.
            with self.locks.setdefault(backward, threading.RLock()):
                passed = self._pass_with(number, backward)
        tensor = passed.tensors[number]
        assert tensor is not None
        return passed, tensor

    def _pass_with(self, number: int, backward: Any) -> Pass:
        """The pass of ``backward``, rerunning the function if it does not hold ``number``."""
        passed = self.passes.get(backward)
        if passed is not None and number < len(passed.tensors):
            if passed.tensors[number] is not None:
                return passed
            self._check_reread(backward)
        elif passed is None and type(backward) is int:
            at_end_of_backward(partial(_end_pass, ref(self), backward))
        passed = self.passes[backward] = Rerun(self).run()
        return passed

    def _check_reread(self, backward: Any) -> None:
        if type(backward) is not int:
            raise AlreadyUnpacked(
                "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already "
                "unpacked once. Performing two backward calls that overlap (i.e. require the same "
                "saved activation) is not allowed under one GraphExecGroup: it recomputes at most "
                "once. Run the second backward outside of the group."
            )
        if self.read_once:
            raise AlreadyUnpacked(
                "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already "
                "unpacked once. Read ctx.saved_tensors once in backward and keep the result, or "
                "use recollect.checkpoint, which recomputes for every further read."
            )


#: The graph task outside of backward.
_OUTSIDE = -1

_CHANGED_WHEN_SAVED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: a tensor of shape {shape} inside a checkpointed region was changed after an "
    "operation had saved it for backward. Without checkpointing this is an error as well. Replace "
    "the in-place operation."
)


def _reference_counts(tickets: list[Ticket]) -> list[int]:
    return [getrefcount(ticket) for ticket in tickets]


#: References to a ticket that only a list holds, as this interpreter counts them.
(_OF_THE_DEAD,) = _reference_counts([(object(),)])


def _end_pass(frame: ReferenceType[Frame], backward: int) -> None:
    """Forget what was recomputed for a backward that is over, and was not asked for."""
    alive = frame()
    if alive is not None:  # a backward over the whole graph has freed the frame with it
        alive.passes.pop(backward, None)
        alive.locks.pop(backward, None)


class Rerun:
    """One run of a frame's function in backward."""

    __slots__ = (
        "_changes",
        "_dead",
        "_expected",
        "_frame",
        "_later",
        "_log",
        "_raised",
        "_replay",
        "_stopped",
        "_surplus",
        "_tensors",
        "_unwritten_by",
        "_versions",
    )

    def __init__(self, frame: Frame, *, keep_all: bool = False) -> None:
        self._frame = frame
        self._dead = frozenset() if keep_all else frame.dead()
        self._expected = len(frame.tickets)
        #: By number; None where the ticket is dead.
        self._tensors: list[Any] = []
        self._versions: list[int] = []
        self._stopped = False
        self._surplus = False
        #: The frame, once the rerun is over.
        self._later: ReferenceType[Frame] | None = None
        #: The operation that may have yet to write what it saves.
        self._unwritten_by = -1
        self._raised: str | None = None
        #: What hands out kept results, if there are any.
        self._replay: ReplayMode | None = None
        #: Present if something that the function may use has changed. It must run to its end then,
        #: for the last op to be seen.
        self._changes: UseOfChanged | None = frame.surroundings.changes()
        self._log = frame.make_log()

    def run(self) -> Pass:
        """Recompute the tensors that forward saved, or say what is different."""
        try:
            self._run()
            self._verify()
            tensors = self._tensors[: self._expected]
            if _hold_memory(tensors):
                tensors = [t if t is None else t.detach() for t in tensors]
        except CheckpointError as error:
            log = self._frame.forward_log
            if self._frame.debug and log is not None and self._log is not None:
                raise explain(error, log, self._log, stopped=self._stopped) from error
            raise
        finally:
            # The graph of the rerun holds on to the hooks, and they to this object.
            self._tensors.clear()
            self._later = ref(self._frame)
            del self._frame
        return Pass(tensors, self._versions)

    def _run(self) -> None:
        if self._frame.deposit is not None:
            self._frame.deposit.announce()
        # This may rerun an outer region, which has to see its own arguments as they were.
        args, kwargs = self._frame.inputs.recall()
        swapped = self._frame.inputs.swap()
        if swapped is None:
            self._run_with(args, kwargs)
            return
        try:
            self._run_with(args, kwargs)
        finally:
            swapped.put_back()

    def _run_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = self._frame
        # First, since it is refused where hooks are disabled: nothing else has been changed then.
        push_saved_tensor_hooks(self._pack_hook(), self._unpack)
        grad_was_enabled = torch.is_grad_enabled()
        set_grad_enabled(True)
        if frame.forward_log is not None:
            frame.forward_log.recording = False  # it is on if the function goes backward inside
        try:
            if dynamo_is_watching():
                run_without_dynamo(frame.surroundings.run, self._call, args, kwargs)
            else:
                frame.surroundings.run(self._call, args, kwargs)
        except StopRecompute as stop:
            if stop.args[0] is not self:
                raise
        finally:
            pop_saved_tensor_hooks()
            set_grad_enabled(grad_was_enabled)
            if frame.forward_log is not None:
                frame.forward_log.recording = True

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = self._frame
        if frame.contexts is None and self._log is None and self._changes is None:
            frame.function(*args, **kwargs)
            return
        contexts = self._contexts((*args, *kwargs.values()))
        if len(contexts) == 1:  # a stack for one would take longer
            with contexts[0]:
                self._call_noting_errors(args, kwargs)
        else:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                self._call_noting_errors(args, kwargs)
        if self._changes is not None and self._changes.error is not None:
            raise self._changes.error
        if self._raised is not None:
            raise CheckpointError(
                "the recompute context given by context_fn suppressed an exception of the "
                f"checkpointed function: {self._raised}. Let its __exit__ return False."
            )

    def _contexts(self, values: tuple[Any, ...]) -> list[AbstractContextManager[Any]]:
        """What the function runs in. ``values``: its arguments."""
        frame = self._frame
        contexts: list[Any] = [] if frame.contexts is None else [frame.contexts[1]]
        if contexts and isinstance(contexts[0], ReplayMode):
            restores_rng = frame.surroundings.preserves_rng
            replay = contexts[0].for_rerun(values, self._tensors, restores_rng=restores_rng)
            self._replay = contexts[0] = replay
        return contexts + [each for each in (self._changes, self._log) if each is not None]

    def _call_noting_errors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._frame.function(*args, **kwargs)
        except StopRecompute:
            raise
        except BaseException as error:
            # Not the error itself: its traceback refers to this object.
            self._raised = repr(error)
            raise

    def _pack_hook(self) -> Callable[[torch.Tensor], Any]:
        tensors = self._tensors
        versions = self._versions
        dead = self._dead
        # The first number at which there is something to do beside noting the tensor.
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
                # Nobody can ask for it but the graph of this rerun, which shall hold it itself.
                packed = cut_off
                tensors.append(None)
            else:
                tensors.append(cut_off)
            versions.append(tensor._version)
            if number >= limit:
                self._near_end(number, tensor)
            return packed

        # A dispatch mode that looks on (a tracer's, or one that the user's context brings) sees a
        # detach for each saved tensor, as it does with torch.
        contexts = self._frame.contexts
        has_modes = contexts is not None and not isinstance(contexts[1], ReplayMode)
        chosen = pack_with_care if dead or has_modes or dispatch_modes_active() else pack
        return _noting(self._log, chosen) if self._frame.compares_values else chosen

    def _near_end(self, number: int, tensor: torch.Tensor) -> None:
        missing = self._expected - number - 1
        if missing >= 0 and self._may_be_unwritten(tensor):
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
        """Whether the operation that is saving ``tensor`` could have yet to write it.

        ``rrelu`` saves the buffer for its noise, then its input, and then draws the noise: to stop
        in between would leave whatever memory held. Such a buffer is new: it has no history, no
        version and no base, and is none of the inputs.
        """
        return (
            not tensor.requires_grad
            and tensor.is_floating_point()
            and tensor._version == 0
            and tensor._base is None
            and not self._frame.inputs.has(tensor)
        )

    def _unpack(self, packed: Any) -> torch.Tensor:
        """The unpack hook of the graph that this rerun builds."""
        if type(packed) is not int:
            return packed  # type: ignore[no-any-return]
        if self._later is None:
            return self._tensors[packed]  # type: ignore[no-any-return]
        # Somebody goes backward on that graph later: the function has stored a part of it.
        frame = self._later()
        tensors = [] if frame is None else Rerun(frame, keep_all=True).run().tensors
        tensor = tensors[packed] if packed < len(tensors) else None
        if tensor is None:
            raise CheckpointError(
                "backward was called on a part of the graph of a recomputation that cannot be had "
                "again. Keep results of the first run of a checkpointed function, not of the "
                "second: see recollect.is_recomputing()."
            )
        return tensor

    def _verify(self) -> None:
        frame = self._frame
        if self._replay is not None:
            self._replay.check_saved(self._expected)
        if self._surplus:
            raise too_many_saved(self._expected, self._scene())
        if len(self._tensors) < self._expected and not frame.running:
            raise count_mismatch(self._expected, len(self._tensors), self._scene())
        if frame.describe is not None:
            self._compare(frame.describe)
        if frame.compares_values:
            assert frame.forward_log is not None
            assert self._log is not None
            error = value_difference(frame.forward_log, self._log, self._scene(), self._dead)
            if error is not None:
                raise error

    def _scene(self) -> Scene:
        """What an error may tell about."""
        frame = self._frame
        args, kwargs = frame.inputs.given
        return Scene(frame.function, frame.tickets, self._tensors, args, kwargs)

    def _compare(self, describe: Describe) -> None:
        """Compare what a check sees of each tensor with what it saw in forward."""
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
        # What nobody can ask for may be as it is. (One list is longer than the other where the
        # function goes backward inside forward.)
        differences = [
            (number, before[1:], after[1:])
            for number, (before, after) in enumerate(zip(frame.tickets, tickets, strict=False))
            if after is not None and not same(before, after)
        ]
        if differences:
            raise metadata_mismatch(differences, self._scene())


def _noting(log: OpLog | None, pack: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """``pack``, with the tensor written down first."""
    assert log is not None
    note = log.note_saved

    def note_and_pack(tensor: torch.Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    return note_and_pack


def _hold_memory(tensors: list[Any]) -> bool:
    """Whether the history of ``tensors`` may hold more than numbers.

    A custom function may have put tensors on its context. Others save what they need through the
    hooks: their history is light, and leaving it on saves detaching every tensor.
    """
    try:
        kinds = {type(tensor.grad_fn) for tensor in tensors if tensor is not None}
    except RuntimeError:
        # A view that may not be differentiated any more. Nobody has, and nobody need.
        return True
    return any(issubclass(kind, BackwardCFunction) for kind in kinds)


def _described(describe: Describe, tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a ticket says of ``tensor``."""
    description = describe(tensor)
    return description if describe in (cpu_metadata, metadata) else (description,)


# A region that ran in eager is recomputed in eager, whoever runs backward.
never_traced(Frame.unpack)

for _hidden in (Frame._recall, Rerun.run, Rerun._run, Rerun._run_with, Rerun._call):
    hide_from_dynamo(_hidden)
