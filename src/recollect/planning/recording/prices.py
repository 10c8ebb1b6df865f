"""Op prices: seconds, and the workspace an op needs beside its results (P3).

An op is priced once for each kind of arguments: it is timed until samples agree, and its price is
valid for some minutes. An op that must not run twice is timed in each of its runs in the step, as
are all ops of a step that is traced in the user's loop. An op that cannot run at all costs what
simple ops need to move as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from recollect._torch.devices import keep_device_busy, profiler_is_on
from recollect._torch.modes import no_dispatch_modes
from recollect._torch.ops import OpOverload, op_name
from recollect._torch.pytree import tree_leaves, tree_map_only
from recollect.planning.recording.estimate import flops_of
from recollect.planning.recording.memory_events import allocated_by
from recollect.planning.recording.sampling import Timing, now, sampled, timing_of
from recollect.planning.recording.workspaces import (
    allocated_beside_results,
    apart_from_profilers,
    likely_workspace,
    workspace_of,
)
from recollect.policy.op_info import OpInfo, op_info

_Tensor = torch.Tensor
#: On a device: how often work is issued before its times are read, and the quantile that counts.
#: The lowest sample may be of a clock rate that had just changed.
_ISSUED = 5
_LOW = 0.25
#: Bytes by which the rate of simple ops is measured; bytes a second, if there is no room for them.
_PROBE = 32 << 20
_SLOW = 5e9
#: An op that takes longer may be priced by its shapes; and the rows of the matrices by which the
#: rate of products is measured.
_LONG = 5e-4
_SIDE = 512
#: Such an op runs once, for its workspace, if it has no more bytes than this; in so many seconds
#: for all of them.
_ROOM = 512 << 20
_SINGLE_RUNS = 5.0
#: What a simple op may take at most if its samples do not agree: as a multiple of what it takes to
#: move its bytes, and of the seconds that it takes to run any op.
_GENEROUS = 50.0
_ANY_OP = 20e-6
#: How many times as long as others an op may take for its bytes, if it ran once; and how many bytes
#: those others move.
_OUTLIER = 4.0
_LARGE = 1 << 20
#: In how many of its runs the workspace of such an op is measured: the last of them counts. In the
#: first, libraries try what is fast, and allocate what they need once.
_MEASURED = 2


@dataclass(slots=True)
class OpPrice:
    """The cost of an op for arguments of certain shapes."""

    name: str  #: such as ``aten::mm``
    is_simple: bool = False  #: whether it takes about as long as it takes to move its bytes
    moved: int = 0  #: the bytes of its arguments
    seconds: float = 0.0
    workspace: int = 0  #: bytes that it allocates beside its results, while it runs
    spread: float = 0.0  #: by how much ``seconds`` may be off, as a fraction
    timing: Timing | None = None  #: None if it could not be measured
    #: Of an op that must not run twice: its runs, in seconds or as pairs of CUDA events.
    runs: list[Any] | None = None

    @property
    def is_good(self) -> bool:
        """Whether it need not be measured again."""
        return self.timing is not None and self.timing.is_good


#: What an op raises that does not run on such values, or for which there is no room.
_CANNOT_RUN = (RuntimeError, ValueError, IndexError, TypeError)

#: The prices of this process.
_known: dict[Any, OpPrice] = {}


class Prices:
    """Runs ops, and prices those that it has not met before.

    Args:
        device: Where the step computes.
        fakes: Whether ops run on fake tensors, and are priced on real ones made for that.
        once: Whether no op may run twice: there may be neither memory nor time for it.
        estimates: Whether ops that would take long are priced by their shapes, and not run.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        fakes: bool = False,
        once: bool = False,
        estimates: bool = False,
    ) -> None:
        self.device = device
        self._estimates = estimates
        self._flop_rates: dict[torch.dtype, float] = {}
        #: The seconds that are left for single runs of ops that take long.
        self._time_left = _SINGLE_RUNS
        self._on_cuda = device.type == "cuda"
        self._fakes = fakes
        self._once = once
        #: The price of each kind of call, and of each call.
        self._prices: dict[Any, OpPrice] = {}
        self._ran: list[OpPrice] = []
        #: What ran beside the user's profiler, each with a call on tensors like its arguments.
        self._unmeasured: list[tuple[OpPrice, Callable[[], int | None]]] = []

    @property
    def spread(self) -> float:
        """By how much the times of all calls may be off, as a fraction."""
        total = sum(price.seconds for price in self._ran)
        return sum(p.seconds * p.spread for p in self._ran) / total if total else 0.0

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[OpPrice | None, Any]:
        """Run an op. Returns its price, None if it only makes a view, and its result."""
        info = op_info(func)
        if (info.runs_no_kernel and not info.writes) or info.sets_storage:
            return None, info.call(*args, **kwargs)
        key = (func, self.device, torch.get_num_threads(), _described((args, kwargs)))
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = self._priced(key, info, func, args, kwargs)
        if price.runs is None:
            result = info.call(*args, **kwargs)
        else:
            with no_dispatch_modes():
                result = self._timed_run(price, info, func, args, kwargs)
        self._ran.append(price)
        return price, result

    def price(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPrice:
        """The price of an op that is not run: with ``fakes``, on tensors like its arguments."""
        key = (func, self.device, torch.get_num_threads(), _described((args, kwargs)))
        if key not in self._prices:
            self._prices[key] = self._priced(key, op_info(func), func, args, kwargs)
        self._ran.append(self._prices[key])
        return self._prices[key]

    def moving(self, nbytes: int) -> float:
        """The seconds that a simple op takes to read and write so many bytes."""
        return nbytes / self._bandwidth

    def _priced(
        self, key: Any, info: OpInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OpPrice:
        known = _known.get(key)
        if known is not None and known.is_good:
            return known
        moved = _bytes_of((args, kwargs))
        price = OpPrice(op_name(func), _is_simple(func), moved)
        with no_dispatch_modes():
            if self._fakes:
                self._price_on_others(price, info, func, args, kwargs)
            else:
                repeat = None if self._once else _repeatable(info, func, args, kwargs)
                if repeat is not None:
                    self._measure(price, repeat)
                else:
                    price.runs = []
        return price

    def finish(self) -> None:
        """The step is over: price what must not run twice, and remember all prices."""
        if self._on_cuda:
            torch.accelerator.synchronize(self.device)
        self._measure_workspaces()
        single: list[OpPrice] = []
        for key, price in self._prices.items():
            if price.runs:
                runs = _seconds_of(price.runs) if self._on_cuda else price.runs
                self._set(price, timing_of(runs, _LOW if self._on_cuda else 0.0))
                single += [price] if len(runs) == 1 else []
                price.runs = None
            known = _known.get(key)
            if self._estimates and price.timing is None:
                continue
            if not self._once and (known is None or not known.is_good):
                _known[key] = price
        if self._once and self._on_cuda:
            limit_single_runs(single, self._prices.values())

    def forget(self) -> None:
        """Have all that was met here measured again."""
        for key in self._prices:
            _known.pop(key, None)

    # --- measuring --------------------------------------------------------------------------------

    def _measure_workspaces(self) -> None:
        """Run what ran beside the user's profiler once more, in a thread without one."""
        unmeasured, self._unmeasured = self._unmeasured, []
        for price, again in unmeasured:
            found = apart_from_profilers(again)
            price.workspace = likely_workspace(price, _known.values()) if found is None else found

    def _timed_run(
        self, price: OpPrice, info: OpInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        runs = price.runs
        assert runs is not None
        run = partial(self._time_run, runs, info.call, args, kwargs)
        # A collective goes on in a thread of its own.
        if not self._once or info.communicates or len(runs) >= _MEASURED:
            return run()
        out: list[Any] = []

        def keep() -> Any:
            out.append(run())
            return out[0]

        if not profiler_is_on():
            price.workspace = workspace_of(keep, self.device)
        elif self._on_cuda:
            price.workspace = allocated_beside_results(keep, (args, kwargs), self.device)
        else:
            keep()
            if len(runs) == 1:
                alike = tree_map_only(_Tensor, _likeness, (args, kwargs))
                again = partial(_workspace_on_others, info, func, alike, self.device)
                self._unmeasured.append((price, again))
        return out[0]

    def _time_run(
        self, runs: list[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._on_cuda:
            begin, end = _timing_events()
            if self._once:
                # A step that is traced is slow to issue work. While the device waits for that, time
                # would pass between the two events: give it something to do.
                keep_device_busy()
            begin.record()
            result = func(*args, **kwargs)
            end.record()
            runs.append((begin, end))
        else:
            start = now()
            result = func(*args, **kwargs)
            runs.append(now() - start)
        return result

    def _price_on_others(
        self, price: OpPrice, info: OpInfo, func: Any, args: Any, kwargs: Any
    ) -> None:
        """Price an op of fake tensors on real ones like them."""
        if "_rnn" in price.name:  # only its library knows how large its workspace is
            raise NotImplementedError(f"{func} has a workspace that cannot be predicted")
        is_long = self._estimates and self._estimate(price, func, args, kwargs)
        if is_long and not self._can_run_once(price, func):
            price.workspace = likely_workspace(price, self._prices.values())
            return
        make = partial(_real, device=self.device)
        try:
            args, kwargs = tree_map_only(_Tensor, make, (args, kwargs))
            repeat = _repeatable(info, func, args, kwargs)
            if repeat is not None and is_long:
                price.workspace = self._workspace(repeat)
                return
            if repeat is not None:
                repeat()
                self._measure(price, repeat)
                return
        except _CANNOT_RUN:
            pass
        if not is_long:
            price.seconds = price.moved / self._bandwidth

    def _can_run_once(self, price: OpPrice, func: Any) -> bool:
        """Whether an op that takes long may have a workspace, and there is time to find it."""
        has_none = torch.Tag.pointwise in getattr(func, "tags", ())
        if has_none or price.moved > _ROOM or price.seconds > self._time_left:
            return False
        self._time_left -= price.seconds
        return True

    def _estimate(self, price: OpPrice, func: Any, args: Any, kwargs: Any) -> bool:
        """Price an op by its arithmetic and its bytes, if that is long; returns whether it is."""
        seconds = price.moved / self._bandwidth
        flops = flops_of(func, args, kwargs)
        if flops:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, _Tensor)]
            seconds += flops / self._flop_rate(tensors[0].dtype)
        if seconds <= _LONG:
            return False
        price.seconds = seconds
        return True

    def _measure(self, price: OpPrice, repeat: Callable[[], Any]) -> None:
        try:
            price.workspace = self._workspace(repeat)
            self._set(price, self._timing(repeat))
        except torch.OutOfMemoryError:  # there was room for the op once, but not for it again
            price.seconds = price.moved / self._bandwidth

    def _set(self, price: OpPrice, timing: Timing) -> None:
        price.timing, price.seconds, price.spread = timing, timing.seconds, timing.spread
        if price.is_simple and not timing.is_steady:
            # It reads, computes a little and writes: if it took much longer, it was disturbed.
            most = _GENEROUS * (_ANY_OP + price.moved / self._bandwidth)
            price.seconds = min(price.seconds, most)

    @cached_property
    def _bandwidth(self) -> float:
        """Bytes that a simple op reads and writes in a second."""
        if self._once:
            return _SLOW
        try:
            here = torch.empty(_PROBE // 4, device=self.device)
            seconds = self._timing(lambda: here.mul_(1.0)).seconds
        except torch.OutOfMemoryError:
            return _SLOW
        return 2 * _PROBE / max(seconds, 1e-9)

    def _flop_rate(self, dtype: torch.dtype) -> float:
        """Operations of a matrix product in a second."""
        if dtype not in self._flop_rates:
            side = torch.ones(_SIDE, _SIDE, device=self.device).to(dtype)
            seconds = self._timing(lambda: side @ side).seconds
            self._flop_rates[dtype] = 2 * _SIDE**3 / max(seconds, 1e-9)
        return self._flop_rates[dtype]

    def _timing(self, run: Callable[[], Any]) -> Timing:
        """Time ``run``."""
        if self._on_cuda:
            return timing_on_cuda(run, self.device)

        def once() -> list[float]:
            start = now()
            run()
            return [now() - start]

        return sampled(once)

    def _workspace(self, run: Callable[[], Any]) -> int:
        """The most bytes that ``run`` allocates beside its results."""
        out: list[Any] = []

        def keep() -> None:
            out.append(run())

        if not self._on_cuda:
            return apart_from_profilers(lambda: workspace_of(keep, self.device))
        peak, left = allocated_by(keep, self.device)
        return peak - max(left, 0)


def limit_single_runs(single: Iterable[OpPrice], prices: Iterable[OpPrice]) -> None:
    """Limit the prices of ops that ran once to what others of the step let expect.

    The first run of an op in a process loads its kernels, or starts a library: that took a
    hundred times as long as the op itself. No later step pays for it.
    """
    once = {id(price): price for price in single}
    others = [each for each in prices if id(each) not in once and each.moved >= _LARGE]
    for price in once.values():
        alike = [each for each in others if each.is_simple is price.is_simple] or others
        if alike:
            rate = sum(each.seconds for each in alike) / sum(each.moved for each in alike)
            most = _OUTLIER * (_ANY_OP + price.moved * rate)
            price.seconds = min(price.seconds, most)


def _timing_events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _seconds_of(events: list[tuple[Any, Any]]) -> list[float]:
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def timing_on_cuda(run: Callable[[], Any], device: torch.device) -> Timing:
    """Time ``run`` on a device."""

    def issue() -> list[float]:
        """Run several times one after the other; read the times afterwards."""
        pairs = [_timing_events() for _ in range(_ISSUED)]
        for begin, end in pairs:
            begin.record()
            run()
            end.record()
        torch.accelerator.synchronize(device)
        return _seconds_of(pairs)

    return sampled(issue, low=_LOW, least=_ISSUED)


# --- one op ---------------------------------------------------------------------------------------


def _is_simple(func: Any) -> bool:
    name = op_name(func)
    is_pointwise = torch.Tag.pointwise in getattr(func, "tags", ())
    return is_pointwise or "norm" in name or "softmax" in name


def _repeatable(
    info: OpInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """A function that runs the op once more and changes nothing; None if there is none."""
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


def _likeness(tensor: _Tensor) -> _Tensor:
    """A tensor like another one, without memory; one of no use if that is not strided."""
    if tensor.layout is not torch.strided:
        return torch.empty(0, device="meta")
    size, stride = tuple(tensor.shape), tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")


def _workspace_on_others(
    info: OpInfo, func: Any, alike: tuple[tuple[Any, ...], dict[str, Any]], device: torch.device
) -> int | None:
    """The workspace of an op, run once more on tensors like its arguments; None if it cannot."""
    out: list[Any] = []
    try:
        args, kwargs = tree_map_only(_Tensor, partial(_real, device=device), alike)
        repeat = _repeatable(info, func, args, kwargs)
        return None if repeat is None else workspace_of(lambda: out.append(repeat()), device)
    except _CANNOT_RUN:
        return None


def _real(fake: _Tensor, device: torch.device) -> _Tensor:
    """A real tensor like a fake one."""
    where = device if fake.device.type == "meta" else fake.device
    size, stride = tuple(fake.shape), fake.stride()
    tensor = torch.empty_strided(size, stride, dtype=fake.dtype, device=where)
    # All of its memory, since elements that were expanded share theirs. Zeros are values that most
    # ops can take, as indices among others.
    nbytes = tensor.untyped_storage().nbytes()
    tensor.as_strided((nbytes // tensor.dtype.itemsize,), (1,)).fill_(
        0.5 if fake.dtype.is_floating_point else 0
    )
    return tensor


def _bytes_of(values: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, _Tensor)]
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def _described(values: Any) -> tuple[Any, ...]:
    """A key of the arguments: calls with the same key cost the same."""
    return tuple(_description(leaf) for leaf in tree_leaves(values))


def _description(leaf: Any) -> Any:
    if isinstance(leaf, _Tensor):
        if leaf.layout is not torch.strided:
            return leaf.shape, leaf.dtype, str(leaf.layout)
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if isinstance(leaf, torch.UntypedStorage):  # whose text is all that it holds
        return leaf.nbytes()
    return repr(leaf)
