"""Random streams: the recomputation draws what forward drew, and nobody else notices."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect.compat import _infer_device_type
from recollect.state import region_state, rng
from recollect.state.rng import read_libraries, write_libraries
from tests._support import (
    ALL,
    Run,
    assert_identical,
    assert_transparent,
    gradients,
    leaf,
    plain,
    reentrant,
    rerun,
)

np = pytest.importorskip("numpy")

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

    @pytest.mark.alone  # it has failed where other processes kept the device busy
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


# --- generators that are objects ------------------------------------------------------------------

#: A generator object with a seed, and how to draw from it.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda generator: torch.rand(3, generator=generator),
    ),
    "random": (lambda: random.Random(3), lambda generator: generator.gauss(0, 1)),
    "numpy": (lambda: np.random.default_rng(3), lambda generator: float(generator.normal())),
    "numpy legacy": (lambda: np.random.RandomState(3), lambda generator: float(generator.randn())),
    "system": (random.SystemRandom, lambda generator: 1.0),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@ALL
@EACH_KIND
def test_generators_in_a_closure(run: Run, kind: Any) -> None:
    make, draw = kind

    def train(run: Run) -> Any:
        generator, x = make(), leaf(3)

        def noisy(x: Tensor) -> Tensor:
            return (x.sin() * draw(generator)).exp() * draw(generator)

        out = run(noisy, run(noisy, x))
        out.sum().backward()
        return out, x.grad, draw(generator)

    assert_transparent(train, run)


@ALL
@pytest.mark.parametrize("decorated", [False, True])
def test_a_generator_that_a_method_of_a_local_class_closes_over(run: Run, decorated: bool) -> None:
    def train(run: Run) -> Any:
        generator = torch.Generator().manual_seed(5)

        def passing_on(forward: Any) -> Any:
            def call(self: nn.Module, x: Tensor) -> Any:
                return forward(self, x)

            return call

        class Noisy(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x * torch.randn(3, generator=generator)).sin()

            forward = passing_on(forward) if decorated else forward

        model, x = nn.Sequential(Noisy(3, 3), Noisy(3, 3)), leaf(2, 3)
        for _ in range(2):
            run(model, x).sum().backward()
        return x.grad, gradients(model), generator.get_state()

    assert_transparent(train, run)


@EACH_KIND
def test_generators_in_a_keyword(kind: Any) -> None:
    make, draw = kind

    def train(run: Run) -> Any:
        generator, x = make(), leaf(3)
        out = run(lambda x, generators: (x * draw(generators[0])).sin(), x, generators=[generator])
        out.sum().backward()
        return out, x.grad, draw(generator)

    assert_transparent(train, rerun)


@ALL
def test_a_generator_of_a_module(run: Run) -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.rand(3, generator=self.generator)).sin()

    def train(run: Run) -> Any:
        noise, x = nn.Sequential(nn.Linear(3, 3), Noise()), leaf(3)
        run(noise, x).sum().backward()
        return x.grad, noise[1].generator.get_state()

    assert_transparent(train, run)


@ALL
@pytest.mark.parametrize("drawn_before", [0, 1])
def test_the_functions_of_random_and_numpy(run: Run, drawn_before: int) -> None:
    def train(run: Run) -> Any:
        random.seed(0)
        np.random.seed(0)
        for _ in range(drawn_before):
            random.gauss(0, 1), np.random.randn()

        def noisy(x: Tensor) -> Tensor:
            x = x.sin() * random.gauss(0, 1) * float(np.random.randn())
            return x.exp() * random.random() * float(np.random.rand())

        x = leaf(3)
        out = run(noisy, run(noisy, x))
        out.sum().backward()
        return out, x.grad, random.gauss(0, 1), float(np.random.randn())

    assert_transparent(train, run)


def test_streams_are_left_alone_on_request() -> None:
    drawn = []

    def noisy(x: Tensor) -> Tensor:
        drawn.append(random.random())
        return x.sin()

    rerun(noisy, leaf(3), preserve_rng_state=False).sum().backward()
    assert drawn[0] != drawn[1]


# --- the streams of random and numpy --------------------------------------------------------------


@pytest.fixture(autouse=True)
def streams_as_before() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


DRAWS: dict[str, Callable[[], Any]] = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.getrandbits": lambda: random.getrandbits(64),
    "random.shuffle": lambda: random.sample(range(100), 100),
    "numpy.rand": np.random.rand,
    "numpy.randn": np.random.randn,
    "numpy.randint": lambda: np.random.randint(1 << 30),
    "more than a twist of both": lambda: (np.random.rand(700).sum(), random.randbytes(4000)),
}


@pytest.mark.parametrize("before", [0, 1, 2, 623, 624])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_streams_go_on_from_where_they_were_read(draw: Callable[[], Any], before: int) -> None:
    for _ in range(before):
        random.gauss(0, 1), np.random.randn(), random.random()
    state = read_libraries()
    expected = [draw() for _ in range(3)]
    write_libraries(state)
    assert [draw() for _ in range(3)] == expected


def test_the_public_functions_see_what_is_written() -> None:
    random.seed(1)
    np.random.seed(1)
    np.random.randn()
    random.gauss(0, 1)
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    state = read_libraries()
    random.seed(2)
    np.random.seed(2)
    write_libraries(state)
    assert random.getstate() == python
    found = np.random.get_state(legacy=False)
    assert found["state"]["key"].tolist() == numpy["state"]["key"].tolist()
    assert (found["state"]["pos"], found["has_gauss"], found["gauss"]) == (
        numpy["state"]["pos"],
        numpy["has_gauss"],
        numpy["gauss"],
    )


def test_streams_that_have_not_changed_are_not_read_here() -> None:
    """On the interpreters we test, the quick way is the one in use."""
    numpy = rng._numpy_stream()
    assert numpy is not None
    for stream, public in (rng._python, random.getstate), (numpy, np.random.get_state):
        assert stream.read != public
        assert "_watched" in stream.read.__qualname__


def test_a_mark_that_is_elsewhere_is_not_used() -> None:
    stream = rng.stream_of(random.Random(3))
    assert rng._watched(stream, id(stream), lambda _: b"", int) is stream


def test_random_by_its_public_functions() -> None:
    generator = random.Random(3)
    generator.gauss(0, 1)
    stream = rng.stream_of(generator)
    state = stream.read()
    expected = [generator.gauss(0, 1), generator.random(), generator.gauss(0, 1)]
    stream.write(state)
    assert [generator.gauss(0, 1), generator.random(), generator.gauss(0, 1)] == expected


def test_numpy_by_its_public_functions() -> None:
    generator = np.random.RandomState(3)
    generator.randn()
    stream = rng.stream_of(generator)
    state = stream.read()
    expected = generator.randn(5).tolist()
    stream.write(state)
    assert generator.randn(5).tolist() == expected


def test_another_bit_generator_behind_the_functions_of_numpy() -> None:
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        state = read_libraries()
        expected = np.random.rand(3).tolist()
        write_libraries(state)
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(original)
    state = read_libraries()
    expected = np.random.rand(3).tolist()
    write_libraries(state)
    assert np.random.rand(3).tolist() == expected


def test_a_bit_generator_that_is_exchanged_before_backward_is_an_error() -> None:
    original = np.random.get_bit_generator()
    x = torch.ones(3, requires_grad=True)
    out = recollect.checkpoint(lambda x: (x * np.random.rand()).sin(), x)
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        with pytest.raises(recollect.CheckpointError, match="bit generator was exchanged"):
            out.sum().backward()
    finally:
        np.random.set_bit_generator(original)


def test_numpy_is_not_imported_for_it() -> None:
    program = """
import sys
sys.modules["numpy"] = None  # as if it were not installed
del sys.modules["numpy"]
import random
from recollect.state.rng import read_libraries, write_libraries
for name in [name for name in sys.modules if name.partition(".")[0] == "numpy"]:
    del sys.modules[name]
state = read_libraries()
assert state[1] is None and "numpy" not in sys.modules
write_libraries(state)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_states_are_copied_once_for_all_that_do_not_draw(draw: Callable[[], Any]) -> None:
    before = read_libraries()
    again = read_libraries()
    assert all(a is b for a, b in zip(before, again, strict=True))
    draw()
    assert read_libraries() != before
    write_libraries(before)
    assert read_libraries() == before


def test_another_seed_at_the_same_position_is_another_state() -> None:
    random.seed(1)
    np.random.seed(1)
    first = read_libraries()
    random.seed(2)
    np.random.seed(2)
    second = read_libraries()
    assert all(a != b for a, b in zip(first, second, strict=True))


# --- device types, and the random states of devices: the helpers of `torch.utils.checkpoint` ------


@pytest.fixture(autouse=True)
def restored_default() -> Iterator[None]:
    before = recollect.DefaultDeviceType.get_device_type()
    yield
    recollect.DefaultDeviceType.set_device_type(before)


def test_default_is_the_accelerator_of_the_machine() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    expected = accelerator.type if accelerator else "cpu"
    assert recollect.DefaultDeviceType.get_device_type() == expected


def test_default_can_be_set_and_is_shared_with_compat() -> None:
    recollect.DefaultDeviceType.set_device_type("foo")
    assert recollect.compat.DefaultDeviceType.get_device_type() == "foo"
    assert _infer_device_type(torch.ones(2), 3) == "foo"


def test_tensors_are_found_in_nested_structures() -> None:
    assert _infer_device_type(1, [{"a": torch.ones(2, device="meta")}]) == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_wins_with_a_warning() -> None:
    tensors = torch.ones(2, device="meta"), torch.ones(2, device="cuda")
    with pytest.warns(UserWarning, match="at least two types of devices"):
        assert _infer_device_type(*tensors) == "cuda"


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
