"""The largest batch: it fits, the next one does not, and nothing is left changed.

Bytes are those of the allocator's events, counted here and not by what planned.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.modules import OPTIONS
from recollect.planning.recording.record import record_step
from recollect.planning.recording.step import TrainingStep
from recollect.planning.sizes import forecast
from tests._support import assert_identical, measure
from tests.planning._models import (
    ConvNet,
    Custom,
    Decoder,
    MoE,
    call,
    squares,
    static_bytes,
    tokens,
    with_fixed_times,
)

pytestmark = pytest.mark.usefixtures("no_bound", "_one_thread", "_fixed_recordings")

Make = Callable[[int], Any]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _fixed_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ops cost the same at every run: what is solved depends on it."""
    planner_of = forecast.Planner.of

    def fixed(*args: Any, record: Any = record_step, **options: Any) -> Any:
        return planner_of(
            *args,
            record=lambda step, link: with_fixed_times(record(step, link)),
            **options,
        )

    monkeypatch.setattr(forecast.Planner, "of", fixed)


def mlp() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(4))
    return nn.Sequential(*blocks)


class Recurrent(nn.Module):
    """Only the library knows what its layers allocate, which is no line in the size."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 48)
        self.cells = nn.LSTM(48, 48, batch_first=True, **options)
        self.head = nn.Linear(48 * (1 + self.cells.bidirectional), 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(x))[0])


CASES: dict[str, tuple[Callable[[], nn.Module], Make, str]] = {
    "decoder": (lambda: Decoder(1), lambda n: tokens(n, 16), "512KiB"),
    "sequences": (lambda: Decoder(1), lambda n: tokens(2, n), "512KiB"),
    "conv": (ConvNet, lambda n: torch.randn(n, 3, 16, 16), "2MiB"),
    "mlp": (mlp, lambda n: torch.randn(n, 32), "600KiB"),
    "custom": (Custom, lambda n: (torch.randn(n, 48),), "200KiB"),
    # At these budgets, forecasts are off by less than a percent: they do not expect what fits.
    "two ways": (
        lambda: Recurrent(num_layers=2, bidirectional=True),
        lambda n: torch.randint(0, 50, (n, 32)),
        "4280 kB",
    ),
    "dropout": (
        lambda: Recurrent(num_layers=3, dropout=0.1),
        lambda n: torch.randint(0, 50, (n, 32)),
        "4 MB",
    ),
}


def peak_of(model: nn.Module, batch: Any, optimizer: Any = None) -> int:
    """The highest peak of three steps."""
    peaks = []
    for _ in range(3):
        model.zero_grad()

        def backward(out: Tensor) -> None:
            squares(out).backward()
            if optimizer is not None:
                optimizer.step()

        base = static_bytes(model, optimizer)
        peaks.append(base + measure(lambda: call(model, batch), backward, warm_up=False).peak)
    model.zero_grad()
    return max(peaks)


@pytest.mark.parametrize("name", CASES)
def test_the_size_fits_and_the_next_one_does_not(name: str) -> None:
    make, make_batch, budget = CASES[name]
    torch.manual_seed(0)
    model = make()
    found = recollect.largest_batch(model, make_batch, budget, loss=squares)
    assert found.limited_by == "memory"
    assert found.size > found.plain_size > 0
    # It fits, as counted here.
    with found.plan.applied(model):
        assert peak_of(model, make_batch(found.size)) <= found.budget
    # The next one does not, whatever the plan; and the plain size is the largest without one.
    after = recollect.frontier(model, make_batch(found.size + 1), loss=squares)
    assert after.least > found.budget
    assert peak_of(model, make_batch(found.plain_size)) <= found.budget
    assert peak_of(model, make_batch(found.plain_size + 1)) > found.budget


@pytest.mark.slow
def test_shapes_that_depend_on_data_are_recorded_at_each_size() -> None:
    torch.manual_seed(0)
    model, data = MoE(), torch.randn(64, 16, 32)
    found = recollect.largest_batch(model, lambda n: data[:n], "600KiB", loss=squares)
    assert found.size > found.plain_size > 0
    with found.plan.applied(model):
        assert peak_of(model, data[: found.size]) <= found.budget
    after = recollect.frontier(model, data[: found.size + 1], loss=squares)
    assert after.least > found.budget * 0.97  # of which plans leave 3% free


class Wider(nn.Module):
    """Runs other ops from some size on: what is learned from smaller ones does not hold there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return (x.exp().sin() * x.cos()).relu() if len(x) > 60 else x


def test_a_size_that_runs_other_ops_is_recorded_itself() -> None:
    torch.manual_seed(0)
    model = Wider()
    make_batch = CASES["mlp"][1]
    found = recollect.largest_batch(model, make_batch, "600KiB", loss=squares)
    assert found.plain_size <= 60 < found.size
    with found.plan.applied(model):
        assert peak_of(model, make_batch(found.size)) <= found.budget
    after = recollect.frontier(model, make_batch(found.size + 1), loss=squares)
    assert after.least > found.budget


def test_multiples_and_the_optimizer_count() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    make_batch = CASES["mlp"][1]
    options: dict[str, Any] = {"loss": squares, "optimizer": optimizer}
    found = recollect.largest_batch(model, make_batch, "700KiB", multiple_of=8, **options)
    assert found.size % 8 == found.plain_size % 8 == 0
    assert all(point.size % 8 == 0 for point in found.points)
    assert recollect.frontier(model, make_batch(found.size + 8), **options).least > found.budget
    with found.plan.applied(model):
        assert peak_of(model, make_batch(found.size), optimizer) <= found.budget
    alone = recollect.largest_batch(model, make_batch, "700KiB", multiple_of=8, loss=squares)
    assert alone.size > found.size


def test_no_size_fits_without_a_plan() -> None:
    torch.manual_seed(0)
    model, make_batch = mlp(), lambda n: torch.randn(16 * n, 32)
    least = recollect.frontier(model, make_batch(1), loss=squares)
    budget = (least.least + least.plain_peak) // 2
    found = recollect.largest_batch(model, make_batch, budget, loss=squares)
    assert found.plain_size == 0
    assert found.size >= 1
    assert recollect.frontier(model, make_batch(found.size + 1), loss=squares).least > budget
    assert "Without a plan no size fits" in recollect.report.page.sizes_page(found)


def test_sizes_end_at_most() -> None:
    found = recollect.largest_batch(mlp(), CASES["mlp"][1], "1GiB", loss=squares, most=21)
    assert (found.size, found.plain_size, found.limited_by) == (21, 21, "most")
    assert found.time_per_sample == found.plain_time_per_sample
    found = recollect.largest_batch(
        mlp(), CASES["mlp"][1], "1GiB", loss=squares, most=21, multiple_of=4
    )
    assert found.size == 20


def test_a_model_without_memory_is_predicted() -> None:
    with torch.device("meta"):
        model = mlp()
    make_batch = lambda n: torch.empty(n, 32, device="meta")  # noqa: E731
    found = recollect.largest_batch(model, make_batch, "600KiB", loss=squares)
    assert found.size > found.plain_size > 0
    assert found.plan.measured_peak is None
    here = recollect.largest_batch(mlp(), CASES["mlp"][1], "600KiB", loss=squares)
    assert abs(found.size - here.size) <= 0.05 * here.size


# --- time -----------------------------------------------------------------------------------------


def takes(monkeypatch: pytest.MonkeyPatch, longer: Callable[[int], float]) -> list[tuple[str, int]]:
    """Have plain steps take a millisecond for each sample, and planned ones ``longer`` times that.

    Returns what was timed.
    """
    timed: list[tuple[str, int]] = []

    def seconds(step: TrainingStep) -> float:
        step.run()
        size = len(step.args[0])
        is_planned = OPTIONS in vars(step.model)
        timed.append(("planned" if is_planned else "plain", size))
        return 1e-3 * size * (longer(size) if is_planned else 1.0)

    monkeypatch.setattr(TrainingStep, "seconds", seconds)
    return timed


def test_time_limits_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, lambda size: 1 + size / 1000)
    model, make_batch = mlp(), CASES["mlp"][1]
    free = recollect.largest_batch(model, make_batch, "600KiB", loss=squares)
    middle = (free.plain_size + free.size) // 2 // 8 * 8
    limit = 1 + (middle + 0.5) / 1000
    found = recollect.largest_batch(
        model, make_batch, "600KiB", loss=squares, time=limit, multiple_of=8
    )
    assert found.limited_by == "time"
    assert found.size == middle
    assert found.slowdown == pytest.approx(1 + middle / 1000)
    assert found.slowdown <= limit
    assert found.plain_time_per_sample == pytest.approx(1e-3)


def test_what_no_plan_is_fast_enough_for_is_the_plain_size(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, lambda _: 5.0)
    found = recollect.largest_batch(mlp(), CASES["mlp"][1], "600KiB", loss=squares, time=1.5)
    assert found.size == found.plain_size
    assert found.limited_by == "time"
    assert found.slowdown == 1.0
    assert found.plan.predicted_peak == found.plan.plain_peak <= found.budget


def test_a_limit_that_is_kept_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, lambda _: 1.1)
    found = recollect.largest_batch(mlp(), CASES["mlp"][1], "600KiB", loss=squares, time=1.2)
    free = recollect.largest_batch(mlp(), CASES["mlp"][1], "600KiB", loss=squares)
    assert found.size == free.size > free.plain_size
    assert found.limited_by == "memory"


def test_no_step_runs_plain_beyond_the_size_that_fits_so(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = takes(monkeypatch, lambda _: 1.1)
    found = recollect.largest_batch(mlp(), CASES["mlp"][1], "600KiB", loss=squares)
    assert max(size for way, size in timed if way == "plain") == found.plain_size
    assert max(size for way, size in timed if way == "planned") == found.size


# --- what is left ---------------------------------------------------------------------------------


def test_everything_is_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ConvNet(), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(4, 3, 16, 16)
    squares(model(x)).backward()
    optimizer.step()
    state = [model.state_dict(), [p.grad for p in model.parameters()], optimizer.state_dict()]
    before = copy.deepcopy((*state, torch.get_rng_state(), random.getstate()))

    def make_batch(n: int) -> Tensor:
        random.random()
        return torch.randn(n, 3, 16, 16)

    recollect.largest_batch(model, make_batch, "2MiB", loss=squares, optimizer=optimizer)
    assert_identical((*state, torch.get_rng_state(), random.getstate()), before)
    assert OPTIONS not in vars(model)


def test_the_gradients_under_the_plan_are_those_of_the_plain_model() -> None:
    torch.manual_seed(0)
    model, make_batch = nn.Sequential(mlp(), nn.Dropout(0.1), mlp()), CASES["mlp"][1]
    found = recollect.largest_batch(model, make_batch, "900KiB", loss=squares)
    assert found.size > found.plain_size
    batch = make_batch(found.size)
    results = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        squares(model(batch)).backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
        if len(results) == 1:
            found.plan.apply(model)
    assert_identical(*results)


# --- what is shown --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown() -> recollect.LargestBatch:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        takes(patch, lambda _: 1.25)
        return recollect.largest_batch(mlp(), CASES["mlp"][1], "600KiB", loss=squares)


def test_it_is_a_value(shown: recollect.LargestBatch) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        shown.size = 3  # type: ignore[misc]
    assert shown.slowdown == pytest.approx(1.25)
    assert shown.samples_per_second == pytest.approx(800)
    sizes = [point.size for point in shown.points]
    assert sizes == sorted(set(sizes))
    assert {shown.size, shown.plain_size, shown.size + 1} <= {*sizes}
    assert [point.fits for point in shown.points] == [size <= shown.size for size in sizes]


def test_the_table(shown: recollect.LargestBatch) -> None:
    text = str(shown)
    assert text.startswith("Largest batch of Sequential on cpu")
    assert max(map(len, text.splitlines())) <= 100
    (line,) = [line for line in text.splitlines() if line.endswith("chosen")]
    assert line.split()[0] == str(shown.size)
    assert "+25.0%" in line
    assert "\n" not in repr(shown)
    assert f"size {shown.size} in 600.00 KiB" in repr(shown)


def test_the_page(shown: recollect.LargestBatch, tmp_path: Any) -> None:
    shown.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>Largest batch of Sequential on cpu</title>" in text
    assert 'id="sizes"' in text
    assert f'"chosen":{shown.size}' in text
    assert "A sample takes 1.25 ms under the plan, and 1.00 ms without." in text
    assert "Sizes that are marked as predicted were not run." in text
    assert f'<tr class="chosen"><th scope="row">{shown.size}</th>' in text


# --- errors ---------------------------------------------------------------------------------------


def test_a_budget_that_no_size_fits() -> None:
    with pytest.raises(
        recollect.InfeasibleBudget, match="not even a batch of size 4 fits: no plan"
    ) as caught:
        recollect.largest_batch(mlp(), CASES["mlp"][1], "100KiB", loss=squares, multiple_of=4)
    least = recollect.frontier(mlp(), torch.randn(4, 32), loss=squares).least
    assert caught.value.least == least


@pytest.mark.parametrize(
    ("make_batch", "error", "said"),
    [
        (torch.randn(4, 32), TypeError, "make_batch should be a function of a size"),
        (lambda: torch.randn(4, 32), TypeError, "does not take make_batch.1.: too many positional"),
        (lambda n: None, TypeError, r"make_batch\(1\) returned NoneType without"),
        (lambda n: n, TypeError, r"make_batch\(1\) returned int without"),
        (lambda n: torch.randn(4, 32), ValueError, "make_batch: the tensors of make_batch"),
        (lambda n: torch.randn(-(-n // 8) * 8, 32), ValueError, "multiple_of=8"),
        (lambda n: iter([torch.randn(n, 32)]), TypeError, "iterator"),
    ],
)
def test_what_makes_no_batches(make_batch: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        recollect.largest_batch(mlp(), make_batch, "600KiB")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"time": 0.9}, ValueError, "time=0.9 should be 1 or more"),
        ({"time": float("nan")}, ValueError, "time=nan"),
        ({"time": "fast"}, TypeError, "time should be a multiple"),
        ({"budget": 0.5}, ValueError, "budget=0.5 is a fraction"),
        ({"budget": "12G"}, ValueError, "may mean"),
        ({"multiple_of": 0}, ValueError, "multiple_of should be 1 or more"),
        ({"most": 2.5}, TypeError, "most should be a whole number"),
        ({"most": 7, "multiple_of": 8}, ValueError, "most=7 is less than multiple_of=8"),
        ({"progress": "yes"}, TypeError, "progress should be"),
        ({"offload": "always"}, ValueError, "offload should be"),
    ],
)
def test_arguments_that_mean_nothing(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        recollect.largest_batch(mlp(), CASES["mlp"][1], **({"budget": "600KiB"} | options))


def test_models_that_cannot_be_planned() -> None:
    with pytest.raises(TypeError, match=r"model should be an nn\.Module"):
        recollect.largest_batch("model", CASES["mlp"][1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameters"):
        recollect.largest_batch(nn.GELU(), CASES["mlp"][1], "1MiB")
    with pytest.raises(ValueError, match="requires a gradient"):
        recollect.largest_batch(mlp().requires_grad_(False), CASES["mlp"][1], "1MiB")


def test_progress_names_the_size() -> None:
    told: list[str] = []
    found = recollect.largest_batch(
        mlp(), CASES["mlp"][1], "600KiB", loss=squares, progress=lambda what, _: told.append(what)
    )
    assert told[0] == "size 1: recording a step"
    assert f"size {found.size}: trying the plan" in told
