"""The mode under which a recomputation runs: hands out what was kept.

It does so as long as the region runs the ops of forward, one by one, and each kept op gets what it
got then (see ``origins``). If an op gets something else, that is an error. If another op runs,
since forward had to fill a cache, the rest of the region is simply recomputed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect.checks.place import Place
from recollect.errors import KeptTensorError
from recollect.selective.facts import Facts, facts_of
from recollect.selective.ledger import Calls, Entry, Ledger
from recollect.selective.origins import Made, Origins, differ, note_results
from recollect.state.rng import write_rng
from recollect.state.tensors import same_values
from recollect.torch_private import (
    DispatchMode,
    OpOverload,
    current_graph_task,
    is_weight,
    storage_key,
    tree_leaves,
)

__all__ = ["ReplayMode"]

_Tensor = torch.Tensor

_CAUSE = (
    "The region ran other operations than in forward: it is nondeterministic, or depends on "
    "global state that has changed since."
)


class _Progress:
    """How far the recomputation has come in the calls of one op."""

    __slots__ = ("calls", "facts", "position")

    def __init__(self, facts: Facts, calls: Calls | None) -> None:
        self.facts = facts
        self.calls = calls
        self.position = 0


class ReplayMode(DispatchMode):
    """Runs in the recomputation.

    ``once``: refuse to recompute a second time; otherwise, what was given out is run again.
    """

    def __init__(
        self, ledger: Ledger, allow_cache_entry_mutation: bool = False, *, once: bool = True
    ) -> None:
        super().__init__()
        self.ledger = ledger
        self.allow_cache_entry_mutation = allow_cache_entry_mutation
        self._once = once
        #: Whether the streams are those of forward, and to be moved past what is not run again.
        self._restores_rng = False
        #: Present in a recomputation whose arguments are known.
        self._origins: Origins | None = None
        self._saved: list[Any] = []
        self._gives = True
        #: The backward for which this runs.
        self._backward = current_graph_task()
        self._start()

    def _start(self) -> None:
        #: By id of the op.
        self._known: dict[int, _Progress] = {}
        self._made: Made = {}
        #: By its key, the memory of what stands in for results that nobody reads.
        self._vacant: dict[int | None, ReferenceType[Any]] = {}
        #: The first op that reads such a thing, and how many tensors had been saved then.
        self._misread: tuple[Any, int] | None = None
        #: How many ops have run; whether they were those of forward, one by one; and whether
        #: something was given out on that condition.
        self._steps = 0
        self._is_in_step = True
        self._guesses = False
        #: What has been given out and was changed in place in forward.
        self._changed: list[Entry] = []

    def for_rerun(
        self, values: Iterable[Any], saved: list[Any], *, restores_rng: bool
    ) -> ReplayMode:
        """A mode of its own for one recomputation: several may run at once, in threads.

        ``values``: the arguments of the region. ``saved``: what autograd has saved so far.
        """
        mode = ReplayMode(self.ledger, self.allow_cache_entry_mutation, once=self._once)
        mode._restores_rng = restores_rng
        mode._saved = saved
        mode._origins = self.ledger.origins.for_rerun(values)
        self.ledger.deposit.announce()
        return mode

    def __enter__(self) -> ReplayMode:
        self._start()
        self._backward = current_graph_task()
        # Of two that run at once, in threads, the second recomputes everything.
        self._gives = self.ledger.begin_replay() or self._once
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ledger.end_replay()
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        progress = self._known.get(id(func)) or self._look_up(func, args)
        facts, calls = progress.facts, progress.calls
        if calls is None or (facts.is_cast and is_weight(args[0])):
            return facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        position = progress.position
        progress.position = position + 1
        label, inputs = None, ()
        if self._origins is not None:
            origins, made = self._origins, self._made
            stranger = partial(origins.label, made=made)
            inputs = origins.inputs(calls.key, args, kwargs, made, stranger)
            label = None if None in inputs else hash(inputs)
        if position >= calls.count and self._is_own():
            raise KeptTensorError(
                f"{calls.op} invocation index {position} encountered during backward but not "
                f"found in storage. {_CAUSE}"
            )
        if self._is_in_step:
            self._keep_step(calls)
        entry = calls.entries.get(position) if calls.entries and self._gives else None
        if entry is not None and self._origins is not None and not entry.is_consumed:
            entry = self._checked(facts, entry, inputs, args, kwargs)
        if entry is not None and (self._once or not entry.is_consumed):
            out = self._hand_out(facts, entry)
            label = entry.label
        else:
            if self._vacant:
                self._note_reading(facts, args, kwargs)
            out = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        if type(out) is _Tensor:
            self._made[id(out)] = (ref(out), label, None)
        else:
            note_results(self._made, out, label, None)
        return out

    def _keep_step(self, calls: Calls) -> None:
        """Compare the op that is about to run with the one that ran in forward."""
        sequence, step = self.ledger.sequence, self._steps
        self._steps = step + 1
        if step < len(sequence) and sequence[step] == calls.key:
            return
        self._is_in_step = False
        if self._guesses and self._is_own():
            raise KeptTensorError(
                f"{calls.op} is run now, and was not at this point of forward{_where()}. Results "
                f"have been given out on the condition that it was. {_CAUSE}"
            )

    def _checked(
        self,
        facts: Facts,
        entry: Entry,
        inputs: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Entry | None:
        """What was kept of the call of this number, if the region has done as in forward so far.

        None: the op has to be run.
        """
        if not self._is_in_step:
            return None
        if entry.inputs == inputs:
            return entry
        if None in inputs and not differ(entry.inputs, inputs):
            self._guesses = True  # what is not known is the same, if all ops are
            return entry
        if entry.is_vacant or facts.is_random:
            return None
        # What goes in may be the same all the same, made in another way.
        if _same(facts.call(*args, **(kwargs or {})), entry.look()):
            return entry
        raise KeptTensorError(
            f"{facts.op} was kept in forward, but gets other inputs now{_where()}. {_CAUSE}"
        )

    def _is_own(self) -> bool:
        """Whether forward must have run the op that is running: it is not of a backward inside."""
        return self.ledger.is_complete and current_graph_task() == self._backward

    def _look_up(self, func: Any, args: tuple[Any, ...]) -> _Progress:
        facts = facts_of(func)
        if facts.is_ignored:
            progress = self._known[id(func)] = _Progress(facts, None)
            return progress
        calls = self.ledger.calls.get(self.ledger.key_of(func, args))
        if calls is None and facts.is_cast and is_weight(args[0]):
            return _Progress(facts, None)
        if calls is None and not self._is_own():
            calls = self.ledger.calls_of(func, args)
        if calls is None:
            raise KeptTensorError(
                f"{func} encountered during backward but not found in storage. {_CAUSE}"
            )
        # A compiled region is looked up by its key each time, and goes on where it was.
        progress = self._known.get(id(calls)) or _Progress(facts, calls)
        self._known[id(func) if type(func) is OpOverload else id(calls)] = progress
        return progress

    def _hand_out(self, facts: Facts, entry: Entry) -> Any:
        if entry.is_consumed:
            raise KeptTensorError(
                "Trying to backward an extra time. A region under selective checkpointing gives "
                "out what it kept once. Use recollect.create_selective_checkpoint_contexts (or "
                "policy=), which recomputes it for every further backward."
            )
        if entry.rng is not None and self._restores_rng:
            write_rng(entry.rng)
        try:
            out = entry.take(allow_mutation=self.allow_cache_entry_mutation)
        except KeptTensorError as error:
            raise KeptTensorError(f"{error} The op is {facts.op}{_where()}.") from None
        if entry.changes:
            self._changed.append(entry)
        if entry.is_vacant:
            for tensor in tree_leaves(out):
                if isinstance(tensor, _Tensor):
                    self._vacant[storage_key(tensor)] = ref(tensor.untyped_storage())
        return out

    # --- what nobody reads ------------------------------------------------------------------------

    def _note_reading(self, facts: Facts, args: tuple[Any, ...], kwargs: Any) -> None:
        """An op is about to run. After the last save it may read what it likes."""
        if facts.is_alias or self._misread is not None:
            return
        if any(self._is_vacant(value) for value in tree_leaves((args, kwargs))):
            self._misread = facts.op, len(self._saved)

    def _is_vacant(self, value: Any) -> bool:
        """Whether ``value`` only stands in for a result."""
        if not isinstance(value, _Tensor):
            return False
        memory = self._vacant.get(storage_key(value))
        return memory is not None and memory() is value.untyped_storage()

    def check_saved(self, expected: int) -> None:
        """Refuse what comes from a result that was not there. ``expected``: how many are saved."""
        if self._guesses and self._is_in_step and self._steps < self.ledger.steps:
            raise KeptTensorError(
                "the recomputation ran fewer operations than forward. Results have been given out "
                f"on the condition that it ran the same. {_CAUSE}"
            )
        if self._misread is not None and self._misread[1] < min(expected, len(self._saved)):
            raise _unread(self._misread[0])
        if self._vacant and any(self._is_vacant(tensor) for tensor in self._saved[:expected]):
            raise _unread("autograd")
        for calls, number, _ in [change for entry in self._changed for change in entry.changes]:
            progress = self._known.get(id(calls.op))
            if progress is None or progress.position <= number:
                raise KeptTensorError(
                    "Tensor cached during selective activation checkpoint has been mutated by "
                    f"{calls.op} in forward, and was not in the recomputation. {_CAUSE}"
                )


def _same(a: Any, b: Any) -> bool:
    """Whether two results of an op are the same, bit for bit."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(same_values(x, y) for x, y in pairs if isinstance(x, _Tensor))


def _unread(reader: Any) -> KeptTensorError:
    return KeptTensorError(
        f"{reader} reads a result in the recomputation that nothing read in forward, and that was "
        f"not kept for that reason. {_CAUSE}"
    )


def _where() -> str:
    """The user's line that is running."""
    stack = Place(sys._getframe(1)).stack
    if not stack:
        return ""
    file, line, function = stack[0]
    return f" (in {function}, {file}:{line})"
