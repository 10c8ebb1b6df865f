"""Set-up of the tests of plans."""

import itertools
from collections.abc import Iterator

import pytest

from recollect.planning import planner, trial, ways
from recollect.planning.recording import prices, sampling
from recollect.planning.solving import solve
from tests.planning._clock import MS, Clock
from tests.planning._models import with_fixed_times


@pytest.fixture(scope="module")
def no_bound() -> Iterator[None]:
    """Have no time spent on what no plan can be below: others test that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            planner, "lower_bound", lambda graph, *_, **__: graph.plain_seconds + graph.engine_cost
        )
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_modules() -> Iterator[None]:
    """Have no plan depend on what happens to be quicker here: of modules there are tests apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "_module_costs", lambda *_: {})
        yield


#: Where times are what is tested; and where the solver is.
_OF_TIMES = (
    "test_sampling",
    "test_prices",
    "test_trial",
    "test_cuda",
    "test_module_regions",
)
_OF_SOLVING = ("test_solve", "test_bound", "test_exact", "test_budgets", "test_cuda")


@pytest.fixture(autouse=True, scope="module")
def _fixed_times(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have every op cost what its name and its sizes say, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith(_OF_TIMES):
            # In place of what the engine costs, which is measured too.
            patch.setattr(trial, "with_overhead", lambda profile, *_: with_fixed_times(profile))
            patch.setattr(ways, "_LEAST", 2)
            patch.setattr(ways, "_MOST", 2)
        yield


@pytest.fixture(autouse=True, scope="module")
def _little_solving(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have plans made in little time, where it does not matter how good they are."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith(_OF_SOLVING):
            patch.setattr(solve, "_WORK", 10_000)
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Where everything takes a millisecond, and nothing was measured before."""
    made = Clock(itertools.repeat(MS))
    monkeypatch.setattr(sampling, "time", made)
    monkeypatch.setattr(prices, "_known", {})
    return made
