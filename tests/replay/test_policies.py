"""Policies, stores and options with ``engine="replay"``.

A policy says which ops are not to be run again. What is held for that is up to the engine, so the
tests look at the ops of backward; gradients are compared with plain autograd in each of them.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect import CheckpointPolicy, policy
from recollect.store import host_store
from tests._support import assert_identical, collector_off, leaf
from tests.rerun.selective._helpers import Block, Model, Ops, hooks_of, seeded, total

aten = torch.ops.aten
replay = partial(recollect.checkpoint, engine="replay")

CALLS = 4


def again(function: Any, inputs: list[Tensor], **options: Any) -> list[Counter[Any]]:
    """For each of some calls, how often each op is run again. Gradients are checked."""
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    wanted = [*inputs, *weights]
    torch.manual_seed(7)
    loss = total(function(*inputs))
    with Ops() as bare:
        expected = torch.autograd.grad(loss, wanted, allow_unused=True)
    counts = []
    for _ in range(CALLS):
        torch.manual_seed(7)
        loss = total(replay(function, *inputs, **options))
        with Ops() as ops:
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
        assert_identical(found, expected)
        counts.append(ops.count - bare.count)
    return counts


def times(function: Any, inputs: list[Tensor], op: Any, **options: Any) -> int:
    """How often ``op`` is run again, in each call alike."""
    found = {count[op] for count in again(function, inputs, **options)}
    assert len(found) == 1
    return found.pop()


def products(x: Tensor, *weights: Tensor) -> Tensor:
    """One product after the other, all needed."""
    for weight in weights:
        x = (x @ weight).sin()
    return x


def square(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(count)]


# --- rules about ops ------------------------------------------------------------------------------


KEEPS_PRODUCTS: dict[str, Any] = {
    "save_ops": policy.save_ops(aten.mm),
    "save_ops, overload": policy.save_ops(aten.mm.default),
    "ops": policy.ops(aten.mm),
    "a list": [aten.mm.default],
    "matmuls": policy.matmuls(),
    "everything": policy.everything(),
    "a sum": policy.attention() | policy.matmuls(),
    "a function": lambda ctx, op, *args, **kwargs: (
        CheckpointPolicy.MUST_SAVE if op == aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
    ),
    "offload_ops": policy.offload_ops(aten.mm),
    "save, then recompute": policy.save_ops(aten.mm) | policy.recompute_ops(aten.mm),
}
DROPS_PRODUCTS: dict[str, Any] = {
    "no policy": None,
    "nothing": policy.nothing(),
    "recompute, then save": policy.recompute_ops(aten.mm) | policy.save_ops(aten.mm),
    "recompute, then everything": policy.recompute_ops(aten.mm) | policy.everything(),
    "a function": lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE,
    "a list": [aten.tanh.default],
}


@pytest.mark.filterwarnings("ignore:the policy's .* matched nothing:UserWarning")
@pytest.mark.parametrize("name", KEEPS_PRODUCTS)
def test_policies_that_keep_products(name: str) -> None:
    assert times(products, square(4), aten.mm.default, policy=KEEPS_PRODUCTS[name]) == 0


@pytest.mark.filterwarnings("ignore:the policy's .* matched nothing:UserWarning")
@pytest.mark.parametrize("name", DROPS_PRODUCTS)
def test_policies_that_repeat_products(name: str) -> None:
    assert times(products, square(4), aten.mm.default, policy=DROPS_PRODUCTS[name]) == 3


def test_everything_repeats_nothing() -> None:
    block = seeded(Block)
    counts = again(block, [leaf(3, 5, 8)], policy=policy.everything())
    assert [c for c in counts if c - Counter({aten.detach.default: 1000})] == []


@pytest.mark.parametrize(("n", "repeated"), [(1, 0), (2, 3), (3, 4), (5, 5)])
def test_every_nth_counts_anew_in_every_call(n: int, repeated: int) -> None:
    rule = policy.every_nth(aten.mm, n)
    found = again(products, square(7), policy=rule)
    assert {count[aten.mm.default] for count in found} == {repeated}


def test_a_policy_function_sees_each_op_of_a_recording_once_and_of_other_calls_never() -> None:
    asked: list[Any] = []

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append((op, ctx.is_recompute, args[0].shape))
        return CheckpointPolicy.MUST_SAVE

    x, w, v = square(3)
    for _ in range(3):
        replay(products, x, w, v, policy=decide).sum().backward()
    ops = [op for op, _, _ in asked]
    assert ops == [aten.mm.default, aten.sin.default] * 2
    assert {recomputed for _, recomputed, _ in asked} == {False}


@pytest.mark.parametrize("answer", [None, "save", 1])
def test_an_answer_that_is_no_decision_is_refused(answer: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"CheckpointPolicy|MUST_SAVE|bool"):
        replay(products, *square(2), policy=lambda *args, **kwargs: answer)


@pytest.mark.filterwarnings("ignore:the policy's .* matched nothing:UserWarning")
def test_ops_that_write_in_place_can_be_under_any_policy() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).relu_() + 1
        h[0] = x[1]
        h.add_(w)
        return F.dropout(h.exp() * 1, 0.3, inplace=True).sin()

    for rule in (*KEEPS_PRODUCTS.values(), *DROPS_PRODUCTS.values()):
        again(function, square(2), policy=rule)


def test_two_policies_on_one_function_have_recordings_of_their_own() -> None:
    for _ in range(3):
        assert times(products, square(3), aten.mm.default, policy=policy.matmuls()) == 0
        assert times(products, square(3), aten.mm.default) == 2


# --- rules about modules --------------------------------------------------------------------------


def test_modules() -> None:
    block = seeded(Block)
    x = [leaf(3, 5, 8)]
    without = times(block, x, aten.addmm.default)
    assert times(block, x, aten.addmm.default, policy=policy.save_modules("mlp.up")) == without - 1
    assert times(block, x, aten.addmm.default, policy=policy.save_modules("attn")) == without - 4
    assert times(block, x, aten.bmm.default, policy=policy.save_modules("attn")) == 0
    offloads = policy.offload_modules("mlp.*")
    assert times(block, x, aten.addmm.default, policy=offloads) == without - 2


def test_modules_of_a_region_that_is_no_module() -> None:
    block = seeded(Block)

    def function(x: Tensor) -> Tensor:
        return block(x).sin()

    found = times(function, [leaf(3, 5, 8)], aten.addmm.default, policy=policy.save_modules("attn"))
    assert found == times(function, [leaf(3, 5, 8)], aten.addmm.default) - 4


def test_modules_are_unhooked_also_after_an_exception() -> None:
    block = seeded(Block)
    before = hooks_of(block)
    for _ in range(3):
        replay(block, leaf(3, 5, 8), policy=policy.save_modules("attn")).sum().backward()
        assert hooks_of(block) == before
        with pytest.raises(RuntimeError):
            replay(block, leaf(3, 5, 7), policy=policy.save_modules("attn"))
        assert hooks_of(block) == before


@pytest.mark.parametrize("maker", [policy.save_modules, policy.offload_modules])
def test_an_unknown_module_raises_and_lists_what_there_is(maker: Any) -> None:
    block = seeded(Block)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"(?s)attn\.w_o.*attn\.wo"):
            replay(block, leaf(3, 5, 8), policy=maker("attn.w_o"))


def test_a_model_of_several_regions() -> None:
    model = seeded(Model)
    x = leaf(3, 5, 8)
    expected = torch.autograd.grad(total(model(x)), [x, *model.parameters()])
    for rule in (None, policy.matmuls(), policy.save_modules("attn"), policy.everything()):
        model.region = partial(replay, policy=rule)
        for _ in range(3):
            found = torch.autograd.grad(total(model(x)), [x, *model.parameters()])
            assert_identical(found, expected)


# --- names ----------------------------------------------------------------------------------------


def named(x: Tensor, w: Tensor) -> Tensor:
    h = recollect.tag(x @ w, "first")
    h = recollect.tag((h.sin() @ w), "second.product")
    return recollect.tag(h.exp(), "last").sin() @ w


NAMED = [("first", 1), ("second.*", 1), ("*", 0)]


@pytest.mark.parametrize(("pattern", "repeated"), NAMED)
def test_named_tensors(pattern: str, repeated: int) -> None:
    rule = policy.save_named(pattern)
    assert times(named, square(2), aten.mm.default, policy=rule) == repeated


def test_a_name_after_a_rule_that_repeats() -> None:
    rule = policy.recompute_ops(aten.mm) | policy.save_named("first")
    assert times(named, square(2), aten.mm.default, policy=rule) == 2


def test_an_unknown_name_raises_and_lists_what_there_is() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'secnd'.*second\.product, first, last"):
            replay(named, *square(2), policy=policy.save_named("secnd"))


def test_names_without_a_policy_do_nothing() -> None:
    assert times(named, square(2), aten.mm.default) == 2


def test_a_name_for_a_view_an_input_and_a_tensor_changed_in_place() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        recollect.tag(x, "input")
        h = recollect.tag((x @ w).t()[1:], "view")
        return h.sin().exp() @ w

    assert times(function, square(2), aten.mm.default, policy=policy.save_named("view")) == 0
    assert times(function, square(2), aten.mm.default, policy=policy.save_named("input")) == 1

    def changes(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).mul_(2)
        return recollect.tag(h, "changed").sin()

    with pytest.raises(ValueError, match="changed in place"):
        replay(changes, *square(2), policy=policy.save_named("changed"))


SEVERAL_RESULTS: dict[str, tuple[Any, Callable[[Tensor], tuple[Tensor, Any]]]] = {
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        lambda x: (F.scaled_dot_product_attention(*[x.view(1, 2, 4, 8)] * 3), 1),
    ),
    "layer_norm": (aten.native_layer_norm.default, lambda x: (F.layer_norm(x, (8,)), 1)),
    "std": (aten.std_mean.correction, lambda x: torch.std_mean(x, -1, keepdim=True)),
    "dropout": (aten.native_dropout.default, lambda x: torch.native_dropout(x, 0.5, True)),
}


@pytest.mark.parametrize(("op", "function"), SEVERAL_RESULTS.values(), ids=SEVERAL_RESULTS)
def test_a_name_for_one_of_several_results(
    op: Any, function: Callable[[Tensor], tuple[Tensor, Any]]
) -> None:
    def region(x: Tensor) -> Tensor:
        named, other = function(x.sin())
        recollect.tag(named, "one")
        return named.exp() * named * other

    # A call that is recorded holds what has the name, and runs the op again for the others.
    *_, last = again(region, [leaf(8, 8)], policy=policy.save_named("one"))
    assert last[op] == 0


# --- rules that match nothing ---------------------------------------------------------------------


def test_a_rule_that_matches_nothing_warns_once() -> None:
    rule = policy.save_ops(aten.cosh)
    with pytest.warns(UserWarning, match=r"(?s)cosh.*matched nothing.*aten\.mm"):
        replay(products, *square(2), policy=rule)
    for _ in range(3):
        replay(products, *square(2), policy=rule).sum().backward()


# --- stores ---------------------------------------------------------------------------------------


class Ledger:
    """A store that keeps copies, and the books."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self.puts = self.gets = self.drops = 0
        self.shapes: list[torch.Size] = []

    def put(self, tensor: Tensor) -> int:
        assert not tensor.requires_grad
        self.puts += 1
        self.shapes.append(tensor.shape)
        self.kept[self.puts] = tensor.clone()
        return self.puts

    def get(self, handle: int) -> Tensor:
        self.gets += 1
        return self.kept[handle].clone()

    def drop(self, handle: int) -> None:
        self.drops += 1
        del self.kept[handle]


STORED = {
    "save_ops": policy.save_ops(aten.mm),
    "offload_ops": policy.offload_ops(aten.mm),
    "everything": policy.everything(),
    "a list": [aten.mm.default],
}


@pytest.mark.parametrize("name", STORED)
def test_kept_values_go_through_a_store_of_the_users_own(name: str) -> None:
    store, inputs = Ledger(), square(4)
    expected = torch.autograd.grad(total(products(*inputs)), inputs)
    for call in range(CALLS):
        before, gets = store.puts, store.gets
        with collector_off():
            out = replay(products, *inputs, policy=STORED[name], store=store)
            assert store.puts - before >= 3, f"call {call}"
            assert_identical(torch.autograd.grad(total(out), inputs), expected)
            del out
            assert store.gets - gets >= 3
            assert (store.drops, store.kept) == (store.puts, {})


@pytest.mark.parametrize("name", STORED)
def test_a_store_gets_the_same_in_every_call(name: str) -> None:
    counts = []
    for _ in range(CALLS):
        store = Ledger()
        replay(products, *square(4), policy=STORED[name], store=store).sum().backward()
        counts.append(store.puts)
    assert len(set(counts)) == 1


def test_what_is_never_asked_for_is_dropped() -> None:
    store = Ledger()
    with collector_off():
        for _ in range(CALLS):
            out = replay(products, *square(4), policy=policy.matmuls(), store=store)
            del out
            assert store.drops == store.puts
            assert store.kept == {}


def test_several_backwards_ask_a_store_several_times() -> None:
    store, inputs = Ledger(), square(3)
    expected = torch.autograd.grad(total(products(*inputs)), inputs)
    for _ in range(CALLS):
        loss = total(replay(products, *inputs, policy=policy.matmuls(), store=store))
        for retain in (True, True, False):
            found = torch.autograd.grad(loss, inputs, retain_graph=retain)
            assert_identical(found, expected)
        del loss
    assert store.kept == {}


def test_an_exception_in_forward_empties_the_store() -> None:
    store = Ledger()

    def raises(x: Tensor, w: Tensor) -> Tensor:
        products(x, w, w)
        raise KeyError

    for _ in range(3):
        with pytest.raises(KeyError):
            replay(raises, *square(2), policy=policy.matmuls(), store=store)
    gc.collect()
    assert store.kept == {}


def test_what_is_offloaded_does_not_see_later_writes() -> None:
    """A store that keeps the tensor itself would; it is told before."""

    class Naive(Ledger):
        def put(self, tensor: Tensor) -> int:
            self.puts += 1
            self.kept[self.puts] = tensor
            return self.puts

        def before_write(self, handle: int) -> None:
            self.kept[handle] = self.kept[handle].clone()

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        y = (h + 1).sin()
        h.mul_(2)
        return y @ h.clone()

    for rule in (policy.matmuls(), policy.everything(), policy.offload_ops(aten.mm)):
        x, w = square(2)
        expected = torch.autograd.grad(total(function(x, w)), [x, w])
        for _ in range(CALLS):
            out = replay(function, x, w, policy=rule, store=Naive())
            assert_identical(torch.autograd.grad(total(out), [x, w]), expected)


def test_the_store_of_the_host() -> None:
    inputs = square(4)
    expected = torch.autograd.grad(total(products(*inputs)), inputs)
    for _ in range(CALLS):
        out = replay(products, *inputs, policy=policy.matmuls(), store=host_store())
        assert_identical(torch.autograd.grad(total(out), inputs), expected)


def test_inputs_are_offloaded() -> None:
    store, (x, *weights) = Ledger(), square(3)
    expected = torch.autograd.grad(total(products(x.exp(), *weights)), [x, *weights])
    for call in range(CALLS):
        with collector_off():
            puts = store.puts
            out = replay(products, x.exp(), *weights, offload_inputs=True, store=store)
            assert store.puts - puts == 1, f"call {call}: the input, and no weight"
            assert_identical(torch.autograd.grad(total(out), [x, *weights]), expected)
            del out
            assert store.kept == {}


def test_inputs_are_offloaded_beside_what_a_policy_keeps() -> None:
    store, (x, *weights) = Ledger(), square(3)
    expected = torch.autograd.grad(total(products(x.exp(), *weights)), [x, *weights])
    for _ in range(CALLS):
        options: dict[str, Any] = {"policy": policy.matmuls(), "store": store}
        out = replay(products, x.exp(), *weights, offload_inputs=True, **options)
        assert_identical(torch.autograd.grad(total(out), [x, *weights]), expected)
        del out
    assert store.kept == {}


def test_leaves_are_not_offloaded() -> None:
    store = Ledger()
    for _ in range(3):
        replay(products, *square(3), offload_inputs=True, store=store).sum().backward()
    assert store.puts == 0


# --- options --------------------------------------------------------------------------------------


def _contexts() -> Any:
    raise AssertionError("is not called")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "context_fn": ({"context_fn": _contexts}, "context_fn"),
    "debug": ({"debug": True}, "debug"),
    "values": ({"determinism_check": "values"}, "determinism_check"),
    "a check": ({"determinism_check": lambda tensor: tensor.shape}, "determinism_check"),
    "use_reentrant": ({"use_reentrant": True}, "use_reentrant"),
    "store": ({"store": Ledger()}, "store"),
    "policy and context_fn": (
        {"policy": policy.matmuls(), "context_fn": _contexts},
        "policy and context_fn",
    ),
    "engine": ({"engine": "replays"}, "engine"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused_by_name(name: str) -> None:
    options, match = BAD[name]
    with pytest.raises(ValueError, match=match):
        replay(products, *square(2), **options)
    with pytest.raises(ValueError, match=match):
        recollect.checkpointed(nn.Linear(4, 4), **{"engine": "replay", **options})


@pytest.mark.parametrize("name", ["context_fn", "debug", "determinism_check"])
def test_what_is_refused_is_called_by_its_own_name(name: str) -> None:
    """And the engine is named: not another argument that was left alone."""
    value = {"context_fn": _contexts, "debug": True, "determinism_check": "values"}[name]
    with pytest.raises(ValueError, match=r"replay") as caught:
        replay(products, *square(2), **{name: value})
    assert str(caught.value).startswith(name)


OTHER_TYPES: dict[str, dict[str, Any]] = {
    "policy": {"policy": 3},
    "store": {"policy": policy.matmuls(), "store": object()},
    "offload_inputs": {"offload_inputs": 1},
    "preserve_rng_state": {"preserve_rng_state": "yes"},
}


@pytest.mark.parametrize("name", OTHER_TYPES)
def test_options_of_the_wrong_type_are_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        replay(products, *square(2), **OTHER_TYPES[name])


HARMLESS: list[dict[str, Any]] = [
    {"use_reentrant": False},
    {"determinism_check": "none"},
    {"determinism_check": "default"},
    {"early_stop": False},
    {"debug": False},
]


@pytest.mark.parametrize("options", HARMLESS, ids=str)
def test_options_that_change_nothing(options: dict[str, Any]) -> None:
    assert times(products, square(3), aten.mm.default, **options) == 2


def test_something_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="callable"):
        replay(3, *square(1))


def test_the_wrapped_module_takes_policy_and_store() -> None:
    store = Ledger()
    block = seeded(Block)
    x = leaf(3, 5, 8)
    expected = torch.autograd.grad(total(block(x)), [x, *block.parameters()])
    make: Callable[..., Any] = partial(recollect.checkpointed, engine="replay", store=store)
    wrapped = make(block, policy=policy.save_modules("attn"))
    for _ in range(CALLS):
        found = torch.autograd.grad(total(wrapped(x)), [x, *wrapped.parameters()])
        assert_identical(found, expected)
    assert store.puts >= CALLS
    assert store.kept == {}
