"""Set-up of all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch

from recollect._torch.devices import free_cuda_workspaces

# The tensors of the tests are small: a second thread costs more than it gives, and on a busy
# machine the two wait for each other.
torch.set_num_threads(1)

# For devices that are not there, torch notes the whole stack whenever a seed is set: a tenth of the
# time of tests that set thousands.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    if not _devices.is_available():
        _devices.manual_seed_all = lambda seed: None

with suppress(ModuleNotFoundError):
    from hypothesis import settings

    # The same examples every time; and on a busy machine any of them may take long.
    settings.register_profile("tests", derandomize=True, database=None, deadline=None)
    settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_is_not_scanned() -> None:
    """Spare the garbage collector what was imported and collected: half a million objects.

    Many tests collect garbage, or look for a module among all objects. They see what was made since
    their file began.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let no test that needs a GPU find in memory what those before it have left there."""
    if item.get_closest_marker("gpu") is not None and torch.cuda.is_initialized():
        _free_device_memory()


def _free_device_memory() -> None:
    gc.collect()
    torch.cuda.synchronize()
    free_cuda_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.fixture(autouse=True)
def _no_mode_is_left_behind() -> Iterator[None]:
    """Fail the test that leaves torch's flags set, and not a later one that compiles something.

    They are the process's: modes of torch's that overlap in two threads put back each other's.
    """
    yield
    flags = [name for name in vars(_python_dispatch) if name.startswith("_is_in")]
    assert [name for name in flags if getattr(_python_dispatch, name)] == []


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The package, with the state that it keeps for the process as in a new one."""
    package = pytest.importorskip("accelerate")
    package.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield package
    package.state.AcceleratorState._reset_state(reset_partial_state=True)
