"""What ops cost: the seconds they take, and the memory they need beside their results.

Measured once for each op and the looks of its arguments, and remembered for the process: the same
step is priced the same at every look. Where an op must not run twice it is measured once, as it
runs; where it cannot run at all (fake tensors), by what such ops were seen to move per second.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

from recollect.engines.replay.kinds import Kind, kind_of
from recollect.torch_private import (
    OpOverload,
    no_dispatch_modes,
    op_name,
    profiler_is_on,
    stderr_hushed,
    tree_leaves,
    tree_map_only,
)

__all__ = ["Call", "Rates", "allocated_by"]

_Tensor = torch.Tensor
_MEMORY_EVENT = "[memory]"
#: How often an op is timed.
_TIMES = 3
#: Bytes by which the rate of simple ops is measured.
_PROBE = 32 << 20


@dataclass(slots=True)
class Call:
    """An op on arguments of certain looks.

    Args:
        name: Such as ``aten::mm``.
        seconds: What it takes.
        workspace: Bytes that it allocates beside its results, while it runs.
    """

    name: str
    seconds: float = 0.0
    workspace: int = 0


#: What was measured, in this process.
_known: dict[Any, Call] = {}


class Rates:
    """Runs ops, and measures those not met before.

    Args:
        device: Where the step computes.
        fakes: Whether ops run on tensors without memory, and are measured afterwards on others.
    """

    def __init__(self, device: torch.device, *, fakes: bool = False) -> None:
        self.device = device
        #: What is still to be measured.
        self._unmeasured: list[tuple[Call, Kind, Any, Any]] = []
        self._fakes = fakes
        #: Pairs of events whose distance is not known until the device has come so far.
        self._pending: list[tuple[Call, list[tuple[Any, Any]]]] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Run an op. Returns what it is, or None if it does nothing but look, and its result."""
        kind = kind_of(func)
        if (kind.is_view and not kind.facts.writes) or kind.gives_storage:
            return None, func(*args, **kwargs)
        key = (func, self.device, _looks((args, kwargs)))
        call = _known.get(key)
        if call is not None:
            return call, func(*args, **kwargs)
        call = _known[key] = Call(op_name(func))
        if self._fakes:
            if "_rnn" in op_name(func):
                # How large its workspace is only its library knows.
                raise NotImplementedError(f"{func} has a workspace that cannot be predicted")
            self._unmeasured.append((call, kind, func, _described((args, kwargs))))
            return call, func(*args, **kwargs)
        with no_dispatch_modes():
            repeat = _repeatable(kind, func, args, kwargs)
            if repeat is None:
                return call, self._measure_once(call, func, args, kwargs)
            self._measure(call, repeat)
        return call, func(*args, **kwargs)

    def settle(self) -> None:
        """Measure what could not be before, and read the times of what was on a device."""
        for call, kind, func, described in self._unmeasured:
            self._measure_alone(call, kind, func, described)
        self._unmeasured.clear()
        self._read_times()

    def _read_times(self) -> None:
        if not self._pending:
            return
        torch.accelerator.synchronize(self.device)
        for call, events in self._pending:
            call.seconds = statistics.median(s.elapsed_time(end) / 1e3 for s, end in events)
        self._pending.clear()

    def _measure_once(
        self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result: list[Any] = []
        self._time(call, lambda: result.append(func(*args, **kwargs)), 1)
        return result[0]

    def _measure_alone(self, call: Call, kind: Kind, func: Any, described: Any) -> None:
        """Measure an op on tensors made for that."""
        try:
            args, kwargs = tree_map_only(_Described, partial(_make, device=self.device), described)
            repeat = _repeatable(kind, func, args, kwargs)
            if repeat is not None:
                repeat()
                self._measure(call, repeat)
                return
        except (RuntimeError, ValueError, IndexError, TypeError):
            # On such values as were made up it does not run, or there is no room for it.
            pass
        call.seconds = _moved(described) / self._bandwidth

    @cached_property
    def _bandwidth(self) -> float:
        """Bytes that a simple op reads and writes in a second."""
        here = torch.empty(_PROBE // 4, device=self.device)
        call = Call("probe")
        self._time(call, lambda: here.mul_(1.0), _TIMES + 2)
        self._read_times()
        return 2 * _PROBE / max(call.seconds, 1e-9)

    def _measure(self, call: Call, repeat: Callable[[], Any]) -> None:
        try:
            call.workspace = self._workspace(repeat)
            self._time(call, repeat, _TIMES)
        except torch.OutOfMemoryError:
            # There was room for the op, but not for what the last run of it has left.
            pass

    def _time(self, call: Call, run: Callable[[], Any], samples: int) -> None:
        if self.device.type != "cuda":
            seconds = []
            for _ in range(samples):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
            call.seconds = statistics.median(seconds)
            return
        events = []
        for _ in range(samples):
            start_event = torch.cuda.Event(enable_timing=True)
            end_event = torch.cuda.Event(enable_timing=True)
            start_event.record()
            run()
            end_event.record()
            events.append((start_event, end_event))
        self._pending.append((call, events))

    def _workspace(self, run: Callable[[], Any]) -> int:
        """The most that ``run`` allocates, beside what it returns."""
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            out = run()
            after = torch.cuda.memory_allocated(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
            del out
            return peak - max(after, before)
        out = []
        changes = allocated_by(lambda: out.append(run()))
        total = peak = 0
        for change in changes:
            total += change
            peak = max(peak, total)
        return peak - max(total, 0)


def allocated_by(run: Callable[[], Any]) -> list[int]:
    """The bytes that the CPU's allocator gave (and, negative, took back) in ``run``, in order."""
    profiler = _started_profiler()
    if profiler is None:
        run()
        return []
    try:
        run()
    finally:
        with stderr_hushed():
            profiler.__exit__(None, None, None)
    assert profiler.kineto_results is not None
    events: list[Any] = [
        event for event in profiler.kineto_results.events() if event.name() == _MEMORY_EVENT
    ]
    on_cpu = [event for event in events if event.device_type() == DeviceType.CPU]
    return [event.nbytes() for event in sorted(on_cpu, key=lambda event: event.start_ns())]


def _started_profiler() -> profile | None:
    """A profiler of memory; None if another one is at work, which this would end.

    Not `torch.profiler`, which spends most of the time on what nobody reads here.
    """
    if profiler_is_on():
        return None
    profiler = profile(profile_memory=True)
    try:
        with stderr_hushed():
            profiler.__enter__()
    except RuntimeError:
        return None
    return profiler


def _repeatable(
    kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """What runs the op once more and changes nothing; None if there is no such thing."""
    if type(func) is not OpOverload or func.namespace not in ("aten", "prims"):
        return None
    if kind.facts.writes or kind.updates:
        written = {id(tensor) for tensor in kind.written(args, kwargs)}
        args, kwargs = tree_map_only(
            _Tensor, lambda leaf: leaf.clone() if id(leaf) in written else leaf, (args, kwargs)
        )
    if not kind.facts.is_random:
        return lambda: func(*args, **kwargs)

    def draw() -> Any:
        with torch.random.fork_rng():
            return func(*args, **kwargs)

    return None if kind.generator(args, kwargs) is not None else draw


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor, but for its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _described(values: Any) -> Any:
    return tree_map_only(
        _Tensor, lambda t: _Described(tuple(t.shape), t.stride(), t.dtype, t.device), values
    )


def _make(looks: _Described, device: torch.device) -> _Tensor:
    where = looks.device if looks.device.type != "meta" else device
    tensor = torch.empty_strided(looks.size, looks.stride, dtype=looks.dtype, device=where)
    # Zeros are values that most ops can take, as indices among others.
    return tensor.fill_(0.5) if looks.dtype.is_floating_point else tensor.zero_()


def _moved(described: Any) -> int:
    """The bytes of the tensors that an op is given."""
    found = [leaf for leaf in tree_leaves(described) if isinstance(leaf, _Described)]
    return sum(math.prod(each.size) * each.dtype.itemsize for each in found)


def _looks(values: Any) -> Any:
    """What tells calls apart that cost differently."""
    return tuple(_look(leaf) for leaf in tree_leaves(values))


def _look(leaf: Any) -> Any:
    if isinstance(leaf, _Tensor):
        if leaf.layout is not torch.strided:
            return leaf.shape, leaf.dtype, str(leaf.layout)
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if isinstance(leaf, torch.UntypedStorage):  # whose text is all that it holds
        return leaf.nbytes()
    return repr(leaf)
