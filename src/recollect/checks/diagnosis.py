"""The details of a mismatch: which region, the first difference, its cause, and the fix (R10).

All of it comes from what is alive when there is an error: the graph that backward runs, the graph
of the recomputation, the modules in memory. Forward notes nothing. So nothing here need be fast,
and nothing may fail: an error about an error helps nobody.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from recollect._torch.autograd import current_node, packed_by
from recollect.checks.causes import Evidence, TensorSpec, likely_cause
from recollect.checks.names import module_of, region_name

__all__ = [
    "MismatchContext",
    "describe",
    "describe_saved",
    "saved_by_forward",
    "saved_by_recomputation",
]


@dataclass(frozen=True)
class MismatchContext:
    """What an engine knows when a recomputation differs from forward. All of it may be missing."""

    #: The checkpointed function.
    function: Callable[..., Any] | None = None
    #: What the graph holds in place of each saved tensor: the number, then its shape, dtype and
    #: perhaps device, or else its description by the user's check.
    tickets: Sequence[tuple[Any, ...]] = ()
    #: The tensors saved in the recomputation; None where the graph needs none.
    tensors: Sequence[torch.Tensor | None] = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def describe(context: MismatchContext, first: int | None = None) -> str:
    """Region, first difference, likely cause and fix, a line each; ``first``: where, if known."""
    if context.function is None:
        return ""
    try:
        return "".join(f"{line}\n" for line in _lines(context, first))
    except Exception as error:  # noqa: BLE001 - the mismatch is what the user must hear of
        return f"(no more can be said: {error!r})\n"


def describe_saved(context: MismatchContext, number: int) -> str:
    """A tensor that forward saved: the op that saved it, dtype and shape."""
    try:
        spec = _spec_of_ticket(context.tickets[number])
        return _listed(saved_by_forward(context.tickets).get(number), spec)
    except Exception:  # noqa: BLE001 - likewise
        return "a tensor"


def _lines(context: MismatchContext, first: int | None) -> Iterator[str]:
    yield f"In {region_name(context.function)}."
    number = _first_divergence(context) if first is None else first
    if number is None:
        return
    savers = saved_by_forward(context.tickets)
    evidence = _evidence(context, number, savers)
    before = after = "nothing more"
    if number < len(context.tickets):
        before = _listed(savers.get(number), evidence.before)
    if number < len(context.tensors):
        after = _listed(_recomputed_by(context.tensors, number), evidence.after)
    yield f"First divergence, tensor {number}: saved by forward: {before}; recomputation: {after}."
    yield str(likely_cause(evidence))


# --- the ops that saved ---------------------------------------------------------------------------

#: The most nodes to visit: a graph may be that of a whole model.
_NODES = 20_000


def saved_by_forward(tickets: Sequence[tuple[Any, ...]]) -> dict[int, str]:
    """By number, the forward op that saved a tensor, where the graph still tells.

    Call it in backward. Nodes that have run are not found, nor those of another branch.
    """
    numbers = {id(ticket): ticket[0] for ticket in tickets}
    return _savers([current_node()], lambda packed: numbers.get(id(packed)), len(numbers))


def saved_by_recomputation(tensors: Sequence[torch.Tensor | None]) -> dict[int, str]:
    """By number, the op that saved a tensor in a recomputation, whose hooks pack bare numbers."""
    nodes = [tensor.grad_fn for tensor in reversed(tensors) if tensor is not None]
    return _savers(nodes, lambda packed: packed if type(packed) is int else None, len(tensors))


def _savers(
    roots: Iterable[Any], number_of: Callable[[Any], int | None], count: int
) -> dict[int, str]:
    found: dict[int, str] = {}
    queue = deque(dict.fromkeys(node for node in roots if node is not None))
    seen = set(queue)
    while queue and len(found) < count and len(seen) < _NODES:
        node = queue.popleft()
        for packed in packed_by(node):
            number = number_of(packed)
            if number is not None:
                found.setdefault(number, _op_name(node))
        following = {node for node, _ in node.next_functions if node is not None} - seen
        queue += following
        seen |= following
    return found


def _op_name(node: Any) -> str:
    """``AddmmBackward0`` is the gradient of ``addmm``; ``MineBackward`` that of the class Mine."""
    name = str(node.name())
    native = re.fullmatch(r"(\w+)Backward\d+", name)
    if native is None:
        return name.removesuffix("Backward")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", native[1]).lower()


# --- the first divergence -------------------------------------------------------------------------


def _spec_of_ticket(ticket: tuple[Any, ...]) -> TensorSpec | None:
    described = ticket[1] if len(ticket) == 2 and isinstance(ticket[1], tuple) else ticket[1:]
    match described:
        case (torch.Size() as shape, torch.dtype() as dtype, *device):
            return TensorSpec(tuple(shape), dtype, *device[:1])
    return None


def _spec_of_tensor(tensor: torch.Tensor | None) -> TensorSpec | None:
    return None if tensor is None else TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device)


def _first_divergence(context: MismatchContext) -> int | None:
    for number, (ticket, tensor) in enumerate(zip(context.tickets, context.tensors, strict=False)):
        before, after = _spec_of_ticket(ticket), _spec_of_tensor(tensor)
        if before is not None and after is not None and before.differs_from(after):
            return number
    shorter, longer = sorted((len(context.tickets), len(context.tensors)))
    return shorter if shorter < longer else None


def _recomputed_by(tensors: Sequence[torch.Tensor | None], number: int) -> str | None:
    """The op that saved the tensor in the recomputation, or else the one that made it."""
    saver = saved_by_recomputation(tensors).get(number)
    tensor = tensors[number]
    if saver is not None or tensor is None or tensor.grad_fn is None:
        return saver
    return f"made by {_op_name(tensor.grad_fn)}"


def _listed(op: str | None, spec: TensorSpec | None) -> str:
    return ", ".join(str(part) for part in (op, spec) if part is not None) or "a tensor"


# --- evidence for a cause ----------------------------------------------------------------------


def _evidence(context: MismatchContext, number: int, savers: dict[int, str]) -> Evidence:
    before = _spec_of_ticket(context.tickets[number]) if number < len(context.tickets) else None
    after = _spec_of_tensor(context.tensors[number]) if number < len(context.tensors) else None
    return Evidence(
        before,
        after,
        len(context.tickets) != len(context.tensors),
        module_of(context.function),
        _cache_among(context.args, context.kwargs),
        frozenset(savers.values()),
    )


def _cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    for name, value in (*((f"args[{n}]", arg) for n, arg in enumerate(args)), *kwargs.items()):
        if value is None or isinstance(value, (bool, int, float, str)):
            continue
        kind = type(value).__name__
        if "cache" in kind.lower():
            return f"{name} ({kind})"
        if "cache" in name or "past_key_value" in name:
            return name
    return None
