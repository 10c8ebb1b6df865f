"""The mode under which a recomputation runs: hands out the kept results.

It does so while the region runs the ops of forward, one by one, and each kept op gets the same
inputs (see ``labels``). Other inputs are an error. If another op runs (forward filled a cache), the
rest of the region is recomputed. Results that were handed out on the condition that all ops are the
same are then computed and compared.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch

from recollect._torch.autograd import current_graph_task, is_weight
from recollect._torch.fsdp import HookRanges
from recollect._torch.modes import DispatchMode
from recollect._torch.pytree import tree_map_only
from recollect._torch.tensors import version_of
from recollect.checks.place import Place
from recollect.errors import KeptTensorError
from recollect.policy.op_info import OpInfo, known_ops, op_info
from recollect.rerun.selective.labels import Labels, differ
from recollect.rerun.selective.ledger import KeptCall, Ledger, same_results
from recollect.state.rng import write_rng

_Tensor = torch.Tensor
_Args = tuple[Any, ...]

#: No step.
_NONE = -1

_CAUSE = (
    "The region ran other operations than in forward: it is nondeterministic, or depends on "
    "global state that has changed since."
)


class RecomputeMode(DispatchMode):
    """Runs in the recomputation.

    ``once``: refuse to recompute a second time; otherwise the kept ops are then run again.
    """

    def __init__(self, ledger: Ledger, *, once: bool = True) -> None:
        super().__init__()
        self.ledger = ledger
        self._once = once
        #: Whether the streams are those of forward, to be moved past random ops that do not run.
        self._restores_rng = False
        self._hooks = HookRanges()
        #: Present in a recomputation whose arguments are known.
        self._labels: Labels | None = None

    def for_rerun(self, values: Iterable[Any], *, restores_rng: bool) -> RecomputeMode:
        """The mode for one recomputation with the arguments ``values``."""
        mode = RecomputeMode(self.ledger, once=self._once)
        mode._restores_rng = restores_rng
        mode._labels = self.ledger.labels.for_rerun(values)
        self.ledger.offload_batch.announce()
        return mode

    def __enter__(self) -> RecomputeMode:
        #: The backward for which this runs.
        self._backward = current_graph_task()
        self._sequence = self.ledger.sequence
        #: How many ops have run; whether they were those of forward, one by one; and what was
        #: handed out on that condition.
        self._steps = 0
        self._is_in_step = True
        self._guesses: list[tuple[OpInfo, Any]] = []
        #: When it is not in step any more: by op, the steps of forward that have not come yet.
        self._left: dict[Any, deque[int]] = {}
        #: Entries that were handed out and whose results were changed in place in forward.
        self._changed: list[KeptCall] = []
        with self.ledger.lock:
            self.ledger.recomputations += 1
            is_first = self.ledger.recomputations == 1
        # Of two that run at once, in threads, the second recomputes everything.
        self._entries = self.ledger.entries if is_first or self._once else {}
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        with self.ledger.lock:
            self.ledger.recomputations -= 1
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: Any = None
    ) -> Any:
        info = known_ops.get(id(func)) or op_info(func)
        if info.is_ignored or (info.is_cast and is_weight(args[0])):
            out = info.call(*args, **kwargs) if kwargs else info.call(*args)
            if info.is_ignored and self._labels is not None and isinstance(out, _Tensor):
                self._labels.label_alias(out, args[0])
            return out
        if (info.is_range or self._hooks.depth) and self._hooks.owns(info.name, args):
            return info.call(*args, **kwargs) if kwargs else info.call(*args)
        step = self._steps
        if self._is_in_step and step < len(self._sequence) and self._sequence[step] is func:
            self._steps = step + 1
        else:
            step = self._find(func, args)
        labels, label, inputs = self._labels, None, ()
        if labels is not None:
            inputs = labels.inputs(id(func), args, kwargs)
            label = None if None in inputs else hash(inputs)
        entry = self._entries.get(step)
        if entry is not None and self._fits(info, entry, inputs, args, kwargs):
            out = self._hand_out(info, entry)
            if label is None and labels is not None:
                # Inputs of unknown origin are the same, if all ops are.
                call = tree_map_only(_Tensor, _Weak, (args, kwargs or {}, out))
                self._guesses.append((info, call))
            label = entry.label
        else:
            out = info.call(*args, **kwargs) if kwargs else info.call(*args)
            if entry is not None and not entry.is_consumed and entry.inputs == inputs:
                self._check_repeatable(info, entry, args, kwargs, out)
        if labels is not None and type(out) is _Tensor:
            labels.made[id(out)] = ref(out), label
        elif labels is not None:
            labels.note_results(out, label)
        return out

    # --- which call of forward is it? -------------------------------------------------------------

    def _find(self, func: Any, args: _Args) -> int:
        """The step of forward that made this call, where that is not simply the next step.

        It is the next call of the same op.
        """
        key, step = self.ledger.key_of(func, args), self._steps
        was_in_step = self._is_in_step
        if was_in_step:
            if step < len(self._sequence) and self._sequence[step] == key:
                self._steps = step + 1
                return step
            for later in range(step, len(self._sequence)):
                self._left.setdefault(self._sequence[later], deque()).append(later)
        left = self._left.get(key)
        if not left and self._is_own():
            count = self._sequence.count(key)
            call = f"{func} invocation index {count}" if count else f"{func}"
            raise KeptTensorError(
                f"{call} encountered during backward but not found in storage. {_CAUSE}"
            )
        self._is_in_step = False
        if was_in_step and self._is_own() and not self._guessed_right():
            raise KeptTensorError(
                f"{func} is run now, and was not at this point of forward{_where()}. Results "
                f"have been given out on the condition that it was. {_CAUSE}"
            )
        return left.popleft() if left else _NONE

    def _is_own(self) -> bool:
        """Whether forward must have run the op that is running: it is not of a backward inside."""
        return self.ledger.is_complete and current_graph_task() == self._backward

    # --- may it get the kept result? --------------------------------------------------------------

    def _fits(self, info: OpInfo, entry: KeptCall, inputs: _Args, args: _Args, kwargs: Any) -> bool:
        """Whether ``entry`` is to be handed out; otherwise the op has to be run."""
        if entry.is_consumed or self._labels is None:
            return self._once or not entry.is_consumed
        if not self._is_in_step or (entry.is_exposed() and not info.communicates):
            return False
        if entry.inputs == inputs or (None in inputs and not differ(entry.inputs, inputs)):
            return True
        if info.is_random:
            return False
        # The values may still be the same, computed in another way. And a discrete choice stands,
        # however its scores come out now.
        is_same = entry.equals(info.call(*args, **(kwargs or {})))
        # Unless the inputs are those of another call: then calls have changed places.
        others = (each for each in self._entries.values() if each is not entry)
        if is_same or (info.kept_by_default and all(each.inputs != inputs for each in others)):
            return True
        raise KeptTensorError(
            f"{info.op} was kept in forward, but gets other inputs now{_where()}. {_CAUSE}"
        )

    def _check_repeatable(
        self, info: OpInfo, entry: KeptCall, args: _Args, kwargs: Any, out: Any
    ) -> None:
        """Raise if a kept op of another library, run again for the same inputs, differs.

        It may keep state, or draw random numbers, and torch does not say so.
        """
        if info.is_pure(args, kwargs or {}) or entry.equals(out):
            return
        raise KeptTensorError(
            f"{info.op} was kept in forward, but had to run again{_where()}, and returned "
            "something else: it keeps state, or draws random numbers. It had to run, since an "
            "array of numpy shares memory with its result, or since other operations ran than in "
            "forward. Copy the result before reading it as an array (out.clone().numpy()), run "
            "the operation outside of the region, or use engine='replay'."
        )

    def _hand_out(self, info: OpInfo, entry: KeptCall) -> Any:
        if entry.is_consumed:
            raise KeptTensorError(
                "Trying to backward an extra time. A region under selective checkpointing returns "
                "each kept result once. Use recollect.create_selective_checkpoint_contexts (or "
                "policy=), which recomputes it for every further backward."
            )
        if entry.rng is not None and self._restores_rng:
            write_rng(entry.rng)
        try:
            out = entry.take()
        except KeptTensorError as error:
            raise KeptTensorError(f"{error} The op is {info.op}{_where()}.") from None
        if entry.changes:
            self._changed.append(entry)
        return out

    # --- did it run what forward ran? -------------------------------------------------------------

    def check_end(self) -> None:
        """Raise if fewer ops ran than in forward, and results were handed out that rely on them."""
        is_short = self._is_in_step and self._steps < self.ledger.steps
        if is_short and not self._guessed_right():
            raise KeptTensorError(
                "the recomputation ran fewer operations than forward, and was given kept results "
                f"on the condition that it runs the same. {_CAUSE}"
            )
        for step in [change for entry in self._changed for change in entry.changes]:
            if step < self.ledger.end and not self._has_run(step):
                raise KeptTensorError(
                    "Tensor cached during selective activation checkpoint has been mutated by "
                    f"{self.ledger.op_at(step)} in forward, and was not in the recomputation. "
                    f"{_CAUSE}"
                )

    def _has_run(self, step: int) -> bool:
        if self._is_in_step:
            return step < self._steps
        return step not in self._left.get(self._sequence[step], ())

    def _guessed_right(self) -> bool:
        """Whether the ops of results that were handed out on a condition compute the same."""
        guesses, self._guesses = self._guesses, []
        return all(_holds(info, call) for info, call in guesses)


class _Weak:
    """A tensor that is not held, with its version."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: _Tensor) -> None:
        self._tensor = ref(tensor)
        self._version = version_of(tensor)

    def get(self) -> _Tensor:
        """The tensor, if it still exists and was not changed."""
        tensor = self._tensor()
        if tensor is None or version_of(tensor) != self._version:
            raise ReferenceError
        return tensor


def _holds(info: OpInfo, call: Any) -> bool:
    """Whether an op returns the result that was handed out; False if that is unknown."""
    if info.is_random:
        return False
    try:
        args, kwargs, out = tree_map_only(_Weak, _Weak.get, call)
    except ReferenceError:
        return False
    return same_results(info.call(*args, **kwargs), out)


def _where() -> str:
    """The user's line that is running."""
    stack = Place(sys._getframe(1)).stack
    if not stack:
        return ""
    file, line, function = stack[0]
    return f" (in {function}, {file}:{line})"
