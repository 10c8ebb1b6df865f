"""Selective checkpointing: keep the results of some ops, recompute the others.

Two dispatch modes share a store. ``RecordMode`` runs in forward, asks the policy about each op and
appends to the store what it decided: the result, or that there is none. ``ReplayMode`` runs in the
recomputation, where the n-th call of an op finds the n-th entry: a kept result is handed out
instead of running the op, and is then forgotten. If the op drew random numbers, the stream is moved
to where the op left it.

Views and in-place ops are recomputed whatever the policy says. What they return is memory of
another tensor, and in the recomputation that is another one. So are ops that write to an argument
(the statistics of a batch norm), which a later op may read, and those that draw from a generator of
the user's.

A parameter that autocast converts is no op of the region's: autocast may have the result from an
earlier region, in forward or in the recomputation. Such casts run when they come, and are not
counted.

Under a compiler nothing is recomputed here. ``RecordMode`` tags the traced nodes with the decisions
and keeps every result, ``ReplayMode`` hands them all out, and the compiler's partitioner places the
recomputation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from recollect.errors import KeptTensorError
from recollect.policy import (
    CheckpointPolicy,
    OpList,
    PolicyFunction,
    SelectiveCheckpointContext,
    as_decision,
    check_ops,
    expand_packets,
    is_kept,
)
from recollect.state.rng import RngState, read_rng, same_rng, write_rng
from recollect.torch_private import (
    DispatchMode,
    OpOverload,
    bare_op,
    detach_below_autograd,
    inductor_region_key,
    is_cast,
    is_random,
    is_tracing,
    is_weight,
    metadata_ops,
    returns_alias,
    tag_recompute_nodes,
    traced_graph,
    tree_map_only,
    writes_argument,
)

__all__ = [
    "SAC_IGNORED_OPS",
    "RecordMode",
    "ReplayMode",
    "create_selective_checkpoint_contexts",
    "policy_function",
    "selective_contexts",
]

#: Ops that no policy is asked about. Forward and recomputation detach a different number of times,
#: and our own checks read the metadata of tensor subclasses through ops.
SAC_IGNORED_OPS: set[Any] = {
    torch.ops.aten.detach.default,
    torch.ops.prim.device.default,
} | metadata_ops()

_CAUSE = (
    "The region ran other operations than in forward: it is nondeterministic, or depends on "
    "global state that has changed since."
)


class Kept:
    """A tensor kept from forward, with the version it had."""

    __slots__ = ("val", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.val = detach_below_autograd(tensor)
        self.version = self.val._version


class _Marker:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: Entries of the store that hold no result.
RECOMPUTE = _Marker("<recompute>")
CONSUMED = _Marker("<consumed>")


class Store(defaultdict[Any, list[Any]]):
    """For each op, what became of each of its calls, in order."""

    def __init__(self) -> None:
        super().__init__(list)
        #: How many recomputations are under way. One that runs while forward is not over yet (the
        #: function goes backward inside) is seen by the mode of forward, which must not record it.
        self.replays = 0


class Drawn:
    """The result of an op that drew random numbers, with where it left the streams."""

    __slots__ = ("entry", "rng")

    def __init__(self, entry: Any, rng: RngState) -> None:
        self.entry = entry
        self.rng = rng


def _keep(out: Any) -> Any:
    return Kept(out) if isinstance(out, torch.Tensor) else tree_map_only(torch.Tensor, Kept, out)


def _key(func: Any, args: tuple[Any, ...]) -> Any:
    return func if type(func) is OpOverload else inductor_region_key(func, args)


_ALIAS = _Marker("<returns memory of its inputs>")
_RANDOM = _Marker("<may draw random numbers>")
_CAST = _Marker("<may be done by autocast>")


@lru_cache(maxsize=4096)  # reading a schema takes microseconds, and it never changes
def _kind(func: Any) -> _Marker | None:
    if returns_alias(func) or writes_argument(func):
        return _ALIAS
    if is_cast(func):
        return _CAST
    return _RANDOM if is_random(func) else None


#: How to call an op; its entries, if it is not ignored; whether it is kept, if that is known; what
#: is special about it.
_Recorded = tuple[Callable[..., Any], list[Any] | None, bool | None, _Marker | None]


class RecordMode(DispatchMode):
    """Runs in forward: keeps what the policy says."""

    def __init__(
        self, policy_fn: PolicyFunction, storage: Store, ac_graph_id: int | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy_fn = policy_fn
        self.storage = storage
        #: Set by the compiler, which tells the regions of a graph apart by it.
        self.ac_graph_id = ac_graph_id
        self._context = SelectiveCheckpointContext(is_recompute=False)
        self._tracing = False
        self._used = False
        #: By id of the op: ops hash slowly, and each would be looked up three times.
        self._known: dict[int, _Recorded] = {}

    def __enter__(self) -> RecordMode:
        if self._used:
            raise RuntimeError(
                "the contexts of create_selective_checkpoint_contexts serve one region each, and "
                "these have been used: let context_fn make new ones in every call"
            )
        self._used = True
        self._tracing = is_tracing()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._tracing:
            return self._trace(func, args, kwargs or {})
        call, entries, kept, kind = self._known.get(id(func)) or self._look_up(func, args)
        before = read_rng() if kind is _RANDOM and kept is not False else None
        out = call(*args, **kwargs) if kwargs else call(*args)
        if entries is None or self.storage.replays or (kind is _CAST and is_weight(args[0])):
            return out
        if kept is None:
            kept = is_kept(self._ask(out, func, args, kwargs or {}), func)
        if not kept or kind is _ALIAS or (kwargs and kwargs.get("generator") is not None):
            entries.append(RECOMPUTE)
        elif before is None:
            entries.append(_keep(out))
        else:
            after = read_rng()
            entry = _keep(out)
            entries.append(entry if same_rng(before, after) else Drawn(entry, after))
        return out

    def _look_up(self, func: Any, args: tuple[Any, ...]) -> _Recorded:
        if func in SAC_IGNORED_OPS:
            known: _Recorded = (bare_op(func), None, None, None)
        else:
            policy = self.policy_fn
            kept = func in policy.ops if isinstance(policy, OpList) else None
            known = (bare_op(func), self.storage[_key(func, args)], kept, _kind(func))
        if type(func) is OpOverload:  # the key of others depends on their arguments
            self._known[id(func)] = known
        return known

    def _ask(self, out: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the policy says about a call."""
        context = self._context
        context.op_output = out
        try:
            return self.policy_fn(context, func, *args, **kwargs)
        finally:
            # The context outlives the call; the result must not be held by it.
            context.op_output = None

    def _trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph = traced_graph()
        before = len(graph.nodes) if graph is not None else 0
        out = func(*args, **kwargs)
        decision = CheckpointPolicy.PREFER_RECOMPUTE
        if func not in SAC_IGNORED_OPS:
            decision = as_decision(self._ask(out, func, args, kwargs), func)
            self.storage[_key(func, args)].append(_keep(out))
        if graph is not None:
            added = len(graph.nodes) - before
            nodes = [node for node, _ in zip(reversed(graph.nodes), range(added), strict=False)]
            tag_recompute_nodes(nodes, decision.name, self.ac_graph_id)
        return out


class _Calls:
    """How far the recomputation has come in the entries of one op."""

    __slots__ = ("call", "casts", "entries", "key", "position")

    def __init__(self, func: Any, key: Any, entries: list[Any] | None) -> None:
        self.call = bare_op(func)
        self.casts = _kind(func) is _CAST
        self.key = key
        self.entries = entries
        self.position = 0

    def surplus(self) -> KeptTensorError:
        return KeptTensorError(
            f"{self.key} invocation index {self.position} encountered during backward but not "
            f"found in storage. {_CAUSE}"
        )


class ReplayMode(DispatchMode):
    """Runs in the recomputation: hands out what was kept."""

    def __init__(
        self,
        policy_fn: PolicyFunction | None,
        storage: Store,
        allow_cache_entry_mutation: bool = False,
        *,
        once: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage = storage
        self.allow_cache_entry_mutation = allow_cache_entry_mutation
        #: Whether a second recomputation is refused. Otherwise it runs the op again.
        self._once = once
        #: Whether the streams are those of forward, and to be moved past what is not run again.
        self._restores_rng = False
        #: By id of the op.
        self._known: dict[int, _Calls] = {}

    def for_rerun(self, *, restores_rng: bool) -> ReplayMode:
        """A mode of its own for one recomputation: several may run at once, in threads."""
        mode = ReplayMode(None, self.storage, self.allow_cache_entry_mutation, once=self._once)
        mode._restores_rng = restores_rng
        return mode

    def __enter__(self) -> ReplayMode:
        self._known = {}
        self.storage.replays += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        calls = self._known.get(id(func)) or self._look_up(func, args)
        entries = calls.entries
        if entries is not None and not (calls.casts and is_weight(args[0])):
            position = calls.position
            if position >= len(entries):
                raise calls.surplus()
            calls.position = position + 1
            entry = entries[position]
            if entry is not RECOMPUTE and (entry is not CONSUMED or self._once):
                entries[position] = CONSUMED
                return self._hand_out(entry)
        return calls.call(*args, **kwargs) if kwargs else calls.call(*args)

    def __exit__(self, *exc: object) -> None:
        self.storage.replays -= 1
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def _look_up(self, func: Any, args: tuple[Any, ...]) -> _Calls:
        if func in SAC_IGNORED_OPS:
            calls = _Calls(func, func, None)
            self._known[id(func)] = calls
            return calls
        key = _key(func, args)
        entries = self.storage.get(key)
        if entries is None and is_cast(func) and is_weight(args[0]):
            return _Calls(func, key, None)
        if entries is None:
            raise KeptTensorError(
                f"{key} encountered during backward but not found in storage. {_CAUSE}"
            )
        # A compiled region is looked up by its key each time, and goes on where it was.
        calls = self._known.get(id(entries)) or _Calls(func, key, entries)
        self._known[id(func) if type(func) is OpOverload else id(entries)] = calls
        return calls

    def _hand_out(self, entry: Any) -> Any:
        if entry is CONSUMED:
            raise KeptTensorError(
                "Trying to backward an extra time. A region under selective checkpointing gives "
                "out what it kept once. Use recollect.create_selective_checkpoint_contexts (or "
                "policy=), which recomputes it for every further backward."
            )
        if type(entry) is Drawn:
            if self._restores_rng:
                write_rng(entry.rng)
            entry = entry.entry
        if type(entry) is Kept:
            return self._checked(entry)
        return tree_map_only(Kept, self._checked, entry)

    def _checked(self, kept: Kept) -> torch.Tensor:
        if kept.val._version != kept.version and not self.allow_cache_entry_mutation:
            raise KeptTensorError(
                "Tensor cached during selective activation checkpoint has been mutated: a tensor "
                f"of shape {list(kept.val.shape)} that the policy keeps was changed in place "
                "afterwards. Recompute that op, or replace the in-place operation that follows it."
            )
        return kept.val


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[Any, Any]:
    """Two contexts for ``context_fn=`` that keep the results of some ops.

    Args:
        policy_fn_or_list: A list of ops whose results are kept; a packet (``torch.ops.aten.mm``)
            stands for all its overloads. Or a function called as ``policy(ctx, op, *args,
            **kwargs)`` for each op of forward, which returns a ``CheckpointPolicy``.
        allow_cache_entry_mutation: Do not raise when a kept tensor was changed in place.

    Example::

        context_fn = functools.partial(
            recollect.create_selective_checkpoint_contexts, [torch.ops.aten.mm]
        )
        out = recollect.checkpoint(block, x, context_fn=context_fn)
    """
    return selective_contexts(
        policy_function(policy_fn_or_list, packets=True),
        allow_mutation=allow_cache_entry_mutation,
        once=False,
    )


def selective_contexts(
    policy: PolicyFunction, *, allow_mutation: bool, once: bool
) -> tuple[RecordMode, ReplayMode]:
    """The two modes for one region. ``once``: refuse to recompute what was kept and given out."""
    storage = Store()
    return RecordMode(policy, storage), ReplayMode(None, storage, allow_mutation, once=once)


def policy_function(policy: Any, *, packets: bool) -> PolicyFunction:
    """A policy as a function. ``packets``: accept ops without their overload."""
    if isinstance(policy, (list, tuple, set, frozenset) if packets else list):
        ops = expand_packets(policy) if packets else list(policy)
        check_ops(ops, "policy" if packets else "`op_list`")
        return OpList(ops)
    if callable(policy):
        return policy  # type: ignore[no-any-return]
    raise TypeError(
        "policy_fn_or_list must be either a function or a list of ops. "
        f"Got {policy!r} of type {type(policy).__name__} as the policy"
    )
