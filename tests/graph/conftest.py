"""Set-up of the tests of the graph: steps of models are recorded as in the tests of plans."""

from tests.planning.conftest import _fixed_times

__all__ = ["_fixed_times"]
