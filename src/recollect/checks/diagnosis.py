"""The details of a mismatch: region, first difference, likely cause and fix (R10).

They are collected when the error is raised, from the graph that backward runs, the graph of the
recomputation and the modules in memory. Nothing may fail here: the user must see the mismatch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from recollect._torch.autograd import current_node, graph_nodes, packed_by
from recollect.checks.names import module_of, region_name


class TensorSpec(NamedTuple):
    """Shape, dtype and device of a tensor: what the default check compares."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | None = None

    def __str__(self) -> str:
        elsewhere = self.device is not None and self.device.type != "cpu"
        where = f" on {self.device}" if elsewhere else ""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}{where}"

    def differs_from(self, other: TensorSpec) -> bool:
        """Whether shape or dtype differ, or the device where both know it."""
        if None not in (self.device, other.device) and self.device != other.device:
            return True
        return (self.shape, self.dtype) != (other.shape, other.dtype)


@dataclass(frozen=True)
class MismatchContext:
    """A recomputation that differs from forward."""

    #: The checkpointed function.
    function: Callable[..., Any]
    #: The tickets of the saved tensors: the number, then shape, dtype and perhaps device, or else
    #: the description by the user's check.
    tickets: Sequence[tuple[Any, ...]]
    #: The tensors saved in the recomputation; None where the graph needs none.
    tensors: Sequence[torch.Tensor | None]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def specs(self, number: int) -> tuple[TensorSpec | None, TensorSpec | None]:
        """The tensor of this number in forward and recomputed, as far as each is known."""
        ticket = self.tickets[number] if number < len(self.tickets) else None
        tensor = self.tensors[number] if number < len(self.tensors) else None
        after = tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.device)
        return None if ticket is None else _spec(ticket[1:]), _spec(after)


def _spec(description: Any) -> TensorSpec | None:
    match description:
        case (torch.Size() as shape, torch.dtype() as dtype, *device):
            return TensorSpec(tuple(shape), dtype, *device[:1])
        case (tuple() as nested,):  # by a check of the user's
            return _spec(nested)
    return None


def describe(context: MismatchContext, first: int | None = None) -> str:
    """Region, first difference, likely cause and fix, a line each; ``first``: where, if known."""
    try:
        return "".join(f"{line}\n" for line in _lines(context, first))
    except Exception as error:  # noqa: BLE001 - the user must see the mismatch
        return f"(no more can be said: {error!r})\n"


def describe_saved(context: MismatchContext, number: int) -> str:
    """A tensor that forward saved: the op that saved it, dtype and shape."""
    try:
        return _listed(saved_by_forward(context.tickets).get(number), context.specs(number)[0])
    except Exception:  # noqa: BLE001 - likewise
        return "a tensor"


def _lines(context: MismatchContext, first: int | None) -> Iterator[str]:
    yield f"In {region_name(context.function)}."
    number = _first_divergence(context) if first is None else first
    if number is None:
        return
    savers = saved_by_forward(context.tickets)
    before, after = context.specs(number)
    in_forward = in_recompute = "nothing more"
    if number < len(context.tickets):
        in_forward = _listed(savers.get(number), before)
    if number < len(context.tensors):
        in_recompute = _listed(_recomputed_by(context.tensors, number), after)
    yield (
        f"First divergence, tensor {number}: saved by forward: {in_forward}; "
        f"recomputation: {in_recompute}."
    )
    causes = likely_causes(
        before,
        after,
        counts_differ=len(context.tickets) != len(context.tensors),
        module=module_of(context.function),
        cache=_cache_among(context.args, context.kwargs),
        savers=savers.values(),
    )
    yield str(next(causes))


def _first_divergence(context: MismatchContext) -> int | None:
    shorter, longer = sorted((len(context.tickets), len(context.tensors)))
    for number in range(shorter):
        before, after = context.specs(number)
        if before is not None and after is not None and before.differs_from(after):
            return number
    return shorter if shorter < longer else None


def _listed(op: str | None, spec: TensorSpec | None) -> str:
    return ", ".join(str(part) for part in (op, spec) if part is not None) or "a tensor"


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


# --- the ops that saved ---------------------------------------------------------------------------

#: The most nodes to visit: a graph may be that of a whole model.
_NODES = 20_000


def saved_by_forward(tickets: Sequence[tuple[Any, ...]]) -> dict[int, str]:
    """By number, the forward op that saved a tensor, where it follows in the running backward."""
    numbers = {id(ticket): ticket[0] for ticket in tickets}
    return _savers([current_node()], lambda packed: numbers.get(id(packed)), len(numbers))


def saved_by_recomputation(tensors: Sequence[torch.Tensor | None]) -> dict[int, str]:
    """By number, the op that saved a tensor in a recomputation, whose hooks pack bare numbers."""
    roots = (tensor.grad_fn for tensor in reversed(tensors) if tensor is not None)
    return _savers(roots, lambda packed: packed if type(packed) is int else None, len(tensors))


def _savers(
    roots: Iterable[Any], number_of: Callable[[Any], int | None], count: int
) -> dict[int, str]:
    found: dict[int, str] = {}
    for node in islice(graph_nodes(roots), _NODES):
        for number in map(number_of, packed_by(node)):
            if number is not None:
                found.setdefault(number, _op_name(node))
        if len(found) == count:
            break
    return found


def _op_name(node: Any) -> str:
    """``AddmmBackward0`` is the gradient of ``addmm``; ``MineBackward`` that of the class Mine."""
    name = str(node.name())
    native = re.fullmatch(r"(\w+)Backward\d+", name)
    if native is None:
        return name.removesuffix("Backward")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", native[1]).lower()


def _recomputed_by(tensors: Sequence[torch.Tensor | None], number: int) -> str | None:
    """The op that saved the tensor in the recomputation, or else the one that made it."""
    saver = saved_by_recomputation(tensors).get(number)
    tensor = tensors[number]
    if saver is not None or tensor is None or tensor.grad_fn is None:
        return saver
    return f"made by {_op_name(tensor.grad_fn)}"


# --- causes ---------------------------------------------------------------------------------------


class Cause(NamedTuple):
    """Why the two runs differ, and the code that fixes it."""

    sentence: str
    fix: str

    def __str__(self) -> str:
        return f"Likely cause: {self.sentence}\nFix: {self.fix}"


def likely_causes(
    before: TensorSpec | None,
    after: TensorSpec | None,
    *,
    counts_differ: bool = False,
    module: nn.Module | None = None,
    cache: str | None = None,
    savers: Collection[str] = (),
) -> Iterator[Cause]:
    """The causes that fit the evidence, the most specific first. There is always one.

    ``before`` and ``after``: the first tensor that differs, as each run saved it; None if it saved
    no more. ``cache``: the name of an argument that is one. ``savers``: forward ops.
    """
    if before is not None and after is not None:
        if (before.shape == (0,)) != (after.shape == (0,)):
            yield _SHARDED
        dtypes = {before.dtype, after.dtype}
        half = dtypes & {torch.bfloat16, torch.float16}
        if dtypes - half == {torch.float32} and half:
            yield _autocast(half.pop(), after.device or torch.device("cpu"))
    if "CompiledFunction" in savers:
        yield _COMPILED
    if cache is not None:
        yield _cache(cache)
    if before is not None and after is not None and _only_first_size_differs(before, after):
        yield _ROUTING
    if module is not None and not module.training:
        yield _eval_mode(module)
    if counts_differ and (before is None or after is None):
        yield OTHER_BRANCH
    yield _SOMETHING_CHANGED


def _only_first_size_differs(before: TensorSpec, after: TensorSpec) -> bool:
    one, other = before.shape, after.shape
    return len(one) == len(other) and one != other and one[1:] == other[1:]


def _autocast(half: torch.dtype, device: torch.device) -> Cause:
    return Cause(
        f"one run computed in float32 and the other in {str(half).removeprefix('torch.')}: "
        "autocast was on for one of them only, or a module was converted in between.",
        f'enter autocast inside the region: with torch.autocast("{device.type}", {half}): ...',
    )


def _cache(name: str) -> Cause:
    return Cause(
        f"the region changes its argument {name}: the second run starts from the cache that the "
        "first one left.",
        "train without a cache (use_cache=False), or give the region a copy to change: "
        "checkpoint(block, x, cache=copy.deepcopy(cache)).",
    )


def _eval_mode(module: nn.Module) -> Cause:
    return Cause(
        f"{type(module).__name__} is in eval mode now, and may have been in training mode in "
        "forward: dropout and batch norm behave differently.",
        "call model.eval() after loss.backward(), not before.",
    )


_SHARDED = Cause(
    "a parameter of shape [0] has been freed by sharding (FSDP, ZeRO-3), which gathers it for "
    "one of the two runs only: in the hooks of a module that the other run does not call.",
    "checkpoint the module and not its method, so that both runs pass through its hooks: "
    "checkpoint(block, x), not checkpoint(block.forward, x); with FSDP: "
    "fully_shard(recollect.checkpointed(block)).",
)

_COMPILED = Cause(
    "the region calls compiled code, and the two runs used two graphs of it: one for static "
    "shapes, one for dynamic ones.",
    "torch._dynamo.mark_dynamic(x, 0) on the input that varies, before the first call.",
)

_ROUTING = Cause(
    "the size of the first dimension depends on values (tokens routed to an expert, a mask), "
    "and those came out differently: by rounding, or by random numbers.",
    "keep the results of the ops that decide: checkpoint(block, x, policy=["
    "torch.ops.aten.topk, torch.ops.aten.sort, torch.ops.aten.nonzero]).",
)

OTHER_BRANCH = Cause(
    "the region took another branch: a counter, a flag or a result stored in the first run "
    "decides which ops it runs.",
    "guard such state in the second run: if not recollect.is_recomputing(): self.step += 1.",
)

_SOMETHING_CHANGED = Cause(
    "the region depends on something that has changed since forward: a global, an attribute, "
    "an argument it modifies.",
    "pass it as an argument, and modify no argument: checkpoint(block, x, mask).",
)

OTHER_LAYOUT = Cause(
    "a tensor from outside the region has other strides than in forward; sums over it may "
    "round differently.",
    "fix the layout at the start of the region: x = x.contiguous().",
)

FROM_OUTSIDE = Cause(
    "a tensor from outside the region (a global, an attribute, a constant) has other values than "
    "in forward.",
    "pass it as an argument, and change it after loss.backward(): checkpoint(block, x, scale).",
)

RANDOM_OP = Cause(
    "the op draws random numbers, and its generator was not restored for the second run: "
    "preserve_rng_state=False, or your own generator.",
    "draw from the default generator, with preserve_rng_state=True; or draw outside the region "
    "and pass the result: checkpoint(block, x, noise).",
)

UNSTABLE_OP = Cause(
    "either an input of the op has changed since forward (a buffer, a global, an attribute), or "
    "its kernel is nondeterministic.",
    "pass everything that the region reads as an argument; for the kernel: "
    "torch.use_deterministic_algorithms(True).",
)
