"""Set-up of the tests of plans."""

from collections.abc import Iterator
from typing import Any

import pytest

from recollect.planning import planner
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
def _no_blocks() -> Iterator[None]:
    """Have no plan depend on what happens to be quicker here: of blocks there are tests apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_NOTICEABLE", float("inf"))
        yield


@pytest.fixture(scope="module")
def fixed_times() -> Iterator[None]:
    """Have every op cost what its name and its sizes say, however busy the machine is."""
    profiled = planner._profiled

    def with_fixed(*step: Any) -> Any:
        return with_fixed_times(profiled(*step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_profiled", with_fixed)
        patch.setattr(planner, "with_overhead", lambda profile, *_: profile)
        yield
