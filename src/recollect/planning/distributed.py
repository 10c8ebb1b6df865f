"""Models that are trained by several processes: which of them plan together, and what is refused.

To make a plan, steps are run. If a step communicates, all processes have to run it equally often,
or they hang, or add up values of different steps. `together` sees to that for models that
``fully_shard`` or ``parallelize_module`` were applied to; what communicates in other ways is
refused here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recollect._torch.dtensors import ranks_of_parts
from recollect._torch.fsdp import is_parallel, shards_of
from recollect._torch.groups import collectives_begun, has_peers, is_in_stage, shows_collectives
from recollect._torch.modes import DispatchMode
from recollect._torch.modules import known_class
from recollect.policy.op_info import op_info
from recollect.replay.recording import Recording

_BEFORE = (
    "Make the plan before: plan = recollect.plan(model, batch, budget), plan.apply(model), and "
    "then {then}. Its budget counts whole parameters and gradients"
)
_REGIONS = (
    "Checkpoint parts of the model in place of a plan, with recollect.checkpointed or "
    "recollect.install()"
)
_SHARDED = "it is sharded by fully_shard, and "


def check_not_distributed(model: nn.Module, *, runs_steps: bool = True) -> None:
    """Refuse a model whose step communicates: one that is wrapped, sharded or parallelized."""
    fsdp1 = known_class("torch.distributed.fsdp", "FullyShardedDataParallel")
    for path, module in model.named_modules():
        what = f"its {path}" if path else "it"
        if isinstance(module, DistributedDataParallel):
            _check_not_static(module)
            inner = ".".join(("model", *([path] if path else []), "module"))
            raise ValueError(
                f"model: {what} is wrapped in DistributedDataParallel, whose buckets and "
                "collectives a plan does not cover. Fit the module inside: "
                f"recollect.fit({inner}, budget=...); or plan it: recollect.plan({inner}, batch, "
                f"budget), and plan.apply({inner})"
            )
        if fsdp1 is not None and isinstance(module, fsdp1):
            raise ValueError(
                f"model: {what} is wrapped in FullyShardedDataParallel, which gathers its "
                "parameters from all processes in every step. "
                f"{_BEFORE.format(then='FullyShardedDataParallel(model)')}. {_REGIONS}"
            )
    shards = shards_of(model)
    obstacle = None if shards is None else shards.obstacle()
    if obstacle is not None:
        raise ValueError(f"model: {_SHARDED}{obstacle}")
    for wrapper in _wrappers_of(model) if runs_steps else ():
        _check_not_static(wrapper)


def obstacle_in(model: nn.Module) -> str | None:
    """What has been made of a model, perhaps since it was fitted, that no plan supports, if so."""
    try:
        check_not_distributed(model, runs_steps=False)
    except ValueError as error:
        return str(error)
    return None


def obstacle_to_rerun(model: Any) -> str | None:
    """What was done to a model since it was planned, so that no op of it can run again, if so."""
    shards = shards_of(model) if isinstance(model, nn.Module) else None
    obstacle = None if shards is None else shards.obstacle_to_rerun()
    return None if obstacle is None else f"{_SHARDED}{obstacle}"


def ranks_of(model: Any, *, sends: bool = False) -> list[int] | None:
    """The ranks that plan for ``model`` together; None if this process is alone.

    Those that hold its parts, or copies of it; all, as long as nothing says which do. A stage of a
    pipeline without copies is alone: others wait for what it computes, and cannot come before.

    ``sends``: whether its step was seen to exchange messages with single processes.
    """
    if not has_peers() or not isinstance(model, nn.Module):
        return None
    shards = shards_of(model)
    ranks = sorted({*([] if shards is None else shards.ranks), *ranks_of_parts(model)})
    if not ranks:
        groups = [each.process_group for each in _wrappers_of(model)]
        ranks = sorted(dist.get_process_group_ranks(groups[0])) if groups else []
        if not ranks and (sends or is_in_stage(model)):
            return None
        ranks = ranks or [*range(dist.get_world_size())]
    return ranks if len(ranks) > 1 and dist.get_rank() in ranks else None


def _check_not_static(wrapper: DistributedDataParallel) -> None:
    """Refuse a wrapper that counts every backward of its parameters, whoever runs it."""
    if wrapper.static_graph:
        raise ValueError(
            "model: it is wrapped in DistributedDataParallel with static_graph=True, which "
            "would count the backwards of planning as training steps, and never reduce a gradient "
            f"again. {_BEFORE.format(then='DistributedDataParallel(model, static_graph=True)')}"
        )


def _wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """The wrappers of ``model``, or of what it is a part of. It does not refer to them."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    own = {id(parameter) for parameter in model.parameters()}
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [each for each in found if any(id(one) in own for one in each.parameters())]


@contextmanager
def collectives_refused() -> Iterator[None]:
    """A context that raises at its end if there was communication with other processes."""
    if not has_peers():
        yield
        return
    watch = _CollectiveWatch()
    with watch:
        yield
    if watch.first is not None:
        raise _communicates(watch.first)


@contextmanager
def compiled_collectives_refused() -> Iterator[None]:
    """The same for compiled code, which a mode would change: what its groups count is compared."""
    before = collectives_begun() if has_peers() else None
    yield
    if before is not None and collectives_begun() != before:
        raise _communicates("in compiled code, or between its graphs")


def _communicates(how: str) -> ValueError:
    return ValueError(
        f"model: its step communicates with other processes ({how}). Each process "
        "would run the step a different number of times while it plans, and wait for the others "
        "forever or mix values of different steps. Have it planned from a step of your loop, "
        "recollect.fit(model, budget=...) without a batch; plan for a part that does not "
        "communicate; or "
        "make the plan in a group of one process, plan.save(path), and "
        f"recollect.Plan.load(path).apply(model) in all. {_REGIONS}"
    )


def communicating_op(model: nn.Module, recording: Recording) -> str | None:
    """The op of a forward that communicates, if a step under a plan may not notice another one."""
    if not has_peers() or is_parallel(model) or shows_collectives():
        return None  # they never run again
    infos = (op_info(op.op) for op in recording.graph.ops)
    return next((info.name for info in infos if info.communicates), None)


class _CollectiveWatch(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        info = op_info(func)
        if info.communicates and self.first is None:
            self.first = info.name
        return info.call(*args, **(kwargs or {}))
