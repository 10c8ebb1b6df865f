"""Arguments that change before backward: found again as they were, or an error with their name."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import recollect
from recollect.state.inputs import Inputs
from tests._support import (
    Run,
    assert_transparent,
    collector_off,
    compat_rerun,
    leaf,
    plain,
    reentrant,
    rerun,
)

RUNS = pytest.mark.parametrize("run", [rerun, compat_rerun], ids=["recollect", "compat"])
CHANGED = "modified by an inplace operation"


ALL = pytest.mark.parametrize(
    "run", [rerun, compat_rerun, reentrant], ids=["recollect", "compat", "reentrant"]
)


def combine(*args: Any, **kwargs: Any) -> Tensor:
    """The product of the sines of all tensors, wherever they are."""
    leaves = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)]
    out = torch.ones(leaves[0].shape)
    for tensor in leaves:
        out = out * tensor.sin()
    return out.exp()


Culprit = Callable[[tuple[Any, ...], dict[str, Any]], Tensor]


@RUNS
@pytest.mark.parametrize("size", [3, 2000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("name", "culprit"),
    [
        ("args[0]", lambda args, kwargs: args[0]),
        ("args[1][0]", lambda args, kwargs: args[1][0]),
        ("args[2]['k']", lambda args, kwargs: args[2]["k"]),
        ("args[3][1][0]", lambda args, kwargs: args[3][1][0]),
        ("kwargs['mask']", lambda args, kwargs: kwargs["mask"]),
        ("kwargs['cache']['keys'][1]", lambda args, kwargs: kwargs["cache"]["keys"][1]),
    ],
)
def test_changed_after_forward(run: Run, name: str, culprit: Culprit, size: int) -> None:
    a, b, c, d, e, f, g, h = (torch.randn(size) for _ in range(8))
    args = (a, [b], {"k": c}, (d, [e]), leaf(size))
    kwargs = {"mask": f, "cache": {"keys": [g, h]}}
    out = run(combine, *args, **kwargs)
    culprit(args, kwargs).add_(1)
    with pytest.raises(recollect.CheckpointError, match=CHANGED) as info:
        out.sum().backward()
    assert f"{name} of" in str(info.value)
    assert ".clone()" in str(info.value), "the message shows the way out"


@RUNS
def test_unchanged_inputs_raise_no_alarm(run: Run) -> None:
    """Versions above zero and views are fine as long as they stay as they were."""

    def train(run: Run) -> Any:
        x = leaf(3)
        changed_before = torch.randn(3).add_(1).mul_(2)
        base = torch.randn(2, 3)
        out = run(combine, x, [changed_before], view=base[0])
        out.sum().backward(retain_graph=True)
        first = x.grad.clone()
        out.sum().backward()
        return out, first, x.grad

    assert_transparent(train, run)


@RUNS
def test_changed_after_backward_is_nobodys_business(run: Run) -> None:
    x, mask = leaf(3), torch.randn(3)
    run(combine, x, mask=mask).sum().backward()
    mask.add_(1)


@RUNS
def test_changed_between_two_backwards(run: Run) -> None:
    x, mask = leaf(3), torch.randn(3)
    out = run(combine, x, mask=mask).sum()
    out.backward(retain_graph=True)
    mask.add_(1)
    with pytest.raises(recollect.CheckpointError, match=CHANGED):
        out.backward()


@RUNS
def test_changed_through_a_view_or_its_base(run: Run) -> None:
    base = torch.randn(2, 3)
    out = run(combine, leaf(3), base[0])
    base.mul_(2)
    with pytest.raises(recollect.CheckpointError, match=CHANGED) as info:
        out.sum().backward()
    assert "args[1] of" in str(info.value)


class State:
    """A plain object."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@RUNS
@pytest.mark.parametrize(
    ("name", "pass_on", "find", "size"),
    [
        ("args[1]", lambda t: ((t,), {}), lambda t: t, (3, 1)),
        ("args[1][1]", lambda t: (((1, t),), {}), lambda pair: pair[1], (3, 1)),
        ("kwargs['state']", lambda t: ((), {"state": t}), lambda t: t, (3, 1)),
        ("args[1][0]", lambda t: (([t],), {}), lambda items: items[0], (50, 40)),
        ("kwargs['state']['n']", lambda t: ((), {"state": {"n": t}}), lambda s: s["n"], (50, 40)),
        ("kwargs['state'].n", lambda t: ((), {"state": State(n=t)}), lambda s: s.n, (50, 40)),
    ],
)
def test_changed_inside_the_region(
    run: Run, name: str, pass_on: Any, find: Callable[[Any], Tensor], size: Any
) -> None:
    """The value that forward began with is lost: no rerun could be right."""

    def change(x: Tensor, state: Any) -> Tensor:
        counter = find(state)
        out = x * counter.sum()
        counter.add_(1)
        return out.sin()

    args, kwargs = pass_on(torch.zeros(size))
    out = run(change, leaf(3), *args, **kwargs)
    with pytest.raises(recollect.CheckpointError, match=CHANGED) as info:
        out.sum().backward()
    assert f"{name} of" in str(info.value)
    assert "inside the region" in str(info.value)


@RUNS
def test_changed_inside_an_outer_region(run: Run) -> None:
    def outer(x: Tensor) -> Tensor:
        middle = x * 2
        out = run(torch.sin, middle)
        middle.add_(1)
        return out * middle.exp()

    out = run(outer, leaf(3))
    with pytest.raises(RuntimeError, match=CHANGED):
        out.sum().backward()


def change_after_saving(x: Tensor) -> Tensor:
    """Plain autograd refuses to go backward through this."""
    y = x.sin()
    out = y.exp() * y
    y.add_(1)
    return out


@pytest.mark.parametrize(
    "call",
    [
        change_after_saving,
        lambda x: rerun(change_after_saving, x, early_stop=False),
        lambda x: rerun(lambda x: change_after_saving(x).cos(), x),
        lambda x: compat_rerun(lambda x: change_after_saving(x).cos(), x),
    ],
    ids=["plain", "full", "early_stop", "compat"],
)
def test_tensor_of_the_region_changed_after_it_was_saved(call: Run) -> None:
    out = call(leaf(3))
    with pytest.raises(RuntimeError, match=CHANGED):
        out.sum().backward()


def test_change_that_the_recomputation_does_not_reach_is_harmless() -> None:
    """Early stop ends it before the change, with the value that forward used."""
    x = leaf(3)
    rerun(change_after_saving, x).sum().backward()
    y = x.sin()
    (expected,) = torch.autograd.grad((y.exp() * y).sum(), x)
    assert torch.equal(x.grad, expected)


@RUNS
def test_output_changed_after_forward_is_recomputed(run: Run) -> None:
    """Plain autograd refuses, for want of the value; here it is computed again, and right."""
    x = leaf(3)
    out = run(torch.exp, x)
    with torch.no_grad():
        out.add_(1)
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        frozen = torch.randn(3)
    x = leaf(3)
    rerun(lambda x, frozen: (x + frozen).sum(), x, frozen).backward()
    assert torch.equal(x.grad, torch.ones(3))


@ALL
@pytest.mark.parametrize("size", [3, 2000], ids=["small", "large"])
def test_tensor_in_a_list_changed_after_forward(run: Run, size: int) -> None:
    other = torch.ones(size)
    out = run(lambda x, others: (x * others[0]).sin(), leaf(size), [other])
    other.add_(1)
    with pytest.raises(recollect.CheckpointError, match=CHANGED):
        out.sum().backward()


def test_guard_can_be_switched_off() -> None:
    tensors = [torch.zeros(3, 1), torch.zeros(3), torch.zeros(2000)]
    positional, small, large = tensors
    inputs = Inputs((positional, [small, large]), {}, guard=False)
    positional += 1
    inputs.settle()
    for tensor in tensors:
        tensor.add_(1)
    inputs.recall()
    swapped = inputs.swap()
    assert [tensor.max().item() for tensor in tensors] == [2, 1, 1]
    assert swapped is not None
    swapped.put_back()
    assert [tensor._version for tensor in tensors] == [2, 1, 1]


# --- containers and objects -----------------------------------------------------------------------


@RUNS
def test_list_that_the_caller_extends(run: Run) -> None:
    def train(run: Run) -> Any:
        items = [leaf(3)]
        outs = []
        for _ in range(3):
            outs.append(run(lambda items: torch.stack(items).sin().exp(), items))
            items.append(leaf(3))
        torch.cat(outs).sum().backward()
        return outs, [item.grad for item in items[:3]], len(items)

    assert_transparent(train, run)


@RUNS
def test_list_of_hidden_states_that_the_region_reads(run: Run) -> None:
    """As a dense net does: what a region returns goes into the list that the next one gets."""

    def train(run: Run) -> Any:
        hidden = [leaf(3)]
        for _ in range(3):
            hidden.append(run(lambda hidden: torch.stack(hidden).sum(0).sin(), hidden))
        hidden[-1].sum().backward()
        return hidden[0].grad, hidden

    assert_transparent(train, run)


@ALL
def test_counters(run: Run) -> None:
    """Of every sort: each counts once, and is read in the rerun as in forward."""

    def count(x: Tensor, state: State, calls: list[int], totals: dict[str, Any]) -> Tensor:
        state.step += 1
        calls.append(state.step)
        totals["calls"] = totals.get("calls", 0) + 1
        totals["tensor"] += 1
        return (x * state.step + len(calls) + totals["calls"] * totals["tensor"]).sin()

    def train(run: Run) -> Any:
        state, calls, totals = State(step=3), [0], {"tensor": torch.ones(1)}
        xs = [leaf(3), leaf(3)]
        outs = [run(count, x, state, calls, totals) for x in xs]
        torch.cat(outs).sum().backward()
        return outs, [x.grad for x in xs], state.step, calls, totals

    assert_transparent(train, run)


@ALL
def test_state_that_the_region_keeps_in_a_container_is_its_own(run: Run) -> None:
    """A small tensor that a dict or list holds: plain autograd does not mind, and neither do we."""

    def count(x: Tensor, state: dict[str, Tensor], cache: list[Tensor]) -> Tensor:
        state["calls"] += 1
        cache[0][0] = x.detach()[0]
        return (x.sin() * cache[0]).exp()

    def train(run: Run) -> Any:
        x, state, cache = leaf(4), {"calls": torch.zeros(1)}, [torch.zeros(4)]
        out = run(count, x, state, cache)
        out.sum().backward()
        return out, x.grad, state, cache, state["calls"]._version

    assert_transparent(train, run)


@RUNS
def test_tensor_counter_of_several_regions_that_an_op_saves(run: Run) -> None:
    """Plain autograd raises, since what it saved has changed; and so do we."""

    def count(x: Tensor, state: list[Tensor]) -> Tensor:
        state[0] += 1
        return (x * state[0]).sin()

    def train(run: Run) -> Any:
        x, state = leaf(3), [torch.zeros(1)]
        (run(count, x, state) + run(count, x, state)).sum().backward()

    for run_it in (plain, run):
        with pytest.raises(RuntimeError, match=CHANGED):
            train(run_it)


class ModelOutput(OrderedDict):
    """As in transformers: items that are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any) -> None:
        raise TypeError("forbidden")


@RUNS
def test_model_output_that_is_filled_in(run: Run) -> None:
    def head(output: ModelOutput) -> Tensor:
        hidden = output["hidden"].sin()
        output["hidden"] = hidden.detach()
        output["logits"] = hidden.exp().detach()
        return hidden.exp()

    def train(run: Run) -> Any:
        x, output = leaf(3), ModelOutput()
        output["hidden"] = x
        out = run(head, output)
        out.sum().backward()
        return out, x.grad, dict(output), output.hidden is output["hidden"]

    assert_transparent(train, run)


class Layer:
    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        return self.keys


class Cache:
    """As in transformers: a list of layers, which grows, and each of which grows."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def update(self, keys: Tensor, layer: int) -> Tensor:
        while len(self.layers) <= layer:
            self.layers.append(Layer())
        return self.layers[layer].update(keys)


def attend(x: Tensor, layer: int, past_key_values: Cache) -> Tensor:
    keys = past_key_values.update(x.sin(), layer)
    return (x @ keys.T).softmax(-1) @ keys


def generate(run: Run, x: Tensor, cache: Cache) -> Tensor:
    outs = []
    for token in x.split(1):
        for layer in range(2):
            token = run(attend, token, layer, past_key_values=cache)  # noqa: PLW2901
        outs.append(token)
    return torch.cat(outs)


@RUNS
def test_cache_of_keys_and_values(run: Run) -> None:
    def train(run: Run) -> Any:
        x, cache = leaf(3, 2), Cache()
        out = generate(run, x, cache)
        keys = [layer.keys for layer in cache.layers]
        out.square().sum().backward()
        assert all(a is b.keys for a, b in zip(keys, cache.layers, strict=True))
        return out, x.grad, keys

    assert_transparent(train, run)


@RUNS
def test_cache_and_several_backwards(run: Run) -> None:
    def train(run: Run) -> Any:
        x = leaf(3, 2)
        out = generate(run, x, Cache())
        out[0].sum().backward(retain_graph=True)
        first = x.grad.clone()
        out.square().sum().backward(retain_graph=True)
        (slope,) = torch.autograd.grad(out.square().sum(), x)
        return first, x.grad, slope

    assert_transparent(train, run)


@RUNS
def test_cache_in_nested_regions(run: Run) -> None:
    """The inner regions' inputs come out of a rerun of the outer one, which has the cache too."""

    def block(x: Tensor, cache: Cache) -> Tensor:
        return generate(run, x, cache).sin()

    def train(run: Run) -> Any:
        x, cache = leaf(3, 2), Cache()
        out = run(block, x, cache) + run(block, x, cache=cache)
        out.square().sum().backward()
        return out, x.grad, [layer.keys for layer in cache.layers]

    assert_transparent(train, run)


@ALL
def test_closure_sees_the_same_list(run: Run) -> None:
    def train(run: Run) -> Any:
        scales = [2.0]

        def region(x: Tensor, argument: list[float]) -> Tensor:
            assert argument is scales
            argument.append(3.0)
            return (x * scales[-1] + sum(scales)).sin()

        x = leaf(3)
        out = run(region, x, scales)
        scales.append(5.0)
        out.sum().backward()
        return out, x.grad, scales

    assert_transparent(train, run)


@RUNS
def test_backward_inside_the_region(run: Run) -> None:
    """The first rerun is in the middle of forward, when the list has grown by half."""

    def region(x: Tensor, items: list[Tensor]) -> Tensor:
        items.append(x.sin())
        (slope,) = torch.autograd.grad(items[-1].exp().sum(), x, retain_graph=True)
        items.append(slope)
        return torch.stack(items).sum(0) * x

    def train(run: Run) -> Any:
        x, items = leaf(3), [torch.ones(3)]
        out = run(region, x, items)
        out.sum().backward()
        return out, x.grad, items

    assert_transparent(train, run)


@RUNS
def test_lazy_attribute_is_made_again(run: Run) -> None:
    """Found made, it would save the rerun the operations that backward waits for."""

    class Lazy:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        @functools.cached_property
        def sine(self) -> Tensor:
            return self.x.sin().exp()

    def train(run: Run) -> Any:
        x = leaf(3)
        out = run(lambda lazy: lazy.sine * lazy.sine, Lazy(x))
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, run)


@ALL
@pytest.mark.parametrize("stop", [True, False], ids=["stops", "runs through"])
def test_exception_in_the_rerun_puts_everything_back(run: Run, stop: bool) -> None:
    state, items = State(step=3), [1]

    def region(x: Tensor, state: State, items: list[int]) -> Tensor:
        state.step += 1
        items.append(state.step)
        if recollect.is_recomputing():
            state.debris, items[:] = True, []
            if stop:
                raise KeyError
        return (x * state.step).sin()

    out = run(region, leaf(3), state, items)
    state.step = 7
    with pytest.raises(KeyError) if stop else nullcontext():
        out.sum().backward()
    assert (vars(state), items) == ({"step": 7}, [1, 4])


@RUNS
@pytest.mark.parametrize("go_backward", [False, True], ids=["before_backward", "after_backward"])
def test_inputs_in_containers_die_with_the_graph(run: Run, go_backward: bool) -> None:
    with collector_off():
        state = State(items=[leaf(3) * 2], count=torch.zeros(1))
        held = [ref(state), ref(state.items[0]), ref(state.count)]

        def region(state: State) -> Tensor:
            state.count += 1
            state.step = 1
            return state.items[0].sin().exp()

        out = run(region, state)
        if go_backward:
            out.sum().backward()
        del state, out
        assert [reference() for reference in held] == [None] * 3


@RUNS
def test_cache_with_what_the_region_made_dies_after_backward(run: Run) -> None:
    with collector_off():
        cache = Cache()
        out = generate(run, leaf(2, 2), cache)
        held = [ref(cache), ref(cache.layers[0].keys)]
        out.sum().backward()
        del cache, out
        assert [reference() for reference in held] == [None, None]


@ALL
def test_iterators_are_refused_before_anything_is_run(run: Run) -> None:
    calls: list[Any] = []
    with pytest.raises(TypeError, match=r"args\[1\] of .* is an iterator \(zip\)"):
        run(lambda x, pairs: calls.append(pairs), leaf(3), zip([1], [2], strict=True))
    assert calls == []


def test_iterators_are_nobodys_business_without_grad() -> None:
    with torch.no_grad():
        assert rerun(sum, iter([1, 2])) == 3
