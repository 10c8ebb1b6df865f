"""Groups of processes: their store, how long they wait, what they exchange, stages of pipelines."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import torch
from torch import distributed, nn

from recollect._torch.modules import known_class

#: Seconds that a group waits, if it does not say.
_USUAL = 600.0
#: Ops by which one process gives a tensor to another.
MESSAGES = frozenset({"c10d::send", "c10d::recv_", "c10d::recv_any_source_"})


def has_peers() -> bool:
    """Whether there are other processes that take part in communication."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1 and distributed.get_backend() != "fake"


def collectives_begun() -> int:
    """How many collectives and messages this process has begun, as far as its groups count them."""
    groups: list[Any] = [*distributed.distributed_c10d._world.pg_map]
    total = 0
    for group in groups:
        with suppress(RuntimeError):  # not all backends count
            total += group._get_sequence_number_for_group()
    return total


def is_in_stage(model: nn.Module) -> bool:
    """Whether ``model`` is run by a stage of ``torch.distributed.pipelining``, or part of one."""
    return any(_has(stage.submod, model) for stage in _objects_of("stage", "_PipelineStageBase"))


def stages_beside(model: nn.Module) -> list[nn.Module]:
    """The other stages that the schedule of ``model`` runs in this process, if it is in a stage."""
    for schedule in _objects_of("schedules", "PipelineScheduleMulti"):
        stages = [stage.submod for stage in schedule._stages]
        others = [each for each in stages if not _has(each, model)]
        if len(others) < len(stages):
            return others
    return []


def _objects_of(module: str, name: str) -> list[Any]:
    """All objects of a class of ``torch.distributed.pipelining``. Models do not refer to them."""
    kind = known_class(f"torch.distributed.pipelining.{module}", name)
    if kind is None:
        return []
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _has(stage: nn.Module, model: nn.Module) -> bool:
    return any(module is model for module in stage.modules())


def default_store() -> Any:
    """The store by which the processes of the default group have found each other."""
    return distributed.distributed_c10d._get_default_store()


def group_timeout() -> float:
    """The seconds after which the default group gives up waiting for a process."""
    group: Any = distributed.group.WORLD
    for device in group._device_types:
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        if options is not None:
            return float(options._timeout.total_seconds())
    return _USUAL


def shows_collectives() -> bool:
    """Whether function modes see in-place collectives: since torch 2.13.

    Else a checked call does not notice a collective that it did not have when it was recorded.
    """
    return hasattr(distributed, "all_gather_single")
