"""The mode under which forward runs: keeps what the policy says.

For each op it writes down in the ledger what became of the call. It also follows who reads what is
kept. A result that no gradient saves, and that only ops read which are kept themselves, is let go
at the end of the region (``_let_go``): to keep ``relu(x @ w)`` makes keeping ``x @ w`` pointless.
That takes seeing all readers. What autograd saves is an input of the op that runs next or a result
of the op that ran last; if it is neither, or if an op makes memory for others to fill, then
something runs here that is not seen (a compiled function, a kernel of the user's), and whatever is
kept stays. So does what Python can read without an op: numbers that require no grad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from recollect._torch.autograd import is_weight
from recollect._torch.dynamo import is_compiling
from recollect._torch.modes import DispatchMode, detach_below_autograd, raw_memory
from recollect._torch.ops import OpOverload, op_name
from recollect._torch.tensors import storage_key
from recollect.naming import Listener, listening
from recollect.observer import observing
from recollect.policy.facts import Facts, facts_of
from recollect.policy.modules import InsideModules
from recollect.policy.rules import Policy
from recollect.policy.rulings import Answer, Asker, Ruling, rulebook_of
from recollect.policy.unmatched_rules import check_names, warn_of_unheard
from recollect.rerun.selective.ledger import ELSEWHERE, Entry, Kept, Ledger, map_only
from recollect.rerun.selective.nameable import Nameable
from recollect.rerun.selective.origins import Made, note_results
from recollect.rerun.selective.tracing import Tracer
from recollect.state.rng import RngState, read_rng, same_rng

__all__ = ["RecordMode"]

_Tensor = torch.Tensor
_Args = tuple[Any, ...]


class _Op:
    """What a mode knows of an op."""

    __slots__ = (
        "answer",
        "asks",
        "call",
        "facts",
        "is_kept",
        "is_nameable",
        "is_view",
        "key",
        "ruling",
        "run",
    )

    def __init__(
        self, facts: Facts, key: Any, answer: Answer, run: Callable[..., Any] | None, names: bool
    ) -> None:
        self.facts = facts
        self.call = facts.call
        #: What tells its calls from those of others.
        self.key = key
        #: If there are no questions.
        self.ruling = answer.ruling
        self.answer = answer
        self.is_view = facts.is_view
        #: Whether each call has to be put to the policy.
        self.asks = bool(answer.questions) and facts.can_be_kept
        #: Otherwise: whether the results are kept.
        self.is_kept = answer.ruling.keeps and facts.can_be_kept
        #: Whether they may be kept by a name that is given to them later.
        self.is_nameable = names and facts.can_be_kept
        #: A method of the mode, if there is something special about the op.
        self.run = run


class RecordMode(DispatchMode):
    """Runs in forward.

    ``as_torch``: with none of our own defaults and warnings. ``allow_mutation``: what is kept may
    be changed in place.
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
        self._rulebook = rulebook_of(policy)
        self._as_torch = as_torch
        self._protects_kept = not as_torch and not allow_mutation
        self._observer = observing.observer
        self._asker = Asker(self._rulebook)
        self._tracer: Tracer | None = None
        self._used = False
        self._function: Callable[..., Any] | None = None
        self._values: tuple[Any, ...] = ()
        self._modules: InsideModules | None = None
        self._outer: Listener | None = None
        self._names: list[str] = []
        #: Whether the readers of kept results are known; from `bind` on, as long as it is true.
        self._sees_all = False
        self._stops_early = False
        self._forget()

    def _forget(self) -> None:
        """Let go of what is needed during forward only."""
        #: By id: ops hash slowly.
        self._ops: dict[int, _Op] = {}
        self._made: Made = {}
        #: The calls that may yet be kept.
        self._nameable: list[Nameable] = []
        #: What the last op returned; what autograd saved since that is of unknown origin.
        self._last: Any = None
        self._unexplained: list[ReferenceType[_Tensor]] = []

    @property
    def storage(self) -> dict[Any, list[Any]]:
        """What is kept, as torch's mode has it, for those who look inside."""
        storage: dict[Any, list[Any]] = {}
        for step, entry in self.ledger.entries.items():
            storage.setdefault(self.ledger.op_at(step), []).append(entry.results)
        return storage

    # --- by the engine ----------------------------------------------------------------------------

    def bind(
        self,
        function: Callable[..., Any],
        values: tuple[Any, ...],
        *,
        stops_early: bool,
        exact: bool,
    ) -> None:
        """Say what will run. What `noting` gives is called then for each tensor that is saved.

        ``values``: the arguments. ``stops_early``: the recomputation ends with the last of them.
        ``exact``: every result will be looked at in the recomputation.
        """
        self._function = function
        self._values = values
        self._stops_early = stops_early
        self._sees_all = not exact
        self.ledger.origins.add_arguments(values)

    def noting(self, pack: Callable[[_Tensor], Any]) -> Callable[[_Tensor], Any]:
        """``pack``, a hook for what autograd saves, with each tensor noted first."""
        ledger, sequence, made = self.ledger, self.ledger.sequence, self._made

        def note_and_pack(tensor: _Tensor) -> Any:
            ledger.steps = len(sequence)
            known = made.get(id(tensor))
            if known is None or known[0]() is not tensor:
                self._note_saved_alias(tensor)
            elif known[2] is not None:
                known[2].saved = True
            return pack(tensor)

        return note_and_pack

    def _note_saved_alias(self, tensor: _Tensor) -> None:
        """Results are saved as other objects than the op returned, and so are strangers."""
        if tensor.requires_grad and tensor.is_leaf:
            return
        last = self._last
        memory = storage_key(tensor)
        for reference in last if type(last) is list else (last,):
            result = None if reference is None else reference()
            if result is not None and storage_key(result) == memory:
                holder = self._made[id(result)][2]
                if holder is not None:
                    holder.saved = True
                return
        if self._sees_all:
            self._unexplained.append(ref(tensor))

    # --- around forward ---------------------------------------------------------------------------

    def __enter__(self) -> RecordMode:
        if self._used:
            raise RuntimeError(
                "the contexts of create_selective_checkpoint_contexts serve one region each, and "
                "these have been used: let context_fn make new ones in every call"
            )
        self._used = True
        if is_compiling():
            self._tracer = Tracer(self._rulebook, self.ledger, self.ac_graph_id)
        elif self._rulebook.modules:
            self._enter_modules()
        if self._tracer is None and self._observer is None:
            self._ops = self._rulebook.ops[not self._as_torch]
        if self._rulebook.names:
            self._outer, listening.listener = listening.listener, self
        super().__enter__()
        return self

    def _enter_modules(self) -> None:
        if self._function is None:
            raise ValueError(
                f"{self._rulebook} needs to know the region's modules: pass the policy to "
                "recollect.checkpoint(policy=) or recollect.checkpointed(policy=)"
            )
        inside = self._asker.inside
        modules = InsideModules(self._rulebook, self._function, self._values, inside)
        modules.__enter__()
        self._modules = modules

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self._modules is not None:
            self._modules.__exit__(*exc)
        if self._rulebook.names:
            listening.listener = self._outer
        try:
            if exc[0] is None:
                self._check_rules()
                if self._function is not None:
                    self._let_go()
                self.ledger.is_complete = True
        finally:
            self._forget()
            self._function = self._modules = self._outer = None
            self._values = ()

    def _check_rules(self) -> None:
        """Be loud about rules that match nothing."""
        rulebook = self._rulebook
        if self._tracer is not None and not self._tracer.traces:
            return
        for rule in rulebook.names.values():
            check_names(rule, self._names)
        if self._tracer is not None:
            self._tracer.check_modules()
        inside = () if self._modules is None else self._modules.ranks
        if not self._as_torch:
            warn_of_unheard(rulebook, inside, map(op_name, self.ledger.ops()))

    def _let_go(self) -> None:
        """Drop kept results that nobody will read."""
        ledger = self.ledger
        end = ledger.steps if self._stops_early else len(ledger.sequence)
        sees_all = self._sees_all and not self._unexplained
        for step, entry in [*ledger.entries.items()]:
            if entry.changes:
                entry.changes = [change for change in entry.changes if change < end]
            if entry.is_read_before(end):
                continue
            if step >= end:
                ledger.drop(step)  # to be run again, in case
            elif sees_all and entry.takes_an_op_to_read:
                entry.vacate()

    # --- for each op ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: Any = None
    ) -> Any:
        op = self._ops.get(id(func)) or self._look_up(func, args)
        if op.run is not None:
            return op.run(self, op, args, kwargs)
        out = op.call(*args, **kwargs) if kwargs else op.call(*args)
        ledger = self.ledger
        if ledger.replays:
            return out
        # What follows is `_count`, `_inputs` and `_holder`, written out: this runs for every op.
        step = len(ledger.sequence)
        ledger.sequence.append(op.key)
        if self._unexplained:
            self._explain(args, kwargs)
        ruling, is_kept = op.ruling, op.is_kept
        if op.asks:
            ruling = self._asker.decide(op.answer, op.facts, out, args, kwargs)
            is_kept = ruling.keeps
        made, reads_at = self._made, None if is_kept or op.is_view else step
        inputs = ledger.origins.inputs(id(func), args, kwargs, made, self._label, reads_at)
        label, holder = hash(inputs), None
        if op.is_view:
            known = made.get(id(args[0])) if args else None
            holder = ELSEWHERE if known is None or known[0]() is not args[0] else known[2]
            if type(holder) is Nameable:
                holder.note_view(args[0])
        elif is_kept:
            holder = self._keep(ruling, args, out, inputs, step)
        elif op.is_nameable:
            holder = Nameable(step, out, inputs, None, ruling.rank)
            self._nameable.append(holder)
        if type(out) is _Tensor:
            reference = self._last = ref(out)
            made[id(out)] = (reference, label, holder)
        else:
            self._last = note_results(made, out, label, holder)
        return out

    def _look_up(self, func: Any, args: _Args) -> _Op:
        facts = facts_of(func)
        answer = self._rulebook.answer_to(facts, protects=not self._as_torch)
        key, run = self.ledger.key_of(func, args), self._way_of(facts)
        op = _Op(facts, key, answer, run, bool(self._rulebook.names))
        if type(func) is OpOverload:  # the calls of others depend on their arguments
            self._ops[id(func)] = op
        return op

    def _way_of(self, facts: Facts) -> Callable[..., Any] | None:
        """How to run an op about which there is something special."""
        if self._tracer is not None:
            return RecordMode._trace
        if facts.is_ignored:
            return RecordMode._run_ignored
        if not facts.is_usual or self._observer is not None:
            return RecordMode._run_with_care
        return RecordMode._run_allocating if facts.allocates else None

    def _run_allocating(self, op: _Op, args: _Args, kwargs: Any) -> Any:
        """An op that makes memory for others to fill, whom we may not see."""
        out = op.call(*args, **kwargs) if kwargs else op.call(*args)
        if self.ledger.replays:
            return out
        self._sees_all = False
        step = self._count(op, args, kwargs)
        label = hash(self._inputs(op, args, kwargs, step))
        self._last = note_results(self._made, out, label, None)
        return out

    def _run_ignored(self, op: _Op, args: _Args, kwargs: Any) -> Any:
        """An op that is not counted: it detaches a tensor, or reads its looks."""
        out = op.call(*args, **kwargs) if kwargs else op.call(*args)
        if isinstance(out, _Tensor):
            holder = self._holder(args)
            self.ledger.origins.label_alias(out, args[0], self._made, holder)
            if holder is not None:
                step = len(self.ledger.sequence) - 1
                holder.note_use(step)  # what is detached may be read by Python
        return out

    def _trace(self, op: _Op, args: _Args, kwargs: Any) -> Any:
        """An op under a compiler."""
        assert self._tracer is not None
        return self._tracer.run(op.facts.op, args, kwargs or {}, self._asker, self._names)

    def _run_with_care(self, op: _Op, args: _Args, kwargs: Any) -> Any:
        """An op that writes, draws, casts; or any, if results are observed."""
        facts, entry = op.facts, None
        if self.ledger.replays or (facts.is_cast and is_weight(args[0])):
            return op.call(*args, **kwargs) if kwargs else op.call(*args)
        out, rng = self._run_unusual(op, args, kwargs)
        step = self._count(op, args, kwargs)
        ruling = self._asker.decide(op.answer, facts, out, args, kwargs)
        can_be_kept = facts.can_be_kept and not _draws(facts, args, kwargs)
        is_kept = can_be_kept and ruling.keeps
        inputs = self._inputs(op, args, kwargs, None if is_kept or facts.is_view else step)
        holder: Any = None
        if is_kept:
            holder = entry = self._keep(ruling, args, out, inputs, step, rng)
        elif facts.is_view:
            holder = self._holder(args)
        elif can_be_kept and op.is_nameable:
            holder = Nameable(step, out, inputs, rng, ruling.rank)
            self._nameable.append(holder)
        self._last = note_results(self._made, out, hash(inputs), holder)
        if self._observer is not None:
            self._observer.decided(facts.op, out, ruling, entry)
        return out

    def _run_unusual(self, op: _Op, args: _Args, kwargs: Any) -> tuple[Any, RngState | None]:
        """Run an op that may write to memory or draw random numbers; where it left the streams."""
        facts = op.facts
        if facts.allocates:
            self._sees_all = False
        if facts.written and self._protects_kept:
            self._before_write(facts, args, kwargs or {})
        may_be_kept = op.answer.questions or op.ruling.keeps or self._rulebook.names
        before = read_rng() if facts.is_random and may_be_kept else None
        out = op.call(*args, **kwargs) if kwargs else op.call(*args)
        if before is None:
            return out, None
        after = read_rng()
        return out, None if same_rng(before, after) else after

    def _before_write(self, facts: Facts, args: _Args, kwargs: dict[str, Any]) -> None:
        """Save what is kept from being changed by the op that is about to run."""
        for position, name in facts.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, _Tensor):
                    self._before_write_to(tensor)

    def _before_write_to(self, tensor: _Tensor) -> None:
        memory = storage_key(tensor)
        for entry in self.ledger.entries.values():
            if entry.before_write(tensor, memory):
                entry.changes = [*entry.changes, len(self.ledger.sequence)]
        for call in self._nameable:
            call.is_spoilt |= call.memory == memory

    def _count(self, op: _Op, args: _Args, kwargs: Any) -> int:
        """Count a call of an op that has run: which step it was."""
        sequence = self.ledger.sequence
        sequence.append(op.key)
        if self._unexplained:
            self._explain(args, kwargs)
        return len(sequence) - 1

    def _inputs(self, op: _Op, args: _Args, kwargs: Any, reads_at: int | None) -> tuple[Any, ...]:
        """The op and what went in, in labels. ``reads_at``: when it reads that again."""
        origins, key = self.ledger.origins, id(op.facts.op)
        return origins.inputs(key, args, kwargs, self._made, self._label, reads_at)

    def _label(self, value: Any, reads_at: int | None) -> Any:
        """The label of what is met for the first time; or of a list, or of a constant."""
        if reads_at is not None and isinstance(value, (list, tuple)):
            self._note_use(value, reads_at)
        if type(value) is nn.Parameter:
            return self.ledger.origins.learn(value)
        if isinstance(value, _Tensor) and not isinstance(value, nn.Parameter):
            # It may be an alias that was made without an op, as ``.data`` is.
            memory = storage_key(value)
            for entry in self.ledger.entries.values():
                entry.saved |= entry.is_in(memory)
        return self.ledger.origins.label(value, self._made)

    def _note_use(self, values: Iterable[Any], step: int) -> None:
        for value in values:
            known = self._made.get(id(value))
            if known is not None and known[2] is not None:
                known[2].note_use(step)

    def _holder(self, args: _Args) -> Any:
        """What holds the memory of which an op returns a view."""
        known = self._made.get(id(args[0])) if args else None
        holder = ELSEWHERE if known is None or known[0]() is not args[0] else known[2]
        if type(holder) is Nameable:
            holder.note_view(args[0])
        return holder

    def _keep(
        self,
        ruling: Ruling,
        args: _Args,
        out: Any,
        inputs: tuple[Any, ...],
        step: int,
        rng: RngState | None = None,
    ) -> Entry:
        """Keep the results of a call."""
        deposit = self.ledger.deposit
        hold: Any = deposit.put if ruling.offloads or deposit.chosen else Kept
        if type(out) is _Tensor:
            results = hold(detach_below_autograd(out))
        else:
            results = map_only(_Tensor, lambda each: hold(detach_below_autograd(each)), out)
        entry = self.ledger.entries[step] = Entry(results, inputs, rng)
        entry.has_gradient = _has_gradient(args)
        return entry

    def _explain(self, args: _Args, kwargs: Any) -> None:
        """The op that has run may be the one for which autograd saved tensors of unknown origin."""
        taken = [*args, *kwargs.values()] if kwargs else [*args]
        for value in taken:  # which grows meanwhile
            if isinstance(value, (list, tuple)):
                taken += value
        for saved in self._unexplained:
            tensor = saved()
            if tensor is not None and not any(value is tensor for value in taken):
                self._sees_all = False
        self._unexplained.clear()

    # --- for each name ----------------------------------------------------------------------------

    def name(self, tensor: _Tensor, name: str) -> None:
        """Keep ``tensor`` if a rule matches the name it is given."""
        if self.ledger.replays or self._tracer is not None:
            return
        self._names.append(name)
        for rank, rule in self._rulebook.names.items():
            if rule.covers(name):
                self._keep_named(tensor, name, self._rulebook.ruling(rank, rule.decision))
                return

    def _keep_named(self, tensor: _Tensor, name: str, ruling: Ruling) -> None:
        made = self._made.get(id(tensor))
        call: Any = ELSEWHERE if made is None or made[0]() is not tensor else made[2]
        if call is ELSEWHERE or isinstance(call, Entry):
            return  # it is there anyway
        if isinstance(call, Nameable) and (call.is_kept or call.rank < ruling.rank):
            return  # or an earlier rule has it recomputed
        with raw_memory():
            out = call.out(tensor) if isinstance(call, Nameable) else None
            if call is None or out is None:
                raise ValueError(
                    f"recollect.tag(..., {name!r}): {ruling.reason} cannot keep this tensor: it "
                    "was changed in place, or drawn from a torch.Generator of your own. Name the "
                    "result of another op."
                )
            entry = self._keep(ruling, (), out, call.inputs, call.step, call.rng)
        if self._observer is not None:
            self._observer.decided(self.ledger.op_at(call.step), out, ruling, entry)
        call.is_kept = True
        entry.saved = True  # who has read it before it had a name is not known


def _has_gradient(args: _Args) -> bool:
    """Whether the result of an op requires grad."""
    if torch.is_grad_enabled():
        for value in args:
            if isinstance(value, _Tensor) and value.requires_grad:
                return True
    return False


def _draws(facts: Facts, args: _Args, kwargs: Any) -> bool:
    """Whether the op draws from a generator of the user's, or its own, which has to move on."""
    is_given = facts.is_random and bool(kwargs) and kwargs.get("generator") is not None
    return is_given or facts.draws_alone(args)
