"""Arguments that change before backward: found again as they were, or an error with their name."""

from __future__ import annotations

import functools
import io
import itertools
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect.errors import InputChanged
from recollect.state import contents as contents_module
from recollect.state.buffers import BufferState
from recollect.state.inputs import Inputs
from recollect.state.iterators import StandIn
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
    swapped = inputs.swapped()
    assert swapped is not None
    with swapped:
        assert [tensor.max().item() for tensor in tensors] == [2, 1, 1]
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


@ALL
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("in_a_list", [False, True])
def test_statistics_that_are_arguments_count_once(run: Run, in_a_list: bool, device: str) -> None:
    """``batch_norm`` does not raise their versions."""

    def norm(x: Tensor, mean: Any, var: Any) -> Tensor:
        mean, var = (t[0] if in_a_list else t for t in (mean, var))
        return F.batch_norm(x.sin(), mean, var, training=True).exp()

    def train(run: Run) -> Any:
        x = torch.linspace(-1, 1, 12, device=device).reshape(4, 3).requires_grad_()
        statistics = torch.zeros(3, device=device), torch.ones(3, device=device)
        out = run(norm, x, *([t] if in_a_list else t for t in statistics))
        out.sum().backward()
        return out, x.grad, statistics

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


# --- containers and objects are put back in place for a while, whatever happens meanwhile ---------


class WithSlots:
    """An object without a dictionary."""

    __slots__ = ("lines",)

    def __init__(self, lines: Any) -> None:
        self.lines = lines


class Items(list[Any]):
    """A list with attributes."""


@dataclass
class Row:
    items: Any


class Pair(NamedTuple):
    first: Any
    second: Any


@contextmanager
def as_at_the_call(inputs: Inputs) -> Iterator[None]:
    """Where a rerun would take place."""
    inputs.recall()
    with inputs.swapped() or nullcontext():
        yield


@pytest.fixture(autouse=True)
def lock_is_free() -> Iterator[None]:
    yield
    assert not contents_module._swapping._is_owned()


# --- in place -------------------------------------------------------------------------------------


def test_nothing_to_do_without_containers() -> None:
    inputs = Inputs((leaf(3), None, 1, "a", (torch.zeros(1, 1), 2)), {"dtype": torch.float32})
    inputs.settle()
    assert inputs._contents is None
    assert inputs.swapped() is None


def test_list_is_the_same_list() -> None:
    items = [1]
    inputs = Inputs((items, items), {"more": {"items": items}})
    items.append(2)
    inputs.settle()
    items.append(3)
    args, kwargs = inputs.recall()
    assert args[0] is args[1] is kwargs["more"]["items"] is items
    with as_at_the_call(inputs):
        assert items == [1]
        items.append(4)
    assert items == [1, 2, 3]


#: What is nested how: a thing and the list inside it.
NESTED: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": lambda items: (1, (items,)),
    "named tuple": lambda items: Pair(1, items),
    "frozenset": lambda items: frozenset([ByIdentity(items)]),
    "list": lambda items: [[items]],
    "dict": lambda items: {"a": {"b": items}},
    "set": lambda items: {ByIdentity(items)},
    "deque": lambda items: deque([items]),
    "object": lambda items: State(inner=State(items=items)),
    "namespace": lambda items: SimpleNamespace(items=items),
    "view": lambda items: {"a": items}.values(),
    "array of objects": lambda items: [items, np.array([1, None], dtype=object)],
}


class ByIdentity:
    def __init__(self, items: list[Any]) -> None:
        self.items = items


@pytest.mark.parametrize("by_name", [False, True], ids=["args", "kwargs"])
@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
def test_nested(nest: Callable[[list[Any]], Any], by_name: bool) -> None:
    items = [1]
    nested = nest(items)
    inputs = Inputs((), {"a": nested}) if by_name else Inputs((nested,), {})
    items.append(2)
    with as_at_the_call(inputs):
        assert items == [1]
    assert items == [1, 2]


def test_what_is_inside_is_put_back_with_what_holds_it() -> None:
    """The layers of a cache: those at the call are not those of today, and each has changed."""
    first = State(keys="old")
    cache = State(layers=[first], seen=1)
    inputs = Inputs((), {"cache": cache})
    first.keys = "new"
    cache.layers.append(State(keys="second"))
    cache.layers, layers = [State(keys="third")], cache.layers
    cache.seen = 2
    del first
    with as_at_the_call(inputs):
        assert cache.layers is layers
        assert [layer.keys for layer in cache.layers] == ["old"]
        assert cache.seen == 1
    assert [layer.keys for layer in cache.layers] == ["third"]
    assert [layer.keys for layer in layers] == ["new", "second"]
    assert cache.seen == 2


def test_cycles() -> None:
    items: list[Any] = [1]
    state = State(items=items)
    state.me = state
    items.extend([items, state, (items, state)])
    inputs = Inputs((items, state), {})
    items.append(2)
    state.me = None
    with as_at_the_call(inputs):
        assert len(items) == 4
        assert state.me is state
    assert len(items) == 5
    assert state.me is None


def test_deep() -> None:
    innermost = [1]
    nested: Any = innermost
    for n in range(contents_module.LIMIT - 1):
        nested = [nested] if n % 3 else (State(a=nested) if n % 2 else {"a": nested})
    inputs = Inputs((nested,), {})
    innermost.append(2)
    with as_at_the_call(inputs):
        assert innermost == [1]
    assert innermost == [1, 2]


def test_deep_tuples_hit_no_limit_of_recursion() -> None:
    innermost = [1]
    nested: Any = innermost
    for _ in range(100_000):
        nested = (nested,)
    inputs = Inputs((nested,), {})
    innermost.append(2)
    with as_at_the_call(inputs):
        assert innermost == [1]


def test_limit_counts_from_the_outside_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents_module, "LIMIT", 5)
    deep: list[Any] = [1]
    chain: Any = deep
    for _ in range(6):
        chain = [chain]
    near = [[1], [2]]
    inputs = Inputs((chain, near), {})
    deep.append(2)
    near[1].append(3)
    with as_at_the_call(inputs):
        assert near == [[1], [2]]
        assert deep == [1, 2], "not looked at"


def test_long_lists_of_numbers_are_one_thing() -> None:
    numbers = [*range(10 * contents_module.LIMIT)]
    inputs = Inputs((numbers, last := [1]), {})
    numbers.clear()
    last.append(2)
    with as_at_the_call(inputs):
        assert (len(numbers), last) == (10 * contents_module.LIMIT, [1])


def test_things_that_change_together_with_their_attributes() -> None:
    class Output(dict):
        pass

    output = Output(a=1)
    output.b = [2]
    inputs = Inputs((output,), {})
    output["a"] = 3
    output.b.append(4)
    output.c = 5
    with as_at_the_call(inputs):
        assert (dict(output), vars(output)) == ({"a": 1}, {"b": [2]})
    assert (dict(output), vars(output)) == ({"a": 3}, {"b": [2, 4], "c": 5})


def test_modules_are_not_looked_into() -> None:
    module = nn.Linear(1, 1)
    module.calls = [1]
    inputs = Inputs((module, [module]), {})
    module.calls.append(2)
    module.other = 3
    with as_at_the_call(inputs):
        assert module.calls == [1, 2]
        assert module.other == 3


def test_modules_and_generators_are_handed_on() -> None:
    module, generator = nn.Linear(1, 1), torch.Generator()
    inputs = Inputs((module,), {"state": State(inner=[generator])})
    assert [type(thing) for thing in inputs.reachable()] == [nn.Linear, torch.Generator]
    assert Inputs((torch.zeros(1),), {}).reachable() == []
    made = Inputs((len, torch.sin, Inputs.settle), {"f": inputs.settle}).reachable()
    assert made == [Inputs.settle, inputs.settle]


# --- arrays and tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 200_000])
@pytest.mark.parametrize("make", [np.ones, lambda size: bytearray(b"\1" * size)])
def test_array_that_has_changed_is_refused(make: Callable[[int], Any], size: int) -> None:
    data, items = make(size), [1]
    inputs = Inputs((items,), {"state": State(table=[data])})
    with as_at_the_call(inputs):
        assert items == [1]
    data[0] = 7
    items.append(2)
    inputs.recall()
    with (
        pytest.raises(
            InputChanged,
            match=r"kwargs\['state'\]\.table\[0\] of .* changed: it holds other values",
        ) as info,
        as_at_the_call(inputs),
    ):
        pass
    assert "Pass a copy" in str(info.value)
    assert items == [1, 2], "all else is as it was"


def test_array_that_only_the_rerun_changes_is_refused() -> None:
    data, items = np.ones(3), [1]
    inputs = Inputs((data, items), {})
    items.append(2)
    with (
        pytest.raises(InputChanged, match=r"args\[0\] of .* changed: it holds other values"),
        as_at_the_call(inputs),
    ):
        data[0] = 7
    assert items == [1, 2], "all else is as it was"


def test_growing_array_says_how_much() -> None:
    data = np.ones(3)
    inputs = Inputs((data,), {})
    data.resize(5, refcheck=False)
    changed = r"args\[0\] of .* changed: shape \(3,\).* -> shape \(5,\)"
    with pytest.raises(InputChanged, match=changed), as_at_the_call(inputs):
        pass


def test_without_guard_an_array_that_cannot_be_put_back_is_left() -> None:
    data = np.ones(3)
    inputs = Inputs((data,), {}, guard=False)
    data[0] = 7
    with as_at_the_call(inputs):
        assert data[0] == 7


def test_tensor_that_the_region_changes_has_its_value_and_version_back() -> None:
    counter = torch.zeros(1)
    inputs = Inputs(([counter],), {})
    buffers = BufferState([], inputs.copied)
    counter += 1
    inputs.settle()
    buffers.settle()
    counter += 1
    inputs.recall()
    with ExitStack() as stack, as_at_the_call(inputs):
        buffers.restore(stack)
        assert (counter.item(), counter._version) == (0, 0)
        counter += 1
        assert (counter.item(), counter._version) == (1, 1)
    assert (counter.item(), counter._version) == (2, 2)


def test_tensor_that_others_change_is_refused() -> None:
    tensor = torch.zeros(1)
    inputs = Inputs(([tensor],), {})
    inputs.settle()
    tensor += 1
    with pytest.raises(
        InputChanged, match=r"inplace operation: args\[0\]\[0\] of .* after the region"
    ):
        inputs.recall()


def test_copies_are_made_unseen() -> None:
    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    counter = torch.zeros(1)
    with Log():
        inputs = Inputs(([counter],), {})
        buffers = BufferState([], inputs.copied)
    counter += 1
    inputs.settle()
    with Log(), ExitStack() as stack, as_at_the_call(inputs):
        buffers.settle()
        buffers.restore(stack)
    assert seen == []


@pytest.mark.parametrize(
    "make",
    [lambda t: t, lambda t: (t,), lambda t: Pair(1, t)],
    ids=["bare", "tuple", "named tuple"],
)
def test_tensors_that_nothing_mutable_holds_are_not_copied(make: Callable[[Any], Any]) -> None:
    inputs = Inputs((), {"mask": make(torch.zeros(1, 1))})
    assert inputs.swapped() is None
    assert len(inputs._guards) == 1


# --- names ----------------------------------------------------------------------------------------

large = torch.zeros(2000)


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((1, large), {}, "args[1]"),
        (((1, (2, large)),), {}, "args[0][1][1]"),
        (([{"k": large}],), {}, "args[0][0]['k']"),
        (({1: large},), {}, "args[0][1]"),
        (({("a", 1): large},), {}, "args[0][<tuple>]"),
        (({large},), {}, "args[0]{...}"),
        ((frozenset([large]),), {}, "args[0]{...}"),
        ((deque([1, large]),), {}, "args[0][1]"),
        ((Pair(1, large),), {}, "args[0][1]"),
        (({"k": large}.values(),), {}, "args[0]['k']"),
        ((State(keys=[large]),), {}, "args[0].keys[0]"),
        ((), {"mask": large}, "kwargs['mask']"),
        ((), {"cache": State(layers=[State(keys=large)])}, "kwargs['cache'].layers[0].keys"),
        (([[[large]]], large), {}, "args[1]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_name_of_an_argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
    assert Inputs(args, kwargs)._name(large) == name


def test_name_is_where_it_was_at_the_call() -> None:
    items = [1, large]
    inputs = Inputs((items,), {})
    items.clear()
    assert inputs._name(large) == "args[0][1]"


# --- iterators ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (lambda it: ((1, it), {}), "args[1]"),
        (lambda it: (((1, it),), {}), "args[0][1]"),
        (lambda it: (([[it]],), {}), "args[0][0][0]"),
        (lambda it: ((), {"batches": it}), "kwargs['batches']"),
        (lambda it: ((), {"data": {"batches": it}}), "kwargs['data']['batches']"),
        (lambda it: ((Pair(1, it),), {}), "args[0][1]"),
        (lambda it: (({it},), {}), "args[0]{...}"),
        (lambda it: ((State(pair=(1, it)),), {}), "args[0].pair[1]"),
        (lambda it: ((Items([it]),), {}), "args[0][0]"),
    ],
)
def test_iterators_are_refused_by_name(place: Callable[[Any], Any], name: str) -> None:
    args, kwargs = place(iter([1, 2]))
    with pytest.raises(TypeError) as info:
        Inputs(args, kwargs)
    assert str(info.value).startswith(
        f"{name} of a checkpointed region is an iterator (list_iterator)"
    )
    assert "list(...)" in str(info.value)


def held_by_attribute(iterator: Any) -> list[tuple[Any, Callable[[Any], Any]]]:
    """Objects that lead to an iterator, and how it is had from each."""
    return [
        (State(lines=iterator), lambda o: o.lines),
        (WithSlots(iterator), lambda o: o.lines),
        (Row(iterator), lambda o: o.items),
        (State(inner=[1, {"a": iterator}]), lambda o: o.inner[1]["a"]),
        ([State(inner=State(lines=iterator))], lambda o: o[0].inner.lines),
    ]


@pytest.mark.parametrize("number", range(5))
def test_an_iterator_in_an_attribute_may_be_of_no_concern(number: int) -> None:
    iterator = iter([1, 2])
    thing, get = held_by_attribute(iterator)[number]
    weight = torch.randn(3, requires_grad=True)
    out = recollect.checkpoint(lambda _, w: torch.sin(w).exp(), thing, weight, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(weight.grad, (weight.sin().exp() * weight.cos()).detach())
    assert get(thing) is iterator
    assert [*iterator] == [1, 2]


@pytest.mark.parametrize("number", range(5))
def test_a_rerun_does_not_draw_from_an_iterator_in_an_attribute(number: int) -> None:
    iterator = iter([1, 2])
    thing, get = held_by_attribute(iterator)[number]
    weight = torch.randn(3, requires_grad=True)

    def draw(thing: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.sin(weight * next(get(thing)))

    out = recollect.checkpoint(draw, thing, weight, use_reentrant=False)
    with pytest.raises(InputChanged, match=r"is an iterator \(list_iterator\)"):
        out.sum().backward()
    assert get(thing) is iterator
    assert [*iterator] == [2]


@pytest.mark.parametrize(
    "iterator",
    [
        (n for n in range(3)),
        zip([1], [2], strict=True),
        enumerate([1]),
        iter({1: 2}.items()),
        itertools.count(),
        itertools.chain([1], [2]),
    ],
    ids=lambda iterator: type(iterator).__name__,
)
def test_stand_ins_are_for_iterators_of_any_kind(iterator: Any) -> None:
    row = Row(iterator)
    with as_at_the_call(Inputs((row,), {})):
        assert type(row.items) is StandIn
        assert iter(row.items) is row.items
    assert row.items is iterator


def test_another_thread_may_go_on_drawing_during_a_rerun() -> None:
    row = Row(iter([1, 2]))
    with as_at_the_call(Inputs((row,), {})):
        assert next(row.items) == 1
    assert next(row.items) == 2


class Counts:
    """An iterator that is written in Python, and has its state in attributes."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Counts:
        return self

    def __next__(self) -> int:
        self.number += 1
        return self.number


def test_an_iterator_of_python_in_an_attribute_is_put_back() -> None:
    state = State(counts=Counts())
    weight = torch.randn(3, requires_grad=True)

    def draw(state: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.sin(weight * next(state.counts))

    next(state.counts)
    out = recollect.checkpoint(draw, state, weight, use_reentrant=False)
    next(state.counts)
    out.sum().backward()
    assert torch.equal(weight.grad, (2 * (2 * weight).cos()).detach())
    assert state.counts.number == 3


def test_files_are_no_iterators() -> None:
    with tempfile.TemporaryFile() as file:
        Inputs((State(log=file, out=io.StringIO()),), {})


# --- one after the other, and at once -------------------------------------------------------------


def test_exceptions_put_everything_back() -> None:
    items, state = [1], State(step=3)
    inputs = Inputs((items, state), {})
    items.append(2)
    state.step = 4

    def fail() -> None:
        items.extend([5, 6])
        del state.step
        raise KeyError

    with pytest.raises(KeyError), as_at_the_call(inputs):
        fail()
    assert (items, state.step) == ([1, 2], 4)


def test_what_only_the_rerun_changes_is_put_back_too() -> None:
    items = [1]
    inputs = Inputs((items,), {})
    with as_at_the_call(inputs):
        items.append(2)
    assert items == [1]


def test_one_inside_the_other() -> None:
    """A rerun that starts another, of the same region or of one with the same container."""
    items: list[int] = []
    calls = []
    for n in range(3):
        calls.append(Inputs((items,), {}))
        items.append(n)
    with as_at_the_call(calls[2]):
        assert items == [0, 1]
        items.append(7)
        with as_at_the_call(calls[0]):
            assert items == []
            items.append(8)
            with as_at_the_call(calls[2]):
                assert items == [0, 1]
            assert items == [8]
        assert items == [0, 1, 7]
    assert items == [0, 1, 2]


class Worker(threading.Thread):
    """Holds the contents of ``inputs`` until it is told to end."""

    def __init__(self, inputs: Inputs, look: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._inputs = inputs
        self._look = look
        self.inside, self.leave = threading.Event(), threading.Event()
        self.saw: Any = None
        self.start()

    def run(self) -> None:
        with as_at_the_call(self._inputs):
            self.inside.set()
            assert self.leave.wait(60)
            self.saw = self._look()

    def end(self) -> Any:
        self.leave.set()
        self.join(60)
        return self.saw


def test_threads_take_turns_with_what_has_changed() -> None:
    items = [0]
    first = Inputs((items,), {})
    items.append(1)
    second = Inputs((items,), {})
    items.append(2)
    workers = [Worker(first, lambda: [*items])]
    assert workers[0].inside.wait(60)
    workers.append(Worker(second, lambda: [*items]))  # not before: it could be the faster one
    assert not workers[1].inside.wait(0.05)
    assert workers[0].end() == [0]
    assert workers[1].inside.wait(60)
    assert workers[1].end() == [0, 1]
    assert items == [0, 1, 2]


def test_nobody_changes_what_another_thread_reads() -> None:
    items: list[int] = []
    before = Inputs((items,), {})
    before.settle()
    items.append(0)
    now = Inputs((items,), {})
    now.settle()
    reader = Worker(now, lambda: [*items])
    assert reader.inside.wait(60)
    writer = Worker(before, lambda: [*items])
    assert not writer.inside.wait(0.05)
    assert reader.end() == [0]
    assert writer.inside.wait(60)
    assert writer.end() == []
    assert items == [0]


def test_what_the_region_itself_changes_serves_one_thread() -> None:
    """Also if it is as it was by now: each rerun will change it."""
    items: list[int] = []
    inputs = Inputs((items,), {})
    items.append(0)
    inputs.settle()
    items.clear()
    workers = [Worker(inputs, lambda: items.append(1)) for _ in range(2)]
    entered = [worker.inside.wait(0.2) for worker in workers]
    assert sorted(entered) == [False, True]
    for worker in sorted(workers, key=lambda worker: not worker.inside.is_set()):
        worker.end()
    assert items == []


def test_without_containers_nobody_waits() -> None:
    Inputs((items := [1],), {}).settle()
    worker = Worker(Inputs((items,), {}), lambda: [*items])
    assert worker.inside.wait(60)
    other = Worker(Inputs((torch.zeros(3, 3), (1, "a")), {}), lambda: None)
    assert other.inside.wait(60)
    other.end()
    assert worker.end() == [1]


def test_waiting_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [0]
    inputs = Inputs((items,), {})
    items.append(1)
    worker = Worker(inputs, lambda: [*items])
    assert worker.inside.wait(60)
    monkeypatch.setattr(contents_module, "PATIENCE", 0.05)
    with pytest.raises(recollect.CheckpointError, match="the same list"), as_at_the_call(inputs):
        pass
    assert worker.end() == [0]
    assert items == [0, 1]


def test_many_threads_corrupt_nothing() -> None:
    items: list[int] = []
    calls = []
    for n in range(8):
        calls.append((Inputs((items,), {}), n))
        items.append(n)
    wrong = []

    def rerun(inputs: Inputs, length: int) -> None:
        for _ in range(200):
            with as_at_the_call(inputs):
                if items != [*range(length)]:
                    wrong.append([*items])
                items.append(-1)

    threads = [threading.Thread(target=rerun, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert items == [*range(8)]


# --- lifetimes ------------------------------------------------------------------------------------


def test_everything_dies_with_the_inputs() -> None:
    with collector_off():
        state = State(items=[State()], counter=torch.zeros(1))
        held = [ref(state), ref(state.items[0]), ref(state.counter)]
        inputs = Inputs(([state],), {"state": state})
        state.items.append(1)
        state.counter += 1
        inputs.settle()
        with as_at_the_call(inputs):
            pass
        del state, inputs
        assert [reference() for reference in held] == [None, None, None]


def test_what_was_replaced_meanwhile_dies_when_it_is_put_back() -> None:
    with collector_off():
        items: list[Any] = []
        inputs = Inputs((items,), {})
        with as_at_the_call(inputs):
            items.append(made := State())
            held = ref(made)
            del made
        assert held() is None


def test_nothing_stays_behind_an_error() -> None:
    with collector_off():
        state = State()
        held = ref(state)
        inputs = Inputs(([state], data := np.ones(200_000)), {})
        data[0] = 7
        with pytest.raises(InputChanged) as info, as_at_the_call(inputs):
            pass
        del info, inputs, state
        assert held() is None
