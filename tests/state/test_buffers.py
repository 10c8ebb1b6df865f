"""Tensors that a region changes: put back for the rerun, and left as after one forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect.state import buffers
from recollect.state.buffers import BufferState
from recollect.state.module_index import Writes
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


class Counts(nn.Module):
    """Counts in a tensor that is no buffer, and that torch does not know of."""

    def __init__(self, size: int, hold: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.holder = hold(torch.zeros(size))
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        (counter,) = tensors_in(self.holder)
        counter.add_(1)
        return (x * counter.clone()[:3]).sin()


def tensors_in(holder: Any) -> list[Tensor]:
    if isinstance(holder, Tensor):
        return [holder]
    held = vars(holder) if isinstance(holder, SimpleNamespace) else holder
    items = held.values() if isinstance(held, dict) else held
    return [tensor for item in items for tensor in tensors_in(item)]


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "attribute": lambda tensor: tensor,
    "list": lambda tensor: [tensor],
    "dict": lambda tensor: {"counts": tensor},
    "object": lambda tensor: SimpleNamespace(counts=tensor),
    "nested": lambda tensor: {"layers": [SimpleNamespace(counts=(tensor,))]},
}


@ALL
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_counter_among_attributes_counts_once(run: Run, hold: Callable[[Tensor], Any]) -> None:
    def train(run: Run) -> Any:
        module, x = nn.Sequential(Counts(3, hold)), leaf(3)
        out = run(module, run(module, x))
        out.sum().backward()
        return out, x.grad, tensors_in(module[0].holder)

    assert_transparent(train, run)


@ALL
def test_a_large_tensor_in_a_list_of_a_module_that_the_region_changes(run: Run) -> None:
    out = run(Counts(50_000, HOLDERS["list"]), leaf(3))
    with pytest.raises(recollect.CheckpointError, match="since the region began"):
        out.sum().backward()


def test_outputs_in_a_list_of_a_module_are_not_held() -> None:
    module, x = Counts(3, HOLDERS["list"]), leaf(3)
    module.outputs = [x * 2]
    output = weakref.ref(module.outputs[0])
    out = rerun(module, x)
    module.outputs.clear()
    assert output() is None
    out.sum().backward()


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


def test_backward_inside_the_region_counts_once() -> None:
    """The first rerun is in the middle of forward, when the batch is counted already."""
    norm = nn.BatchNorm1d(3)

    def region(x: Tensor) -> Tensor:
        out = norm(x).sin()
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        return out

    x = torch.randn(4, 3, requires_grad=True)
    recollect.checkpoint(region, x).sum().backward()
    twin = nn.BatchNorm1d(3)
    twin(x.detach())
    assert norm.num_batches_tracked == 1
    assert torch.equal(norm.running_mean, twin.running_mean)


# --- parameters, buffers and closures that change between forward and backward --------------------


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


@ALL
@pytest.mark.parametrize("calls", [1, 2])
def test_rows_that_max_norm_scales_are_scaled_once(run: Run, calls: int) -> None:
    """By rounding, a row that was scaled may still be too long: a rerun scaled it once more."""

    def train(run: Run) -> Any:
        torch.manual_seed(0)
        embedding, scale = nn.Embedding(64, 16, max_norm=1.0), leaf(16)
        region = lambda scale: (embedding(torch.arange(64)) * scale).sin()  # noqa: E731
        outs = [run(region, scale) for _ in range(calls)]
        torch.cat(outs).sum().backward()
        return outs, scale.grad, embedding.weight.grad, embedding.weight

    assert_transparent(train, run)


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
