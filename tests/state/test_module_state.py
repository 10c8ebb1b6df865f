"""Hooks, ``forward`` and children of modules that change between forward and backward."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils import parametrize

import recollect
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
