"""Forward of a region: steps (1) to (4) of `rerun.engine` (R4)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from sys import getrefcount
from types import TracebackType
from typing import Any

import torch

from recollect._torch.autograd import (
    DEAD_COUNT,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from recollect._torch.dynamo import is_tracing
from recollect._torch.modes import TorchDispatchMode
from recollect.checks.determinism import (
    Describe,
    cpu_metadata,
    default_check,
    metadata,
    values_check,
)
from recollect.checks.oplog import OpLog
from recollect.observer import observing
from recollect.rerun.selective import RecomputeMode, RecordMode
from recollect.settings import version_guard_enabled
from recollect.state.inputs import Inputs
from recollect.state.region_state import RegionState
from recollect.state.variables import Counters
from recollect.store.offload_batch import OffloadBatch

#: Stands in the graph for a saved tensor: its number, and its description by the check.
Ticket = tuple[Any, ...]

#: What ``context_fn`` returns: one context for forward, one for the rerun.
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

#: The contexts that need no check.
_OWN_MODES: list[type] = [RecordMode, RecomputeMode]


def make_contexts(context_fn: Callable[[], Contexts]) -> Contexts:
    """Call ``context_fn`` and check its result before anything is entered."""
    contexts = context_fn()
    if type(contexts) is tuple and [*map(type, contexts)] == _OWN_MODES:
        return contexts[0], contexts[1]
    if not isinstance(contexts, (tuple, list)) or len(contexts) != 2:
        raise TypeError(
            "context_fn should return a tuple of two context managers, one for forward and one "
            f"for the recomputation, but returned {contexts!r}"
        )
    for context in contexts:
        if not (hasattr(context, "__enter__") and hasattr(context, "__exit__")):
            raise TypeError(
                "context_fn should return a tuple of two context managers, but "
                f"{context!r} of type {type(context).__name__} is not one"
            )
    if is_tracing() and not all(isinstance(c, TorchDispatchMode) for c in contexts):
        raise AssertionError(
            "In torch.compile mode, `context_fn` arg passed to `torch.utils.checkpoint` must "
            "generate a tuple of two `TorchDispatchMode`s."
        )
    return contexts[0], contexts[1]


def as_one(contexts: list[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """A context that enters ``contexts``, in this order."""
    return contexts[0] if len(contexts) == 1 else _entering(contexts)  # a stack takes longer


@contextmanager
def _entering(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class RecomputedTensors:
    """The recomputed tensors of a frame, for one backward."""

    __slots__ = ("tensors", "versions")

    def __init__(self, tensors: list[torch.Tensor | None], versions: list[int]) -> None:
        #: By number; None once unpacked, or where the ticket is dead.
        self.tensors = tensors
        self.versions = versions


class ForwardFrame:
    """One call of a checkpointed function, whose forward runs inside. `Frame` adds backward."""

    __slots__ = (
        *("__weakref__", "compares_values", "contexts", "debug", "describe", "early_stop"),
        *("entered", "forward_log", "function", "inputs", "locks", "offloaded", "read_once"),
        *("recomputed", "region_state", "running", "tickets"),
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
        counters: Counters,
        offloaded: OffloadBatch | None = None,
    ) -> None:
        self.function = function
        #: Where the inputs are, if they are not held.
        self.offloaded = offloaded
        self.inputs = Inputs(args, kwargs, version_guard_enabled(), offloaded)
        self.region_state = RegionState(
            function, self.inputs, preserve_rng_state, counters=counters
        )
        self.contexts = contexts
        self.entered: AbstractContextManager[Any] | None = None
        #: Whether values are compared too, besides the results of ``describe``.
        self.compares_values = describe is values_check
        self.describe = default_check if self.compares_values else describe
        self.early_stop = early_stop
        self.debug = debug
        self.forward_log = self.make_log() if debug or self.compares_values else None
        #: Whether to refuse a recomputation for a tensor that was unpacked before.
        self.read_once = read_once
        self.running = True
        #: One for each saved tensor. A ticket that only this list holds, and no graph, is dead.
        #: (Counting references costs nothing in forward; a weak reference would.)
        self.tickets: list[Ticket] = []
        #: What `Frame` has recomputed, and its locks, by backward.
        self.recomputed: dict[Any, RecomputedTensors] = {}
        self.locks: dict[Any, threading.RLock] = {}
        if contexts is not None and isinstance(contexts[0], RecordMode):
            contexts[0].bind(function, (*args, *kwargs.values()), stops_early=early_stop)

    def make_log(self) -> OpLog | None:
        """A log for one run, if one is needed."""
        if not self.debug and not self.compares_values:
            return None
        return OpLog(stacks=self.debug, fingerprints=self.compares_values)

    def __enter__(self) -> None:
        push_saved_tensor_hooks(self._pack_hook(), self.unpack)
        recorder = self.region_state.collectives
        if self.contexts is None and recorder is None and self.forward_log is None:
            return
        given = None if self.contexts is None else self.contexts[0]
        try:
            entered = as_one([x for x in (given, recorder, self.forward_log) if x is not None])
            entered.__enter__()
            self.entered = entered
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
            entered, self.entered = self.entered, None
            if entered is not None and entered.__exit__(exc_type, exc, traceback) and exc:
                raise RuntimeError(
                    "the forward context given by context_fn suppressed an exception of the "
                    f"checkpointed function: {exc!r}. There is no result to return then; let its "
                    "__exit__ return False."
                ) from exc
        finally:
            pop_saved_tensor_hooks()
        if exc is None:
            self.running = False
            self.inputs.settle()
            self.region_state.settle()

    def _pack_hook(self) -> Callable[[torch.Tensor], Ticket]:
        tickets = self.tickets
        describe = self.describe

        # The two default checks are inlined: a call would cost as much as the check.
        chosen: Callable[[torch.Tensor], Ticket]
        if describe is cpu_metadata:

            def chosen(tensor: torch.Tensor) -> Ticket:
                ticket = (len(tickets), tensor.shape, tensor.dtype)
                tickets.append(ticket)
                return ticket

        elif describe is metadata:

            def chosen(tensor: torch.Tensor) -> Ticket:
                ticket = (len(tickets), tensor.shape, tensor.dtype, tensor.device)
                tickets.append(ticket)
                return ticket

        else:

            def chosen(tensor: torch.Tensor) -> Ticket:
                ticket = (len(tickets), None if describe is None else describe(tensor))
                tickets.append(ticket)
                return ticket

        if self.contexts is not None and isinstance(self.contexts[0], RecordMode):
            chosen = self.contexts[0].noting(chosen)
        if self.compares_values:
            chosen = noting(self.forward_log, chosen)
        observer = observing.observer
        return chosen if observer is None else observer.packing(chosen)

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """The saved-tensor hook that gives autograd a tensor back; see `Frame`."""
        raise NotImplementedError

    def dead(self) -> frozenset[int]:
        """The numbers of the tickets that the graph does not hold any more."""
        counts = [*map(getrefcount, self.tickets)]
        if not counts or min(counts) > DEAD_COUNT:
            return _NO_TICKETS
        return frozenset(n for n, count in enumerate(counts) if count <= DEAD_COUNT)


_NO_TICKETS: frozenset[int] = frozenset()


def noting(log: OpLog | None, pack: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """``pack``, after logging the tensor."""
    assert log is not None
    note = log.note_saved

    def note_and_pack(tensor: torch.Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    return note_and_pack
