"""Tensors that a region changes: put back for the rerun, and left as after one forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect.state import buffers
from recollect.state.buffers import BufferState
from recollect.state.reachable import Writes
from recollect.state.tensors import LARGE
from tests._support import ALL, Run, assert_transparent, leaf, rerun


class Holder(nn.Module):
    """A module with one buffer, read and then changed by its forward."""

    def __init__(self, size: int, change: Callable[[Holder], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.5))
        self.register_buffer("state", torch.arange(size, dtype=torch.float32))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        out = (x * self.weight * self.state[:3].clone()).sin()
        with torch.no_grad():
            self.change(self)
        return out * self.state[:3].clone()


def _in_place(module: Any) -> None:
    module.state.mul_(0.5).add_(1)


def _through_data(module: Any) -> None:
    module.state.data.mul_(0.5).add_(1)


def _through_numpy(module: Any) -> None:
    module.state.numpy()[:] += 1


def _assigned(module: Any) -> None:
    module.state = module.state * 0.5 + 1


def _assigned_and_in_place(module: Any) -> None:
    module.state.add_(1)
    module.state = module.state * 0.5


def _through_a_view(module: Any) -> None:
    module.state[1:].add_(2)


CHANGES = [
    _in_place,
    _through_data,
    _through_numpy,
    _assigned,
    _assigned_and_in_place,
    _through_a_view,
]


@ALL
@pytest.mark.parametrize("size", [3, LARGE // 4 + 1], ids=["small", "large"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_buffer_is_changed_once(run: Run, change: Callable[[Any], None], size: int) -> None:
    def train(run: Run) -> Any:
        module, x = Holder(size, change), leaf(3)
        first = run(module, x)
        second = run(module, x)  # before the first has gone backward
        (first + second).sum().backward()
        third = run(module, x)
        third.sum().backward()
        return first, second, third, x.grad, module.weight.grad, module.state

    assert_transparent(train, run)


@ALL
def test_the_version_of_a_buffer_is_that_of_one_forward(run: Run) -> None:
    versions = {}
    for name, way in (("plain", lambda f, x: f(x)), ("checkpointed", run)):
        module = Holder(3, _in_place)
        way(module, leaf(3)).sum().backward()
        versions[name] = module.state._version
    assert versions["checkpointed"] == versions["plain"]


@ALL
def test_a_failing_rerun_leaves_the_buffer_as_it_is(run: Run) -> None:
    def change(module: Any) -> None:
        _in_place(module)
        if recollect.is_recomputing():
            raise ValueError("in the rerun")

    module, x = Holder(3, change), leaf(3)
    out = run(module, x)
    state, version = module.state.clone(), module.state._version
    with pytest.raises(ValueError, match="in the rerun"):
        out.sum().backward()
    assert torch.equal(module.state, state)
    assert module.state._version == version


@ALL
def test_a_counter_in_a_closure_counts_once(run: Run) -> None:
    def train(run: Run) -> Any:
        counter, x = torch.zeros(()), leaf(3)

        def count(x: Tensor) -> Tensor:
            counter.add_(1)
            return (x * counter.clone()).sin()

        out = run(count, run(count, x))
        out.sum().backward()
        return out, x.grad, counter

    assert_transparent(train, run)


def test_a_large_buffer_that_changes_for_the_first_time_is_loud() -> None:
    changes: list[bool] = []
    module = Holder(LARGE // 4 + 1, lambda m: m.state.add_(1) if changes else None)
    x = leaf(3)
    for _ in range(2):
        rerun(module, x).sum().backward()
    changes.append(True)
    out = rerun(module, x)
    with pytest.raises(recollect.CheckpointError, match="buffer `state`"):
        out.sum().backward()
    expected = module.state + 1
    rerun(module, x).sum().backward()  # it is known to change by now
    assert torch.equal(module.state, expected)


def test_an_unchanged_large_buffer_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Holder(LARGE // 4 + 1, lambda m: None)
    rerun(module, leaf(3)).sum().backward()
    copied: list[Any] = []
    copies = buffers._copies
    monkeypatch.setattr(buffers, "_copies", lambda t: copied.extend(t) or copies(t))
    rerun(module, leaf(3)).sum().backward()
    assert copied == []


def test_large_buffers_are_forgotten_with_their_module() -> None:
    known = len(buffers._large)
    module = Holder(LARGE // 4 + 1, _in_place)
    rerun(module, leaf(3)).sum().backward()
    assert len(buffers._large) == known + 1
    del module
    assert len(buffers._large) == known


def test_modes_do_not_see_the_copying() -> None:
    class Note(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.ops.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []
    for run in (lambda f, x: f(x), rerun):
        module, x = Holder(3, _in_place), leaf(3)
        with Note() as note:
            run(module, x)
        seen.append(note.ops)
    assert seen[0] == seen[1]


def test_a_state_that_is_restored_inside_itself() -> None:
    """A region whose rerun starts a backward that reruns it again."""
    buffers: dict[str, Any] = {"state": torch.zeros(2)}
    state = BufferState([(buffers, "state", Writes.SEEN)], [])
    buffers["state"].add_(1)
    state.settle()
    buffers["state"].add_(1)
    with ExitStack() as outer:
        state.restore(outer)
        assert buffers["state"].tolist() == [0, 0]
        buffers["state"].add_(5)
        with ExitStack() as inner:
            state.restore(inner)
            assert buffers["state"].tolist() == [0, 0]
        assert buffers["state"].tolist() == [5, 5]
    assert buffers["state"].tolist() == [2, 2]


@pytest.fixture
def nested() -> Run:
    def run(function: Any, *args: Any) -> Any:
        return rerun(lambda *inner: rerun(function, *inner), *args)

    return run


def test_nested_regions_change_it_once(nested: Run) -> None:
    def train(run: Run) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
        x = leaf(4, 3)
        run(model, x).sum().backward()
        return x.grad, list(model.buffers()), [p.grad for p in model.parameters()]

    assert_transparent(train, nested)


class Quantized(nn.Module):
    """A module that quantizes anew what it multiplies with."""

    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", _quantized(1.0))

    def forward(self, x: Tensor) -> Tensor:
        out = (x * self.scales.dequantize()).sin()
        self.scales.copy_(_quantized(2.0))
        return out


def _quantized(value: float) -> Tensor:
    return torch.quantize_per_tensor(torch.full((3,), value), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch will remove them
@ALL
def test_a_quantized_buffer_is_put_back(run: Run) -> None:
    def scenario(run: Run) -> Any:
        module, x = Quantized(), leaf(2, 3)
        run(module, x).sum().backward()
        return x.grad, module.scales.dequantize()

    assert_transparent(scenario, run)
