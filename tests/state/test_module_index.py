"""What is remembered of a module, and when it is looked at anew."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_file
from torch.nn.utils import parametrize

import recollect
from recollect.state.module_index import index_of


def parameter_ids(module: nn.Module) -> set[int]:
    owners = index_of(module).parameters
    return {id(p) for owner in owners for p in owner.values() if p is not None}


def expected(module: nn.Module) -> set[int]:
    return {id(p) for p in module.parameters()}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ModuleList())


INDEX_CHANGES: dict[str, Callable[[Any], Any]] = {
    "a child": lambda m: m.add_module("more", nn.Linear(2, 2)),
    "a child replaced": lambda m: setattr(m, "0", nn.Linear(2, 2)),
    "a grandchild": lambda m: m[1].append(nn.Linear(2, 2)),
    "a grandchild replaced": lambda m: m[1].__setitem__(0, nn.Linear(2, 2)),
    "inserted into an empty list": lambda m: m[2].insert(0, nn.Linear(2, 2)),
    "a parameter": lambda m: m[2].register_parameter("p", nn.Parameter(torch.ones(2))),
    "a parameter replaced": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter replaced without telling": lambda m: m[0]._parameters.update(
        weight=nn.Parameter(torch.ones(2, 2))
    ),
    "a child deleted": lambda m: m.__delitem__(0),
    "a child of a layer": lambda m: m[0].add_module("inner", nn.Linear(2, 2)),
    "a child of a layer without telling": lambda m: m[0]._modules.update(inner=nn.Linear(2, 2)),
    "a child replaced without telling": lambda m: m._modules.update({"0": nn.Linear(2, 2)}),
    "a parameter of a layer without telling": lambda m: m[2]._parameters.update(
        p=nn.Parameter(torch.ones(2))
    ),
    "a parametrization": lambda m: parametrize.register_parametrization(m[0], "weight", nn.Tanh()),
}


@pytest.mark.parametrize("change", INDEX_CHANGES.values(), ids=INDEX_CHANGES)
def test_changes_are_noticed(change: Callable[[Any], Any]) -> None:
    module = model()
    assert parameter_ids(module) == expected(module)
    change(module)
    assert parameter_ids(module) == expected(module)


def test_a_tree_is_remembered() -> None:
    module = model()
    assert index_of(module) is index_of(module)
    tree = index_of(module)
    module.eval()
    assert index_of(module) is tree


def test_a_name_for_another_is_noticed() -> None:
    module = model()
    tree = index_of(module)
    weight = module[0].weight
    del module[0].weight
    module[0].register_parameter("other", weight)
    assert index_of(module) is not tree
    assert ("bias", "other") in index_of(module).names


class Named(OrderedDict[str, Any]):
    """Refers to more than its values."""


def test_parameters_in_a_dictionary_of_another_class() -> None:
    module = nn.Linear(2, 2)
    own = module._parameters = Named(module._parameters)  # type: ignore[assignment]
    own.note = "n"
    weight = module.weight
    assert index_of(module).read_values()[:2] == [weight, module.bias]
    x = torch.ones(2, requires_grad=True)
    result = recollect.checkpoint(module, x)
    module.weight = nn.Parameter(torch.zeros(2, 2))
    result.sum().backward()
    assert weight.grad is not None
    assert x.grad is not None
    assert torch.equal(x.grad, weight.detach().sum(0))


def test_another_class_is_noticed() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    tree = index_of(module)
    module[0].__class__ = type("Linear", (nn.Linear,), {"__module__": __name__})
    assert index_of(module) is not tree
    assert index_of(module).user_modules


def test_modules_that_are_made_elsewhere_change_no_tree() -> None:
    module = model()
    tree = index_of(module)
    nn.Sequential(nn.BatchNorm1d(2)).register_buffer("more", torch.ones(2))
    assert index_of(module) is tree


def test_nobody_is_asked_to_tell_of_registrations() -> None:
    # The compiler would guard on it, in all code that registers a module.
    index_of(model())
    for kind in ("module", "parameter", "buffer"):
        assert not getattr(module_file, f"_global_{kind}_registration_hooks")


def test_buffers_are_noticed() -> None:
    module = model()
    assert index_of(module).with_buffers == []
    module[1].register_buffer("state", torch.ones(2))
    assert len(index_of(module).with_buffers) == 1


def test_a_copy_has_a_index_of_its_own() -> None:
    module = model()
    index_of(module)
    twin = copy.deepcopy(module)
    assert parameter_ids(twin) == expected(twin)


class Own(nn.Module):
    """A module of nobody's library, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(2))
        self.inner = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_modules_die() -> None:
    gc.disable()
    try:
        module = Own()
        index_of(module)
        dead = weakref.ref(module)
        del module
        assert dead() is None
    finally:
        gc.enable()


def test_modules_that_refer_to_themselves_die() -> None:
    module = Own()
    module.method, module.back = module.forward, [module]
    index_of(module)
    dead = weakref.ref(module)
    del module
    gc.collect()
    assert dead() is None


def test_a_buffer_that_is_assigned_changes_no_tree() -> None:
    module = Own()
    tree = index_of(module)
    module.state = torch.zeros(2)
    assert index_of(module) is tree


def test_a_pickled_module_has_no_tree() -> None:
    module = Own()
    index_of(module)
    assert module.state_dict().keys() == Own().state_dict().keys()
    twin = pickle.loads(pickle.dumps(module))
    assert twin.__dict__["_recollect_index"] is None
