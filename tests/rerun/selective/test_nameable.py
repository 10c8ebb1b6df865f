"""Tensors that the region names: kept by name, and nothing else changes."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recollect
from recollect import policy
from tests._support import assert_identical
from tests.rerun.selective._helpers import (
    again,
    assert_right,
    leaves,
    limit,
    selective,
    square,
    step,
    total,
)

aten = torch.ops.aten
tag = recollect.tag
named = policy.save_named


def products(x, w):
    first = tag(x @ w, "first").sin()
    second = tag(first @ w, "second").cos()
    return (second @ w).exp()


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "mm"),
    [(["first"], 2), (["second"], 2), (["first", "second"], 1), (["*"], 1), (["f*t", "sec*"], 1)],
)
def test_what_has_a_name_is_kept_and_nothing_else(patterns, mm):
    counts = again(products, square(), named(*patterns), early_stop=False)
    assert counts == {
        aten.mm.default: mm,
        aten.sin.default: 1,
        aten.cos.default: 1,
        aten.exp.default: 1,
    }


def test_a_name_without_a_rule_changes_nothing():
    with_names = again(products, square(), policy.save_ops(aten.sin), early_stop=False)
    assert with_names[aten.mm.default] == 3
    assert again(products, square(), None, early_stop=False)[aten.mm.default] == 3


def test_names_have_parts():
    def function(x, w):
        return tag(tag(x @ w, "attn.q").sin() @ w, "attn.k").cos()

    for pattern, mm in [("attn.q", 1), ("q", 1), ("*.k", 1), ("attn.*", 0)]:
        counts = again(function, square(), named(pattern), early_stop=False)
        assert counts[aten.mm.default] == mm, pattern


def test_one_name_for_several_tensors():
    def function(x, w):
        for _ in range(3):
            x = tag(x @ w, "h").sin()
        return x

    assert again(function, square(), named("h"), early_stop=False)[aten.mm.default] == 0


def test_several_names_for_one_tensor():
    def function(x, w):
        return tag(tag(tag(x @ w, "a"), "b"), "a").sin()

    for name in "ab":
        assert again(function, square(), named(name), early_stop=False)[aten.mm.default] == 0


# --- identity -------------------------------------------------------------------------------------


def test_outside_of_a_region_nothing_happens():
    (x,) = square(1)
    with_grad = x.sin()
    for tensor in (x, with_grad, with_grad.t(), torch.ones(2), nn.Parameter(torch.ones(2))):
        assert tag(tensor, "name") is tensor


@pytest.mark.parametrize("given", [None, named("h"), named("*"), policy.everything()])
def test_inside_of_a_region_it_is_the_same_object(given):
    def function(x):
        y = x.sin()
        assert tag(y, "h") is y
        return y.exp()

    assert_right(function, square(1), given)


@pytest.mark.parametrize("bad", [3, None, [torch.ones(1)], "x"])
def test_only_tensors_have_names(bad):
    with pytest.raises(TypeError, match="takes a tensor and its name"):
        tag(bad, "name")


@pytest.mark.parametrize("bad", [3, None, b"name", torch.ones(1)])
def test_a_name_is_a_string(bad):
    with pytest.raises(TypeError, match="takes a tensor and its name") as caught:
        tag(torch.ones(1), bad)
    assert "tensor([" not in str(caught.value)  # which may be long


def test_without_grad_nothing_is_kept():
    with torch.no_grad():
        out = recollect.checkpoint(products, *square(), policy=named("nobody"))
    assert not out.requires_grad


# --- loud -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["frist", "Second", "first.*"])
def test_an_unknown_name_raises_and_lists_the_names(pattern):
    with pytest.raises(ValueError, match="no tensor of the region") as info:
        recollect.checkpoint(products, *square(), policy=named("second", pattern))
    assert repr(pattern) in str(info.value)
    assert "first" in str(info.value)
    assert "second" in str(info.value)


def test_where_no_name_is_given_there_are_none():
    with pytest.raises(ValueError, match="The names are: none"):
        recollect.checkpoint(torch.sin, *square(1), policy=named("h"))


def test_after_the_error_all_is_as_before():
    for _ in range(2):
        with pytest.raises(ValueError, match="no tensor of the region"):
            recollect.checkpoint(products, *square(), policy=named("frist"))
    assert_right(products, square(), named("first"))


def test_an_exception_of_the_region_is_not_hidden():
    def failing(x):
        tag(x.sin(), "h")
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        recollect.checkpoint(failing, *square(1), policy=named("other"))
    assert recollect.tag(torch.ones(1), "x").item() == 1
    assert_right(products, square(), named("first"))


@pytest.mark.parametrize("name", ["y", "v"])
def test_what_an_in_place_op_made_cannot_be_kept(name):
    def function(x):
        y = tag(x.sin().mul_(2), "y")
        return tag(y.view(-1), "v").exp()

    with pytest.raises(ValueError, match="changed in place"):
        recollect.checkpoint(function, *square(1), policy=named(name))


@pytest.mark.parametrize("allow_mutation", [False, True])
@pytest.mark.parametrize(
    "rules", [named("y"), named("y") | policy.save_ops(aten.sin)], ids=["recomputed", "kept"]
)
def test_nor_can_it_if_the_memory_is_held_or_mutation_allowed(rules, allow_mutation):
    def contexts():
        return recollect.create_selective_checkpoint_contexts(
            rules, allow_cache_entry_mutation=allow_mutation
        )

    def function(x):
        return tag(x.sin().mul_(2), "y").exp()

    with pytest.raises(ValueError, match="changed in place"):
        recollect.checkpoint(function, *square(1), context_fn=contexts)


# --- kinds of tensors -----------------------------------------------------------------------------


def test_the_output_of_a_linear_layer_on_a_batch():
    linear = nn.Linear(4, 4)

    def function(x):
        return tag(linear(x), "h").sin()

    (x,) = leaves((2, 3, 4))
    counts = again(function, [x], named("h"), early_stop=False)
    assert counts[aten.addmm.default] == 0


@pytest.mark.parametrize("view", ["view", "transpose", "slice", "chunk", "unbind", "detach"])
def test_a_view_keeps_what_it_is_a_view_of(view):
    views = {
        "view": lambda h: h.view(2, 8),
        "transpose": lambda h: h.t(),
        "slice": lambda h: h[1:3],
        "chunk": lambda h: h.chunk(2)[1],
        "unbind": lambda h: h.unbind()[2],
        "detach": lambda h: h.detach(),
    }

    def function(x, w):
        h = x @ w
        return tag(views[view](h), "h").exp() * h.sum()

    assert again(function, square(), named("h"), early_stop=False)[aten.mm.default] == 0


def test_all_results_of_an_op_are_kept_if_they_are_there():
    def function(x):
        values, indices = x.sort(-1)
        return tag(values, "h").sin() * indices

    given = policy.recompute_ops(aten.topk) | named("h")
    with pytest.warns(UserWarning, match="topk"):
        recollect.checkpoint(function, *square(1), policy=given)
    counts = again(function, square(1), named("h"), early_stop=False)
    assert counts[aten.sort.default] == 0


MULTIPLE = {
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), aten.native_layer_norm),
    "max": (lambda x: x.max(-1).values, aten.max.dim),
    "attention": (
        lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
        aten._scaled_dot_product_flash_attention_for_cpu,
    ),
    "max_pool": (lambda x: F.max_pool2d(x[None], 2), aten.max_pool2d_with_indices),
}


def test_a_detached_result_keeps_the_result():
    def function(x, w):
        h = tag((x @ w).detach(), "h")
        return (h * x).sin().exp()

    assert again(function, square(), named("h"), early_stop=False)[aten.mm.default] == 0


@pytest.mark.parametrize("name", MULTIPLE)
def test_one_of_several_results_of_which_the_others_are_gone(name):
    op, kernel = MULTIPLE[name]

    def function(x):
        return tag(op(x), "h").sin()

    counts = again(function, square(1), named("h"), early_stop=False)
    assert counts[kernel.default if hasattr(kernel, "default") else kernel] == 0


def test_an_input_and_a_weight_are_there_anyway():
    def function(x, w):
        return (tag(x, "x") @ tag(w, "w")).sin()

    counts = again(function, square(), named("x", "w"), early_stop=False)
    assert counts == {aten.mm.default: 1, aten.sin.default: 1}


def test_a_view_of_an_input_is_there_anyway():
    assert_right(lambda x: tag(x.t(), "x").sin().exp(), square(1), named("x"))


def test_a_dead_tensors_place_is_not_taken_for_another():
    """Ids are used again."""

    def function(x, w):
        for n in range(20):
            x = (x @ w).tanh()
            if n % 2:
                x = tag(x * 1, "h")
        return x

    counts = again(function, square(), named("h"), early_stop=False)
    assert counts[aten.mul.Tensor] == 0
    assert counts[aten.mm.default] == 20


def test_random_numbers_are_kept_by_name():
    def function(x):
        noise = tag(torch.rand(4), "noise")
        return (x * noise).sin() * (x * torch.rand(4)).cos()

    counts = again(function, square(1), named("noise"), early_stop=False)
    assert counts[aten.rand.default] == 1


def test_numbers_of_a_generator_of_the_users_are_refused():
    generator = torch.Generator().manual_seed(0)

    def function(x):
        return (x * tag(torch.rand(4, generator=generator), "noise")).sin()

    with pytest.raises(ValueError, match=r"drawn from a torch\.Generator of your own"):
        selective(named("noise"))(function, *square(1))


# --- late names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_name_given_after_the_tensor_was_used(early_stop):
    def function(x, w):
        h = x @ w
        y = h.sin()
        tag(h, "h")
        return y.exp().cos()

    counts = again(function, square(), named("h"), early_stop=early_stop)
    assert counts[aten.mm.default] == 0


def written_through_a_view(x):
    y = x.sin()
    y[0].mul_(2)
    return tag(y, "h").exp().cos()


def base_written_to(x):
    y = x.sin()
    v = y.view(-1)
    y.mul_(2)
    return tag(v, "h").exp().cos()


def written_through_an_alias(x):
    y = x.sin()
    y.detach().mul_(2)
    return tag(y, "h").exp().cos()


def written_through_data(x):
    y = x.sin()
    y.data.mul_(2)
    return tag(y, "h").exp().cos()


def written_when_the_result_is_gone(x):
    v = x.sin().view(-1)
    v.data.mul_(2)
    return tag(v, "h").exp().cos()


def written_before_the_first_view(x):
    y = x.sin()
    y.data.mul_(2)
    v = y.view(-1)
    del y
    return tag(v, "h").exp().cos()


def replaced(x):
    y = x.sin()
    z = y.exp()
    y.data = torch.ones_like(y)
    return (tag(y, "h").exp() * z).cos()


def replaced_before_the_first_view(x):
    y = x.sin()
    z = y.exp()
    y.data = torch.ones_like(y)
    v = y.view(-1)
    del y
    return tag(v, "h").exp().cos() * z.view(-1)


@pytest.mark.parametrize(
    "function",
    [
        written_through_a_view,
        base_written_to,
        written_through_an_alias,
        written_through_data,
        written_when_the_result_is_gone,
        written_before_the_first_view,
        replaced,
        replaced_before_the_first_view,
    ],
)
def test_a_name_given_after_the_tensor_was_changed_is_right_or_refused(function):
    expected = step(function, square(1))
    try:
        actual = step(function, square(1), selective(named("h")))
    except (ValueError, recollect.CheckpointError):
        return
    assert_identical(actual, expected)


def test_a_named_tensor_that_is_changed_afterwards():
    def function(x, w):
        h = tag(x @ w, "h")
        h.mul_(2)
        return h.sin()

    assert again(function, square(), named("h"), early_stop=False)[aten.mm.default] == 0


# --- order of rules -------------------------------------------------------------------------------


def test_the_first_rule_that_matches_wins():
    run = lambda given: again(products, square(), given, early_stop=False)[aten.mm.default]  # noqa: E731
    recompute = policy.recompute_ops(aten.mm)
    assert run(named("first") | recompute) == 2
    assert run(recompute | named("first")) == 3
    assert run(named("first") | policy.matmuls()) == 0
    assert run(policy.matmuls() | named("first")) == 0
    assert run(policy.nothing() | named("first")) == 3
    assert run(named("first") | policy.nothing()) == 2


class Counting:
    """A store that counts what it gets."""

    def __init__(self):
        self.got = 0

    def put(self, tensor):
        self.got += 1
        return tensor

    def get(self, handle):
        return handle

    def drop(self, handle):
        pass


@limit("what is kept already is not moved")
def test_a_name_before_an_offloading_rule_keeps_on_the_device(monkeypatch):
    store = Counting()
    monkeypatch.setattr("recollect.store.offload_batch.host_store", lambda: store)
    recollect.checkpoint(products, *square(), policy=policy.offload_ops(aten.mm))
    assert store.got == 3
    store.got = 0
    given = named("first") | policy.offload_ops(aten.mm)
    recollect.checkpoint(products, *square(), policy=given)
    assert store.got == 2


# --- regions in regions, threads ------------------------------------------------------------------


@pytest.mark.parametrize("outer", [None, named("first"), named("inner"), policy.everything()])
@pytest.mark.parametrize("inner", [None, named("inner"), policy.matmuls(), policy.nothing()])
def test_regions_in_regions(outer, inner):
    def part(h, w):
        return tag(h @ w, "inner").cos()

    def nested(x, w):
        h = tag(x @ w, "first").sin()
        return recollect.checkpoint(part, h, w, policy=inner).exp()

    def flat(x, w):
        return part(tag(x @ w, "first").sin(), w).exp()

    expected = step(flat, square())
    if inner == outer == named("inner"):
        # The innermost region with rules about names is the one that hears them.
        with pytest.raises(ValueError, match="no tensor of the region"):
            step(nested, square(), selective(outer))
    else:
        assert_identical(step(nested, square(), selective(outer)), expected)


def test_an_inner_region_without_names_lets_the_outer_one_hear():
    def nested(x, w):
        return recollect.checkpoint(lambda x: tag(x @ w, "h").sin(), x).exp()

    assert_right(nested, square(), named("h"))


def test_another_thread_does_not_disturb():
    """It names a tensor while this one is inside a region."""
    (x, w) = square()

    def function(x, w):
        thread = threading.Thread(target=lambda: tag(torch.ones(1) * 2, "stranger"))
        thread.start()
        thread.join()
        return tag(x @ w, "h").sin()

    with pytest.raises(ValueError, match="The names are: h"):
        recollect.checkpoint(function, x, w, policy=named("stranger"))
    assert_right(function, [x, w], named("h"))


def test_second_backward_and_double_backward():
    x, w = square()
    expected = torch.autograd.grad(total(products(x, w)), [x, w])
    out = total(recollect.checkpoint(products, x, w, policy=named("*")))
    for _ in range(3):
        assert_identical(torch.autograd.grad(out, [x, w], retain_graph=True), expected)
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (plain_slope,) = torch.autograd.grad(total(products(x, w)), x, create_graph=True)
    assert_identical(
        torch.autograd.grad(slope.square().sum(), [x, w]),
        torch.autograd.grad(plain_slope.square().sum(), [x, w]),
    )


def test_tag_is_documented():
    assert "save_named" in inspect.getdoc(recollect.tag)
