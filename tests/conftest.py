"""Set-up of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils import _python_dispatch

# The tensors of the tests are small: a second thread costs more than it gives, and on a busy
# machine the two wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_mode_is_left_behind() -> Iterator[None]:
    """Fail the test that leaves torch's flags set, and not a later one that compiles something.

    They are the process's: modes of torch's that overlap in two threads put back each other's.
    """
    yield
    flags = [name for name in vars(_python_dispatch) if name.startswith("_is_in")]
    assert [name for name in flags if getattr(_python_dispatch, name)] == []
