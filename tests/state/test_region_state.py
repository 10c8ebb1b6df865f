"""Modes around a region in forward are around its recomputation too, whatever backward is under."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect._torch.modes import function_mode_count
from recollect.state.region_state import CollectivePlayer, CollectiveRecorder
from tests._support import Run, assert_transparent, identical, leaf, plain, reentrant, rerun

ENGINES = pytest.mark.parametrize("run", [rerun, reentrant], ids=["rerun", "reentrant"])


def autocast(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


@ENGINES
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("in_forward", [False, True])
def test_autocast_of_forward_counts(run: Run, in_forward: bool, in_backward: bool) -> None:
    dtypes = []

    def note_dtype(x: Tensor, weight: Tensor) -> Tensor:
        product = x @ weight
        dtypes.append((product.dtype, torch.is_autocast_enabled("cpu")))
        return product.float().sin() @ weight

    x, weight = leaf(3, 3), leaf(3, 3)
    with autocast(in_forward):
        out = run(note_dtype, x, weight)
    with autocast(in_backward):
        out.float().sum().backward()
        assert torch.is_autocast_enabled("cpu") is in_backward
    expected = (torch.bfloat16 if in_forward else torch.float32, in_forward)
    assert dtypes == [expected, expected]


@ENGINES
def test_gradients_under_autocast_with_backward_inside(run: Run) -> None:
    def train(run: Run) -> Any:
        layer, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), leaf(3, 4)
        with autocast(True):
            out = run(layer, x)
            out.float().square().sum().backward()
        return out, x.grad, [p.grad for p in layer.parameters()]

    assert_transparent(train, run)


@ENGINES
def test_autocast_dtype_and_cache_are_restored(run: Run) -> None:
    states = []

    def note_state(x: Tensor) -> Tensor:
        states.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()))
        return x.sin()

    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        out = run(note_state, leaf(3))
    out.sum().backward()
    assert states == [(torch.float16, False)] * 2
    assert torch.is_autocast_cache_enabled()


def test_autocast_switched_off_inside_autocast() -> None:
    def train(run: Run) -> Any:
        layer, x = nn.Linear(4, 4), leaf(3, 4)
        with autocast(True), autocast(False):
            out = run(layer, x)
        with autocast(True):
            out.sum().backward()
        return out, x.grad, layer.weight.grad

    assert_transparent(train, rerun)


POLICIES: dict[str, Any] = {
    "none": None,
    "matmuls": [torch.ops.aten.mm, torch.ops.aten.addmm],
    "casts": [torch.ops.aten._to_copy],
    "everything": lambda ctx, op, *args, **kwargs: recollect.CheckpointPolicy.MUST_SAVE,
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("backward_inside", [False, True])
def test_shared_weight_in_two_regions_under_autocast(policy: Any, backward_inside: bool) -> None:
    """autocast caches the cast weight in forward: the recomputation must do without, or with it."""

    def train(run: Run) -> Any:
        layer, x = nn.Linear(4, 4), leaf(3, 4)
        with autocast(True):
            out = run(lambda x: layer(x) * layer(x), run(layer, x).tanh())
            if backward_inside:
                out.sum().backward()
        if not backward_inside:
            out.sum().backward()
        return out, x.grad, layer.weight.grad

    assert_transparent(train, partial(rerun, policy=policy))


def test_weight_cast_by_a_plain_call_first() -> None:

    def train(run: Run) -> Any:
        layer, x = nn.Linear(4, 4), leaf(3, 4)
        with autocast(True):
            out = run(layer, layer(x).tanh())
        out.sum().backward()
        return out, x.grad, layer.weight.grad

    for policy in POLICIES.values():
        assert_transparent(train, partial(rerun, policy=policy))


@ENGINES
def test_autocast_of_every_device_type(run: Run) -> None:
    states = []

    def note_state(x: Tensor) -> Tensor:
        kinds = ("cpu", "cuda", "xpu")
        states.append([(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds])
        return x.sin()

    torch.set_autocast_enabled("xpu", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        out = run(note_state, leaf(3))
    finally:
        torch.set_autocast_enabled("xpu", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    out.sum().backward()
    assert states[0] == states[1]
    assert not torch.is_autocast_enabled("xpu")
    assert torch.get_autocast_dtype("cuda") is torch.float16


# --- context variables and function modes ---------------------------------------------------------

SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


@ENGINES
def test_context_variables_are_those_of_forward(run: Run) -> None:
    def train(run: Run) -> Any:
        x = leaf(3)
        token = SCALE.set(3.0)
        out = run(lambda x: (x * SCALE.get()).sin().exp(), x)
        SCALE.reset(token)
        out.sum().backward()
        return out, x.grad, SCALE.get()

    assert_transparent(train, run)


@ENGINES
def test_what_a_rerun_sets_is_gone_afterwards(run: Run) -> None:
    def count(x: Tensor) -> Tensor:
        SCALE.set(SCALE.get() + 1)
        return x.sin() * SCALE.get()

    def train(run: Run) -> Any:
        x = leaf(3)
        token = SCALE.set(1.0)
        run(count, run(count, x)).sum().backward()
        after = SCALE.get()
        SCALE.reset(token)
        return x.grad, after

    assert_transparent(train, run)


@ENGINES
def test_context_variables_in_nested_and_repeated_backwards(run: Run) -> None:
    def train(run: Run) -> Any:
        x = leaf(3)
        token = SCALE.set(2.0)
        out = run(lambda x: run(lambda x: (x * SCALE.get()).sin(), x).exp() * SCALE.get(), x)
        SCALE.reset(token)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        return x.grad

    assert_transparent(train, run)


class Scaled(TorchFunctionMode):
    """Doubles every sine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.Tensor.sin else out


@ENGINES
@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_function_modes_are_those_of_forward(run: Run, in_forward: bool, in_backward: bool) -> None:
    def train(run: Run) -> Any:
        x = leaf(3)
        with Scaled() if in_forward else nullcontext():
            out = run(lambda x: x.sin().exp(), x)
        with Scaled() if in_backward else nullcontext():
            out.sum().backward()
            modes = function_mode_count()
        return out, x.grad, modes

    assert_transparent(train, run)
    assert function_mode_count() == 0


@ENGINES
def test_modes_are_put_back_after_a_failing_rerun(run: Run) -> None:
    def fail(x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            raise KeyError
        return x.sin()

    with Scaled(), torch.device("cpu"), autocast(True):
        out = run(fail, leaf(3))
    with pytest.raises(KeyError):
        out.sum().backward()
    assert function_mode_count() == 0
    assert not torch.is_autocast_enabled("cpu")


# --- the default device ---------------------------------------------------------------------------


@ENGINES
def test_device_context_of_forward_counts(run: Run) -> None:
    devices = []

    def note_device(x: Tensor) -> Tensor:
        devices.append(torch.empty(1).device.type)
        return x.sin()

    with torch.device("meta"):
        out = run(note_device, leaf(3).to("meta"))
    out.sum().backward()
    assert devices == ["meta", "meta"]
    assert torch.empty(1).device.type == "cpu"


@ENGINES
def test_innermost_device_context_counts(run: Run) -> None:
    devices = []

    def note_device(x: Tensor) -> Tensor:
        devices.append(torch.empty(1).device.type)
        return x.sin()

    x = leaf(3)
    with torch.device("meta"), torch.device("cpu"):
        out = run(note_device, x)
    with torch.device("meta"):
        out.backward(torch.ones(3, device="cpu"))
    assert devices == ["cpu", "cpu"]


@ENGINES
def test_region_outside_of_a_device_context_recomputed_inside_one(run: Run) -> None:
    def ones(x: Tensor) -> Tensor:
        return (x * torch.ones(3)).sin()

    x = leaf(3)
    out = run(ones, x)
    with torch.device("meta"):
        out.backward(torch.ones(3, device="cpu"))
    assert torch.equal(x.grad, x.detach().cos())


@ENGINES
def test_grad_mode_of_backward_does_not_count(run: Run) -> None:
    def train(run: Run) -> Any:
        x = leaf(3)
        out = run(lambda x: x.sin().exp(), x).sum()
        with torch.no_grad():
            out.backward()
        return x.grad

    assert_transparent(train, run)


# --- is_recomputing -------------------------------------------------------------------------------


@ENGINES
def test_is_recomputing(run: Run) -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(recollect.is_recomputing())
        return x.sin()

    out = run(look, leaf(3))
    out.register_hook(lambda grad: seen.append(recollect.is_recomputing()))
    out.sum().backward()
    seen.append(recollect.is_recomputing())
    assert seen == [False, False, True, False]


def test_is_recomputing_when_nested() -> None:
    seen = []

    def note(place: str, x: Tensor) -> Tensor:
        seen.append((place, recollect.is_recomputing()))
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        x = note("before", x)
        x = rerun(lambda x: note("inside", x), x)
        return note("after", x)

    rerun(outer, leaf(3)).sum().backward()
    forward, again = seen[:3], seen[3:]
    assert forward == [("before", False), ("inside", False), ("after", False)]
    assert all(flag for _, flag in again)
    assert [place for place, _ in again] == ["before", "inside", "after", "inside"]
    assert not recollect.is_recomputing()


def test_is_recomputing_after_a_failed_recomputation() -> None:
    def fail_again(x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            raise KeyError
        return rerun(torch.sin, x).exp()

    with pytest.raises(KeyError):
        rerun(fail_again, leaf(3)).sum().backward()
    assert not recollect.is_recomputing()


# --- collectives of SyncBatchNorm are not repeated in a rerun -------------------------------------


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


class Gather(nn.SyncBatchNorm):
    """Communicates as ``SyncBatchNorm`` does, and runs on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        means = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
        dist.all_gather(means, mean)
        dist.all_reduce(mean)
        return (x - sum(means)).sin() * mean


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@ENGINES
def test_no_second_collective(run: Run, alone: None) -> None:
    layer, x = Gather(3), leaf(4, 3)
    plain(layer, x).sum().backward()
    expected, x.grad = x.grad, None
    out = run(nn.Sequential(nn.Identity(), layer), x)
    with CountCollectives() as counter:
        out.sum().backward()
    assert counter.count == 0
    assert identical(x.grad, expected)


class ListOfViews(nn.SyncBatchNorm):
    """May communicate, so that a mode looks for collectives; and writes to a list of views."""

    def forward(self, x: Tensor) -> Tensor:
        whole = x * 2
        square = whole.view(2, 2)
        torch._foreach_mul_([square], 3.0)
        return whole.sin() * square.view(-1)


@ENGINES
def test_writes_to_lists_of_views_beside_collectives(run: Run) -> None:
    """torch forgets to count them under a mode."""

    def train(run: Run) -> Any:
        x = leaf(4)
        out = run(ListOfViews(4), x)
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, run)


def test_a_recomputation_that_communicates_more_is_loud(alone: None) -> None:
    layer, x, more = Gather(3), leaf(4, 3), []

    def region(x: Tensor) -> Tensor:
        for _ in more:
            dist.all_reduce(torch.ones(1))
        return layer(x)

    out = rerun(region, x)
    more.append(1)
    with pytest.raises(recollect.CheckpointError, match="communicates with other processes"):
        out.sum().backward()


def test_what_was_gathered_is_not_shared_with_the_user(alone: None) -> None:
    with CollectiveRecorder() as recorder:
        first = torch.ones(2)
        dist.all_reduce(first)
    first.zero_()
    second = torch.full((2,), 5.0)
    with CollectivePlayer(recorder):
        dist.all_reduce(second)
    assert second.tolist() == [1, 1]


def _train(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    data = torch.randn(6, 4, device="cuda")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Tanh()).cuda()
    found = []
    for run in (plain, rerun, reentrant):
        net, x = copy.deepcopy(model), data.clone().requires_grad_()
        out = run(net, x)
        with CountCollectives() as counter:
            out.square().sum().backward()
        values = [x.grad, *net.buffers(), *(p.grad for p in net.parameters())]
        found.append((counter.count, [value.cpu() for value in values]))
    if rank == 0:
        results.put([(count, [v.tolist() for v in values]) for count, values in found])
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sync_batch_norm_of_two_processes(tmp_path: Path) -> None:
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_train, (str(tmp_path / "store"), results), nprocs=2)
    plainly, *checkpointed = results.get()
    for found in checkpointed:
        assert found == plainly
