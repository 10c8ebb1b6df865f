"""Threads: regions, switches and recomputations of one do not disturb those of another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import recollect
from tests._support import Run, assert_identical, leaf, plain, reentrant, rerun


def train(run: Run, seed: int, wait: Callable[[], object] = lambda: None) -> list[Tensor]:
    """A few steps without random numbers: the generator is one for all threads."""
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Parameter(torch.randn(8, 8, generator=generator) / 3) for _ in range(4)]
    x = torch.randn(4, 8, generator=generator).requires_grad_()

    def block(x: Tensor, weight: Tensor) -> Tensor:
        wait()
        return (x @ weight).tanh() @ weight.T + x

    for _ in range(5):
        out = x
        for weight in layers:
            out = run(block, out, weight)
        wait()
        out.square().mean().backward()
    return [x.grad, *(weight.grad for weight in layers)]


def test_two_threads_train_two_models_at_once() -> None:
    """A barrier in every block makes the runs of the two overlap, backward included."""
    expected = [train(plain, seed) for seed in (0, 1)]
    barrier = threading.Barrier(2)
    for run in (rerun, reentrant):
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(train, run, seed, lambda: barrier.wait(30)) for seed in (0, 1)]
            assert_identical([future.result() for future in futures], expected)


def test_forward_in_one_thread_backward_in_another() -> None:
    x = leaf(5)
    with recollect.set_checkpoint_early_stop(False):
        out = rerun(lambda x: x.sin().exp(), x)
    thread = threading.Thread(target=out.sum().backward)
    thread.start()
    thread.join()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_many_threads_go_backward_through_one_graph() -> None:
    """Each backward has a recomputation of its own, though all need the same tensors."""
    x = leaf(5)

    def deep(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x.sin().exp()
        return x

    out = rerun(deep, x).sum()

    def slope(_: int) -> Tensor:
        return torch.autograd.grad(out, x, retain_graph=True)[0]

    (expected,) = torch.autograd.grad(deep(x).sum(), x)
    with ThreadPoolExecutor(4) as pool:
        assert_identical(list(pool.map(slope, range(16))), [expected] * 16)


def test_is_recomputing_is_a_matter_of_the_thread() -> None:
    seen: dict[str, Any] = {}

    def look(x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            with ThreadPoolExecutor(1) as pool:
                seen["elsewhere"] = pool.submit(recollect.is_recomputing).result()
            seen["here"] = recollect.is_recomputing()
        return x.sin()

    rerun(look, leaf(5)).sum().backward()
    assert seen == {"here": True, "elsewhere": False}
