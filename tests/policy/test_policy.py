"""The functions that make policies: what each keeps, and what each refuses."""

import pytest
import torch
import torch.nn.functional as F

import recollect
from recollect import policy
from tests.rerun.selective._helpers import (
    Block,
    again,
    assert_right,
    flops,
    leaves,
    seeded,
    selective,
    square,
)

aten = torch.ops.aten


def program(x, w):
    return ((x @ w).sin() @ w).cos()


def run(given, function=program, inputs=None):
    return again(function, square() if inputs is None else inputs, given, early_stop=False)


def test_all_that_is_public_is_there():
    public = {
        "save_ops",
        "recompute_ops",
        "save_modules",
        "save_named",
        "offload_ops",
        "offload_modules",
        "every_nth",
        "matmuls",
        "attention",
        "nothing",
        "everything",
        "ops",
        "Policy",
    }
    assert set(policy.__all__) == public
    assert all(getattr(policy, name).__doc__ for name in public)


# --- ops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [aten.mm, aten.mm.default])
@pytest.mark.parametrize("make", [policy.save_ops, policy.offload_ops])
def test_packets_and_overloads_are_kept(make, op):
    assert run(make(op)) == {aten.sin.default: 1, aten.cos.default: 1}


@pytest.mark.parametrize("op", [aten.mm, aten.mm.default])
def test_packets_and_overloads_are_recomputed(op):
    given = policy.recompute_ops(op) | policy.everything()
    assert run(given) == {aten.mm.default: 2}


def test_a_packet_has_all_its_overloads():
    def function(x):
        return x.clamp(-1, 1).sin() * x.clamp(torch.zeros(4), torch.ones(4)).cos()

    counts = run(policy.save_ops(aten.clamp), function, square(1))
    assert counts[aten.clamp.default] == counts[aten.clamp.Tensor] == 0
    counts = run(policy.save_ops(aten.clamp.Tensor), function, square(1))
    assert (counts[aten.clamp.default], counts[aten.clamp.Tensor]) == (1, 0)


def test_ops_expands_packets():
    expanded = policy.ops(aten.mm, aten.sin.default)
    assert aten.mm.default in expanded
    assert aten.mm.out in expanded
    assert expanded[-1] is aten.sin.default
    assert policy.ops() == []
    assert run(policy.ops(aten.mm)) == run(policy.save_ops(aten.mm))
    assert run(policy.save_ops(*policy.ops(aten.mm))) == run([aten.mm])


def test_expanded_ops_serve_compat():
    import functools

    make = functools.partial(
        recollect.compat.create_selective_checkpoint_contexts, policy.ops(aten.mm)
    )
    out = recollect.compat.checkpoint(program, *square(), use_reentrant=False, context_fn=make)
    assert out.requires_grad


MAKERS = [policy.save_ops, policy.recompute_ops, policy.offload_ops]


@pytest.mark.parametrize("make", MAKERS)
def test_without_ops_there_is_nothing_to_make(make):
    with pytest.raises(TypeError, match=rf"{make.__name__}\(\) needs at least one op"):
        make()


@pytest.mark.parametrize("bad", ["aten.mm", torch.mm, None, 3, torch.ops.aten, "mm"])
@pytest.mark.parametrize("make", [*MAKERS, policy.ops])
def test_what_is_no_op_is_refused_by_name(make, bad):
    with pytest.raises(ValueError, match="to be an OpOverload") as info:
        make(aten.mm, bad)
    assert make.__name__ in str(info.value)


@pytest.mark.parametrize("bad", [[aten.mm], (aten.mm, aten.sin)])
@pytest.mark.parametrize("make", MAKERS)
def test_a_list_in_place_of_ops_is_refused(make, bad):
    """`save_ops([a, b])` for `save_ops(a, b)`."""
    with pytest.raises((TypeError, ValueError), match="OpOverload"):
        make(bad)


# --- every n-th -----------------------------------------------------------------------------------


def chain(count):
    def function(x, w):
        for _ in range(count):
            x = (x @ w).tanh()
        return x

    return function


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_nth_call_is_kept(count, n):
    counts = run(policy.every_nth(aten.mm, n), chain(count))
    assert counts[aten.mm.default] == count - count // n


def test_counts_begin_anew_in_every_call():
    given = policy.every_nth(aten.mm, 2)
    for _ in range(3):  # three products each: an odd number
        assert run(given, chain(3))[aten.mm.default] == 2


def test_counts_begin_anew_after_an_exception():
    given = policy.every_nth(aten.mm, 2)

    def failing(x, w):
        x @ w
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        recollect.checkpoint(failing, *square(), policy=given)
    assert run(given, chain(2))[aten.mm.default] == 1


def test_all_overloads_of_a_packet_count_together():
    def function(x):
        for _ in range(2):
            x = x.clamp(-1, 1).sin()
            x = x.clamp(torch.full((4,), -1.0), torch.ones(4)).sin()
        return x

    counts = run(policy.every_nth(aten.clamp, 2), function, square(1))
    assert (counts[aten.clamp.default], counts[aten.clamp.Tensor]) == (2, 0)


def test_two_counts_are_independent():
    given = policy.every_nth(aten.mm, 2) | policy.every_nth(aten.tanh, 3)
    counts = run(given, chain(6))
    assert (counts[aten.mm.default], counts[aten.tanh.default]) == (3, 4)


def test_a_count_sees_what_an_earlier_count_left():
    """Of six: 2, 4, 6 by the first rule; of 1, 3, 5 the second by the other."""
    given = policy.every_nth(aten.mm, 2) | policy.every_nth(aten.mm, 2)
    assert run(given, chain(6))[aten.mm.default] == 2


def test_an_nth_call_that_does_not_come_is_quiet():
    assert run(policy.every_nth(aten.mm, 100), chain(3))[aten.mm.default] == 3


@pytest.mark.parametrize("bad", [0, -1, 2.0, "2", None, True])
def test_n_is_a_positive_number(bad):
    with pytest.raises(ValueError, match="n should be a positive int"):
        policy.every_nth(aten.mm, bad)


@pytest.mark.parametrize("bad", ["mm", None, torch.mm, [aten.mm]])
def test_op_is_an_op(bad):
    with pytest.raises((TypeError, ValueError), match="OpOverload") as info:
        policy.every_nth(bad, 2)
    assert "every_nth()" in str(info.value)


# --- sorts of ops ---------------------------------------------------------------------------------

PRODUCTS = {
    "mm": lambda x, w: x @ w,
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "bmm": lambda x, w: (x[None] @ w[None])[0],
    "baddbmm": lambda x, w: torch.baddbmm(x[None], x[None], w[None])[0],
    "addbmm": lambda x, w: torch.addbmm(x, x[None], w[None]),
    "mv": lambda x, w: x @ w[0],
    "addmv": lambda x, w: torch.addmv(x[0], x, w[1]),
    "linear": lambda x, w: F.linear(x, w, x[0]),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "matmul": lambda x, w: torch.matmul(x[None, None], w[None])[0, 0],
}


def views(counts):
    """Those of the ops that move no data."""
    return {op: n for op, n in counts.items() if op.is_view or op is aten._unsafe_view.default}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_cost_nothing_again(name):
    def function(x, w):
        return PRODUCTS[name](x.sin(), w).tanh()

    region = selective(policy.matmuls(), early_stop=False)
    plain = flops(function, square())
    assert flops(function, square(), region) == plain
    again_all = flops(function, square(), selective(policy.nothing(), early_stop=False))
    if name not in ("mv", "addmv", "addbmm"):  # whose FLOPs torch does not count
        assert again_all > plain
    counts = run(policy.matmuls(), function)
    assert counts == {aten.sin.default: 1, aten.tanh.default: 1} | views(counts)
    assert_right(function, square(), policy.matmuls())


def test_attention_is_kept_and_the_rest_is_not():
    def function(q, k, v):
        return F.scaled_dot_product_attention(q.sin(), k, v).cos()

    counts = run(policy.attention(), function, leaves(*[(1, 2, 4, 8)] * 3))
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert counts[kernel] == 0
    assert counts[aten.sin.default] == counts[aten.cos.default] == 1


# The block has its attention written out.
@pytest.mark.filterwarnings(r"ignore:the policy's attention\(\) matched nothing")
def test_products_and_attention_are_what_a_transformer_needs():
    block, x = seeded(Block), leaves((2, 3, 8))
    given = policy.matmuls() | policy.attention()
    assert flops(block, x, selective(given)) == flops(block, x)


def test_everything_runs_nothing_again():
    assert run(policy.everything()) == {}


def test_nothing_runs_all_again():
    counts = run(policy.nothing())
    assert counts == {aten.mm.default: 2, aten.sin.default: 1, aten.cos.default: 1}


def test_nothing_keeps_choices_unless_they_are_named_before():
    def function(x):
        values, indices = x.topk(2)
        return values.sin() * indices

    assert run(policy.nothing(), function, square(1))[aten.topk.default] == 0
    given = policy.recompute_ops(aten.topk) | policy.nothing()
    assert run(given, function, square(1))[aten.topk.default] == 1


# --- patterns -------------------------------------------------------------------------------------

PATTERNS = [policy.save_modules, policy.offload_modules, policy.save_named]


@pytest.mark.parametrize("make", PATTERNS)
def test_without_patterns_there_is_nothing_to_make(make):
    with pytest.raises(TypeError, match=rf"{make.__name__}\(\) needs at least one pattern"):
        make()


@pytest.mark.parametrize("bad", [3, None, "", ["mlp"], b"mlp", torch.nn.Linear(1, 1)])
@pytest.mark.parametrize("make", PATTERNS)
def test_what_is_no_pattern_is_refused_by_name(make, bad):
    with pytest.raises(TypeError, match=rf"{make.__name__}\(\) takes patterns"):
        make("mlp", bad)


def test_a_policy_cannot_be_changed():
    given = policy.matmuls()
    with pytest.raises(AttributeError):
        given.other = 1


def test_the_rules_of_a_policy_cannot_be_exchanged():
    given = policy.matmuls()
    with pytest.raises(AttributeError):
        given.rules = ()


@pytest.mark.parametrize("name", ["matmuls", "attention", "everything", "nothing", "save_ops"])
def test_a_maker_that_was_not_called(name):
    with pytest.raises(TypeError, match=rf"call it, policy=policy\.{name}\(\.\.\.\)"):
        recollect.checkpoint(torch.sin, torch.ones(2), policy=getattr(policy, name))


@pytest.mark.parametrize("function", [torch.mm, torch.Tensor.mm])
@pytest.mark.parametrize("make", [policy.save_ops, policy.recompute_ops, policy.offload_ops])
def test_a_function_of_torch_is_no_op(make, function):
    with pytest.raises(ValueError, match=r"torch function is not an op: use torch\.ops\.aten\.mm"):
        make(function)
    with pytest.raises(ValueError, match="is not an op"):
        policy.every_nth(function, 2)


def test_what_is_not_torchs_gets_no_advice():
    with pytest.raises(ValueError, match="Expected op in save_ops") as caught:
        policy.save_ops(print)
    assert "is no op" not in str(caught.value)
