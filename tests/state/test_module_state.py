"""Hooks, ``forward`` and children of modules that change between forward and backward."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_file
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils import parametrize

import recollect
from recollect.state.module_state import index_of
from tests._support import ALL, CHECKPOINTS, Run, assert_transparent, gradients, leaf


class Chain(nn.Tanh):
    """A layer that runs its children, of which it has none yet."""

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return super().forward(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.norm = nn.Sequential(nn.LayerNorm(4), Chain())
        self.down = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        return self.down(self.norm(self.up(x)) * factor).sin()


def double(module: Any, args: Any, out: Any) -> Any:
    return out * 2


def double_given_keywords(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
    return out * 2


def triple(module: Any, args: tuple[Any, ...]) -> Any:
    return tuple(3 * arg for arg in args)


def triple_with_keywords(module: Any, args: Any, kwargs: Any) -> Any:
    return tuple(3 * arg for arg in args), kwargs


def patched(x: Tensor) -> Tensor:
    return x[..., :1].expand(-1, 4).cos()


def set_forward(module: Any, function: Any) -> Callable[[], Any]:
    module.forward = function
    return lambda: module.__dict__.pop("forward")


def append(parts: nn.Sequential) -> Callable[[], Any]:
    parts.append(nn.Softplus())
    return lambda: parts.__delitem__(-1)


def append_to_empty(block: Any) -> Callable[[], Any]:
    block.norm[1].add_module("inner", nn.Softplus())
    return lambda: block.norm[1].__delattr__("inner")


def pop(parts: nn.Sequential) -> Callable[[], Any]:
    last = parts.pop(-1)
    return lambda: parts.append(last)


#: What changes how a block is called; the result undoes it.
CHANGES: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "a hook": lambda block: block.up.register_forward_hook(double).remove,
    "a hook of the region": lambda block: block.register_forward_hook(double).remove,
    "a hook with keywords": lambda block: (
        block.norm.register_forward_hook(double_given_keywords, with_kwargs=True).remove
    ),
    "a hook that is always called": lambda block: (
        block.norm[1].register_forward_hook(double, always_call=True).remove
    ),
    "a hook before": lambda block: block.down.register_forward_pre_hook(triple).remove,
    "a hook before, with keywords": lambda block: (
        block.down.register_forward_pre_hook(triple_with_keywords, with_kwargs=True).remove
    ),
    "a hook of all modules": lambda block: register_module_forward_hook(double).remove,
    "a hook before all modules": lambda block: register_module_forward_pre_hook(triple).remove,
    "a forward": lambda block: set_forward(block.up, patched),
    "a child more": lambda block: append(block.norm),
    "a first child": append_to_empty,
    "a child less": lambda block: pop(block.norm),
}


def make() -> Block:
    torch.manual_seed(3)
    return Block()


@ALL
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_added_after_forward(run: Run, change: Callable[[Any], Any]) -> None:
    def scenario(run: Run) -> Any:
        block, x = make(), leaf(2, 3)
        out = run(block, x)
        undo = change(block)
        try:
            out.sum().backward()
        finally:
            undo()
        return x.grad, gradients(block), run(block, x)

    assert_transparent(scenario, run)


@ALL
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_removed_after_forward(run: Run, change: Callable[[Any], Any]) -> None:
    def scenario(run: Run) -> Any:
        block, x = make(), leaf(2, 3)
        undo = change(block)
        try:
            out = run(block, x)
        finally:
            undo()
        out.sum().backward()
        return x.grad, gradients(block), run(block, x)

    assert_transparent(scenario, run)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_everything_is_left_as_it_is(change: Callable[[Any], Any]) -> None:
    def looks(block: Block) -> Any:
        return [
            (name, {k: [*v] if isinstance(v, dict) else v for k, v in vars(module).items()})
            for name, module in block.named_modules()
        ]

    block, x = make(), leaf(2, 3)
    out = recollect.checkpoint(block, x)
    undo = change(block)
    try:
        before = looks(block)
        out.sum().backward()
        assert looks(block) == before
    finally:
        undo()


def test_a_hook_that_removes_itself() -> None:
    def scenario(run: Run) -> Any:
        block, x = make(), leaf(2, 3)

        def once(module: Any, args: Any, out: Any) -> Any:
            handle.remove()
            return out * 2

        handle = block.up.register_forward_hook(once)
        outs = [run(block, x) for _ in range(2)]
        (outs[0] * 3 + outs[1]).sum().backward()
        assert not block.up._forward_hooks
        return x.grad, gradients(block)

    assert_transparent(scenario, recollect.checkpoint)


def test_a_region_that_is_a_closure_over_a_model() -> None:
    def scenario(run: Run) -> Any:
        block, x = make(), leaf(2, 3)
        handle = block.up.register_forward_hook(double)
        out = run(lambda x: block.norm(block.up(x)), x)
        handle.remove()
        out.sum().backward()
        return x.grad, gradients(block)

    assert_transparent(scenario, recollect.checkpoint)


def test_a_dictionary_of_hooks_that_is_replaced() -> None:
    def scenario(run: Run) -> Any:
        block, x = make(), leaf(2, 3)
        block.up.register_forward_hook(double)
        out = run(block, x)
        block.up._forward_hooks = type(block.up._forward_hooks)()
        out.sum().backward()
        assert not block.up._forward_hooks
        return x.grad, gradients(block)

    assert_transparent(scenario, recollect.checkpoint)


def test_a_child_that_the_region_makes() -> None:
    class Lazy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "linear"):
                self.linear = nn.Linear(3, 3)
            return nn.functional.dropout(self.linear(x).sin(), 0.5)

    def scenario(run: Run) -> Any:
        block, x = Lazy(), leaf(2, 3)
        out = run(block, x)
        linear = block.linear
        out.sum().backward()
        assert block.linear is linear
        return x.grad, gradients(block), run(block, x)

    assert_transparent(scenario, recollect.checkpoint)


# --- what cannot be put back ----------------------------------------------------------------------


@contextlib.contextmanager
def _another_forward_of_the_class() -> Iterator[None]:
    before = nn.Linear.forward
    nn.Linear.forward = lambda self, x: before(self, x) * 2  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.forward = before  # type: ignore[method-assign]


@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("first", [True, False])
def test_a_forward_of_a_class_that_is_replaced_is_an_error(run: Run, first: bool) -> None:
    block, x = make(), leaf(2, 3)
    with _another_forward_of_the_class() if first else contextlib.nullcontext():
        out = run(block, x)
    with (
        contextlib.nullcontext() if first else _another_forward_of_the_class(),
        pytest.raises(recollect.CheckpointError, match=r"Linear\.forward, .* was replaced"),
    ):
        out.sum().backward()


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Derived(Base):
    pass


def test_a_forward_that_a_class_did_not_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    out = recollect.checkpoint(nn.Sequential(Derived()), leaf(2, 3))
    monkeypatch.setattr(Derived, "forward", lambda self, x: x.cos(), raising=False)
    with pytest.raises(recollect.CheckpointError, match=r"Derived\.forward"):
        out.sum().backward()


@pytest.mark.parametrize("first", [True, False])
def test_a_parametrization_registered_or_removed_is_an_error(first: bool) -> None:
    block, x = make(), leaf(2, 3)

    def register() -> None:
        parametrize.register_parametrization(block.up, "weight", nn.Tanh())

    def remove() -> None:
        parametrize.remove_parametrizations(block.up, "weight", leave_parametrized=False)

    if first:
        register()
    out = recollect.checkpoint(block, x)
    (remove if first else register)()
    with pytest.raises(recollect.CheckpointError, match=r"`up`.*class"):
        out.sum().backward()


def test_a_module_that_is_unwrapped_before_backward() -> None:
    def scenario(run: Run) -> Any:
        block, x = make(), leaf(2, 3)
        out = run(block, x)
        out.sum().backward()
        return x.grad, gradients(block)

    def wrap_and_unwrap(block: Any, x: Tensor) -> Any:
        out = recollect.checkpointed(block)(x)
        recollect.unwrap(block)
        return out

    assert_transparent(scenario, wrap_and_unwrap)


def test_what_is_unchanged_raises_no_alarm() -> None:
    class WithDescriptor(nn.Module):
        @classmethod
        def forward(cls, x: Tensor) -> Tensor:
            return x.sin()

    block, x = nn.Sequential(WithDescriptor(), make()), leaf(2, 3)
    handles = [module.register_forward_hook(double) for module in block.modules()]
    recollect.checkpoint(block, x).sum().backward()
    for handle in handles:
        handle.remove()


def test_hooks_die_with_the_graph() -> None:
    class Hook:
        def __call__(self, module: Any, args: Any, out: Any) -> Any:
            return out * 2

    block, x, hook = make(), leaf(2, 3), Hook()
    dead = weakref.ref(hook)
    handle = block.up.register_forward_hook(hook)
    out = recollect.checkpoint(block, x)
    handle.remove()
    del hook
    gc.disable()
    try:
        assert dead() is not None
        out.sum().backward()
        assert dead() is None
    finally:
        gc.enable()


# --- what is remembered of a module, and when it is looked at anew --------------------------------


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
