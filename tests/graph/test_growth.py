"""Graphs at other sizes than recorded: to the byte as if they had been recorded there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from recollect.graph.graph import Graph
from recollect.graph.growth import Growth, is_same_step
from recollect.graph.simulate import simulate_plain
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request
from recollect.planning.recording.record import record_under, record_unrun
from recollect.planning.sizes.forecast import TrendForecast, find_largest
from tests.planning._models import ConvNet, Decoder, squares, tokens


class Scores(nn.Module):
    """Memory that is quadratic in the length of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (y @ y.transpose(1, 2)).softmax(-1) @ y


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], tuple[int, ...]]] = {
    "samples": (lambda: Decoder(1), lambda n: tokens(n, 16), (1, 2, 4, 19)),
    "lengths": (lambda: Decoder(1), lambda n: tokens(2, n), (2, 4, 8, 37)),
    "quadratic": (Scores, lambda n: torch.randn(2, n, 8), (2, 4, 8, 37)),
    "conv": (ConvNet, lambda n: torch.randn(n, 3, 16, 16), (8, 12, 16, 40)),
}


def graph_of(model: nn.Module, batch: Any, **options: Any) -> Graph:
    return Planner.of(Request(model, batch, squares), **options).trials.profile.graph


def bytes_of(graph: Graph) -> list[Any]:
    return [
        [value.nbytes for value in graph.values],
        [storage.nbytes for storage in graph.storages],
        [(event.before, event.during) for event in graph.events],
        [(op.workspace, op.state) for op in graph.ops],
        graph.base,
    ]


@pytest.mark.parametrize("name", CASES)
def test_bytes_at_another_size_are_those_that_are_recorded_there(name: str) -> None:
    make, make_batch, (*sizes, other) = CASES[name]
    model = make()
    growth = Growth.of(((n,), graph_of(model, make_batch(n))) for n in sizes)
    assert growth is not None
    recorded = graph_of(model, make_batch(other))
    assert is_same_step(growth.graph_at((other,)), recorded)
    grown, expected = bytes_of(growth.graph_at((other,))), bytes_of(recorded)
    if name == "lengths":  # the workspace of attention on the CPU is made of blocks
        del grown[2:4], expected[2:4]
    assert grown == expected
    assert simulate_plain(growth.graph_at((other,))).peak == simulate_plain(recorded).peak
    assert bytes_of(growth.graph_at((sizes[-1],))) == bytes_of(growth.graphs[-1])


def test_what_was_not_run_is_the_same_step() -> None:
    model = Decoder(1)
    plain, unrun = (
        graph_of(model, tokens(3, 16), **options) for options in ({}, {"record": record_unrun})
    )
    assert is_same_step(plain, unrun)
    assert bytes_of(plain) == bytes_of(unrun)


def test_what_is_recorded_with_little_kept_has_the_same_ops() -> None:
    model = Decoder(1)
    plain, under = (
        graph_of(model, tokens(3, 16), **options) for options in ({}, {"record": record_under})
    )
    assert [op.key for op in plain.ops] == [op.key for op in under.ops]
    assert [value.nbytes for value in plain.values] == [value.nbytes for value in under.values]


def test_steps_that_differ_have_no_growth() -> None:
    one, two = (
        graph_of(nn.Sequential(*(nn.Linear(8, 8), nn.GELU())[:n]), torch.randn(2, 8))
        for n in (1, 2)
    )
    assert Growth.of([((1,), one), ((2,), two)]) is None
    assert Growth.of([((1,), one)]) is None
    assert Growth.of([((1,), one), ((2,), replace(one, varies=True))]) is None
    # Of several, those of the same step as the largest count.
    growth = Growth.of([((1,), two), ((2,), one), ((4,), one)])
    assert growth is not None
    assert list(growth.sizes) == [(2,), (4,)]


def test_times_grow_by_the_last_two_within_limits() -> None:
    graph = graph_of(nn.Linear(8, 8), torch.randn(2, 8))

    def timed(seconds: float) -> Graph:
        return replace(graph, events=[replace(e, seconds=seconds) for e in graph.events])

    def grown(*seconds: float) -> float:
        growth = Growth.of([((2,), timed(seconds[0])), ((4,), timed(seconds[1]))])
        assert growth is not None
        return growth.graph_at((8,)).events[0].seconds

    assert grown(2.0, 4.0) == pytest.approx(8.0)
    assert grown(3.0, 2.0) == 2.0  # never less
    assert grown(0.0, 9.0) == pytest.approx(27.0)
    assert Growth(((3,), (4,)), (timed(0.0), timed(1.0))).graph_at((8,)).events[0].seconds == 4.0


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("last", [0, 4, 12, 64, 96])
def test_the_largest_that_fits_is_found(unit: int, last: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= last

    assert find_largest(fits, 0, 100, unit) == last
    assert all(0 < size < 100 and size % unit == 0 for size in asked)
    assert len(asked) <= 2 * 7


def test_without_a_graph_peaks_lie_on_a_line() -> None:
    trend = TrendForecast(100, {2: 140, 4: 180}, {})
    assert trend.plain_peak(10) == 300
    assert TrendForecast(100, {2: 140}, {}).plain_peak(4) == 180
    assert trend.fastest(10, 299) is None
    assert trend.fastest(10, 300) is not None
