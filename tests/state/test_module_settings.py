"""Plain attributes of modules that change between forward and backward."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import policy
from recollect.errors import InputChanged
from tests._support import ALL, CHECKPOINTS, Run, assert_transparent, collector_off, leaf, rerun


class Side(Enum):
    LEFT = 1.0
    RIGHT = 2.0


class Block(nn.Module):
    """A block with settings of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.5)
        self.adapters = nn.ParameterDict({name: torch.randn(4) for name in "ab"})
        self.active = "a"
        self.scale = 1.0
        self.side = Side.LEFT
        self.activation: Callable[[Tensor], Tensor] = torch.sin
        self.mask: Tensor | None = torch.rand(4)
        self.is_gated = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm(self.linear(x))) * self.adapters[self.active] * self.scale
        x = x * self.side.value
        if self.mask is not None:
            x = x * self.mask
        if self.is_gated:
            x = x * x.sigmoid()
        return self.dropout(x).exp()


def removed(block: Block) -> None:
    block.mask = None
    vars(block).pop("scale", None)
    type(block).scale = 3.0  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def class_as_it_was() -> Any:
    yield
    if "scale" in vars(Block):
        del Block.scale


CHANGES: dict[str, Callable[[Block], Any]] = {
    "dropout": lambda block: setattr(block.dropout, "p", 0.1),
    "eps": lambda block: setattr(block.norm, "eps", 1.0),
    "number": lambda block: setattr(block, "scale", 0.5),
    "name": lambda block: setattr(block, "active", "b"),
    "enumeration": lambda block: setattr(block, "side", Side.RIGHT),
    "function": lambda block: setattr(block, "activation", torch.tanh),
    "mask": lambda block: setattr(block, "mask", torch.rand(4)),
    "no mask": lambda block: setattr(block, "mask", None),
    "flag": lambda block: setattr(block, "is_gated", True),
    "another attribute": lambda block: setattr(block, "other", 3),
    "removed": removed,
}


@ALL
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_settings_are_those_of_the_call(change: Callable[[Block], Any], run: Run) -> None:
    def scenario(run: Run) -> Any:
        block, found = Block(), []
        for _ in range(2):
            x = leaf(3, 4)
            out = run(block, x)
            change(block)
            after = {name: value for name, value in vars(block).items() if name[0] != "_"}
            out.sum().backward()
            assert all(getattr(block, name) is value for name, value in after.items())
            found += [out, x.grad, block.linear.weight.grad]
            block.zero_grad()
        return found

    assert_transparent(scenario, run)


@ALL
def test_each_of_several_calls_has_its_own(run: Run) -> None:
    """As where a mask is an attribute, or a network is called once for each of several adapters."""

    def scenario(run: Run) -> Any:
        block, outs, xs = Block(), [], [leaf(3, 4) for _ in range(3)]
        for number, x in enumerate(xs):
            block.mask, block.active, block.scale = torch.rand(4), "ab"[number % 2], number + 0.5
            outs.append(run(block, x))
        sum(out.sum() for out in outs).backward()
        return [x.grad for x in xs], [each.grad for each in block.parameters()]

    assert_transparent(scenario, run)


class Assigns(nn.Module):
    """Assigns to its attributes: an average, a state, a table that it makes, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.average = torch.ones(4)
        self.state: Tensor | None = None
        self.table: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(4.0).cos()
        x = self.linear(x) * self.table
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.state = (x + (0 if self.state is None else self.state)).detach().tanh()
        return (x * self.average).sin() * self.state


@ALL
@pytest.mark.parametrize("steps", [1, 3])
def test_tensors_that_the_region_assigns_are_restored(steps: int, run: Run) -> None:
    def scenario(run: Run) -> Any:
        module, found = Assigns(), []
        for _ in range(steps):
            x, y = leaf(3, 4), leaf(3, 4)
            first = run(module, x)
            (first.sum() + run(module, y).sum()).backward()
            found += [x.grad, y.grad, module.average, module.state, module.table]
        return found

    assert_transparent(scenario, run)


class Grows(nn.Module):
    """Makes a table when one is needed, and a larger one later; other attributes say so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_ready, self.length = False, 0
        self.shift: Tensor | None = None
        self.table = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * vars(self).pop("once", 1.0)
        if not self.is_ready:
            self.shift, self.is_ready = x.detach().mean(0), True
        if len(x) > self.length:
            self.table, self.length = torch.arange(4.0 * len(x)).view(-1, 4).cos(), len(x)
        assert self.shift is not None
        return ((x - self.shift) * self.table[: len(x)]).sin().exp()


@ALL
def test_what_says_that_there_is_a_tensor_is_restored_with_it(run: Run) -> None:
    def scenario(run: Run) -> Any:
        module, found = Grows(), []
        for length in (2, 6, 4):
            x, y = leaf(length, 4), leaf(length + 2, 4)
            module.once = 0.5
            (run(module, x).sum() + run(module, y).sum()).backward()
            assert (module.is_ready, "once" in vars(module)) == (True, False)
            assert module.length == len(module.table)
            found += [x.grad, y.grad, module.shift, module.table]
        return found

    assert_transparent(scenario, run)


@ALL
def test_what_is_reset_before_backward_stays_so(run: Run) -> None:
    """As a hidden state between two sequences."""

    def scenario(run: Run) -> Any:
        module, found = Assigns(), []
        for state in (None, torch.rand(3, 4), None):
            module.state = state
            x = leaf(3, 4)
            out = run(module, x)
            module.state = state
            out.sum().backward()
            assert module.state is state
            found += [x.grad, module.average]
        return found

    assert_transparent(scenario, run)


class Scales(nn.Module):
    """Scales by one of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        own = vars(self)
        return (self.linear(x) * (own["factor"] if "factor" in own else own["gain"])).sin().exp()


@ALL
def test_an_attribute_in_the_place_of_another(run: Run) -> None:
    """There are as many as before."""

    def scenario(run: Run) -> Any:
        module, found = Scales(), []
        run(module, leaf(3, 4))
        del module.factor
        module.gain = 2.0  # type: ignore[assignment]
        for gain in (3.0, 4.0):
            x = leaf(3, 4)
            out = run(module, x)
            module.gain = gain  # type: ignore[assignment]
            out.sum().backward()
            found.append(x.grad)
        return found

    assert_transparent(scenario, run)


class Defaults(nn.Module):
    """Its class has a value of an attribute that it may lack."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), ONE

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.factor).sin().exp()


ONE = float("1")


@ALL
def test_each_call_knows_its_own_names(run: Run) -> None:
    """Another attribute with the same value is another one."""

    def scenario(run: Run) -> Any:
        module, x, y = Defaults(), leaf(3, 4), leaf(3, 4)
        first = run(module, x)
        del module.factor
        module.other = ONE  # type: ignore[assignment]
        second = run(module, y)
        (first.sum() + second.sum()).backward()
        assert "factor" not in vars(module)
        return x.grad, y.grad

    assert_transparent(scenario, run)


class Counts(nn.Module):
    """Computes with the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.linear(x) * self.calls).sin().exp()


@ALL
def test_a_counter_has_its_value_of_the_call(run: Run) -> None:
    def scenario(run: Run) -> Any:
        module, found = Counts(), []
        for _ in range(2):
            x, y = leaf(3, 4), leaf(3, 4)
            (run(module, x).sum() + run(module, y).sum()).backward()
            found += [x.grad, y.grad]
            module.calls = 3
        return found

    assert_transparent(scenario, run)


@ALL
def test_a_counter_counts_reruns(run: Run) -> None:
    """As with torch."""
    module, x, y = Counts(), leaf(3, 4), leaf(3, 4)
    (run(module, x).sum() + run(module, y).sum()).backward()
    assert module.calls == 4


def test_a_policy_sees_the_same() -> None:
    def scenario(run: Run) -> Any:
        block, x = Block(), leaf(3, 4)
        out = run(block, x)
        block.scale, block.mask = 7.0, None
        out.sum().backward()
        return x.grad

    assert_transparent(
        scenario, lambda block, x: recollect.checkpoint(block, x, policy=policy.matmuls())
    )


def test_tensors_with_a_graph_are_not_held() -> None:
    """That of the step before would stay in memory."""
    norm = nn.LayerNorm(4)
    norm.register_forward_hook(lambda module, _, out: setattr(module, "last", out))
    rerun(norm, leaf(3, 4))
    last = ref(norm.last)
    with collector_off():
        out = rerun(norm, leaf(3, 4))
        assert last() is None
    out.sum().backward()


class Lazy(nn.Module):
    """Draws what it needs in its first call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.rand(4))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            mask = torch.rand(4)
            if self.kind == "buffer":
                self.register_buffer("mask", mask)
            else:
                self.mask = nn.Parameter(mask) if self.kind == "parameter" else mask
        return nn.functional.dropout(x * self.own * self.mask, 0.5).tanh()


def _lazily(kind: str, run: Run) -> Any:
    module, x = Lazy(kind), [leaf(4, 4) for _ in range(2)]
    sum(run(module, each).sum() for each in x).backward()
    return [module.mask.detach(), *(each.grad for each in (*x, *module.parameters()))]


@ALL
@pytest.mark.parametrize("kind", ["attribute", "buffer"])
def test_what_the_region_has_made_is_made_again(kind: str, run: Run) -> None:
    """Else its rerun would draw other numbers afterwards."""
    assert_transparent(lambda run: _lazily(kind, run), run)


def test_parameters_that_the_region_has_made_get_their_gradients() -> None:
    assert_transparent(lambda run: _lazily("parameter", run), rerun)


class LazyLayer(nn.Module):
    """Makes a layer in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = nn.Linear(4, 4)
        return self.layer(x).tanh()


@pytest.mark.parametrize("make", [lambda: Lazy("parameter"), LazyLayer])
def test_the_reentrant_engine_refuses_parameters_made_in_the_region(make: Any) -> None:
    """Those of its rerun would get the gradients."""
    out = CHECKPOINTS["reentrant"](make(), leaf(4, 4))
    with pytest.raises(InputChanged, match="a checkpointed region makes parameters"):
        out.sum().backward()


class Copies(nn.Module):
    """Compares with a copy of its layer, which it makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.copy = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        self.copy = copy.deepcopy(self.layer)
        with torch.no_grad():
            target = self.copy(x)
        return (self.layer(x) * target).tanh()


@ALL
def test_a_copy_that_gets_no_gradient_may_be_made(run: Run) -> None:
    def scenario(run: Run) -> Any:
        module, x = Copies(), leaf(4, 4)
        run(module, x).sum().backward()
        return [x.grad, *(each.grad for each in module.layer.parameters())]

    assert_transparent(scenario, run)


class Draws(nn.Module):
    """Has the next of a series of rates."""

    def __init__(self, rates: Any) -> None:
        super().__init__()
        self.own, self.rates = nn.Parameter(torch.rand(4)), rates

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.own * next(self.rates)).tanh()


@ALL
@pytest.mark.parametrize(
    "make", [lambda: iter([1.0, 2.0, 3.0, 4.0]), lambda: itertools.count(2)], ids=["list", "count"]
)
def test_an_iterator_stands_where_it_stood(make: Any, run: Run) -> None:
    def scenario(run: Run) -> Any:
        module, x = Draws(make()), [leaf(3, 4) for _ in range(2)]
        sum(run(module, each).sum() for each in x).backward(retain_graph=True)
        sum(run(module, each).sum() for each in x).backward()
        return [*(each.grad for each in x), next(module.rates, None)]

    assert_transparent(scenario, run)


@ALL
def test_one_that_cannot_be_copied_is_an_error(run: Run) -> None:
    out = run(Draws(rate / 2 for rate in range(9)), leaf(3, 4))
    with pytest.raises(InputChanged, match=r"'rates' of a module of a .* iterator \(generator\)"):
        out.sum().backward()
