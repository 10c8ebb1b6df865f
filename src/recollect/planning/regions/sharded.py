"""The units of a model that ``fully_shard`` was applied to, and running them by a schedule (P7).

Inside of FSDP's hooks a gathered parameter is the same tensor in every step, and it is gathered
once more before backward asks for what a unit has saved. So ops inside of a unit can run again:
they read the weights that forward read. Ops around units are left to autograd, as are the hooks:
nothing here gathers, frees or reduces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recollect._torch.fsdp import is_unit, shards_of
from recollect._torch.modules import is_torch_nn
from recollect.checks.place import WarnOnce
from recollect.planning.regions.module_regions import run_regions
from recollect.replay.engine import CallReport, LeftToRerun, replay_region
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recorded_graph import RecordedGraph
from recollect.replay.recording import Recording
from recollect.store.offload_batch import OffloadBatch

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def units_of(model: nn.Module) -> tuple[str, ...]:
    """The paths of the modules that a sharded model is recorded and run by.

    Those are the largest modules without a unit of FSDP inside: these units themselves, and parts
    of the ones around them. Empty if the forward of the model is recorded as a whole: it is not
    sharded, or as one unit.
    """
    if shards_of(model) is None:
        return ()
    found = tuple(_units_in(model, ""))
    return () if found == ("",) else found


def _units_in(module: nn.Module, path: str) -> Iterator[str]:
    has_units = any(is_unit(each) for each in module.modules() if each is not module)
    if has_units or isinstance(module, _CONTAINERS):
        for name, child in module.named_children():
            yield from _units_in(child, f"{path}.{name}" if path else name)
    elif is_unit(module) or not _is_layer(module):
        yield path


def _is_layer(module: nn.Module) -> bool:
    """Whether it is a layer of torch's: all that it saves crosses its border."""
    return is_torch_nn(module) and next(module.children(), None) is None


def play_units(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    by: NamedSchedule,
    warnings: WarnOnce,
    report: CallReport,
) -> Any:
    """Call the forward of a model with what its units save kept or dropped as decided."""
    calls: Counter[str] = Counter()

    def play(path: str, unit: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return unit(*args, **kwargs)
        part, one = by.within(path, calls[path]), CallReport()
        calls[path] += 1
        result = replay_region(unit, args, kwargs, part, OffloadBatch(), False, one)
        if type(result) is LeftToRerun:
            warn_not_in_effect(warnings, result.reason)
            return unit(*args, **kwargs)
        one.remat = one.rest = None  # which hold tensors
        report.unit_reports.append(one)
        return result

    output = run_regions(function, args, kwargs, by.units, play)
    _summarize(report)
    return output


def _summarize(report: CallReport) -> None:
    """Say of a call what is to be said of its parts."""
    recordings = [part.recording for part in report.unit_reports if part.recording is not None]
    differences = [part.difference for part in report.unit_reports if part.difference is not None]
    report.is_unrecorded = any(part.is_unrecorded for part in report.unit_reports)
    report.difference = differences[0] if differences else None
    if recordings:
        reasons = [each.reason for each in recordings if each.reason is not None]
        reason = reasons[0] if reasons else None
        report.recording = Recording(RecordedGraph(), [], {}, False, False, reason)
        report.recording.shapes = [shape for each in recordings for shape in each.shapes]


def warn_not_in_effect(warnings: WarnOnce, reason: str) -> None:
    """Warn that a forward runs without the plan."""
    warnings.warn(
        reason, f"the plan is not in effect, and the step may exceed its budget: {reason}"
    )
