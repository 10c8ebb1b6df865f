"""Parameters, buffers and closures that change between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from tests._support import ALL, Run, assert_transparent, leaf, rerun


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("unused_mask", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) * self.mask).tanh())


USED = ["first.weight", "first.bias", "second.weight", "second.bias", "mask"]
UNUSED = ["unused.weight", "unused.bias", "unused_mask"]


def _tensor(net: Net, name: str) -> Tensor:
    return dict([*net.named_parameters(), *net.named_buffers()])[name]


@ALL
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", USED)
def test_changed_in_place(run: Run, name: str, early_stop: bool) -> None:
    net, x = Net(), leaf(2, 3)
    with recollect.set_checkpoint_early_stop(early_stop):
        out = run(net, x)
    with torch.no_grad():
        _tensor(net, name).add_(1)
    with pytest.raises(recollect.CheckpointError, match="modified by an inplace operation"):
        out.sum().backward()


@ALL
@pytest.mark.parametrize("name", UNUSED)
def test_what_the_region_does_not_use_may_change(run: Run, name: str) -> None:
    def train(run: Run) -> Any:
        net, x = Net(), leaf(2, 3)
        out = run(lambda x: net(x.clone()), x)
        with torch.no_grad():
            _tensor(net, name).add_(1)
        out.sum().backward()
        return x.grad, [p.grad for p in net.parameters() if p.grad is not None]

    assert_transparent(train, run)


@ALL
def test_the_last_operation_is_seen_too(run: Run) -> None:
    """A rerun may stop before the operation that uses what has changed."""
    layer, x = nn.Linear(3, 3, bias=False), leaf(2, 3)
    out = run(layer, x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(recollect.CheckpointError, match=r"version \d; expected version \d instead"):
        out.sum().backward()


@ALL
def test_an_error_that_the_function_swallows_is_raised_all_the_same(run: Run) -> None:
    net, x = Net(), leaf(2, 3)

    def careless(x: Tensor) -> Tensor:
        try:
            return net(x)
        except RuntimeError:
            return x.sin()

    out = run(careless, x)
    with torch.no_grad():
        net.first.weight.add_(1)
    with pytest.raises(recollect.CheckpointError):
        out.sum().backward()


@ALL
def test_the_guard_can_be_switched_off(run: Run) -> None:
    net, x = Net(), leaf(2, 3)
    with recollect.set_checkpoint_version_guard(False):
        out = run(net, x)
    with torch.no_grad():
        net.first.weight.add_(1)
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("value", [None, 0, "on"])
def test_the_switch_takes_a_bool(value: Any) -> None:
    with (
        pytest.raises(TypeError, match="enabled should be True or False"),
        recollect.set_checkpoint_version_guard(value),
    ):
        pass


def _emptied_and_filled(parameter: Tensor) -> None:
    data = parameter.data
    parameter.data = torch.empty(0)
    parameter.data = data


def _storage_freed_and_filled(parameter: Tensor) -> None:
    storage, values = parameter.untyped_storage(), parameter.detach().clone()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    parameter.data.copy_(values)


def _data_exchanged(parameter: Tensor) -> None:
    parameter.data = parameter.data.clone()


@ALL
@pytest.mark.parametrize("shard", [_emptied_and_filled, _storage_freed_and_filled, _data_exchanged])
def test_what_sharding_engines_do_is_no_change(run: Run, shard: Callable[[Tensor], None]) -> None:
    def train(run: Run) -> Any:
        net, x = Net(), leaf(2, 3)
        out = run(net, x)
        for parameter in net.parameters():
            shard(parameter)
        out.sum().backward()
        return x.grad, net.first.weight.grad

    assert_transparent(train, run)


@ALL
def test_a_parameter_that_is_replaced(run: Run) -> None:
    def train(run: Run) -> Any:
        net, x = Net(), leaf(2, 3)
        old, new = net.first.weight, nn.Parameter(torch.ones(3, 3))
        out = run(net, x)
        net.first.weight = new
        out.sum().backward()
        assert net.first.weight is new
        assert new.grad is None
        return x.grad, old.grad

    assert_transparent(train, run)


def test_functional_call() -> None:
    """The parameters that a region was called with are gone from the module in backward."""

    def train(run: Run) -> Any:
        net, x = Net(), leaf(2, 3)
        doubled = {name: (2 * p).detach().requires_grad_() for name, p in net.named_parameters()}
        wrapped = nn.Module()
        wrapped.net, wrapped.forward = net, lambda x: run(net, x)  # type: ignore[assignment]
        out = torch.func.functional_call(wrapped, {f"net.{k}": v for k, v in doubled.items()}, x)
        out.sum().backward()
        return out, x.grad, [v.grad for v in doubled.values() if v.grad is not None]

    assert_transparent(train, rerun)


@ALL
@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_in_a_closure(run: Run, size: int, requires_grad: bool) -> None:
    table, x = torch.ones(size, requires_grad=requires_grad), leaf(3)
    out = run(lambda x: (x * table[:3]).sin() * table[:3], x)
    with torch.no_grad():
        table.add_(1)
    with pytest.raises(recollect.CheckpointError, match="modified by an inplace operation"):
        out.sum().backward()


@ALL
def test_a_large_tensor_in_a_closure_that_the_region_changes(run: Run) -> None:
    table, x = torch.ones(500, 10), leaf(3)

    def change(x: Tensor) -> Tensor:
        table.add_(1)
        return (x * table[0, :3].clone()).sin()

    out = run(change, x)
    with pytest.raises(recollect.CheckpointError, match="since the region began"):
        out.sum().backward()


def test_embedding_that_normalises_its_weight() -> None:
    def train(run: Run) -> Any:
        embedding, scale = nn.Embedding(5, 3, max_norm=1.0), leaf(3)
        ids = torch.tensor([1, 2, 1])
        out = run(lambda scale: (embedding(ids) * scale).sin(), scale)
        out.sum().backward()
        return out, scale.grad, embedding.weight.grad, embedding.weight

    assert_transparent(train, rerun)


def test_inference_tensors_are_passed_over() -> None:
    with torch.inference_mode():
        table = torch.ones(3)
    module, x = nn.Linear(3, 3), leaf(2, 3)
    module.register_buffer("table", table)
    rerun(module, x).sum().backward()
    assert x.grad is not None


def test_the_parameter_is_named_by_its_path() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(3, 3)))
    out = rerun(model[1], leaf(2, 3))
    with torch.no_grad():
        model[1][0].weight.add_(1)
    with pytest.raises(recollect.CheckpointError, match=r"`1\.0\.weight` \[torch.FloatTensor"):
        out.sum().backward()
