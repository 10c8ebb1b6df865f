"""The mode under which forward runs: keeps the results that the policy says to keep (R4).

For each op it writes into the ledger which op was called and, if it is kept, what it returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from recollect._torch.autograd import is_weight
from recollect._torch.dynamo import is_compiling
from recollect._torch.modes import DispatchMode, detach_below_autograd, raw_memory
from recollect._torch.ops import op_name
from recollect._torch.tensors import storage_key
from recollect.observer import observing
from recollect.policy.op_info import OpInfo
from recollect.policy.policy_call import PolicyCall
from recollect.policy.rules import Policy
from recollect.policy.rulings import OpRuling, Ruling
from recollect.rerun.selective.labels import Made, note_results
from recollect.rerun.selective.ledger import Kept, KeptCall, Ledger, map_only
from recollect.rerun.selective.nameable import HELD, Nameable, NameableResults
from recollect.rerun.selective.tracing import Tracer
from recollect.state.rng import RngState, read_rng, same_rng

__all__ = ["RecordMode"]

_Tensor = torch.Tensor
_Args = tuple[Any, ...]


class RecordMode(DispatchMode):
    """Runs in forward.

    ``as_torch``: without our own defaults and warnings. ``allow_mutation``: kept results may be
    changed in place.
    """

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        *,
        as_torch: bool = False,
        allow_mutation: bool = False,
        ac_graph_id: int | None = None,
    ) -> None:
        super().__init__()
        self.ledger = ledger
        #: Set by the compiler, which tells the regions of a graph apart by it.
        self.ac_graph_id = ac_graph_id
        self._policy = PolicyCall(policy, protects=not as_torch, checks=False)
        self._rulebook = self._policy.rulebook
        self._as_torch = as_torch
        self._known = self._rulebook.known
        self._protects_kept = not as_torch and not allow_mutation
        self._observer = observing.observer
        #: Whether there is an observer or a compiler.
        self._is_watched = self._observer is not None
        self._tracer: Tracer | None = None
        self._used = False
        self._is_bound = False
        self._stops_early = False
        self._forget()

    def _forget(self) -> None:
        """Free what is needed during forward only."""
        self._policy.function, self._policy.values = None, ()
        self._made: Made = {}
        #: Present if there are rules about names.
        self._nameable: NameableResults | None = None

    @property
    def storage(self) -> dict[Any, list[Any]]:
        """The kept results, as torch's mode has them."""
        storage: dict[Any, list[Any]] = {}
        for step, entry in self.ledger.entries.items():
            storage.setdefault(self.ledger.op_at(step), []).append(entry.results)
        return storage

    # --- by the engine ----------------------------------------------------------------------------

    def bind(
        self, function: Callable[..., Any], values: tuple[Any, ...], *, stops_early: bool
    ) -> None:
        """Say what will run. The hook from `noting` is then called for each saved tensor.

        ``values``: the arguments. ``stops_early``: the recomputation ends with the last of them.
        """
        self._is_bound = True
        self._policy.function = function
        self._policy.values = values
        self._stops_early = stops_early
        self.ledger.labels.add_arguments(values)

    def noting(self, pack: Callable[[_Tensor], Any]) -> Callable[[_Tensor], Any]:
        """``pack``, a hook for the tensors that autograd saves, counted in the ledger."""
        ledger, sequence = self.ledger, self.ledger.sequence

        def note_and_pack(tensor: _Tensor) -> Any:
            ledger.steps = len(sequence)
            return pack(tensor)

        return note_and_pack

    # --- around forward ---------------------------------------------------------------------------

    def __enter__(self) -> RecordMode:
        if self._used:
            raise RuntimeError(
                "the contexts of create_selective_checkpoint_contexts serve one region each, and "
                "these have been used: let context_fn make new ones in every call"
            )
        self._used = True
        if is_compiling():
            self._tracer = Tracer(self._policy, self.ledger, self.ac_graph_id)
            self._is_watched = True
        else:
            self._policy.__enter__()
            if self._rulebook.names:
                self._policy.keep = self._keep_named
                self._nameable = NameableResults()
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self._tracer is None:
            self._policy.__exit__(*exc)
        try:
            if exc[0] is None:
                self._check_rules()
                if self._is_bound:
                    self.ledger.end_forward(stops_early=self._stops_early)
                self.ledger.is_complete = True
        finally:
            self._forget()

    def _check_rules(self) -> None:
        """Report rules that match nothing."""
        if self._tracer is not None and not self._tracer.traces:
            return
        self._policy.check_rules(map(op_name, self.ledger.ops()), warns=not self._as_torch)
        if self._tracer is not None:
            self._tracer.check_modules()

    # --- for each op ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: Any = None
    ) -> Any:
        op = self._known.get(id(func)) or self._rulebook.for_op(func)
        if not op.is_plain or self._is_watched:
            return self._run_with_care(op, args, kwargs)
        out = op.call(*args, **kwargs) if kwargs else op.call(*args)
        ledger = self.ledger
        if ledger.recomputations:
            return out
        step = len(ledger.sequence)
        ledger.sequence.append(func)
        ruling, is_kept = op.ruling, op.is_kept
        if op.is_per_call:
            ruling = self._policy.decide_call(op, out, args, kwargs)
            is_kept = ruling.keeps
        made = self._made
        inputs = ledger.labels.inputs(id(func), args, kwargs, made)
        if is_kept:
            self._keep(ruling, out, inputs, step)
        if self._nameable is not None and not op.is_view:
            can_be_kept = op.info.can_be_kept
            call = Nameable(step, out, inputs, None, ruling.rank) if can_be_kept else None
            self._nameable.note(out, HELD if is_kept else call)
        if type(out) is _Tensor:
            made[id(out)] = ref(out), hash(inputs)
        else:
            note_results(made, out, hash(inputs))
        return out

    def _run_with_care(self, op: OpRuling, args: _Args, kwargs: Any) -> Any:
        """Run an op that is not plain; or any, under a compiler or an observer."""
        info = op.info
        if self._tracer is not None:
            return self._tracer.run(info, args, kwargs or {})
        if info.is_ignored:
            return self._run_ignored(info, args, kwargs)
        if self.ledger.recomputations or (info.is_cast and is_weight(args[0])):
            return op.call(*args, **kwargs) if kwargs else op.call(*args)
        if not info.is_plain:
            self._before_write(info.written(args, kwargs or {}))
        out, rng = self._run_noting_rng(op, args, kwargs)
        step = len(self.ledger.sequence)
        self.ledger.sequence.append(self.ledger.key_of(info.op, args))
        ruling = self._policy.decide_call(op, out, args, kwargs)
        can_be_kept = info.can_be_kept and not _draws(info, args, kwargs)
        inputs = self.ledger.labels.inputs(id(info.op), args, kwargs, self._made)
        entry = None
        if can_be_kept and ruling.keeps:
            entry = self._keep(ruling, out, inputs, step, rng)
        if self._nameable is not None and not info.is_alias:
            call = Nameable(step, out, inputs, rng, ruling.rank) if can_be_kept else None
            self._nameable.note(out, call if entry is None else HELD)
        note_results(self._made, out, hash(inputs))
        if self._observer is not None:
            self._observer.decided(info.op, out, ruling, entry)
        return out

    def _run_ignored(self, info: OpInfo, args: _Args, kwargs: Any) -> Any:
        """Run an op that is not counted: it detaches a tensor, or reads its metadata."""
        out = info.call(*args, **kwargs) if kwargs else info.call(*args)
        if isinstance(out, _Tensor):
            self.ledger.labels.label_alias(out, args[0], self._made)
        return out

    def _run_noting_rng(
        self, op: OpRuling, args: _Args, kwargs: Any
    ) -> tuple[Any, RngState | None]:
        """Run an op; the random state after it, if it drew and may be kept."""
        may_be_kept = op.rules or op.ruling.keeps or self._rulebook.names
        before = read_rng() if op.info.is_random and may_be_kept else None
        out = op.call(*args, **kwargs) if kwargs else op.call(*args)
        if before is None:
            return out, None
        after = read_rng()
        return out, None if same_rng(before, after) else after

    def _before_write(self, tensors: list[_Tensor]) -> None:
        """Copy kept results that the op which is about to run writes to."""
        for tensor in tensors:
            memory = storage_key(tensor)
            for entry in self.ledger.entries.values() if self._protects_kept else ():
                if entry.before_write(tensor, memory):
                    entry.changes = [*entry.changes, len(self.ledger.sequence)]
            if self._nameable is not None:
                self._nameable.before_write(memory)

    def _keep(
        self,
        ruling: Ruling,
        out: Any,
        inputs: tuple[Any, ...],
        step: int,
        rng: RngState | None = None,
    ) -> KeptCall:
        """Keep the results of a call."""
        offload_batch = self.ledger.offload_batch
        hold: Any = offload_batch.put if ruling.offloads or offload_batch.chosen else Kept
        if type(out) is _Tensor:
            results = hold(detach_below_autograd(out))
        else:
            results = map_only(_Tensor, lambda each: hold(detach_below_autograd(each)), out)
        entry = self.ledger.entries[step] = KeptCall(results, inputs, rng)
        return entry

    # --- for each name ----------------------------------------------------------------------------

    def _keep_named(self, tensor: _Tensor, name: str, ruling: Ruling) -> None:
        """Keep a tensor that was given a name which a rule matches."""
        if self.ledger.recomputations:
            return
        assert self._nameable is not None
        call = self._nameable.source(tensor)
        if call is HELD or (call is not None and (call.is_kept or call.rank < ruling.rank)):
            return  # held anyway, or recomputed by an earlier rule
        with raw_memory():
            out = None if call is None else call.out()
            if out is None:
                raise ValueError(
                    f"recollect.tag(..., {name!r}): {ruling.reason} cannot keep this tensor: it "
                    "was changed in place, drawn from a torch.Generator of your own, or is no "
                    "plain strided tensor. Name the result of another op."
                )
            entry = self._keep(ruling, out, call.inputs, call.step, call.rng)
        call.is_kept = True
        if self._observer is not None:
            self._observer.decided(self.ledger.op_at(call.step), out, ruling, entry)


def _draws(info: OpInfo, args: _Args, kwargs: Any) -> bool:
    """Whether the op draws from a generator of the user's, or its own, which has to move on."""
    is_given = info.is_random and bool(kwargs) and kwargs.get("generator") is not None
    return is_given or info.uses_library_rng(args)
