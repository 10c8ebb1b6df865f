"""How often a schedule is compiled for a budget, if peaks are not as simulated."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from recollect.compiled.planner import CompiledPlanner, CompiledTrials
from recollect.graph.graph import Schedule
from recollect.graph.simulate import simulate, simulate_plain
from recollect.planning.solving.solve import Solver
from tests.planning._graphs import decoder

GRAPH = decoder(4)
PLAIN = simulate_plain(GRAPH).peak


class Trials(CompiledTrials):
    """Compile nothing. ``takes``: what a step takes that is simulated to take so much."""

    def __init__(self, plain_peak: int, takes: Callable[[int], int]) -> None:
        site = SimpleNamespace(compiler=SimpleNamespace(is_fused=True))
        self.observed = SimpleNamespace(sites=[site])  # type: ignore[assignment]
        self.profile = SimpleNamespace(graph=GRAPH, plain_peak=plain_peak)  # type: ignore[assignment]
        self.expected = {}
        self._takes = takes

    def _try(self, schedule: Schedule) -> int:
        return self._takes(simulate(GRAPH, schedule).peak)


def tried(room: int, takes: Callable[[int], int], plain_peak: int = PLAIN) -> list[int]:
    """The peaks of the schedules that are compiled until one is chosen."""
    planner = CompiledPlanner.__new__(CompiledPlanner)
    planner.trials, planner.solver = Trials(plain_peak, takes), Solver(GRAPH, rough=True)
    chosen = planner._fastest_schedule(room, planner.solver.solve)
    assert chosen is not None
    assert planner.trials.expected[chosen] <= room
    return [*planner.trials.expected.values()]


@pytest.mark.parametrize("fraction", [0.9, 0.8])
def test_a_plain_step_that_takes_less_than_simulated_tells_of_others(fraction: float):
    plain = int(0.78 * PLAIN)
    room = int(fraction * plain)
    peaks = tried(room, lambda simulated: int(0.84 * simulated), plain)
    assert len(peaks) == 1
    assert peaks[0] > 0.9 * room


@pytest.mark.parametrize("fraction", [0.9, 0.8, 0.7])
def test_fused_code_that_takes_a_little_more_is_compiled_once(fraction: float):
    assert len(tried(int(fraction * PLAIN), lambda simulated: int(1.008 * simulated))) == 1


def test_no_more_is_compiled_than_three_times_once_something_fits():
    room = int(0.74 * PLAIN)
    assert tried(room, lambda _: int(0.9 * room)) == 3 * [int(0.9 * room)]


def test_more_is_compiled_while_nothing_fits():
    room, peaks = int(0.9 * PLAIN), iter([1.06, 1.04, 1.02, 1.0])
    assert len(tried(room, lambda _: int(next(peaks) * room))) == 4
