"""Policies are values: equal, hashable, printable, copyable; the first rule that matches wins."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import recollect
from recollect import CheckpointPolicy, SelectiveCheckpointContext, policy
from recollect.policy.rules import (
    NameRule,
    as_decision,
    as_policy,
    checked_ops,
    first_unmatched,
    fits,
    listed,
)
from tests.rerun.selective._helpers import Block, Ops, again, leaves, seeded, square, total

aten = torch.ops.aten


def a_function(ctx, op, *args, **kwargs):
    return op is aten.sin.default


def all_policies():
    return {
        "save_ops": policy.save_ops(aten.mm, aten.sin.default),
        "recompute_ops": policy.recompute_ops(aten.mm),
        "offload_ops": policy.offload_ops(aten.mm),
        "save_modules": policy.save_modules("mlp", "*.wo"),
        "offload_modules": policy.offload_modules("mlp"),
        "save_named": policy.save_named("q", "k"),
        "every_nth": policy.every_nth(aten.mm, 2),
        "matmuls": policy.matmuls(),
        "attention": policy.attention(),
        "nothing": policy.nothing(),
        "everything": policy.everything(),
        "combined": policy.matmuls() | policy.attention() | [aten.sin],
        "function": policy.matmuls() | a_function,
    }


NAMES = list(all_policies())


@pytest.mark.parametrize("name", NAMES)
def test_equal_policies_are_equal(name):
    first, second = all_policies()[name], all_policies()[name]
    assert first == second
    assert hash(first) == hash(second)
    assert first is not second
    assert len({first, second}) == 1


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(NAMES, 2)))
def test_different_policies_are_different(one, other):
    policies = all_policies()
    assert policies[one] != policies[other]


def test_a_policy_is_equal_to_nothing_else():
    assert policy.matmuls() != "matmuls()"
    assert policy.save_ops(aten.mm) != [aten.mm]
    assert policy.every_nth(aten.mm, 2) != policy.every_nth(aten.mm, 3)
    assert policy.matmuls() | policy.attention() != policy.attention() | policy.matmuls()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_is_equal(name, copied):
    given = all_policies()[name]
    made = copied(given)
    assert made == given
    assert hash(made) == hash(given)
    assert repr(made) == repr(given)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_with_a_higher_order_op_is_equal(copied):
    given = policy.save_ops(torch.ops.higher_order.flex_attention)
    assert copied(given) == given


def test_a_used_policy_can_be_copied():
    block = seeded(Block)
    given = policy.save_modules("mlp") | policy.matmuls()
    recollect.checkpoint(block, *leaves((2, 3, 8)), policy=given).sum().backward()
    for copied in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert copied == given
        counts = again(block, leaves((2, 3, 8)), copied, early_stop=False)
        assert counts[aten.addmm.default] == counts[aten.relu.default] == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("save_ops", "save_ops(aten.mm, aten.sin.default)"),
        ("recompute_ops", "recompute_ops(aten.mm)"),
        ("save_modules", "save_modules('mlp', '*.wo')"),
        ("save_named", "save_named('q', 'k')"),
        ("every_nth", "every_nth(aten.mm, 2)"),
        ("everything", "everything()"),
        ("combined", "matmuls() | attention() | save_ops(aten.sin)"),
        ("function", "matmuls() | policy function"),
    ],
)
def test_a_policy_is_shown_as_it_was_written(name, text):
    assert repr(all_policies()[name]) == text


# --- combining ------------------------------------------------------------------------------------


def program(x, w):
    return ((x @ w).sin() @ w).cos()


def run(given):
    counts = again(program, square(), given, early_stop=False)
    return counts[aten.mm.default], counts[aten.sin.default], counts[aten.cos.default]


SAVE, RECOMPUTE = policy.save_ops(aten.mm), policy.recompute_ops(aten.mm)

COMBINED = {
    "first wins": (SAVE | RECOMPUTE, (0, 1, 1)),
    "first wins, the other way": (RECOMPUTE | SAVE, (2, 1, 1)),
    "before everything": (RECOMPUTE | policy.everything(), (2, 0, 0)),
    "after everything": (policy.everything() | RECOMPUTE, (0, 0, 0)),
    "after nothing": (policy.nothing() | policy.everything(), (2, 1, 1)),
    "list on the right": (policy.save_ops(aten.sin) | [aten.mm], (0, 0, 1)),
    "list on the left": ([aten.mm] | policy.save_ops(aten.sin), (0, 0, 1)),
    "tuple": (RECOMPUTE | (aten.mm, aten.sin), (2, 0, 1)),
    "set": ({aten.sin.default} | SAVE, (0, 0, 1)),
    "function on the right": (SAVE | a_function, (0, 0, 1)),
    "function on the left": (a_function | SAVE, (2, 0, 1)),
    "three": (RECOMPUTE | policy.save_ops(aten.cos) | policy.everything(), (2, 0, 0)),
    "nth then all": (policy.every_nth(aten.mm, 2) | SAVE, (0, 1, 1)),
    "nth then none": (policy.every_nth(aten.mm, 2) | RECOMPUTE, (1, 1, 1)),
    "none then nth": (RECOMPUTE | policy.every_nth(aten.mm, 2), (2, 1, 1)),
    "offload": (policy.offload_ops(aten.mm) | RECOMPUTE, (0, 1, 1)),
    "overload before packet": (policy.recompute_ops(aten.mm.default) | SAVE, (2, 1, 1)),
    "packet before overload": (SAVE | policy.recompute_ops(aten.mm.default), (0, 1, 1)),
}


# That an earlier rule leaves a later one nothing to do is said as well.
@pytest.mark.filterwarnings("ignore:the policy's .* matched nothing")
@pytest.mark.parametrize("name", COMBINED)
def test_the_first_rule_that_matches_wins(name):
    given, expected = COMBINED[name]
    assert run(given) == expected


def test_combining_makes_a_new_policy():
    first, second = policy.matmuls(), policy.attention()
    both = first | second
    assert first == policy.matmuls()
    assert second == policy.attention()
    assert (first | second) | SAVE == first | (second | SAVE)
    assert both != first


def test_empty_lists_add_nothing():
    assert run(policy.save_ops(aten.mm) | []) == (0, 1, 1)
    assert run([]) == (2, 1, 1)


@pytest.mark.parametrize("bad", [3, "mm", None, aten, int, nn.Linear])
def test_what_is_no_policy_cannot_be_combined(bad):
    with pytest.raises(TypeError, match=r"the right side of \|"):
        policy.matmuls() | bad
    with pytest.raises(TypeError, match=r"the left side of \|"):
        bad | policy.matmuls()


@pytest.mark.parametrize("bad", [[torch.mm], ["aten.mm"], [None], [[aten.mm]]])
def test_a_list_holds_ops(bad):
    with pytest.raises(ValueError, match="to be an OpOverload"):
        policy.matmuls() | bad


def test_what_is_given_as_a_policy_is_named_in_the_error():
    with pytest.raises(TypeError, match="policy must be either a function or a list"):
        recollect.checkpoint(torch.sin, *square(1), policy=7)
    with pytest.raises(TypeError, match="policy"):
        recollect.checkpointed(torch.sin, policy="matmuls")


def test_as_policy_takes_what_a_user_may_write():
    assert as_policy(SAVE, "policy") is SAVE
    assert as_policy([aten.mm], "policy") == SAVE
    assert as_policy((aten.mm,), "policy") == SAVE
    assert as_policy(a_function, "policy") == as_policy(a_function, "policy")


def test_a_function_is_asked_only_for_what_is_left():
    asked = []

    def function(ctx, op, *args, **kwargs):
        asked.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    recollect.checkpoint(program, *square(), policy=SAVE | function)
    assert asked == [aten.sin.default, aten.cos.default]


# --- in a module ----------------------------------------------------------------------------------


# Not every policy finds something in this model.
@pytest.mark.filterwarnings("ignore:the policy's .* matched nothing")
@pytest.mark.parametrize("name", [n for n in NAMES if n != "save_named"])
def test_a_wrapped_module_keeps_its_policy_when_copied(name):
    given = all_policies()[name]
    plain = seeded(Block)
    block = recollect.checkpointed(seeded(Block), policy=given)
    assert list(block.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in block.named_parameters()] == [n for n, _ in plain.named_parameters()]
    pickled = pickle.loads(pickle.dumps(block))
    for copied in (copy.deepcopy(block), pickled):
        assert list(copied.state_dict()) == list(plain.state_dict())
        assert ops_of(copied) == ops_of(block)
        copied.load_state_dict(plain.state_dict())
        recollect.unwrap(copied)
        assert type(copied) is Block


def ops_of(block):
    loss = total(block(*leaves((2, 3, 8))))
    with Ops() as ops:
        loss.backward()
    block.zero_grad()
    return ops.count


# --- loud -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: policy.save_ops(aten.tanh),
        lambda: policy.recompute_ops(aten.tanh),
        lambda: policy.offload_ops(aten.tanh),
        lambda: policy.every_nth(aten.tanh, 2),
        policy.attention,
    ],
)
def test_a_rule_that_matches_nothing_warns_once_and_lists_the_ops(make):
    given = make() | SAVE
    with pytest.warns(UserWarning, match="matched nothing in the region") as record:
        recollect.checkpoint(program, *square(), policy=given)
    message = str(record[0].message)
    assert repr(make()) in message
    assert "aten.mm" in message
    assert "aten.cos" in message
    recollect.checkpoint(program, *square(), policy=given)  # and not again


def test_a_warning_points_to_the_call():
    with pytest.warns(UserWarning, match="matched nothing in the region") as record:
        recollect.checkpoint(program, *square(), policy=policy.save_ops(aten.tanh))
    assert record[0].filename == __file__


def test_rules_that_match_do_not_warn():
    for given in (SAVE, policy.matmuls(), policy.everything(), policy.nothing()):
        recollect.checkpoint(program, *square(), policy=given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: policy.recompute_ops(aten.mm) | policy.save_ops(aten.mm),
        lambda: policy.save_ops(aten.mm) | policy.matmuls(),
        lambda: policy.everything() | policy.save_ops(aten.mm),
    ],
)
def test_a_rule_whose_ops_ran_is_not_said_to_match_nothing(make):
    recollect.checkpoint(program, *square(), policy=make())


def test_a_rule_that_matches_in_another_region_does_not_warn():
    given = policy.save_ops(aten.mm, aten.tanh)
    recollect.checkpoint(program, *square(), policy=given)
    recollect.checkpoint(torch.tanh, *square(1), policy=given)


# --- decisions ------------------------------------------------------------------------------------


def test_members_have_the_names_and_values_of_torch():
    ours = {member.name: member.value for member in CheckpointPolicy}
    assert ours == {member.name: member.value for member in torch_checkpoint.CheckpointPolicy}


@pytest.mark.parametrize("member", CheckpointPolicy)
def test_both_enums_are_understood(member):
    assert as_decision(member, aten.mm.default) is member
    assert as_decision(torch_checkpoint.CheckpointPolicy[member.name], aten.mm.default) is member


@pytest.mark.parametrize(
    ("value", "decision"),
    [(True, CheckpointPolicy.MUST_SAVE), (False, CheckpointPolicy.PREFER_RECOMPUTE)],
)
def test_bools_are_short_for_decisions(value, decision):
    assert as_decision(value, aten.mm.default) is decision


@pytest.mark.parametrize("value", [None, 0, 1, "MUST_SAVE", CheckpointPolicy])
def test_anything_else_is_refused_with_the_name_of_the_op(value):
    with pytest.raises(ValueError, match=r"returned .* for aten\.mm\.default"):
        as_decision(value, aten.mm.default)


def test_packets_are_expanded_in_place():
    expanded = checked_ops([aten.sin.default, aten.clamp, aten.mm.default], "policy")
    clamps = [getattr(aten.clamp, name) for name in aten.clamp.overloads()]
    assert aten.clamp.Tensor in clamps
    assert expanded == [aten.sin.default, *clamps, aten.mm.default]


def test_ops_are_overloads_or_higher_order():
    given = [aten.mm.default, torch.ops.higher_order.cond]
    assert checked_ops(given, "policy", packets=False) == given
    with pytest.raises(ValueError, match=r"got: aten\.mm of type.*torch\.ops\.aten\.mm\.default"):
        checked_ops([aten.mm.default, aten.mm], "policy", packets=False)


def test_the_context_is_made_as_torch_makes_it():
    context = SelectiveCheckpointContext(is_recompute=True, op_output=3)
    assert (context.is_recompute, context.op_output) == (True, 3)
    with pytest.raises(TypeError):
        SelectiveCheckpointContext(True)


# --- patterns -------------------------------------------------------------------------------------


def named(*patterns):
    return NameRule("", CheckpointPolicy.MUST_SAVE, patterns)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("attn.wo", "attn.wo"),
        ("layers.3.attn.wo", "attn.wo"),
        ("layers.3.attn.wo", "wo"),
        ("layers.3.attn.wo", "*.attn.wo"),
        ("attn.wo", "*.attn.wo"),
        ("wo", "*.wo"),
        ("layers.3.attn.wo", "layers.*.attn.wo"),
        ("model.layers.3.attn.wo", "layers.*.attn.wo"),
        ("layers.3.attn.wo", "layers.[0-3].attn.wo"),
        ("layers.3.attn.wo", "layers.?.*"),
        ("layers.3.attn.wo", "*"),
        ("", "*"),
        ("mlp.up", "mlp.*"),
        ("mlp.a.b.c", "mlp.*"),
    ],
)
def test_a_name_or_its_end_fits(name, pattern):
    assert fits(name, pattern)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("attn.wo", "wo.attn"),
        ("attn.wo", "o"),
        ("attn.wo", "attn"),
        ("attn.wo", "attn.w"),
        ("attn.wo", "attn.wo.*"),
        ("attn.wo", "Attn.wo"),
        ("xattn.wo", "attn.wo"),
        ("layers.10.attn", "layers.?.attn"),
        ("layers.4.attn.wo", "layers.[0-3].attn.wo"),
        ("", "attn"),
        ("wo", "*.attn.wo"),
        ("", "*.wo"),
    ],
)
def test_other_names_do_not(name, pattern):
    assert not fits(name, pattern)


def test_one_of_several_patterns_may_fit():
    assert named("up", "wo").covers("attn.wo")
    assert not named("up", "down").covers("attn.wo")
    assert not named().covers("attn.wo")


def test_the_first_pattern_that_fits_no_name():
    assert first_unmatched(("wo", "up", "down"), ("attn.wo", "attn.wq")) == "up"
    assert first_unmatched(("wo", "w?"), ("attn.wo", "attn.wq")) is None
    assert first_unmatched(("wo",), ()) == "wo"


def test_names_are_listed_with_the_most_similar_first():
    names = ["norm", "attn.wq", "attn.wo", "mlp.up"]
    assert listed(names, "mlp.upp").startswith("mlp.up, ")
    assert set(listed(names, "mlp.upp").split(", ")) == set(names)
    assert listed(names, "*.attn.wo").startswith("attn.wo")


def test_names_are_listed_once_and_in_order():
    assert listed(["b", "a", "b", ""], "zzz") == "a, b"


def test_there_may_be_none():
    assert listed([], "x") == listed([""], "x") == "none"


def test_a_long_list_is_cut():
    text = listed([f"layer{n:03}" for n in range(100)], "other")
    assert text.endswith("layer039 and 60 more")
    assert "layer040" not in text


def test_the_name_of_an_op_is_said_as_an_op():
    for name in ("aten.mm", "mm", "aten::mm", "torch.ops.aten.mm"):
        with pytest.raises(ValueError, match=r"use torch\.ops\.aten\.mm instead"):
            policy.save_ops(name)
