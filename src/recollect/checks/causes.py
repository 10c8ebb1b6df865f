"""Why the two runs of a region differed, guessed from evidence, and the code that fixes it.

Pure. Causes are tried in the order of how telling their signs are. Each names one change of the
user's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

__all__ = [
    "FROM_OUTSIDE",
    "OTHER_LAYOUT",
    "OTHER_WAY",
    "Cause",
    "Evidence",
    "TensorSpec",
    "likely_cause",
    "likely_cause_of_values",
]


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


class Cause(NamedTuple):
    """Why the two runs differ, and the code that fixes it."""

    sentence: str
    fix: str

    def __str__(self) -> str:
        return f"Likely cause: {self.sentence}\nFix: {self.fix}"


@dataclass(frozen=True)
class Evidence:
    """What an error knows of a mismatch."""

    #: The first tensor that differs, in forward and recomputed; None where there is none.
    before: TensorSpec | None
    after: TensorSpec | None
    #: Whether one run saved more tensors than the other.
    counts_differ: bool = False
    module: nn.Module | None = None
    #: The argument that is a cache, by name.
    cache: str | None = None
    #: Forward ops that saved tensors.
    savers: frozenset[str] = frozenset()


def likely_cause(evidence: Evidence) -> Cause:
    """The first cause whose signs are there."""
    causes = (find(evidence) for find in _CAUSES)
    return next((cause for cause in causes if cause is not None), _SOMETHING_CHANGED)


def _sharded(evidence: Evidence) -> Cause | None:
    shapes = [spec.shape for spec in (evidence.before, evidence.after) if spec is not None]
    if len(shapes) < 2 or shapes.count((0,)) != 1:
        return None
    return Cause(
        "a parameter of shape [0] has been freed by sharding (FSDP, ZeRO-3), which gathers it for "
        "one of the two runs only: in the hooks of a module that the other run does not call.",
        "checkpoint the module and not its method, so that both runs pass through its hooks: "
        "checkpoint(block, x), not checkpoint(block.forward, x); with FSDP: "
        "fully_shard(recollect.checkpointed(block)).",
    )


_HALF = (torch.bfloat16, torch.float16)


def _autocast(evidence: Evidence) -> Cause | None:
    if evidence.before is None or evidence.after is None:
        return None
    dtypes = (evidence.before.dtype, evidence.after.dtype)
    half = [dtype for dtype in dtypes if dtype in _HALF]
    if len(half) != 1 or torch.float32 not in dtypes:
        return None
    device = evidence.after.device or torch.device("cpu")
    return Cause(
        f"one run computed in float32 and the other in {str(half[0]).removeprefix('torch.')}: "
        "autocast was on for one of them only, or a module was converted in between.",
        f'enter autocast inside the region: with torch.autocast("{device.type}", {half[0]}): ...',
    )


def _compiled(evidence: Evidence) -> Cause | None:
    if "CompiledFunction" not in evidence.savers:
        return None
    return Cause(
        "the region calls compiled code, and the two runs were served by two graphs of it: one "
        "for static shapes, one for dynamic ones.",
        "torch._dynamo.mark_dynamic(x, 0) on the input that varies, before the first call.",
    )


def _cache(evidence: Evidence) -> Cause | None:
    if evidence.cache is None:
        return None
    return Cause(
        f"the region changes its argument {evidence.cache}: the second run begins with the cache "
        "that the first one left.",
        "train without a cache (use_cache=False), or give the region a copy to change: "
        "checkpoint(block, x, cache=copy.deepcopy(cache)).",
    )


def _in_eval_mode(evidence: Evidence) -> Cause | None:
    if evidence.module is None or evidence.module.training:
        return None
    return Cause(
        f"{type(evidence.module).__name__} is in eval mode now, and may have been in training mode "
        "in forward: dropout and batch norm run differently.",
        "call model.eval() after loss.backward(), not before.",
    )


def _routing(evidence: Evidence) -> Cause | None:
    if evidence.before is None or evidence.after is None:
        return None
    before, after = evidence.before.shape, evidence.after.shape
    if len(before) != len(after) or before == after or before[1:] != after[1:]:
        return None
    return Cause(
        "the size of the first dimension depends on values (tokens routed to an expert, a mask), "
        "and those came out differently: by rounding, or by random numbers.",
        "keep the results of the ops that decide: checkpoint(block, x, policy=["
        "torch.ops.aten.topk, torch.ops.aten.sort, torch.ops.aten.nonzero]).",
    )


def _counter(evidence: Evidence) -> Cause | None:
    if not evidence.counts_differ or (evidence.before is not None and evidence.after is not None):
        return None
    return OTHER_WAY


OTHER_WAY = Cause(
    "the region took another way through its code: a counter, a flag or a result stored in the "
    "first run decides what it does.",
    "leave such state alone in the second run: if not recollect.is_recomputing(): self.step += 1.",
)

_CAUSES = (_sharded, _autocast, _compiled, _cache, _routing, _in_eval_mode, _counter)

_SOMETHING_CHANGED = Cause(
    "the region depends on something that has changed since forward: a global, an attribute, "
    "an argument it modifies.",
    "pass what it depends on as an argument, and modify none: checkpoint(block, x, mask).",
)


def likely_cause_of_values(*, random: bool) -> Cause:
    """Why an op gave other values for the same inputs; ``random``: it draws random numbers."""
    if random:
        return Cause(
            "the op draws random numbers, and the stream it draws from was not put back for the "
            "second run: preserve_rng_state=False, or a generator of the user's own.",
            "draw from the default generator, with preserve_rng_state=True; or draw outside of the "
            "region and pass the result: checkpoint(block, x, noise).",
        )
    return Cause(
        "either something that the op reads has changed since forward (a buffer, a global, an "
        "attribute), or its kernel adds up in an order that differs from run to run.",
        "pass what the region reads as an argument; for the kernel: "
        "torch.use_deterministic_algorithms(True).",
    )


OTHER_LAYOUT = Cause(
    "a tensor that comes from outside of the region is laid out in memory otherwise than in "
    "forward; sums over it may round differently.",
    "fix the layout at the start of the region: x = x.contiguous().",
)

FROM_OUTSIDE = Cause(
    "a tensor from outside of the region (a global, an attribute, a constant) holds other values "
    "than in forward.",
    "pass it as an argument, and change it after loss.backward(): checkpoint(block, x, scale).",
)
