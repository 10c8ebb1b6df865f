"""The mode under which forward runs: keeps the results that the policy says to keep (R4).

It logs each op in the ledger, with what it returned if that is kept.

A tensor gets its name after the op has run, and often through a view: ``recollect.tag(linear(x),
"q")`` names a view of a product, and only the storage of the product is left. So where there are
rules about names, each call is remembered by the storages of its results until the region ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from recollect._torch.autograd import is_weight
from recollect._torch.dynamo import is_compiling
from recollect._torch.fsdp import HookRanges
from recollect._torch.modes import DispatchMode, detach_below_autograd, raw_memory
from recollect._torch.ops import op_name
from recollect._torch.tensors import is_plain_tensor, memory_key
from recollect.observer import observing
from recollect.policy.op_info import op_info, tensors_in
from recollect.policy.policy_call import OpRuling, PolicyCall, Ruling
from recollect.policy.rules import Policy
from recollect.rerun.selective.ledger import Ledger, map_only
from recollect.rerun.selective.tracing import Tracer
from recollect.state.rng import RngState, read_rng, same_rng

_Tensor = torch.Tensor
_Args = tuple[Any, ...]


class RecordMode(DispatchMode):
    """Runs in forward. ``as_torch``: without our own defaults and warnings."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        *,
        as_torch: bool = False,
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
        #: Whether kept results are copied before the region changes them in place.
        self._protects_kept = not as_torch and not ledger.allow_mutation
        self._observer = observing.observer
        self._hooks = HookRanges()
        #: Whether there is an observer or a compiler, or a hook of FSDP is running.
        self._is_watched = self._observer is not None
        self._tracer: Tracer | None = None
        self._used = False
        #: Whether a recomputation ends with the last saved tensor; None: nobody notes those.
        self._stops_early: bool | None = None
        self._forget()

    def _forget(self) -> None:
        """Free what only forward needs."""
        self._policy.function, self._policy.values = None, ()
        self.ledger.labels.made = {}
        #: Present if there are rules about names. By key of a storage: that, weakly, and the call
        #: that filled it, `_HELD`, or None if its results cannot be kept.
        self._nameable: dict[int, tuple[Any, Any]] | None = None

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
        """Say what will run, with the arguments ``values``.

        The hook from `noting` sees each saved tensor. ``stops_early``: see `Ledger.end_forward`.
        """
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
                self._nameable = {}
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self._tracer is None:
            self._policy.__exit__(*exc)
        try:
            if exc[0] is None:
                self._check_rules()
                if self._stops_early is not None:
                    self.ledger.end_forward(stops_early=self._stops_early)
                self.ledger.is_complete = True
        finally:
            self._forget()

    def _check_rules(self) -> None:
        if self._tracer is not None and not self._tracer.traces:
            return
        if self._rulebook.unmatched or self._rulebook.names:
            self._policy.check_rules(map(op_name, self.ledger.ops()), warns=not self._as_torch)
        if self._tracer is not None:
            self._tracer.check_modules()

    # --- for each op ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: Any = None
    ) -> Any:
        op = self._known.get(id(func)) or self._rulebook.for_op(func)
        info, ledger = op.info, self.ledger
        if not info.is_plain or self._is_watched:
            return self._run_with_care(op, args, kwargs or {})
        out = info.call(*args, **kwargs) if kwargs else info.call(*args)
        if ledger.recomputations:
            return out
        labels = ledger.labels
        inputs = labels.inputs(id(func), args, kwargs)
        if op.may_be_kept or self._nameable is not None:
            self._decide(op, out, args, kwargs, inputs)
        ledger.sequence.append(func)
        if type(out) is _Tensor:
            labels.made[id(out)] = ref(out), hash(inputs)
        else:
            labels.note_results(out, hash(inputs))
        return out

    def _run_with_care(self, op: OpRuling, args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run an op that is not plain; or any, under a compiler, an observer or a hook of FSDP."""
        info, ledger = op.info, self.ledger
        if self._tracer is not None:
            return self._tracer.run(info, args, kwargs)
        if (info.is_range or self._hooks.depth) and self._hooks.owns(info.name, args):
            self._is_watched = self._hooks.depth > 0 or self._observer is not None
            return info.call(*args, **kwargs)
        if info.is_ignored:  # it detaches a tensor, or reads its metadata
            out = info.call(*args, **kwargs)
            if isinstance(out, _Tensor):
                ledger.labels.label_alias(out, args[0])
            return out
        if ledger.recomputations or (info.is_cast and is_weight(args[0])):
            return info.call(*args, **kwargs)
        if info.writes or info.writes_unseen:
            self._before_write(info.written(args, kwargs))
        may_be_kept = op.rules or op.ruling.keeps or self._rulebook.names
        before = read_rng() if info.is_random and may_be_kept else None
        out = info.call(*args, **kwargs)
        rng = None if before is None else read_rng()
        if rng is not None and before is not None and same_rng(before, rng):
            rng = None  # it has not drawn
        inputs = ledger.labels.inputs(id(info.op), args, kwargs)
        self._decide(op, out, args, kwargs, inputs, rng)
        ledger.sequence.append(ledger.key_of(info.op, args))
        ledger.labels.note_results(out, hash(inputs))
        return out

    def _decide(
        self,
        op: OpRuling,
        out: Any,
        args: _Args,
        kwargs: Any,
        inputs: _Args,
        rng: RngState | None = None,
    ) -> None:
        """Keep the results of a call, or remember them until they get a name."""
        step, info = len(self.ledger.sequence), op.info
        depends = op.rules or info.communicates
        ruling = self._policy.decide_call(op, out, args, kwargs) if depends else op.ruling
        # From a generator of the user's, or the op's own, which has to move on.
        is_given = info.is_random and bool(kwargs) and kwargs.get("generator") is not None
        can_be_kept = info.can_be_kept and not is_given and not info.uses_library_rng(args)
        entry = None
        if can_be_kept and ruling.keeps:
            entry = self.ledger.keep(
                step, out, inputs, rng, offloads=ruling.offloads, is_of_others=info.is_of_others
            )
        if self._nameable is not None and not info.is_alias:
            call: Any = None if entry is None else _HELD
            if can_be_kept and entry is None:
                call = _Nameable(step, out, inputs, rng, ruling.rank)
            for each in tensors_in(out):
                key = memory_key(each)
                if key is not None:
                    self._nameable[key] = ref(each.untyped_storage()), call
        if self._observer is not None:
            self._observer.decided(info.op, out, ruling, entry)

    def _before_write(self, tensors: list[_Tensor]) -> None:
        """Copy kept results that the op which is about to run writes to."""
        for memory in filter(None, map(memory_key, tensors)):
            for entry in self.ledger.entries.values() if self._protects_kept else ():
                if entry.before_write(memory):
                    entry.changes += (len(self.ledger.sequence),)
            if self._nameable is not None and memory in self._nameable:
                self._nameable[memory] = self._nameable[memory][0], None  # too late for a name

    # --- for each name ----------------------------------------------------------------------------

    def _keep_named(self, tensor: _Tensor, name: str, ruling: Ruling) -> None:
        """Keep a tensor that was given a name which a rule matches."""
        if self.ledger.recomputations:
            return
        assert self._nameable is not None
        key = memory_key(tensor)
        call = None
        if key is not None:
            storage, call = self._nameable.get(key, (None, None))
            if storage is None or storage() is not tensor.untyped_storage():
                return  # held from outside of the region
        if call is _HELD or (call is not None and call.rank < ruling.rank):
            return  # kept by another rule, or recomputed by an earlier one
        if call is not None and call.step in self.ledger.entries:
            return  # kept by another name
        with raw_memory():
            out = None if call is None else call.out()
            if call is None or out is None:
                raise ValueError(
                    f"recollect.tag(..., {name!r}): {ruling.reason} cannot keep this tensor: it "
                    "was changed in place, drawn from a torch.Generator of your own, or is no "
                    "plain strided tensor. Name the result of another op."
                )
            op, of_call = self.ledger.op_at(call.step), (call.step, out, call.inputs, call.rng)
            is_of_others = op_info(op).is_of_others
            entry = self.ledger.keep(*of_call, offloads=ruling.offloads, is_of_others=is_of_others)
        if self._observer is not None:
            self._observer.decided(op, out, ruling, entry)


class _Nameable:
    """A call whose results may get a name: the largest is held weakly, small others strongly."""

    def __init__(self, step: int, out: Any, inputs: _Args, rng: RngState | None, rank: int) -> None:
        self.step = step
        self.inputs = inputs
        self.rng = rng
        #: The rank of the rule by which the results are not kept.
        self.rank = rank
        largest: Any = out
        #: All results, with `_LARGEST` in place of the largest; None if that is the only one.
        self._results: Any = None
        if not isinstance(out, _Tensor):
            plain = [each for each in tensors_in(out) if is_plain_tensor(each)]
            largest = max(plain, key=_Tensor.numel, default=None)
            self._results = map_only(
                _Tensor, lambda x: _LARGEST if x is largest else detach_below_autograd(x), out
            )
        #: The storage of the largest, weakly, and its layout.
        self._storage: ref[torch.UntypedStorage] | None = None
        if largest is not None and is_plain_tensor(largest):
            self._storage = ref(largest.untyped_storage())
            layout = largest.storage_offset(), largest.shape, largest.stride()
            self._layout = largest.dtype, largest.device, layout

    def out(self) -> Any:
        """The results of the op; None if the largest was freed."""
        storage = None if self._storage is None else self._storage()
        if storage is None:
            return None
        dtype, device, layout = self._layout
        largest = torch.empty(0, dtype=dtype, device=device).set_(storage, *layout)
        if self._results is None:
            return largest
        return map_only(_Largest, lambda _: largest, self._results)


class _Largest:
    """In place of the largest result of a call."""


_LARGEST = _Largest()

#: In place of a call: a rule keeps its results.
_HELD = object()
