"""A policy during one call of a region."""

import functools

import pytest
import torch
from torch import nn

import recollect
from recollect import CheckpointPolicy, policy
from recollect.policy.op_info import op_info
from recollect.policy.policy_call import PolicyCall, rulebook_of

aten = torch.ops.aten
MM, SIN = op_info(aten.mm.default), op_info(aten.sin.default)


def keeps(call, info):
    return call.decide(info, None, (), {}).keeps


# --- resolved per op ------------------------------------------------------------------------------


def test_a_policy_has_one_rulebook_with_our_defaults_and_one_without():
    given = policy.matmuls()
    assert rulebook_of(given) is rulebook_of(given) is not rulebook_of(given, protects=False)


def test_an_op_is_resolved_once():
    rulebook = rulebook_of(policy.matmuls())
    assert rulebook.for_op(MM.op) is rulebook.for_op(MM.op)


@pytest.mark.parametrize(
    ("given", "op", "keeps", "reason"),
    [
        (policy.matmuls(), MM.op, True, "matmuls()"),
        (policy.matmuls(), SIN.op, False, "no rule matches"),
        (
            policy.recompute_ops(MM.op) | policy.matmuls(),
            MM.op,
            False,
            "recompute_ops(aten.mm.default)",
        ),
        (policy.offload_ops(MM.op), MM.op, True, "offload_ops(aten.mm.default)"),
        (policy.nothing(), aten.topk.default, True, "discrete"),
        (
            policy.recompute_ops(aten.topk.default),
            aten.topk.default,
            False,
            "recompute_ops(aten.topk.default)",
        ),
    ],
    ids=str,
)
def test_the_first_rule_that_matches_decides(given, op, keeps, reason):
    found = rulebook_of(given).for_op(op)
    assert (found.ruling.keeps, found.may_be_kept, found.ruling.reason) == (keeps, keeps, reason)
    assert not found.rules


def test_without_our_defaults_nothing_is_kept_by_default():
    found = rulebook_of(policy.nothing(), protects=False).for_op(aten.topk.default)
    assert found.ruling.decision is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("op", [aten.view.default, aten.relu_.default], ids=str)
def test_views_and_writes_are_never_kept(op):
    assert not rulebook_of(policy.everything()).for_op(op).may_be_kept


def test_rules_that_have_matched_nothing():
    rulebook = rulebook_of(
        policy.save_ops(MM.op) | policy.save_ops(SIN.op) | policy.save_modules("up")
    )
    assert rulebook.unmatched == {0, 1, 2}
    rulebook.for_op(SIN.op)
    assert rulebook.unmatched == {0, 2}


# --- during a call --------------------------------------------------------------------------------


def test_calls_are_counted():
    given = policy.every_nth(aten.mm, 3)
    for _ in range(2):
        call = PolicyCall(given)
        assert [keeps(call, MM) for _ in range(6)] == [False, False, True] * 2


def test_a_function_sees_the_result_during_its_call_only():
    contexts = []

    def function(context, op, *args, **kwargs):
        contexts.append((context, context.op_output))
        return op is aten.mm.default

    call = PolicyCall(policy.attention() | function)
    assert call.decide(MM, "out", (), None).keeps
    assert not call.decide(SIN, "out", (), None).keeps
    assert [(output, context.op_output) for context, output in contexts] == [("out", None)] * 2


def test_a_module_counts_while_it_is_called():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Identity()
            self.up.forward = lambda x: seen.append(keeps(call, MM)) or x

        def forward(self, x):
            seen.append(keeps(call, MM))
            return self.up(x)

    seen = []
    model = Model()
    call = PolicyCall(policy.save_modules("up"), model)
    with call:
        model(torch.ones(1))
    assert seen == [False, True]
    assert not model.up._forward_hooks


def test_rules_about_modules_need_the_function():
    with (
        pytest.raises(ValueError, match="needs to know the region's modules"),
        PolicyCall(policy.save_modules("up")),
    ):
        pass


def test_named_tensors_are_kept_by_the_caller():
    kept = []
    call = PolicyCall(policy.save_named("q*"), print)
    call.keep = lambda tensor, name, ruling: kept.append((tensor, name, ruling.reason))
    x = torch.ones(1)
    with call:
        recollect.tag(x, "queries")
        recollect.tag(x, "keys")
    recollect.tag(x, "queries")
    assert kept == [(x, "queries", "save_named('q*')")]


def test_a_name_that_nothing_has_is_an_error():
    call = PolicyCall(policy.save_named("q"), print)
    with pytest.raises(ValueError, match="no tensor of the region was given a name like 'q'"), call:
        pass


@pytest.mark.parametrize("checks", [True, False])
def test_rules_that_match_nothing_are_reported(checks, recwarn):
    with PolicyCall(policy.save_ops(aten.mm), print, checks=checks) as _:
        pass
    found = [str(each.message) for each in recwarn]
    assert len(found) == checks
    assert all("save_ops(aten.mm) matched nothing in the region" in each for each in found)


def test_a_function_with_other_parameters_is_told_which():
    run = functools.partial(recollect.checkpoint, torch.sin, torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match=r"policy\(ctx, op, \*args, \*\*kwargs\)"):
        run(policy=lambda op: True)

    def broken(*_, **__):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        run(policy=broken)
