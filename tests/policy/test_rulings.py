"""Policies resolved per op."""

import pytest
import torch

from recollect import CheckpointPolicy, policy
from recollect.policy.rulings import rulebook_of

aten = torch.ops.aten
MM, SIN, TOPK = aten.mm.default, aten.sin.default, aten.topk.default


def test_a_policy_has_one_rulebook_with_our_defaults_and_one_without():
    given = policy.matmuls()
    assert rulebook_of(given) is rulebook_of(given) is not rulebook_of(given, protects=False)


def test_an_op_is_resolved_once():
    rulebook = rulebook_of(policy.matmuls())
    assert rulebook.for_op(MM) is rulebook.for_op(MM)


@pytest.mark.parametrize(
    ("given", "op", "keeps", "reason"),
    [
        (policy.matmuls(), MM, True, "matmuls()"),
        (policy.matmuls(), SIN, False, "no rule matches"),
        (policy.recompute_ops(MM) | policy.matmuls(), MM, False, "recompute_ops(aten.mm.default)"),
        (policy.offload_ops(MM), MM, True, "offload_ops(aten.mm.default)"),
        (policy.nothing(), TOPK, True, "discrete"),
        (policy.recompute_ops(TOPK), TOPK, False, "recompute_ops(aten.topk.default)"),
    ],
    ids=str,
)
def test_the_first_rule_that_matches_decides(given, op, keeps, reason):
    found = rulebook_of(given).for_op(op)
    assert (found.ruling.keeps, found.may_be_kept, found.ruling.reason) == (keeps, keeps, reason)
    assert not found.rules


def test_without_our_defaults_nothing_is_kept_by_default():
    found = rulebook_of(policy.nothing(), protects=False).for_op(TOPK)
    assert found.ruling.decision is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("op", [aten.view.default, aten.relu_.default], ids=str)
def test_views_and_writes_are_never_kept(op):
    assert not rulebook_of(policy.everything()).for_op(op).may_be_kept


def test_rules_that_have_matched_nothing():
    rulebook = rulebook_of(policy.save_ops(MM) | policy.save_ops(SIN) | policy.save_modules("up"))
    assert rulebook.unmatched == {0, 1, 2}
    rulebook.for_op(SIN)
    assert rulebook.unmatched == {0, 2}
