"""What is found from a function: modules, generators, tensors."""

# ruff: noqa: PLW0108, PLC3002 - a lambda around a call is what is tested here

from __future__ import annotations

import functools
import logging
import random
import types
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.state.inputs import Inputs
from recollect.state.module_index import Writes, index_of
from recollect.state.reachable import Reachable, names_in

np = pytest.importorskip("numpy")

GENERATOR = torch.Generator()
HOLDER = {"layer": nn.Linear(2, 2), "generator": random.Random(1)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
        self.register_buffer("scale", torch.ones(2))
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def half(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Holder:
    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def run(self, x: Tensor) -> Tensor:
        return self.block(x)

    def __call__(self, x: Tensor) -> Tensor:
        return self.block(x)


def _custom_forward(module: nn.Module) -> Callable[..., Any]:
    def forward(*inputs: Any) -> Any:
        return module(*inputs)

    return forward


def _default(block: nn.Module) -> Callable[..., Any]:
    def forward(x: Tensor, *, block: nn.Module = block) -> Any:
        return block(x)

    return forward


def _decorated(block: nn.Module) -> Callable[..., Any]:
    @functools.wraps(block.forward)
    def wrapper(*args: Any) -> Any:
        return block(*args)

    return lambda x: wrapper(x)


def parameters(reach: Reachable) -> list[dict[str, Any]]:
    return [owner for index in reach.indexes for owner in index.parameters]


WAYS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "module": lambda block: block,
    "method": lambda block: block.half,
    "partial": lambda block: functools.partial(block, 1),
    "partial of a method": lambda block: functools.partial(block.half, 1),
    "partial with the module": lambda block: functools.partial(lambda m, x: m(x), block),
    "lambda": lambda block: lambda x: block(x),
    "custom forward": _custom_forward,
    "default": _default,
    "decorated": _decorated,
    "closure over a list": lambda block: (lambda blocks: lambda x: blocks[0](x))([block]),
    "closure over a dict": lambda block: (lambda blocks: lambda x: blocks["a"](x))({"a": block}),
    "method of another object": lambda block: Holder(block).run,
    "callable object": lambda block: Holder(block),
    "closure over an object": lambda block: (lambda holder: lambda x: holder.run(x))(Holder(block)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_module_is_found(way: Callable[[Any], Callable[..., Any]]) -> None:
    block = Block()
    reach = Reachable(way(block))
    found = {id(p) for owner in parameters(reach) for p in owner.values() if p is not None}
    assert found == {id(p) for p in block.parameters()}
    names = {name: writes for _, name, writes in reach.buffers}
    assert names.keys() == {"running_mean", "running_var", "num_batches_tracked", "scale"}
    assert Writes.SEEN not in names.values()
    assert reach.generators == [block.generator]


def test_statistics_are_not_written_in_eval_mode() -> None:
    norm = nn.BatchNorm1d(2).eval()
    assert {writes for _, _, writes in Reachable(norm).buffers} == {Writes.SEEN}


def _uses_global(x: Tensor) -> Tensor:
    return x * torch.rand(1, generator=GENERATOR)


def _calls_it(x: Tensor) -> Tensor:
    return _uses_global(x)


def _uses_holder(x: Tensor) -> Tensor:
    return HOLDER["layer"](x)


class UsesGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _uses_global(x)


@pytest.mark.parametrize(
    "function",
    [_uses_global, _calls_it, lambda x: _calls_it(x), UsesGlobal(), nn.Sequential(UsesGlobal())],
)
def test_a_global_generator_is_found(function: Any) -> None:
    assert Reachable(function).generators == [GENERATOR]


def test_a_global_container_is_looked_into() -> None:
    reach = Reachable(_uses_holder)
    assert reach.generators == [HOLDER["generator"]]
    assert [list(owner) for owner in parameters(reach)] == [["weight", "bias"]]


@pytest.mark.parametrize(
    "generator",
    [torch.Generator(), random.Random(1), np.random.default_rng(1), np.random.RandomState(1)],
    ids=["torch", "random", "numpy", "numpy legacy"],
)
def test_generators_in_arguments_and_closures(generator: Any) -> None:
    def run(x: Tensor, **kwargs: Any) -> Any:
        return x

    assert Reachable(run, [generator]).generators == [generator]
    assert Reachable(run, Inputs((), {"a": [{"b": (generator,)}]}).reachable()).generators == [
        generator
    ]
    assert Reachable(lambda: generator, [generator]).generators == [generator]


def test_modules_in_arguments() -> None:
    layer = nn.Linear(2, 2)
    others = Inputs((layer, torch.ones(2)), {"others": [layer]}).reachable()
    reach = Reachable(lambda f, x: f(x), others)
    assert [list(owner) for owner in parameters(reach)] == [["weight", "bias"]]
    assert reach.tensors == []


def test_tensors_in_closures() -> None:
    table, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    reach = Reachable(lambda x: x * table * weight)
    assert [id(t) for t in reach.tensors] in ([id(table), id(weight)], [id(weight), id(table)])


def test_a_cell_that_is_not_filled_yet() -> None:
    def make() -> Callable[..., Any]:
        def function() -> Any:
            return later

        Reachable(function)
        later = 1
        return function

    assert make()() == 1


def test_things_that_refer_to_each_other() -> None:
    holder = Holder(nn.Linear(2, 2))
    holder.itself = [holder, {"again": holder}]  # type: ignore[attr-defined]
    assert len(parameters(Reachable(holder.run))) == 1


def test_a_global_that_becomes_a_generator_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "GENERATOR", None)
    assert Reachable(_uses_global).generators == []
    generator = torch.Generator()
    monkeypatch.setitem(globals(), "GENERATOR", generator)
    assert Reachable(_uses_global).generators == [generator]


def _with_a_method_on_a_child(model: Any) -> None:
    model[0].run = model[0].forward


def _with_methods_of_others(model: Any) -> None:
    model[1].calls = [model.forward, {"first": model[0].forward}, model[1].forward]


def _with_a_compiled_child(model: Any) -> None:
    model[0].compile(backend="eager")


def _with_a_wrapped_forward(model: Any) -> None:
    for child in model:
        child.before = child.forward
        child.forward = functools.update_wrapper(
            functools.partial(lambda module, *args: module.before(*args), child), child.forward
        )


def _with_a_parent(model: Any) -> None:
    for child in model:
        child.parents = (model,)


@pytest.mark.parametrize(
    "prepare",
    [
        _with_a_method_on_a_child,
        _with_methods_of_others,
        _with_a_compiled_child,
        _with_a_wrapped_forward,
        _with_a_parent,
    ],
)
def test_attributes_that_lead_back_to_modules(prepare: Callable[[Any], None]) -> None:
    model = nn.Sequential(Block(), Block())
    prepare(model)
    for _ in range(2):
        reach = Reachable(model)
        found = {id(p) for owner in parameters(reach) for p in owner.values() if p is not None}
        assert found == {id(p) for p in model.parameters()}
        assert {id(g) for g in reach.generators} == {id(block.generator) for block in model}


ADDED: dict[str, Callable[[Any, Any], Any]] = {
    "to a list": lambda block, thing: block.things.append(thing),
    "in the place of another": lambda block, thing: block.things.__setitem__(0, thing),
    "to a dict in an object": lambda block, thing: block.holder.parts.update(new=thing),
    "in the place of nothing": lambda block, thing: setattr(block, "later", [thing]),
    "in the place of a number": lambda block, thing: setattr(block, "number", (thing,)),
    "as a new attribute": lambda block, thing: setattr(block, "new", {"a": thing}),
}


class Collects(nn.Module):
    """Holds modules in places that torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.things: list[Any] = [0]
        self.holder = types.SimpleNamespace(parts={})
        self.later = None
        self.number = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
def test_what_attributes_lead_to_is_looked_up_each_time(add: Callable[[Any, Any], Any]) -> None:
    norm, generator = nn.BatchNorm1d(2), torch.Generator()
    block = Collects()
    model = nn.Sequential(block)
    assert Reachable(model).buffers == []
    add(block, [norm, generator])
    reach = Reachable(model)
    assert [name for _, name, _ in reach.buffers] == [*norm._buffers]
    assert reach.generators == [generator]


def test_a_search_that_found_nothing_is_not_made_again() -> None:
    model = nn.Sequential(Collects())
    Reachable(model)
    searched = index_of(model).attached_in_vain
    assert searched is not None
    Reachable(model)
    assert index_of(model).attached_in_vain is searched
    model[0].things.append(nn.BatchNorm1d(2))
    assert [name for _, name, _ in Reachable(model).buffers] == [*nn.BatchNorm1d(2)._buffers]
    assert index_of(model).attached_in_vain is None


def test_nothing_is_held_of_what_is_too_deep_to_be_found() -> None:
    tensor = torch.ones(2)
    inner = {"tensor": tensor}
    model = Collects()
    model.things = [[[[[inner]]]]]
    assert Reachable(model).tensors == []
    assert index_of(model).attached_in_vain is not None
    held = ref(tensor)
    inner.clear()
    del tensor
    assert held() is None


def test_nothing_is_held_of_what_was_searched_in_vain() -> None:
    model = Collects()
    model.holder = holder = types.SimpleNamespace(parts={})
    Reachable(model)
    assert index_of(model).attached_in_vain is not None
    tensor = torch.ones(2)
    held = ref(tensor)
    holder.parts["output"] = tensor
    model.holder = None  # type: ignore[assignment]
    del holder, tensor
    assert held() is None


class Shows(dict[str, Any]):
    """Its values are not what it holds."""

    shown: tuple[Any, ...] = ()

    def values(self) -> Any:
        return self.shown


def test_a_container_may_show_other_values_than_it_holds() -> None:
    model = Collects()
    model.things = [Shows()]
    assert Reachable(model).generators == []
    generator = torch.Generator()
    Shows.shown = (generator,)
    try:
        assert Reachable(model).generators == [generator]
    finally:
        Shows.shown = ()


TABLE: dict[str, Any] = {"a": [1, 2], "b": 2}


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * TABLE["a"][0]


@pytest.mark.parametrize(
    "add",
    [
        lambda thing: TABLE.update(c=thing),
        lambda thing: TABLE.update(b=thing),
    ],
    ids=["to the table", "in the place of another"],
)
def test_globals_of_modules_are_looked_up_each_time(
    add: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "TABLE", {**TABLE})
    generator = torch.Generator()
    model = Looks()
    for function in (model, model.forward):
        assert Reachable(function).generators == []
    assert index_of(model).globals_in_vain is not None
    add(generator)
    for _ in range(6):  # then no search is tried in addition
        for function in (model, model.forward):
            assert Reachable(function).generators == [generator]
    assert len(Reachable(model.forward).variables) == 1


LIMIT = 3


def uses(x: Any) -> Any:
    return x.shape, [LIMIT + n for n in x], lambda: missing  # noqa: F821 - a global to come


def test_names_that_code_uses() -> None:
    assert names_in(uses.__code__) >= {"shape", "LIMIT", "missing"}


log = logging.getLogger(__name__)


def logs(x: Any) -> Any:
    log.debug("called")
    return x


def test_a_logger_is_not_searched() -> None:
    generator = torch.Generator()
    handler = logging.NullHandler()
    handler.generator = generator  # type: ignore[attr-defined]
    log.addHandler(handler)
    try:
        assert Reachable(logs).generators == []
    finally:
        log.removeHandler(handler)


def reads_attribute(x: Any) -> Any:
    return x.logits.sin()


def test_an_attribute_with_the_name_of_a_global_does_not_hold_it() -> None:
    tensor = globals()["logits"] = torch.ones(3)
    held = ref(tensor)
    x = types.SimpleNamespace(logits=torch.ones(2, requires_grad=True))
    result = recollect.checkpoint(reads_attribute, x)
    del tensor, globals()["logits"]
    assert held() is None
    result.sum().backward()
