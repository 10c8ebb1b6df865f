"""Records a forward while a `TraceMode` traces the step: the whole of it, or each unit (P2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from recollect.planning.recording.trace import TraceMode
from recollect.planning.regions.merge import UnitRecord, merged
from recollect.planning.regions.module_regions import run_regions, wrap_modules
from recollect.replay.engine import Hooks, observe_region
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.record import Recorder
from recollect.replay.recording import Recording
from recollect.replay.rematerialize import Rematerializer

#: Gives the function that backward unpacks tensors by.
UnpackOf = Callable[[Rematerializer], Callable[[Any], torch.Tensor]]


def observe_forward(
    trace: TraceMode,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    by: NamedSchedule | None = None,
    blocks: Iterable[nn.Module] = (),
    units: tuple[str, ...] = (),
    unpack_of: UnpackOf = lambda remat: remat.unpack,
) -> tuple[Any, Recording, Rematerializer | None]:
    """Call the forward of a model, whose step is traced, and record it.

    Returns what it returns, the recording, and what it holds if it was recorded as a whole.

    Args:
        trace: Traces the step.
        function: The forward, a method of the model.
        args: Its arguments.
        kwargs: Its keyword arguments.
        by: What is kept; by default as little as possible.
        blocks: Modules whose outputs are kept too.
        units: The modules that are recorded, each by itself; empty: the whole forward is.
        unpack_of: Gives the function that backward unpacks tensors by.
    """
    observer = _ForwardObserver(trace, by or NamedSchedule(), [*blocks], unpack_of)
    if units:
        model: Any = getattr(function, "__self__", None)
        wrap_modules(model, units)  # if they are not
        output = run_regions(function, args, kwargs, units, observer.observe)
    else:
        output = observer.observe("", function, args, kwargs)
    trace.note_end()
    remat, observer.remat = observer.remat, None
    if units:
        return output, merged(observer.records), None
    return output, observer.records[0].recording, remat


class _ForwardObserver:
    """Records one forward, or its units."""

    def __init__(
        self, trace: TraceMode, by: NamedSchedule, blocks: list[nn.Module], unpack_of: UnpackOf
    ) -> None:
        self._trace = trace
        self._by = by
        self._blocks = blocks
        self._unpack_of = unpack_of
        self._calls: Counter[str] = Counter()
        self.records: list[UnitRecord] = []
        self.remat: Rematerializer | None = None

    def observe(
        self, path: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Call the forward of the unit at ``path``; if that is empty, of the model."""
        if path and not torch.is_grad_enabled():
            return function(*args, **kwargs)
        trace, before = self._trace, self._trace.saved_so_far
        by = self._by.within(path, self._calls[path]) if path else self._by
        self._calls[path] += 1
        try:
            output, recording = observe_region(
                function, args, kwargs, self._hooks, by, self._blocks
            )
        finally:
            trace.end_region()
        trace.note_output(output)
        self.records.append(UnitRecord(recording, trace.saved_so_far - before))
        return output

    def _hooks(self, recorder: Recorder, remat: Rematerializer) -> Hooks:
        """The saved-tensor hooks of a recorded call, which the trace sees too."""
        trace, self.remat = self._trace, remat
        unpack = partial(trace.unpack, self._unpack_of(remat))
        trace.begin_region(recorder.count_ops, unpack)
        return partial(trace.pack, recorder.pack), unpack
