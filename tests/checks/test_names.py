"""What a region is called."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.checks import names
from recollect.checks.names import module_of, name_in, path_of, region_name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)

    def closure_over_self(self) -> Callable[[Tensor], Tensor]:
        def part(x: Tensor) -> Tensor:
            return self.mlp(x)

        return part


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block(), Block()])


def closure(module: Any) -> Callable[..., Any]:
    def custom_forward(*inputs: Any) -> Any:
        return module(*inputs)

    return custom_forward


def decorated(module: Any) -> Callable[..., Any]:
    @functools.wraps(module.forward)
    def wrapper(*inputs: Any) -> Any:
        return None

    return wrapper


def call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


WRAPPINGS: dict[str, Callable[[nn.Module], Any]] = {
    "itself": lambda module: module,
    "forward": lambda module: module.forward,
    "__call__": lambda module: module.__call__,
    "partial": lambda module: functools.partial(module, mask=None),
    "partial of a method": lambda module: functools.partial(module.forward, mask=torch.ones(1)),
    "partial with it as an argument": lambda module: functools.partial(call, module),
    "partial with it as a keyword": lambda module: functools.partial(call, module=module),
    "partial with another as an argument": lambda module: functools.partial(
        module, nn.Linear(1, 1)
    ),
    "closure": closure,
    "closure over a method": lambda module: closure(module.forward),
    "closure over a partial": lambda module: closure(functools.partial(module)),
    "decorated": decorated,
    "checkpointed": recollect.checkpointed,
    "method of a checkpointed one": lambda module: recollect.checkpointed(module).forward,
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_a_module_is_found_behind(wrap: Callable[[nn.Module], Any]) -> None:
    model = Model()
    function = wrap(model.layers[3])
    assert module_of(function) is model.layers[3]
    assert region_name(function) == "region `layers.3` (Block)"


def test_a_module_that_nothing_holds_is_called_by_its_class() -> None:
    assert region_name(Block()) == "region Block"


def test_names_of_wrappers_are_left_out() -> None:
    outer = nn.Module()
    outer._orig_mod = Model()
    assert path_of(outer._orig_mod.layers[1].mlp) == "layers.1.mlp"


def test_functions_are_called_by_their_name_and_place() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    line = function.__code__.co_firstlineno
    name = f"`{function.__qualname__}` (test_names.py:{line})"
    assert region_name(function) == f"region {name}"
    assert region_name(functools.partial(functools.partial(function), 1)) == f"region {name}"
    assert region_name(torch.sin).endswith("sin`")


def test_a_method_of_something_else() -> None:
    class Trainer:
        def step(self, x: Tensor) -> Tensor:
            return x

        def __call__(self, x: Tensor) -> Tensor:
            return x

    line = Trainer.step.__code__.co_firstlineno
    assert region_name(Trainer().step).endswith(f"Trainer.step` (test_names.py:{line})")
    assert region_name(Trainer()).endswith("Trainer`")


def test_a_part_of_a_module_is_called_by_both() -> None:
    model = Model()
    name = region_name(model.layers[2].closure_over_self())
    assert name.startswith("region `Block.closure_over_self.<locals>.part` (test_names.py:")
    assert name.endswith("), in `layers.2` (Block)")


def test_a_segment_is_called_by_its_ends() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))

    def name(*steps: nn.Module) -> str:
        held = list(steps)
        return region_name(lambda x: [step(x) for step in held])

    assert name(*model[1:4]) == "region `1` (Linear) to `3` (Linear)"
    assert name(model[2]) == "region `2` (Linear)"


def test_two_modules_are_not_one() -> None:
    one, other = Block(), Block()
    assert module_of(lambda x: one(other(x))) is None
    assert module_of(lambda x: one(one(x))) is one


def test_a_variable_without_a_value_is_no_obstacle() -> None:
    def outer() -> Any:
        def inner() -> Any:
            return later

        name = region_name(inner)
        later = 1
        return name, later

    assert "outer.<locals>.inner" in outer()[0]


@pytest.mark.parametrize("odd", [None, 3, object(), type, functools.partial(print)])
def test_anything_has_some_name(odd: Any) -> None:
    assert region_name(odd).startswith("region `")


def test_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hostile:
        def __call__(self) -> None: ...

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert "region" in region_name(Hostile())
    monkeypatch.setattr(names.gc, "get_objects", lambda: 1 / 0)
    assert region_name(Block()) == "a checkpointed region"


def test_half_made_modules_elsewhere_are_no_obstacle() -> None:
    half_made = nn.Module.__new__(nn.Module)
    model = Model()
    assert path_of(model.layers[0]) == "layers.0"
    del half_made


def test_modules_that_hold_each_other_have_some_path() -> None:
    one, other = nn.Module(), nn.Module()
    one.child, other.child = other, one
    assert path_of(one) == "child.child"


def test_keeps_nothing_alive() -> None:
    model = Model()
    gone = weakref.ref(model)
    region_name(model.layers[0])
    region_name(closure(model.layers[0]))
    del model
    gc.collect()
    assert gone() is None


def test_the_name_in_a_given_module() -> None:
    model = Model()
    assert name_in(model, model.layers[1].mlp[0]) == "layers.1.mlp.0"
    assert name_in(model.layers[1], model.layers[1].mlp) == "mlp"
    assert name_in(model, Block()) is None
    model.alias = model.layers[1].mlp
    assert name_in(model, model.alias) == "alias"
