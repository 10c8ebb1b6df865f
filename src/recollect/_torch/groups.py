"""Groups of processes: the store by which they found each other, and how long they wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

#: Seconds that a group waits, if it does not say.
_USUAL = 600.0


def has_peers() -> bool:
    """Whether there are other processes that take part in communication."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1 and distributed.get_backend() != "fake"


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
