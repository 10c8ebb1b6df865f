"""Runs a forward by a schedule: as one region, by its units, or with modules as regions (P7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from recollect._torch.modes import forward_ad_active, is_transforming
from recollect.checks.place import WarnOnce
from recollect.planning.regions.module_regions import run_modules
from recollect.planning.regions.sharded import play_units, warn_not_in_effect
from recollect.replay.engine import CallReport, LeftToRerun, observe_region, replay_region
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording import Recording
from recollect.store.offload_batch import OffloadBatch


def run_planned(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    by: NamedSchedule,
    warnings: WarnOnce,
    report: CallReport | None = None,
    known: Recording | None = None,
    *,
    is_checked: bool = False,
) -> Any:
    """Call ``function`` with its results kept, offloaded or dropped as decided.

    ``known``: a recording of the whole forward under another schedule, if there is one. Unused if
    units are recorded separately.
    ``is_checked``: compare the values that modules recompute with those of forward.
    """
    if by.modules:
        if is_transforming() or forward_ad_active():
            warn_not_in_effect(warnings, "it is called by a transform of torch.func")
            return function(*args, **kwargs)
        return run_modules(function, args, kwargs, by.engines, is_checked=is_checked)
    report = CallReport() if report is None else report
    if by.units:
        return play_units(function, args, kwargs, by, warnings, report)
    offload_batch = OffloadBatch(host=by.store, last_first=True)
    result = replay_region(function, args, kwargs, by, offload_batch, False, report, known)
    if type(result) is LeftToRerun:
        warn_not_in_effect(warnings, result.reason)
        return function(*args, **kwargs)
    if by.offloaded:
        offload_batch.release()  # forward is over: free what is still being copied out
    return result


def run_blocks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    blocks: Iterable[nn.Module],
) -> Any:
    """Call the forward of a model, keeping only the results of ``blocks``."""
    return observe_region(
        function, args, kwargs, lambda recorder, remat: (recorder.pack, remat.unpack), blocks=blocks
    )[0]
