"""Op prices: seconds, and the workspace an op needs beside its results (P3).

An op is priced once for each kind of arguments: it is timed until samples agree, and its price is
valid for some minutes. An op that must not run twice is timed in each of its runs in the step, as
are all ops of a step that is traced in the user's loop. An op that cannot run at all costs what
simple ops need to move as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from recollect._torch.devices import keep_device_busy, profiler_is_on
from recollect._torch.modes import no_dispatch_modes
from recollect._torch.ops import OpOverload, flop_formula, op_name
from recollect._torch.pytree import tree_leaves, tree_map_only
from recollect.planning.recording.memory_events import (
    allocated_beside_results,
    allocated_by,
    apart_from_profilers,
    workspace_of,
)
from recollect.planning.recording.sampling import (
    LOW,
    Timing,
    elapsed,
    now,
    sampled,
    timing_events,
    timing_of,
    timing_on_cuda,
)
from recollect.policy.op_info import OpInfo, op_info

_Tensor = torch.Tensor
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
#: Attention on the CPU, for which torch has no formula: the position of the queries, and how many
#: products of queries and keys it takes.
_CPU_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 5),
}
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


class _Call(NamedTuple):
    """A call of an op, perhaps on fake tensors."""

    info: OpInfo
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.info.call(*self.args, **self.kwargs)

    def on(self, make: Callable[[_Tensor], _Tensor]) -> _Call:
        """The same call on tensors that ``make`` makes of its own."""
        args, kwargs = tree_map_only(_Tensor, make, (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)

    def repeatable(self) -> Callable[[], Any] | None:
        """A function that runs the op once more and changes nothing; None if there is none."""
        info, func = self.info, self.func
        if type(func) is not OpOverload or func.namespace not in ("aten", "prims"):
            return None
        call = self
        if info.writes or info.updates_statistics:
            written = {id(tensor) for tensor in info.written(self.args, self.kwargs)}
            call = self.on(lambda leaf: leaf.clone() if id(leaf) in written else leaf)
        if not info.is_random:
            return lambda: func(*call.args, **call.kwargs)

        def draw() -> Any:
            with torch.random.fork_rng():
                return func(*call.args, **call.kwargs)

        return None if info.generator(self.args, self.kwargs) is not None else draw


@dataclass(eq=False)
class Prices:
    """Runs ops, and prices those that it has not met before."""

    device: torch.device  #: where the step computes
    _: KW_ONLY
    #: Whether ops run on fake tensors, and are priced on real ones made for that.
    fakes: bool = False
    #: Whether no op may run twice: there may be neither memory nor time for it.
    once: bool = False
    #: Whether ops that would take long are priced by their shapes, and not run.
    estimates: bool = False
    _flop_rates: dict[torch.dtype, float] = field(default_factory=dict, init=False)
    #: The seconds that are left for single runs of ops that take long.
    _time_left: float = field(default=_SINGLE_RUNS, init=False)
    #: The price of each kind of call, and of each call.
    _prices: dict[Any, OpPrice] = field(default_factory=dict, init=False)
    _ran: list[OpPrice] = field(default_factory=list, init=False)
    #: What ran beside the user's profiler, each with a call on tensors like its arguments.
    _unmeasured: list[tuple[OpPrice, _Call]] = field(default_factory=list, init=False)

    @property
    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def spread(self) -> float:
        """By how much the times of all calls may be off, as a fraction."""
        total = sum(price.seconds for price in self._ran)
        return sum(p.seconds * p.spread for p in self._ran) / total if total else 0.0

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[OpPrice | None, Any]:
        """Run an op. Returns its price, None if it only makes a view, and its result."""
        call = _Call(op_info(func), func, args, kwargs)
        info = call.info
        if (info.runs_no_kernel and not info.writes) or info.sets_storage:
            return None, call.run()
        price = self._price_of(call)
        if price.runs is None:
            return price, call.run()
        with no_dispatch_modes():
            return price, self._timed_run(price, call)

    def price(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPrice:
        """The price of an op that is not run: with ``fakes``, on tensors like its arguments."""
        return self._price_of(_Call(op_info(func), func, args, kwargs))

    def moving(self, nbytes: int) -> float:
        """The seconds that a simple op takes to read and write so many bytes."""
        return nbytes / self._bandwidth

    def _price_of(self, call: _Call) -> OpPrice:
        described = tuple(map(_description, tree_leaves((call.args, call.kwargs))))
        key = (call.func, self.device, torch.get_num_threads(), described)
        price = self._prices.get(key)
        if price is None:
            price = _known.get(key)
            if price is None or not price.is_good:
                price = self._priced(call)
            self._prices[key] = price
        self._ran.append(price)
        return price

    def _priced(self, call: _Call) -> OpPrice:
        tensors = [each for each in tree_leaves((call.args, call.kwargs)) if _is_tensor(each)]
        moved = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
        price = OpPrice(op_name(call.func), _is_simple(call.func), moved)
        with no_dispatch_modes():
            if self.fakes:
                self._price_on_others(price, call)
            elif not self.once and (repeat := call.repeatable()) is not None:
                self._measure(price, repeat)
            else:
                price.runs = []
        return price

    def finish(self) -> None:
        """The step is over: price what must not run twice, and remember all prices."""
        if self._on_cuda:
            torch.accelerator.synchronize(self.device)
        unmeasured, self._unmeasured = self._unmeasured, []
        for price, call in unmeasured:  # once more, in a thread without the user's profiler
            found = apart_from_profilers(partial(_workspace_on_others, call, self.device))
            price.workspace = _likely_workspace(price, _known.values()) if found is None else found
        single: list[OpPrice] = []
        for key, price in self._prices.items():
            if price.runs:
                runs = elapsed(price.runs) if self._on_cuda else price.runs
                self._set(price, timing_of(runs, LOW if self._on_cuda else 0.0))
                single += [price] if len(runs) == 1 else []
                price.runs = None
            known = _known.get(key)
            if self.estimates and price.timing is None:
                continue
            if not self.once and (known is None or not known.is_good):
                _known[key] = price
        if self.once and self._on_cuda:
            limit_single_runs(single, self._prices.values())

    def forget(self) -> None:
        """Have all that was met here measured again."""
        for key in self._prices:
            _known.pop(key, None)

    # --- measuring --------------------------------------------------------------------------------

    def _timed_run(self, price: OpPrice, call: _Call) -> Any:
        runs = price.runs
        assert runs is not None
        # A collective goes on in a thread of its own.
        if not self.once or call.info.communicates or len(runs) >= _MEASURED:
            return self._time_run(runs, call)
        out: list[Any] = []

        def keep() -> Any:
            out.append(self._time_run(runs, call))
            return out[0]

        if not profiler_is_on():
            price.workspace = workspace_of(keep, self.device)
        elif self._on_cuda:
            values = call.args, call.kwargs
            price.workspace = allocated_beside_results(keep, values, self.device)
        else:
            keep()
            if len(runs) == 1:
                self._unmeasured.append((price, call.on(_likeness)))
        return out[0]

    def _time_run(self, runs: list[Any], call: _Call) -> Any:
        if not self._on_cuda:
            start = now()
            result = call.run()
            runs.append(now() - start)
            return result
        begin, end = timing_events()
        if self.once:
            # A step that is traced is slow to issue work. While the device waits for that, time
            # would pass between the two events: give it something to do.
            keep_device_busy()
        begin.record()
        result = call.run()
        end.record()
        runs.append((begin, end))
        return result

    def _price_on_others(self, price: OpPrice, call: _Call) -> None:
        """Price an op of fake tensors on real ones like them."""
        if "_rnn" in price.name:  # only its library knows how large its workspace is
            raise NotImplementedError(f"{call.func} has a workspace that cannot be predicted")
        is_long = self.estimates and self._estimate(price, call)
        if is_long and not self._can_run_once(price, call.func):
            price.workspace = _likely_workspace(price, self._prices.values())
            return
        try:
            repeat = call.on(partial(_real, device=self.device)).repeatable()
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

    def _estimate(self, price: OpPrice, call: _Call) -> bool:
        """Price an op by its arithmetic and its bytes, if that is long; returns whether it is."""
        seconds = price.moved / self._bandwidth
        flops = flops_of(call.func, call.args, call.kwargs)
        if flops:
            tensor = next(filter(_is_tensor, tree_leaves(call.args)))
            seconds += flops / self._flop_rate(tensor.dtype)
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
        if self.once:
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


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The operations of a product, a convolution or attention; 0 of any other op.

    The arguments may be fake tensors.
    """
    attention = _CPU_ATTENTION.get(op_name(func))
    if attention is not None:
        first, products = attention
        queries, keys = args[first : first + 2]
        return int(2 * products * queries.numel() * keys.shape[-2])
    formula = flop_formula(func)
    if formula is None:
        return 0
    args, kwargs = tree_map_only(_Tensor, _likeness, (args, kwargs))
    return int(formula(*args, **kwargs, out_val=func(*args, **kwargs)))


def _likely_workspace(price: OpPrice, others: Iterable[OpPrice]) -> int:
    """Estimate the workspace of an op from the same op on other arguments."""
    known = [each for each in others if each.name == price.name and each.moved]
    if not known or not price.moved:
        return 0
    nearest = min(known, key=lambda each: abs(math.log(each.moved / price.moved)))
    return math.ceil(nearest.workspace * max(1.0, price.moved / nearest.moved))


# --- one op ---------------------------------------------------------------------------------------


def _is_simple(func: Any) -> bool:
    name = op_name(func)
    is_pointwise = torch.Tag.pointwise in getattr(func, "tags", ())
    return is_pointwise or "norm" in name or "softmax" in name


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, _Tensor)


def _likeness(tensor: _Tensor) -> _Tensor:
    """A tensor like another one, without memory; one of no use if that is not strided."""
    if tensor.layout is not torch.strided:
        return torch.empty(0, device="meta")
    size, stride = tuple(tensor.shape), tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")


def _workspace_on_others(alike: _Call, device: torch.device) -> int | None:
    """The workspace of an op, run once more on tensors like its arguments; None if it cannot."""
    out: list[Any] = []
    try:
        repeat = alike.on(partial(_real, device=device)).repeatable()
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


def _description(leaf: Any) -> Any:
    """Of an argument: calls with equal ones cost the same."""
    if isinstance(leaf, _Tensor):
        if leaf.layout is not torch.strided:
            return leaf.shape, leaf.dtype, str(leaf.layout)
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if isinstance(leaf, torch.UntypedStorage):  # whose text is all that it holds
        return leaf.nbytes()
    return repr(leaf)
