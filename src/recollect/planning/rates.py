"""What ops cost: the seconds they take, and the memory they need beside their results.

Measured for each op and the looks of its arguments, until samples agree, and remembered for some
minutes: the same step is priced the same at every look. What did not agree, or is older, is
measured again. Where an op must not run twice, each of its runs in the step is a sample; where it
cannot run at all (fake tensors), its price is what simple ops need to move as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

from recollect._torch.devices import profiler_is_on, stderr_hushed
from recollect._torch.modes import no_dispatch_modes
from recollect._torch.ops import OpOverload, op_name
from recollect._torch.pytree import tree_leaves, tree_map_only
from recollect.planning.timing import Timing, now, sampled, timing_of
from recollect.policy.op_info import OpInfo, op_info

__all__ = ["Call", "Rates", "allocated_by"]

_Tensor = torch.Tensor
_MEMORY_EVENT = "[memory]"
#: On a device: how often an op is issued before its times are read, and the quantile that counts.
#: Times of a device are not all as they were: the lowest may be of a clock that had just changed.
_ISSUED = 5
_LOW = 0.25
#: Bytes by which the rate of simple ops is measured; bytes a second, if there is no room for them.
_PROBE = 32 << 20
_SLOW = 5e9
#: What a simple op may take at most if its samples do not agree: as a multiple of what it takes to
#: move its bytes, and of the seconds that it takes to run any op.
_GENEROUS = 50.0
_ANY_OP = 20e-6


@dataclass(slots=True)
class Call:
    """An op on arguments of certain looks.

    Args:
        name: Such as ``aten::mm``.
        seconds: What it takes.
        workspace: Bytes that it allocates beside its results, while it runs.
        spread: By how much ``seconds`` may be off, as a fraction.
        timing: What was measured; None if nothing could be.
    """

    name: str
    seconds: float = 0.0
    workspace: int = 0
    spread: float = 0.0
    timing: Timing | None = None

    @property
    def is_good(self) -> bool:
        """Whether it need not be measured again."""
        return self.timing is not None and self.timing.is_good


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
        self._fakes = fakes
        #: What was met here, and each time it was.
        self._calls: dict[Any, Call] = {}
        self._ran: list[Call] = []
        #: What is still to be measured.
        self._unmeasured: list[tuple[Call, OpInfo, Any, Any]] = []
        #: Of what must not run twice: what each run took, and pairs of events whose distance is not
        #: known until the device has come so far; and whether it is simple, and the bytes it moves.
        self._samples: dict[int, list[float]] = {}
        self._events: dict[int, list[tuple[Any, Any]]] = {}
        self._once: dict[int, tuple[Call, bool, int]] = {}

    @property
    def spread(self) -> float:
        """By how much the times of all that ran may be off, as a fraction."""
        total = sum(call.seconds for call in self._ran)
        return sum(call.seconds * call.spread for call in self._ran) / total if total else 0.0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Run an op. Returns what it is, or None if it does nothing but look, and its result."""
        info = op_info(func)
        if (info.runs_no_kernel and not info.writes) or info.sets_storage:
            return None, func(*args, **kwargs)
        key = (func, self.device, torch.get_num_threads(), _looks((args, kwargs)))
        call = self._calls.get(key)
        if call is None:
            call, result = self._first_run(key, info, func, args, kwargs)
        elif id(call) in self._once:
            with no_dispatch_modes():
                result = self._run_once(call, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self._ran.append(call)
        return call, result

    def _first_run(
        self, key: Any, info: OpInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, Any]:
        known = _known.get(key)
        if known is not None and known.is_good:
            self._calls[key] = known
            return known, func(*args, **kwargs)
        call = self._calls[key] = Call(op_name(func))
        if self._fakes:
            if "_rnn" in op_name(func):
                # How large its workspace is only its library knows.
                raise NotImplementedError(f"{func} has a workspace that cannot be predicted")
            self._unmeasured.append((call, info, func, _described((args, kwargs))))
            return call, func(*args, **kwargs)
        with no_dispatch_modes():
            repeat = _repeatable(info, func, args, kwargs)
            if repeat is None:
                moved = _moved(_described((args, kwargs)))
                self._once[id(call)] = call, _is_simple(func), moved
                return call, self._run_once(call, func, args, kwargs)
            self._measure(call, func, repeat, _described((args, kwargs)))
        return call, func(*args, **kwargs)

    def settle(self) -> None:
        """Measure what could not be before, and remember all of it."""
        for call, info, func, described in self._unmeasured:
            self._measure_alone(call, info, func, described)
        self._unmeasured.clear()
        self._settle_once()
        for key, call in self._calls.items():
            known = _known.get(key)
            if known is None or known is call or not known.is_good:
                _known[key] = call

    def forget(self) -> None:
        """Have all that was met here measured again."""
        for key in self._calls:
            _known.pop(key, None)

    # --- what must not run twice ------------------------------------------------------------------

    def _run_once(
        self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.device.type != "cuda":
            start = now()
            result = func(*args, **kwargs)
            self._samples.setdefault(id(call), []).append(now() - start)
            return result
        begin, end = _timing_events()
        begin.record()
        result = func(*args, **kwargs)
        end.record()
        self._events.setdefault(id(call), []).append((begin, end))
        return result

    def _settle_once(self) -> None:
        if self._events:
            torch.accelerator.synchronize(self.device)
        for number, events in self._events.items():
            self._samples[number] = [begin.elapsed_time(end) / 1e3 for begin, end in events]
        self._events.clear()
        for number, (call, is_simple, moved) in self._once.items():
            if number in self._samples:
                low = _LOW if self.device.type == "cuda" else 0.0
                self._price(call, timing_of(self._samples[number], low), is_simple, moved)
        self._once.clear()
        self._samples.clear()

    # --- what may ---------------------------------------------------------------------------------

    def _measure_alone(self, call: Call, info: OpInfo, func: Any, described: Any) -> None:
        """Measure an op on tensors made for that."""
        try:
            args, kwargs = tree_map_only(_Described, partial(_make, device=self.device), described)
            repeat = _repeatable(info, func, args, kwargs)
            if repeat is not None:
                repeat()
                self._measure(call, func, repeat, described)
                return
        except (RuntimeError, ValueError, IndexError, TypeError):
            # On such values as were made up it does not run, or there is no room for it.
            pass
        self._guess(call, described)

    def _measure(self, call: Call, func: Any, repeat: Callable[[], Any], described: Any) -> None:
        try:
            call.workspace = self._workspace(repeat)
            timing = self._timing(repeat)
        except torch.OutOfMemoryError:
            # There was room for the op, but not for what the last run of it has left.
            self._guess(call, described)
            return
        self._price(call, timing, _is_simple(func), _moved(described))

    def _price(self, call: Call, timing: Timing, is_simple: bool, moved: int) -> None:
        call.timing, call.seconds, call.spread = timing, timing.seconds, timing.spread
        if is_simple and not timing.is_steady:
            # It reads, computes a little and writes: much longer than that it was somebody else.
            call.seconds = min(call.seconds, _GENEROUS * (_ANY_OP + moved / self._bandwidth))

    def _guess(self, call: Call, described: Any) -> None:
        """What it takes to move the bytes of an op that cannot be measured."""
        call.seconds = _moved(described) / self._bandwidth

    @cached_property
    def _bandwidth(self) -> float:
        """Bytes that a simple op reads and writes in a second."""
        try:
            here = torch.empty(_PROBE // 4, device=self.device)
            seconds = self._timing(lambda: here.mul_(1.0)).seconds
        except torch.OutOfMemoryError:
            return _SLOW
        return 2 * _PROBE / max(seconds, 1e-9)

    def _timing(self, run: Callable[[], Any]) -> Timing:
        """What ``run`` takes."""
        if self.device.type == "cuda":
            return sampled(partial(self._issue, run), low=_LOW, least=_ISSUED)

        def once() -> list[float]:
            start = now()
            run()
            return [now() - start]

        return sampled(once)

    def _issue(self, run: Callable[[], Any]) -> list[float]:
        """What ``run`` took on the device, several times one after the other."""
        pairs = [_timing_events() for _ in range(_ISSUED)]
        for begin, end in pairs:
            begin.record()
            run()
            end.record()
        torch.accelerator.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

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


def _timing_events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _is_simple(func: Any) -> bool:
    """Whether an op takes as long as it takes to move its bytes, more or less."""
    if torch.Tag.pointwise in getattr(func, "tags", ()):
        return True
    name = op_name(func)
    return "norm" in name or "softmax" in name


def _repeatable(
    info: OpInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """What runs the op once more and changes nothing; None if there is no such thing."""
    if type(func) is not OpOverload or func.namespace not in ("aten", "prims"):
        return None
    if info.writes or info.updates_statistics:
        written = {id(tensor) for tensor in info.written(args, kwargs)}
        args, kwargs = tree_map_only(
            _Tensor, lambda leaf: leaf.clone() if id(leaf) in written else leaf, (args, kwargs)
        )
    if not info.is_random:
        return lambda: func(*args, **kwargs)

    def draw() -> Any:
        with torch.random.fork_rng():
            return func(*args, **kwargs)

    return None if info.generator(args, kwargs) is not None else draw


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
