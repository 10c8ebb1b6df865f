"""Set-up of the tests of plans."""

from collections.abc import Iterator

import pytest

from recollect.planning import planner


@pytest.fixture(scope="module")
def no_bound() -> Iterator[None]:
    """Have no time spent on what no plan can be below: others test that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "lower_bound", lambda graph, *_, **__: graph.plain_seconds)
        yield
