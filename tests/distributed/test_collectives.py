"""Collectives that write in place, inside of regions of every engine.

The oracle is the same run of both processes without checkpointing. What a rerun communicates is
what `torch.utils.checkpoint` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    reduce_scatter_tensor,
)

import recollect
from recollect import policy
from recollect.errors import InputChanged
from recollect.replay import recording_cache
from recollect.replay.engine import replay_region
from recollect.replay.named_schedule import NamedSchedule
from recollect.store.offload_batch import OffloadBatch
from tests._support import Run, assert_identical, plain, torch_reentrant, torch_rerun
from tests.distributed._ranks import WORLD, Step, outcomes, run_ranks

pytestmark = pytest.mark.slow

SIZE = 8
Region = Callable[[Tensor, Tensor, Tensor], Tensor]

replay = partial(recollect.checkpoint, engine="replay")


def planned(function: Any, *args: Any) -> Any:
    """Call a region as under a plan that keeps nothing."""
    return replay_region(function, args, {}, NamedSchedule(), OffloadBatch(), False)


REPLAYS: dict[str, Run] = {
    "replay": replay,
    "replay, matmuls": partial(replay, policy=policy.matmuls()),
    "replay, everything": partial(replay, policy=policy.everything()),
    "planned": planned,
}
RERUNS: dict[str, Run] = {
    "rerun": recollect.checkpoint,
    "matmuls": partial(recollect.checkpoint, policy=policy.matmuls()),
    "everything": partial(recollect.checkpoint, policy=policy.everything()),
}
reentrant: Run = partial(recollect.checkpoint, engine="reentrant")


# --- tensor parallel by hand ----------------------------------------------------------------------


class Copy(torch.autograd.Function):
    """The same in all processes; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """The sum over all processes, in place and without a word to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ReduceDirty(Reduce):
    """The same, with a word to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x


class Gather(torch.autograd.Function):
    """The parts of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gathered_parts(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return own_part_of_sum(grad)


class Scatter(torch.autograd.Function):
    """The own part of the sum over all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return own_part_of_sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gathered_parts(grad)


def gathered_parts(x: Tensor) -> Tensor:
    out = torch.empty(WORLD * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def own_part_of_sum(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0] // WORLD, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


def block(before: Any, after: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A column-parallel and a row-parallel layer."""
    h = F.gelu(before.apply(F.layer_norm(x, (SIZE,))) @ w)
    return x + F.dropout(after.apply(h @ v).tanh(), 0.1)


BLOCKS: dict[str, Region] = {
    "tensor parallel": partial(block, Copy, Reduce),
    "tensor parallel, dirty": partial(block, Copy, ReduceDirty),
    "sequence parallel": partial(block, Gather, Scatter),
}


# --- others ---------------------------------------------------------------------------------------


def reduced_after_a_product(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = Reduce.apply(x.tanh() @ w)
    k = h.sin() @ v
    with torch.no_grad():
        dist.all_reduce(k)
    return k.exp().tanh() * x


def read_before(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = (x.detach() * 2).sin()
    y = (x * h.cos()).exp() * h.clone()
    dist.all_reduce(h)
    return (y @ w).sin() @ v * h


def broadcast(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = (x @ w).detach().sin()
    dist.broadcast(h, 0)
    return (x @ w * h).tanh() @ v * h[:, :SIZE].cos()


def at_the_same_time(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = (x @ w).sin()
    out = torch.empty(WORLD * h.shape[0], h.shape[1])
    gathering = dist.all_gather_into_tensor(out, h.detach(), async_op=True)
    k = h.exp()
    gathering.wait()
    total = torch.empty_like(h)
    dist.reduce_scatter_tensor(total, out.cos(), async_op=True).wait()
    return (k * total).sin() * out[: h.shape[0]] @ v


def coalesced(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = (x @ w).sin()
    a, b = h.detach() * 2, h.detach().exp()
    with dist._coalescing_manager(async_ops=True) as both:
        dist.all_reduce(a)
        dist.all_reduce(b)
    both.wait()
    dist.all_reduce_coalesced([a, b])
    return (h * a.cos()).tanh() * b.sin() @ v


def lists(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = (x @ w).sin()
    parts = [torch.zeros_like(h) for _ in range(WORLD)]
    dist.all_gather(parts, h.detach())
    other = torch.empty_like(h)
    dist.all_to_all_single(other, parts[0].cos())
    return (h * parts[1] * other.sin()).tanh() @ v


def sent(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h, other = (x @ w).sin(), torch.zeros(x.shape[0], w.shape[1])
    peer = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, h.detach(), peer), dist.P2POp(dist.irecv, other, peer)]
    for each in dist.batch_isend_irecv(ops):
        each.wait()
    return (h * other.cos()).tanh() @ v


def again_and_again(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = (x @ w).detach()
    dist.all_reduce(h)
    k = h.mul_(0.5).cos()
    dist.all_reduce(h.add_(1))
    return (x @ w * k * h.sin_()).tanh() @ v


def parts_of_a_buffer(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    buffer = torch.zeros(2, *x.shape)
    buffer[0].copy_(x.detach())
    buffer[1].copy_(x.detach().exp())
    dist.all_reduce(buffer[1])
    return ((x * buffer[0].cos() * buffer[1].sin()).tanh() @ w).sin() @ v * buffer.sum(0)


def after_another_memory(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = (x @ w).sin()
    torch.zeros(0).set_(torch.ones(3))  # from here on everything is held
    k = h.detach() * 2
    y = h * k.exp()
    dist.all_reduce(k)
    return (y * k.cos()).sin() @ v


CASES: dict[str, Region] = {
    each.__name__: each
    for each in (
        *(reduced_after_a_product, read_before, broadcast, at_the_same_time, coalesced, lists),
        *(sent, again_and_again, parts_of_a_buffer, after_another_memory),
    )
}


# --- the same, bit for bit ------------------------------------------------------------------------


def two_calls(region: Region, run: Run) -> Step:
    """Steps through a region twice."""

    def weight(seed: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        return (torch.randn(shape, generator=generator) * 0.3).requires_grad_()

    w, v = weight(1, SIZE, 2 * SIZE), weight(9, 2 * SIZE, SIZE)

    def step(number: int) -> tuple[Tensor, list[Tensor]]:
        x = torch.randn(4, SIZE, requires_grad=True)
        out = run(region, run(region, x, w, v), w, v)
        return out.square().sum(), [x, w, v]

    return step


def check_replays(region: Region) -> None:
    expected = outcomes(two_calls(region, plain))
    for run in REPLAYS.values():
        # Nothing is communicated twice.
        assert_identical(outcomes(two_calls(region, run)), expected)


def check_reruns(region: Region) -> None:
    expected, _ = outcomes(two_calls(region, plain))
    theirs, counts = outcomes(two_calls(region, torch_rerun))
    assert_identical(theirs, expected)
    for run in RERUNS.values():
        assert_identical(outcomes(two_calls(region, run)), (expected, counts))
    # Gradients are added up in another order than by plain autograd.
    expected, counts = outcomes(two_calls(region, torch_reentrant))
    assert_identical(outcomes(two_calls(region, reentrant)), (expected, counts))


def check_all(regions: dict[str, Region]) -> None:
    for region in regions.values():
        check_replays(region)
        check_reruns(region)


@pytest.mark.parametrize("regions", [BLOCKS, CASES], ids=["blocks", "cases"])
def test_collectives_in_place(regions: dict[str, Region], tmp_path: Path) -> None:
    run_ranks(check_all, tmp_path, regions)


# --- collectives whose results are there after a wait ---------------------------------------------


class GatherColumns(torch.autograd.Function):
    """As ``DTensor`` changes its placements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_gather_tensor(x, 1, [*range(WORLD)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return ScatterColumns.forward(None, grad)


class ScatterColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return reduce_scatter_tensor(x, "sum", 1, [*range(WORLD)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return GatherColumns.forward(None, grad)


def gathered_and_scattered(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h: Any = GatherColumns.apply(x.sin())
    part: Any = ScatterColumns.apply(F.gelu(h @ v @ w))
    return x + part.tanh()


def check_functional() -> None:
    """A thread of the backend counts writes to the results, when it likes: no call differs."""
    expected = outcomes(two_calls(gathered_and_scattered, plain), 4)
    for run in REPLAYS.values():
        assert_identical(outcomes(two_calls(gathered_and_scattered, run), 4), expected)
    entries = recording_cache._entries[gathered_and_scattered.__code__].values()
    assert len(entries) == len(REPLAYS)
    assert [entry.difference for entry in entries] == [None] * len(REPLAYS)


def test_functional_collectives(tmp_path: Path) -> None:
    run_ranks(check_functional, tmp_path)


# --- where plain autograd uses a changed tensor, or another number of collectives in each call ----


def saved_before(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = x.tanh() @ w
    y = h.sin()
    with torch.no_grad():
        dist.all_reduce(h)  # autograd has saved it, and does not know that it was changed
    return y @ v


class CALLS:
    """How often a region was called."""

    count = 0


def at_times(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = x.tanh() @ w
    k = h.detach() * 2
    CALLS.count += 1
    y = h.sin()
    if CALLS.count % 5 == 4:
        y = y.exp()
        dist.all_reduce(k)
        y = y * k.cos()
    elif CALLS.count > 3:
        dist.all_reduce(k)
    return (y * k).tanh() @ v


def check_rare() -> None:
    for name in ("replay", "planned"):
        for _ in range(3):
            loss, _ = two_calls(saved_before, REPLAYS[name])(0)
            with pytest.raises(InputChanged, match="by an in-place collective"):
                loss.backward()
    if not hasattr(dist, "all_gather_single"):
        return  # this torch hides collectives from the modes that check a call
    for run in REPLAYS.values():
        found = []
        for each in (plain, run):
            CALLS.count = 0
            found.append(outcomes(two_calls(at_times, each), 6))
        assert_identical(*found)


def test_collectives_that_are_seen_by_chance(tmp_path: Path) -> None:
    run_ranks(check_rare, tmp_path)


# --- compiled models ------------------------------------------------------------------------------


class Summed(nn.Module):
    """Adds what all processes have, in compiled code or between two graphs of it."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.functional = functional

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x).tanh()
        total = out.detach().sum()
        if self.functional:
            total = all_reduce(total, "sum", dist.group.WORLD)
        else:
            torch._dynamo.graph_break()
            dist.all_reduce(total)
        return out * total


def check_compiled() -> None:
    for functional in (True, False):
        model = torch.compile(Summed(functional), backend="aot_eager")
        with pytest.raises(ValueError, match=r"communicates with other processes .*compiled code"):
            recollect.plan(model, torch.ones(4, SIZE), 0.8)


def test_a_compiled_model_that_communicates_is_refused(tmp_path: Path) -> None:
    run_ranks(check_compiled, tmp_path)
