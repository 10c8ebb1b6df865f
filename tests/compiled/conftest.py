"""Set-up of the tests of plans for compiled models."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recollect.compiled.part import NodeCosts
from recollect.planning import planner, ways
from recollect.planning.solving import solve


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Have kernels cost what their bytes say, and little time spent on times and bounds."""
    measured = NodeCosts.of_kernel

    def of_kernel(self: NodeCosts, node: Any, moved: int) -> tuple[float, int]:
        rate = 1e9 if any(name in str(node.target) for name in ("mm", "conv", "attent")) else 1e10
        return 4e-6 + moved / rate, measured(self, node, moved)[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeCosts, "of_kernel", of_kernel)
        patch.setattr(NodeCosts, "of_loop", lambda _, moved: 4e-6 + moved / 1e10)
        patch.setattr(planner, "lower_bound", lambda graph, *_, **__: graph.plain_seconds)
        patch.setattr(solve, "_WORK", 10_000)
        patch.setattr(ways, "_LEAST", 2)
        patch.setattr(ways, "_MOST", 2)
        patch.setattr("recollect.planning.recording.step._SAMPLES", 2)
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Kernels of many threads take memory for each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
