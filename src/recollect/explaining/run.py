"""One forward, watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch

from recollect.explaining.account import rows_of
from recollect.explaining.replay import ReplayRegion
from recollect.explaining.storages import tensors_in
from recollect.explaining.watcher import Watcher
from recollect.observer import observing
from recollect.replay.recording_cache import recordings_preserved
from recollect.report.explanation import Explanation
from recollect.report.rows import RegionCall, TensorRow
from recollect.state.reachable import Reachable
from recollect.state.snapshot import Snapshot, check_arguments

__all__ = ["explain"]


def explain(function_or_module: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Run one forward, and tell what stays in memory until backward, and why.

    Says of the result of each op whether it is kept (and by which rule of a policy), offloaded,
    recomputed, or held as the input of a checkpointed region. Forward runs once, with grad enabled,
    and once more if there are regions of the replay engine that it has not recorded yet; what it
    changes is put back afterwards, and no graph is left.

    Args:
        function_or_module: What to run: the model, or a function that also computes the loss.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Example::

        print(recollect.explain(model, x))
    """
    if not callable(function_or_module):
        raise TypeError(
            f"function_or_module should be callable, but got {function_or_module!r} of type "
            f"{type(function_or_module).__name__}"
        )
    with recordings_preserved():
        watcher, rows = _forward(function_or_module, args, kwargs)
        if any(isinstance(each, ReplayRegion) and each.is_rehearsal for each in watcher.regions):
            # A region was recorded for the first time, and holds other tensors from now on.
            watcher, rows = _forward(function_or_module, args, kwargs)
    calls = [RegionCall(each.name, each.engine, tuple(each.notes)) for each in watcher.regions]
    return Explanation(rows, tuple(calls))


def _forward(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Watcher, tuple[TensorRow, ...]]:
    """Run forward, and put back what it changes."""
    check_arguments(args, kwargs)
    with Snapshot({"function": function, "arguments": (args, kwargs)}, None) as snapshot:
        roots = Reachable(function, [*args, *kwargs.values()]).modules
        watcher = Watcher(roots)
        watcher.storages.add_foreign([*snapshot.tensors, *tensors_in((args, kwargs))])
        with torch.inference_mode(False), torch.enable_grad(), snapshot.log(), _watched_by(watcher):
            result = copy_context().run(function, *args, **kwargs)
        return watcher, rows_of(watcher, result)


@contextmanager
def _watched_by(watcher: Watcher) -> Iterator[None]:
    before, observing.observer = observing.observer, watcher
    try:
        with watcher:
            yield
    finally:
        observing.observer = before
