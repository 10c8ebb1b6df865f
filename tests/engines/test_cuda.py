"""Regions on a CUDA device: streams, two types of devices, buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect.state import buffers
from tests._support import Run, assert_transparent, reentrant, rerun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ENGINES = pytest.mark.parametrize("run", [rerun, reentrant], ids=["rerun", "reentrant"])


def on_cuda(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


@ENGINES
def test_dropout_on_a_side_stream(run: Run) -> None:
    def train(run: Run) -> Any:
        layer, x = nn.Linear(64, 64, device="cuda"), on_cuda(256, 64)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = run(lambda x: F.dropout(layer(x), 0.5).sin(), x)
        torch.cuda.current_stream().wait_stream(side)
        out.square().sum().backward()
        torch.cuda.synchronize()
        return out, x.grad, layer.weight.grad, torch.cuda.get_rng_state()

    assert_transparent(train, run)


@ENGINES
def test_random_numbers_of_two_types_of_devices(run: Run) -> None:
    def train(run: Run) -> Any:
        x = on_cuda(64)

        def noisy(x: Tensor) -> Tensor:
            noise = torch.rand(64)  # on the CPU
            return F.dropout(x, 0.5).sin() * noise.to("cuda")

        out = run(noisy, run(noisy, x))
        out.sum().backward()
        return out, x.grad, torch.cuda.get_rng_state(), torch.get_rng_state()

    assert_transparent(train, run)


@ENGINES
def test_batch_norm_counts_once(run: Run) -> None:
    def train(run: Run) -> Any:
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()).cuda()
        x = on_cuda(8, 16)
        first, second = run(model, x), run(model, x)
        (first + second).square().sum().backward()
        return x.grad, [*model.buffers()], [b._version for b in model.buffers()]

    assert_transparent(train, run)


@ENGINES
def test_statistics_in_a_closure(run: Run) -> None:
    def train(run: Run) -> Any:
        mean, var = torch.zeros(16, device="cuda"), torch.ones(16, device="cuda")
        x = on_cuda(8, 16)
        run(lambda x: F.batch_norm(x, mean, var, training=True).sin(), x).sum().backward()
        return x.grad, mean, var

    assert_transparent(train, run)


def test_a_generator_of_the_device() -> None:
    def train(run: Run) -> Any:
        generator, x = torch.Generator("cuda").manual_seed(1), on_cuda(8)

        def noisy(x: Tensor) -> Tensor:
            return (x * torch.rand(8, device="cuda", generator=generator)).sin()

        run(noisy, run(noisy, x)).sum().backward()
        return x.grad, generator.get_state()

    assert_transparent(train, rerun)


def test_values_are_compared_on_the_device() -> None:
    steps = []

    def drifting(x: Tensor) -> Tensor:
        steps.append(x)
        return (x * len(steps)).sin()

    check = partial(recollect.checkpoint, determinism_check="values")
    check(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda(), on_cuda(4, 8)).sum().backward()
    with pytest.raises(recollect.CheckpointError, match="mul"):
        check(drifting, on_cuda(8)).sum().backward()


def test_threads_of_two_devices_share_one_recomputation() -> None:
    """Backward works on the CPU's part and on the device's part of a graph at once."""
    calls = []

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(recollect.is_recomputing())
        return x.sin().exp(), y.sin().exp()

    x, y = torch.randn(1000, requires_grad=True), on_cuda(1000)
    on_cpu, on_device = rerun(both, x, y)
    torch.autograd.backward([on_cpu.sum(), on_device.sum()])
    assert calls == [False, True]


def test_a_large_buffer_is_copied_once_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(16, 16).cuda()
    layer.register_buffer("table", torch.ones(200, 200, device="cuda"))
    rerun(layer, on_cuda(4, 16)).sum().backward()
    copied: list[Any] = []
    copies = buffers._copies
    monkeypatch.setattr(buffers, "_copies", lambda t: copied.extend(t) or copies(t))
    rerun(layer, on_cuda(4, 16)).sum().backward()
    assert copied == []


def from_a_set_stream(function: Any, x: Tensor) -> Any:
    """Call ``function`` as plain autograd does, with the generator's state set before."""
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    return function(x)


@ENGINES
def test_dropout_between_the_layers_of_recurrent_networks(run: Run) -> None:
    # By a state that cuDNN has on the device, which it seeds from a generator that was set. The
    # second and third region would go on from where the one before has left it.
    def train(run: Run) -> Any:
        torch.manual_seed(3)
        nets = [nn.LSTM(32, 32, 3, dropout=0.5, device="cuda") for _ in range(3)]
        x = on_cuda(16, 8, 32)
        for _ in range(2):
            out = x
            for net in nets:
                out = run(lambda x, net=net: net(F.dropout(x, 0.2))[0], out)
            out.square().sum().backward()
        return [out, x.grad, *(p.grad for net in nets for p in net.parameters())]

    for ours, theirs in zip(train(run), train(from_a_set_stream), strict=True):
        torch.testing.assert_close(ours, theirs)
