"""The mode under which a recomputation runs: hands out what was kept.

It does so as long as the region runs the ops of forward, one by one, and each kept op gets what it
got then (see ``origins``). If an op gets something else, that is an error. If another op runs,
since forward had to fill a cache, the rest of the region is simply recomputed. What was given out
before on the condition that all ops are the same is then computed, and compared.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.autograd import current_graph_task, is_weight
from recollect._torch.modes import DispatchMode
from recollect._torch.pytree import tree_leaves, tree_map_only
from recollect._torch.tensors import storage_key, version_of
from recollect.checks.place import Place
from recollect.errors import KeptTensorError
from recollect.policy.facts import Facts, facts_of, known_facts
from recollect.rerun.selective.ledger import Entry, Ledger
from recollect.rerun.selective.origins import Made, Origins, differ, note_results
from recollect.state.rng import write_rng
from recollect.state.tensors import same_values

__all__ = ["ReplayMode"]

_Tensor = torch.Tensor

#: No step.
_NONE = -1

_CAUSE = (
    "The region ran other operations than in forward: it is nondeterministic, or depends on "
    "global state that has changed since."
)


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

    def _start(self) -> None:
        #: The backward for which this runs.
        self._backward = current_graph_task()
        self._made: Made = {}
        #: By its key, the memory of what stands in for results that nobody reads.
        self._vacant: dict[int | None, ReferenceType[Any]] = {}
        #: The first op that reads such a thing, and how many tensors had been saved then.
        self._misread: tuple[Any, int] | None = None
        self._sequence = self.ledger.sequence
        #: What is there to be given out, by step.
        self._entries: dict[int, Entry] = {}
        #: How many ops have run; whether they were those of forward, one by one; and whether
        #: something was given out on that condition.
        self._steps = 0
        self._is_in_step = True
        self._guesses: list[_Guess] = []
        #: When it is not in step any more: by op, the steps of forward that have not come yet.
        self._left: dict[Any, deque[int]] = {}
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
        # Of two that run at once, in threads, the second recomputes everything.
        if self.ledger.begin_replay() or self._once:
            self._entries = self.ledger.entries
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ledger.end_replay()
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        facts = known_facts.get(id(func)) or facts_of(func)
        if facts.is_ignored or (facts.is_cast and is_weight(args[0])):
            out = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
            if facts.is_ignored and self._origins is not None and isinstance(out, _Tensor):
                self._origins.label_alias(out, args[0], self._made)
            return out
        step = self._steps
        if self._is_in_step and step < len(self._sequence) and self._sequence[step] is func:
            self._steps = step + 1
        else:
            step = self._find(func, args)
        label, inputs = None, ()
        if self._origins is not None:
            inputs = self._origins.inputs(id(func), args, kwargs, self._made, self._label)
            label = None if None in inputs else hash(inputs)
        entry = self._entries.get(step)
        if entry is not None:
            entry = self._checked(facts, entry, inputs, args, kwargs)
        if entry is not None:
            out = self._hand_out(facts, entry)
            if label is None and self._origins is not None:
                # What is not known is the same, if all ops are.
                self._guesses.append(_Guess(facts, args, kwargs, out, entry))
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

    def _label(self, value: Any, _reads_at: int | None) -> Any:
        """The label of what is met for the first time; or of a list, or of a constant."""
        assert self._origins is not None
        return self._origins.label(value, self._made)

    def _find(self, func: Any, args: tuple[Any, ...]) -> int:
        """The step in which forward made the call that is about to run, if it is not plainly next.

        It is the next of the calls of the same op.
        """
        key, step = self.ledger.key_of(func, args), self._steps
        was_in_step = self._is_in_step
        if was_in_step:
            if step < len(self._sequence) and self._sequence[step] == key:
                self._steps = step + 1
                return step
            self._left = _by_key(self._sequence, step)
        left = self._left.get(key)
        if not left and self._is_own():
            raise self._not_found(func, key)
        self._is_in_step = False
        if was_in_step and self._is_own() and not self._guessed_right():
            raise KeptTensorError(
                f"{func} is run now, and was not at this point of forward{_where()}. Results "
                f"have been given out on the condition that it was. {_CAUSE}"
            )
        return left.popleft() if left else _NONE

    def _not_found(self, func: Any, key: Any) -> KeptTensorError:
        count = self._sequence.count(key)
        call = f"{func} invocation index {count}" if count else f"{func}"
        return KeptTensorError(
            f"{call} encountered during backward but not found in storage. {_CAUSE}"
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
        if entry.is_consumed or self._origins is None:
            return entry if self._once or not entry.is_consumed else None
        if not self._is_in_step:
            return None
        if entry.inputs == inputs:
            return entry
        if None in inputs and not differ(entry.inputs, inputs):
            return entry
        if entry.is_vacant or facts.is_random:
            return None
        # What goes in may be the same all the same, made in another way. And a choice stands,
        # however its scores come out now.
        is_same = _same(facts.call(*args, **(kwargs or {})), entry.look())
        if is_same or (
            facts.not_to_be_repeated is not None and not self._is_another(entry, inputs)
        ):
            return entry
        raise KeptTensorError(
            f"{facts.op} was kept in forward, but gets other inputs now{_where()}. {_CAUSE}"
        )

    def _is_another(self, entry: Entry, inputs: tuple[Any, ...]) -> bool:
        """Whether ``inputs`` are those of another call: calls have changed places."""
        return any(each.inputs == inputs for each in self._entries.values() if each is not entry)

    def _guessed_right(self) -> bool:
        """Whether all that was given out on a condition is what would have been computed."""
        guesses, self._guesses = self._guesses, []
        return all(guess.holds() for guess in guesses)

    def _is_own(self) -> bool:
        """Whether forward must have run the op that is running: it is not of a backward inside."""
        return self.ledger.is_complete and current_graph_task() == self._backward

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
        is_short = self._is_in_step and self._steps < self.ledger.steps
        if is_short and not self._guessed_right():
            raise KeptTensorError(
                "the recomputation ran fewer operations than forward. Results have been given out "
                f"on the condition that it ran the same. {_CAUSE}"
            )
        if self._misread is not None and self._misread[1] < min(expected, len(self._saved)):
            raise _unread(self._misread[0])
        if self._vacant and any(self._is_vacant(tensor) for tensor in self._saved[:expected]):
            raise _unread("autograd")
        for step in [change for entry in self._changed for change in entry.changes]:
            if not self._has_run(step):
                raise KeptTensorError(
                    "Tensor cached during selective activation checkpoint has been mutated by "
                    f"{self.ledger.op_at(step)} in forward, and was not in the recomputation. "
                    f"{_CAUSE}"
                )

    def _has_run(self, step: int) -> bool:
        """Whether the op that ran in this step of forward has run again."""
        if self._is_in_step:
            return step < self._steps
        return step not in self._left.get(self._sequence[step], ())


class _Weak:
    """A tensor that is not held, with the version it has."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: _Tensor) -> None:
        self._tensor = ref(tensor)
        self._version = version_of(tensor)

    def get(self) -> _Tensor:
        """The tensor, if it is still there, and what it was."""
        tensor = self._tensor()
        if tensor is None or version_of(tensor) != self._version:
            raise ReferenceError
        return tensor


class _Guess:
    """A result that was given out though it is not known whether the same went in as in forward."""

    __slots__ = ("_call", "_facts", "_out")

    def __init__(self, facts: Facts, args: Any, kwargs: Any, out: Any, entry: Entry) -> None:
        self._facts = facts
        #: What went in; None if the op cannot be run again to compare.
        self._call = None
        if not entry.is_vacant and not facts.is_random:
            self._call = tree_map_only(_Tensor, _Weak, (args, kwargs or {}))
        self._out = tree_map_only(_Tensor, _Weak, out)

    def holds(self) -> bool:
        """Whether it is what the op gives; false if that cannot be found out."""
        if self._call is None:
            return False
        try:
            args, kwargs = tree_map_only(_Weak, _Weak.get, self._call)
            out = tree_map_only(_Weak, _Weak.get, self._out)
        except ReferenceError:
            return False
        return _same(self._facts.call(*args, **kwargs), out)


def _by_key(sequence: list[Any], start: int) -> dict[Any, deque[int]]:
    """The steps from ``start`` on, by what is called in them."""
    steps: dict[Any, deque[int]] = {}
    for step in range(start, len(sequence)):
        steps.setdefault(sequence[step], deque()).append(step)
    return steps


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
