"""What ops and copies cost: figures that are measured until samples agree, and get stale.

No test here depends on how fast the machine is: clocks are made up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from recollect._torch.devices import stderr_hushed
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request
from recollect.planning.recording import memory_events, prices, sampling
from recollect.planning.recording.prices import OpPrice, Prices, flops_of
from recollect.planning.recording.record import profile_step
from recollect.planning.recording.sampling import Timing
from recollect.planning.recording.step import TrainingStep
from recollect.planning.recording.trace import TraceMode
from tests.planning._clock import MS, TICK, Clock, outliers
from tests.planning._models import Decoder, squares

pytestmark = pytest.mark.usefixtures("no_bound")

X = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))


def _model(layers: int = 3) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers)


# --- prices of ops --------------------------------------------------------------------------------

_MM = (torch.ops.aten.mm.default, (torch.ones(8, 8), torch.ones(8, 8)), {})
_NORM = (torch.ops.aten.native_layer_norm.default, (torch.ones(4, 8), [8], None, None, 1e-5), {})


def _priced(op: Any = _MM) -> OpPrice:
    found = Prices(torch.device("cpu"))
    call, _ = found.run(*op)
    found.finish()
    return call


@pytest.mark.parametrize("op", [_MM, _NORM], ids=["mm", "norm"])
def test_an_op_has_its_price_whatever_disturbs_two_of_three_samples(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, op: Any
) -> None:
    monkeypatch.setattr(prices, "now", Clock(outliers()).perf_counter)
    call = _priced(op)
    assert call.seconds == pytest.approx(TICK)
    assert call.spread == pytest.approx(0, abs=1e-9)


def test_all_ops_of_a_step_have_theirs(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "now", Clock(outliers()).perf_counter)
    made_by = Planner.of(Request(_model(), X, squares))
    assert made_by.trials.profile.untimed is not None
    found = [op.seconds for op in made_by.trials.profile.untimed.ops if op.makes]
    assert found == pytest.approx([TICK] * len(found))


def _unsteady(first: float) -> Iterator[float]:
    """Every sample is twice the last."""
    return (first * 2**n for n in itertools.count())


def test_a_simple_op_that_is_not_steady_is_held_to_what_its_bytes_take(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prices, "_bandwidth", 1e10)
    clock.steps = _unsteady(1.0)
    call = _priced(_NORM)
    assert call.timing is not None
    assert call.timing.seconds > 1
    assert call.seconds == pytest.approx(50 * (20e-6 + 4 * 8 * 4 / 1e10))
    assert call.spread > 0.5  # and it is known that it is rough
    clock.steps = _unsteady(1.0)
    assert _priced(_MM).seconds > 1  # of a product nothing is known


def test_a_simple_op_that_is_slow_every_time_is_slow(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prices, "_bandwidth", 1e10)
    clock.steps = itertools.repeat(1.0)
    assert _priced(_NORM).seconds == 1.0


def test_a_price_is_remembered_for_some_minutes(clock: Clock) -> None:
    assert _priced().seconds == pytest.approx(MS)
    clock.steps = itertools.repeat(2 * MS)
    assert _priced().seconds == pytest.approx(MS)
    clock.now += 301
    assert _priced().seconds == pytest.approx(2 * MS)


def test_a_price_that_was_not_steady_is_measured_again(clock: Clock) -> None:
    clock.steps = _unsteady(MS)
    assert not _priced().is_good
    clock.steps = itertools.repeat(MS)
    call = _priced()
    assert call.is_good
    assert call.seconds == pytest.approx(MS)
    assert _priced() is call


def test_a_price_is_for_as_many_threads(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _priced()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert _priced() is not call


def test_an_op_that_fails_is_not_free_from_then_on(clock: Clock) -> None:
    found = Prices(torch.device("cpu"))
    with pytest.raises(RuntimeError):
        found.run(torch.ops.aten.mm.default, (torch.ones(8, 8), torch.ones(9, 9)), {})
    assert prices._known == {}


def test_an_op_without_room_to_be_timed_is_not_free(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: Prices, run: Callable[[], Any]) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Prices, "_workspace", no_room)
    monkeypatch.setattr(Prices, "_bandwidth", 1e6)
    assert _priced().seconds == pytest.approx(2 * 8 * 8 * 4 / 1e6)


def test_each_run_of_an_op_that_must_not_run_twice_is_a_sample(clock: Clock) -> None:
    # Of an unknown namespace: it is run as often as the step does.
    calls = []

    with torch.library._scoped_library("recollect_times", "DEF") as library:
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: calls.append(1) or x + 1, "CPU")
        op = torch.ops.recollect_times.odd.default
        clock.steps = itertools.cycle([1000 * MS, 1000 * MS, MS, MS])
        found = Prices(torch.device("cpu"))
        price, *_ = [found.run(op, (torch.ones(3),), {})[0] for _ in range(4)]
        found.finish()
    assert len(calls) == 4
    assert price.seconds == pytest.approx(MS)


def test_no_profiler_sees_a_collective(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # It ends in another thread, which would write to the profiler that saw it begin. Others have
    # their workspace in such a process too.
    measured = []
    measure = prices.workspace_of
    monkeypatch.setattr(
        prices, "workspace_of", lambda run, device: measured.append(1) or measure(run, device)
    )
    store, x = f"file://{tmp_path}/store", torch.ones(3)
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        with TraceMode(Prices(torch.device("cpu"), once=True)):
            distributed.all_reduce(x)
            assert measured == []
            x.exp()
        assert measured == [1]
    finally:
        distributed.destroy_process_group()


def test_a_trace_that_has_ended_does_not_change_gradients() -> None:
    """It stays on the stack of modes until backward is over."""

    def gradient() -> Tensor:
        x = torch.ones(4, requires_grad=True)
        whole = x * 2
        square = whole.view(2, 2)
        torch._foreach_mul_([square], 3.0)  # torch forgets to count that under a mode
        return torch.autograd.grad((whole.sin() * square.view(-1)).sum(), x)[0]

    with TraceMode(Prices(torch.device("cpu"), once=True)) as trace:
        trace.is_paused = True
        found = gradient()
    assert torch.equal(found, gradient())


def test_absurd_prices_are_measured_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ops of a millisecond that add up to hours, in a step of a millisecond.
    seen: list[Prices] = []

    def odd(self: Prices, run: Callable[[], Any]) -> Timing:
        if self not in seen:
            seen.append(self)
        return Timing(100.0 if self is seen[0] else 1e-6, 0.0, sampling.now())

    monkeypatch.setattr(Prices, "_timing", odd)
    step = TrainingStep(_model(), (X,), {}, squares)
    with step.undone():
        profile = profile_step(step)
    assert len(seen) == 2
    assert profile.untimed is not None
    assert max(op.seconds for op in profile.untimed.ops) == pytest.approx(1e-6)
    assert all(call.seconds < 1 for call in prices._known.values())


# --- the workspace of ops that must not run twice -------------------------------------------------


def _convolved() -> OpPrice:
    """The price of a convolution, which makes columns of its input, in a step of a loop."""
    x, w = torch.ones(2, 4, 6, 6), torch.ones(4, 4, 3, 3)
    args = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    found = Prices(torch.device("cpu"), once=True)
    price, _ = found.run(torch.ops.aten.convolution.default, args, {})
    found.finish()
    return price


def test_a_step_beside_the_users_profiler_has_its_workspaces() -> None:
    alone = _convolved()
    assert alone.workspace > 0
    with torch.profiler.profile(profile_memory=True) as profiler, stderr_hushed():
        torch.empty(999)
        beside = _convolved()
    assert beside.workspace == alone.workspace
    # The op ran once more, for this, in a thread that the user's profiler does not see.
    events = [event.name() for event in profiler.profiler.kineto_results.events()]
    assert events.count("aten::convolution") == 1


def test_beside_the_users_profiler_an_op_that_must_not_run_twice_has_a_likely_workspace() -> None:
    with (
        torch.library._scoped_library("recollect_once", "DEF") as library,
        torch.profiler.profile(),
        stderr_hushed(),
    ):
        calls = []
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: calls.append(1) or x + 1, "CPU")
        found = Prices(torch.device("cpu"), once=True)
        price, _ = found.run(torch.ops.recollect_once.odd.default, (torch.ones(3),), {})
        found.finish()
    assert (len(calls), price.workspace) == (1, 0)


def test_what_a_library_allocates_once_is_no_workspace() -> None:
    kept = []

    def run(first: bool) -> None:
        kept.append(torch.empty(10))
        if first:  # it stays, and what was tried is gone
            kept.append(torch.empty(1000))
            torch.empty(4000)
        torch.empty(100)

    assert memory_events.workspace_of(lambda: run(False), torch.device("cpu")) == 400
    assert memory_events.workspace_of(lambda: run(True), torch.device("cpu")) == 16_000
    # The second run in a step tells what all later ones take.
    with torch.library._scoped_library("recollect_first", "DEF") as library:
        seen = []
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: (x + 1, run(not seen), seen.append(1))[0], "CPU")
        found = Prices(torch.device("cpu"), once=True)
        op = torch.ops.recollect_first.odd.default
        price, *_ = [found.run(op, (torch.ones(3),), {})[0] for _ in range(3)]
        found.finish()
    assert price.workspace == 400


def test_arguments_that_were_expanded_are_made_again() -> None:
    wide = torch.empty((), device="meta").expand(3, 4)
    assert prices._real(wide, torch.device("cpu")).tolist() == [[0.5] * 4] * 3


# --- ops that ran once ----------------------------------------------------------------------------


def test_what_the_first_run_of_an_op_loads_is_no_part_of_its_price() -> None:
    usual = [OpPrice("mm", moved=100 << 20, seconds=1 * MS), OpPrice("mm", moved=8, seconds=1.0)]
    adds = OpPrice("add", is_simple=True, moved=200 << 20, seconds=0.2 * MS)
    cold = OpPrice("bmm", moved=100, seconds=80 * MS)
    large = OpPrice("mm", moved=200 << 20, seconds=5 * MS)
    softmax = OpPrice("softmax", is_simple=True, moved=2 << 30, seconds=20 * MS)
    prices.limit_single_runs([cold, large, softmax], [*usual, adds, cold, large, softmax])
    assert cold.seconds < 0.1 * MS
    assert large.seconds == 5 * MS  # not so far from what the others take for their bytes
    assert 2 * MS < softmax.seconds < 10 * MS
    assert [each.seconds for each in (*usual, adds)] == [1 * MS, 1.0, 0.2 * MS]


aten = torch.ops.aten


def _of(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_a_product_takes_two_operations_for_each_pair() -> None:
    assert flops_of(aten.mm.default, (_of(3, 5), _of(5, 7)), {}) == 2 * 3 * 5 * 7
    bias = (_of(7), _of(3, 5), _of(5, 7))
    assert flops_of(aten.addmm.default, bias, {}) == 2 * 3 * 5 * 7


def test_attention_on_the_cpu_multiplies_all_queries_and_keys() -> None:
    query, key = _of(2, 4, 6, 8), _of(2, 4, 10, 8)
    pairs = 2 * 4 * 6 * 10 * 8
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flops_of(forward, (query, key, key), {}) == 2 * 2 * pairs
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert flops_of(backward, (query, query, key, key), {}) == 5 * 2 * pairs


def test_a_convolution_counts_its_results() -> None:
    args = (_of(2, 3, 8, 8), _of(5, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    results = 2 * 5 * 6 * 6
    assert flops_of(aten.convolution.default, args, {}) == 2 * results * 3 * 3 * 3


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor, torch.sin])
def test_other_ops_have_none(op: object) -> None:
    assert flops_of(op, (_of(4), _of(4)), {}) == 0
