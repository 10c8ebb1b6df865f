"""Random streams: the recomputation draws what forward drew, and nobody else notices."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect.state import region_state
from tests._support import Run, assert_identical, assert_transparent, leaf, plain, reentrant, rerun

ENGINES = pytest.mark.parametrize("run", [rerun, reentrant], ids=["rerun", "reentrant"])
needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def noisy(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5).exp() * torch.rand_like(x)


@ENGINES
def test_streams_stand_where_plain_leaves_them(run: Run) -> None:
    """After forward, between draws of the user's own, and after backward."""

    def train(run: Run) -> Any:
        x = leaf(50)
        torch.rand(3)
        out = run(noisy, x)
        after_forward = torch.get_rng_state()
        torch.rand(7)
        out.sum().backward()
        return out, x.grad, after_forward, torch.get_rng_state(), torch.rand(2)

    assert_transparent(train, run)


@ENGINES
def test_stream_is_restored_when_the_recomputation_draws_otherwise(run: Run) -> None:
    """A region that draws more, or reseeds, in its recomputation still disturbs nobody."""

    def reseeds(x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            torch.manual_seed(123)
        return F.dropout(x.sin(), 0.5)

    out = run(reseeds, leaf(50))
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@ENGINES
def test_backward_twice_draws_the_same_twice(run: Run) -> None:
    x = leaf(50)
    out = run(noisy, x).sum()
    slopes = []
    for _ in range(2):
        x.grad = None
        out.backward(retain_graph=True)
        slopes.append(x.grad)
        torch.rand(5)
    assert torch.equal(*slopes)


@ENGINES
def test_two_regions_draw_different_numbers(run: Run) -> None:
    def train(run: Run) -> Any:
        x = leaf(50)
        first, second = run(noisy, x), run(noisy, x)
        second.sum().backward()
        middle = x.grad.clone()
        first.sum().backward()
        return first, second, middle, x.grad

    assert_transparent(train, run)


@ENGINES
def test_without_preserving_the_recomputation_draws_on(run: Run) -> None:
    def gradient(run: Run) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x = leaf(50)
        run(lambda x: F.dropout(x, 0.5) * x, x).sum().backward()
        return x.grad, torch.get_rng_state()

    expected_slope, expected_stream = gradient(plain)
    slope, stream = gradient(partial(run, preserve_rng_state=False))
    assert not torch.equal(slope, expected_slope)
    assert not torch.equal(stream, expected_stream)


@ENGINES
def test_without_preserving_a_region_that_draws_nothing_is_right(run: Run) -> None:
    def train(run: Run) -> Any:
        x = leaf(5)
        run(lambda x: x.sin().exp(), x).sum().backward()
        return x.grad

    assert_transparent(train, partial(run, preserve_rng_state=False))


@ENGINES
def test_seed_set_inside_the_region(run: Run) -> None:
    def train(run: Run) -> Any:
        def seeded(x: Tensor) -> Tensor:
            torch.manual_seed(7)
            return F.dropout(x.sin(), 0.5)

        x = leaf(50)
        out = run(seeded, x)
        after_forward = torch.get_rng_state()
        out.sum().backward()
        return out, x.grad, after_forward

    assert_transparent(train, run)


# --- get_device_states, set_device_states ---------------------------------------------------------


@pytest.mark.parametrize("module", [recollect, recollect.compat], ids=["recollect", "compat"])
def test_cpu_and_meta_tensors_have_no_device_states(module: Any) -> None:
    tensors = [torch.ones(2), {"a": torch.ones(2, device="meta")}, 3]
    assert module.get_device_states(*tensors) == ([], [])
    assert module.get_device_states() == ([], [])


@pytest.mark.parametrize("module", [recollect, recollect.compat], ids=["recollect", "compat"])
def test_setting_no_states_changes_nothing(module: Any) -> None:
    before = torch.get_rng_state()
    for device_type in ("cpu", "meta", None):
        module.set_device_states([], [], device_type=device_type)
    module.set_device_states([0], [torch.zeros(1)], device_type="meta")
    assert torch.equal(torch.get_rng_state(), before)


# --- CUDA -----------------------------------------------------------------------------------------


class OnCuda:
    pytestmark = needs_cuda

    @pytest.fixture(autouse=True)
    def started(self) -> None:
        torch.cuda.init()

    @staticmethod
    def assert_transparent(scenario: Any, run: Run) -> None:
        def with_stream(run: Run) -> Any:
            torch.cuda.manual_seed_all(0)
            return scenario(run), torch.cuda.get_rng_state()

        assert_transparent(with_stream, run)


class TestCuda(OnCuda):
    @ENGINES
    def test_argument_on_the_device(self, run: Run) -> None:
        def train(run: Run) -> Any:
            x = torch.randn(1000, device="cuda", requires_grad=True)
            out = run(noisy, x)
            after_forward = torch.cuda.get_rng_state()
            torch.rand(7, device="cuda")
            out.sum().backward()
            return out, x.grad, after_forward

        self.assert_transparent(train, run)

    def test_tensor_in_a_closure_only(self) -> None:
        def train(run: Run) -> Any:
            weight = torch.randn(1000, device="cuda", requires_grad=True)
            out = run(lambda: noisy(weight))
            torch.rand(7, device="cuda")
            out.sum().backward()
            return out, weight.grad

        self.assert_transparent(train, rerun)

    def test_tensor_in_keyword_arguments_only(self) -> None:
        def train(run: Run) -> Any:
            x = torch.randn(1000, device="cuda", requires_grad=True)
            out = run(lambda *, items: noisy(items["x"]), items={"x": x})
            torch.rand(7, device="cuda")
            out.sum().backward()
            return out, x.grad

        self.assert_transparent(train, rerun)

    @ENGINES
    def test_both_streams_in_one_region(self, run: Run) -> None:
        def train(run: Run) -> Any:
            x = torch.randn(1000, device="cuda", requires_grad=True)
            out = run(lambda x: noisy(x) * F.dropout(torch.ones(1000), 0.5).cuda(), x)
            torch.rand(7, device="cuda")
            torch.rand(7)
            out.sum().backward()
            return out, x.grad

        self.assert_transparent(train, run)

    def test_seed_set_inside_the_region(self) -> None:
        def train(run: Run) -> Any:
            def seeded(x: Tensor) -> Tensor:
                first = F.dropout(x, 0.5)
                torch.cuda.manual_seed(7)
                return F.dropout(first.sin(), 0.5)

            x = torch.randn(1000, device="cuda", requires_grad=True)
            out = run(seeded, x)
            after_forward = torch.cuda.get_rng_state()
            out.sum().backward()
            return out, x.grad, after_forward

        self.assert_transparent(train, rerun)

    def test_nested_regions(self) -> None:
        def train(run: Run) -> Any:
            x = torch.randn(1000, device="cuda", requires_grad=True)
            out = run(lambda x: noisy(run(noisy, noisy(x))), x)
            out.sum().backward()
            return out, x.grad

        self.assert_transparent(train, rerun)

    def test_device_states_round_trip(self) -> None:
        x = torch.ones(2, device="cuda")
        devices, states = recollect.get_device_states([x], {"x": x})
        assert devices == [x.get_device()] * 2
        drawn = torch.rand(5, device="cuda")
        recollect.set_device_states(devices, states, device_type="cuda")
        assert_identical(torch.rand(5, device="cuda"), drawn)

    def test_a_region_in_a_captured_graph(self) -> None:
        """Capturing forbids some ways of reading a generator; dropout must match at each replay."""
        layer = torch.nn.Linear(64, 64, device="cuda")
        x = torch.randn(8, 64, device="cuda")

        def step() -> Tensor:
            return recollect.checkpoint(lambda x: F.dropout(layer(x), 0.5).sin(), x).sum()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step().backward()
                layer.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
            out.backward()
        for seed in (1, 2):
            torch.manual_seed(seed)
            graph.replay()
            captured = out.clone(), layer.bias.grad.clone()
            torch.manual_seed(seed)
            # A copy: the captured graph lives on, and with it what gathers the layer's gradients.
            twin = deepcopy(layer)
            again = F.dropout(twin(x), 0.5).sin().sum()
            again.backward()
            torch.testing.assert_close(captured, (again.detach(), twin.bias.grad))


def forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return F.dropout(x, 0.5).sin()


def puts_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    out = F.dropout(x, 0.5).sin()
    torch.set_rng_state(state)
    return out


@pytest.mark.parametrize("run", [rerun, reentrant])
@pytest.mark.parametrize("function", [forks, puts_back])
def test_a_region_that_draws_and_leaves_the_stream_where_it_was(function: Any, run: Run) -> None:
    """From outside it looks as if nothing had been drawn."""

    def train(run: Run) -> Any:
        x = torch.randn(20, requires_grad=True)
        out = run(function, x)
        torch.rand(3)
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, run)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@pytest.mark.parametrize("wrap", [Recurrent, lambda: Recurrent().lstm], ids=["inside", "itself"])
@pytest.mark.parametrize("is_function", [True, False])
def test_recurrent_layers_are_prepared_to_drop_out_the_same(
    wrap: Any, is_function: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On CUDA devices, where they draw from a state of cuDNN's. Of others nothing is to be prepared.
    prepared: list[torch.device] = []
    monkeypatch.setattr(region_state, "reseed_recurrent_layers", prepared.append)
    model = wrap()
    function = (lambda x: model(x.tanh())) if is_function else model
    x = torch.randn(3, 2, 4, requires_grad=True)
    recollect.checkpoint(function, x)
    assert prepared == [torch.device("cpu")]
    recollect.checkpoint(function, x, preserve_rng_state=False)
    recollect.checkpoint(nn.Linear(4, 4), x)
    model.eval()
    recollect.checkpoint(function, x)
    assert prepared == [torch.device("cpu")]
